"""Programs that say ``cuda`` get simulated devices, and are told that these are CUDA's.

Python sees the name ``cuda`` everywhere: in ``torch.cuda``, in ``torch.device("cuda")``, in ``x.device.type``
and ``x.is_cuda``. C++ does not: a name on its way to there becomes ``sim``.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tp_simulator import _group, _torch_sim
from tp_simulator._build import extension

_TAKE_NAMES = (
    (torch, "is_autocast_enabled"),
    (torch, "set_autocast_enabled"),
    (torch, "get_autocast_dtype"),
    (torch, "set_autocast_dtype"),
    (torch._C._nn, "_parse_to"),  # of Module.to
)
"""Functions of C++ that take names of devices, and that no mode sees."""


def give_cudas_names() -> None:
    """Have this process call its simulated devices ``cuda``, in all that Python sees of them."""
    extension().say_cuda(torch.device, [torch.device, torch.Generator, torch.Stream, torch.Event])
    for name, value in vars(_torch_sim).items():
        if getattr(value, "__module__", "") == _torch_sim.__name__ and hasattr(torch.cuda, name):
            setattr(torch.cuda, name, value)
    torch.cuda.default_generators = _torch_sim.default_generators  # type: ignore[assignment]
    torch.cuda.Stream, torch.cuda.Event = torch.Stream, torch.Event  # type: ignore[assignment,misc]
    Tensor.cuda = _cuda  # type: ignore[assignment,method-assign]
    Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment]
    for module, name in _TAKE_NAMES:
        setattr(module, name, _in_own_names(getattr(module, name)))
    torch.nn.Module._apply = _keep_parameters(torch.nn.Module._apply)  # type: ignore[method-assign]
    if dist.is_available():
        _rename_groups()
    _enter_mode_in_threads()


# -- Names on their way to C++ --------------------------------------------------------------------


def _own_name(value: Any) -> Any:
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "sim" + value.removeprefix("cuda")
    return value


def _own_names(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [_own_name(arg) for arg in args], {name: _own_name(value) for name, value in kwargs.items()}


def _in_own_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args_, kwargs_ = _own_names(args, kwargs)
        return function(*args_, **kwargs_)

    return call


class _OwnNames(TorchFunctionMode):
    """Translates what functions and methods of torch are given: ``torch.ones(2, device="cuda")``."""

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args_, kwargs_ = _own_names(args, kwargs or {})
        return function(*args_, **kwargs_)


def _enter_mode_in_threads() -> None:
    """Enter the mode in this thread, until the process ends, and in threads that begin."""
    _OwnNames().__enter__()  # type: ignore[no-untyped-call]  # torch does not say
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        with _OwnNames():
            run(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]


def _keep_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Have a module keep its parameters on the way to CUDA, so an optimizer that was made before trains them.

    For other devices torch makes new ones, unless it may swap what is in them. It may here alone: in
    `load_state_dict` a swap takes values away from views of parameters, or fails for them.
    """

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return call


# -- What is asked of tensors and groups ----------------------------------------------------------


def _cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    place = torch.device("sim", _torch_sim.index_of(device))
    return self.to(device=place, non_blocking=non_blocking, **options)


def _is_cuda(self: Tensor) -> bool:
    return self.device.type == "cuda"


def _rename_groups() -> None:
    """Have ``nccl`` be the group of simulated devices, where a group is made."""
    from torch.distributed import distributed_c10d

    def take(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            def own(value: Any) -> Any:
                if not isinstance(value, str) or "nccl" not in value:
                    return value
                return value.replace("nccl", _group.NAME).replace("cuda:", "sim:")

            return function(*map(own, args), **{name: own(value) for name, value in kwargs.items()})

        return call

    for name in ("init_process_group", "new_group"):
        renamed = take(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, renamed)
        setattr(dist, name, renamed)
    groups = dist.Backend.default_device_backend_map
    groups["cuda"] = groups.pop("sim")
    # torch's own files ask the function in theirs, and may: there is no class of that group.
    dist.is_nccl_available = lambda: True
