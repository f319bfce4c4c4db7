"""A kernel of Linformer in NumPy alone, and ways to break it."""

import numpy as np


def kernels(*, shared_table=False, row_term_missing=False):
    """Forward and backward; ``shared_table``: values go through e_k; ``row_term_missing``: that of dS."""

    def steps(q, k, v, e_k, e_v, scale):
        scale = q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
        table = e_k if shared_table else e_v
        rows_k, rows_v = np.einsum("jn,bhjd->bhnd", e_k, k), np.einsum("jn,bhje->bhne", table, v)
        s = q @ rows_k.swapaxes(-1, -2)
        p = np.exp(scale * s - (scale * s).max(-1, keepdims=True))
        return scale, s, p / p.sum(-1, keepdims=True), rows_k, rows_v, table

    def forward(q, k, v, *, e_k, e_v, scale=None):
        _, _, p, _, rows_v, _ = steps(q, k, v, e_k, e_v, scale)
        return p @ rows_v

    def backward(d_output, q, k, v, *, e_k, e_v, scale=None):
        factor, s, p, rows_k, rows_v, table = steps(q, k, v, e_k, e_v, scale)
        d_p = d_output @ rows_v.swapaxes(-1, -2)
        d_s = p * (d_p if row_term_missing else d_p - (p * d_p).sum(-1, keepdims=True))
        d_rows_k, d_rows_v = factor * d_s.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_output
        return {
            "q": factor * d_s @ rows_k,
            "k": np.einsum("jn,bhnd->bhjd", e_k, d_rows_k),
            "v": np.einsum("jn,bhne->bhje", table, d_rows_v),
            "e_k": np.einsum("bhjd,bhnd->jn", k, d_rows_k),
            "e_v": np.einsum("bhje,bhne->jn", v, d_rows_v),
            "scale": (d_s * s).sum(),
        }

    return forward, backward
