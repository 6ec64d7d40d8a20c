"""``tp move``: the change that turns a training script for another trainer into one for tp, and its proof.

::

    script ──> _rewrite.py   which kind of script it is, and why it cannot be moved, if so
           ──>               the changed source, with a comment where nothing could be decided
           ──> a unified diff, or the changed file
           ──> _steps.py     with --prove: the losses of both, on one rank and on two
"""

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from tp_core.errors import ConfigError, RankFailedError
from tp_core.internal import atomic_part, check_installed, file_meant, output_console

_CLOSE = 1e-4  # relative: sums of float32 in another order
_MOST_LINES = 12
_TWO, _THEIRS = "with tp, 2 ranks", "before, 2 ranks"


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
    from tp_trainer._move._rewrite import moved

    changed = moved(source, str(script))
    diff = difflib.unified_diff(
        source.splitlines(keepends=True), changed.splitlines(keepends=True), str(script), f"{script} with tp"
    )
    print("".join(line if line.endswith("\n") else f"{line}\n" for line in diff), end="")
    if write is not None:
        with atomic_part(write) as part:
            part.write_text(changed, encoding="utf-8")
    if prove:
        output_console().print(_proof(script, changed, arguments or [], steps=steps))


def _proof(script: Path, changed: str, arguments: Sequence[str], *, steps: int) -> Table:
    """Run both scripts, and return a table of their losses."""
    twin = script.with_name(f".{script.stem}_tp_{os.getpid()}.py")
    runs = {"before": (script, 1), "with tp": (twin, 1), _TWO: (twin, 2)}
    accelerates = any(text in changed for text in ("tp_trainer.compat.accelerate", "import accelerate as"))
    # What joins a process group by itself needs a launcher for one rank, too.
    joins = "init_process_group" in script.read_text(encoding="utf-8")
    if joins or accelerates:
        runs = {"before": (script, 0 if joins else 1), _THEIRS: (script, 2), **dict(list(runs.items())[1:])}
    twin.write_text(changed, encoding="utf-8")
    try:
        found = {name: _losses(*run, arguments, steps) for name, run in runs.items()}
    finally:
        twin.unlink(missing_ok=True)
    table = Table(title=f"the loss in each of {steps} steps, on the CPU, data in order, no dropout")
    for name in ("backward", *found):
        table.add_column(name, justify="right")
    for number, row in enumerate(zip_longest(*found.values()), start=1):
        table.add_row(str(number), *(f"{v:.6f}" if v is not None else "-" for v in row))
    lines = []
    if len(set(found["before"])) < 2:
        lines.append("the loss is the same in each step: that it is equal here proves nothing")
    for name, losses in found.items():
        if name == _THEIRS:
            lines.append(f"{name}: batches twice as large, of batch_size for each rank")
        elif name != "before":
            # tp's Accelerator has the batches of Accelerate, on two ranks as on one.
            reference = _THEIRS if accelerates and name == _TWO else "before"
            pairs = list(zip(found[reference], losses, strict=False))
            same = sum(abs(a - b) <= _CLOSE * max(abs(a), 1e-6) for a, b in pairs)
            lines.append(f"{name}: {same} of {len(pairs)} equal to {reference}")
    table.caption = "\n".join(lines)
    return table


def _losses(script: Path, ranks: int, arguments: Sequence[str], steps: int) -> list[float]:
    """Return the losses of one run; of several ranks their means."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["-m", "tp_trainer._move._steps", folder, str(steps), str(script.resolve()), *arguments]
        if ranks != 1:
            own = ["-m", "tp_core.cli", "launch", "-n", str(ranks or 1)]
            run = [*own, "-m", *run[1:]]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environ["ACCELERATE_USE_CPU"] = "true"  # without it Accelerate leaves ranks of the CPU apart
        done = subprocess.run(
            [sys.executable, *run],
            cwd=script.parent,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        files = sorted(Path(folder).glob("*.json"))
        if done.returncode or not files:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_MOST_LINES:])
            msg = f"{script.name} on {ranks or 1} rank(s) ended with {done.returncode}:\n{said}"
            raise RankFailedError(msg)
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [sum(values) / len(values) for values in zip(*found, strict=True)]
