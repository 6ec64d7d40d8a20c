"""Copies of a model to try things on: in another type, with other values, blocks that are alike as one."""

import math
from collections.abc import Iterator, Mapping
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn

from tp_shard._verify._call import copied

__all__ = ["bytes_needed", "probe_copy", "repeated_blocks"]

_DEEP = 4  # how far configurations of blocks are compared

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def probe_copy(model: nn.Module, *, dtype: torch.dtype, random: bool, share: bool) -> nn.Module:
    """Return a copy on the CPU, in ``dtype``; the model is not changed.

    Args:
        model: The model; what is on the meta device gets random values.
        dtype: Of the copy's floating-point tensors.
        random: Whether parameters get random values, none of which are 0 or alike by accident.
        share: Whether blocks of one list that are built alike become one module, which saves their memory.
    """
    memo: dict[int, Any] = {}
    repeats = repeated_blocks(model) if share else {}
    generator = torch.Generator().manual_seed(0)
    for module in _reached(model, set(repeats)):
        for name, p in module._parameters.items():
            if p is not None and id(p) not in memo:
                drawn = random or p.is_meta
                values = _draw(module, p, name, generator) if drawn else p.detach().cpu()
                values = values.to(dtype) if p.is_floating_point() else values
                values = values.clone() if values.data_ptr() == p.data_ptr() else values
                memo[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
        for b in module._buffers.values():
            if b is not None and id(b) not in memo:
                memo[id(b)] = _buffer(b, dtype, generator)
    for repeat, first in reversed(list(repeats.items())):  # inner lists before those around them
        block = copied(_by_id(model, first), memo)
        memo[repeat] = block
    return copied(model, memo)


def bytes_needed(model: nn.Module, dtype: torch.dtype, *, share: bool) -> int:
    """Return what comparing a :func:`probe_copy` with a split one takes."""
    repeats = set(repeated_blocks(model)) if share else set()
    seen = {id(p): p for m in _reached(model, repeats) for p in m._parameters.values() if p is not None}
    # The copy, what runs whole, and the shards of all ranks beside one that is being split: with gradients.
    return 7 * dtype.itemsize * sum(p.numel() for p in seen.values())


def repeated_blocks(model: nn.Module) -> dict[int, int]:
    """Return for each block of a list that is built like an earlier one which one that is, by their ids."""
    found: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        first: dict[Any, int] = {}
        for block in module.children():
            key = _structure(block)
            if first.setdefault(key, id(block)) != id(block):
                found.setdefault(id(block), first[key])
    return found


def _structure(block: nn.Module) -> Any:
    """Return what blocks that do the same have in common: all but their weights, and their place."""
    return tuple(
        (
            path,
            type(module),
            tuple(
                (n, None if p is None else (p.shape, p.requires_grad)) for n, p in module._parameters.items()
            ),
            tuple((n, _content(b)) for n, b in module._buffers.items()),
            tuple(
                (name, _content(value))
                for name, value in sorted(vars(module).items())
                if name not in ("_parameters", "_buffers", "_modules")
                and not any(w in name for w in ("idx", "index", "layer_id"))
            ),
        )
        for path, module in block.named_modules()
    )


def _content(value: Any, depth: int = 0) -> Any:
    """Return something that is equal for values that do the same; else they are others."""
    if isinstance(value, int | float | str | None):
        return type(value), value
    if isinstance(value, Tensor):
        known = not value.is_meta and not value.is_sparse
        return value.shape, hash(value.detach().cpu().double().numpy().tobytes()) if known else value.dtype
    if isinstance(value, nn.Module) or depth > _DEEP:
        return type(value) if isinstance(value, nn.Module) else id(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_content(one, depth + 1) for one in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(repr, value))
    if isinstance(value, Mapping):  # configurations and hooks, too
        return type(value), tuple((repr(key), _content(one, depth + 1)) for key, one in value.items())
    inside = None if isfunction(value) else getattr(value, "__dict__", None)
    return (type(value), _content(inside, depth + 1)) if inside else id(value)


def _reached(root: nn.Module, repeats: set[int]) -> Iterator[nn.Module]:
    yield root
    for child in root.children():
        if id(child) not in repeats:
            yield from _reached(child, repeats)


def _by_id(model: nn.Module, wanted: int) -> nn.Module:
    return next(m for m in model.modules() if id(m) == wanted)


def _draw(module: nn.Module, p: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """Draw values of usual size: weights as wide as they are, scales about 1, biases about 0."""
    values: Tensor = torch.randn(p.shape, generator=generator, dtype=torch.float32)
    if p.dim() > 1:
        # With weights that are too large, a softmax later on has one 1, and gradients that are rounding.
        taken = p[0].numel() if isinstance(module, _CONVOLUTIONS) else p.size(-1)
        return values / math.sqrt(max(1, taken))
    return 0.3 * values + (1.0 if name == "weight" else 0.0)


def _buffer(b: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not b.is_meta:
        values = b.detach().cpu().clone()
    elif b.is_floating_point():
        values = torch.rand(b.shape, generator=generator, dtype=torch.float32)
    else:
        values = torch.arange(b.size(-1) if b.dim() else 1).expand(b.shape).clone().to(b.dtype)
    return values.to(dtype) if values.is_floating_point() else values
