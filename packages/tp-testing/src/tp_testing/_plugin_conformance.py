"""The conformance tests of plugin modules, and fake distributions for the registry to find."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

from tp_core.discovery import CONTRACT_VERSION, ENTRY_POINT_GROUP, PluginRegistry

from tp_testing._kit import DeclaredLimits


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
    """Make ``name`` look installed within a ``with`` block.

    It writes the distribution's metadata and modules below ``folder`` and puts that on the module search
    path. Afterwards it removes modules from there from ``sys.modules``. A registry that has searched for
    plugins before must search again: ``registry.refresh()``.

    Args:
        folder: An empty folder, for example pytest's ``tmp_path``.
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


_HEAVY = ("torch", "numpy", "pandas", "transformers", "typer", "rich")
_DEADLINE_S = 300.0

_LOOK = """
import contextlib, gc, importlib, io, json, logging, os, random, signal, sys, threading
import tp_core.plugins

def settings():
    numbers = [signal.SIGINT, signal.SIGTERM]
    return {
        "the current folder": os.getcwd(),
        **{f"the environment variable {name}": value for name, value in os.environ.items()},
        "garbage collection": gc.isenabled(),
        "sys.excepthook": sys.excepthook,
        "the root logger": (logging.root.level, list(logging.root.handlers)),
        "Python's random generator": random.getstate(),
        "signal handlers": [signal.getsignal(number) for number in numbers],
    }

modules, before = set(sys.modules), settings()
out = io.StringIO()
with contextlib.redirect_stdout(out):
    importlib.import_module(sys.argv[1])
new, after = set(sys.modules) - modules, settings()
print()  # what it has written by other ways stands before
print(json.dumps({
    "printed": out.getvalue(),
    "changed": [name for name in before | after if before.get(name) != after.get(name)],
    "modules": sorted({name.partition(".")[0] for name in new}),
    "threads": threading.active_count(),
}))
"""


class PluginConformance(DeclaredLimits):
    """The tests of every plugin module. A subclass, in a test module, names it.

    ``tp``, and the first use of the registry, load all installed plugins: each must import fast and print
    nothing.

    Attributes:
        plugin: The module that the entry point names.
        brings: The names of its contributions by kind: ``{"backend": ("mine",)}``. The kinds are
            "backend", "collate adapter", "engine", "command", "callback" and "logger".

    Example:
        >>> class TestPlugin(PluginConformance):
        ...     plugin = "my_package._plugin"
        ...     brings = {"backend": ("mine",)}
    """

    plugin: ClassVar[str]
    brings: ClassVar[dict[str, tuple[str, ...]]]

    def subject(self) -> str:
        """Return the name of the module."""
        return self.plugin

    # -- the tests ------------------------------------------------------------------------------

    def test_it_declares_its_contract_version(self) -> None:
        built_for = getattr(import_module(self.plugin), "tp_contract", None)
        assert built_for == CONTRACT_VERSION, f"its module needs tp_contract = {CONTRACT_VERSION}"

    def test_it_brings_what_it_is_for(self) -> None:
        assert self._contributions() == self.brings

    def test_it_brings_the_same_when_it_is_asked_again(self) -> None:
        first, second = self._contributions(), self._contributions()
        assert first == second
        assert any(first.values()), "it brings nothing"

    def test_importing_it_is_light_and_quiet(self) -> None:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LOOK, self.plugin],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        *written, report = done.stdout.splitlines()
        seen: dict[str, Any] = json.loads(report)
        printed = seen["printed"] or "\n".join(written)
        heavy = [name for name in _HEAVY if name in seen["modules"]]
        assert not heavy, f"it imports {', '.join(heavy)}; what is heavy belongs into the hooks"
        assert not printed, f"it prints while it is imported: {printed!r}"
        assert not seen["changed"], f"it changes {', '.join(seen['changed'])} while it is imported"
        assert seen["threads"] == 1, "it starts threads while it is imported"

    def test_an_installed_distribution_names_it(self) -> None:
        modules = [point.value for point in entry_points(group=ENTRY_POINT_GROUP)]
        assert self.plugin in modules, (
            f"no installed distribution has {self.plugin!r} in the entry-point group {ENTRY_POINT_GROUP!r}: "
            "pip install it, with -e while you work on it"
        )

    def _contributions(self) -> dict[str, tuple[str, ...]]:
        plugins = PluginRegistry(environ={})
        module = import_module(self.plugin)
        installed = {p.value: p.name for p in entry_points(group=ENTRY_POINT_GROUP)}.get(self.plugin)
        name = installed or "under-test"
        if installed is None:
            plugins.register(module, name=name)
        for broken in plugins.broken():
            assert broken.info.name != name, str(broken)
        conflicts = [str(c) for c in plugins.conflicts() if any(info.name == name for info in c.left_out)]
        assert not conflicts, conflicts[0]
        return plugins.contributions(name)
