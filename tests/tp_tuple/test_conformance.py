"""What every backend and every collate adapter must do, by tp_core's kits."""

import pytest
import torch
from tp_core import tree_leaves
from tp_testing import AdapterConformance, BackendConformance

from tests.installed import adapter_class, backend_class

TupleBackend = backend_class("tuple")
TupleCollateAdapter = adapter_class("tuple")


class TestAdapter(AdapterConformance):
    adapter = TupleCollateAdapter


class TestTwoDevices(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")


@pytest.mark.nightly
class TestThreeDevicesWithCopies(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu", "cpu")
    options = {"force_copies": True}


@pytest.mark.nightly
class TestWeightedSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"weights": [2, 1]}


def _cost(item):
    return abs(float(next(leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)).flatten()[0]))


@pytest.mark.nightly
class TestCostBalancedSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"cost": _cost}


@pytest.mark.nightly
class TestMeasuredSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"weights": "auto"}
