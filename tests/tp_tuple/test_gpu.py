"""TupleParallel and its backend on an accelerator, alone, twice, and beside the CPU."""

import pytest
import torch
from torch import nn
from tp_testing import BackendConformance, GpuWrapperConformance
from tp_tuple import Batch, TupleParallel, cat, recursive_cuda, tp_collate
from tp_tuple._balance import Stopwatch, free_memory  # private: times and bytes of one device

from tests.accelerator import GPU, on_a_card
from tests.installed import backend_class

TupleBackend = backend_class("tuple")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["mlp", "conv", "lstm", "transformer", "graphs"])
def test_twenty_steps_are_those_of_the_module_by_itself(zoo, name, gpu_devices):
    def forward(model):
        wrapped = TupleParallel(model, gpu_devices)
        return lambda inputs: wrapped(tuple(inputs))

    zoo.check_equal_training(name, len(gpu_devices), forward, device=GPU)


def test_outputs_stay_or_come_together(gpu_devices):
    model = nn.Linear(3, 2).to(GPU)
    parts = torch.randn(7, 3).tensor_split(len(gpu_devices))
    outputs = TupleParallel(model, gpu_devices)(parts)
    assert [y.device for y in outputs] == [torch.device(d) for d in gpu_devices]
    whole = TupleParallel(model, gpu_devices, transfer_output=True, reduction=cat)(parts)
    torch.testing.assert_close(whole, model(torch.cat(parts).to(GPU)))


def test_objects_move_to_the_current_device_without_a_name():
    class Graphs(Batch):
        def __init__(self, x):
            self.x = x

    assert (
        Graphs(torch.zeros(2)).cuda().x.device == recursive_cuda(torch.zeros(1)).device == torch.device(GPU)
    )
    assert Graphs(torch.zeros(2)).pin_memory().x.is_pinned()


def test_memory_that_the_allocator_holds_unused_counts_as_free():
    device = torch.device(GPU)
    torch.accelerator.empty_cache()
    before = free_memory([device])[0]
    nbytes = on_a_card(2**30, 2**24)
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    used = free_memory([device])[0]
    del block
    after = free_memory([device])[0]
    assert before - used >= 0.9 * nbytes
    assert after - used >= 0.9 * nbytes
    torch.accelerator.empty_cache()


def test_the_shares_of_one_card_named_twice_are_even():
    parts = tp_collate([GPU, GPU], weights="memory")(torch.tensor)(list(range(100)))
    assert abs(parts.counts[0] - parts.counts[1]) <= 4  # the driver's figure moves between two questions


def test_a_measurement_leaves_out_what_was_queued_before():
    device = torch.device(GPU)
    size = on_a_card(4096, 128)
    x = torch.randn(size, size, device=device)
    (x @ x).sum().item()
    short = Stopwatch(device)
    x @ x
    short.stop()
    alone = short.seconds()
    for _ in range(200):
        x @ x
    late = Stopwatch(device)
    x @ x
    late.stop()
    assert late.seconds() < 20 * alone


class TestWrapper(GpuWrapperConformance):
    def wrap(self, module, devices):
        return TupleParallel(module, devices)

    def output(self, wrapper, x):
        parts = wrapper(tuple(x.tensor_split(2)))
        return torch.cat(parts)


class TestTwice(BackendConformance):
    backend = TupleBackend
    devices = (GPU, GPU)


class TestBesideTheCpu(BackendConformance):
    backend = TupleBackend
    devices = (GPU, "cpu")
