"""The blocks of a model that repeat: what is sharded, computed again, or compiled, one by one."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from tp_core.errors import ModelError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward pass."""


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model that repeat, by name, in the model's order.

    They are the blocks of ``named_blocks`` that occur more than once, else of ``found_blocks``.

    Raises:
        ModelError: The model has none.
    """
    named = named_blocks(model)
    blocks = _repeating(named) or named or found_blocks(model)
    if not blocks:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        more = " ..." if len(kinds) > 12 else ""
        msg = (
            "the model has no blocks that repeat: modules of one class with layers in them, in a Sequential, "
            f"a ModuleList or a ModuleDict; it has {', '.join(kinds[:12])}{more}"
        )
        raise ModelError(msg)
    return blocks


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model of Hugging Face names in ``_no_split_modules``."""
    kinds = {
        kind
        for module in model.modules()
        if isinstance(names := getattr(module, "_no_split_modules", None), list | tuple | set)
        for kind in names
    }
    # By all of its classes: fully_shard makes a class of another name, and a user may have derived one.
    return {
        name: module
        for name, module in model.named_modules()
        if module is not model and not kinds.isdisjoint(c.__name__ for c in type(module).__mro__)
    }


def found_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules in containers that have layers with parameters, if their class repeats."""
    return _repeating(dict(_in_containers(model, "")))


def _repeating(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    # By name: activation checkpointing gives some blocks of a model a class of its own with the same name.
    kinds = {name: (type(m).__module__, type(m).__qualname__) for name, m in blocks.items()}
    counts = Counter(kinds.values())
    return {name: module for name, module in blocks.items() if counts[kinds[name]] > 1}


def _in_containers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for name, child in module.named_children():
        if is_container and not isinstance(child, CONTAINERS) and _is_block(child):
            yield prefix + name, child
        else:
            yield from _in_containers(child, f"{prefix}{name}.")


def _is_block(module: nn.Module) -> bool:
    # A plain Sequential in a Sequential is a stage; its own elements may be the blocks.
    return type(module) is not nn.Sequential and any(
        next(child.parameters(), None) is not None for child in module.children()
    )


def without_cache(module: nn.Module, value: Any) -> Any:
    """Return an argument of a module that runs its forward twice, or ``None`` for a cache of transformers.

    The second pass would append to what the first one has left there.

    Raises:
        ModelError: The cache is not empty.
    """
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return value
    layer = next((m.layer_idx for m in module.modules() if hasattr(m, "layer_idx")), 0)
    if value.get_seq_length(layer):
        msg = (
            f"{type(module).__name__} gets a cache with keys and values, to which its second forward pass "
            "would append; call the model without the cache, or do not checkpoint this class"
        )
        raise ModelError(msg)
    return None
