"""Examples in docstrings print what they show."""

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = (
    "tp_core",
    "tp_context",
    "tp_data",
    "tp_dp_gather",
    "tp_pipeline",
    "tp_runner",
    "tp_shard",
    "tp_trainer",
    "tp_tuple",
    "tp_verify",
)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_examples_print_what_they_show(package):
    tried, failed = 0, []
    for module in _modules(package):
        found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        tried += found.attempted
        failed += [module.__name__] * found.failed
    assert not failed
    assert tried


def _modules(package):
    first = importlib.import_module(package)
    yield first
    for module in pkgutil.walk_packages(first.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            yield importlib.import_module(module.name)
