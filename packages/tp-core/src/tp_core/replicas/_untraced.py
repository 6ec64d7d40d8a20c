"""Functions that the compiler does not trace."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` call the function as it is, instead of tracing what it does.

    ``torch.compiler.disable`` imports the compiler, which takes a second; so it is applied only once the
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
