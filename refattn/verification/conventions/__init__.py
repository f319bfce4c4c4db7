"""What an implementation does by design, and how the signatures of well-known libraries are called.

A :class:`Conventions` record says where implementations differ without one of them being wrong: where query 0 stands on
the key axis, which key head a query head reads, how many keys a window of W holds, the base of the lse, what an empty
row gives.  ``None`` means "not declared"; the reference then follows refattn's own default (:data:`DEFAULTS`).

Three families of functions use the record:

- :func:`reference_arguments`, :func:`reference_cotangents`, :func:`reference_result` and :func:`reference_gradients`
  carry a probe to refattn and its results back, so that the reference follows the declared conventions;
- :func:`open_elements` and :func:`gradients_open` say where a convention leaves the value open;
- :func:`alternatives` flips one convention at a time: what diagnosis tries when the candidate disagrees.

A :class:`Preset` is a record together with the call translation of one library: names, layout, one argument that stands
for two options, switches such as ``enable_gqa``.
"""

from refattn.verification.conventions.presets import LSE_SWITCHES, PRESETS, Preset, detect, resolve
from refattn.verification.conventions.record import CONVENTION_OPTIONS, DEFAULTS, Conventions, alternatives
from refattn.verification.conventions.reference import (
    gradients_open,
    open_elements,
    reference_arguments,
    reference_cotangents,
    reference_gradients,
    reference_result,
    settle,
)
from refattn.verification.errors import Unsupported, UsageError

__all__ = [
    "CONVENTION_OPTIONS",
    "DEFAULTS",
    "LSE_SWITCHES",
    "PRESETS",
    "Conventions",
    "Preset",
    "Unsupported",
    "UsageError",
    "alternatives",
    "detect",
    "gradients_open",
    "open_elements",
    "reference_arguments",
    "reference_cotangents",
    "reference_gradients",
    "reference_result",
    "resolve",
    "settle",
]
