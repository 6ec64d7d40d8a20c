"""Files of split models: sharded checkpoints of all ranks, and safetensors files of whole models."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.arguments import explain_arguments
from tp_core.errors import ConfigError, StateError, TpError
from tp_core.files import Ownership, atomic_part
from tp_core.fully_sharded import reshard
from tp_core.sessions import agree_on_failure, gather_objects
from tp_core.state import (
    FileRecord,
    SafetensorsFiles,
    TensorInfo,
    check_weights_name,
    collect_state,
    open_tensors,
    plain_name,
    record_of,
    restore_state,
    safetensors_dtype,
    to_json,
    write_safetensors,
    write_tensors,
)
from tp_core.tensors import (
    DIGESTS,
    INDEX,
    TensorSlice,
    copy_attributes,
    is_dtensor,
    move_gradient_hooks,
    read_digests,
)

from tp_shard._shards import Shard, ShardTable, part_of, shard_spec, slice_of, unwrap
from tp_shard._state_dict import is_first_rank, stream

# -- Sharded checkpoints: saved and loaded by all ranks, with a digest of each file ---------------
# Digests are written last and checked before anything is read. So a checkpoint that was truncated, changed or
# never finished is not loaded. The ranks divide the work.


T = TypeVar("T")

_MANIFEST = "manifest.json"  # the file with the digests of a trainer's checkpoint


def _together(do: Callable[[], T], doing: str) -> T:
    """Call a function that may fail on some ranks, and fail on all ranks if it does.

    Raises:
        OSError: A rank could not read or write.
        TpError: This rank's own error.
        ConfigError: Another rank has failed with one; the message names it.
        StateError: Another rank has failed otherwise.

    Collectives: an all-gather of pickled objects.
    """
    failure: OSError | TpError | None = None
    try:
        done = do()
    except (OSError, TpError) as error:
        failure = error
    agree_on_failure(failure, gather_objects, doing)
    return done


def _is_writer() -> bool:
    """Return whether this process is rank 0 of all, which writes what all ranks share."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _ownership(folder: Path) -> AbstractContextManager[object]:
    if _is_writer():
        return Ownership(folder, is_folder=True)
    return nullcontext()


def _delete_digests(folder: Path) -> None:
    if _is_writer() and folder.is_dir():
        (folder / DIGESTS).unlink(missing_ok=True)


def _write_digests(folder: Path, records: dict[str, FileRecord]) -> None:
    if _is_writer():
        records[INDEX] = record_of(folder / INDEX)
        listed = {name: record.to_dict() for name, record in sorted(records.items())}
        with atomic_part(folder / DIGESTS) as part:
            part.write_text(to_json(DIGESTS, listed, indent=1))


def _check_digests(folder: Path) -> None:
    """Raise unless this rank's share of the files is as ``save_sharded`` wrote them.

    A trainer's checkpoint keeps its digests elsewhere, and the trainer checks them.
    """
    if folder.is_file() or any((place / _MANIFEST).is_file() for place in (folder, folder.parent)):
        return
    records = read_digests(folder)
    own = slice(None)
    if dist.is_initialized():
        own = slice(dist.get_rank(), None, dist.get_world_size())
    for name in sorted(records)[own]:
        difference = records[name].difference(folder / name)
        if difference is not None:
            msg = f"the checkpoint {folder} is damaged: {name} {difference}"
            raise StateError(msg)


_OF_FILES = {".bin", ".pt", ".pth", ".safetensors"}
"""The suffixes of single files."""


@explain_arguments("save_sharded(model, path)")
def save_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Write a model, and an optimizer over it, into a folder; each rank writes its own shards.

    The files are safetensors with the names of a trainer's checkpoint, see :mod:`tp_core.state`; torch's
    ``HuggingFaceStorageReader`` reads them, too. Of several copies of the model the first one is written.
    Digests of the files come last: without them a folder is not loaded.

    Args:
        model: The model; call it on every rank.
        path: The folder, on a file system that all ranks share.
        optimizer: An optimizer over its parameters.

    Raises:
        ModelError: The optimizer has a parameter that is not the model's.
        StateError: The state contains an object that is neither a tensor nor a plain value.
        OSError: A rank could not write.
        ConfigError: Another program writes to the folder.

    Collectives: those of ``torch.distributed.checkpoint``, and some of small objects, over all ranks.
    """
    folder = Path(path)
    if folder.suffix in _OF_FILES:
        msg = (
            f"save_sharded(model, folder) writes a folder, and {os.fspath(path)!r} is the name of a file; "
            f"write {str(folder.with_suffix(''))!r}, or export(model, 'model.safetensors') for one file"
        )
        raise ConfigError(msg)
    model = unwrap(model)
    reshard(model)
    cut = shard_spec(model, own=True)
    tensors = _together(lambda: collect_state(model, optimizer, cut=cut), "collect the state")
    doing = f"write {folder}"
    with ExitStack() as owned:
        _together(lambda: owned.enter_context(_ownership(folder)), doing)
        # Before the first file changes: after a crash in between the folder has no digests and is not loaded.
        _together(lambda: _delete_digests(folder), doing)
        written = write_tensors(tensors, folder, together=dist.is_initialized())
        everyones = gather_objects(written, where="digests of files")
        records = {name: record for part in everyones for name, record in part.items()}
        _together(lambda: _write_digests(folder, records), doing)


@explain_arguments("load_sharded(model, path)")
def load_sharded(
    model: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> None:
    """Load a checkpoint of :func:`save_sharded` or of a trainer, on this or another number of ranks.

    Parameters are matched by name: the optimizer may have them in another order. Everything is read before
    anything is changed. After its own error a rank's model and optimizer are as they were. An error on one
    rank raises on all ranks.

    Args:
        model: The model, with any split; call it on every rank.
        path: The folder, or the checkpoint of a trainer.
        optimizer: An optimizer over its parameters, to load too.

    Raises:
        ConfigError: The first argument is no model.
        FileNotFoundError: There is no such checkpoint.
        StateError: A key is missing, new or of another shape, and is named; a file was truncated or changed
            since it was written; or another rank failed.
        ModelError: The optimizer has a parameter that is not the model's.

    Collectives: two all-gathers of small objects, over all ranks.
    """
    if not isinstance(model, nn.Module):
        msg = f"load_sharded(model, folder) takes the model first, got {type(model).__name__}: {model!r:.80}"
        raise ConfigError(msg)
    model = unwrap(model)
    reshard(model)
    doing = f"load {os.fspath(path)}"
    _together(lambda: _check_digests(Path(path)), doing)
    _together(lambda: restore_state(model, optimizer, open_tensors(path), cut=shard_spec(model)), doing)


# -- Safetensors files of whole models: all ranks write one together -------------------------------


@explain_arguments("export(split_model, path)")
def export(model: nn.Module, path: str | os.PathLike[str], *, prefix: str = "") -> None:
    """Write the whole state of a model to a safetensors file.

    Rank 0 writes the file, and holds one whole tensor at a time, in host memory. In a mesh with an axis for
    the stages of a pipeline, the first rank of each stage writes the stage's file. A crash leaves an old file
    with this name as it was.

    Tied tensors are written under each of their names.

    Args:
        model: The model; call it on every rank.
        path: The file, which ends in ".safetensors".
        prefix: A prefix for every name.

    Raises:
        ConfigError: It does not.
        StateError: A tensor has a type that the format does not have.
        OSError: The file cannot be written; on every rank.

    Collectives: a point-to-point message of every shard to rank 0, and an all-gather of the outcomes.
    """
    model = unwrap(model)
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    path = Path(path)
    check_weights_name(path)
    infos = _whole_infos(model, state, prefix)
    tensors = ((prefix + plain_name(name), tensor) for name, tensor in stream(model, state, to="rank0"))
    failure: OSError | None = None
    if is_first_rank():
        try:
            write_safetensors(path, {path: list(infos)}, infos, [tensors])
        except OSError as error:
            failure = error
    # On the other ranks this loop sends their shards. On rank 0 it receives the rest after a failed write, or
    # the others would wait in their sends (`test_all_ranks_learn_that_rank_0_could_not_write`).
    for _ in tensors:
        pass
    agree_on_failure(failure, gather_objects, f"write {path}")


def _whole_infos(model: nn.Module, state: Mapping[str, Tensor], prefix: str) -> dict[str, TensorInfo]:
    """Return the whole shape and the dtype of each tensor of the state, by its name in the file."""
    table = ShardTable(model)
    infos = {}
    for name, tensor in state.items():
        if safetensors_dtype(tensor.dtype) is None:
            msg = f"{name} has type {tensor.dtype}, which a safetensors file cannot hold"
            raise StateError(msg)
        shard = table.get(name)
        if shard is None:
            shape = tuple(tensor.shape)
        else:
            shape = shard.full_shape
        infos[prefix + plain_name(name)] = TensorInfo(shape, tensor.dtype)
    return infos


# -- Loading of a rank's part of a large model from files of the whole model ----------------------


@explain_arguments("load_pretrained(model, path)")
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
    for this rank's shards. Of a file at most 32 MiB, or one tensor, are mapped into memory at a time, in
    pages that the system can reclaim. The model's types are kept.

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
    files = SafetensorsFiles(path)
    names = _names(model, files, table, prefix, strict=strict)
    _check_buffers(model)
    shards = {id(shard.tensor): shard for shard in table.exact.values()}
    materialized: dict[int, Tensor] = {}
    targets: dict[str, Tensor | TensorSlice] = {}
    for tensor, name in names:
        target = materialized[id(tensor)] = _with_memory(tensor, device)
        targets[name] = _slice(target, shards.get(id(tensor)))
    files.fill(targets)
    _put_in_place(model, materialized)
    _make_buffers(model, device)
    return model


def _names(
    model: nn.Module, files: SafetensorsFiles, table: ShardTable, prefix: str, *, strict: bool
) -> list[tuple[Tensor, str]]:
    """Return each tensor of the state with its name in the files."""
    by_id: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            by_id.setdefault(id(tensor), (tensor, []))[1].append(name)
    result = []
    known: set[str] = set()
    for tensor, own in by_id.values():
        stored = [prefix + plain_name(name) for name in own]
        known.update(stored)
        stored_name = next((name for name in stored if name in files.infos), None)
        if stored_name is None:
            some = ", ".join(list(files.infos)[:5])
            msg = (
                f"{files.path} lacks {stored[0]!r}; it has {some} ...; prefix= goes before the model's names"
            )
            raise StateError(msg)
        shard = table.get(own[0])
        if shard is None:
            shape = tuple(tensor.shape)
        else:
            shape = shard.full_shape
        if files.infos[stored_name].shape != shape:
            msg = f"{files.path} has {stored_name!r} of shape {files.infos[stored_name].shape}, not {shape}"
            raise StateError(msg)
        if is_dtensor(tensor) and tensor.is_meta:
            msg = f"{own[0]} is a DTensor on the meta device: call model.to_empty(device=...) first"
            raise StateError(msg)
        result.append((tensor, stored_name))
    extra = [name for name in files.infos if name not in known]
    if strict and extra:
        if len(extra) > 1:
            more = f" (and {len(extra) - 1} more)"
        else:
            more = ""
        msg = f"{files.path} has {extra[0]!r}{more}, which the model lacks; strict=False leaves it out"
        raise StateError(msg)
    return result


def _with_memory(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device or "cpu")
    return tensor.detach()


def _slice(target: Tensor, shard: Shard | None) -> Tensor | TensorSlice:
    """Return the parts of a whole tensor that this rank holds, over the memory of ``target``."""
    return slice_of(TensorSlice(tuple(target.shape), [part_of(target)]), shard)


def _put_in_place(model: nn.Module, materialized: dict[int, Tensor]) -> None:
    """Replace tensors on the meta device by the loaded ones, under all of their names."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or not old.is_meta or id(old) not in materialized:
                continue
            if id(old) not in parameters:
                parameters[id(old)] = nn.Parameter(materialized[id(old)], old.requires_grad)
                copy_attributes(old, parameters[id(old)])
                move_gradient_hooks(old, parameters[id(old)])
            module._parameters[name] = parameters[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and id(buffer) in materialized:
                module._buffers[name] = materialized[id(buffer)]


def _meta_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield the buffers on the meta device that are not part of the state."""
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                full_name = f"{path}.{name}" if path else name
                yield full_name, module, name, buffer


def _check_buffers(model: nn.Module) -> None:
    """Raise unless buffers outside of the state hold values, or can be computed again."""
    for full_name, module, _, _ in _meta_buffers(model):
        if not hasattr(model, "_init_weights") or module._parameters:
            msg = (
                f"{full_name} is on the meta device and not part of the state, so that no file has it: make "
                "the module that has it with numbers, outside of torch.device('meta')"
            )
            raise StateError(msg)


def _make_buffers(model: nn.Module, device: torch.device | str | None) -> None:
    """Compute the buffers of a transformers model again, with its own method."""
    missing = list(_meta_buffers(model))
    for _, module, name, buffer in missing:
        # A buffer that still has this value afterwards was not computed.
        module._buffers[name] = torch.full_like(buffer, _sentinel(buffer.dtype), device=device or "cpu")
    for module in {id(module): module for _, module, _, _ in missing}.values():
        model._init_weights(module)  # type: ignore[operator]  # a method, as _check_buffers saw
    for full_name, module, name, buffer in missing:
        computed = module._buffers[name]
        # NaN is unequal to itself, so both sides get a number in its place.
        nothing = torch.full_like(buffer, _sentinel(buffer.dtype), device="cpu")
        if computed is None or torch.equal(computed.cpu().nan_to_num(7.5), nothing.nan_to_num(7.5)):
            msg = f"{full_name} is not part of the state, and the model's _init_weights() does not make it"
            raise StateError(msg)


def _sentinel(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype.is_signed:
        return -1
    return 1
