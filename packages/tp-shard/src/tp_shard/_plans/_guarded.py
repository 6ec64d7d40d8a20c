"""A split model that says which module failed, where torch's own message would name shapes alone."""

import functools
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tp_core.errors import ModelError, TpError

from tp_shard._shards._layer import ParallelLayer
from tp_shard.nn._linear import ParallelLinear
from tp_shard.nn._mixed import Mixin, mix_in
from tp_shard.nn._planned import SequenceMixin

__all__ = ["guard_forward"]

_KINDS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


class _Guarded(Mixin):
    """Forward of a split model: an error inside a block that holds split layers names the block."""

    split_blocks: frozenset[str]

    @classmethod
    def members(cls, kind: type[nn.Module]) -> dict[str, Any]:
        """Return a ``forward`` with the signature of the model's own."""

        @functools.wraps(kind.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return kind.forward(self, *args, **kwargs)
            try:
                return kind.forward(self, *args, **kwargs)
            except _KINDS as error:
                msg = _explain(self, error)
                if msg is None:
                    raise
                raise ModelError(msg) from error

        return {"forward": forward}


def guard_forward(model: nn.Module, blocks: frozenset[str]) -> None:
    """Let a model name its module where a plan lets its own code meet shapes that it does not expect.

    Args:
        model: The split model, which is changed in place.
        blocks: The names of the modules around its split layers.
    """
    if isinstance(model, _Guarded | ParallelLayer | SequenceMixin):
        return  # its class was made already, or it is a block on its own
    mix_in(_Guarded, model, split_blocks=blocks)


def _explain(model: Any, error: Exception) -> str | None:
    """Return the message for an error inside a block with split layers; ``None`` for any other."""
    if isinstance(error, TpError | torch.OutOfMemoryError | dist.DistError):
        return None
    module = _innermost(model, error.__traceback__)
    name = next((n for n, m in model.named_modules() if m is module), None)
    block = next(
        (
            b
            for b in sorted(model.split_blocks, key=len, reverse=True)
            if name is not None and _is_in(name, b)
        ),
        None,
    )
    if block is None:
        return None
    layers = ", ".join(
        f"{n or 'it'} makes {made} of {layer.out_features} features"
        for n, layer in model.get_submodule(block).named_modules()
        if isinstance(layer, ParallelLinear)
        and layer.dim not in (0, None)
        and not layer.gather_output
        and (made := layer.splits["weight"].local_size(layer.group.rank)) != layer.out_features
    )
    text = str(error).strip().splitlines() or [""]
    inside = "" if name == block else f", in {name}"
    return (
        f"{block or 'the model'}{inside}: {type(error).__name__}: {text[0]}. On this rank "
        f"{layers}; where its code "
        "counts all heads or features, add "
        f'{{"{block}": ts.Local(heads=..., query=("num_heads", ...))}} to the plan '
        "with the names of those numbers, or leave the block whole. ts.verify() tells whether "
        "a plan is right, and "
        "ts.plans.auto() finds one"
    )


def _innermost(model: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """Return the module of the model whose code was running, by the frames of a traceback."""
    mine = set(map(id, model.modules()))
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in mine:
            found = owner
        trace = trace.tb_next
    return found


def _is_in(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(f"{block}.")
