"""The pages of the reference, made from the public names of the packages when the site is built.

A module has a page with its functions and small classes. A class or function with much to say has a page
of its own below it. So every public name is on one page, and no page is endless.
"""

import functools
import importlib
import inspect
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["homes", "page_of", "public_modules", "write"]

PACKAGES = Path(__file__).parents[1] / "packages"
NO_IMPORTS = {"cli", "templates"}  # nobody imports names of them
MUCH = 120  # words of docstrings from which a class or function has a page of its own
# What autodoc makes of these is not how they are called: users never make the first two.
SIGNATURES = {
    "tp_trainer.Loop": "()",
    "tp_tuple.TupleCollate": "()",
    "tp_launch.LaunchRequest": "(*, script, **options)",
}


@functools.cache
def public_modules() -> list[ModuleType]:
    """Return the public modules of all packages that have names, by name."""
    found, queue = [], sorted(path.name for path in PACKAGES.glob("*/src/*") if path.is_dir())
    while queue:
        module = importlib.import_module(queue.pop(0))
        found.append(module)
        below = [m.name for m in pkgutil.iter_modules(getattr(module, "__path__", ())) if m.name[0] != "_"]
        queue += [f"{module.__name__}.{name}" for name in below if name not in NO_IMPORTS]
    return sorted((m for m in found if _names(m)), key=lambda module: module.__name__)


def _names(module: ModuleType) -> list[str]:
    """Return the names of the module's classes and functions; what is imported at first use is among them."""
    names = {*getattr(module, "__all__", ())}
    if module.__name__ == "tp_runner":
        names.add("map")  # not in __all__, as it would shadow the builtin
    values = {name: getattr(module, name) for name in sorted(names)}
    return [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isroutine(value))
        and str(getattr(value, "__module__", "")).startswith("tp_")
    ]


def homes() -> dict[str, list[str]]:
    """Return which public names each object has, by the one that is its home.

    That is in its own package where it has several, and as short as may be.
    """
    names: dict[int, list[str]] = {}
    for module in public_modules():
        for name in _names(module):
            names.setdefault(id(getattr(module, name)), []).append(f"{module.__name__}.{name}")
    found = {}
    for each in names.values():
        package = _value(each[0]).__module__.split(".")[0]
        home, *others = sorted(each, key=lambda n: (n.split(".")[0] != package, n.count("."), n))
        found[home] = others
    return found


def _value(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def page_of(name: str) -> str:
    """Return the page that a name, by its home, is on: `api/module`, or `api/module/name`."""
    module, _, attribute = name.rpartition(".")
    page = f"api/{module.replace('.', '_')}"
    return f"{page}/{attribute}" if _words(_value(name)) >= MUCH else page


def _words(value: Any) -> int:
    """Return the number of words that the reference has of a class or function."""
    texts = [inspect.getdoc(value) or ""]
    if inspect.isclass(value):
        members = {name: member for c in _documented_classes(value) for name, member in vars(c).items()}
        texts += [inspect.getdoc(m) or "" for name, m in members.items() if name[0] != "_" and _has_doc(m)]
    return sum(len(text.split()) for text in texts)


def _has_doc(member: Any) -> bool:
    return inspect.isroutine(member) or isinstance(member, property)


def _documented_classes(value: type) -> list[type]:
    """Return a class and those private ones below which it has its members from."""
    found = []
    for each in value.__mro__:
        if each is not value and not _is_private(each):
            break
        found.append(each)
    return found


def _is_private(value: type) -> bool:
    """Whether a base is ours and has no page, so that its members are shown where it is inherited."""
    return value.__module__.startswith("tp_") and id(value) not in _public_ids()


@functools.cache
def _public_ids() -> set[int]:
    return {id(getattr(module, name)) for module in public_modules() for name in _names(module)}


def _directive(name: str) -> str:
    """Return the lines of reST that document a name."""
    value, signature = _value(name), SIGNATURES.get(name, "")
    if not inspect.isclass(value):
        return f".. autofunction:: {name}{signature}\n"
    # Members of bases that have no page of their own are shown here; those of other libraries never are.
    stops = ", ".join(dict.fromkeys(c.__name__ for c in value.__mro__[1:] if not _is_private(c)))
    lines = [f".. autoclass:: {name}{signature}", "   :members:", f"   :inherited-members: {stops}"]
    if issubclass(value, BaseException):
        lines.append("   :show-inheritance:")
    return "\n".join(lines) + "\n"


def _summary(name: str) -> str:
    """Return the first sentence of a docstring."""
    text = (inspect.getdoc(_value(name)) or "").split("\n\n")[0].replace("\n", " ")
    text = re.sub(
        r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"``\1``", text
    )  # the names would be looked up from another place
    return text.split(". ")[0].rstrip(".") + "."


def _pages() -> Iterator[tuple[str, str]]:
    """Yield the path of each page, from the documents' folder, and its text."""
    found = homes()
    elsewhere = {other: home for home, others in found.items() for other in others}
    for module in public_modules():
        names = [f"{module.__name__}.{name}" for name in _names(module)]
        own = [name for name in names if name in found]
        apart = [name for name in own if page_of(name).count("/") == 2]
        title = module.__name__
        lines = [title, "=" * len(title), "", f".. automodule:: {module.__name__}", "   :no-members:", ""]
        if apart:
            lines += [".. list-table::", "   :widths: 30 70", ""]
            for name in apart:
                _, _, attribute = name.rpartition(".")
                role = "class" if inspect.isclass(_value(name)) else "func"
                lines += [f"   * - :{role}:`~{name}`", f"     - {_summary(name)}"]
            lines += ["", ".. toctree::", "   :hidden:", ""]
            lines += [f"   /{page_of(name)}" for name in apart] + [""]
        lines += [_directive(name) for name in own if name not in apart]
        aliases = [name for name in names if name in elsewhere]
        for name in aliases:
            role = "class" if inspect.isclass(_value(name)) else "func"
            lines += [f"``{name}`` is :{role}:`{elsewhere[name]}`.", ""]
        yield f"api/{module.__name__.replace('.', '_')}.rst", "\n".join(lines)
        for name in apart:
            _, _, attribute = name.rpartition(".")
            yield f"{page_of(name)}.rst", f"{attribute}\n{'=' * len(attribute)}\n\n{_directive(name)}"


def write(docs: Path) -> None:
    """Write the pages; those that have not changed stay, so that Sphinx need not read them again."""
    pages = {docs / path: text for path, text in _pages()}
    for stale in {*docs.glob("api/**/*.rst")} - pages.keys():
        stale.unlink()
    for folder in [path for path in docs.glob("api/*") if path.is_dir() and not any(path.iterdir())]:
        shutil.rmtree(folder)
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
