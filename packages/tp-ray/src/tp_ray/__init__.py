"""Ray's actors as the workers of tp-runner: ``engine="ray"``, which the registry finds.

::

    _plugin       the hook of the registry
    _engine       RayEngine: what a runner asks for by its name
    _fleet        RayFleet: starts actors, sends chunks, reports what comes back
    _placement    where actors go, and whether the cluster has room
    _scaling      how many there are
    _actor        RayWorker: the worker's program on a node of the cluster
"""

__all__: list[str] = []


def __getattr__(name: str) -> str:
    if name != "__version__":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib.metadata import version

    return version("tp-ray")
