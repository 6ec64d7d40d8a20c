"""The settings of the caller's thread, which hold in the replicas' threads, too."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from tp_core.replicas._random import SerializedRng

__all__ = ["Caller", "has_modes", "on_device"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The settings of a thread that torch and Python keep per thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: For each device type with autocast on: its dtype.
        autocast_cache: Whether autocast keeps the weights that it cast.
        num_threads: Threads of one operation on the CPU.
        default_device: Where factory functions make tensors, if not on the CPU.
        home: The device of replica 0.
        streams: The caller's current stream on each accelerator.
        variables: The context variables.
        saved_tensors: The two functions that pack and unpack what autograd keeps, if there are any.
        saved_tensors_refusal: Why such hooks are disabled, if they are.
        has_modes: Whether a TorchFunctionMode or TorchDispatchMode is active in this thread.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    num_threads: int
    default_device: torch.device | None
    home: torch.device
    streams: dict[torch.device, Any]
    variables: Context
    saved_tensors: tuple[Callable[..., Any], Callable[..., Any]] | None
    saved_tensors_refusal: str | None
    has_modes: bool

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
            copy_context(),
            # torch has no public way to ask for the hooks that it lets one set, nor for modes.
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            has_modes(),
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
        # These two stay set in our threads between calls.
        if torch.is_grad_enabled() is not self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        variables = self.variables.copy()  # a context cannot be entered twice at once
        contexts = self._contexts(device)
        if not contexts:
            return variables.run(function, replica, part)
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return variables.run(function, replica, part)

    def _contexts(self, device: torch.device) -> list[AbstractContextManager[Any]]:
        contexts: list[AbstractContextManager[Any]] = [
            # A part may be on another device: its transfer has to come after what made it.
            stream
            for other, stream in self.streams.items()
            if other != device and stream.stream_id != 0
        ]
        if device.type != "cpu":
            contexts += [on_device(device), self.streams[device]]
        if self.inference:
            contexts.append(torch.inference_mode())
        contexts += [
            torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
            for kind, dtype in self.autocast
        ]
        if self.saved_tensors is not None:
            contexts.append(saved_tensors_hooks(*self.saved_tensors))
        if self.saved_tensors_refusal is not None:
            contexts.append(disable_saved_tensors_hooks(self.saved_tensors_refusal))
        default = self.default_device
        if default is not None:
            # The caller's own device becomes the replica's; any other stays.
            contexts.append(device if default == self.home else default)
        return contexts


def has_modes() -> bool:
    """Return whether this thread is in a TorchFunctionMode or TorchDispatchMode of other code.

    The parts of a call then run one after the other, in this thread.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    from torch.utils._device import DeviceContext  # torch loads it when it is first needed

    # A default device is such a mode, too; so is the one that serializes random operations.
    return any(
        not isinstance(torch._C._get_function_stack_at(i), DeviceContext | SerializedRng)
        for i in range(torch._C._len_torch_function_stack())
    )


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which an accelerator is the current one."""
    context: AbstractContextManager[Any] = torch.accelerator.device_index(device.index)
    return context
