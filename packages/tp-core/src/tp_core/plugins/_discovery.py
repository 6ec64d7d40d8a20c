"""Finding plugins among the installed distributions."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from tp_core.plugins._contribution import PluginInfo

__all__ = ["ENTRY_POINT_GROUP", "find_entry_points"]

ENTRY_POINT_GROUP = "tp.plugins"


def find_entry_points() -> Iterator[tuple[PluginInfo, EntryPoint]]:
    """Yield every installed plugin's entry point, sorted, without importing any.

    The order is that of names and not of the file system, so that every machine sees the same.
    """
    found = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist
        name = distribution.name if distribution is not None else point.name
        version = distribution.version if distribution is not None else ""
        found.append((PluginInfo(point.name, name, version), point))
    yield from sorted(found, key=lambda pair: (pair[0].name, pair[0].distribution))
