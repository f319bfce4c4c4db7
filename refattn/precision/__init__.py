"""Floating-point formats, instrumented namespaces, and a-priori bounds on the rounding of softmax attention.

* `unit_roundoff`, `ulp_distance`, `round_to`: what a format can hold.
* `rounding`, `counting`: array API namespaces whose arrays round after every operation, or count what is done to them.
  Mechanisms take the namespace of their inputs, so they run in either without knowing.
* `output_bound`: how far an attention output may be from the exact one by rounding alone.
"""

from refattn.precision.bounds import Bounds, output_bound
from refattn.precision.formats import round_to, ulp_distance, unit_roundoff
from refattn.precision.instrumented import Counts, Instrumented, InstrumentedArray, counting, rounding

__all__ = [
    "Bounds",
    "Counts",
    "Instrumented",
    "InstrumentedArray",
    "counting",
    "output_bound",
    "round_to",
    "rounding",
    "ulp_distance",
    "unit_roundoff",
]
