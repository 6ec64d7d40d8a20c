"""What the caller's thread has set, to hold in the replicas' threads too."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Caller", "on_device"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The settings of a thread that torch keeps per thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: For each device type with autocast on: its dtype.
        autocast_cache: Whether autocast keeps the weights that it cast.
        num_threads: Threads of one operation on the CPU.
        default_device: Where factory functions make tensors, if not on the CPU.
        home: The device of replica 0.
        streams: The caller's current stream on each accelerator.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    num_threads: int
    default_device: torch.device | None
    home: torch.device
    streams: dict[torch.device, Any]

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...], types: tuple[str, ...]) -> "Caller":
        """Read the settings of this thread."""
        default = torch.empty(0).device  # torch.get_default_device() takes four times as long
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)),
            torch.is_autocast_cache_enabled(),
            torch.get_num_threads(),
            None if default.type == "cpu" else default,
            devices[0],
            {d: torch.accelerator.current_stream(d) for d in devices if d.type != "cpu"},
        )

    def call(
        self,
        function: Callable[[nn.Module, Any], Any],
        replica: nn.Module,
        part: Any,
        *,
        device: torch.device,
    ) -> Any:
        """Return ``function(replica, part)``, run in this thread with the caller's settings."""
        # A thread of ours keeps these two until the next call says otherwise.
        if torch.is_grad_enabled() is not self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        contexts = self._contexts(device)
        if not contexts:
            return function(replica, part)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return function(replica, part)

    def _contexts(self, device: torch.device) -> list[AbstractContextManager[Any]]:
        contexts: list[AbstractContextManager[Any]] = []
        if device.type != "cpu":
            contexts += [on_device(device), self.streams[device]]
        if self.inference:
            contexts.append(torch.inference_mode())
        contexts += [
            torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
            for kind, dtype in self.autocast
        ]
        default = self.default_device
        if default is not None:
            # "My device" means the replica's own; another one is meant as it is written.
            contexts.append(device if default == self.home else default)
        return contexts


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which an accelerator is the current one."""
    context: AbstractContextManager[Any] = torch.accelerator.device_index(device.index)
    return context
