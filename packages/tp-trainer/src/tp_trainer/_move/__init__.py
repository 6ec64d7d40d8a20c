"""``tp move``: the change that turns a training script for another trainer into one for tp, and its proof.

::

    script ──> _rewrite.py   which kind of script it is, and why it cannot be moved, if so
           ──>               the changed source, with a comment where nothing could be decided
           ──> a unified diff, or the changed file
           ──> _proof.py     with --prove: the losses of both, on one rank and on two
"""

import difflib
from pathlib import Path
from typing import Annotated

import typer
from tp_core.errors import ConfigError
from tp_core.internal import check_installed, file_meant, output_console


def move_app() -> typer.Typer:
    """Return ``tp move`` as a separate application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # Parsing ends at the script: the rest is its own arguments.
    app.command(context_settings={"allow_interspersed_args": False})(_move)
    return app


def _move(
    script: Annotated[Path, typer.Argument(help="A training script for DDP, Accelerate, Lightning or none.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="With --prove: the arguments of the script.")
    ] = None,
    *,
    write: Annotated[
        Path | None, typer.Option("--write", "-w", help="Write the moved script into this file.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Run both for some steps, on one and on two ranks of the CPU.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="How many steps --prove runs.", min=1)] = 20,
) -> None:
    """Print the change that moves a training script to tp.

    It knows plain loops, DistributedDataParallel, Accelerate's Accelerator and Lightning's Trainer. What it
    could not decide stands in comments that begin with "tp:". The script itself is not changed.
    """
    if arguments and not prove:
        msg = (
            f"{arguments[0]!r} comes after {script}, so it is an argument of the script, which runs with "
            f"--prove alone; options of tp move come first, as in: tp move --write moved.py {script}"
        )
        raise ConfigError(msg)
    try:
        source = script.read_text(encoding="utf-8")
    except FileNotFoundError:
        msg = f"there is no script {script}{file_meant(script)}"
        raise ConfigError(msg) from None
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{script} cannot be read as text: {error}"
        raise ConfigError(msg) from error
    check_installed("libcst", by="tp move", extra="tp-trainer[move]")
    from tp_trainer._move._proof import proof, write_text
    from tp_trainer._move._rewrite import moved

    changed = moved(source, str(script))
    diff = difflib.unified_diff(
        source.splitlines(keepends=True), changed.splitlines(keepends=True), str(script), f"{script} with tp"
    )
    print("".join(line if line.endswith("\n") else f"{line}\n" for line in diff), end="")
    if write is not None:
        write_text(changed, write)
    if prove:
        output_console().print(proof(script, changed, arguments or [], steps=steps))
