"""What every backend must do, by tp_core's kit."""

import pytest
from tp_core.testing import BackendConformance
from tp_tuple._backend import TupleBackend


class TestTwoDevices(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")


class TestThreeDevicesWithCopies(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu", "cpu")
    options = {"force_copies": True}


class TestWeightedSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"weights": [2, 1]}


@pytest.mark.slow
class TestCostBalancedSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"cost": lambda item: abs(float(item[0][0]))}


@pytest.mark.slow
class TestMeasuredSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"weights": "auto"}
