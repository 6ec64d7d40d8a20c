"""``tp convert``."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from tp_core.errors import ConfigError
from tp_core.internal import Ownership

from tp_trainer._convert._models import find_checkpoint, open_model, write_model
from tp_trainer._memory._footprint import parse_nbytes

__all__ = ["convert_app"]

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
        for old in set(there) - set(files):  # readers would take them for part of the new ones
            old.unlink(missing_ok=True)
    if as_json:
        report = {"checkpoint": str(path), "files": [str(file) for file in files]}
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"from {path}", err=True)
        for file in files:
            typer.echo(file)
