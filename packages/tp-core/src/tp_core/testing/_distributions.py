"""A made-up installed distribution, so that real discovery is tested without pip."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from textwrap import dedent

from tp_core.plugins import ENTRY_POINT_GROUP

__all__ = ["fake_distribution"]


@contextmanager
def fake_distribution(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    entry_points: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    group: str = ENTRY_POINT_GROUP,
) -> Iterator[Path]:
    """Make ``name`` look installed for the length of a ``with`` block.

    Writes the distribution's metadata and modules below ``folder`` and puts that on the module
    search path. Modules that the block imported from there are forgotten afterwards. A registry
    that looked for plugins before has to look again: ``registry.refresh()``.

    Args:
        folder: An empty folder, such as pytest's ``tmp_path``.
        name: The distribution's name.
        version: Its version.
        entry_points: Entry points of ``group`` by name: ``{"mine": "my_plugin"}``.
        modules: Source text by module name; it is dedented.
        group: The entry-point group.

    Yields:
        The folder that went on the search path.
    """
    place = folder / name
    metadata = place / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in (entry_points or {}).items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for module, source in (modules or {}).items():
        path = place.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
    before = set(sys.modules)
    sys.path.insert(0, str(place))
    invalidate_caches()
    try:
        yield place
    finally:
        sys.path.remove(str(place))
        for module in modules or {}:
            if module not in before:
                sys.modules.pop(module, None)
        invalidate_caches()
