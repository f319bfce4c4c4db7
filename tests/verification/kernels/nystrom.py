"""A kernel of Nystrom attention in NumPy alone, and ways to break it."""

import numpy as np


def turned(x):
    return x.swapaxes(-1, -2)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_back(p, d):
    return p * (d - (p * d).sum(-1, keepdims=True))


def kernels(*, zeros_behind=False, scale_constant=False, batch_scale=False):
    """Forward and backward; each flag breaks one step."""

    def padded(x, n):
        missing = -x.shape[-2] % n
        ends = (0, missing) if zeros_behind else (missing, 0)
        return np.pad(x, [(0, 0), (0, 0), ends, (0, 0)])

    def cut(x, length):
        return x[..., :length, :] if zeros_behind else x[..., x.shape[-2] - length :, :]

    def means(x, n):
        return x.reshape(*x.shape[:2], n, -1, x.shape[-1]).mean(-2)

    def spread(d, length):
        size = length // d.shape[-2]
        return np.repeat(d, size, axis=-2) / d.dtype.type(size)

    def start(a, pinv_scale):
        """Where the largest column sums stand (each matrix or the batch), and the sums."""
        sums = a.sum(-2, keepdims=True)
        largest = sums.max(keepdims=True) if batch_scale or pinv_scale == "batch" else sums.max(-1, keepdims=True)
        return largest, sums == largest

    def run(q, k, v, n, iterations, pinv_scale):
        side = q.dtype.type(q.shape[-1] ** -0.25)
        q, k, v = side * padded(q, n), side * padded(k, n), padded(v, n)
        a = softmax(means(q, n) @ turned(means(k, n)))
        zs = [turned(a) / start(a, pinv_scale)[0]]
        unit = np.eye(n, dtype=q.dtype)
        for _ in range(iterations):
            y = a @ zs[-1]
            zs.append(zs[-1] @ (13 * unit - y @ (15 * unit - y @ (7 * unit - y))) / 4)
        return q, k, v, softmax(q @ turned(means(k, n))), a, softmax(means(q, n) @ turned(k)), zs

    def forward(q, k, v, *, landmarks, iterations=6, pinv_scale="matrix"):
        _, _, long, left, _, right, zs = run(q, k, v, landmarks, iterations, pinv_scale)
        return cut(left @ (zs[-1] @ (right @ long)), q.shape[-2])

    def backward(d_output, q, k, v, *, landmarks, iterations=6, pinv_scale="matrix"):
        n, side = landmarks, q.dtype.type(q.shape[-1] ** -0.25)
        lengths = q.shape[-2], k.shape[-2]
        q, k, v, left, a, right, zs = run(q, k, v, n, iterations, pinv_scale)
        d_output = padded(d_output, n)
        summed = right @ v
        d_left, d_mixed = d_output @ turned(zs[-1] @ summed), turned(left) @ d_output
        d_z, d_summed = d_mixed @ turned(summed), turned(zs[-1]) @ d_mixed
        d_a, unit = np.zeros_like(a), np.eye(n, dtype=q.dtype)
        for z in zs[-2::-1]:
            y = a @ z
            second = 15 * unit - y @ (7 * unit - y)
            d_3 = turned(z) @ d_z / 4
            d_2 = -turned(y) @ d_3
            d_y = turned(y) @ d_2 - d_3 @ turned(second) - d_2 @ turned(7 * unit - y)
            d_z = d_z @ turned(13 * unit - y @ second) / 4 + turned(a) @ d_y
            d_a = d_a + d_y @ turned(z)
        largest, where = start(a, pinv_scale)
        d_a = d_a + turned(d_z) / largest
        if not scale_constant:
            each = (turned(d_z) * a).sum((-1, -2), keepdims=True)
            each = each.sum(keepdims=True) if batch_scale or pinv_scale == "batch" else each
            d_a = d_a - where * each / largest**2
        s_left, s_a = softmax_back(left, d_left), softmax_back(a, d_a)
        s_right = softmax_back(right, d_summed @ turned(v))
        d_q = s_left @ means(k, n) + spread(s_a @ means(k, n) + s_right @ k, q.shape[-2])
        d_k = turned(s_right) @ means(q, n) + spread(turned(s_a) @ means(q, n) + turned(s_left) @ q, k.shape[-2])
        return {
            "q": side * cut(d_q, lengths[0]),
            "k": side * cut(d_k, lengths[1]),
            "v": cut(turned(right) @ d_summed, lengths[1]),
        }

    return forward, backward
