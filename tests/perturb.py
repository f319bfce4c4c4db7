"""Rounding as another BLAS might make it: `pytest --perturb SEED`.

A product that rounds (np.matmul, which everything in refattn ends in, and np.einsum of the definitions) gets +- u sqrt(n) of
the sum of its absolute terms added to every element: about what the order of n additions decides.  A tolerance that holds only
for the BLAS it was tried with then shows.

The sign comes from the bits of the element and the seed.  So it is as good as random, and yet a function of the numbers: equal
sums stay equal, the same call gives the same result twice, and a row does not depend on what stands in another.
Unchanged are sums that no BLAS would round otherwise: of one term, of small multiples of 2**-8 or whole numbers, and what is not finite.
"""

import math

import numpy as np

GRID = 2.0**8
_matmul, _einsum = np.matmul, np.einsum


def _signs(x, seed):
    """+-1 for every element, from its bits (splitmix64)."""
    bits = np.ascontiguousarray(x).astype(np.float64).view(np.uint64) ^ np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where(bits >> np.uint64(63), 1.0, -1.0)


def _on_grid(x, grid):
    with np.errstate(invalid="ignore"):
        return np.rint(x * grid) == x * grid


def _moved(y, product, factors, count, seed):
    """y with the rounding added; ``factors`` are the operand pairs (or tuples) whose products it sums."""
    u = np.finfo(y.dtype).eps / 2
    terms = sum(product(*(np.abs(f).astype(np.float64) for f in pair)) for pair in factors)
    several = sum(product(*((f != 0).astype(np.float64) for f in pair)) for pair in factors) > 1
    number = sum(product(*((f == f).astype(np.float64) for f in pair)) for pair in factors)
    exact = False
    for grid in (GRID, 1.0):
        of_grid = sum(product(*(_on_grid(f, grid).astype(np.float64) for f in pair)) for pair in factors)
        exact = exact | ((of_grid == number) & (terms * grid**2 * u <= 1))
    delta = u * math.sqrt(count) * terms * _signs(y, seed)
    rounds = several & ~exact & np.isfinite(y) & np.isfinite(delta)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = np.where(rounds, y + delta, y).astype(y.dtype)
    return np.where(np.isfinite(moved), moved, y)


def perturbed(product, y, operands, count, seed):
    """The product of these operands, y, rounded otherwise; ``product`` evaluates it for any operands."""
    if y.dtype.kind not in "fc" or y.size == 0 or count < 2 or not all(isinstance(x, np.ndarray) for x in operands):
        return y
    with np.errstate(all="ignore"):
        if y.dtype.kind == "f":
            return _moved(y, product, [operands], count, seed)
        if len(operands) != 2:
            return y
        (a, b), (c, d) = ((x.real, x.imag) for x in operands)
        real = _moved(y.real, product, [(a, c), (b, d)], 2 * count, seed)
        imaginary = _moved(y.imag, product, [(a, d), (b, c)], 2 * count, seed)
    return real + 1j * imaginary


def install(seed):
    """From here on np.matmul and np.einsum round otherwise."""

    def matmul(a, b, out=None, **more):
        y = _matmul(a, b, **more)
        y = perturbed(_matmul, y, (a, b), np.shape(a)[-1], seed) if isinstance(y, np.ndarray) else y
        if out is None:
            return y
        out[...] = y
        return out

    def einsum(spec, *operands, **more):
        y = _einsum(spec, *operands, **more)
        if not isinstance(spec, str) or not isinstance(y, np.ndarray) or "out" in more:
            return y
        return perturbed(lambda *x: _einsum(spec, *x, **more), y, operands, _contracted(spec, operands), seed)

    np.matmul, np.einsum = matmul, einsum


def _contracted(spec, operands):
    """How many terms one element of the result sums."""
    inputs, _, output = spec.replace(" ", "").partition("->")
    sizes = {}
    for labels, x in zip(inputs.split(","), operands, strict=True):
        left, _, right = labels.partition("...")
        sizes |= dict(zip(left, x.shape, strict=False)) | dict(zip(right[::-1], x.shape[::-1], strict=False))
    return math.prod(n for label, n in sizes.items() if label not in output) if output else 1
