"""What my-plugin brings to tp. Light: what is heavy is imported where it is asked for."""

from collections.abc import Iterable

from tp_core.plugins import Callback, NamedCallback, hookimpl

tp_contract = 1


def _load() -> Callback:
    from my_plugin.callback import MyPluginCallback

    return MyPluginCallback()


@hookimpl
def tp_callbacks() -> Iterable[NamedCallback]:
    """Bring the callback, by name."""
    return [NamedCallback("my-plugin", "Keeps the largest norm of the gradients.", _load)]
