"""Measure refattn.scaled_dot_product_attention against 50-digit arithmetic and print a table in Markdown.

usage: python docs/accuracy.py > docs/accuracy_table.md
"""

from collections.abc import Iterator, Mapping
from typing import Any

import mpmath
import numpy as np

import refattn as ra

mpmath.mp.dps = 50
STEP = mpmath.mpf(10) ** -20  # a central difference is then exact to about 40 digits
DIFFERENTIABLE = ("q", "k", "v", "bias", "softcap", "scale", "alibi_slopes", "sinks")
ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}


def settings(rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and arguments, float64; arrays are (head, length, channel)."""
    plain = {name: rng.standard_normal(shape) for name, shape in (("q", (2, 3, 4)), ("k", (2, 5, 4)), ("v", (2, 5, 3)))}
    yield "plain", plain
    yield (
        "everything",
        {
            **{
                name: rng.standard_normal(shape)
                for name, shape in (("q", (4, 3, 4)), ("k", (2, 5, 4)), ("v", (2, 5, 3)))
            },
            "bias": rng.standard_normal((4, 3, 5)),
            "softcap": 2.5,
            "scale": 0.75,
            "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625]),
            "sinks": rng.standard_normal(4),
            "causal": True,
            "align": "lower_right",
        },
    )
    yield "large logits", {name: 8 * x for name, x in plain.items()}


def exact(x: Any) -> Any:
    """An object array of mpf, or one mpf."""
    return np.vectorize(mpmath.mpf, otypes=[object])(np.asarray(x, dtype=np.float64))


def truth(arguments: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Output (h, q, e) and lse (h, q) as mpf, by the definition."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    (heads, queries, channels), (groups, keys, _) = q.shape, k.shape
    scale = arguments.get("scale", 1 / mpmath.sqrt(channels))
    offset = keys - queries
    output = np.empty((heads, queries, v.shape[-1]), dtype=object)
    lse = np.empty((heads, queries), dtype=object)
    for h in range(heads):
        g = h // (heads // groups)
        for i in range(queries):
            exponentials = []
            for j in range(keys):
                logit = scale * mpmath.fdot(q[h, i], k[g, j])
                if "softcap" in arguments:
                    logit = arguments["softcap"] * mpmath.tanh(logit / arguments["softcap"])
                if "bias" in arguments:
                    logit += arguments["bias"][h, i, j]
                if "alibi_slopes" in arguments:
                    logit -= arguments["alibi_slopes"][h] * abs(i + offset - j)
                hidden = arguments.get("causal", False) and j > i + offset
                exponentials.append(mpmath.mpf(0) if hidden else mpmath.exp(logit))
            total = mpmath.fsum(exponentials)
            if "sinks" in arguments:
                total += mpmath.exp(arguments["sinks"][h])
            lse[h, i] = mpmath.log(total)
            for e in range(v.shape[-1]):
                output[h, i, e] = mpmath.fdot(exponentials, v[g, :, e]) / total
    return output, lse


def true_gradients(arguments: dict[str, Any], d_output: np.ndarray, d_lse: np.ndarray) -> dict[str, np.ndarray]:
    def loss(changed: dict[str, Any]) -> Any:
        output, lse = truth(changed)
        return (output * d_output).sum() + (lse * d_lse).sum()

    gradients = {}
    for name in DIFFERENTIABLE:
        if name not in arguments:
            continue
        value = np.asarray(arguments[name], dtype=object)
        gradient = np.empty(value.shape, dtype=object)
        for index in np.ndindex(value.shape):
            sides = []
            for sign in (1, -1):
                moved = value.copy()
                moved[index] += sign * STEP
                sides.append(loss({**arguments, name: moved if value.shape else moved[()]}))
            gradient[index] = (sides[0] - sides[1]) / (2 * STEP)
        gradients[name] = gradient
    return gradients


def errors(found: Any, true: np.ndarray, dtype: str) -> tuple[float, float]:
    """Largest error in ulps of each element, and over the largest element in unit roundoffs."""
    difference, size = (np.asarray(abs(x)).astype(np.float64) for x in (exact(found) - true, true))
    spacing = np.spacing(size.astype(dtype)).astype(np.float64)
    return float((difference / spacing).max()), float(difference.max() / size.max() / ROUNDOFF[dtype])


def measured(dtype: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Errors by setting and quantity."""
    rng = np.random.default_rng(0)
    table = {}
    for setting, drawn in settings(rng):
        arguments = {name: x.astype(dtype) if isinstance(x, np.ndarray) else x for name, x in drawn.items()}
        result, pullback = ra.scaled_dot_product_attention.vjp(**arguments)
        cotangents = {
            name: rng.standard_normal(getattr(result, name).shape).astype(dtype) for name in ("output", "lse")
        }
        found = {"output": result.output, "lse": result.lse, **pullback(**cotangents)}

        precise = {name: x if isinstance(x, bool | str) else exact(x)[()] for name, x in arguments.items()}
        output, lse = truth(precise)
        gradients = true_gradients(precise, exact(cotangents["output"]), exact(cotangents["lse"]))
        for name, true in {"output": output, "lse": lse, **gradients}.items():
            quantity = name if name in cotangents else f"gradient of {name}"
            table[setting, quantity] = errors(found[name], true, dtype)
    return table


def main() -> None:
    tables = {dtype: measured(dtype) for dtype in ROUNDOFF}
    print("| setting | quantity |", " | ".join(f"{dtype}: ulp | relative to max" for dtype in tables), "|")
    print("|---" * (2 + 2 * len(tables)) + "|")
    for setting, quantity in tables["float64"]:
        columns = (f"{ulp:.2g} | {relative:.2g}" for ulp, relative in (t[setting, quantity] for t in tables.values()))
        print(f"| {setting} | {quantity} |", " | ".join(columns), "|")


if __name__ == "__main__":
    main()
