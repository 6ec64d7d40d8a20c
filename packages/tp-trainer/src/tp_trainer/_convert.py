"""The model of any backend's checkpoint as safetensors, without a trainer: `tp convert` for programs."""

import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tp_core.arguments import explain_arguments
from tp_core.errors import ConfigError, StateError
from tp_core.files import Ownership
from tp_core.state import (
    SafetensorsFiles,
    StoredTensors,
    TensorInfo,
    check_weights_name,
    is_safetensors,
    load_state,
    open_tensors,
    plain_state,
    safetensors_dtype,
    split_over_files,
    write_safetensors,
)
from tp_core.tensors import INDEX

from tp_trainer._checkpoint import check_mode
from tp_trainer._checkpoint._base import read_base
from tp_trainer._checkpoint._folder import MANIFEST, Manifest, RunFolder, read_manifest, step_of, verify
from tp_trainer._checkpoint._model_files import MODEL, OneOfSeveral, StateInAFile
from tp_trainer._memory import parse_nbytes


@explain_arguments("find_checkpoint(folder)")
def find_checkpoint(
    source: str | os.PathLike[str],
    *,
    step: int | None = None,
    best: str | None = None,
    mode: Literal["min", "max"] | None = None,
) -> Path:
    """Return the chosen checkpoint in a run's folder, or ``source`` itself if it is not a run's folder.

    Args:
        source: The folder of a run, a checkpoint, or a file.
        step: The step of a run's checkpoint; by default the newest.
        best: Instead of a step, the metric with the best value.
        mode: Whether its "min" or its "max" is the best; ``None`` as in `Checkpoints`.

    Raises:
        ConfigError: There is no such checkpoint, or ``source`` is no run's folder and a choice was given.
        FileNotFoundError: ``source`` does not exist, or has no model.
        StateError: A manifest is damaged.

    Example:
        >>> trainer.load_model(model, find_checkpoint("run", best="val_loss"))  # doctest: +SKIP
    """
    source = Path(source)
    check_mode("find_checkpoint", best, mode)
    if step is not None and best is not None:
        msg = "a step and the best both choose a checkpoint; give one of them"
        raise ConfigError(msg)
    checkpoints = RunFolder(source).committed()
    if not checkpoints:
        if not source.exists():
            msg = f"there is no checkpoint at {source}"
            raise FileNotFoundError(msg)
        if step is not None or best is not None:
            msg = f"{source} is not the folder of a run with checkpoints, so there is none to choose"
            raise ConfigError(msg)
        index_files = (source / MANIFEST, source / INDEX)
        if source.is_dir() and not is_safetensors(source) and not any(path.is_file() for path in index_files):
            msg = f"{source} has no checkpoint: neither step-... folders, nor {MANIFEST}, nor {INDEX}"
            raise FileNotFoundError(msg)
        return source
    if best is not None:
        return _best(checkpoints, best, mode)
    if step is None:
        return checkpoints[0]
    for path in checkpoints:
        if step_of(path) == step:
            return path
    steps = ", ".join(str(step_of(path)) for path in checkpoints)
    msg = f"{source} has no checkpoint of step {step}; it has {steps}"
    raise ConfigError(msg)


def _best(checkpoints: list[Path], metric: str, mode: str | None) -> Path:
    """Return the checkpoint with the best value; the newest of equals."""
    manifests: dict[Path, Manifest] = {path: read_manifest(path) for path in checkpoints}
    values = {
        path: manifest.metrics[metric]
        for path, manifest in manifests.items()
        if isinstance(manifest.metrics.get(metric), int | float) and not math.isnan(manifest.metrics[metric])
    }
    if not values:
        names = sorted({name for manifest in manifests.values() for name in manifest.metrics})
        msg = f"no checkpoint has the metric {metric!r}; they have {', '.join(names) or 'none'}"
        raise ConfigError(msg)
    choose = max if mode == "max" else min
    return choose(values, key=values.__getitem__)


@explain_arguments("convert(checkpoint, path)")
def convert(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    max_file_nbytes: int | str | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the model of a checkpoint, of whatever backend, as safetensors, which any program reads.

    The checkpoint is checked before anything of it is used. One tensor at a time is in memory, and a crash
    leaves what is there unchanged. A trainer's own model is written by :meth:`tp_trainer.Trainer.export`.

    Args:
        checkpoint: A checkpoint, of a run the newest one, see :func:`find_checkpoint`; a folder of
            ``tp_shard.save_sharded``; weights, or a file of ``save_model``.
        path: The file, which ends in ".safetensors", or a folder for ``model.safetensors``.
        model: The name of one of a checkpoint's several models.
        max_file_nbytes: The largest size of a file, in bytes or as "5GB"; larger weights are split, with an
            index.
        overwrite: Whether to replace what is there.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: An argument has a wrong value; or there is a file, and ``overwrite`` is false.
        FileNotFoundError: There is no checkpoint.
        StateError: It is damaged, or has no model; or a tensor's type is not in the format.
        OSError: A file cannot be written.

    Example:
        >>> convert("run", "model.safetensors")  # doctest: +SKIP
        [PosixPath('model.safetensors')]
    """
    out = Path(path)
    if out.is_dir() or out.suffix == "":
        place = out / "model.safetensors"
    else:
        place = out
    check_weights_name(place)
    limit = parse_nbytes(max_file_nbytes) if isinstance(max_file_nbytes, str) else max_file_nbytes
    stored = open_model(find_checkpoint(checkpoint), name=model)
    patterns = (f"{place.stem}.safetensors*", f"{place.stem}-*-of-*.safetensors")
    place.parent.mkdir(parents=True, exist_ok=True)
    with Ownership(place.absolute()):
        existing = sorted(file for pattern in patterns for file in place.parent.glob(pattern))
        if existing and not overwrite:
            msg = f"{existing[0]} is there already; overwrite=True, or --overwrite, replaces it"
            raise ConfigError(msg)
        files = write_model(stored, place, max_file_nbytes=limit)
        for old in set(existing) - set(files):  # readers would take old files for parts of the new weights
            old.unlink(missing_ok=True)
    return files


def open_model(path: Path, *, name: str | None) -> StoredTensors:
    """Return the tensors of a model in any of the formats, with "model." before their names.

    ``path`` is a checkpoint, a folder of ``tp_shard.save_sharded``, weights, or a file of ``save_model``.
    ``name`` is the name of one of a checkpoint's several models.
    """
    if is_safetensors(path):
        stored: StoredTensors = SafetensorsFiles(path, prefix=MODEL)
    elif path.is_file():
        state = plain_state(load_state(path, mapped=zipfile.is_zipfile(path)))
        plain = [key for key, value in state.items() if not isinstance(value, Tensor)]
        if plain:
            msg = f"{path} holds {plain[0]!r}, which is {type(state[plain[0]]).__name__} and not a tensor"
            raise StateError(msg)
        stored = StateInAFile(path, state)
    else:
        if not (path / INDEX).is_file():
            verify(path)
            if (base := read_base(path)) is not None:
                base.check_is_whole(path)
        stored = open_tensors(path)
        if not any(key.startswith(MODEL) for key in stored.infos):
            msg = f"{path} has no model: no name begins with {MODEL!r}; it has {list(stored.infos)[:3]}"
            raise StateError(msg)
        if name is None:
            return stored
        return OneOfSeveral(stored, name)
    if name is not None:
        msg = f"{path} has one model, and the name {name!r} is for checkpoints of several"
        raise ConfigError(msg)
    return stored


def write_model(stored: StoredTensors, out: Path, *, max_file_nbytes: int | None = None) -> list[Path]:
    """Write the weights of a model as ``out``; return the files, the index of several last.

    It takes little more memory than the largest tensor. A crash leaves ``out`` unchanged. The caller must own
    ``out``.
    """
    infos = {name.removeprefix(MODEL): info for name, info in stored.infos.items() if name.startswith(MODEL)}
    for name, info in infos.items():
        if safetensors_dtype(info.dtype) is None:
            msg = f"a safetensors file has no {info.dtype}, which {name!r} is"
            raise StateError(msg)
    files = split_over_files(infos, out, max_file_nbytes)
    room = max((info.nbytes for info in infos.values()), default=0)
    streams = (_read(stored, {name: infos[name] for name in names}, room) for names in files.values())
    return write_safetensors(out, files, infos, streams)


def _read(stored: StoredTensors, infos: Mapping[str, TensorInfo], room: int) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, read in groups of at most ``room`` bytes."""
    for names in _groups(infos, room):
        group = {name: torch.empty(infos[name].shape, dtype=infos[name].dtype) for name in names}
        stored.fill({MODEL + name: tensor for name, tensor in group.items()})
        while group:
            yield group.popitem()


def _groups(infos: Mapping[str, TensorInfo], room: int) -> Iterator[list[str]]:
    group: list[str] = []
    nbytes = 0
    for name, info in infos.items():
        if group and nbytes + info.nbytes > room:
            yield group
            group, nbytes = [], 0
        group.append(name)
        nbytes += info.nbytes
    if group:
        yield group
