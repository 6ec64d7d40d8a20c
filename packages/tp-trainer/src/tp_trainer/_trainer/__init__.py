"""The trainer: its public methods, by purpose, over one session."""

from tp_trainer._trainer._trainer import Trainer

__all__ = ["Trainer"]
