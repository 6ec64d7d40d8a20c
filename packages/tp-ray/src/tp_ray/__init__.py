"""Ray's actors as the workers of tp-runner: ``engine="ray"``, which the registry finds.

::

    _plugin       the hook of the registry
    _engine       RayEngine: what a runner asks for by its name
    _fleet        RayFleet: starts actors, sends chunks, reports what comes back
    _placement    where actors go, and whether the cluster has room
    _scaling      how many there are
    _actor        RayWorker: the worker's program on a node of the cluster
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_ray._engine import RayEngine as RayEngine

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, {"tp_ray._engine": ["RayEngine"]})
