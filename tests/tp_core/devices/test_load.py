"""How busy devices are is told, and the least busy ones are found."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core import DeviceLoad, device_loads, least_busy, resolve_devices
from tp_core.errors import DeviceError

GIB = 2**30


def load(index: int, utilization: float | None, free: int | None = GIB) -> DeviceLoad:
    return DeviceLoad(torch.device("cuda", index), "fake", free, 2 * GIB, utilization)


def chosen(loads: list[DeviceLoad], count: int) -> list[int]:
    return [item.device.index for item in least_busy(loads, count)]


def test_the_one_that_works_less_is_chosen_though_its_memory_is_fuller() -> None:
    assert chosen([load(0, 0.8, 2 * GIB), load(1, 0, GIB)], 1) == [1]


def test_small_differences_of_utilization_count_for_less_than_memory() -> None:
    assert chosen([load(0, 0.01, GIB), load(1, 0.09, 2 * GIB)], 1) == [1]


def test_equal_loads_go_by_index() -> None:
    assert chosen([load(2, 0), load(0, 0), load(1, 0)], 2) == [0, 1]


def test_what_is_unknown_comes_last() -> None:
    assert chosen([load(0, None), load(1, 1.0), load(2, 1.0, None)], 3) == [1, 2, 0]


@given(
    st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.integers(0, GIB)), max_size=8),
    st.randoms(),
)
def test_the_choice_does_not_depend_on_the_order(values: list[Any], random: Any) -> None:
    loads = [load(i, utilization, free) for i, (utilization, free) in enumerate(values)]
    shuffled = random.sample(loads, len(loads))
    for count in range(len(loads) + 1):
        assert chosen(loads, count) == chosen(shuffled, count)


def test_more_devices_than_there_are_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"asked for the 2 least busy of 1 devices \(cuda:0\)"):
        least_busy([load(0, 0)], 2)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


@pytest.mark.usefixtures("no_accelerator")
def test_the_cpu_tells_its_load() -> None:
    (cpu,) = device_loads()
    assert cpu.device == torch.device("cpu")
    assert cpu.name
    assert cpu.total_bytes is not None
    assert cpu.free_bytes is not None
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert cpu.utilization is not None
    assert 0 <= cpu.utilization <= 1


@pytest.mark.usefixtures("no_accelerator")
def test_a_system_that_tells_nothing_of_its_cpu_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "getloadavg")
    monkeypatch.setattr(os, "sysconf_names", {})
    monkeypatch.setattr(Path, "exists", lambda self: False)
    (cpu,) = device_loads()
    assert cpu.free_bytes is cpu.total_bytes is cpu.utilization is None


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the stand-in for ``torch.cuda`` on a machine with two devices."""
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(name="fake", total_memory=8 * GIB),
        device_memory_used=lambda device: device.index * GIB,
        utilization=lambda device: 10 * device.index,
    )
    accelerator = torch.accelerator
    monkeypatch.setattr(
        accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator, "get_memory_info", lambda device: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def failing(error: Exception) -> Callable[[Any], Any]:
    def fail(device: Any) -> Any:
        raise error

    return fail


@pytest.mark.usefixtures("two_gpus")
def test_gpus_tell_their_load_through_nvml() -> None:
    assert device_loads() == (
        DeviceLoad(torch.device("cuda:0"), "fake", 8 * GIB, 8 * GIB, 0),
        DeviceLoad(torch.device("cuda:1"), "fake", 7 * GIB, 8 * GIB, 0.1),
    )


def test_without_nvml_utilization_is_unknown_and_memory_comes_from_the_driver(
    two_gpus: SimpleNamespace,
) -> None:
    two_gpus.utilization = failing(ModuleNotFoundError("nvidia-ml-py"))
    two_gpus.device_memory_used = failing(ModuleNotFoundError("nvidia-ml-py"))
    assert device_loads()[1] == DeviceLoad(torch.device("cuda:1"), "fake", 3 * GIB, 8 * GIB, None)


def test_an_error_of_the_management_library_itself_is_an_unknown_too(
    two_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NVMLError(Exception):
        pass

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "pynvml" else None)
    monkeypatch.setattr("tp_core._devices.import_module", lambda name: SimpleNamespace(NVMLError=NVMLError))
    two_gpus.utilization = failing(NVMLError("not supported"))
    assert device_loads()[0].utilization is None


def test_an_accelerator_that_tells_nothing_is_no_error(
    two_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    del two_gpus.utilization, two_gpus.device_memory_used
    del two_gpus.get_device_properties  # as torch.mps
    monkeypatch.setattr(torch.accelerator, "get_memory_info", failing(NotImplementedError()))
    assert device_loads()[0] == DeviceLoad(torch.device("cuda:0"), "cuda", None, None, None)


def test_a_choice_without_nvml_is_refused_and_one_without_need_for_it_is_not(
    two_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_devices("idle:1") == (torch.device("cuda:0"),)
    two_gpus.utilization = failing(ModuleNotFoundError("nvidia-ml-py"))
    with pytest.raises(DeviceError, match=r"cuda:0 \(fake\) is not known without NVML; run pip"):
        resolve_devices("idle:1")


def test_a_gpu_whose_driver_tells_no_utilization_is_ranked_by_memory(
    two_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "pynvml" else None)
    library = SimpleNamespace(NVMLError=OSError)
    monkeypatch.setattr("tp_core._devices.import_module", lambda name: library)
    two_gpus.utilization = failing(OSError("not supported"))
    two_gpus.device_memory_used = lambda device: (2 - device.index) * GIB
    assert resolve_devices("idle:1") == (torch.device("cuda:1"),)
