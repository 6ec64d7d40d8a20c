"""Examples in docstrings print what they show."""

import doctest
import importlib
import pkgutil

import pytest

from tests.surface.names import PACKAGES


class Runner(doctest.DocTestRunner):
    """Keeps what an example printed or raised beside what it shows, unless it names things of the reader."""

    def __init__(self):
        super().__init__(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        self.wrong = []

    def report_failure(self, out, test, example, got):
        self.wrong.append(f"{test.name}: {example.source.strip()} printed {got.strip()!r}")

    def report_unexpected_exception(self, out, test, example, exc_info):
        if not issubclass(exc_info[0], NameError):
            self.wrong.append(f"{test.name}: {example.source.strip()} raised {exc_info[1]!r}")


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_examples_print_what_they_show(package):
    runner, finder = Runner(), doctest.DocTestFinder(exclude_empty=True)
    for module in _modules(package):
        for found in finder.find(module, module.__name__):
            runner.run(found)
    assert not runner.wrong
    assert runner.tries


def _modules(package):
    first = importlib.import_module(package)
    yield first
    for module in pkgutil.walk_packages(first.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            yield importlib.import_module(module.name)
