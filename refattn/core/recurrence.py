r"""The recurrent core: one state per value head, walked over the tokens in chunks, forward and backward.

What happens inside a chunk is the mechanism's (a *rule*, in terms of ``refattn.core.decays``).  The walk does what is the same for
all: heads that are shared, padding, resets, which rows stand in which chunk, and the states that are kept.  A forward keeps one
state in the square root of all chunks; a backward computes the others again, group by group from the last, so that its
memory beyond inputs and gradients grows with the square root of the length.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    device,
    is_bool,
    namespace,
    require_array,
    require_axes,
    require_finite,
    require_integer,
    require_one_of,
    to_namespace,
    to_numpy,
)
from refattn.contraction import einsum
from refattn.core.decays import Decays, Pull, hidden
from refattn.core.options import per_batch

__all__ = ["FORMS", "HEAD_MAPS", "Walk", "chunk_rows", "default_scale"]

FORMS = ("chunked", "recurrent", "parallel")
HEAD_MAPS = ("repeat", "tile")
NARROW = 16  # rows of a chunk whose decays differ by channel: their exponentials are an array (c, c, d)


def chunk_rows(form: str, chunk: int, length: int, by_channel: bool) -> int:
    """Rows of a chunk."""
    if form == "chunked":
        return min(chunk, NARROW) if by_channel else chunk
    return 1 if form == "recurrent" else max(1, length)


def default_scale(scale: Any, d: int) -> Any:
    """The scale that is given, or d**-0.5."""
    if scale is None:
        return d**-0.5 if d else 1.0
    require_finite("scale", scale)
    return scale


class Rows(dict[str, Any]):
    """The rows of one chunk by argument name, (..., g, r, c, n); ``decays`` are theirs, ``keep`` bool or None (all are real)."""

    decays: Decays
    keep: Any


class _Chunk(NamedTuple):
    rows: Rows
    state: Any
    record: Any


class Walk:
    """One recurrence over its tokens: arrays, heads, lengths, resets, and where it is cut.

    Parameters
    ----------
    backend
    arrays : dict
        Name -> array (..., heads, t, n); None is passed over.  Their heads meet the g state heads by ``head_map``; those of the
        first array, which queries, may also be a multiple of g.
    sizes : dict
        Sizes of g, t, d and e.
    decay, channel_decay, head_decay, state, lengths, reset, form, chunk, head_map
        As the mechanisms take them; they are checked here.
    steps : int
        Rows of a token: arrays and decays have t rows of which ``lengths`` and ``reset`` count t / steps.
    decays_of_rule : bool
        The rule computes the decays of its rows, and sets ``rows.decays``.
    """

    def __init__(
        self,
        backend: Any,
        arrays: Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        decay: Any = None,
        channel_decay: Any = None,
        head_decay: Any = None,
        state: Any = None,
        lengths: Any = None,
        reset: Any = None,
        form: str = "chunked",
        chunk: int = 64,
        head_map: str = "repeat",
        steps: int = 1,
        decays_of_rule: bool = False,
    ) -> None:
        self.backend, self.head_map, self.g, self.steps = backend, head_map, sizes["g"], steps
        self.decays_of_rule = decays_of_rule
        self.t, self.d, self.e = (sizes[x] for x in "tde")
        require_one_of("form", form, FORMS)
        require_one_of("head_map", head_map, HEAD_MAPS)
        chunk = require_integer("chunk", chunk, minimum=1)
        self.arrays = {n: x for n, x in arrays.items() if x is not None}
        self.like = next(iter(self.arrays.values()))
        for n, x in self.arrays.items():
            self._require_heads(n, x.shape[-3], multiple=x is self.like)
        own = {
            "decay": (decay, "... g t"),
            "channel_decay": (channel_decay, "... g t d"),
            "head_decay": (head_decay, "g"),
        }
        own["state"] = (state, "... g d e")
        require_axes(dict(sizes), **{n: x for n, x in own.items() if x[0] is not None})
        xp = self.xp = namespace(*self.arrays.values())
        wide = None if decay is None else xp.expand_dims(decay, axis=-1)
        self.decays = {n: x for n, x in (("decay", wide), ("channel_decay", channel_decay)) if x is not None}
        self.head_decay = head_decay
        shaped = {n: (x, 3) for n, x in (self.arrays | self.decays).items()}
        if state is not None:
            shaped["state"] = (state, 3)
        if reset is not None:
            require_array("reset", reset, axes=1)
            if not is_bool(reset.dtype) or reset.shape[-1] != self.t // steps:
                raise ValueError(
                    f"reset is {reset.dtype}{tuple(reset.shape)}: expected bool (..., {self.t // steps}), one for each token"
                )
            shaped["reset"] = (reset, 1)
        self.lead = broadcast_leading(**shaped)
        self.reset = None
        if reset is not None:
            marks = to_numpy(reset)
            self.reset = np.zeros((*marks.shape[:-1], self.t), dtype=bool)
            self.reset[..., ::steps] = marks
        self.lengths = self._lengths(lengths, steps)
        shape = (*self.lead, self.g, 1, self.d, self.e)
        if state is None:
            self.start = xp.zeros(shape, dtype=self.like.dtype, device=device(self.like))
        else:
            self.start = xp.broadcast_to(xp.expand_dims(state, axis=-3), shape)
        rows = chunk_rows(form, chunk, self.t, channel_decay is not None)
        self.pieces = [slice(a, min(a + rows, self.t)) for a in range(0, self.t, rows)]
        self.every = max(1, math.isqrt(len(self.pieces)))  # states at these pieces are kept, the others computed again
        self.heads = max(self.like.shape[-3], self.g)

    def _require_heads(self, name: str, heads: int, multiple: bool) -> None:
        g = self.g
        fits = heads == g or (g and heads and (not g % heads or (multiple and not heads % g)))
        if not fits:
            wanted = "a divisor or a multiple" if multiple else "a divisor"
            raise ValueError(f"{name} has {heads} heads: expected {wanted} of the {g} heads of the state")

    def _lengths(self, lengths: Any, steps: int) -> Any:
        """Host ints (..., 1, 1, 1), in rows, or None where no token is padding."""
        if lengths is None:
            return None
        found = per_batch("lengths", lengths, self.lead)
        most = self.t // steps
        if found.size and (found.min() < 0 or found.max() > most):
            raise ValueError(f"lengths is {found.tolist()}: expected between 0 and {most}")
        return steps * found.reshape((*(self.lead if found.size != 1 else (1,) * len(self.lead)), 1, 1, 1))

    # ------------------------------------------------------------------ heads

    def _meet(self, x: Any, queries: bool = False) -> Any:
        """(..., heads, c, n) as (..., g, r, c, n)."""
        xp, heads, g = self.xp, x.shape[-3], self.g
        if heads == g:
            return xp.expand_dims(x, axis=-3)
        lead, tail = tuple(x.shape[:-3]), tuple(x.shape[-2:])
        tile = self.head_map == "tile"
        if heads < g:
            times = g // heads
            axes, wide = (-4, (times, heads)) if tile else (-3, (heads, times))
            x = xp.broadcast_to(xp.expand_dims(x, axis=axes), (*lead, *wide, *tail))
            return xp.reshape(x, (*lead, g, 1, *tail))
        if tile:
            return xp.moveaxis(xp.reshape(x, (*lead, heads // g, g, *tail)), -4, -3)
        return xp.reshape(x, (*lead, g, heads // g, *tail))

    def _part(self, x: Any, heads: int) -> Any:
        """(..., g, r, c, n) back as (..., heads, c, n); the gradient of a shared head is a sum."""
        xp, g = self.xp, self.g
        if heads == g:
            return x[..., 0, :, :]
        lead, tail = tuple(x.shape[:-4]), tuple(x.shape[-2:])
        tile = self.head_map == "tile"
        if heads < g:
            wide = (g // heads, heads) if tile else (heads, g // heads)
            return xp.sum(xp.reshape(x, (*lead, *wide, *tail)), axis=-4 if tile else -3)
        return xp.reshape(xp.moveaxis(x, -3, -4) if tile else x, (*lead, heads, *tail))

    # ------------------------------------------------------------------ rows of a piece

    def rows(self, at: slice) -> Rows:
        found = Rows()
        xp, c = self.xp, at.stop - at.start
        keep = None
        if self.lengths is not None:
            real = np.arange(at.start, at.stop)[:, None] < self.lengths[..., None]  # (..., 1, 1, c, 1)
            keep = None if real.all() else real
        found.keep = None if keep is None else to_namespace(keep, xp, like=self.like)
        for name, x in self.arrays.items():
            found[name] = self._kept(found, self._meet(x[..., at, :]))
        gamma = None
        for x in self.decays.values():
            own = xp.expand_dims(x[..., at, :], axis=-3)
            gamma = own if gamma is None else gamma + own
        if self.head_decay is not None:
            own = xp.broadcast_to(self.head_decay[:, None, None, None], (self.g, 1, c, 1))
            if self.steps > 1:
                own = hidden(self._first(at), own)
            gamma = own if gamma is None else gamma + own
        if gamma is None:
            gamma = xp.zeros((1, 1, c, 1), dtype=self.like.dtype, device=device(self.like))
        resets = None
        if self.reset is not None and self.reset[..., at].any():
            marks = self.reset[..., None, None, at]
            if keep is not None:
                marks = marks & keep[..., 0]
            resets = to_namespace(np.cumsum(marks, axis=-1), xp, like=self.like)
        found.decays = Decays(self.backend, self._kept(found, gamma), resets)
        return found

    def _first(self, at: slice) -> Any:
        """(c, 1) bool: the first rows of tokens, where they decay."""
        return to_namespace(np.arange(at.start, at.stop)[:, None] % self.steps == 0, self.xp, like=self.like)

    def _kept(self, rows: Rows, x: Any) -> Any:
        return x if rows.keep is None else hidden(rows.keep, x)

    # ------------------------------------------------------------------ forward, backward

    def forward(self, rule: Callable[[Rows, Any], tuple[Any, Any, Any]]) -> tuple[Any, Any, list[Any]]:
        """Output (..., heads, t, e), state (..., g, d, e), and the states that a backward starts from.

        ``rule(rows, state)`` gives the output of the rows, the state behind them, and what its backward needs.
        """
        state, kept = self.start, []
        heads = self.heads
        output = _Assembled(self.xp, (*self.lead, heads, self.t, self.e), self.like)
        with self.backend.quiet():
            for n, at in enumerate(self.pieces):
                if n % self.every == 0:
                    kept.append(state)
                rows = self.rows(at)
                own, state, _ = rule(rows, state)
                output.put(at, self._part(self._kept(rows, own), heads))
        return output.whole(), state[..., 0, :, :] + 0, kept

    def backward(
        self,
        rule: Callable[[Rows, Any], tuple[Any, Any, Any]],
        back: Callable[[_Chunk, Any, Any, Pull], tuple[dict[str, Any], Any]],
        kept: list[Any],
        d_output: Any,
        d_state: Any,
    ) -> dict[str, Any]:
        """Gradients of the arrays, decays, ``head_decay`` and ``state``.

        ``back(chunk, d_output, d_state, pull)`` gives the cotangents of the rows by name and of the state at the entry; names
        that are no array of the walk (``bonus``) are parameters: theirs are added up.
        """
        xp, heads = self.xp, self.heads
        shape = (*self.lead, self.g, self.d, self.e)
        if d_state is None:
            d_state = xp.zeros(shape, dtype=self.like.dtype, device=device(self.like))
        d_state = xp.expand_dims(xp.broadcast_to(d_state, shape), axis=-3)
        found = {n: _Assembled(xp, self._shape(x), self.like) for n, x in (self.arrays | self.decays).items()}
        shared: dict[str, Any] = {}
        given = bool(self.decays) or self.head_decay is not None
        with self.backend.quiet():
            for group in range(len(kept) - 1, -1, -1):
                first = group * self.every
                chunks, state = [], kept[group]
                for at in self.pieces[first : first + self.every]:
                    rows = self.rows(at)
                    _, after, record = rule(rows, state)
                    chunks.append(_Chunk(rows, state, record))
                    state = after
                for n in range(len(chunks) - 1, -1, -1):
                    at, chunk = self.pieces[first + n], chunks.pop()
                    if d_output is None:
                        c = at.stop - at.start
                        own = xp.zeros((*self.lead, heads, c, self.e), dtype=self.like.dtype, device=device(self.like))
                    else:
                        own = d_output[..., at, :]
                    own = self._kept(chunk.rows, self._meet(own))
                    pull = Pull(chunk.rows.decays, given or self.decays_of_rule)
                    d_rows, d_state = back(chunk, own, d_state, pull)
                    if given:
                        d_rows["gamma"] = pull.gamma()
                    self._place(found, shared, at, chunk.rows, d_rows)
        gradients = {n: x.whole() for n, x in found.items()}
        if "decay" in gradients:
            gradients["decay"] = gradients["decay"][..., 0]
        return {**gradients, **shared, "state": d_state[..., 0, :, :] + 0}

    def _shape(self, x: Any) -> tuple[int, ...]:
        return (*self.lead, *x.shape[-3:])

    def _place(self, found: Any, shared: Any, at: slice, rows: Rows, d_rows: dict[str, Any]) -> None:
        xp = self.xp
        for name, d in d_rows.items():
            if name == "gamma":
                d = self._kept(rows, d)
                for n, x in self.decays.items():
                    own = xp.sum(d, axis=-1, keepdims=True) if x.shape[-1] != d.shape[-1] else d
                    found[n].put(at, own[..., 0, :, :])
                if self.head_decay is not None:
                    first = hidden(self._first(at), d) if self.steps > 1 else d
                    own = einsum("...gcn->g", first[..., 0, :, :])
                    shared["head_decay"] = shared.get("head_decay", 0) + own
            elif name in self.arrays:
                d = self._kept(rows, d)
                found[name].put(at, self._part(d, self.arrays[name].shape[-3]))
            else:
                shared[name] = shared.get(name, 0) + d


class _Assembled:
    """An array put together from pieces along axis -2: in place where arrays can be written, so that nothing is held twice."""

    def __init__(self, xp: Any, shape: tuple[int, ...], like: Any) -> None:
        self.xp, self.shape, self.like = xp, shape, like
        self.place = np.empty(shape, dtype=like.dtype) if xp is np else None
        self.parts: dict[int, Any] = {}

    def put(self, at: slice, rows: Any) -> None:
        if self.place is not None:
            self.place[..., at, :] = rows
        else:
            self.parts[at.start] = self.xp.broadcast_to(rows, (*self.shape[:-2], *rows.shape[-2:]))

    def whole(self) -> Any:
        if self.place is not None:
            return self.place
        if not self.parts:
            return self.xp.zeros(self.shape, dtype=self.like.dtype, device=device(self.like))
        return self.xp.concat([self.parts[n] for n in sorted(self.parts)], axis=-2)


# ---------------------------------------------------------------------------------------------- examples


def decay_shapes(*, b: int, g: int, t: int, d: int, e: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what recurrences have in common, for :func:`drawn`."""
    return {
        "decay": (b, g, t),
        "channel_decay": (b, g, t, d),
        "head_decay": (g,),
        "state": (b, g, d, e),
        "reset": (b, t),
    }


def drawn(
    rng: "np.random.Generator",
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    *,
    required: tuple[str, ...],
    strength: float = 1.0,
) -> dict[str, Any]:
    """Arguments of an example: the required arrays, and those that the settings ask for by ``True``.

    Log decays are minus exponential numbers with the mean ``strength`` / 2, those of every second channel a tenth of it; betas
    lie in (0, 2), a reset stands at every fifth token or so; everything else is normal.
    """
    given: dict[str, Any] = {n: rng.standard_normal(shapes[n]) for n in required}
    for name, value in settings.items():
        if value is not True or name not in shapes:
            given[name] = value
        elif name.endswith("decay"):
            given[name] = -0.5 * strength * rng.exponential(size=shapes[name])
            if name == "channel_decay":
                given[name][..., 1::2] *= 0.1
        elif name == "beta":
            given[name] = rng.uniform(0.0, 2.0, shapes[name])
        elif name == "reset":
            given[name] = rng.uniform(size=shapes[name]) < 0.2
        else:
            given[name] = rng.standard_normal(shapes[name])
    return given
