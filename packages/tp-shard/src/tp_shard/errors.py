"""Errors that only this package raises."""

from tp_core.errors import TpError

__all__ = ["OutOfRangeError", "VerificationError"]


class OutOfRangeError(TpError, IndexError):
    """A token or a class that is not among those of the layer or the loss."""


class VerificationError(TpError, AssertionError):
    """A plan under which a model computes other numbers than without it."""
