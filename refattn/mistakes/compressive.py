"""The ways people get the attention of the Compressive Transformer wrong, each as the numbers that the mistake gives.

:class:`Compressive` is the attention once more in float64: context, projections, and the dense steps of
``transformer_xl_mistakes``.
"""

from typing import Any

import numpy as np

from refattn.mistakes.transformer_xl import Relative, differ, transformer_xl_mutations
from refattn.records import Mutation, Result

__all__ = ["compressive_mutations"]

Arguments = dict[str, Any]
_CORE = ("r", "u", "w", "bias", "mask", "scale", "same_length")


class Compressive:
    """The mechanism in steps that a mistake replaces."""

    sequence = ("compressed", "memory", "x")

    def __init__(self, arguments: Arguments) -> None:
        self.a: Arguments = {n: np.asarray(x, np.float64) if _floating(x) else x for n, x in arguments.items()}
        parts = {n: self.a[n] for n in ("compressed", "memory", "x") if self.a.get(n) is not None}
        self.lead = np.broadcast_shapes(*(x.shape[:-2] for x in parts.values()))
        self.parts = {n: np.broadcast_to(x, (*self.lead, *x.shape[-2:])) for n, x in parts.items()}

    def names(self) -> list[str]:
        return [n for n in self.sequence if n in self.parts]

    def places(self) -> Any:
        kind = self.a.get("compressed_positions", "slot")
        if kind == "slot":
            return None
        rate = int(self.a["rate"])
        n = self.parts["compressed"].shape[-2] if "compressed" in self.parts else 0
        rest = sum(x.shape[-2] for name, x in self.parts.items() if name != "compressed")
        inside = rate - 1 if kind == "span_end" else rate // 2
        return np.concatenate([np.arange(n) * rate + inside, n * rate + np.arange(rest)])

    def core(self) -> Arguments:
        """Arguments of Transformer-XL attention."""
        self.context = np.concatenate([self.parts[n] for n in self.names()], axis=-2)
        self.source = self.query_rows()
        given = {n: self.a[n] for n in _CORE if self.a.get(n) is not None}
        return {
            "q": np.einsum("...qm,mhd->...hqd", self.source, self.a["w_q"]),
            "k": np.einsum("...km,mhd->...hkd", self.context, self.a["w_k"]),
            "v": np.einsum("...km,mhe->...hke", self.context, self.a["w_v"]),
            "key_places": self.places(),
            **given,
        }

    def query_rows(self) -> np.ndarray:
        return self.parts["x"]

    def attention(self, arguments: Arguments) -> Relative:
        return Relative(arguments)

    def forward(self) -> Result:
        self.inner = self.attention(self.core())
        self.heads = self.inner.forward()
        output = self.heads.output
        if self.a.get("w_o") is not None:
            output = np.einsum("...hqe,hem->...qm", output, self.a["w_o"])
        return Result(output=output, lse=self.heads.lse)

    def learning_rows(self) -> np.ndarray:
        """Rows through which w_k and w_v learn."""
        return self.context

    def passes(self) -> bool:
        """Whether the memories get a gradient."""
        return bool(self.a.get("through_memory", False))

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        d, a = cotangents.get("output"), self.a
        found: dict[str, np.ndarray] = {}
        if a.get("w_o") is not None and d is not None:
            found["w_o"] = _total("...hqe,...qm->...hem", self.heads.output, d)
            d = np.einsum("...qm,hem->...hqe", d, a["w_o"])
        inner = self.inner.backward({"output": d, "lse": cotangents.get("lse")})
        rows = self.learning_rows()
        found["w_q"] = _total("...qm,...hqd->...mhd", self.source, inner["q"])
        found["w_k"] = _total("...km,...hkd->...mhd", rows, inner["k"])
        found["w_v"] = _total("...km,...hke->...mhe", rows, inner["v"])
        found.update({n: inner[n] for n in ("r", "u", "w", "bias", "scale") if n in inner})
        d_context = np.einsum("...hkd,mhd->...km", inner["k"], a["w_k"])
        d_context = d_context + np.einsum("...hke,mhe->...km", inner["v"], a["w_v"])
        d_source = np.einsum("...hqd,mhd->...qm", inner["q"], a["w_q"])
        start = 0
        for name in self.names():
            n = self.parts[name].shape[-2]
            part = d_context[..., start : start + n, :]
            start += n
            if name == "x":
                part = part + d_source
            elif not self.passes():
                part = np.zeros_like(part)
            found[name] = part.sum(tuple(range(part.ndim - self.a[name].ndim)))
        return found


def _total(spec: str, *operands: np.ndarray) -> np.ndarray:
    """einsum, then the sum over the leading axes of a weight's gradient."""
    found = np.einsum(spec, *operands)
    return found.reshape(-1, *found.shape[-3:]).sum(0)


def _floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind not in "biu"


def _mistake(class_: str, says: str, wrong: type, *, gradients_only: bool = False) -> Mutation:
    def usable(a: Arguments) -> bool:
        return np.size(a["x"]) > 0

    def forward(a: Arguments) -> Result | None:
        if not usable(a):
            return None
        right, found = Compressive(a).forward(), wrong(a).forward()
        return found if differ(right.fields, found.fields) else None

    def gradients(a: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        if not usable(a):
            return None
        pair = Compressive(a), wrong(a)
        for one in pair:
            one.forward()
        right, found = (one.backward(cotangents) for one in pair)
        return found if differ(right, found) else None

    return Mutation(class_, says, forward=None if gradients_only else forward, gradients=gradients)


class _MemoryFirst(Compressive):
    sequence = ("memory", "compressed", "x")


class _SegmentFirst(Compressive):
    sequence = ("x", "compressed", "memory")


class _CompressedReversed(Compressive):
    """Newest compressed row first."""

    def core(self) -> Arguments:
        if "compressed" in self.parts:
            self.parts["compressed"] = self.parts["compressed"][..., ::-1, :]
        return super().core()

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        found = super().backward(cotangents)
        return {n: g[..., ::-1, :] if n == "compressed" else g for n, g in found.items()}


class _CompressedIgnored(Compressive):
    """Compressed rows are there and never attended."""

    def core(self) -> Arguments:
        found = super().core()
        n = self.parts["compressed"].shape[-2] if "compressed" in self.parts else 0
        seen = np.arange(self.context.shape[-2]) >= n
        mask = found.get("mask")
        return {**found, "mask": np.broadcast_to(seen, (1, seen.size)) if mask is None else mask & seen}


class _SlotPlaces(Compressive):
    """Spans of compressed rows are ignored: every row counts as one place."""

    def places(self) -> Any:
        right = super().places()
        if right is None:
            return None
        return np.arange(right.size) + int(right[-1]) + 1 - right.size


class _KeyValueSwapped(Compressive):
    """Keys and values exchange their projections."""

    def core(self) -> Arguments:
        if self.a["w_k"].shape == self.a["w_v"].shape:
            self.a["w_k"], self.a["w_v"] = self.a["w_v"], self.a["w_k"]
        return super().core()

    def backward(self, cotangents: Arguments) -> dict[str, np.ndarray]:
        found = super().backward(cotangents)
        if self.a["w_k"].shape == self.a["w_v"].shape:
            found["w_k"], found["w_v"] = found["w_v"], found["w_k"]
        return found


class _IntoMemory(Compressive):
    def passes(self) -> bool:
        return True


class _MemoryStopped(Compressive):
    def passes(self) -> bool:
        return False


class _WeightsDetached(Compressive):
    def learning_rows(self) -> np.ndarray:
        rows = self.context.copy()
        rows[..., : rows.shape[-2] - self.parts["x"].shape[-2], :] = 0.0
        return rows


def _adapted(mutation: Mutation) -> Mutation:
    """A mistake of Transformer-XL attention as one of this mechanism: projections before and after stay right."""

    def forward(a: Arguments) -> Result | None:
        if not np.size(a["x"]) or mutation.forward is None:
            return None
        one = Compressive(a)
        found = mutation.forward(one.core())
        if found is None:
            return None
        output = found.output
        if one.a.get("w_o") is not None:
            output = np.einsum("...hqe,hem->...qm", output, one.a["w_o"])
        return Result(output=output, lse=found.lse)

    def gradients(a: Arguments, cotangents: Arguments) -> dict[str, Any] | None:
        if not np.size(a["x"]) or mutation.gradients is None:
            return None
        right, wrong = Compressive(a), Compressive(a)
        right.forward(), wrong.forward()
        state: dict[str, Any] = {}

        def inner(inside: Arguments) -> dict[str, np.ndarray]:
            state["found"] = mutation.gradients(wrong.core(), inside)  # type: ignore[misc]
            return {**right.inner.backward(inside), **(state["found"] or {})}

        expected = right.backward(cotangents)
        wrong.inner.backward = inner  # type: ignore[assignment, method-assign]
        if mutation.forward is not None:  # the wrong weights also meet w_o
            changed = mutation.forward(wrong.core())
            wrong.heads = wrong.heads if changed is None else changed
        found = wrong.backward(cotangents)
        return found if state["found"] is not None and differ(expected, found) else None

    own_gradients = None if mutation.gradients is None else gradients
    return Mutation(mutation.class_, mutation.says, None if mutation.forward is None else forward, own_gradients)


_own: tuple[tuple[str, str, type, dict[str, Any]], ...] = (
    ("memory_order", "the memory stands before the compressed rows", _MemoryFirst, {}),
    ("memory_after_segment", "the segment stands before both memories", _SegmentFirst, {}),
    ("compressed_reversed", "the newest compressed row stands first", _CompressedReversed, {}),
    ("compressed_ignored", "compressed rows are never attended", _CompressedIgnored, {}),
    ("compressed_slots", "every compressed row counts as one place, whatever compressed_positions says", _SlotPlaces, {}),
    ("key_value_swapped", "w_k and w_v are exchanged", _KeyValueSwapped, {}),
    ("gradient_into_memory", "the memories get a gradient that is to stop", _IntoMemory, {"gradients_only": True}),
    ("memory_stopped", "through_memory=True, and no gradient passes", _MemoryStopped, {"gradients_only": True}),
    ("memory_weights_detached", "w_k and w_v do not learn through the memories' rows", _WeightsDetached, {"gradients_only": True}),
)  # fmt: skip

_inherited = [m for m in transformer_xl_mutations if m.class_ not in {n for n, *_ in _own}]

compressive_mutations: tuple[Mutation, ...] = (
    *(_mistake(class_, says, wrong, **more) for class_, says, wrong, more in _own),
    *map(_adapted, _inherited),
)
