"""The ways people get Talking-Heads attention wrong, each as the numbers that the mistake gives.

:class:`Talking` writes the mechanism down once more in float64 NumPy, with a coefficient for every pair of heads and of
positions, in steps that a mistake replaces.  Its softmax is that of :class:`~refattn.definitions.dense_steps.Steps`, which gets the
projected logits as queries and one unit vector for each key: its output then is the weights.  So the mistakes of softmax
attention in general become mistakes of the softmax between the projections.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.arrays import sum_to_shape
from refattn.definitions.dense_steps import Steps, product, transpose
from refattn.mistakes.dense_old import dense_mutations
from refattn.records import Mutation, Result

__all__ = ["Talking", "talking_heads_mutations"]

Arguments = dict[str, Any]
_PARTS = {
    "logits_projection": ("before", "...xhqk->xh"),
    "query_logits": ("before", "...xhqk->...qxh"),
    "key_logits": ("before", "...xhqk->...kxh"),
    "weights_projection": ("behind", "...xhqk->xh"),
    "query_weights": ("behind", "...xhqk->...qxh"),
    "key_weights": ("behind", "...xhqk->...kxh"),
}
_NOT_HERE = {"scale", "q", "k", "v", *_PARTS}
_OF_PRODUCTS = {  # mistakes about channels and groups of heads: the softmax here has neither
    "cap_before_scale", "d_truncated", "dv_block_nosum", "gqa_axis", "gqa_grad_nosum", "gqa_tile", "masked_value_leak", "no_scale",
    "qk_overflow", "scale_dmodel", "scale_grad", "scale_ignored", "scale_inv", "scale_padded", "scale_twice", "scale_value",
    "sink_drop", "sink_heads", "sink_lse", "sink_twice", "sink_unshifted", "swap_kv",
}  # fmt: skip


class Talking:
    """One call in steps; coefficients (..., n, m, q, k) lead from n heads to m."""

    def __init__(self, arguments: Arguments) -> None:
        self.a = arguments
        arrays = {n: self.array(n) for n in ("q", "k", "v", *_PARTS)}
        own = [x.shape[:-3] for n, x in arrays.items() if x is not None and not n.endswith("_projection")]
        self.lead = np.broadcast_shapes(*own)
        self.q, self.k, self.v = (np.broadcast_to(arrays[n], (*self.lead, *arrays[n].shape[-3:])) for n in "qkv")
        (self.x, self.rows, self.d), self.columns, self.y = self.q.shape[-3:], self.k.shape[-2], self.v.shape[-3]
        before = [
            arrays[n].shape[-1] for n in ("logits_projection", "query_logits", "key_logits") if arrays[n] is not None
        ]
        self.h = (before or [self.x])[0]
        scale = self.a.get("scale")
        self.scale = (self.d**-0.5 if self.d else 1.0) if scale is None else float(np.reshape(scale, ()))

    def array(self, name: str) -> Any:
        x = self.a.get(name)
        return None if x is None else np.asarray(x, dtype=np.float64)

    # ------------------------------------------------------------ steps that mistakes replace

    def part(self, name: str) -> Any:
        return self.array(name)

    def coefficients(self, static: str, by_query: str, by_key: str, n: int, m: int) -> np.ndarray:
        first = self.part(static)
        total = np.zeros((*self.lead, n, m, self.rows, self.columns))
        total += (np.eye(n, m) if first is None else first)[:, :, None, None]
        for name, axis in ((by_query, -1), (by_key, -2)):
            x = self.part(name)
            if x is not None:
                total += np.expand_dims(np.moveaxis(np.broadcast_to(x, (*self.lead, *x.shape[-3:])), -3, -1), axis)
        return total

    def products(self) -> np.ndarray:
        return self.scale * self.q @ transpose(self.k)

    def project(self, products: np.ndarray) -> np.ndarray:
        """Logits of the softmax heads."""
        return _through(self.before, products)

    def options(self) -> Arguments:
        """What the softmax gets."""
        return {n: x for n, x in self.a.items() if n not in _NOT_HERE}

    def mix(self, weights: np.ndarray) -> np.ndarray:
        """Weights of the value heads."""
        return np.einsum("...hqk,...hyqk->...yqk", weights, self.behind)

    def sum_values(self, mixed: np.ndarray) -> np.ndarray:
        return product(mixed, self.v, self.seen_by_values())

    # ------------------------------------------------------------ the computation

    def problem(self) -> Arguments:
        """The softmax as a call of dense attention, whose output is the weights."""
        self.before = self.coefficients("logits_projection", "query_logits", "key_logits", self.x, self.h)
        self.behind = self.coefficients("weights_projection", "query_weights", "key_weights", self.h, self.y)
        self.dots = self.products()
        logits = self.project(self.dots)
        one = np.eye(self.columns)[None]
        return {"q": np.where(np.isfinite(logits), logits, 0.0), "k": one, "v": one, **self.options(), "scale": 1.0}

    def seen_by_values(self) -> np.ndarray:
        seen = self.steps.seen & self.steps.real
        return np.einsum("...hqk,...hyqk->...yqk", seen.astype(int), (self.behind != 0).astype(int)) > 0

    def forward(self) -> Result:
        self.steps = Steps(self.problem())
        return self.finish(self.steps.forward())

    def finish(self, softmax: Result) -> Result:
        self.weights = softmax.output
        self.mixed = self.mix(self.weights)
        return Result(output=self.sum_values(self.mixed), lse=softmax.lse)

    def weight_cotangents(self, cotangents: Arguments) -> Arguments:
        """Cotangents of the softmax's results."""
        found = {"lse": cotangents.get("lse")}
        self.d_output: Any = cotangents.get("output")
        if self.d_output is not None:
            self.d_output = np.asarray(self.d_output, dtype=np.float64)
            self.d_mixed = self.d_output @ transpose(self.v)
            found["output"] = np.einsum("...yqk,...hyqk->...hqk", self.d_mixed, self.behind)
        return {n: d for n, d in found.items() if d is not None}

    def pull(self, d: Arguments) -> dict[str, np.ndarray]:
        """Gradients of all arguments from those of the softmax's; ``d["q"]`` is the cotangent of the logits."""
        found = {n: g for n, g in d.items() if n not in ("q", "k", "v", "scale")}
        shares = {}
        if self.d_output is not None:
            found["v"] = self.pull_values(transpose(self.mixed) @ self.d_output)
            shares["behind"] = np.einsum("...xqk,...hqk->...xhqk", self.weights, self.d_mixed)
        if "q" in d:
            shares["before"] = np.einsum("...xqk,...hqk->...xhqk", self.dots, d["q"])
            d_products = np.einsum("...hqk,...xhqk->...xqk", d["q"], self.before)
            found["q"], found["k"] = self.scale * d_products @ self.k, self.scale * transpose(d_products) @ self.q
            found["scale"] = np.sum(d_products * (self.q @ transpose(self.k)))
        for name, (place, spec) in _PARTS.items():
            if self.a.get(name) is not None and place in shares:
                share = shares[place]
                if name.endswith("_projection"):
                    share = share.reshape(-1, *share.shape[-4:]).sum(0)
                    spec = spec.replace("...", "")
                found[name] = np.einsum(spec, share)
        return {
            n: sum_to_shape(np.asarray(g), np.shape(self.a[n])) for n, g in found.items() if self.a.get(n) is not None
        }

    def pull_values(self, d: np.ndarray) -> np.ndarray:
        return d

    def softmax_pull(self, cotangents: Arguments) -> Arguments:
        return self.steps.backward(cotangents)

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        """After ``forward``."""
        return self.pull(self.softmax_pull(self.weight_cotangents(cotangents)))


def _through(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sum over heads, in which a coefficient of 0 lets nothing through."""
    share = np.where(coefficients == 0, 0.0, coefficients * x[..., :, None, :, :])
    return share.sum(axis=-4)


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
    applies: Callable[[Talking], bool] = lambda x: True,
    without: tuple[str, ...] = (),
    only: str = "both",
    **steps: Callable[..., Any],
) -> Mutation:
    """A call with replaced steps; ``without`` names gradients that the mistake leaves undefined; ``only`` one direction."""
    wrong_class = type("_Mistaken", (Talking,), steps)

    def forward(arguments: Arguments) -> Result | None:
        right, wrong = Talking(arguments), wrong_class(arguments)
        if not applies(right):
            return None
        with np.errstate(all="ignore"):
            expected, found = right.forward(), wrong.forward()
        return found if _differ(expected.fields, found.fields) else None

    def gradients(arguments: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        right, wrong = Talking(arguments), wrong_class(arguments)
        if not applies(right):
            return None
        with np.errstate(all="ignore"):
            right.forward(), wrong.forward()
            expected, found = right.backward(cotangents), wrong.backward(cotangents)
        found = {n: g for n, g in found.items() if n not in without}
        return found if _differ(expected, found) else None

    return Mutation(
        class_,
        says,
        forward=None if only == "gradients" else forward,
        gradients=None if only == "forward" else gradients,
    )


def _lifted(mutation: Mutation) -> Mutation:
    """A mistake of softmax attention in the softmax between the projections."""

    def forward(arguments: Arguments) -> Result | None:
        call = Talking(arguments)
        with np.errstate(all="ignore"):
            call.forward()
            result = mutation.forward(call.problem()) if mutation.forward else None
            return None if result is None else call.finish(result)

    def gradients(arguments: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        call = Talking(arguments)
        with np.errstate(all="ignore"):
            call.forward()
            problem = call.problem()
            result = mutation.forward(problem) if mutation.forward else None
            if result is not None:
                call.finish(result)
            d = mutation.gradients(problem, call.weight_cotangents(cotangents)) if mutation.gradients else None
            return None if d is None else call.pull(d)

    return Mutation(
        mutation.class_,
        mutation.says,
        forward=forward if mutation.forward else None,
        gradients=gradients if mutation.gradients else None,
    )


# ------------------------------------------------------------------------------------------------ the mistakes


def _given(*names: str) -> Callable[[Talking], bool]:
    return lambda x: any(x.a.get(n) is not None for n in names)


def _hides(x: Talking) -> bool:
    """Whether anything makes pairs invisible."""
    x.forward()
    return not bool(np.all(x.steps.seen))


def _masked_products(x: Talking, products: np.ndarray) -> np.ndarray:
    """-1e9 in place of the products of every pair that softmax head 0 does not see, before the projection."""
    one = np.eye(x.columns)[None]
    steps = Steps(
        {"q": np.zeros((*x.lead, x.h, x.rows, x.columns)), "k": one, "v": one, **Talking.options(x), "scale": 1.0}
    )
    steps.forward()
    return _through(x.before, np.where(steps.seen[..., :1, :, :], products, -1e9))


def _biased_products(x: Talking, products: np.ndarray) -> np.ndarray:
    bias = x.array("bias")
    return _through(x.before, products + np.where(np.isneginf(bias), 0.0, bias))


def _without_bias(x: Talking) -> Arguments:
    return {n: value for n, value in Talking.options(x).items() if n != "bias"}


def _as_many(x: Talking) -> bool:
    return x.a.get("bias") is not None and (np.ndim(x.a["bias"]) < 3 or np.shape(x.a["bias"])[-3] in (1, x.x))


def _turned(name: str) -> Callable[[Talking, str], Any]:
    def part(x: Talking, n: str) -> Any:
        found = Talking.part(x, n)
        return found if n != name or found is None else found.T

    return part


def _square(name: str) -> Callable[[Talking], bool]:
    return lambda x: x.a.get(name) is not None and np.shape(x.a[name])[0] == np.shape(x.a[name])[1]


def _dropped(*names: str) -> Callable[[Talking, str], Any]:
    return lambda x, n: None if n in names else Talking.part(x, n)


def _static_dropped(name: str, dynamic: tuple[str, str]) -> Callable[[Talking, str], Any]:
    """The dynamic parts stand in place of the static one."""

    def part(x: Talking, n: str) -> Any:
        found = Talking.part(x, n)
        if n != name or all(x.a.get(other) is None for other in dynamic):
            return found
        return np.zeros((x.x, x.h) if name == "logits_projection" else (x.h, x.y))

    return part


def _residual(name: str) -> Callable[[Talking, str], Any]:
    def part(x: Talking, n: str) -> Any:
        found = Talking.part(x, n)
        return found if n != name or found is None else found + np.eye(*found.shape)

    return part


def _mean_order(x: Talking, weights: np.ndarray) -> np.ndarray:
    mixed = Talking.mix(x, weights)
    total = mixed.sum(-1, keepdims=True)
    return np.where(total == 0, 0.0, mixed / np.where(total == 0, 1.0, total))


def _second_softmax(x: Talking, weights: np.ndarray) -> np.ndarray:
    mixed = Talking.mix(x, weights)
    seen = x.seen_by_values()
    p = np.where(seen, np.exp(mixed - mixed.max(-1, keepdims=True, initial=0.0)), 0.0)
    total = p.sum(-1, keepdims=True)
    return p / np.where(total == 0, 1.0, total)


def _undropped(x: Talking) -> Arguments:
    return {n: value for n, value in Talking.options(x).items() if n not in ("dropout_mask", "dropout_rate")}


def _dropped_behind(x: Talking, weights: np.ndarray) -> np.ndarray:
    """Dropout on the projected weights, head by head."""
    mixed = Talking.mix(x, weights)
    kept = np.broadcast_to(x.a["dropout_mask"], (*x.lead, x.h, x.rows, x.columns)) / (1 - x.a.get("dropout_rate", 0.0))
    return mixed * kept


def _summed_delta(x: Talking, cotangents: Arguments) -> Arguments:
    """The row term is rowsum(d_output output) of the value head of the same number, as in attention without mixing."""
    if "output" not in cotangents:
        return Talking.softmax_pull(x, cotangents)
    delta = (x.d_output * Talking.sum_values(x, x.mixed)).sum(-1)

    class Wrong(Steps):
        def softmax_pull(self, weights: Any, kept: Any, d_weights: Any, d_output: Any) -> np.ndarray:
            return weights * (kept * d_weights - delta[..., None])

    steps = Wrong(x.problem())
    steps.forward()
    return steps.backward(cotangents)


def _leaking(x: Talking, mixed: np.ndarray) -> np.ndarray:
    return mixed @ x.v


def _scaled(factor: Callable[[Talking], float]) -> Callable[[Talking], np.ndarray]:
    return lambda x: factor(x) * x.q @ transpose(x.k)


def _per_head_scale(x: Talking) -> bool:
    return x.a.get("scale") is None


def _own() -> list[Mutation]:
    made = [
        _mistake("th_mask_before_projection", "hidden pairs get -1e9 before the logits are projected", applies=_hides,
                 project=_masked_products, only="forward",
                 options=lambda x: {n: v for n, v in Talking.options(x).items() if n not in _VISIBILITY}),
        _mistake("th_bias_before_projection", "the bias is added before the logits are projected", applies=_as_many,
                 project=_biased_products, options=_without_bias, without=("bias",)),
        _mistake("th_projection_drop", "neither projection is applied", part=_dropped(*_PARTS), without=tuple(_PARTS),
                 applies=lambda x: x.x == x.h == x.y),
        _mistake("th_renormalised", "the projected weights are made to sum to 1 again", mix=_mean_order, only="forward"),
        _mistake("th_renormalised", "a second softmax follows the projection of the weights", mix=_second_softmax, only="forward"),
        _mistake("th_dropout_behind", "dropout acts on the projected weights", applies=lambda x: x.h == x.y and _given("dropout_mask")(x),
                 options=_undropped, mix=_dropped_behind, only="forward"),
        _mistake("th_delta", "the row term of a softmax head is rowsum(d_output output) of the value head of its number", only="gradients",
                 applies=lambda x: x.h == x.y, softmax_pull=_summed_delta),
        _mistake("masked_value_leak", "0 times what stands at hidden values enters the sum", sum_values=_leaking, only="forward"),
        _mistake("no_scale", "the products are not scaled", products=_scaled(lambda x: 1.0), only="forward"),
        _mistake("scale_twice", "the scale is applied twice", products=_scaled(lambda x: x.scale**2), only="forward"),
        _mistake("scale_inv", "the products are divided by the scale", only="forward",
                 products=_scaled(lambda x: 1 / x.scale if x.scale else 1.0)),
        _mistake("scale_dmodel", "the scale comes from all heads' channels", applies=_per_head_scale, only="forward",
                 products=_scaled(lambda x: (x.x * x.d) ** -0.5 if x.x * x.d else 1.0)),
        _mistake("scale_value", "the scale comes from the value channels", applies=_per_head_scale, only="forward",
                 products=_scaled(lambda x: x.v.shape[-1] ** -0.5 if x.v.shape[-1] else 1.0)),
        _mistake("scale_grad", "dQ and dK lack the scale", only="gradients", applies=lambda x: x.scale != 0,
                 pull=lambda x, d: {n: g / x.scale if n in ("q", "k") else g for n, g in Talking.pull(x, d).items()}),
    ]  # fmt: skip
    for name, dynamic in (
        ("logits_projection", ("query_logits", "key_logits")),
        ("weights_projection", ("query_weights", "key_weights")),
    ):
        made += [
            _mistake("th_transposed", f"the {name} is applied transposed", applies=_square(name), part=_turned(name), without=(name,)),
            _mistake("th_residual", f"the identity is added to the {name}", applies=_square(name), part=_residual(name)),
            _mistake("th_projection_drop", f"the {name} is not applied", applies=_square(name), part=_dropped(name), without=(name,)),
            _mistake("th_static_dropped", f"the dynamic parts replace the {name}", part=_static_dropped(name, dynamic),
                     without=(name,)),
            _mistake("th_dynamic_dropped", f"{' and '.join(dynamic)} are left out", part=_dropped(*dynamic), without=dynamic),
        ]  # fmt: skip
        made += [
            _mistake("th_dynamic_dropped", f"{n} is left out", part=_dropped(n), without=(n,), applies=_given(n))
            for n in dynamic
        ]
    return made


_VISIBILITY = (
    "mask",
    "pattern",
    "causal",
    "align",
    "window",
    "query_lengths",
    "key_lengths",
    "query_segments",
    "key_segments",
)

talking_heads_mutations: tuple[Mutation, ...] = (
    *_own(),
    *(_lifted(m) for m in dense_mutations if m.class_ not in _OF_PRODUCTS),
)
"""Every mistake; several of one class where its numbers differ."""
