"""In which type a step computes, and the scale that keeps fp16 gradients from vanishing."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from tp_core import tree_map
from tp_core.errors import ConfigError
from tp_core.plugins import Parts, Precision, StepOutput

__all__ = ["LossScaler", "RunStep", "Step", "autocast", "check_precision", "in_precision"]

Step = Callable[[Any, Any], StepOutput]
"""``step(model, batch)``, which may be typed for the user's own class of model and batch."""
RunStep = Callable[[Step, nn.Module, Any], StepOutput]
RunAny = Callable[[Any, Any, Any], StepOutput]


def check_precision(precision: object) -> None:
    """Make sure that ``precision`` is one of those there are.

    Raises:
        ConfigError: ``precision`` is something else.
    """
    if precision not in get_args(Precision):
        names = ", ".join(map(repr, get_args(Precision)))
        msg = f"precision must be one of {names}, got {precision!r}"
        raise ConfigError(msg)


def autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return what makes the context that a step runs in, or ``None`` where it needs none."""
    types = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
    if precision not in types:
        return None
    return lambda: torch.autocast(device.type, dtype=types[precision])


def in_precision(run: RunAny, precision: Precision, device: torch.device) -> RunAny:
    """Return what runs a step in a precision; ``run`` itself where nothing has to be done for it.

    Args:
        run: ``run(step, model, batch)``, as `Session.run`; or with models, as `Session.run_several`.
        precision: The precision.
        device: Where the step runs.
    """
    if precision == "bf16-true":
        return lambda step, model, batch: run(step, model, to_bfloat16(batch))
    context = autocast(precision, device)
    if context is None:
        return run

    def run_under_autocast(step: Any, model: Any, batch: Any) -> StepOutput:
        with context():
            return run(step, model, batch)

    return run_under_autocast


def to_bfloat16(batch: Any) -> Any:
    """Return ``batch`` with its tensors of floating point in bfloat16; the others as they are."""
    if isinstance(batch, Parts):
        return batch.map(to_bfloat16)
    return tree_map(_as_bfloat16, batch)


def _as_bfloat16(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.to(torch.bfloat16)
    return leaf


class LossScaler:
    """The factor on the loss that lifts fp16 gradients over the smallest number of their type.

    It is halved when a gradient came out infinite or NaN, and doubled after so many good steps in
    a row. torch's own scaler decides on each rank by itself, and ranks that hold different shards
    would decide differently; here the caller says what came out on all ranks together.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the numbers are
    those of ``torch.amp.GradScaler``.
    """

    def __init__(self, *, scale: float = 65536.0, good_steps: int = 2000) -> None:
        self.scale = scale
        self._good_steps = good_steps
        self._good = 0

    def update(self, *, finite: bool) -> None:
        """Note how a step came out."""
        if not finite:
            self.scale, self._good = self.scale / 2, 0
            return
        self._good += 1
        if self._good == self._good_steps:
            self.scale, self._good = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` takes."""
        return {"scale": self.scale, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
