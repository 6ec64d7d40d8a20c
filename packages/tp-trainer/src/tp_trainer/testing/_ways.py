"""The ways to train that all lead where a loop by hand on one device leads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["WAYS", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        trainer: Arguments of the trainer.
        fit: Arguments of ``fit``.
        fits: Over how many calls of ``fit`` in one session the epochs are spread.
        gamma: By what a scheduler multiplies the learning rate after each step, or ``None``.
        bad_target: What the target of one sample is instead, or ``None``; its batch is to be left out.
        dtype: Of the model and the data before they are prepared.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    fits: int = 1
    gamma: float | None = None
    bad_target: float | None = None
    dtype: torch.dtype = torch.float64


WAYS = {
    "plain": Way(),
    "two fits": Way(fits=2),
    "schedule": Way(gamma=0.7),
    "accumulate": Way({"accumulate": 3}),
    "clip_norm": Way(fit={"clip_norm": 0.05}),
    "clip_value": Way(fit={"clip_value": 0.005}),
    "accumulate and clip": Way({"accumulate": 2}, {"clip_norm": 0.05, "clip_value": 0.02}),
    "nonfinite skip": Way(fit={"nonfinite": "skip"}, bad_target=float("nan")),
    "compile": Way({"compile": True}),
    "bf16-mixed": Way({"precision": "bf16-mixed"}, dtype=torch.float32),
    "fp16-mixed": Way({"precision": "fp16-mixed"}, bad_target=1e15, dtype=torch.float32),
    "bf16-true": Way({"precision": "bf16-true"}, dtype=torch.float32),
}
