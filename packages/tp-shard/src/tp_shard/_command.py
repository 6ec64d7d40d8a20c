"""``tp shard``: plans on the command line."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal

import typer
from torch import nn
from tp_core.builders import call_builder
from tp_core.errors import ConfigError

from tp_shard import plans
from tp_shard._verify._examples import example_call
from tp_shard._verify._report import PlanReport, verify

_KEYS = ("model", "plan", "batch", "loss")
_MOST = 1024  # ranks of a group of a model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def shard() -> None:
    """Plans that split models over ranks."""


@app.command("verify")
def verify_command(
    builder: Annotated[str, typer.Argument(help="model.py:build, or package.module:build.")],
    *,
    ranks: Annotated[int, typer.Option(min=1, max=_MOST, help="How many ranks, which are simulated.")] = 2,
    propose: Annotated[
        str, typer.Option(help='Where the builder brings no plan: "auto" or "hf", the plan of transformers.')
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compare a whole model with the split one: every output and every gradient, on simulated ranks.

    The builder takes no arguments and returns a model, or a dict with "model" and any of "plan", "batch" and
    "loss", as ts.verify() takes them. The exit status is 0 only if all numbers are equal.
    """
    if propose not in ("auto", "hf"):
        msg = f'--propose is "auto" or "hf", got {propose!r}'
        raise ConfigError(msg)
    with redirect_stdout(sys.stderr):  # what the user's code prints is not part of the report
        how: Literal["auto", "hf"] = "hf" if propose == "hf" else "auto"
        report = _verified(builder, ranks, how)
    if as_json:
        text = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    else:
        text = str(report)
    typer.echo(text)
    status = 0 if report.ok else 1
    raise typer.Exit(status)


def _proposed(model: nn.Module, batch: Any, ranks: int, how: Literal["auto", "hf"]) -> Any:
    from tp_shard._groups._group import Group

    propose = plans.from_hf if how == "hf" else plans.auto
    return propose(model, batch, group=Group(0, ranks), verbose=False)


def _verified(builder: str, ranks: int, propose: Literal["auto", "hf"]) -> PlanReport:
    built = call_builder(builder, _KEYS)
    model, batch = built["model"], built.get("batch")
    if batch is None:
        call = example_call(model)
        if call is None:
            msg = (
                f"{builder} returns a model alone, and what it takes is not known: return "
                f'{{"model": ..., "batch": ...}}'
            )
            raise ConfigError(msg)
        batch = dict(call.kwargs) or call.args
    plan = built.get("plan")
    if plan is None:
        plan = _proposed(model, batch, ranks, propose)
    return verify(model, plan, batch, loss=built.get("loss"), ranks=ranks)
