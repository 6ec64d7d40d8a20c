"""Random numbers inside of activation checkpoints, where replicas share a generator.

``torch.utils.checkpoint`` notes the generator's state before a forward, to draw the same numbers again
when it runs that forward once more in backward. A replica that shares the generator has a state of its
own, which is in the generator only while it draws. So the state that was noted is replaced by the
replica's own, when the replica first draws inside of the checkpoint. torch keeps it in a local variable
of the functions on the stack; if it no longer does, that is an error, not a wrong gradient.

Backward has to come after the replicas' call, as it does in training: what a replica computes by
backward inside of its own call draws while others do, without any lock.
"""

import sys
from types import FrameType, GeneratorType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from tp_core.errors import ModelError

__all__ = ["correct_checkpoints"]

_FILE = torch.utils.checkpoint.__file__
_ASKED = "preserve_rng_state"


def correct_checkpoints(generator: torch.Generator) -> None:
    """Put the generator's state into the enclosing checkpoints that do not have it yet.

    Raises:
        ModelError: This version of torch keeps the checkpoint's random state elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    is_found = False  # what the checkpoint has noted, in a function that it called
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            noted = _noted_by(frame)
            if noted is not None:
                _correct(noted, generator)
            is_found = is_found or noted is not None
            if frame.f_code.co_name == "checkpoint":
                if not is_found:
                    raise _moved(_ASKED)
                is_found = False
        frame = frame.f_back


def _noted_by(frame: FrameType) -> dict[str, Any] | None:
    """Return what a checkpoint's function has noted before the forward, by its names in torch."""
    variables = frame.f_locals
    if frame.f_code.co_name == "forward" and "ctx" in variables:
        noted: dict[str, Any] = vars(variables["ctx"])
        return noted
    steps = variables.get("gen")  # whatever the function that drives them is called
    if isinstance(steps, GeneratorType) and steps.gi_frame is not None and steps.gi_code.co_filename == _FILE:
        return steps.gi_frame.f_locals
    return None


def _correct(noted: dict[str, Any], generator: torch.Generator) -> None:
    if _ASKED not in noted:
        raise _moved(_ASKED)
    if not noted[_ASKED]:
        return
    device = generator.device
    key = "fwd_cpu_state"
    states: list[Any] = [noted.get(key)]
    if device.type != "cpu":
        key = "fwd_device_states"
        pairs = zip(noted.get("fwd_devices", ()), noted.get(key, ()), strict=True)
        states = [state for index, state in pairs if index == device.index]
    for state in states:
        if not isinstance(state, Tensor):
            raise _moved(key)
        if not hasattr(state, "tp_is_corrected"):
            state.copy_(generator.get_state())
            state.tp_is_corrected = True  # type: ignore[attr-defined]


def _moved(key: str) -> ModelError:
    return ModelError(
        f"this version of torch ({torch.__version__}) does not keep a checkpoint's random state in "
        f"{key!r}, and replicas on one device would draw other numbers in backward; use one device"
    )
