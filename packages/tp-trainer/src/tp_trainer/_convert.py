"""`tp convert`: the model of any backend's checkpoint as safetensors."""

import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor
from tp_core.errors import ConfigError, StateError
from tp_core.internal import Ownership
from tp_core.state import StoredTensors, load_state, open_tensors, plain_state

from tp_trainer._checkpoint._folder import MANIFEST, Manifest, RunFolder, read_manifest, step_of, verify
from tp_trainer._checkpoint._model_files import MODEL, OneOfSeveral, StateInAFile
from tp_trainer._checkpoint._weights_files import (
    WeightsFiles,
    is_weights,
    split_over_files,
    type_name,
    write_files,
)
from tp_trainer._memory._footprint import parse_nbytes

_INDEX = ".metadata"  # of tensors that several ranks have written


def find_checkpoint(source: Path, *, step: int | None, best: str | None, mode: str) -> Path:
    """Return the chosen checkpoint in a run's folder, or ``source`` itself if it is not a run's folder.

    Args:
        source: The folder of a run, a checkpoint, or a file.
        step: The step of a run's checkpoint; by default the newest.
        best: Instead of a step, the metric with the best value.
        mode: Whether its "min" or its "max" is the best.

    Raises:
        ConfigError: There is no such checkpoint, or ``source`` is no run's folder and a choice was given.
        FileNotFoundError: ``source`` does not exist, or has no model.
        StateError: A manifest is damaged.
    """
    if not source.exists():
        msg = f"there is no checkpoint at {source}"
        raise FileNotFoundError(msg)
    found = RunFolder(source).committed()
    if not found:
        if step is not None or best is not None:
            msg = f"{source} is not the folder of a run with checkpoints, so there is none to choose"
            raise ConfigError(msg)
        known = (source / MANIFEST, source / _INDEX)
        if source.is_dir() and not is_weights(source) and not any(path.is_file() for path in known):
            msg = f"{source} has no checkpoint: neither step-... folders, nor {MANIFEST}, nor {_INDEX}"
            raise FileNotFoundError(msg)
        return source
    if best is not None:
        return _best(found, best, mode)
    if step is None:
        return found[0]
    for path in found:
        if step_of(path) == step:
            return path
    steps = ", ".join(str(step_of(path)) for path in found)
    msg = f"{source} has no checkpoint of step {step}; it has {steps}"
    raise ConfigError(msg)


def _best(found: list[Path], metric: str, mode: str) -> Path:
    """Return the checkpoint with the best value; the newest of equals.

    Raises:
        ConfigError: No checkpoint has the metric.
        StateError: A manifest is damaged.
    """
    manifests: dict[Path, Manifest] = {path: read_manifest(path) for path in found}
    values = {
        path: manifest.metrics[metric]
        for path, manifest in manifests.items()
        if isinstance(manifest.metrics.get(metric), int | float) and not math.isnan(manifest.metrics[metric])
    }
    if not values:
        names = sorted({name for manifest in manifests.values() for name in manifest.metrics})
        msg = f"no checkpoint has the metric {metric!r}; they have {', '.join(names) or 'none'}"
        raise ConfigError(msg)
    choose = min if mode == "min" else max
    return choose(values, key=values.__getitem__)


def open_model(path: Path, *, name: str | None = None) -> StoredTensors:
    """Return the tensors of a model in any of the formats, with "model." before their names.

    Args:
        path: A checkpoint, a folder of ``tp_shard.save_sharded``, weights, or a file of ``save_model``.
        name: The name of one of a checkpoint's several models.

    Raises:
        ConfigError: There is no model of that name, or the file has a single model without a name.
        FileNotFoundError: ``path`` does not exist.
        StateError: The file or folder is damaged, or has no model.
    """
    if is_weights(path):
        stored: StoredTensors = WeightsFiles(path, prefix=MODEL)
    elif path.is_file():
        state = plain_state(load_state(path, mapped=zipfile.is_zipfile(path)))
        others = [key for key, value in state.items() if not isinstance(value, Tensor)]
        if others:
            msg = f"{path} holds {others[0]!r}, which is {type(state[others[0]]).__name__} and not a tensor"
            raise StateError(msg)
        stored = StateInAFile(path, state)
    else:
        if not (path / _INDEX).is_file():
            verify(path)
        stored = open_tensors(path)
        if not any(key.startswith(MODEL) for key in stored.infos):
            msg = f"{path} has no model: no name begins with {MODEL!r}; it has {list(stored.infos)[:3]}"
            raise StateError(msg)
        return stored if name is None else OneOfSeveral(stored, name)
    if name is not None:
        msg = f"{path} has one model, and the name {name!r} is for checkpoints of several"
        raise ConfigError(msg)
    return stored


def write_model(stored: StoredTensors, out: Path, *, max_file_nbytes: int | None = None) -> list[Path]:
    """Write the weights of a model, with little more than the largest tensor in memory.

    A crash leaves ``out`` unchanged. The caller must own ``out``.

    Args:
        stored: The tensors; those with "model." before their names are written.
        out: The file, ``model.safetensors``.
        max_file_nbytes: The largest size of a file; larger weights are split, with an index.

    Returns:
        The files, the index last.

    Raises:
        ConfigError: There are several files, and ``out`` does not end in ".safetensors".
        OSError: A file cannot be written.
        StateError: A tensor's type is not in the format, or a source file is damaged.
    """
    infos = {
        name.removeprefix(MODEL): torch.empty(info.shape, dtype=info.dtype, device="meta")
        for name, info in stored.infos.items()
        if name.startswith(MODEL)
    }
    for name, tensor in infos.items():
        if type_name(tensor.dtype) is None:
            msg = f"a safetensors file has no {tensor.dtype}, which {name!r} is"
            raise StateError(msg)
    files = split_over_files(infos, out, max_file_nbytes)
    room = max((_nbytes(tensor) for tensor in infos.values()), default=0)
    streams = (_read(stored, {name: infos[name] for name in names}, room) for names in files.values())
    return write_files(out, files, infos, streams)


def _read(stored: StoredTensors, infos: Mapping[str, Tensor], room: int) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, read in groups of at most ``room`` bytes."""
    for names in _groups(infos, room):
        group = {name: torch.empty_like(infos[name], device="cpu") for name in names}
        stored.fill({MODEL + name: tensor for name, tensor in group.items()})
        while group:
            yield group.popitem()


def _groups(infos: Mapping[str, Tensor], room: int) -> Iterator[list[str]]:
    group: list[str] = []
    taken = 0
    for name, info in infos.items():
        if group and taken + _nbytes(info) > room:
            yield group
            group, taken = [], 0
        group.append(name)
        taken += _nbytes(info)
    if group:
        yield group


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- ``tp convert`` -------------------------------------------------------------------------------


_NAME = "model.safetensors"


def convert_app() -> typer.Typer:
    """Return ``tp convert`` as a separate application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_convert)
    return app


def _convert(
    source: Annotated[
        Path, typer.Argument(help="The folder of a run, a checkpoint, weights, or a file of save_model().")
    ],
    out: Annotated[Path, typer.Argument(help=f"NAME.safetensors, or a folder for {_NAME}.")],
    *,
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint of this step.")] = None,
    best: Annotated[str | None, typer.Option(help="Of a run: where this metric is best.")] = None,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Which value of it is the best.")] = "min",
    model: Annotated[
        str | None, typer.Option(help="Which one, where the checkpoint has several by name.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="The largest file: 5GB. From there on there are several, and an index.")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    ranks: Annotated[int | None, typer.Option(hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write the model of a checkpoint, of whatever backend, as safetensors, which any program reads.

    Of a run the newest checkpoint is taken, unless --step or --best says otherwise. A checkpoint is checked
    before anything of it is used. To go on with another number of ranks, nothing has to be converted: every
    checkpoint is resumed on any number.
    """
    if ranks is not None:
        msg = (
            "a checkpoint need not be written anew for another number of ranks: resume= and load_model() "
            "read it on any number, whatever number wrote it"
        )
        raise ConfigError(msg)
    if step is not None and best is not None:
        msg = "--step and --best both choose a checkpoint; give one of them"
        raise ConfigError(msg)
    place = out / _NAME if out.is_dir() or out.suffix == "" else out
    if place.suffix != ".safetensors":
        msg = f"what is written are safetensors: the name ends in .safetensors, got {str(out)!r}"
        raise ConfigError(msg)
    limit = parse_nbytes(max_shard_size) if max_shard_size else None
    path = find_checkpoint(source, step=step, best=best, mode=mode)
    stored = open_model(path, name=model)
    patterns = (f"{place.stem}.safetensors*", f"{place.stem}-*-of-*.safetensors")
    place.parent.mkdir(parents=True, exist_ok=True)
    with Ownership(place.absolute()):
        there = sorted(file for pattern in patterns for file in place.parent.glob(pattern))
        if there and not overwrite:
            msg = f"{there[0]} is there already; --overwrite replaces it"
            raise ConfigError(msg)
        files = write_model(stored, place, max_file_nbytes=limit)
        for old in set(there) - set(files):  # readers would take old files for parts of the new weights
            old.unlink(missing_ok=True)
    if as_json:
        report = {"checkpoint": str(path), "files": [str(file) for file in files]}
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"from {path}", err=True)
        for file in files:
            typer.echo(file)
