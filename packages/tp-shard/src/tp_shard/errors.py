"""Errors that only this package raises."""

from tp_core.errors import TpError

__all__ = ["OutOfRangeError", "VerificationError"]


class OutOfRangeError(TpError, IndexError):
    """A token or a class outside the range of the layer or the loss: below 0, or too large.

    It is raised on every rank. On accelerators the device asserts instead, as with torch. It is an
    ``IndexError``, as torch's error is on the CPU.
    """


class VerificationError(TpError, AssertionError):
    """A plan under which a model computes different numbers: see :func:`tp_shard.verify`.

    It is an ``AssertionError``, so that tests report it as a failure.
    """
