"""``tp my-plugin``: the devices that a job would get here."""

import json
from typing import Annotated

import typer
from tp_core import resolve_devices

app = typer.Typer(add_completion=False)


@app.command()
def devices(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the devices that a job would get here."""
    names = [str(device) for device in resolve_devices("auto")]
    typer.echo(json.dumps(names) if as_json else "\n".join(names))
