"""What all tests share."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """The models that all tests of replicas share."""
    spec = importlib.util.spec_from_file_location("replica_zoo", Path(__file__).with_name("replica_zoo.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def one_thread_per_operation():
    """Replicas times threads must not exceed the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
