"""``tp test``."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tp_core.internal import check_backend_name, check_process_count, output_console
from tp_core.plugins import registry

from tp_trainer._self_test._running import Result, run_setup
from tp_trainer._self_test._setups import Setup, find_setups

__all__ = ["test_app"]

_STYLES = {"equal": "green", "unfit": "dim"}


def test_app() -> typer.Typer:
    """``tp test`` as an application of its own."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_test)
    return app


def _test(
    *,
    backend: Annotated[list[str] | None, typer.Option(help="This one alone; repeatable.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="How many processes where there are several.")] = 2,
    timeout_s: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="Seconds that each training may take."),
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Train a small model on every installed backend, and compare the numbers with one device.

    Each backend that fits this host is tried on the CPU and on the accelerators: with one device, with
    several in one process, with one process for each. One that fails or hangs is named, and the others go
    on. The exit status is 0 only if every one of them trains what one device trains.
    """
    check_process_count("--ranks", ranks)
    backends = registry.backends()
    for name in backend or ():
        check_backend_name(name, {c.item.name for c in backends})
    setups = find_setups([c for c in backends if not backend or c.item.name in backend], ranks=ranks)
    results = _run_all(setups, timeout_s)
    ok = all(result.ok for result in results) and any(result.outcome == "equal" for result in results)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "tests": [result.to_dict() for result in results]}, indent=2))
    else:
        _print(results)
    raise typer.Exit(0 if ok else 1)


def _run_all(setups: Sequence[Setup], timeout_s: float) -> list[Result]:
    console, results = Console(stderr=True), []
    with console.status("") as status:  # which shows nothing where stderr is not a terminal
        for number, setup in enumerate(setups, start=1):
            status.update(f"{number} of {len(setups)}: {escape(setup.backend)}, {_where(setup)}")
            results.append(run_setup(setup, timeout_s=timeout_s))
    return results


def _where(setup: Setup) -> str:
    devices = [str(device) for device in setup.devices]
    if setup.processes > 1:
        return f"{setup.processes} processes ({', '.join(dict.fromkeys(devices))})"
    return f"one process ({', '.join(devices)})" if devices else "-"


def _print(results: Sequence[Result]) -> None:
    console = output_console()
    table = Table("backend", "from", "where", "outcome", "difference", "seconds", box=None, pad_edge=False)
    for result in results:
        style = _STYLES.get(result.outcome, "red")
        difference = "" if result.difference is None else f"{result.difference:.1e}"
        table.add_row(
            escape(result.setup.backend),
            escape(result.setup.origin),
            _where(result.setup),
            f"[{style}]{result.outcome}[/]",
            difference,
            f"{result.seconds:.1f}" if result.seconds else "",
        )
    console.print(table)
    for result in results:
        if result.reason:
            head = f"{result.setup.backend}, {_where(result.setup)}: {result.outcome}: "
            console.print(escape(head + result.reason))
    wrong = sum(not result.ok for result in results)
    tried = sum(result.outcome == "equal" for result in results)
    if wrong:
        console.print(f"\n[red]{wrong} of {len(results)} do not train what one device trains.[/]")
    elif tried:
        console.print(f"\n{tried} trained what one device trains.")
    else:
        console.print("\n[red]No backend could be tried.[/]")
