"""Checkpoints: what a run is made of, in folders that are whole or not there."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_trainer._checkpoint._checkpointer import Checkpointer
    from tp_trainer._checkpoint._folders import verify
    from tp_trainer._checkpoint._settings import Checkpoints

__all__ = [
    "Checkpointer",
    "Checkpoints",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__, {"_folders": ["verify"], "_checkpointer": ["Checkpointer"], "_settings": ["Checkpoints"]}
    )
