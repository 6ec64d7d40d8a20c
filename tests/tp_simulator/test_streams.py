"""When work runs, and what the host sees until then."""

import pytest
import torch
import tp_simulator

pytestmark = pytest.mark.simulated


def test_a_copy_to_the_device_reads_as_nan_until_it_is_done():
    # A second stream that waits for nothing sees what lies in the memory.
    with tp_simulator.hostile(seed=0):
        side = torch.Stream(device="sim:0")
        host = torch.ones(4).pin_memory()
        device = torch.full((4,), 7.0, device="sim:0")
        torch.accelerator.synchronize("sim:0")
        device.copy_(host, non_blocking=True)
        with side:
            seen = device.cpu()
        torch.accelerator.synchronize("sim:0")
        after = device.cpu()
    assert seen.isnan().all()
    assert after.tolist() == [1, 1, 1, 1]


def test_a_copy_to_the_host_reads_as_nan_until_it_is_done():
    with tp_simulator.hostile():
        floats = torch.ones(3, device="sim:0").to("cpu", non_blocking=True)
        integers = torch.ones(3, dtype=torch.int64, device="sim:0").to("cpu", non_blocking=True)
        seen = floats.clone(), integers.clone()
        torch.accelerator.synchronize("sim:0")
    assert seen[0].isnan().all()
    assert seen[1].tolist() == [-1, -1, -1]
    assert floats.tolist() == [1, 1, 1]
    assert integers.tolist() == [1, 1, 1]


def test_a_copy_to_pageable_memory_blocks():
    with tp_simulator.hostile() as report:
        host = torch.zeros(3)
        host.copy_(torch.ones(3, device="sim:0"), non_blocking=True)
        assert host.tolist() == [1, 1, 1]
    assert report.races == ()


def test_pageable_memory_is_read_at_the_launch():
    with tp_simulator.hostile() as report:
        host = torch.ones(3)
        device = host.to("sim:0", non_blocking=True)
        host.zero_()
        assert device.cpu().tolist() == [1, 1, 1]
    assert report.races == ()


def test_kernels_wait_until_somebody_waits_for_them():
    with tp_simulator.hostile():
        host = torch.zeros(1, pin_memory=True)
        host.copy_(torch.ones(1, device="sim:0") + 1, non_blocking=True)
        done = torch.accelerator.current_stream("sim:0").record_event()
        side = torch.Stream(device="sim:0")
        torch.ones(1, device="sim:0") * 3
        side.synchronize()  # it has nothing to do
        assert host.isnan().all()
        done.synchronize()
        assert host.tolist() == [2]


def test_without_hostility_work_is_done_at_once():
    host = torch.zeros(1, pin_memory=True)
    host.copy_(torch.ones(1, device="sim:0") + 1, non_blocking=True)
    assert host.tolist() == [2]


def test_whoever_asks_an_event_often_enough_gets_an_answer():
    with tp_simulator.hostile():
        x = torch.ones(4, device="sim:0")
        for _ in range(10):
            x = x + 1
        done = torch.accelerator.current_stream("sim:0").record_event()
        asked = 0
        while not done.query():
            asked += 1
        assert 0 < asked < 100


def test_a_stream_says_whether_it_is_done():
    with tp_simulator.hostile():
        side = torch.Stream(device="sim:0")
        assert side.query()
        with side:
            for _ in range(3):
                torch.ones(4, device="sim:0")
        assert not side.query()
        side.synchronize()
        assert side.query()


def test_events_measure_time():
    start, end = (torch.Event(device="sim:0", enable_timing=True) for _ in range(2))
    with tp_simulator.hostile():
        start.record()
        torch.ones(1000, device="sim:0").exp()
        end.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.elapsed_time(end) > 0


def test_each_seed_is_an_order_and_the_same_seed_the_same_one():
    def poisoned(seed):
        """Return which of many copies an event happened to wait for, beside those that it had to."""
        with tp_simulator.hostile(seed):
            hosts = [torch.ones(1, device="sim:0").to("cpu", non_blocking=True) for _ in range(20)]
            seen = [host.isnan().item() for host in hosts]
        return tuple(seen)

    orders = [poisoned(seed) for seed in range(6)]
    assert len(set(orders)) > 1
    assert orders == [poisoned(seed) for seed in range(6)]


def test_a_report_counts_waits_kernels_and_copies():
    with tp_simulator.watch() as report:
        x = torch.ones(3).to("sim:0")
        y = x * 2
        y.sum().item()
        y.cpu()
        torch.accelerator.synchronize("sim:0")
    assert report.kernels == 2
    assert report.synchronizations == 4
    assert report.copies == {"blocking copies to the device": 1, "blocking copies to the host": 1}
    assert str(report).splitlines() == [
        "0 races",
        "1 blocking copies to the device",
        "1 blocking copies to the host",
        "2 kernels",
        "4 synchronizations",
    ]


def test_an_operation_whose_shape_depends_on_values_waits():
    x = torch.tensor([0.0, 1.0, 2.0], device="sim:0")
    mask, same = x > 0, x.clone()
    waits = {}
    for name, operation in {
        "nonzero": torch.nonzero,
        "mask": lambda x: x[mask],
        "unique": torch.unique,
        "equal": lambda x: torch.equal(x, same),
    }.items():
        with tp_simulator.watch() as report:
            operation(x)
        waits[name] = report.synchronizations
    assert waits == {"nonzero": 1, "mask": 1, "unique": 1, "equal": 1}, waits


def test_streams_are_of_the_pool_of_their_device():
    first, second = torch.sim.Stream(), torch.sim.Stream(device=1)
    assert (first.device_index, second.device_index) == (0, 1)
    assert first.stream_id != torch.sim.default_stream().stream_id
    assert {torch.sim.Stream().stream_id for _ in range(40)} == set(range(1, 33))


def test_the_module_of_the_device_has_streams_as_torch_cuda_does():
    side = torch.sim.Stream()
    with torch.sim.stream(side):
        assert torch.sim.current_stream().stream_id == side.stream_id
    with torch.sim.stream(None):
        assert torch.sim.current_stream().stream_id == 0
    torch.sim.set_stream(side)
    assert torch.sim.current_stream().stream_id == side.stream_id
    torch.sim.set_stream(torch.sim.default_stream())
    event = torch.sim.Event(enable_timing=True)
    event.record()
    torch.sim.synchronize()
    assert event.query()
    assert not torch.sim.is_current_stream_capturing()
