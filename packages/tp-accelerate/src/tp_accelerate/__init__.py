"""Accelerate's ``Accelerator`` on tp's sessions: of a script that uses it, the import line changes.

::

    from tp_accelerate import Accelerator, set_seed
"""

from tp_accelerate._accelerator import Accelerator
from tp_accelerate._states import set_seed

__all__ = ["Accelerator", "set_seed"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib.metadata import version

    return version("tp-accelerate")
