"""The names of this project's distributions and packages, for those who need not load what finds plugins."""

from functools import partial
from typing import Any

FIRST_PARTY = frozenset(
    {
        "tp-accelerate",
        "tp-context",
        "tp-core",
        "tp-data",
        "tp-dp-gather",
        "tp-launch",
        "tp-lightning",
        "tp-pipeline",
        "tp-ray",
        "tp-runner",
        "tp-shard",
        "tp-simulator",
        "tp-testing",
        "tp-trainer",
        "tp-tuple",
        "tp-verify",
    }
)
"""The distributions of this project: where names collide, theirs win."""

OWN_PACKAGES = frozenset(name.replace("-", "_") for name in FIRST_PARTY)
"""Their packages. Others whose names begin with "tp" are their users' own."""


def is_users_hook(hook: Any) -> bool:
    """Return whether a hook is of the user's program, or of a library, and not of torch or of tp."""
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] not in {"torch", *OWN_PACKAGES}
