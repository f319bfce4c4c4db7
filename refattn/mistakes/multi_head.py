"""The ways people get multi-head attention wrong, each as the numbers that the mistake gives.

:class:`Layer` writes the layer down once more in float64 NumPy, forward and backward, in steps that a mistake replaces; the
softmax in it is that of :class:`~refattn.definitions.dense_steps.Steps`.  Mistakes of softmax attention in general come from
``dense_mistakes``, with the projections of the layer around them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.contraction import einsum
from refattn.definitions.dense_steps import Steps
from refattn.definitions.multi_head import with_extra_keys
from refattn.mistakes.dense_old import dense_mutations
from refattn.records import Mutation, Result

__all__ = ["Layer", "multi_head_mutations"]

Arguments = dict[str, Any]
_OWN = {"x_q", "x_k", "x_v", "extra_key", "extra_value", "zero_attention"}
_OWN |= {f"{kind}_{n}" for kind in "wb" for n in "qkvo"}


class Layer:
    """Multi-head attention on float64 arrays, in steps."""

    def __init__(self, arguments: Arguments) -> None:
        self.a = arguments
        self.shared = {n: x for n, x in arguments.items() if n not in _OWN}
        self.roles = {"q": "x_q", "k": "x_q" if arguments.get("x_k") is None else "x_k"}
        self.roles["v"] = self.roles["k"] if arguments.get("x_v") is None else "x_v"

    def get(self, name: str) -> Any:
        x = self.a.get(name)
        return None if x is None else np.asarray(x, dtype=np.float64)

    # ------------------------------------------------------------ steps that mistakes replace

    def tokens(self, n: str) -> np.ndarray:
        return self.get(self.roles[n])

    def weight(self, n: str) -> np.ndarray:
        return self.get(f"w_{n}")

    def bias(self, n: str) -> Any:
        return self.get(f"b_{n}")

    def behind(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, Arguments]:
        """Keys and values with the extra ones, and the options to match."""
        extra = (self.get("extra_key"), self.get("extra_value"), bool(self.a.get("zero_attention")))
        return with_extra_keys(q, k, v, *extra, self.shared)

    def role_gradients(self, parts: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
        """One gradient for each array of tokens from those of its roles."""
        return {n: sum(d) for n, d in parts.items()}  # type: ignore[misc]

    def over_tokens(self, d: np.ndarray) -> np.ndarray:
        """Gradient of a bias from cotangents (..., head, position, channel)."""
        return d.sum(axis=(*range(d.ndim - 3), -2))

    # ------------------------------------------------------------ the computation

    def heads(self, n: str) -> np.ndarray:
        made = np.einsum("...tm,mhd->...htd", self.tokens(n), self.weight(n))
        bias = self.bias(n)
        return made if bias is None else made + bias[:, None, :]

    def problem(self) -> Arguments:
        """The call of softmax attention."""
        q, k, v = (self.heads(n) for n in "qkv")
        self.keys = k.shape[-2]
        k, v, shared = self.behind(q, k, v)
        return {"q": q, "k": k, "v": v, **shared}

    def finish(self, result: Result) -> Result:
        self.o = result.output
        output = np.einsum("...hqe,hem->...qm", self.o, self.weight("o"))
        bias = self.bias("o")
        output = output if bias is None else output + bias
        return Result(output=np.where(self.real(output), output, 0.0), lse=result.lse)

    def real(self, output: np.ndarray) -> Any:
        rows = self.a.get("query_lengths")
        if rows is None:
            return True
        rows = np.broadcast_to(np.reshape(rows, output.shape[:-2] if np.size(rows) > 1 else ()), output.shape[:-2])
        return (np.arange(output.shape[-2]) < rows[..., None])[..., None]

    def head_cotangents(self, cotangents: Arguments) -> Arguments:
        """Cotangents of the softmax attention's results."""
        found = {"lse": cotangents.get("lse")}
        if cotangents.get("output") is not None:
            d = np.asarray(cotangents["output"], dtype=np.float64)
            found["output"] = np.einsum("...qm,hem->...hqe", np.where(self.real(d), d, 0.0), self.weight("o"))
        return {n: d for n, d in found.items() if d is not None}

    def pull(self, d: Arguments, cotangents: Arguments) -> dict[str, np.ndarray]:
        """Gradients of the layer's arguments from those of the softmax attention's."""
        found = {n: g for n, g in d.items() if n not in ("q", "k", "v")}
        if "bias" in found and _has_extra(self):  # it was written out over all keys
            found["bias"] = found["bias"][..., : self.keys]
        if cotangents.get("output") is not None:
            d_output = np.asarray(cotangents["output"], dtype=np.float64)
            d_output = np.where(self.real(d_output), d_output, 0.0)
            found["b_o"] = self.over_tokens(d_output[..., None, :, :])[0]
            found["w_o"] = einsum("...hqe,...qm->hem", self.o, d_output)
        parts: dict[str, list[np.ndarray]] = {}
        for n in "qkv":
            if n not in d:
                continue
            own = d[n] if n == "q" else d[n][..., : self.keys, :]
            found[f"b_{n}"] = self.over_tokens(own)
            found[f"w_{n}"] = einsum("...tm,...htd->mhd", self.tokens(n), own)
            tokens = np.einsum("...htd,mhd->...tm", own, self.weight(n))
            parts.setdefault(self.roles[n], []).append(sum_to_shape(tokens, self.get(self.roles[n]).shape))
        for name, n in (("extra_key", "k"), ("extra_value", "v")):
            if self.a.get(name) is not None and n in d:
                found[name] = d[n][..., self.keys, :].reshape(-1, *self.get(name).shape).sum(0)
        wanted = {role: sum(role == r for r in self.roles.values()) for role in parts}
        found |= self.role_gradients({n: d for n, d in parts.items() if len(d) == wanted[n]})
        return {
            n: sum_to_shape(np.asarray(g), np.shape(self.a[n])) for n, g in found.items() if self.a.get(n) is not None
        }

    def forward(self) -> Result:
        self.steps = Steps(self.problem())
        return self.finish(self.steps.forward())

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        """After ``forward``."""
        return self.pull(self.steps.backward(self.head_cotangents(cotangents)), cotangents)


def _differ(right: Any, wrong: Any) -> bool:
    for name in wrong:
        a, b = np.asarray(right[name]), np.asarray(wrong[name])
        size = np.abs(a[np.isfinite(a)]).max(initial=1.0)
        if a.shape != b.shape or not np.allclose(a, b, rtol=0, atol=1e-9 * size, equal_nan=True):
            return True
    return False


def _mistake(
    class_: str,
    says: str,
    *,
    applies: Callable[[Layer], bool] = lambda layer: True,
    without: tuple[str, ...] = (),
    backward_only: bool = False,
    **steps: Callable[..., Any],
) -> Mutation:
    """A layer with replaced steps; ``without`` names gradients that the mistake leaves undefined."""
    wrong_class = type("_Mistaken", (Layer,), steps)

    def forward(arguments: Arguments) -> Result | None:
        right, wrong = Layer(arguments), wrong_class(arguments)
        if not applies(right):
            return None
        with np.errstate(all="ignore"):
            expected, found = right.forward(), wrong.forward()
        return found if _differ(expected.fields, found.fields) else None

    def gradients(arguments: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        right, wrong = Layer(arguments), wrong_class(arguments)
        if not applies(right):
            return None
        with np.errstate(all="ignore"):
            right.forward(), wrong.forward()
            expected, found = right.backward(cotangents), wrong.backward(cotangents)
        found = {n: g for n, g in found.items() if n not in without}
        return found if _differ(expected, found) else None

    return Mutation(class_, says, forward=None if backward_only else forward, gradients=gradients)


def _lifted(mutation: Mutation) -> Mutation:
    """A mistake of softmax attention inside the layer."""

    def forward(arguments: Arguments) -> Result | None:
        layer = Layer(arguments)
        with np.errstate(all="ignore"):
            result = mutation.forward(layer.problem()) if mutation.forward else None
            return None if result is None else layer.finish(result)

    def gradients(arguments: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        layer = Layer(arguments)
        with np.errstate(all="ignore"):
            problem = layer.problem()
            result = mutation.forward(problem) if mutation.forward else None
            layer.finish(Steps(problem).forward() if result is None else result)
            d = mutation.gradients(problem, layer.head_cotangents(cotangents)) if mutation.gradients else None
            return None if d is None else layer.pull(d, cotangents)

    return Mutation(
        mutation.class_,
        mutation.says,
        forward=forward if mutation.forward else None,
        gradients=gradients if mutation.gradients else None,
    )


def _interleaved(x: np.ndarray) -> np.ndarray:
    """Projection (m, h, d) whose columns are read as d groups of h."""
    m, h, d = x.shape
    return np.swapaxes(x.reshape(m, d, h), 1, 2)


def _has_extra(layer: Layer) -> bool:
    return layer.a.get("extra_key") is not None or bool(layer.a.get("zero_attention"))


def _joined_heads(layer: Layer, n: str) -> np.ndarray:
    w = Layer.weight(layer, n)
    return _interleaved(w) if n in "qk" else w


def _scaled_by_model(layer: Layer) -> Arguments:
    problem = Layer.problem(layer)
    return {**problem, "scale": layer.tokens("q").shape[-1] ** -0.5}


def _no_output_heads(layer: Layer, n: str) -> np.ndarray:
    w = Layer.weight(layer, n)
    return w if n != "o" else np.swapaxes(w.reshape(w.shape[1], w.shape[0], w.shape[2]), 0, 1)


def _masked_extra(
    layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Arguments]:
    """Extra keys are hidden in every row in which the last of the k keys is."""
    k, v, shared = Layer.behind(layer, q, k, v)
    mask = np.asarray(shared["mask"]).copy()
    if layer.keys:
        mask[..., layer.keys :] &= mask[..., layer.keys - 1 : layer.keys]
    return k, v, {**shared, "mask": mask}


def _without(*names: str) -> Callable[..., Any]:
    def behind(layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, Arguments]:
        extra = {n: layer.a.get(n) for n in ("extra_key", "extra_value", "zero_attention") if n not in names}
        return with_extra_keys(
            q, k, v, extra.get("extra_key"), extra.get("extra_value"), bool(extra.get("zero_attention")), layer.shared
        )

    return behind


def _zero_key_bias(
    layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Arguments]:
    """The row of zeros goes through the projection, so that its value is b_v and its key b_k."""
    k, v, shared = Layer.behind(layer, q, k, v)
    k, v = k.copy(), v.copy()
    for x, n in ((k, "k"), (v, "v")):
        bias = layer.get(f"b_{n}")
        if bias is not None:
            x[..., -1, :] = bias
    return k, v, shared


def _first_role(layer: Layer, parts: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {n: d[0] for n, d in parts.items()}


def _last_role(layer: Layer, parts: dict[str, list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {n: d[-1] for n, d in parts.items()}


def _shares(layer: Layer) -> bool:
    return len(set(layer.roles.values())) < 3


def _no_bias(names: str) -> Callable[[Layer, str], Any]:
    return lambda layer, n: None if n in names else Layer.bias(layer, n)


def _own() -> list[Mutation]:
    made = [
        _mistake(
            "heads_interleaved",
            "the columns of w_q and w_k are read channel by channel, not head by head",
            applies=lambda x: x.weight("q").shape[1] == x.weight("k").shape[1],
            without=("w_q", "w_k"),
            weight=_joined_heads,
        ),
        _mistake(
            "heads_not_merged",
            "the output projection reads the heads' channels in another order than they stand in",
            without=("w_o",),
            weight=_no_output_heads,
        ),
        _mistake(
            "scale_dmodel",
            "the scale comes from the model channels, not from those of a head",
            applies=lambda x: x.a.get("scale") is None,
            problem=_scaled_by_model,
        ),
        _mistake(
            "values_from_queries",
            "k and v are projections of the query tokens",
            applies=lambda x: (
                x.roles["k"] != "x_q" and x.get("x_q").shape == x.tokens("k").shape == x.tokens("v").shape
            ),
            without=("x_q", "x_k", "x_v"),
            tokens=lambda x, n: x.get("x_q"),
        ),
        _mistake(
            "swap_kv",
            "keys and values are made of each other's tokens",
            applies=lambda x: x.roles["k"] != x.roles["v"] and x.tokens("k").shape == x.tokens("v").shape,
            without=("x_k", "x_v"),
            tokens=lambda x, n: Layer.tokens(x, {"q": "q", "k": "v", "v": "k"}[n]),
        ),
        _mistake("extra_key_drop", "the extra key and value are left out", behind=_without("extra_key", "extra_value"),
                 applies=lambda x: x.a.get("extra_key") is not None, without=("extra_key", "extra_value")),
        _mistake("zero_attention_drop", "the key of zeros is left out", behind=_without("zero_attention")),
        _mistake(
            "zero_attention_projected",
            "the row of zeros is a token: its key and value are the biases of the projections",
            applies=lambda x: bool(x.a.get("zero_attention")),
            without=("b_k", "b_v"),
            behind=_zero_key_bias,
        ),
        _mistake("extra_key_masked", "mask, causal and lengths hide the extra keys with the last key", applies=_has_extra,
                 behind=_masked_extra),
    ]  # fmt: skip
    for names in ("q", "k", "v", "o", "qkv"):
        made.append(
            _mistake(
                "projection_bias_drop",
                f"{' and '.join(f'b_{n}' for n in names)} not added",
                without=tuple(f"b_{n}" for n in names),
                bias=_no_bias(names),
            )
        )
    made += [
        _mistake("role_grad_dropped", "an array in several roles gets the gradient of its first one", applies=_shares,
                 backward_only=True, role_gradients=_first_role),
        _mistake("role_grad_dropped", "an array in several roles gets the gradient of its last one", applies=_shares,
                 backward_only=True, role_gradients=_last_role),
        _mistake("projection_bias_grad", "gradients of the projections' biases are means over the tokens", backward_only=True,
                 over_tokens=lambda x, d: d.mean(axis=(*range(d.ndim - 3), -2))),
    ]  # fmt: skip
    return made


multi_head_mutations: tuple[Mutation, ...] = (*_own(), *map(_lifted, dense_mutations))
"""Every mistake; several of one class where its numbers differ."""
