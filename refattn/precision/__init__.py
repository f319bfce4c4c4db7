"""Floating-point formats, instrumented namespaces, and a-priori bounds on the rounding of softmax attention.

* `unit_roundoff`, `ulp_distance`, `round_to`: what a format can hold.
* `rounding`, `counting`, `injecting`: array API namespaces whose arrays round after every operation, count what is done
  to them, or err at random as a kernel may. Mechanisms take the namespace of their inputs, so they run in any of them
  without knowing.
* `softmax_bounds`: how far output, lse and gradients of softmax attention may be from the exact ones by rounding alone.
"""

from refattn.precision.formats import round_to, ulp_distance, unit_roundoff
from refattn.precision.injecting import injecting
from refattn.precision.instrumented import Counts, Instrumented, InstrumentedArray, counting, rounding
from refattn.precision.softmax import Bounds, Rounding, SoftmaxCall, softmax_bounds

__all__ = [
    "Bounds",
    "Counts",
    "Instrumented",
    "InstrumentedArray",
    "Rounding",
    "SoftmaxCall",
    "counting",
    "injecting",
    "round_to",
    "rounding",
    "softmax_bounds",
    "ulp_distance",
    "unit_roundoff",
]
