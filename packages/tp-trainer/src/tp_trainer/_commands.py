"""The commands that are faces of a public function: ``tp convert``, ``estimate``, ``report``."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from tp_core.builders import call_builder
from tp_core.errors import ConfigError, ModelError

import tp_trainer  # its names when they are used: most of them import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


_KEYS = ("model", "optimizer", "batch", "step")
_MOST = 100_000  # devices of a job


def _convert(
    source: Annotated[
        Path, typer.Argument(help="The folder of a run, a checkpoint, weights, or a file of save_model().")
    ],
    out: Annotated[Path, typer.Argument(help="NAME.safetensors, or a folder for model.safetensors.")],
    *,
    step: Annotated[int | None, typer.Option(help="Of a run: the checkpoint of this step.")] = None,
    best: Annotated[str | None, typer.Option(help="Of a run: where this metric is best.")] = None,
    mode: Annotated[
        Literal["min", "max"] | None, typer.Option(help="Which value of it is the best; by default min.")
    ] = None,
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
    before anything of it is used. To resume on another number of ranks, nothing has to be converted: every
    checkpoint is resumed on any number.
    """
    if ranks is not None:
        msg = (
            "a checkpoint need not be written again for another number of ranks: resume= and load_model() "
            "read it on any number, whatever number wrote it"
        )
        raise ConfigError(msg)
    path = tp_trainer.find_checkpoint(source, step=step, best=best, mode=mode)
    files = tp_trainer.convert(
        path, out, model=model, max_file_nbytes=max_shard_size or None, overwrite=overwrite
    )
    if as_json:
        report = {"checkpoint": str(path), "files": [str(file) for file in files]}
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"from {path}", err=True)
        for file in files:
            typer.echo(file)


def _estimate(
    builder: Annotated[str, typer.Argument(help="model.py:build, or package.module:build.")],
    *,
    devices: Annotated[int, typer.Option(min=1, max=_MOST, help="How many devices there would be.")] = 1,
    memory: Annotated[str, typer.Option(help="What each of them has free: 80GiB.")] = "",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples on each device; as built by default.")
    ] = None,
    precision: Annotated[str, typer.Option(help="As of the trainer.")] = "fp32",
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of one optimizer step.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Print the layouts of all installed backends that fit, by their memory, and what to write for each.

    The builder takes no arguments and returns a model, or a dict with "model" and any of "optimizer", "batch"
    and "step". It is built without memory, and nothing is computed. The exit status is 0 if a layout fits.
    """
    with redirect_stdout(sys.stderr):  # the output of the user's code is not part of the table
        built = _built(builder)
        table = tp_trainer.estimate(
            **{"step": _plain_step, **built},
            devices=devices,
            memory=memory or None,
            samples=batch,
            precision=cast(Any, precision),  # which is checked there
            accumulate=accumulate,
        )
    if as_json:
        text = json.dumps(table.to_dict(), indent=2)
    else:
        text = str(table)
    typer.echo(text)
    if built.get("batch") is None and not as_json:
        typer.echo('activations are known where the builder returns {"model": model, "batch": batch}')
    status = 0 if table.fitting else 1
    raise typer.Exit(status)


def _built(name: str) -> dict[str, Any]:
    """Return what a builder makes, without the memory of its model."""
    import torch
    from tp_core.tensors import build_deferred

    try:
        # Nothing is drawn, which for billions of weights takes minutes.
        with torch.device("meta"):
            return call_builder(name, _KEYS)
    except (ConfigError, ModelError):  # it may read numbers, or be wrong, which the second try says
        pass
    made_by_builder: list[Any] = []

    def make() -> "nn.Module":
        built_values = call_builder(name, _KEYS)
        made_by_builder.append(built_values)
        model: nn.Module = built_values["model"]
        return model

    build_deferred(make)
    built: dict[str, Any] = made_by_builder[-1]
    return built


def _plain_step(model: "nn.Module", batch: Any) -> "Tensor":
    """Return the model's own loss, or the mean of its first output; the step if none is given."""
    from torch import Tensor
    from tp_core import tree_leaves

    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return first.float().mean()


def _report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their log.jsonl.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the first run's folder.")] = None,
    png: Annotated[Path | None, typer.Option(help="A folder for the curves as PNG files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Make one HTML page of what runs have left in their folders."""
    page, *pictures = tp_trainer.write_report(runs, out, pictures=png)
    if as_json:
        typer.echo(json.dumps({"page": str(page), "pictures": [str(path) for path in pictures]}, indent=2))
        return
    for path in [page, *pictures]:
        typer.echo(path)


def _app(command: Callable[..., None]) -> typer.Typer:
    """Return a command as a separate application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return app


convert_app, estimate_app = partial(_app, _convert), partial(_app, _estimate)
report_app = partial(_app, _report)
