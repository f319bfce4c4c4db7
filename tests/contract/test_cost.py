"""What `cost` says is computed is what a counting namespace counts, forward and backward."""

import numpy as np
import pytest
from contract.harness import TABLES, ids

import refattn as ra
from refattn import precision

COUNTED = [(m, str(i)) for m, table in TABLES.items() for i in range(len(getattr(table, "COUNTED", ())))]


@pytest.mark.parametrize("mechanism, index", COUNTED, ids=ids)
def test_computed_multiplies_are_the_counted_ones(mechanism, index):
    options, sizes = TABLES[mechanism].COUNTED[int(index)]
    attention = ra.mechanisms[mechanism]
    arguments = attention.example(np.random.default_rng(int(index)), **options)
    more = {"through_memory": True} if mechanism == "compressive_attention" else {}
    space = precision.counting()
    moved = {n: space.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    result, pullback = attention.vjp(**moved, **more)
    forward, backward = (attention.cost(**sizes, direction=d) for d in ("forward", "backward"))
    assert space.counts.multiplies == forward.computed_multiplies
    space.counts.reset()
    outputs = [n for n in attention.outputs if n.startswith("output")]  # a long and a global one, where there are two
    pullback(**{n: space.asarray(np.ones(getattr(result, n).shape)) for n in outputs})
    assert space.counts.multiplies == backward.computed_multiplies
    assert forward.multiplies <= forward.computed_multiplies
    assert backward.multiplies <= backward.computed_multiplies
