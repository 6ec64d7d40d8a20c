"""The interface for authors of plugins: one contract for each kind of plugin, and the registry.

A distribution joins by an entry point in the group ``tp.plugins``, which names a light module with
hook implementations. A script joins by ``registry.register(...)``. `RanksBackend` and `DevicesBackend` are
bases for backends over processes and over several devices of one. Programs that host plugins use
`tp_core.discovery`.
"""

from typing import TYPE_CHECKING

from tp_core import _lazy

if TYPE_CHECKING:
    from tp_core._contracts._backend import Backend as Backend
    from tp_core._contracts._backend import DevicesBackend as DevicesBackend
    from tp_core._contracts._backend import NoOptions as NoOptions
    from tp_core._contracts._backend import RanksBackend as RanksBackend
    from tp_core._contracts._backend import Verdict as Verdict
    from tp_core._contracts._callback import Callback as Callback
    from tp_core._contracts._callback import NamedCallback as NamedCallback
    from tp_core._contracts._callback import RunView as RunView
    from tp_core._contracts._collate import CollateAdapter as CollateAdapter
    from tp_core._contracts._engine import Engine as Engine
    from tp_core._contracts._engine import Pool as Pool
    from tp_core._contracts._job import Job as Job
    from tp_core._contracts._logger import Logger as Logger
    from tp_core._contracts._logger import LoggerFactory as LoggerFactory
    from tp_core._contracts._logger import RunInfo as RunInfo
    from tp_core._contracts._logger import RunStatus as RunStatus
    from tp_core._contracts._session import Session as Session
    from tp_core._lazy import lazy_exports as lazy_exports
    from tp_core.plugins._hooks import Command as Command
    from tp_core.plugins._hooks import hookimpl as hookimpl
    from tp_core.plugins._registry import registry as registry
else:
    __getattr__, __dir__, __all__ = _lazy.lazy_exports(
        __name__,
        {
            "tp_core._contracts._backend": [
                "Backend",
                "DevicesBackend",
                "NoOptions",
                "RanksBackend",
                "Verdict",
            ],
            "tp_core._contracts._callback": ["Callback", "NamedCallback", "RunView"],
            "tp_core._contracts._collate": ["CollateAdapter"],
            "tp_core._contracts._engine": ["Engine", "Pool"],
            "tp_core._contracts._job": ["Job"],
            "tp_core._contracts._logger": ["Logger", "LoggerFactory", "RunInfo", "RunStatus"],
            "tp_core._contracts._session": ["Session"],
            "tp_core._lazy": ["lazy_exports"],
            "tp_core.plugins._hooks": ["Command", "hookimpl"],
            "tp_core.plugins._registry": ["registry"],
        },
    )
