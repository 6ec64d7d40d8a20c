"""A logger for tp: one JSON object for each row of numbers.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

from collections.abc import Iterable

from tp_core.plugins import Logger, LoggerFactory, hookimpl

tp_contract = 1


def _load() -> Logger:
    from my_plugin.logger import MyPluginLogger

    return MyPluginLogger()


@hookimpl
def tp_loggers() -> Iterable[LoggerFactory]:
    """Bring the logger, by name."""
    return [LoggerFactory("my-plugin", "Writes rows into my-plugin.jsonl.", _load)]
