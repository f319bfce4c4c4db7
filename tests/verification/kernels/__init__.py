"""Independent kernels of every mechanism, small and in NumPy alone: right ones, and ways to break them.

A maker gives (forward, backward); its flags break a step each.  ``wrong`` lists what is broken and the class that names it.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from verification.kernels import (
    adaptive_span,
    bigbird,
    dense,
    efficient,
    etc,
    heads,
    linear_routing,
    linformer,
    longformer,
    lsh,
    nystrom,
    performer,
    recurrent,
    sinkhorn,
    sparse,
    synthesizer,
)  # fmt: skip

__all__ = ["MAKERS", "Kernel", "kernel"]

SHARED = ("mask", "bias", "scale", "causal")

MAKERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "adaptive_span_attention": (adaptive_span.kernels, ()),
    "bigbird_attention": (bigbird.kernels, ()),
    "compressive_attention": (recurrent.compressive, ()),
    "efficient_attention": (efficient.kernels, ()),
    "etc_attention": (etc.kernels, ()),
    "linear_attention": (linear_routing.linear, ()),
    "linformer_attention": (linformer.kernels, ()),
    "local_attention": (sparse.local, (*sparse.OWN["local_attention"], *SHARED)),
    "longformer_attention": (longformer.kernels, ()),
    "lsh_attention": (lsh.lsh, ()),
    "multi_head_attention": (heads.multi_head, heads.MULTI_HEAD),
    "nystrom_attention": (nystrom.kernels, ()),
    "performer_attention": (performer.kernels, ()),
    "routing_attention": (linear_routing.routing, ()),
    "scaled_dot_product_attention": (dense.attention, ()),
    "sinkhorn_attention": (sinkhorn.kernels, ()),
    "sparse_transformer_attention": (sparse.sparse, (*sparse.OWN["sparse_transformer_attention"], *SHARED)),
    "synthesizer_attention": (
        synthesizer.kernels,
        ("w_1", "b_1", "w_2", "b_2", "w_a", "b_a", "w_b", "b_b", "random", "random_1", "random_2", "other_logits", "mixture",
         "causal"),
    ),
    "talking_heads_attention": (heads.talking, heads.TALKING),
    "topk_attention": (sparse.topk, (*sparse.OWN["topk_attention"], *SHARED)),
    "transformer_xl_attention": (recurrent.transformer_xl, ()),
}  # fmt: skip
"""Maker of each mechanism's kernel, and the options that it takes where its signature does not say."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Forward, backward, the options that both take, and the results whose cotangents the backward takes."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    options: tuple[str, ...]
    cotangents: tuple[str, ...]

    def accepts(self, options: tuple[str, ...]) -> bool:
        return set(options) <= set(self.options)


def kernel(mechanism: str, **broken: Any) -> Kernel:
    """The kernel of a mechanism; the right one without flags."""
    make, options = MAKERS[mechanism]
    forward, backward = make(**broken)
    named = tuple(n for n, p in inspect.signature(forward).parameters.items() if p.kind is p.KEYWORD_ONLY)
    taken = inspect.signature(backward).parameters
    others = tuple(n.removeprefix("d_") for n in taken if n.startswith("d_"))
    return Kernel(forward, backward, options or named, tuple(dict.fromkeys(("output", *others))))
