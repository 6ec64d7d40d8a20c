"""What a command says where something goes wrong: a sentence for people, one JSON object for programs."""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from tp_core._suggestions import did_you_mean
from tp_core.errors import TpError

__all__ = ["is_parser_error", "print_error", "sharpen", "status_of", "wants_json"]

_JSON = "--json"


def wants_json(arguments: Iterable[str], command: Any) -> bool:
    """Whether the words after ``tp`` ask for JSON: before a ``--``, of a command that has the option.

    Args:
        arguments: All of them, the name of the command among them.
        command: The command; ``None`` if there is none of that name, of which nothing is known.
    """
    words = list(arguments)
    if _JSON not in (words[: words.index("--")] if "--" in words else words):
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
    given = str(problems()[0]["input"])
    message = message.removeprefix("Value error, ").rstrip(".")
    error.message = f"{message[:1].lower()}{message[1:]}"
    if repr(given) not in message:
        error.message += f", got {given!r}"
    elif " is not one of " in message:
        choices = re.findall(r"'([^']*)'", message.partition(" is not one of ")[2])
        error.message += did_you_mean(given, choices)


def status_of(error: BaseException) -> int:
    """Return 2 for a request that cannot be fulfilled as it is, and 1 for what failed on the way."""
    if is_parser_error(error):
        status: int = error.exit_code  # type: ignore[attr-defined]  # which was asked for
        return status
    return 2 if isinstance(error, TpError) and isinstance(error, ValueError | LookupError) else 1


def print_error(error: BaseException, *, command: str) -> None:
    """Print an error as one line of JSON, on stderr."""
    said = error.format_message() if is_parser_error(error) else str(error)  # type: ignore[attr-defined]
    facts = {
        "command": command or None,
        "type": type(error).__name__,
        "message": said,
        "page": error.anchor() if isinstance(error, TpError) else None,
        "status": status_of(error),
    }
    print(json.dumps({"error": facts}), file=sys.stderr)
