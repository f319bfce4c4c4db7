"""Pieces that linear attention cuts a sequence into, and the products inside one."""

from typing import Any

from refattn.arrays import namespace
from refattn.contraction import einsum

__all__ = ["lower_products", "piece", "pieces_of"]


def piece(form: str, causal: bool, length: int, chunk: int) -> int:
    """Positions of a piece."""
    if form == "auto":
        form = "chunked" if causal else "parallel"
    return {"parallel": max(1, length), "recurrent": 1, "chunked": chunk}[form]


def pieces_of(length: int, size: int) -> list[slice]:
    return [slice(s, min(s + size, length)) for s in range(0, length, size)]


def lower_products(left: Any, right: Any) -> tuple[Any, Any]:
    """tril(left right^T), and the lower triangle (bool)."""
    xp = namespace(left)
    n = left.shape[-2]
    visible = xp.arange(n)[:, None] >= xp.arange(n)[None, :]
    products = einsum("...qd,...kd->...qk", left, right)
    return xp.where(visible, products, xp.zeros_like(products)), visible
