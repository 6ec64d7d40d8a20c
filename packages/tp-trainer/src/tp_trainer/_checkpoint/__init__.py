"""Checkpoints: what a run is made of, in folders that are whole or not there."""

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
