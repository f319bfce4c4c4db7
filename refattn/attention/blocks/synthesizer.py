"""Which parts a Synthesizer call has, by the arrays that it is given, and their sizes."""

from typing import Any

from refattn.arrays import require_array, require_axes

__all__ = ["AXES", "PARTS", "read_parts"]

PARTS = {
    "dense": ("w_1", "w_2"),
    "dense_factors": ("w_1", "w_a", "w_b"),
    "random": ("random",),
    "random_factors": ("random_1", "random_2"),
    "others": ("other_logits",),
}
"""The parts of a mixture in their order, and the arrays that each needs."""

AXES = {
    "w_1": "h m f", "b_1": "h f", "w_2": "h f k", "b_2": "h k", "w_a": "h f n", "b_a": "h n", "w_b": "h f p", "b_b": "h p",
    "random": "h q k", "random_1": "h q r", "random_2": "h k r", "other_logits": "... h q k",
}  # fmt: skip
NEEDS = {"b_1": "w_1", "b_2": "w_2", "b_a": "w_a", "b_b": "w_b"}


def read_parts(x: Any, v: Any, arrays: dict[str, Any], mixture: Any) -> tuple[list[str], dict[str, int]]:
    """The parts that are given, and all sizes."""
    if v is None:
        raise TypeError("synthesizer_attention: the argument 'v' is missing")
    hidden_is_used = any(n in arrays for n in ("w_2", "w_a", "w_b"))
    parts = [name for name, needed in PARTS.items() if any(n in arrays for n in needed if n != "w_1")]
    for name in parts:
        missing = [n for n in PARTS[name] if n not in arrays]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing: the part {name!r} needs {', '.join(PARTS[name])}")
    for name, owner in NEEDS.items():
        if name in arrays and owner not in arrays:
            raise ValueError(f"{name} is given without {owner}")
    if "w_1" in arrays and parts and not hidden_is_used:
        raise ValueError("w_1 is given without w_2, or w_a and w_b")
    if not parts:
        raise ValueError(
            "no logits: give w_1 and w_2, w_1, w_a and w_b, random, random_1 and random_2, or other_logits"
        )
    if hidden_is_used and x is None:
        raise ValueError("w_1 is given, but x is not: the dense parts are made from the tokens")
    sizes = require_axes(v=(v, "... h k e"), **({} if x is None else {"x": (x, "... q m")}))
    sizes = require_axes(sizes, **{n: (a, AXES[n]) for n, a in arrays.items()})
    if "w_a" in arrays and sizes["n"] * sizes["p"] != sizes["k"]:
        raise ValueError(
            f"w_a has shape {tuple(arrays['w_a'].shape)} and w_b {tuple(arrays['w_b'].shape)}: expected factors n p = {sizes['k']} keys"
        )
    if mixture is not None:
        require_array("mixture", mixture)
    if mixture is None:
        if len(parts) > 1:
            raise ValueError(f"mixture is missing: expected {len(parts)} numbers for the parts {', '.join(parts)}")
    elif tuple(mixture.shape) not in ((len(parts),), (sizes["h"], len(parts))):
        raise ValueError(
            f"mixture has shape {tuple(mixture.shape)}: expected ({len(parts)},) or ({sizes['h']}, {len(parts)}),"
            f" a number for each of {', '.join(parts)}"
        )
    return parts, sizes
