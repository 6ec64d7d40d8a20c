"""What a user writes becomes the devices of the process, or a sentence that helps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tp_core import (
    DeviceLoad,
    LaunchEnvironment,
    as_device,
    available_devices,
    device_of_rank,
    resolve_devices,
)
from tp_core.errors import DeviceError

CPU = torch.device("cpu")
Machine = Callable[..., None]


def cuda(*indices: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", i) for i in indices)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return what makes torch see so many accelerators, whatever there are."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def pretend(count: int, *, kind: str = "cuda", built: bool = True) -> None:
        def current(check_available: bool = False) -> torch.device | None:
            present = count > 0 if check_available else built
            return torch.device(kind) if present else None

        monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ("auto", cuda(0, 1, 2)),
        (None, cuda(0, 1, 2)),
        (2, cuda(0, 1)),
        ("2", cuda(0, 1)),
        (" 2 ", cuda(0, 1)),
        (np.int64(2), cuda(0, 1)),
        ("cuda", cuda(0, 1, 2)),
        ("cuda:1", cuda(1)),
        ("CUDA:1", cuda(1)),
        (torch.device("cuda:2"), cuda(2)),
        (torch.device("cuda"), cuda(0, 1, 2)),
        ([0, 1], cuda(0, 1)),
        ((2, 0), cuda(2, 0)),
        (range(1, 3), cuda(1, 2)),
        ("0,1", cuda(0, 1)),
        (["0", "cuda:1", torch.device("cuda:2")], cuda(0, 1, 2)),
        (["cuda", "cpu"], (*cuda(0, 1, 2), CPU)),
        ("cuda:0,cpu", (*cuda(0), CPU)),
        ("cuda:0, cuda:0", cuda(0, 0)),
        ("cpu", (CPU,)),
        ("cpu:3", (CPU,)),
        (torch.device("cpu", 0), (CPU,)),
    ],
)
def test_a_request_on_a_machine_with_three_gpus(machine: Machine, spec: Any, devices: Any) -> None:
    machine(3)
    assert resolve_devices(spec) == devices


@pytest.mark.parametrize(
    ("spec", "count"), [("auto", 1), (None, 1), (2, 2), ("3", 3), (["cpu", "cpu"], 2), ("cpu", 1)]
)
def test_a_request_on_a_machine_without_accelerator(machine: Machine, spec: Any, count: int) -> None:
    machine(0)
    assert resolve_devices(spec) == (CPU,) * count
    assert available_devices() == (CPU,)


def test_any_accelerator_that_torch_knows_will_do(machine: Machine) -> None:
    machine(2, kind="xpu")
    assert resolve_devices() == (torch.device("xpu:0"), torch.device("xpu:1"))
    assert resolve_devices("xpu:1,cpu") == (torch.device("xpu:1"), CPU)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "devices=0 asks for less than one device; this process sees cuda:0, cuda:1 and"),
        (-1, "devices=-1 asks for less than one device.*write a count from 1 on"),
        ("-2", "devices='-2' asks for less than one device"),
        (3, "devices=3 asks for 3 devices; .*write 'auto', a count up to 2, or .* occur twice"),
        (True, "devices=True is of type bool; .*; write 'auto', a count like 2"),
        ([True], "has True of type bool in it"),
        ([], r"devices=\[\] names no device; .*; write 'auto'"),
        ((), r"devices=\(\) names no device"),
        ("", "devices='' has '' in it, which is not a device"),
        ("0,", "devices='0,' has '' in it, which is not a device"),
        ("gpu", "devices='gpu' has 'gpu' in it, which is not a device; .*; write 'auto'"),
        (["auto"], "has 'auto' in it, which is not a device"),
        ({0, 1}, "devices={0, 1} is of type set"),
        (1.5, "devices=1.5 is of type float"),
        (b"cpu", "devices=b'cpu' is of type bytes"),
        ([["cpu"]], r"has \['cpu'\] of type list in it"),
        ("cuda:2", "asks for the accelerator with index 2, which does not exist; .*up to 2"),
        ([0, -1], "asks for the accelerator with index -1, which does not exist"),
        ("xpu", "devices='xpu' needs xpu, which is not here; this process sees cuda:0, cuda:1"),
        ("meta", "needs meta, which is not here"),
        ("idle", "is not a request for idle devices; .*as in 'idle:2'"),
        ("idle:0", "is not a request for idle devices"),
        ("idle:x", "is not a request for idle devices"),
        ("idle:3", "devices='idle:3' asks for 3 accelerators; this process sees cuda:0, cuda:1"),
    ],
)
def test_a_request_that_cannot_be_met_on_two_gpus(machine: Machine, spec: Any, message: str) -> None:
    machine(2)
    with pytest.raises(DeviceError, match=message):
        resolve_devices(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([0, 1], "asks for the accelerator with index 0, .* sees the cpu alone; write 'auto', "),
        ("cuda", "needs cuda, which is not here; this process sees the cpu alone; .*'cpu', or a"),
        ("idle:2", "devices='idle:2' asks for 2 accelerators; this process sees the cpu alone"),
    ],
)
def test_a_request_that_cannot_be_met_on_the_cpu(machine: Machine, spec: Any, message: str) -> None:
    machine(0)
    with pytest.raises(DeviceError, match=message):
        resolve_devices(spec)


def test_a_torch_that_is_built_for_the_cpu_alone_is_named(machine: Machine) -> None:
    machine(0, built=False)
    with pytest.raises(DeviceError, match=rf"\(torch {torch.__version__[:4]}.* is built for no ot"):
        resolve_devices("cuda")


def test_a_variable_that_hides_devices_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceError, match="sees cuda:0 and the cpu under CUDA_VISIBLE_DEVICES='3'"):
        resolve_devices("cuda:3")


def loads(*utilization: float | None) -> tuple[DeviceLoad, ...]:
    return tuple(DeviceLoad(torch.device("cuda", i), "fake", 100, 200, u) for i, u in enumerate(utilization))


def test_idle_devices_are_the_least_busy_ones(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(3)
    monkeypatch.setattr("tp_core._devices.device_loads", lambda: loads(0.9, 0.0, 0.3))
    assert resolve_devices("idle:2") == cuda(1, 2)


def test_idle_devices_cannot_be_told_without_nvml(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2)
    monkeypatch.setattr("tp_core._devices.device_loads", lambda: loads(None, None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"cuda:0 \(fake\).*pip install 'tp-core\[nvml\]'"):
        resolve_devices("idle:2")


@pytest.mark.parametrize("device", ["cpu", "cpu:1", CPU, torch.device("cpu", 0)])
def test_there_is_one_cpu(device: Any) -> None:
    assert as_device(device) == CPU


# -- one device for each process of a launcher ----------------------------------------------------


def place(local_rank: int, local_world_size: int) -> LaunchEnvironment:
    return LaunchEnvironment("torchrun", local_rank, local_world_size, local_rank, local_world_size)


@pytest.mark.parametrize(
    ("devices", "rank", "count", "explicit", "expected"),
    [
        (cuda(1, 0), 1, 2, True, torch.device("cuda:0")),
        (cuda(0, 0), 1, 2, True, torch.device("cuda:0")),
        ((CPU,), 3, 4, True, CPU),
        ((CPU, CPU), 1, 2, True, CPU),
        ((CPU,), 3, 4, False, CPU),
        (cuda(0, 1), 1, 2, False, torch.device("cuda:1")),
        (cuda(0, 1, 2), 1, 2, False, torch.device("cuda:1")),
        (cuda(0), 0, 1, False, torch.device("cuda:0")),
    ],
)
def test_each_process_gets_its_device(
    devices: Any, rank: int, count: int, explicit: bool, expected: torch.device
) -> None:
    assert device_of_rank(devices, place(rank, count), explicit=explicit, environ={}) == expected


@pytest.mark.parametrize("explicit", [False, True])
def test_a_process_that_sees_one_device_of_its_own_takes_that(machine: Machine, explicit: bool) -> None:
    machine(1)
    environ = {"CUDA_VISIBLE_DEVICES": "2"}
    device = device_of_rank(cuda(0), place(2, 4), explicit=explicit, environ=environ)
    assert device == torch.device("cuda:0")


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("devices", "explicit", "environ"),
    [
        (cuda(0, 1), False, {}),
        (cuda(0), False, {}),
        (cuda(0), False, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (cuda(0, 1), True, {}),
        (cuda(0, 1, 2, 3), True, {}),
        ((CPU, CPU), True, {}),
    ],
)
def test_devices_that_do_not_match_the_processes_are_refused_on_every_rank(
    machine: Machine, devices: Any, explicit: bool, environ: dict[str, str], rank: int
) -> None:
    machine(len(devices))
    message = rf"{len(devices)} devices? for the 3 processes .* local rank {rank}\); .*tp launch -n"
    with pytest.raises(DeviceError, match=message):
        device_of_rank(devices, place(rank, 3), explicit=explicit, environ=environ)
