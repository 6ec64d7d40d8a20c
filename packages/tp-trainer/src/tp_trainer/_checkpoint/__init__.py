"""Checkpoints: what a run is made of, in folders that are whole or not there."""

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._checkpoint._keeper import Keeper
from tp_trainer._checkpoint._plain import to_json
from tp_trainer._checkpoint._settings import Checkpoints
from tp_trainer._checkpoint._tensors import collect, optimizer_values, restore

__all__ = [
    "Checkpoints",
    "Keeper",
    "collect",
    "generators",
    "optimizer_values",
    "restore",
    "to_json",
]
