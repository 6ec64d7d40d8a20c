"""What every backend must do, by tp_core's kit."""

from tp_core.testing import BackendConformance
from tp_tuple._backend import TupleBackend


class TestTwoDevices(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")


class TestThreeDevicesWithCopies(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu", "cpu")
    options = {"force_copies": True}  # noqa: RUF012 - the kit declares it


class TestWeightedSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"weights": [2, 1]}  # noqa: RUF012 - as above


class TestCostBalancedSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"cost": lambda item: abs(float(item[0][0]))}  # noqa: RUF012 - as above


class TestMeasuredSplit(BackendConformance):
    backend = TupleBackend
    devices = ("cpu", "cpu")
    options = {"weights": "auto"}  # noqa: RUF012 - as above
