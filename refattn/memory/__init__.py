"""Memories across segments: Transformer-XL's cache, the Compressive Transformer's second one, its compressions and losses.

    memory'      = the last rows of [memory, hidden]                                    a constant of the next segment
    compressed'  = the last rows of [compressed, f(the rows that memory lets go of)]

A memory holds rows of a layer's *input*; everything that crosses a segment's edge is a constant (stop-gradient): the
compression f learns from its own losses alone, and these losses train nothing else.

Axes: ... batch, n row of a memory, q position in the segment, m and o model channels, a tap within a span of ``rate`` rows.

Source: Dai et al. 2019, arXiv:1901.02860, section 3.2; Rae et al. 2019, arXiv:1911.05507, section 3, algorithms 1 and 2.
"""

from typing import Any

from refattn.memory.compression import compress
from refattn.memory.losses import attention_reconstruction_loss, auto_encoding_loss
from refattn.memory.streams import Step, stream
from refattn.memory.updates import update_compressed_memory, update_memory

__all__ = [
    "Step",
    "attention_reconstruction_loss",
    "auto_encoding_loss",
    "compress",
    "memory_mutations",
    "stream",
    "update_compressed_memory",
    "update_memory",
]


def __getattr__(name: str) -> Any:
    """``memory_mutations``: the ways people get ``update_compressed_memory`` wrong, loaded when they are asked for."""
    if name == "memory_mutations":
        return update_compressed_memory.mutations
    raise AttributeError(f"module 'refattn.memory' has no attribute {name!r}")
