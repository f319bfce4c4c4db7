"""A kernel of efficient attention in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, key_axis=-2, column_term=True):
    """Forward and backward; another ``key_axis`` is wrong, and so is a softmax backward without its column term."""

    def softmax(x, axis):
        x = np.exp(x - x.max(axis, keepdims=True))
        return x / x.sum(axis, keepdims=True)

    def steps(q, k, v, key_lengths):
        real = np.ones((k.shape[0], 1, k.shape[-2], 1), bool)
        if key_lengths is not None:
            real = np.arange(k.shape[-2])[:, None] < np.reshape(key_lengths, (-1, 1, 1, 1))
        values = np.where(real, v, 0)
        rho_k = np.where(real, softmax(np.where(real, k, -1e30).astype(k.dtype), key_axis), 0)
        return softmax(q, -1), rho_k, values

    def forward(q, k, v, *, key_lengths=None):
        rho_q, rho_k, values = steps(q, k, v, key_lengths)
        return rho_q @ (rho_k.swapaxes(-1, -2) @ values)

    def backward(d_output, q, k, v, *, key_lengths=None):
        rho_q, rho_k, values = steps(q, k, v, key_lengths)
        d_context = rho_q.swapaxes(-1, -2) @ d_output
        d_q, d_k = d_output @ (rho_k.swapaxes(-1, -2) @ values).swapaxes(-1, -2), values @ d_context.swapaxes(-1, -2)
        column = (rho_k * d_k).sum(key_axis, keepdims=True) if column_term else 0
        return {
            "q": rho_q * (d_q - (rho_q * d_q).sum(-1, keepdims=True)),
            "k": rho_k * (d_k - column),
            "v": rho_k @ d_context,
        }

    return forward, backward
