"""What my-plugin brings to tp. Light: what is heavy is imported where it is asked for."""

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
