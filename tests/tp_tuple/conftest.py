"""The models that all tests of replicas share."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    path = Path(__file__).parents[1] / "replica_zoo.py"
    spec = importlib.util.spec_from_file_location("replica_zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # replicas times threads must not exceed the cores
    yield
    torch.set_num_threads(before)
