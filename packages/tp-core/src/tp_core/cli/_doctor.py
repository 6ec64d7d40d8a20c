"""``tp doctor``: what is here, what is broken, and which backend would run."""

import json
import platform
import sys
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer

from tp_core._contracts._job import Job
from tp_core._devices._load import device_loads
from tp_core._devices._resolve import resolve_devices
from tp_core._launch._environment import LaunchEnvironment
from tp_core.errors import LaunchEnvironmentError, TpError
from tp_core.plugins import CONTRACT_VERSION, PluginRegistry, registry
from tp_core.plugins._select import Selection, select

__all__ = ["app", "examine"]

_DISTRIBUTIONS = ("tp-core", "tp-dp-gather", "tp-runner", "tp-shard", "tp-trainer", "tp-tuple")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show versions, devices, launch environment, plugins, and which backend would be selected.

    The exit status is 0 only if nothing is broken.
    """
    with redirect_stdout(sys.stderr):  # what plugins print is not part of the report
        report = examine(registry)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    raise typer.Exit(1 if report["problems"] else 0)


def examine(plugins: PluginRegistry) -> dict[str, Any]:
    """Return the report as plain data; "problems" is empty if nothing is broken.

    "notes" are what authors of plugins should fix, and what does no harm today.
    """
    problems: list[str] = []
    broken = [
        {
            "name": b.info.name,
            "distribution": b.info.distribution,
            "version": b.info.version,
            "error": f"{type(b.error).__name__}: {b.error}",
            "traceback": b.traceback,
        }
        for b in plugins.broken()
    ]
    problems += [f"plugin {b['name']} of {b['distribution']}: {b['error']}" for b in broken]
    problems += [str(conflict) for conflict in plugins.conflicts()]
    notes = [
        f"plugin {p} does not tell which version of the hook contract it was built for; its module needs "
        f"tp_contract = {CONTRACT_VERSION}"
        for p in plugins.plugins()
        if p.contract is None
    ]
    try:
        environment: LaunchEnvironment | None = LaunchEnvironment.read()
    except LaunchEnvironmentError as error:
        environment = None
        problems.append(str(error))
    selection = None
    if environment is not None:
        try:
            selection = _select(plugins, environment)
        except TpError as error:
            problems.append(str(error))
    if selection is not None:
        problems += [
            f"backend {c.name} of {c.distribution}: {c.verdict.reason}"
            for c in selection.candidates
            if c.error is not None
        ]
        notes += [
            f"backend {c.name} of {c.origin}: assess() took {c.seconds:.1f} s, and every job asks every "
            "backend; what takes long belongs into open()"
            for c in selection.candidates
            if c.is_slow
        ]
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **_installed(),
        },
        "devices": [_device(load) for load in device_loads()],
        "environment": None if environment is None else _fields(environment),
        "plugins": [{**_fields(p), "brings": plugins.brought(p.name)} for p in plugins.plugins()],
        "disabled": [_fields(p) for p in plugins.disabled()],
        "broken": broken,
        "backend": None if selection is None else selection.chosen.name,
        "candidates": [] if selection is None else _candidates(selection),
        "problems": problems,
        "notes": notes,
    }


def _select(plugins: PluginRegistry, environment: LaunchEnvironment) -> Selection | None:
    backends = plugins.backends()
    if not backends:
        return None
    devices = resolve_devices("auto")
    if environment.is_distributed:
        devices = devices[:1]
    return select(Job(devices=devices, environment=environment), backends)


def _candidates(selection: Selection) -> list[dict[str, Any]]:
    return [
        {
            "name": c.name,
            "distribution": c.distribution,
            "version": c.version,
            "score": c.verdict.score,
            "reason": c.verdict.reason,
            "remedy": c.verdict.remedy,
            "seconds": c.seconds,
            "chosen": c is selection.chosen,
        }
        for c in selection.candidates
    ]


def _installed() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _device(load: Any) -> dict[str, Any]:
    return {**_fields(load), "device": str(load.device)}


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)

    def table(title: str, *columns: str) -> Table:
        return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)

    console.print("  ".join(f"{name} {v}" for name, v in report["versions"].items()))
    devices = table("\nDevices", "device", "name", "free", "total", "load")
    for d in report["devices"]:
        load = "?" if d["utilization"] is None else f"{d['utilization']:.0%}"
        devices.add_row(d["device"], escape(d["name"]), _gib(d["free_bytes"]), _gib(d["total_bytes"]), load)
    console.print(devices)
    if report["environment"] is not None:
        e = report["environment"]
        console.print(
            f"\nLaunch: {e['launcher']}, rank {e['rank']} of {e['world_size']} on {e['hosts']} "
            f"host(s), {e['cores']} cores"
        )
    plugins = table("\nPlugins", "plugin", "distribution", "version", "state", "brings")
    for state in ("plugins", "disabled", "broken"):
        for p in report[state]:
            word = {"plugins": "ok", "disabled": "disabled", "broken": "[red]broken[/]"}[state]
            brings = "; ".join(f"{kind} {', '.join(names)}" for kind, names in p.get("brings", {}).items())
            plugins.add_row(p["name"], p["distribution"], p["version"], word, escape(brings))
    console.print(plugins)
    if report["candidates"]:
        backends = table("\nBackends", "", "backend", "from", "score", "why")
        for c in report["candidates"]:
            why = c["reason"] + (f"; {c['remedy']}" if c["remedy"] else "")
            score = "unfit" if c["score"] is None else f"{c['score']:g}"
            origin = f"{c['distribution']} {c['version']}".rstrip()
            backends.add_row("*" if c["chosen"] else "", c["name"], origin, score, escape(why))
        console.print(backends)
    elif not report["problems"]:
        console.print("\nNo backend is installed; one device and DDP come with: pip install tp-trainer")
    for b in report["broken"]:
        console.print(f"\n[red]broken:[/] {escape(b['name'])} of {escape(b['distribution'])}")
        console.print(escape(b["traceback"]))
    if report["notes"]:
        console.print("\nNotes")
        for note in report["notes"]:
            console.print(f"- {escape(note)}")
    if report["problems"]:
        console.print("\n[red]Problems[/]")
        for problem in report["problems"]:
            console.print(f"- {escape(problem)}")
    else:
        console.print("\nNothing is broken.")


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"
