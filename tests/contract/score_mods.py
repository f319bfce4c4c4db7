"""Functions of a logit and its place, for any namespace: Python numbers meet floating arrays only."""

from array_api_compat import array_namespace


def _real(logits, *places):
    xp = array_namespace(logits)
    return [xp.astype(x, logits.dtype) for x in places]


def tilt(logits, b, h, i, j):
    b, h, distance = _real(logits, b, h, i - j)
    return logits * (1 + 0.1 * h) + 0.1 * b - 0.05 * distance


def bend(logits, b, h, i, j):
    return tilt(logits, b, h, i, j) + 0.1 * logits**2


def bend_with_derivative(logits, b, h, i, j):
    return bend(logits, b, h, i, j)


bend_with_derivative.derivative = lambda logits, b, h, i, j: (1 + 0.1 * _real(logits, h)[0]) + 0.2 * logits
