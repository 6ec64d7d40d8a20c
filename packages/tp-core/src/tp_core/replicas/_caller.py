"""The settings of the caller's thread, in the threads of its replicas."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks

from tp_core.replicas._random import SerializedRng, saving_hooks


class Caller(NamedTuple):
    """The settings that torch and Python keep per thread, of the thread that calls the replicas.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        num_threads: Threads of one operation on the CPU.
        variables: The context variables.
        has_modes: Whether the parts must run in this thread: `has_modes`.
        contexts: Functions from a replica's device to a context for its call; empty where no other
            setting is in use.
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
        contexts += autocasts(types)
        # Private: torch has public ways to set these hooks and modes, and none to ask for them.
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
        """Return ``function(replica, part)``, run in this thread with the caller's settings."""
        # These two stay set in our threads between calls: a context for each call would cost more. To ask for
        # the number also makes torch's pool of threads anew in a forked process. That is not safe by itself,
        # in an operation, but here each thread holds the interpreter's lock.
        if torch.is_grad_enabled() is not self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        variables = self.variables.copy()  # a context cannot be entered twice at once
        if not self.contexts:
            with rng:
                return variables.run(function, replica, part)
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(device))
            stack.enter_context(rng)  # last: it looks at what is entered after it
            return variables.run(function, replica, part)


def autocasts(types: tuple[str, ...]) -> list[Callable[[torch.device], AbstractContextManager[Any]]]:
    """Return functions that make contexts with this thread's autocast, for devices of these types."""
    return [partial(_autocast, kind, dtype) for kind, dtype in _autocast_dtypes(types).items()]


@contextmanager
def autocast_like_first(devices: Sequence[torch.device]) -> Iterator[None]:
    """Run a block that computes on several devices with this thread's autocast of the first one's type."""
    with ExitStack() as stack:
        for kind, dtype in _autocast_dtypes(tuple(d.type for d in devices)).items():
            if not torch.is_autocast_enabled(kind):
                stack.enter_context(_in_autocast(kind, dtype))
        yield


def _autocast_dtypes(types: tuple[str, ...]) -> dict[str, torch.dtype]:
    """Return the dtypes of autocast on devices of these types.

    A program enters autocast for the type of the first device, where its module is. Devices of another
    type compute in the same dtype, unless autocast is on for their own.
    """
    home = types[0]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in types if torch.is_autocast_enabled(kind)}
    if home in dtypes:
        return dict.fromkeys(types, dtypes[home]) | dtypes
    return dtypes


def _autocast(kind: str, dtype: torch.dtype, _device: torch.device) -> AbstractContextManager[Any]:
    return _in_autocast(kind, dtype)


@contextmanager
def _in_autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Run a block under autocast without its cache of lowered weights, which all threads share.

    Replicas that share weights would use an entry that another one made, and ``torch.autocast`` empties
    the cache at its end. The rounding of gradients would depend on the threads' timing. Weights that are
    copies never enter the cache.
    """
    enabled, before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()  # else the end of a module's own autocast would empty the cache
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_dtype(kind, before)
        torch.set_autocast_enabled(kind, enabled)


@contextmanager
def on_streams(streams: Mapping[torch.device, Any], device: torch.device) -> Iterator[None]:
    """Run a block on a device with the caller's streams: the thread of a replica starts on the default ones.

    On the default stream a replica would read its part before the caller's stream has made it.
    """
    with ExitStack() as stack:
        for other, stream in streams.items():
            # A part may come from another device: its transfer must run after the work that makes it.
            if other != device and stream.stream_id != 0:
                stack.enter_context(stream)
        if device.type != "cpu":
            stack.enter_context(on_device(device))
            stack.enter_context(streams[device])
        yield


def has_modes() -> bool:
    """Return whether this thread is in a mode, a transform of torch.func, or hooks for saved tensors.

    These belong to one thread. An activation checkpoint's hooks also count on the order in which tensors are
    saved. So the parts of a call run in this thread then, one after the other.
    """
    # Private: torch has no public way to ask for active modes; without the check they would be ignored
    # in the replicas' threads.
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    if saving_hooks() is not None:
        return True
    if not torch._C._len_torch_function_stack():
        return False
    from torch.utils._device import DeviceContext  # torch loads it when it is first needed

    # A default device is such a mode, too, and so is our own for random operations: neither counts.
    return any(
        not isinstance(torch._C._get_function_stack_at(i), DeviceContext | SerializedRng)
        for i in range(torch._C._len_torch_function_stack())
    )


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.accelerator.device_index(device.index)
    return context
