"""``tp doctor``: what is here, what is broken, and which backend would run."""

import json
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

import torch
import typer

from tp_core._contracts._job import Job
from tp_core._devices import device_loads, resolve_devices
from tp_core._first_party import FIRST_PARTY
from tp_core._launch._environment import LaunchEnvironment, check_process_count
from tp_core.cli._plain import platform_notes
from tp_core.device_types import library_versions
from tp_core.discovery import CONTRACT_VERSION, PluginRegistry
from tp_core.errors import LaunchEnvironmentError, TpError
from tp_core.output import output_console
from tp_core.plugins import registry
from tp_core.plugins._hooks import DISABLE_VARIABLE, describe, stdout_to_stderr
from tp_core.plugins._registry import ENTRY_POINT_GROUP, KEYWORD, find_forgotten
from tp_core.plugins._select import Selection, select

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    *,
    ranks: Annotated[int, typer.Option(min=0, help="How many ranks meet on this host; 0 for none.")] = 2,
    timeout_s: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that ranks may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show versions, devices, launch environment, plugins, and which backend would be selected.

    Two ranks of this host meet over its loopback, unless a launcher has started this command on several: then
    those do, of all hosts, and rank 0 reports. The exit status is 0 only if nothing is broken.
    """
    check_process_count("--ranks", ranks)
    with stdout_to_stderr():  # what plugins print is not part of the report
        report = examine(registry)
        environment = report["environment"]
        if ranks and environment is not None:
            from tp_core.cli._meeting import meet, start_and_meet

            try:
                if environment["world_size"] > 1:
                    report["meeting"] = meet(timeout_s)
                else:
                    report["meeting"] = start_and_meet(ranks, timeout_s=timeout_s)
            except (TpError, RuntimeError) as error:  # of torch.distributed
                report["problems"].append(str(error))
    if environment is not None and environment["rank"] > 0:
        raise typer.Exit  # rank 0 reports
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    status = 1 if report["problems"] else 0
    raise typer.Exit(status)


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
            "error": describe(b.error),
            "traceback": b.traceback,
        }
        for b in plugins.broken()
    ]
    problems += [
        f"plugin {b.info.name} of {b.info.distribution}: {describe(b.error)}; {b.remedy}"
        for b in plugins.broken()
    ]
    problems += [str(conflict) for conflict in plugins.conflicts()]
    notes = [
        f"plugin {p} does not declare which version of the hook contract it was built for; its module needs "
        f"tp_contract = {CONTRACT_VERSION}"
        for p in plugins.plugins()
        if p.contract is None
    ]
    notes += platform_notes()
    notes += [
        f"distribution {name} has the keyword {KEYWORD!r} and brings no plugin; its pyproject.toml needs "
        f'[project.entry-points."{ENTRY_POINT_GROUP}"], and has to be installed again then'
        for name in find_forgotten()
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
            f"backend {c.name} of {c.distribution}: {c.verdict.reason}; update or uninstall "
            f"{c.distribution}, or block it with {DISABLE_VARIABLE}={c.distribution}"
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
            **library_versions(),
            **_installed(),
        },
        "devices": [_device(load) for load in device_loads()],
        "environment": None if environment is None else _fields(environment),
        "plugins": [{**_fields(p), "brings": plugins.contributions(p.name)} for p in plugins.plugins()],
        "disabled": [_fields(p) for p in plugins.disabled()],
        "broken": broken,
        "backend": None if selection is None else selection.chosen.name,
        "candidates": [] if selection is None else _candidates(selection),
        "meeting": None,
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
    """Return the versions of tp's distributions, and after them of what these require, with their extras."""
    ours = {name: installed for name in sorted(FIRST_PARTY) if (installed := _version(name)) is not None}
    needed = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for name in ours for text in requires(name) or ()}
    dependencies = {name: _version(name) for name in sorted(needed - FIRST_PARTY - {"torch"})}
    return ours | {name: installed for name, installed in dependencies.items() if installed is not None}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _device(load: Any) -> dict[str, Any]:
    return {**_fields(load), "device": str(load.device)}


def _print(report: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = output_console()

    def table(title: str, *columns: str) -> Table:
        return Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)

    console.print("  ".join(f"{name} {v}" for name, v in report["versions"].items()))
    devices = table("\nDevices", "device", "name", "free", "total", "load")
    for d in report["devices"]:
        if d["utilization"] is None:
            load = "?"
        else:
            load = f"{d['utilization']:.0%}"
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
            names = (escape(p[key]) for key in ("name", "distribution", "version"))
            plugins.add_row(*names, word, escape(brings))
    console.print(plugins)
    if report["candidates"]:
        backends = table("\nBackends", "", "backend", "from", "score", "why")
        for c in report["candidates"]:
            why = c["reason"]
            if c["remedy"]:
                why += f"; {c['remedy']}"
            if c["score"] is None:
                score = "unfit"
            else:
                score = f"{c['score']:g}"
            origin = f"{c['distribution']} {c['version']}".rstrip()
            mark = "*" if c["chosen"] else ""
            backends.add_row(mark, escape(c["name"]), escape(origin), score, escape(why))
        console.print(backends)
    elif not report["problems"]:
        console.print("\nNo backend is installed; one device and DDP come with: pip install tp-trainer")
    for b in report["broken"]:
        console.print(f"\n[red]broken:[/] {escape(b['name'])} of {escape(b['distribution'])}")
        console.print(escape(b["traceback"]))
    if report["meeting"] is not None:
        met = report["meeting"]
        console.print(
            f"\nRanks: {met['ranks']} on {met['hosts']} host(s) met and added up a number "
            f"({', '.join(met['devices'])}), in {met['seconds']:.1f} s"
        )
    for title, sentences in (
        ("Notes", report["notes"]),
        ("[red]Problems[/]", report["problems"]),
    ):
        if sentences:
            console.print(f"\n{title}")
        for sentence in sentences:
            console.print(f"- {escape(sentence)}")
    if not report["problems"]:
        console.print("\nNothing is broken.")


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "?"
    return f"{nbytes / 2**30:.1f} GiB"
