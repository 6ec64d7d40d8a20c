"""Named tensors of one or several ranks, written into a folder as safetensors files with an index.

torch.distributed.checkpoint decides which rank writes which part, and passes errors on. Its own writer of
safetensors does not serve: it holds one more copy of all that a rank writes in memory, and of several parts
of a tensor it keeps the last. `_files` imports this module in its functions, because importing torch's
modules takes most of a second.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tp_core.errors import StateError
from tp_core.files._atomic import atomic_part, showing_system_errors
from tp_core.modules._parameters import TensorSlice, is_dtensor
from tp_core.tensors._digests import INDEX, DigestingFile, FileRecord
from tp_core.tensors._index import IndexEntry, StoredPart, dump_index
from tp_core.tensors._safetensors import in_file_order, write_file
from tp_core.tensors._stored import TensorInfo


class _Planner(DefaultSavePlanner):
    """torch's planner with support for slices."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, TensorSlice):
            return value.part_at(index.offset or ())
        return super().lookup_object(index)


class SafetensorsWriter(StorageWriter):
    """A writer of one safetensors file per rank, tensor by tensor, and of its digest.

    A name stands for one tensor in a file: where a rank has several parts of one, each is in a file of its
    own. So torch's ``HuggingFaceStorageReader`` reads them, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:  # noqa: ARG002 - contract
        self.records = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: list[dict[str, WriteItem]] = []
        for item in plan.items:
            name = item.index.fqn
            free = next((items for items in files if name not in items), None)
            if free is None:
                free = {}
                files.append(free)
            free[name] = item
        results = []
        for number, items in enumerate(files):
            file = f"__{plan.storage_data}_{number}.safetensors"
            self.records[file] = _write(self._folder / file, items, planner)
            results += [WriteResult(item.index, _info_of(item).nbytes, file) for item in items.values()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[MetadataIndex, str] = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        index = {}
        # A state has tensors alone: what else torch's metadata may hold, bytes, is not written here.
        tensors = cast("dict[str, TensorStorageMetadata]", metadata.state_dict_metadata)
        for name, stored in tensors.items():
            parts = [
                StoredPart(
                    tuple(chunk.offsets), tuple(chunk.sizes), files[MetadataIndex(name, chunk.offsets)]
                )
                for chunk in stored.chunks
            ]
            index[name] = IndexEntry(TensorInfo(tuple(stored.size), stored.properties.dtype), parts)
        with atomic_part(self._folder / INDEX) as part:
            part.write_text(dump_index(index))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - contract
        return True


def _info_of(item: WriteItem) -> TensorInfo:
    data = cast("TensorWriteData", item.tensor_data)
    return TensorInfo(tuple(data.chunk.sizes), data.properties.dtype)


def _write(path: Path, items: Mapping[str, WriteItem], planner: SavePlanner) -> FileRecord:
    """Write the tensors of one file, one after another, and flush it to the disk."""
    infos = {name: _info_of(item) for name, item in items.items()}
    tensors = ((name, cast("Tensor", planner.resolve_data(items[name]))) for name in in_file_order(infos))
    # As torch.distributed.checkpoint.HuggingFaceStorageReader reads it.
    offsets = {
        name: {"saved_offsets": list(cast("TensorWriteData", item.tensor_data).chunk.offsets)}
        for name, item in items.items()
    }
    # Here, on the rank that writes: errors travel to other ranks without their causes.
    with path.open("wb") as stream, showing_system_errors(path):
        file = DigestingFile(stream)
        write_file(file, infos, tensors, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        file.flush()
        os.fsync(stream.fileno())
        return file.record()


def write(
    tensors: Mapping[str, Tensor | TensorSlice],
    folder: Path,
    *,
    group: ProcessGroup | None,
    together: bool,
) -> dict[str, FileRecord]:
    """Write tensors; see :func:`tp_core.state.write_tensors`.

    Collective: with ``together`` those of ``torch.distributed.checkpoint.save``.
    """
    if together and dist.get_rank(group):
        # Whole tensors come from the first rank: statistics of batch norms differ between ranks.
        tensors = {n: t for n, t in tensors.items() if isinstance(t, TensorSlice) or is_dtensor(t)}
    writer = SafetensorsWriter(folder)
    try:
        with warnings.catch_warnings():
            # That one rank writes alone is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save(
                dict(tensors),
                storage_writer=writer,
                planner=_Planner(),
                process_group=group,
                no_dist=not together,
            )
    except CheckpointException as error:
        # torch's exception has the errors of all ranks.
        rank, (cause, _) = min(error.failures.items(), key=lambda item: int(item[0]))
        if isinstance(cause, OSError):
            raise cause from error
        msg = f"tensors could not be written to {folder}: rank {rank}: {cause}"
        raise StateError(msg) from error
    return writer.records
