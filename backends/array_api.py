"""Any namespace of the array API standard, with the portable operations of the protocol."""

from refattn.backends.base import Backend

__all__ = ["ArrayApiBackend"]


class ArrayApiBackend(Backend):
    """Serial, portable, no assumption beyond the standard."""

    name = "array_api"
