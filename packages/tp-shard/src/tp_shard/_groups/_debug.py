"""A debug mode in which the ranks compare each collective before they call it.

Ranks that call a collective with different shapes hang, or silently mix their bytes. In debug mode the ranks
first exchange a description of each collective. A difference raises on every rank, and the message names both
collectives. Without debug mode the cost is one look at a flag.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from tp_core.arguments import explain_arguments
from tp_core.errors import DisagreementError

from tp_shard._groups._group import Group


class _State:
    __slots__ = ("enabled", "names")

    def __init__(self) -> None:
        self.enabled = False
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


state = _State()


@explain_arguments("set_debug(True)")
def set_debug(enabled: bool = True, *, model: nn.Module | None = None) -> None:
    """Turn debug mode on or off: the ranks then compare each collective before they call it.

    Call it on every rank with the same value. In debug mode ranks that are about to call different
    collectives, or the same one on tensors that differ in shape or type, do not wait forever. The collective
    raises a DisagreementError on every rank.

    Args:
        enabled: Whether collectives are compared.
        model: A model; the messages name its layers.

    Collectives: in debug mode, an all-gather of a small object before each collective.

    Example:
        >>> set_debug(True)
        >>> set_debug(False)
    """
    state.enabled = enabled
    state.names.clear()
    if model is not None:
        state.names.update({module: name for name, module in model.named_modules()})


@contextmanager
def debug(model: nn.Module | None = None) -> Iterator[None]:
    """Turn debug mode on for a ``with`` block, as :func:`set_debug` does.

    Args:
        model: A model; the messages name its layers.

    Raises:
        DisagreementError: In the block, on every rank: ranks are about to call different collectives, or the
            same one of tensors that differ in shape or type.
    """
    before, names = state.enabled, dict(state.names)
    set_debug(True, model=model)
    try:
        yield
    finally:
        state.enabled = before
        state.names.clear()
        state.names.update(names)


def check(operation: str, tensor: Tensor, group: Group, layer: Any, *, uneven_dim: int | None = None) -> None:
    """Raise unless all ranks of the group are about to call the same collective; for debug mode alone.

    Collectives: one all-gather of pickled objects.
    """
    if getattr(group.process_group, "is_simulated", False):
        return  # simulated ranks compare each collective in any case, and exchange no objects
    shape = tuple("*" if i == uneven_dim else n for i, n in enumerate(tensor.shape))
    own = (_layer_name(layer), operation, shape, str(tensor.dtype))
    everyones: list[Any] = [None] * group.size
    # Objects, and not a tensor: the exchange itself must not depend on the shapes and types that it compares.
    dist.all_gather_object(everyones, own, group=group.handle)
    other = next((r for r, theirs in enumerate(everyones) if theirs != everyones[0]), None)
    if other is not None:
        msg = (
            f"ranks are about to do different things: rank 0 of the group {_words(everyones[0])}, "
            f"rank {other} {_words(everyones[other])}"
        )
        raise DisagreementError(msg)


def _layer_name(layer: Any) -> str:
    if not isinstance(layer, nn.Module):
        if layer is None:
            return "the caller"
        return str(layer)
    name = state.names.get(layer)
    described = f"{type(layer).__name__}({layer.extra_repr()})"
    if name is None:
        return described
    return f"{name!r} = {described}"


def _words(collective: tuple[str, str, tuple[Any, ...], str]) -> str:
    layer, operation, shape, dtype = collective
    sizes = ", ".join(map(str, shape))
    return f"calls {operation} of a {dtype} tensor of shape ({sizes}) for {layer}"
