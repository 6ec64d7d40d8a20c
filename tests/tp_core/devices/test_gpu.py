"""Devices and transfer on an accelerator."""

import gc

import pytest
import torch
from tp_core import as_device, available_devices, device_loads, recursive_pin, recursive_to, resolve_devices
from tp_core.errors import DeviceError

from tests.accelerator import COUNT, GPU, KIND

pytestmark = pytest.mark.gpu


def test_the_real_machine_has_the_devices_that_torch_counts():
    expected = tuple(torch.device(KIND, i) for i in range(COUNT))
    assert available_devices() == resolve_devices(None) == expected


def test_numbers_and_names_mean_accelerators():
    assert as_device(0) == resolve_devices([0])[0] == resolve_devices([GPU])[0] == torch.device(GPU)
    with pytest.raises(DeviceError, match="99"):
        resolve_devices([f"{KIND}:99"])


def test_the_load_of_each_device_is_told():
    loads = device_loads()
    assert [load.device for load in loads] == list(available_devices())
    assert all(0 < load.free_bytes <= load.total_bytes for load in loads)


def test_a_batch_goes_through_pinned_memory_and_back():
    t = torch.arange(4.0)
    pinned = recursive_pin({"t": [t, t], "name": "n"})
    assert pinned["t"][0].is_pinned()
    moved = recursive_to(pinned, GPU, non_blocking=True)
    assert moved["t"][0] is moved["t"][1]
    assert recursive_to(moved, torch.device(GPU)) is moved
    assert torch.equal(recursive_to(moved, "cpu")["t"][0], t)


def test_a_moved_batch_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        batch = {"x": [torch.ones(2**20)], "y": (torch.ones(2**18), {"z": torch.ones(2**18)})}
        before = torch.accelerator.memory_allocated(GPU)
        for _ in range(4):
            moved = recursive_to(batch, GPU)
            del moved
            assert torch.accelerator.memory_allocated(GPU) == before
    finally:
        gc.enable()


def test_page_locked_copies_of_many_batches_arrive_whole():
    batches = [recursive_pin({"x": torch.full((2**18,), float(i))}) for i in range(8)]
    moved = [recursive_to(b, GPU, non_blocking=True) for b in batches]
    assert [m["x"].sum().item() for m in moved] == [i * 2.0**18 for i in range(8)]
