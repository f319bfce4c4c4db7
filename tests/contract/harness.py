"""The cases of every mechanism, and what a contract check asks of one: arguments, results, cotangents, gradients.

`cases/<name>.py` stands for the mechanism of `refattn/attention/<name>.py` and holds

* ``CASES``: name -> options; small arrays, every option and every branch of the code at least once;
* ``arguments(name, seed, **more)``: the arguments of a case;
* ``LONG`` (where blocks are cut): cases long enough for several blocks, for "blocks = whole" alone;
* ``SHOWING``: cases for mistakes alone (at kinks, or long, or square, so that arrays fit in each other's place);
* ``COUNTED``: (sizes and options of an example, the same for ``cost``) where products are counted.
"""

import functools
import importlib
import zlib

import numpy as np
from support import random_cotangents

import refattn as ra

FILES = {name: mechanism.__wrapped__.__module__.rpartition(".")[2] for name, mechanism in ra.mechanisms.items()}
TABLES = {name: importlib.import_module(f"contract.cases.{file}") for name, file in FILES.items()}


class Case:
    """One call of one mechanism; everything is computed when it is first asked for, and only once."""

    def __init__(self, mechanism, name):
        self.mechanism, self.name = ra.mechanisms[mechanism], name
        self.seed = zlib.crc32(f"{mechanism}-{name}".encode())  # a case is the same wherever it runs
        drawn = TABLES[mechanism].arguments(name, self.seed)
        self.arguments = {n: x for n, x in drawn.items() if x is not None}

    def rng(self):
        """A generator of the case's own, anew for every check: no check depends on which ran before it."""
        return np.random.default_rng(self.seed)

    @functools.cached_property
    def call(self):
        return self.mechanism.vjp(**self.arguments)

    @property
    def result(self):
        return self.call[0]

    @functools.cached_property
    def cotangents(self):
        return random_cotangents(self.mechanism, self.result, self.rng())

    @functools.cached_property
    def gradients(self):
        return self.call[1](**self.cotangents)

    @functools.cached_property
    def definition(self):
        return self.mechanism.definition(**self.arguments)

    def floating(self):
        """The names of floating arrays among the arguments."""
        return [n for n, x in self.arguments.items() if isinstance(x, np.ndarray) and x.dtype == np.float64]

    def changed(self, **arrays):
        return {**self.arguments, **arrays}


@functools.lru_cache(maxsize=64)
def case(mechanism, name):
    return Case(mechanism, name)


def every(table="CASES"):
    """(mechanism, case) of all tables, for parametrize."""
    return [(m, n) for m, module in TABLES.items() for n in getattr(module, table, {})]


def ids(value):
    return str(value).removesuffix("_attention")
