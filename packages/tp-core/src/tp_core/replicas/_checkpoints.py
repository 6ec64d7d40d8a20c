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
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from tp_core.errors import ModelError

__all__ = ["correct_checkpoints"]

_FILE = torch.utils.checkpoint.__file__


def correct_checkpoints(generator: torch.Generator) -> None:
    """Put the generator's state into the enclosing checkpoints that do not have it yet.

    Raises:
        ModelError: This version of torch keeps the checkpoint's random state elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            for state in _states_of(frame, generator.device):
                if not hasattr(state, "tp_is_corrected"):
                    state.copy_(generator.get_state())
                    state.tp_is_corrected = True  # type: ignore[attr-defined]
        frame = frame.f_back


def _states_of(frame: FrameType, device: torch.device) -> Iterator[Tensor]:
    """Yield the state that a checkpoint has noted for a device."""
    name, variables = frame.f_code.co_name, frame.f_locals
    noted: dict[str, Any]
    if name == "forward" and "ctx" in variables:
        noted = vars(variables["ctx"])
    elif name == "checkpoint" and variables.get("gen") is not None:
        noted = variables["gen"].gi_frame.f_locals
    else:
        return
    if not noted.get("preserve_rng_state", True):
        return
    key = "fwd_cpu_state"
    states: list[Any] = [noted.get(key)]
    if device.type != "cpu":
        key = "fwd_device_states"
        pairs = zip(noted.get("fwd_devices", ()), noted.get(key, ()), strict=True)
        states = [state for index, state in pairs if index == device.index]
    if not all(isinstance(state, Tensor) for state in states) or "preserve_rng_state" not in noted:
        msg = (
            f"this version of torch ({torch.__version__}) does not keep a checkpoint's random state in "
            f"{key!r}, and replicas on one device would draw other numbers in backward; use one device"
        )
        raise ModelError(msg)
    yield from states
