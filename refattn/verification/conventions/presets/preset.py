"""What a preset is, and what the call translations share."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import array_api_compat

from refattn.verification.conventions.record import Conventions

__all__ = ["LSE_SWITCHES", "Preset", "at_least", "attention_mask", "same_dtype"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """Conventions and call translation of one library's signature.

    ``names`` maps the options of refattn that it can express to its parameters; ``translate(options, arrays, has)`` gives the keyword
    arguments for arrays of the framework (``has``: the candidate's parameters with their defaults) and raises
    Unsupported for combinations.  ``signs`` are groups of parameter names, any of which, complete, tells the signature;
    ``results`` names the fields of a returned tuple; ``batched=False``: the signature has no batch axis.  ``mechanisms`` are
    those that have this signature; ``arrays`` its names of the arrays by position, which ``by_name`` hands over by name;
    ``packed``: heads and channels are one axis;
    ``requires``: options, by mechanism, without which there is no call.
    """

    name: str
    says: str
    conventions: Conventions
    framework: str
    layout: str
    parameters: tuple[str, ...]
    signs: tuple[frozenset[str], ...]
    names: Mapping[str, str]
    translate: Callable[[dict[str, Any], dict[str, Any], Mapping[str, Any]], dict[str, Any]]
    results: tuple[str | None, ...] = ("output", "lse")
    output_layout: str | None = None
    lse_layout: str = "bhq"
    batched: bool = True
    mechanisms: tuple[str, ...] = ("scaled_dot_product_attention",)
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_name: bool = False
    packed: bool = False
    requires: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def speaks(self, parameters: Iterable[str]) -> bool:
        """Whether a signature has a name that is this library's and not refattn's."""
        return bool(set(parameters) & set(self.parameters) - {"q", "k", "v", "query", "key", "value"} - set(self.names))


LSE_SWITCHES = ("return_lse", "return_softmax_lse", "return_attn_probs", "return_residual")
"""Parameters of known signatures that ask for the lse; a backward has no use for them."""


def at_least(x: Any, ndim: int) -> Any:
    xp = array_api_compat.array_namespace(x)
    return xp.reshape(x, (1,) * (ndim - x.ndim) + tuple(x.shape)) if x.ndim < ndim else x


def same_dtype(x: Any, like: Any) -> Any:
    xp = array_api_compat.array_namespace(x)
    return x if x.dtype == like.dtype else xp.astype(x, like.dtype)


def attention_mask(
    options: Mapping[str, Any], arrays: Mapping[str, Any], *, ndim: int, hidden: float | None = -math.inf
) -> Any:
    """Mask and bias as one argument; a bool mask alone stays bool.  ``hidden=None``: additive, by the lowest number."""
    mask, bias = options.get("mask"), options.get("bias")
    first = next(iter(arrays.values()))
    xp = array_api_compat.array_namespace(first)
    if mask is None:
        return None if bias is None else at_least(same_dtype(bias, first), ndim)
    if bias is None:
        if hidden is not None:
            return at_least(mask, ndim)
        bias = xp.zeros((1,), dtype=first.dtype)
    low = -float(xp.finfo(first.dtype).max) if hidden is None else hidden
    return at_least(xp.where(mask, same_dtype(bias, first), xp.asarray(low, dtype=first.dtype)), ndim)
