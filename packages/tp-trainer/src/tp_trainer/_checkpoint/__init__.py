"""Checkpoints: what a run is made of, in folders that are whole or not there."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_trainer._checkpoint._checkpointer import Checkpointer as Checkpointer
    from tp_trainer._checkpoint._settings import Checkpoints as Checkpoints
    from tp_trainer._checkpoint._verifying import verify as verify
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_trainer._checkpoint._checkpointer": ["Checkpointer"],
            "tp_trainer._checkpoint._settings": ["Checkpoints"],
            "tp_trainer._checkpoint._verifying": ["verify"],
        },
    )
