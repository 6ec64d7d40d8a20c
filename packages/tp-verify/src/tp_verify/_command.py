"""``tp verify``: a program's own parallel training, or a script of tp, from the command line."""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tp_core.errors import ConfigError
from tp_core.internal import load_function
from typer.core import TyperCommand

from tp_verify._report import Report, as_page
from tp_verify._script import verify_script
from tp_verify._verify import verify

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class _Command(TyperCommand):
    """A command that says, at an unknown option, where a script's own options stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: newer typers have a click of their own.
            if type(error).__name__ == "NoSuchOption":
                error.message += "; a script's own arguments follow --"  # type: ignore[attr-defined]  # it has one
            raise


@app.command("verify", cls=_Command)
def verify_command(
    program: Annotated[str, typer.Argument(help="file.py:function, or a script of tp.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments; its options follow --.")
    ] = None,
    *,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="How many processes.")] = 2,
    dtype: Annotated[list[str] | None, typer.Option(help="float64, float32 or bfloat16; repeatable.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Optimizer steps of each run; by default beyond a short epoch.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds that each run may take.")
    ] = 600.0,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Train on one device and in parallel, and name the first number that differs.

    A script of tp trains whole; then it gets a SIGTERM, and is resumed; then on each backend that fits. Its
    numbers are compared. It runs in this folder, and writes what it writes; checkpoints go elsewhere.
    A script's own options follow --: tp verify train.py --steps 20 -- --epochs 2

    A function takes no arguments. It returns a dict with "build", "batches", "step" and "parallel", and any
    other argument of tp_verify.verify(); or a list of such dicts. The exit status is 0 only if all are equal.
    """
    types = dtype or ["float64"]
    unknown = [name for name in types if name not in _TYPES]
    if unknown:
        msg = f"--dtype is one of {', '.join(_TYPES)}, got {unknown[0]!r}"
        raise ConfigError(msg)
    with redirect_stdout(sys.stderr):  # what the user's code prints is not part of the report
        if ":" not in program:
            reports = verify_script(Path(program), arguments or [], steps=steps, timeout_s=timeout_s)
        elif arguments:
            msg = f"{arguments[0]!r} follows a function, which takes no arguments"
            raise ConfigError(msg)
        else:
            made = load_function(program, example="cases")()
            cases = [made] if isinstance(made, Mapping) else list(made)
            reports = [_verified(case, ranks, _TYPES[name]) for case in cases for name in types]
    ok = all(report.ok for report in reports)
    if page is not None:
        page.write_text(as_page(reports))
    text = "\n\n".join(map(str, reports))
    if as_json:
        facts = {"ok": ok, "text": text, "reports": [r.to_dict() for r in reports]}
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(text)
    raise typer.Exit(0 if ok else 1)


def _verified(case: Mapping[str, Any], ranks: int, dtype: torch.dtype) -> Report:
    missing = [key for key in ("build", "batches", "step", "parallel") if key not in case]
    if missing:
        msg = f"the function has to return a dict with {', '.join(map(repr, missing))}, too"
        raise ConfigError(msg)
    given = {"ranks": ranks, "dtype": dtype, **case}
    return verify(given.pop("build"), given.pop("batches"), **given)
