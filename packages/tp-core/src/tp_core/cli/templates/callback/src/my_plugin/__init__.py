"""A callback for tp: the largest norm of the gradients in each epoch.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

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
