"""refattn: attention mechanisms written once, with hand-derived gradients, and the tool that holds other kernels against them.

>>> import numpy as np
>>> import refattn as ra
>>> q, k, v = (np.random.default_rng(0).standard_normal((1, 2, 5, 4)) for _ in range(3))
>>> result, pullback = ra.scaled_dot_product_attention.vjp(q, k, v, causal=True)
>>> sorted(pullback(np.ones_like(result.output)))
['k', 'q', 'v']
"""

import importlib
from typing import Any

from refattn import cost, gates, layers, memory, patterns, positions, routing, serving
from refattn.attention import *  # noqa: F403
from refattn.attention import __all__ as _mechanism_names
from refattn.contraction import einsum
from refattn.mechanism import functions, mechanisms
from refattn.normalization import logsumexp, merge, softmax
from refattn.records import Cost, Mutation, Result

__version__ = "0.1.0"

__all__ = [
    *_mechanism_names,
    "Cost",
    "Mutation",
    "Result",
    "assert_matches",
    "cost",
    "einsum",
    "functions",
    "gates",
    "layers",
    "logsumexp",
    "mechanisms",
    "memory",
    "merge",
    "patterns",
    "positions",
    "routing",
    "serving",
    "softmax",
    "verify",
]

_LAZY = {"verify": "refattn.verification", "assert_matches": "refattn.verification"}


def __getattr__(name: str) -> Any:
    """The verifier is loaded when it is first asked for: it is not needed to compute anything."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'refattn' has no attribute {name!r}")
