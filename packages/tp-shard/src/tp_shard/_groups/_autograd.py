"""Applying autograd functions, those of which torch.func can differentiate, too, at no cost to others.

For its transforms torch wants a context that is set up apart from the forward pass, and then inspects a
signature in every call: more than a tiny layer takes. So a second class does that, where one is active.
"""

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["apply", "as_output"]


def apply(kind: Any, *inputs: Any) -> Tensor:
    """Return what an autograd function makes of its inputs; torch leaves its own ``apply`` untyped.

    Args:
        kind: A ``torch.autograd.Function``. With a static ``keep(ctx, *inputs)``, which notes inputs for the
            backward pass and nothing else, and which its ``forward`` calls, torch.func can differentiate it.
        *inputs: What it takes.
    """
    # Private, as nothing public says whether a transform is active; a test of torch.func notices its loss.
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        kind = _transformable(kind)
    output: Tensor = kind.apply(*inputs)
    return output


def as_output(result: Tensor) -> Tensor:
    """Return what a forward pass may return after an operation in place, or one that may do nothing.

    Of such a result (`add_`, an all-reduce, a `.to()` or `.contiguous()` without effect) torch 2.11 loses
    the gradient in compiled code: it is zero, without a word. A view of it keeps it, and costs nothing there.
    """
    return result.view_as(result) if torch.compiler.is_dynamo_compiling() else result


class _NoContext:
    """Takes what a forward pass wants to keep; the transform's own context gets it later."""

    def save_for_backward(self, *_: Any) -> None:
        pass

    mark_dirty = save_for_backward


@functools.cache
def _transformable(kind: Any) -> Any:
    if not hasattr(kind, "keep"):
        return kind  # torch says itself that it has no rule

    def forward(*inputs: Any) -> Any:
        return kind.forward(_NoContext(), *inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's contract
        kind.keep(ctx, *inputs)

    methods = {"forward": forward, "setup_context": setup_context, "backward": kind.backward}
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(kind.__name__, (torch.autograd.Function,), static)
