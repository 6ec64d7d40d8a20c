"""``tp estimate``: the memory that training needs, on devices that need not exist."""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Annotated, Any, cast, get_args

import typer
from torch import Tensor, nn
from tp_core import LaunchEnvironment, resolve_devices, tree_leaves
from tp_core.errors import ConfigError
from tp_core.internal import call_builder, did_you_mean
from tp_core.jobs import Precision
from tp_core.plugins import Job, registry
from tp_core.tensors import build_deferred

from tp_trainer._checks import check_known
from tp_trainer._memory._footprint import measure_footprint, parse_nbytes
from tp_trainer._memory._requirements import resized, table_of

_KEYS = ("model", "optimizer", "batch", "step")
_MOST = 100_000  # devices of a job


def estimate_app() -> typer.Typer:
    """Return ``tp estimate`` as a separate application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_estimate)
    return app


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
    """Print what training a model needs on each device, under every installed backend.

    The builder takes no arguments and returns a model, or a dict with "model" and any of "optimizer", "batch"
    and "step". It is built without memory, and nothing is computed. The exit status is 0 if a backend fits.
    """
    if precision not in get_args(Precision):
        known = get_args(Precision)
        msg = f"--precision is one of {', '.join(known)}, got {precision!r}{did_you_mean(precision, known)}"
        raise ConfigError(msg)
    chosen = cast(Precision, precision)
    with redirect_stdout(sys.stderr):  # the output of the user's code is not part of the table
        built = _built(builder)
        model, samples = built["model"], built.get("batch")
        check_known(builder, model, built.get("optimizer"), built.get("step"))
        if batch is not None and samples is not None:
            samples = resized(samples, batch)
        footprint = measure_footprint(
            model, built.get("optimizer"), samples, built.get("step", _plain_step), precision=chosen
        )
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment(),
        model=model,
        precision=chosen,
        accumulate=accumulate,
        footprint=footprint,
        free_nbytes=parse_nbytes(memory) if memory else None,
    )
    table = table_of(job, registry.backends(), devices=devices, kind="cuda")
    typer.echo(json.dumps(table.to_dict(), indent=2) if as_json else str(table))
    if samples is None and not as_json:
        typer.echo('activations are known where the builder returns {"model": model, "batch": batch}')
    raise typer.Exit(0 if table.best is not None else 1)


def _built(name: str) -> dict[str, Any]:
    found: list[Any] = []

    def make() -> nn.Module:
        made = call_builder(name, _KEYS)
        found.append(made)
        model: nn.Module = made["model"]
        return model

    build_deferred(make)
    built: dict[str, Any] = found[-1]
    return built


def _plain_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the model's own loss, or the mean of its first output; the step if none is given."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return first.float().mean()
