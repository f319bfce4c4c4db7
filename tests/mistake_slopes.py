"""The gradients of a consistent mistake are the derivatives of what it computes, as a framework would find them."""

import numpy as np


def assert_slopes(mistake, arguments, cotangents, rng, fixed=()):
    """Central differences along one direction of each argument, two steps and Richardson: error ~ h^4 and U / h.

    Steps named in ``fixed`` are held, as frameworks hold the maximum that is subtracted before exp.  Nothing is asked of gradients
    that are NaN.
    """
    wrong = mistake.edit(arguments, cotangents)
    gradients = wrong.gradient()
    if not all(np.isfinite(x).all() for x in gradients.values()):
        return
    held = {n: getattr(wrong, n) for n in fixed if hasattr(mistake.edit, n)}

    def summed(name, step):
        result = mistake.edit({**arguments, name: arguments[name] + step}, handed=held).result()
        return sum(np.sum(np.where(np.isfinite(result[n]), result[n], 0.0) * c) for n, c in cotangents.items())

    for name, gradient in gradients.items():
        if mistake.arrays is not None and name not in mistake.arrays:
            continue
        direction = rng.standard_normal(np.shape(arguments[name]))
        coarse, fine = ((summed(name, h * direction) - summed(name, -h * direction)) / (2 * h) for h in (2e-3, 1e-3))
        slope, size = (4 * fine - coarse) / 3, np.sum(np.abs(gradient * direction))
        error = abs(np.sum(gradient * direction) - slope)
        assert error <= 1e-7 * max(1.0, size), (mistake.class_, mistake.says, name, error, size)
