"""The record of what modules compute, and a check that leaves no trace in a model."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn

from tp_core.compare._trial_runs import in_backward_pass, named_tensors
from tp_core.modules._parameters import is_dtensor
from tp_core.random import device_rng_state, preserve_rng_state, set_device_rng_state


class TensorPlace(NamedTuple):
    """A tensor that a module takes or returns.

    Attributes:
        module: The name of the module.
        call: The number of its call, from 0.
        tensor: Where it is among the arguments or in the output: "0.hidden_states"; empty for the output.
    """

    module: str
    call: int
    tensor: str


class LocalTensor(NamedTuple):
    """One rank's tensor.

    Attributes:
        tensor: The numbers on this rank.
        layout: Of a DTensor (kind, dim, rank, size) for each dimension of its mesh; else empty. Kinds are
            "same", "shard", "partial" and "mean".
    """

    tensor: Tensor
    layout: tuple[tuple[str, int, int, int], ...] = ()


class Recording:
    """A context manager that records the floating-point tensors that a model's modules return.

    The orders are those in time. Runs for stand-ins (``FakeTensor``) are left out, and so is what is computed
    again for a checkpoint in the backward pass, or in other threads, and an evaluation amid a training.

    Args:
        model: The model. Hooks are put on its modules, and removed at the end.
        plain_name: A function from a module's name to the one to record, or to ``None`` to leave it out. By
            default it is recorded as it is.
        gradients: Whether gradients of the inputs and outputs of modules are recorded, too.
        inputs: Whether the tensors that modules take are, of any type.

    Attributes:
        outputs: The outputs by their places, as modules end.
        inputs: The inputs by their places, as modules begin.
        gradients: The gradients by place and "input" or "output", as the backward pass has them.

    Example:
        >>> with Recording(torch.nn.Sequential(torch.nn.ReLU())) as recording:
        ...     _ = recording.model(torch.tensor([-1.0, 2.0]))
        >>> recording.outputs[TensorPlace("0", 0, "")].tensor
        tensor([0., 2.])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plain_name: Callable[[str], str | None] | None = None,
        gradients: bool = False,
        inputs: bool = False,
    ) -> None:
        self.model = model
        self.outputs: dict[TensorPlace, LocalTensor] = {}
        self.inputs: dict[TensorPlace, LocalTensor] = {}
        self.gradients: dict[tuple[TensorPlace, str], LocalTensor] = {}
        self._plain_name = plain_name
        self._watches_gradients = gradients
        self._records_inputs = inputs
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []
        self._copies: dict[int, tuple[ref[Tensor], int, LocalTensor]] = {}  # by the tensors' ids
        # Replicas share a module's hooks, and simulated ranks are threads.
        self._thread = threading.get_ident()
        self._was_training = False

    def __enter__(self) -> Self:
        self._was_training = self.model.training
        # Of a wrapper and its module, which may have one name, the module.
        plain = self._plain_name
        modules = self.model.named_modules()
        names = {name if plain is None else plain(name): module for name, module in modules}
        for name, module in names.items():
            if name is None:
                continue
            if self._watches_gradients:
                self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            if self._records_inputs:
                self._handles.append(module.register_forward_pre_hook(self._takes(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _copied(self, tensor: Tensor) -> LocalTensor:
        """Return a copy of a tensor: the one that there is of it, if nothing was written since.

        What a module returns, the one around it returns too, and the next one takes: logits are large.
        """
        if type(tensor) is not Tensor or tensor.is_inference():  # which counts no writes
            return local_tensor(tensor)
        if id(tensor) in self._copies:
            known, version, copy = self._copies[id(tensor)]
            if known() is tensor and version == tensor._version:
                return copy
        copy = local_tensor(tensor)
        self._copies[id(tensor)] = ref(tensor), tensor._version, copy
        return copy

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._is_left_out() or not torch.is_grad_enabled():
                return None
            call = self._calls.get(name, 0)

            def watched(place: str, value: Any) -> Any:
                # A view, so that the gradient is the one that this module alone gives, of several readers.
                if not isinstance(value, Tensor) or not value.requires_grad or value.is_leaf:
                    return value
                seen = value.view_as(value)
                self._watch(seen, TensorPlace(name, call, place), "input")
                return seen

            return (
                tuple(watched(str(i), value) for i, value in enumerate(args)),
                {key: watched(key, value) for key, value in kwargs.items()},
            )

        return hook

    def _takes(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_left_out():
                call = self._calls.get(name, 0)
                for place, tensor in [*named_tensors(args), *named_tensors(kwargs)]:
                    if _has_values(tensor):
                        self.inputs[TensorPlace(name, call, place)] = self._copied(tensor)

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._is_left_out():
                return
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for place, tensor in named_tensors(output):
                if not tensor.is_floating_point() or not _has_values(tensor):
                    continue
                where = TensorPlace(name, call, place)
                self.outputs[where] = self._copied(tensor)
                if self._watches_gradients and tensor.requires_grad:
                    self._watch(tensor, where, "output")

        return hook

    def _is_left_out(self) -> bool:
        if threading.get_ident() != self._thread:
            return True
        if in_backward_pass():
            return True
        if self._was_training and not self.model.training and not torch.is_grad_enabled():
            # A loop may evaluate between two micro-batches of a step: on other batches.
            return True
        first = next(self.model.parameters(), None)
        return type(first).__name__ == "FakeTensor"  # torch has no public name for it

    def _watch(self, tensor: Tensor, place: TensorPlace, side: str) -> None:
        def hook(gradient: Tensor) -> None:
            self.gradients[place, side] = local_tensor(gradient)

        tensor.register_hook(hook)


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers; a model may be run on stand-ins first."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    is_known = type(local) in (Tensor, nn.Parameter) or hasattr(local, "wait")
    return is_known and not local.is_meta


def _kind_of(placement: Any) -> str:
    if placement.is_shard():
        return "shard"
    if not placement.is_partial():
        return "same"
    if "sum" in str(placement):
        return "partial"
    if "avg" in str(placement):
        return "mean"
    return "unknown"


def local_tensor(tensor: Tensor) -> LocalTensor:
    """Return a copy of this rank's part of a tensor, and how it is laid out."""
    if not is_dtensor(tensor):
        return LocalTensor(copy_of(tensor))
    layout = []
    for axis, placement in enumerate(tensor.placements):
        mesh = tensor.device_mesh
        layout.append(
            (_kind_of(placement), getattr(placement, "dim", 0), mesh.get_local_rank(axis), mesh.size(axis))
        )
    return LocalTensor(copy_of(tensor.to_local()), tuple(layout))


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy, of a functional collective's result once it is there."""
    wait = getattr(tensor, "wait", None)
    ready: Tensor = tensor if wait is None else wait()
    return ready.detach().clone()


# -- A check that leaves no trace -----------------------------------------------------------------


class _SharedByThreads:
    """Keeps what threads share as it was: the generators of the CPU, and what torch compiles.

    Devices of one process check at the same time. So the first to begin keeps it, and the last restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._kept = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._kept.enter_context(preserve_rng_state(()))
                # A compiled model would compile for each of a check's short batches.
                if "torch._dynamo" in sys.modules:
                    self._kept.enter_context(torch.compiler.set_stance("force_eager"))
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._kept.close()


_shared = _SharedByThreads()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a check that leaves no trace in a model and in this process.

    Restored are the modes of all modules, the values of buffers, the gradients, and the generators of
    Python, numpy, the CPU and each device of the model. Inside, gradients begin as ``None``, and compiled
    code runs without its compiler.

    Example:
        >>> model = torch.nn.BatchNorm1d(3)
        >>> with undisturbed(model):
        ...     _ = model(torch.randn(4, 3))
        >>> model.running_mean
        tensor([0., 0., 0.])
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    leaves = [parameter for parameter in model.parameters() if parameter.is_leaf]
    gradients = [(parameter, parameter.grad) for parameter in leaves]
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    states = [(device, device_rng_state(device)) for device in sorted(devices, key=str)]
    try:
        with _shared:
            for parameter in leaves:
                parameter.grad = None
            yield
    finally:
        for device, state in states:
            set_device_rng_state(device, state)
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
