"""``tp report``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tp_trainer._report import write_pictures, write_report


def report_app() -> typer.Typer:
    """Return ``tp report`` as a separate application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_report)
    return app


def _report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or their log.jsonl.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html in the first run's folder.")] = None,
    png: Annotated[Path | None, typer.Option(help="A folder for the curves as PNG files.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Make one HTML page of what runs have left in their folders."""
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    page = write_report(runs, out or first / "report.html")
    pictures = [] if png is None else write_pictures(runs, png)
    if as_json:
        typer.echo(json.dumps({"page": str(page), "pictures": [str(path) for path in pictures]}, indent=2))
        return
    for path in [page, *pictures]:
        typer.echo(path)
