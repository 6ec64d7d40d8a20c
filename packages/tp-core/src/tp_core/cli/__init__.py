"""The command ``tp``. Its libraries are the extra ``tp-core[cli]``, named where a command needs them."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_core.discovery import PluginRegistry

__all__ = ["build_app", "main"]


def build_app(plugins: "PluginRegistry") -> Any:
    """Return ``tp`` as a command of click, with the commands of a registry: for tests of commands.

    A command that fails to load is left out with a line on stderr; the others work.
    """
    from tp_core.cli._main import build_app as build

    return build(plugins)


def main() -> None:
    """Run the command line."""
    try:
        import psutil  # noqa: F401 - all three are asked for here, to name what is missing
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        from tp_core.cli._plain import plain_command

        command = plain_command(sys.argv[1:])
        if command is not None:
            sys.exit(command())
        sys.exit(
            f"tp: the command line needs {error.name}, which is not installed; "
            "install it with: pip install 'tp-core[cli]'"
        )
    from tp_core.cli._main import run

    status = run()
    try:
        with contextlib.suppress(AttributeError, ValueError):  # it is missing or closed
            sys.stdout.flush()
    except BrokenPipeError:
        status = status or 141
    if status == 141:  # the interpreter would complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)
