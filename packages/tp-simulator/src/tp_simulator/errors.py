"""Errors of tp-simulator."""

__all__ = ["BuildError"]


class BuildError(RuntimeError):
    """The extension cannot be compiled here; the message says what is missing."""
