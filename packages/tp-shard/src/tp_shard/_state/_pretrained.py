"""Loading of a rank's part of a large model from files of the whole model."""

import os
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from tp_core.errors import StateError
from tp_core.internal import is_dtensor
from tp_core.plugins import TensorSlice
from tp_core.state import plain_name

from tp_shard._shards._dtensors import part_of, reshard
from tp_shard._shards._slices import Shard, ShardTable, slice_of, unwrap
from tp_shard._state._safetensors import TensorFiles


@torch.no_grad()
def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    prefix: str = "",
    strict: bool = True,
) -> nn.Module:
    """Fill a split model from safetensors files of the whole one; each rank reads its own slices.

    The model may be on the meta device, so that no rank ever holds all of it: its tensors there get memory
    for this rank's shards. A file is mapped into memory for one tensor at a time, in pages that the system
    can reclaim. The model's types are kept.

    Buffers that are not part of the state, such as tables of positions, must already hold values. Models of
    transformers compute theirs again.

    Args:
        model: The model, split by :func:`parallelize` or made of parallel layers. Under ``fully_shard`` it
            needs memory, as from ``to_empty()``.
        path: A file; or a folder of files with or without an index, as ``save_pretrained`` writes it.
        device: The device for tensors that are on the meta device; the CPU by default.
        prefix: A prefix of the names in the files, before the model's own.
        strict: Whether names in the files that the model lacks are an error.

    Returns:
        The model.

    Raises:
        FileNotFoundError: ``path`` does not exist, or has no safetensors files.
        StateError: A tensor is missing, new or of another shape; this is checked before anything is changed.
            Or a file is damaged.
        ModelError: The model is not a module.

    Collectives: none.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4, 2)
        >>> load_pretrained(model, "model.safetensors")  # doctest: +SKIP
    """
    ShardTable(model)  # raises if it is no module
    model = unwrap(model)
    reshard(model)
    table = ShardTable(model)
    files = TensorFiles(path)
    names = _names(model, files, table, prefix, strict=strict)
    _check_buffers(model)
    shards = {id(shard.tensor): shard for shard in table.exact.values()}
    made: dict[int, Tensor] = {}
    for tensor, name in names:
        target = made[id(tensor)] = _with_memory(tensor, device)
        for offsets, part in _parts(target, shards.get(id(tensor))):
            files.fill(name, offsets, part)
    _put_in_place(model, made)
    _make_buffers(model, device)
    return model


def _names(
    model: nn.Module, files: TensorFiles, table: ShardTable, prefix: str, *, strict: bool
) -> list[tuple[Tensor, str]]:
    """Return each tensor of the state with its name in the files.

    Raises:
        StateError: A tensor is not in the files or has another shape there, or the files have further
            tensors.
    """
    named: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            named.setdefault(id(tensor), (tensor, []))[1].append(name)
    found, known = [], set()
    for tensor, own in named.values():
        stored = [prefix + plain_name(name) for name in own]
        known.update(stored)
        there = next((name for name in stored if name in files.shapes), None)
        if there is None:
            some = ", ".join(list(files.shapes)[:5])
            msg = (
                f"{files.path} lacks {stored[0]!r}; it has {some} ...; prefix= goes before the model's names"
            )
            raise StateError(msg)
        shard = table.get(own[0])
        shape = tuple(tensor.shape) if shard is None else shard.full_shape
        if files.shapes[there] != shape:
            msg = f"{files.path} has {there!r} of shape {files.shapes[there]}, not {shape}"
            raise StateError(msg)
        if is_dtensor(tensor) and tensor.is_meta:
            msg = f"{own[0]} is a DTensor on the meta device: call model.to_empty(device=...) first"
            raise StateError(msg)
        found.append((tensor, there))
    others = [name for name in files.shapes if name not in known]
    if strict and others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        msg = f"{files.path} has {others[0]!r}{more}, which the model lacks; strict=False leaves it out"
        raise StateError(msg)
    return found


def _with_memory(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return torch.empty_like(tensor, device=device or "cpu") if tensor.is_meta else tensor.detach()


def _parts(target: Tensor, shard: Shard | None) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the parts of a whole tensor that this rank holds: their offsets, and their memory."""
    whole = slice_of(TensorSlice(tuple(target.shape), [part_of(target)]), shard)
    yield from cast("TensorSlice", whole).parts


def _put_in_place(model: nn.Module, made: dict[int, Tensor]) -> None:
    """Replace tensors on the meta device by the loaded ones, under all of their names."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or not old.is_meta or id(old) not in made:
                continue
            if id(old) not in parameters:
                parameters[id(old)] = nn.Parameter(made[id(old)], old.requires_grad)
                parameters[id(old)].__dict__.update(old.__dict__)
            module._parameters[name] = parameters[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and id(buffer) in made:
                module._buffers[name] = made[id(buffer)]


def _meta_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the buffers on the meta device that are not part of the state."""
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                yield (f"{path}.{name}" if path else name), module, name, buffer


def _check_buffers(model: nn.Module) -> None:
    """Raise unless buffers outside of the state hold values, or can be computed again.

    Raises:
        StateError: A buffer has no values, and cannot be computed again.
    """
    for full_name, module, _, _ in _meta_buffers(model):
        if not hasattr(model, "_init_weights") or module._parameters:
            msg = (
                f"{full_name} is on the meta device and not part of the state, so that no file has it: make "
                "the module that has it with numbers, outside of torch.device('meta')"
            )
            raise StateError(msg)


def _make_buffers(model: nn.Module, device: torch.device | str | None) -> None:
    """Compute the buffers of a transformers model again, with its own method.

    Raises:
        StateError: The method left a buffer without values.
    """
    missing = list(_meta_buffers(model))
    for _, module, name, buffer in missing:
        # A buffer that still has this value afterwards was not computed.
        module._buffers[name] = torch.full_like(buffer, _sentinel(buffer.dtype), device=device or "cpu")
    for module in {id(module): module for _, module, _, _ in missing}.values():
        model._init_weights(module)  # type: ignore[operator]  # a method, as _check_buffers saw
    for full_name, module, name, buffer in missing:
        made = module._buffers[name]
        # NaN is unequal to itself, so both sides get a number in its place.
        nothing = torch.full_like(buffer, _sentinel(buffer.dtype), device="cpu")
        if made is None or torch.equal(made.cpu().nan_to_num(7.5), nothing.nan_to_num(7.5)):
            msg = f"{full_name} is not part of the state, and the model's _init_weights() does not make it"
            raise StateError(msg)


def _sentinel(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return -1 if dtype.is_signed else 1
