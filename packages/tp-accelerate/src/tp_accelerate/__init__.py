"""Accelerate's ``Accelerator`` on tp's sessions: of a script that uses it, the import line changes.

::

    from tp_accelerate import Accelerator, set_seed
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_accelerate._accelerator import Accelerator as Accelerator
    from tp_accelerate._states import set_seed as set_seed

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_accelerate._accelerator": ["Accelerator"],
            "tp_accelerate._states": ["set_seed"],
        },
        answers="tp_accelerate._arguments",
    )
