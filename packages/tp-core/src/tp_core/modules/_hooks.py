"""Whose a hook on a module is."""

from functools import partial
from typing import Any

from tp_core._first_party import FIRST_PARTY

_OWN = {"torch", *(name.replace("-", "_") for name in FIRST_PARTY)}


def is_users_hook(hook: Any) -> bool:
    """Return whether a hook is of the user's program, or of a library, and not of torch or of tp."""
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] not in _OWN
