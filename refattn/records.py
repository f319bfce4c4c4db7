"""Plain frozen records that several rooms use."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "AttentionProblem",
    "AttentionSettings",
    "Block",
    "Capability",
    "Cost",
    "Counts",
    "Elements",
    "Mutation",
    "Pass",
    "Result",
    "Sizes",
]


class Result:
    """What a mechanism returns: named arrays, each an attribute.  Read-only.

    >>> Result(output=1.0, lse=2.0).lse
    2.0
    """

    __slots__ = ("_fields",)
    _fields: Mapping[str, Any]

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_fields", MappingProxyType(fields))

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields by name."""
        return self._fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}: this result has {', '.join(self._fields)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Result is read-only")

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_result, (dict(self._fields),)

    def __repr__(self) -> str:
        parts = (
            f"{n}: {getattr(x, 'dtype', type(x).__name__)}{tuple(getattr(x, 'shape', ()))}"
            for n, x in self._fields.items()
        )
        return f"Result({', '.join(parts)})"


def _rebuild_result(fields: dict[str, Any]) -> Result:
    return Result(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Exact operation and byte counts of one call.

    ``multiplies`` are the multiply-adds over visible pairs, ``computed_multiplies`` those over the pairs of the blocks
    that are really computed; ``elementwise`` counts operations that are no multiply-adds; bytes are bytes.
    """

    multiplies: int = 0
    computed_multiplies: int = 0
    elementwise: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    parameters: int = 0

    @property
    def flops(self) -> int:
        """2 x multiplies + element-wise operations."""
        return 2 * self.multiplies + self.elementwise

    def __add__(self, other: "Cost") -> "Cost":
        """Costs one after the other: counts add up, the peak is the larger one."""
        names = [f.name for f in dataclasses.fields(self)]
        total = {n: getattr(self, n) + getattr(other, n) for n in names}
        total["peak_bytes"] = max(self.peak_bytes, other.peak_bytes)
        return Cost(**total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elements:
    """Numbers of array elements by what they are stored in.

    ``storage``: the dtype of the inputs.  ``compute``: the dtype computed in, of at least 4 bytes.  ``index``: integers of
    8 bytes.  ``flag``: booleans of 1 byte.
    """

    storage: int = 0
    compute: int = 0
    index: int = 0
    flag: int = 0

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(**{n: x + getattr(other, n) for n, x in vars(self).items()})

    def __mul__(self, times: int) -> "Elements":
        return Elements(**{n: times * x for n, x in vars(self).items()})

    __rmul__ = __mul__

    def bytes(self, itemsize: int) -> int:
        """Bytes where an element of the inputs takes ``itemsize``."""
        return itemsize * self.storage + max(4, itemsize) * self.compute + 8 * self.index + self.flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """Counts of one forward or one backward.

    ``multiplies``, ``computed`` (None: as many) and ``elementwise`` as in :class:`Cost`; ``read`` and ``written`` are what
    enters and leaves, ``peak`` is the most that lives at once beside the inputs.
    """

    multiplies: int = 0
    computed: int | None = None
    elementwise: int = 0
    read: Elements = Elements()
    written: Elements = Elements()
    peak: Elements = Elements()

    def __add__(self, other: "Pass") -> "Pass":
        """One after the other: counts add up, the peak is the larger one of each kind."""
        computed = [p.multiplies if p.computed is None else p.computed for p in (self, other)]
        peak = Elements(**{n: max(x, getattr(other.peak, n)) for n, x in vars(self.peak).items()})
        names = ("multiplies", "elementwise", "read", "written")
        return Pass(**{n: getattr(self, n) + getattr(other, n) for n in names}, computed=sum(computed), peak=peak)

    def cost(self, itemsize: int) -> Cost:
        """The counts with elements of the inputs of ``itemsize`` bytes."""
        return Cost(
            multiplies=self.multiplies,
            computed_multiplies=self.multiplies if self.computed is None else self.computed,
            elementwise=self.elementwise,
            bytes_read=self.read.bytes(itemsize),
            bytes_written=self.written.bytes(itemsize),
            peak_bytes=self.peak.bytes(itemsize),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Closed forms of one call: its forward, its backward, what the forward ``saved`` for it, learned ``parameters``."""

    forward: Pass
    backward: Pass
    saved: Elements = Elements()
    parameters: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        names = ("forward", "backward", "saved", "parameters")
        return Counts(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def cost(self, itemsize: int, direction: str, recompute: bool) -> Cost:
        """The Cost of ``"forward"``, ``"backward"`` or ``"both"`` with elements of the inputs of ``itemsize`` bytes.

        ``recompute`` is checkpointing: only what the forward reads is saved, and the backward runs the forward again and
        holds its results.
        """
        forward, backward = self.forward.cost(itemsize), self.backward.cost(itemsize)
        if recompute:
            backward = dataclasses.replace(forward + backward, peak_bytes=forward.bytes_written + backward.peak_bytes)
        saved = forward.bytes_read if recompute else self.saved.bytes(itemsize)
        forward = dataclasses.replace(forward, saved_bytes=saved)
        chosen = {"forward": forward, "backward": backward, "both": forward + backward}[direction]
        return dataclasses.replace(chosen, parameters=self.parameters)


@dataclasses.dataclass(frozen=True)
class Capability:
    """Whether a backend runs here, and why not."""

    name: str
    usable: bool
    reason: str
    fused: bool = False


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A way people get a mechanism wrong, written on its own.

    ``forward(arguments)`` returns the Result that the mistake gives, or None where the mistake does not show for these
    arguments; ``gradients(arguments, cotangents)`` likewise a dict of gradients or None.  The catalogue name is
    ``class_`` (also readable as the attribute ``class``).
    """

    class_: str
    says: str
    forward: Callable[[dict[str, Any]], Result | None] | None = None
    gradients: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | None] | None = None


setattr(Mutation, "class", property(lambda self: self.class_))


@dataclasses.dataclass(frozen=True)
class Block:
    """One batch of equal-size blocks: which queries meet which keys.

    ``queries`` and ``keys`` are selections (``refattn.core.selections``); ``visible`` is None where every pair of the block is
    seen, else a function of no arguments returning a bool array that broadcasts to the logits of the block.
    """

    queries: Any
    keys: Any
    visible: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Axes of q (..., h, q, d), k (..., g, k, d) and v (..., g, k, e); ``lead`` is what their leading axes broadcast to."""

    lead: tuple[int, ...]
    h: int
    g: int
    q: int
    k: int
    d: int
    e: int

    @property
    def b(self) -> int:
        """Batch entries: all leading axes together."""
        return math.prod(self.lead)

    @property
    def r(self) -> int:
        """Query heads of one key head."""
        return self.h // self.g if self.g else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Softmax attention but for q, k and v: sizes, what is done to a logit, who sees whom, how it is cut into blocks.

    Query head (g, r) is the r-th of key head g, and ``heads`` (g,r) its number in the caller's order.  ``terms`` act on the
    logits in order; ``visibility`` is a Pattern or None; ``blocks(group)`` lists the blocks (None: slices cut by the core),
    ``tile`` their rows and keys (None: as fits the cache); ``apart``: key heads are never computed together, because their
    blocks differ.  ``sinks`` (g,r,n) or None; ``dropout`` is a pair (keep mask (b|1,g|1,r|1,q|1,k|1), factor) or None;
    ``query_lengths`` and ``key_lengths`` are host ints (b,) or None.  ``dtype`` and ``device`` are those of the arrays.
    """

    sizes: Sizes
    heads: Any
    scale: Any
    dtype: Any
    device: Any = None
    terms: tuple[Any, ...] = ()
    visibility: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    sinks: Any = None
    lse_includes_sinks: bool = True
    dropout: tuple[Any, float] | None = None
    blocks: Callable[..., Iterator[Block]] | None = None
    tile: tuple[int, int] | None = None
    apart: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionProblem(AttentionSettings):
    """Softmax attention as the core computes it: ``q`` (b,g,r,q,d), ``k`` (b|1,g,k,d), ``v`` (b|1,g,k,e), computed in their dtype."""

    q: Any
    k: Any
    v: Any
