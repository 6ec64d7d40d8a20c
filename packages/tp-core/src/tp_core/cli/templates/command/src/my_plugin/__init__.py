"""A sub-command of tp: the devices that a job would get here.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


def load_app() -> Any:
    """Return the sub-command."""
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

    return app


COMMAND = Command("my-plugin", "List the devices that a job would get here.", load_app)


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Bring the sub-command."""
    return [COMMAND]
