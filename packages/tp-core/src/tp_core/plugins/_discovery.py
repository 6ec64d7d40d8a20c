"""Finding plugins among the installed distributions."""

import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, distributions, entry_points

from tp_core.plugins._conflicts import FIRST_PARTY
from tp_core.plugins._contribution import PluginInfo

__all__ = ["ENTRY_POINT_GROUP", "KEYWORD", "find_entry_points", "find_forgotten", "load"]

ENTRY_POINT_GROUP = "tp.plugins"
"""The group of entry points by which installed plugins are found."""

KEYWORD = "tp-plugin"
"""What distributions with plugins have among their keywords, so that people find them."""


def find_entry_points() -> Iterator[tuple[PluginInfo, EntryPoint]]:
    """Yield every installed plugin's entry point, sorted, without importing any.

    The order is that of names and not of the file system, so that every machine sees the same. Those
    of this project come first: of two plugins with one name the second is left out.
    """
    found = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist
        name = distribution.name if distribution is not None else point.name
        version = distribution.version if distribution is not None else ""
        found.append((PluginInfo(point.name, name, version), point))
    yield from sorted(found, key=_order)


def _order(found: tuple[PluginInfo, EntryPoint]) -> tuple[bool, str, str]:
    info, _ = found
    return info.distribution not in FIRST_PARTY, info.name, info.distribution


def load(point: EntryPoint) -> object:
    """Import a plugin; what it prints goes to stderr."""
    with redirect_stdout(sys.stderr):  # stdout may be read by machines
        plugin: object = point.load()
    return plugin


def find_forgotten() -> list[str]:
    """Return the distributions that call themselves plugins, by their keyword, and name no module."""
    return sorted(
        distribution.name
        for distribution in distributions()
        if KEYWORD in re.split(r"[,\s]+", ",".join(distribution.metadata.get_all("Keywords", [])))
        and not distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    )
