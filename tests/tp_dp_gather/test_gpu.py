"""DataParallel and its backend on an accelerator, alone, twice, and beside the CPU."""

import pytest
import torch
from torch import nn
from tp_dp_gather import DataParallel, gather, parallel_apply, replicate, scatter
from tp_testing import BackendConformance, GpuWrapperConformance

from tests.accelerator import GPU
from tests.installed import backend_class

GatherBackend = backend_class("dp-gather")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("source", [GPU, "cpu"], ids=["input on the card", "input on the host"])
def test_output_and_gradients_are_those_of_the_module_by_itself(gpu_devices, source):
    model = nn.Linear(5, 2).to(GPU)
    x = torch.randn(7, 5, device=source)
    expected = torch.autograd.grad(model(x.to(GPU)).square().mean(), list(model.parameters()))
    output = DataParallel(model, gpu_devices)(x)
    torch.testing.assert_close(output, model(x.to(GPU)))
    output.square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


def test_outputs_may_come_together_on_the_host(gpu_devices):
    model = nn.Linear(5, 2).to(GPU)
    x = torch.randn(7, 5, device=GPU)
    output = DataParallel(model, gpu_devices, output_device="cpu")(x)
    assert output.device.type == "cpu"
    torch.testing.assert_close(output, model(x).cpu())


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 5.0, 0.5])], ids=["even", "weighted"])
def test_the_criterion_in_parts_is_the_criterion_of_the_whole(gpu_devices, weight):
    model = nn.Linear(5, 3).to(GPU)
    x, target = torch.randn(7, 5, device=GPU), torch.tensor([0, 2, 1, -100, 2, 2, 1], device=GPU)
    criterion = nn.CrossEntropyLoss(weight).to(GPU)
    net = DataParallel(model, gpu_devices, gather_to_one_device=False)
    loss = net.apply_loss(criterion, net(x), target)
    torch.testing.assert_close(loss, criterion(model(x), target))
    gradients = torch.autograd.grad(criterion(model(x), target), list(model.parameters()))
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients))


def test_the_steps_one_by_one_are_those_of_the_wrapper(gpu_devices):
    model = nn.Linear(5, 2).to(GPU)
    x = torch.randn(8, 5, device=GPU)
    pieces = scatter(x, gpu_devices)
    assert [p.device for p in pieces] == [torch.device(d) for d in gpu_devices]
    outputs = parallel_apply(replicate(model, gpu_devices), pieces, devices=gpu_devices)
    torch.testing.assert_close(gather(outputs, GPU), model(x))


def test_an_overridden_replicate_is_heeded():
    class Numbered(DataParallel):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            for i, replica in enumerate(replicas):
                replica.number = i
            return replicas

    class Tells(nn.Module):
        def forward(self, x):
            return x + self.number

    assert Numbered(Tells(), [GPU, "cpu"])(torch.zeros(4, device=GPU)).tolist() == [0, 0, 1, 1]


class TestWrapper(GpuWrapperConformance):
    def wrap(self, module, devices):
        return DataParallel(module, devices)

    def output(self, wrapper, x):
        return wrapper(x)


class TestTwice(BackendConformance):
    backend = GatherBackend
    devices = (GPU, GPU)
