"""Autograd functions that torch.func can differentiate, too, at no cost to others.

For its transforms torch wants a context that is set up apart from the forward pass, and then inspects a
signature in every call: more than a tiny layer takes. So a second class does that, where one is active.
"""

import functools
from typing import Any

import torch

__all__ = ["apply"]


def apply(kind: Any, *inputs: Any) -> Any:
    """Apply an autograd function that keeps nothing but its inputs for the backward pass.

    Args:
        kind: A ``torch.autograd.Function`` with a static ``keep(ctx, *inputs)``, which its ``forward`` calls.
        *inputs: What it takes.
    """
    # Private, as torch tells nobody whether a transform is active; a test of torch.func notices its loss.
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        kind = _transformable(kind)
    return kind.apply(*inputs)


class _NoContext:
    """Takes what a forward pass wants to keep; the transform's own context gets it later."""

    def save_for_backward(self, *_: Any) -> None:
        pass

    mark_dirty = save_for_backward


@functools.cache
def _transformable(kind: Any) -> Any:
    def forward(*inputs: Any) -> Any:
        return kind.forward(_NoContext(), *inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's contract
        kind.keep(ctx, *inputs)

    methods = {"forward": forward, "setup_context": setup_context, "backward": kind.backward}
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(kind.__name__, (torch.autograd.Function,), static)
