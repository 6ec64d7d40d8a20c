"""``tp verify``: a program's own parallel training, or a script of tp, from the command line.

What needs torch is imported once the words of the command are right.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from tp_core.discovery import OWN_PACKAGES
from tp_core.errors import ConfigError, RankFailedError
from typer.core import TyperCommand

from tp_verify._certificates import Certificate
from tp_verify._report import VerifyReport, as_page

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TYPES = ("float64", "float32", "bfloat16")


class _VerifyCommand(TyperCommand):
    """A command that says, at an unknown option, where a script's own options stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: newer typers have a click of their own.
            if type(error).__name__ == "NoSuchOption":
                error.message += "; a script's own arguments follow --"  # type: ignore[attr-defined]  # it has one
            raise


@app.command("verify", cls=_VerifyCommand)
def verify_command(
    program: Annotated[
        str | None, typer.Argument(help="file.py:function, or a script of tp; without it a small model.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments; its options follow --.")
    ] = None,
    *,
    ranks: Annotated[
        str | None,
        typer.Option(help="How many processes, 2; with --resume also on how many it resumes: 2,1."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float64, float32 or bfloat16; repeatable.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Optimizer steps of each run; by default beyond a short epoch.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds that each run may take.")
    ] = 600.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Kill any training command, start it again, and compare.")
    ] = False,
    kill_at: Annotated[
        str | None, typer.Option(help="With --resume: the steps after which it is killed, as 3,7.")
    ] = None,
    kill_in_save: Annotated[
        bool, typer.Option("--kill-in-save", help="With --resume: kill it inside a save, too.")
    ] = False,
    sigterm: Annotated[
        bool, typer.Option("--sigterm", help="With --resume: end it by SIGTERM, and not by SIGKILL.")
    ] = False,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    with_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the whole traceback of a rank that raises, or hangs.")
    ] = False,
) -> None:
    """Train on one device and in parallel, and name the first number that differs.

    A script of tp trains whole; then it gets a SIGTERM, and is resumed; then on each backend that fits. Its
    numbers are compared. It runs in this folder, and writes what it writes; checkpoints go elsewhere.
    A script's own options follow --: tp verify train.py --steps 20 -- --epochs 2

    A function takes no arguments. It returns a dict with "build", "batches", "step" and "parallel", and any
    other argument of tp_verify.verify(); or a list of such dicts. The exit status is 0 only if all are equal.

    Without a program, a small model is trained on every installed backend of tp, wherever on this host it
    fits; then the exit status is 0 only if one could be tried, too.

    With --resume, a command of any library is trained undisturbed, then killed and started again. {folder} in
    it is the folder of its checkpoints, {ranks} the number of its ranks:
    tp verify --resume --ranks 2,1 -- torchrun --nproc-per-node {ranks} train.py --out {folder}
    """
    counts = _numbers("--ranks", ranks)
    if max(counts, default=1) > 64:
        msg = f"--ranks is at most 64, got {ranks!r}"
        raise ConfigError(msg)
    reports: Sequence[VerifyReport | Certificate]
    if resume:
        if program is None:
            msg = "--resume needs the command after it: tp verify --resume -- python train.py --out {folder}"
            raise ConfigError(msg)
        others = {"--dtype": dtype, "--steps": steps, "--html": page}
        _refuse(others, "is not for --resume: the command trains as it is")
        from tp_verify._resumed_runs import verify_resume

        reports = verify_resume(
            [program, *(arguments or [])],
            ranks=counts,
            kill_at=_numbers("--kill-at", kill_at),
            in_save=kill_in_save,
            by=signal.SIGTERM if sigterm else signal.SIGKILL,
            timeout_s=timeout_s,
        )
        _print_and_exit(reports, "", all(report.ok for report in reports), as_json=as_json)
    _refuse({"--kill-at": kill_at, "--kill-in-save": kill_in_save, "--sigterm": sigterm}, "is for --resume")
    if len(counts) > 1:
        msg = f"--ranks {ranks}: more than one number is for --resume"
        raise ConfigError(msg)
    processes = counts[0] if counts else 2
    types = dtype or ["float64"]
    unknown = [name for name in types if name not in _TYPES]
    if unknown:
        msg = f"--dtype is one of {', '.join(_TYPES)}, got {unknown[0]!r}"
        raise ConfigError(msg)
    if program is None and (dtype or steps):
        msg = "--dtype and --steps are for a program; without one, a small model is trained in float64"
        raise ConfigError(msg)
    if program is None or ":" in program:
        script = None
    else:
        script = Path(program)
    if script is not None and dtype:
        msg = "--dtype is for file.py:function; a script makes its model in a type of its own"
        raise ConfigError(msg)
    if script is not None and not script.is_file():
        msg = f"there is no script {program!r}; a function is written file.py:function"
        raise ConfigError(msg)
    if arguments and script is None:
        msg = f"{arguments[0]!r} follows a function, which takes no arguments"
        raise ConfigError(msg)
    text = ""
    with _output_to_standard_error():
        if program is None:
            from tp_verify._installed_backends import as_table, verify_backends

            tried = verify_backends(ranks=processes, timeout_s=timeout_s)
            reports, text = tried, as_table(tried)
        elif script is not None:
            from tp_verify._script_runs import verify_script

            reports = verify_script(script, arguments or [], steps=steps, timeout_s=timeout_s)
        else:
            try:
                reports = _verify_cases(program, processes, types, timeout_s)
            except RankFailedError as error:
                if with_traceback:
                    raise
                raise RankFailedError(_in_short(str(error))) from error
    ok = all(report.ok for report in reports)
    if program is None:
        ok = ok and any(report.compared for report in reports)
    if page is not None:
        page.write_text(as_page(reports))
    _print_and_exit(reports, text, ok, as_json=as_json)


@contextmanager
def _output_to_standard_error() -> Iterator[None]:
    """Send what the user's code prints to standard error, also from ranks that start in the block.

    Standard output has the report alone.
    """
    with redirect_stdout(sys.stderr):
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _print_and_exit(
    reports: Sequence[VerifyReport | Certificate], text: str, ok: bool, *, as_json: bool
) -> NoReturn:
    text = text or "\n\n".join(map(str, reports))
    if as_json:
        facts = {"ok": ok, "text": text, "reports": [r.to_dict() for r in reports]}
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo(text)
    raise typer.Exit(0 if ok else 1)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    for name, value in options.items():
        if value:
            msg = f"{name} {why}"
            raise ConfigError(msg)


def _numbers(option: str, value: str | None) -> list[int]:
    """Return the numbers of an option that takes several."""
    if value is None:
        return []
    numbers = [int(word) for word in value.split(",") if word.strip().isdecimal()]
    if len(numbers) != len(value.split(",")) or min(numbers) < 1:
        msg = f"{option} takes numbers from 1 on, as 2 or 2,1; got {value!r}"
        raise ConfigError(msg)
    return numbers


def _in_short(failure: str) -> str:
    """Return what a rank raised and where, or where it hangs; what has no traceback stays as it is."""
    first, *others = failure.strip().splitlines()
    hangs = first.endswith("at the deadline")
    if hangs:
        failure, *_ = failure.split("\nrank ")  # the stacks of other ranks follow
    frames = re.findall(r'^ +File "(.+)", line (\d+),? in (\S+)', failure, re.MULTILINE)
    if not frames:
        return failure
    if hangs:
        said = first
        frames.reverse()  # stacks begin with the last call
    else:
        said = f"{first} {others[-1]}"
    # The user's last line; what it calls of torch says less.
    own = [frame for frame in frames if "site-packages" not in frame[0] and not _is_of_tp(frame[0])]
    file, line, function = (own or frames)[-1]
    return f"{said} (line {line} of {file}, in {function}; --traceback shows all of it)"


def _is_of_tp(file: str) -> bool:
    return not OWN_PACKAGES.isdisjoint(Path(file).parts)


def _verify_cases(program: str, ranks: int, types: Sequence[str], timeout_s: float) -> list[VerifyReport]:
    import torch
    from tp_core.builders import load_function

    from tp_verify._verify import verify

    made = load_function(program, example="cases")()
    cases = [made] if isinstance(made, Mapping) else made
    if not isinstance(cases, list | tuple) or not cases or not all(isinstance(c, Mapping) for c in cases):
        msg = f"{program} has to return arguments of verify() as a dict, or a list of dicts; got {made!r:.60}"
        raise ConfigError(msg)
    options = {"ranks": ranks, "timeout_s": timeout_s}
    return [verify(**{**options, "dtype": getattr(torch, name), **case}) for case in cases for name in types]
