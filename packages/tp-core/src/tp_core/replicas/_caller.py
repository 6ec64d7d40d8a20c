"""The settings of the caller's thread, which hold in the replicas' threads, too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from tp_core.replicas._random import SerializedRng

__all__ = ["Caller", "has_modes", "on_device", "on_streams"]


class Caller(NamedTuple):
    """The settings of a thread that torch and Python keep per thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        num_threads: Threads of one operation on the CPU.
        variables: The context variables.
        has_modes: Whether a mode or a transform of torch.func is active in this thread: `has_modes`.
        contexts: What returns, for the device of a replica, a context in which it runs; empty where no
            other setting is in use.
    """

    grad: bool
    inference: bool
    num_threads: int
    variables: Context
    has_modes: bool
    contexts: Sequence[Callable[[torch.device], AbstractContextManager[Any]]]

    @classmethod
    def capture(cls, devices: tuple[torch.device, ...], types: tuple[str, ...]) -> "Caller":
        """Read the settings of this thread."""
        contexts: list[Callable[[torch.device], AbstractContextManager[Any]]] = []
        if types != ("cpu",):
            streams = {d: torch.accelerator.current_stream(d) for d in devices if d.type != "cpu"}
            contexts.append(partial(on_streams, streams))
        inference = torch.is_inference_mode_enabled()
        if inference:
            contexts.append(lambda _: torch.inference_mode())
        for kind in types:
            if torch.is_autocast_enabled(kind):
                contexts.append(_autocast(kind))
        # torch has no public way to ask for the hooks that it lets one set, nor for modes.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            contexts.append(lambda _: saved_tensors_hooks(*hooks))
        refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if refusal is not None:
            contexts.append(lambda _: disable_saved_tensors_hooks(refusal))
        has_function_modes = torch._C._len_torch_function_stack() > 0
        if has_function_modes:  # a default device is one
            default = torch.empty(0).device  # torch.get_default_device() takes four times as long
            if default.type != "cpu":
                # The caller's own device becomes the replica's; any other stays.
                contexts.append(lambda device: device if default == devices[0] else default)
        return cls(
            torch.is_grad_enabled(),
            inference,
            torch.get_num_threads(),
            copy_context(),
            has_modes(),
            contexts,
        )

    def call(
        self,
        function: Callable[[nn.Module, Any], Any],
        replica: nn.Module,
        part: Any,
        *,
        device: torch.device,
        rng: AbstractContextManager[Any],
    ) -> Any:
        """Return ``function(replica, part)``, run in this thread with the caller's settings.

        Args:
            function: What to call.
            replica: Its first argument.
            part: Its second one.
            device: The replica's device.
            rng: The context of its random numbers.
        """
        # These two stay set in our threads between calls.
        if torch.is_grad_enabled() is not self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        variables = self.variables.copy()  # a context cannot be entered twice at once
        if not self.contexts:
            with rng:
                return variables.run(function, replica, part)
        with rng, ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(device))
            return variables.run(function, replica, part)


def _autocast(kind: str) -> Callable[[torch.device], AbstractContextManager[Any]]:
    """Return what makes contexts with this thread's autocast of a device type."""
    dtype = torch.get_autocast_dtype(kind)
    return lambda _: _in_autocast(kind, dtype)


@contextmanager
def _in_autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast without its cache of lowered weights, which all threads have in common.

    Replicas that share weights would use the one that another made, and ``torch.autocast`` empties it at its
    end: how gradients are rounded would follow from the threads' timing. Copies are never kept in it.
    """
    enabled, before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()  # so that one within, of the module's own, does not empty it, either
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_dtype(kind, before)
        torch.set_autocast_enabled(kind, enabled)


@contextmanager
def on_streams(streams: Mapping[torch.device, Any], device: torch.device) -> Iterator[None]:
    """Run on the caller's streams, on a device: the thread of a replica starts on the default ones.

    Args:
        streams: The caller's current stream on each accelerator.
        device: The replica's.
    """
    with ExitStack() as stack:
        for other, stream in streams.items():
            # A part may be on another device: its transfer has to come after what made it.
            if other != device and stream.stream_id != 0:
                stack.enter_context(stream)
        if device.type != "cpu":
            stack.enter_context(on_device(device))
            stack.enter_context(streams[device])
        yield


def has_modes() -> bool:
    """Return whether this thread is in a TorchFunctionMode, a TorchDispatchMode or a transform of torch.func.

    They are those of a thread. The parts of a call then run one after the other, in this one.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
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
