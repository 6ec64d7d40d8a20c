"""Errors that only this package raises."""

from tp_core.errors import TpError

__all__ = ["OutOfRangeError", "VerificationError"]


class OutOfRangeError(TpError, IndexError):
    """A token or a class that is not among those of the layer or the loss: below 0, or too large.

    Raised on every rank, before anything is sent; on accelerators the device's own assertion takes its place,
    as with torch. It is an ``IndexError``, as torch's is on the CPU.
    """


class VerificationError(TpError, AssertionError):
    """A plan under which a model computes other numbers than without it: see :func:`tp_shard.verify`.

    It is an ``AssertionError``, so that tests report it as a failure.
    """
