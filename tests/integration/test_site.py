"""The documentation site builds without a warning, and has each public name on one page."""

import collections
import inspect
import re
from importlib import import_module

import pytest

from tests.surface.names import PACKAGES

pytestmark = pytest.mark.slow

ENTRY = re.compile(r'<dt [^>]*\bid="([\w.]+)"')
WORDS = 3000  # of a page of small classes and functions; a class with more has a page of its own


def test_each_public_name_is_on_one_page(site):
    pages = collections.defaultdict(list)
    for page in (site / "api").rglob("*.html"):
        for name in ENTRY.findall(page.read_text()):
            pages[name].append(page.stem)
    names = collections.defaultdict(set)  # of each class and function: it may be public in two modules
    for module in map(import_module, PACKAGES):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("tp_"):
                names[value] |= {f"{module.__name__}.{name}"}
    assert len(names) > 100
    for value, public in names.items():
        home = {name for name in pages if name.endswith(f".{value.__name__}") and _of(name) is value}
        assert len(home) == 1, f"{sorted(public)} is described as {sorted(home)}"
        assert len(pages[home.pop()]) == 1
    assert {name: on for name, on in pages.items() if len(on) > 1} == {}


def _of(name):
    """Return what a public name stands for; None for a method or an attribute."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except ImportError:
        return None


def test_no_page_of_several_names_is_endless(site):
    long = {}
    for page in (site / "api").glob("*.html"):
        text = re.search(r"<article.*</article>", page.read_text(), re.DOTALL)
        words = len(re.sub(r"<[^>]+>", " ", text[0]).split())
        if words > WORDS:
            long[page.name] = words
    assert long == {}
