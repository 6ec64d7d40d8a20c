"""The command ``tp``, the sub-commands that plugins bring, and what is said where something goes wrong."""

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from tp_core.cli._plain import installed_packages, section_of, sections
from tp_core.discovery import Contribution, PluginRegistry
from tp_core.errors import ContractError, TpError
from tp_core.messages import did_you_mean
from tp_core.output import print_to_stderr
from tp_core.plugins import Command, registry
from tp_core.plugins._hooks import PluginInfo, call, describe

# -- What a command says where something goes wrong: a sentence for people, one JSON object for programs


_JSON = "--json"


def wants_json(arguments: Iterable[str], command: Any) -> bool:
    """Whether the words after ``tp`` ask for JSON: before a ``--``, of a command that has the option.

    Args:
        arguments: All of them, the name of the command among them.
        command: The command; ``None`` if there is none of that name, of which nothing is known.
    """
    words = list(arguments)
    if "--" in words:
        words = words[: words.index("--")]
    if _JSON not in words:
        return False
    return command is None or _has_json(command)


def _has_json(command: Any) -> bool:
    inner = getattr(command, "commands", {})
    return any(_JSON in p.opts for p in command.params) or any(map(_has_json, inner.values()))


def is_parser_error(error: BaseException) -> bool:
    """Whether it is an error of the parser's, of typer's own click or of another."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")


def sharpen(error: Any) -> None:
    """Have an error of the parser's about a value say what was given, and which value was meant."""
    problems = getattr(error.__cause__, "errors", None)  # of pydantic, which newer typers check values with
    message = getattr(error, "message", None)
    if not message or problems is None:
        return
    text = str(problems()[0]["input"])
    message = message.removeprefix("Value error, ").rstrip(".")
    error.message = f"{message[:1].lower()}{message[1:]}"
    if repr(text) not in message:
        error.message += f", got {text!r}"
    elif " is not one of " in message:
        choices = re.findall(r"'([^']*)'", message.partition(" is not one of ")[2])
        error.message += did_you_mean(text, choices)


def status_of(error: BaseException) -> int:
    """Return 2 for a request that cannot be fulfilled as it is, and 1 for what failed on the way."""
    if is_parser_error(error):
        status: int = error.exit_code  # type: ignore[attr-defined]  # which was asked for
        return status
    if isinstance(error, TpError) and isinstance(error, ValueError | LookupError):
        return 2
    return 1


def print_error(error: BaseException, *, command: str) -> None:
    message = error.format_message() if is_parser_error(error) else str(error)  # type: ignore[attr-defined]
    facts = {
        "command": command or None,
        "type": type(error).__name__,
        "message": message,
        "page": error.anchor() if isinstance(error, TpError) else None,
        "status": status_of(error),
    }
    print_to_stderr(json.dumps({"error": facts}))


def _explain(
    error: Annotated[
        str | None, typer.Argument(help="ConfigError, or config-error; all without one.")
    ] = None,
) -> None:
    """Print what an error of tp means and what to do about it."""
    from rich.console import Console
    from rich.markdown import Markdown

    if error is None:
        typer.echo("\n".join(sections()))
        return
    Console().print(Markdown(section_of(error)))


# -- The command ``tp`` and the sub-commands that plugins bring -----------------------------------


def _load_doctor() -> Any:
    from tp_core.cli._doctor import app

    return app


def _load_explain() -> Any:
    app = typer.Typer()
    app.command("explain")(_explain)
    return app


_OWN = (
    Command("doctor", "Show what is here, what is broken, and which backend would run.", _load_doctor),
    Command("explain", "Print what an error means and what to do about it.", _load_explain),
)
_KNOWN = {
    "convert": "tp-trainer",
    "data": "tp-data",
    "estimate": "tp-trainer",
    "jobs": "tp-launch",
    "launch": "tp-launch",
    "logs": "tp-launch",
    "new-plugin": "tp-testing",
    "report": "tp-trainer",
    "run": "tp-runner",
    "shard": "tp-shard",
    "stop": "tp-launch",
    "train": "tp-trainer",
    "verify": "tp-verify",
}
"""The distributions of commands, for those that are not installed."""
_INTERRUPTED, _NOBODY_READS = 128 + signal.SIGINT, 128 + 13  # SIGPIPE, which not every system has


class _Tp(TyperGroup):
    """``tp``: a command is loaded when it is asked for, so that none pays for another's imports."""

    def __init__(self, plugins: PluginRegistry, **settings: Any) -> None:
        super().__init__(**settings)
        self._words: tuple[str, ...] = ()  # those of the call, from the command's name on
        self._waiting: dict[str, Contribution[Command]] = {
            command.name: Contribution(command, "tp-core", "tp-core", "") for command in _OWN
        }
        self._waiting |= {contribution.item.name: contribution for contribution in plugins.commands()}
        for conflict in plugins.conflicts(Command):
            _warn(str(conflict))

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - its signature
        return [name for name in list(self._waiting) if self._load(name) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        return self._load(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments begin with; the error for an unknown one suggests others."""
        self._words = tuple(args)
        name = args[0]
        installed = {*self._waiting, *self.commands}
        if name not in installed and name in _KNOWN:
            ctx.fail(f"no such command {name!r}: pip install {_KNOWN[name]}")
        if name not in installed and (suggestion := did_you_mean(name, {*installed, *_KNOWN})):
            ctx.fail(f"no such command {name!r}{suggestion}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what goes wrong there is one line on stderr, and a status.

        The status is 2 for a request that cannot be fulfilled as it is, 1 for what failed on the way, 130
        after Ctrl-C. Errors of others than tp keep their traceback. With ``--json`` the last line on stderr
        is one JSON object, whatever went wrong.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except (BrokenPipeError, typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if type(error).__name__ == "Exit" and hasattr(error, "exit_code"):  # of a plugin's click
                raise typer.Exit(error.exit_code) from error
            if not self._print_failure(error, ctx.invoked_subcommand or ""):
                raise
            raise typer.Exit(status_of(error)) from error

    def _print_failure(self, error: Exception, name: str) -> bool:
        """Say what went wrong in the command of a name, unless Python or typer says it better."""
        if is_parser_error(error):
            sharpen(error)
        if wants_json(self._words, self._load(name)):
            if not (isinstance(error, TpError | OSError) or is_parser_error(error)):
                traceback.print_exception(error)
            print_error(error, command=name)
            return True
        if isinstance(error, TpError | OSError):
            _warn(str(error), name)
            return True
        # Newer typers have a click of their own, and do not know the errors of a plugin's click.
        if is_parser_error(error) and type(error).__module__ == "click.exceptions":
            error.show()  # type: ignore[attr-defined]  # which every error of click has
            return True
        return False

    def _load(self, name: str) -> Any:
        if name not in self.commands and name in self._waiting:
            contribution = self._waiting[name]
            try:
                info = PluginInfo(contribution.plugin, contribution.distribution, contribution.version)
                self.commands[name] = call(info, "loaded", partial(_loaded, contribution.item))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a plugin may raise anything
                _warn(
                    f"command {name!r} of {contribution.distribution} "
                    f"{contribution.version} is broken: {describe(error)}"
                )
                del self._waiting[name]
        return self.commands.get(name)


def build_app(plugins: PluginRegistry = registry) -> TyperGroup:
    """Return ``tp`` as a click group: its own commands and every plugin's commands.

    A command that fails to load is left out with a line on stderr; the others work.
    """
    return _Tp(
        plugins,
        name="tp",
        help="Parallelism for PyTorch that you install.",
        params=_options(),
    )


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``tp`` and return its exit status: 128 + the signal after Ctrl-C, and where a pipe was closed."""
    _open_closed_streams()
    try:
        build_app()(args=arguments, prog_name="tp")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # nobody reads on: typer and rich end with 1
            return _NOBODY_READS
        if isinstance(end.code, int):
            return end.code
        if end.code is None:
            return 0
        return 1
    except BrokenPipeError:
        return _NOBODY_READS
    except OSError as error:  # of --help and --version, which no command has: the disk behind stdout is full
        _warn(str(error))
        return 1
    return 0


def _open_closed_streams() -> None:
    """Have what a service started without standard streams (``>&-``) write into nothing, its children too."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(descriptor)  # something else may have got its number
        except OSError:
            opened = os.open(os.devnull, os.O_WRONLY)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - as long as tp runs


def _options() -> list[Any]:
    """Return the options of ``tp`` itself, made by typer as those of every command are."""
    app = typer.Typer()

    @app.callback()
    def tp(
        *,
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                is_eager=True,
                callback=_say_versions,
                help="Show the installed packages and exit.",
            ),
        ] = False,
    ) -> None: ...

    return list(typer.main.get_command(app).params)


def _say_versions(is_asked: bool) -> None:
    if is_asked:
        for name, number in installed_packages().items():
            typer.echo(f"{name} {number}")
        raise typer.Exit


def _loaded(command: Command) -> Any:
    loaded = command.load()
    if isinstance(loaded, typer.Typer):
        loaded = typer.main.get_command(loaded)
    if not callable(getattr(loaded, "main", None)):  # click's commands have it, of whichever click
        msg = f"its load() must return a typer.Typer, got {type(loaded).__name__}"
        raise ContractError(msg)
    loaded.name = command.name
    loaded.help = loaded.help or command.help
    loaded.short_help = escape(command.help)  # which --help reads as rich's markup
    return loaded


def _warn(text: str, command: str = "") -> None:
    print_to_stderr(f"tp {command}".rstrip() + f": {text}")
