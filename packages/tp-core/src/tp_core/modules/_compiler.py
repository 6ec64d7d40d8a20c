"""How modules are compiled in place, and what torch's compiler leaves alone."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile a module in place, so that names in its state stay."""
    if not is_torchs_own(module):
        module.compile(**options)
        return

    # torch compiles nothing that begins in files of its own, as a Sequential's call does.
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, **options)


def is_torchs_own(module: nn.Module) -> bool:
    """Return whether torch has written a module's forward pass, as for a Sequential."""
    return type(module).forward.__module__.startswith("torch.")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` call the function as it is, without tracing into it.

    ``torch.compiler.disable`` imports the compiler, which takes a second. So it is applied only once the
    compiler has been imported.
    """
    disabled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disable: Callable[..., Any] = torch.compiler.disable  # which torch leaves untyped
            disabled = disable(function)
        return disabled(*args, **kwargs)

    return call


def not_compiled_alone(function: Function) -> Function:
    """Keep the compiler from compiling a function by itself; it may trace through it as part of a model.

    It is for a mode's `__torch_function__`, which runs once for each operator after a graph break. torch 2.13
    would compile that, and its guards then pass for other operators: ``x.dim()`` returned a dtype. No public
    function does only this: ``torch.compiler.disable`` would break the graph of the model at each operator.
    """
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, default))
    return function
