"""Replicas on an accelerator, alone, twice, and beside the CPU."""

import gc
import warnings

import pytest
import torch
from torch import nn
from tp_core import recursive_to
from tp_core.replicas import Replicas

from tests.accelerator import GPU, needs_cuda, on_a_card

BESIDE_THE_CPU, TWICE = [GPU, "cpu"], [GPU, GPU]
PAIRS = pytest.mark.parametrize("devices", [BESIDE_THE_CPU, TWICE], ids=["beside the CPU", "twice"])
COPIES = pytest.mark.parametrize("force_copies", [False, True, "flat"], ids=["shared", "copied", "flat"])

pytestmark = pytest.mark.gpu


def move_and_call(replica, part):
    x, device = part
    return replica(recursive_to(x, device, non_blocking=device.type != "cpu"))


def run(replicas, parts):
    """Return the outputs on the first device."""
    outputs = replicas.run(move_and_call, list(zip(parts, replicas.devices, strict=True)))
    return torch.cat([y.to(replicas.devices[0]) for y in outputs])


def make(seed=0):
    torch.manual_seed(seed)
    layers = nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(4)
    model = nn.Sequential(*layers)
    model(torch.zeros(1, 3, 8, 8))
    return model.double().to(GPU)


def gradients(model, output):
    return torch.autograd.grad(output.square().mean(), list(model.parameters()))


@PAIRS
@COPIES
def test_output_and_gradients_are_those_of_the_whole_batch(devices, force_copies):
    model, x = make(), torch.randn(7, 3, 8, 8, dtype=torch.double, device=GPU)
    output = run(Replicas(model, devices, force_copies=force_copies), x.tensor_split(2))
    expected = model(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(model, output), gradients(model, expected))


@PAIRS
@COPIES
def test_optimizer_steps_reach_every_replica(devices, force_copies):
    model, alone = make(), make()
    replicas = Replicas(model, devices, force_copies=force_copies)
    x = torch.randn(6, 3, 8, 8, dtype=torch.double, device=GPU)
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (model, alone)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        run(replicas, x.tensor_split(2)).square().mean().backward()
        alone(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-6, atol=1e-7)


@PAIRS
@COPIES
@pytest.mark.parametrize("second", [torch.channels_last, torch.contiguous_format], ids=str)
def test_gradients_have_the_layout_of_their_parameters(devices, force_copies, second):
    model = nn.Sequential(nn.Conv2d(4, 8, 2), nn.Conv2d(8, 4, 2)).to(GPU)
    formats = [torch.channels_last, second]
    for layer, memory_format in zip(model, formats, strict=True):
        layer.to(memory_format=memory_format)
    x = torch.randn(4, 4, 6, 6, device=GPU)
    run(Replicas(model, devices, force_copies=force_copies), x.tensor_split(2)).sum().backward()
    for layer, memory_format in zip(model, formats, strict=True):
        assert layer.weight.grad.is_contiguous(memory_format=memory_format)


# torch says so where the graph of a step in another stream is still there, as that of the call before is.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@PAIRS
@COPIES
def test_a_step_in_the_callers_side_stream_sees_what_was_written_there(devices, force_copies):
    model = nn.Linear(256, 256, bias=False, dtype=torch.double).to(GPU)
    replicas = Replicas(model, devices, force_copies=force_copies)
    size = on_a_card(2048, 64)
    square = torch.full((size, size), 1 / size, dtype=torch.double, device=GPU)
    run(replicas, [torch.zeros(1, 256, dtype=torch.double, device=GPU)] * 2)
    torch.accelerator.synchronize()
    side = torch.Stream(device=GPU)
    for step in range(20):
        model.zero_grad()
        with side:
            busy = square
            for _ in range(20):  # what is written after it comes late
                busy = busy @ square
            x = torch.full((4, 256), float(step), dtype=torch.double, device=GPU) * busy.sum() / size
            run(replicas, x.tensor_split(2)).sum().backward()
        side.synchronize()
        expected = torch.full_like(model.weight, 4.0 * step)
        torch.testing.assert_close(model.weight.grad, expected)


@PAIRS
@COPIES
def test_a_step_leaves_no_memory_behind_without_the_garbage_collector(devices, force_copies):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(GPU)
    replicas = Replicas(model, devices, force_copies=force_copies)
    gc.collect()
    gc.disable()
    try:
        held = []
        for _ in range(5):
            x = torch.randn(64, 512, device=GPU)
            run(replicas, x.tensor_split(2)).square().mean().backward()
            model.zero_grad()
            del x
            held.append(torch.accelerator.memory_allocated(GPU))
    finally:
        gc.enable()
    assert held[2] == held[3] == held[4]


@COPIES
def test_recurrent_layers_stay_in_one_piece_after_a_change_of_type(force_copies):
    lstm = nn.LSTM(16, 16, 2, batch_first=True).to(GPU)
    replicas = Replicas(lstm, TWICE, force_copies=force_copies)

    def outputs(dtype):
        x = torch.randn(4, 3, 16, device=GPU, dtype=dtype)
        return replicas.run(lambda replica, part: replica(part)[0], x.tensor_split(2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs(torch.float)
        lstm.half()
        assert outputs(torch.half)[1].dtype == torch.half


@PAIRS
def test_one_seed_gives_one_dropout(devices):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(GPU)
    replicas = Replicas(model, devices)
    x = torch.ones(8, 64, device=GPU)
    found = []
    for _ in range(3):
        torch.manual_seed(5)
        found.append(run(replicas, x.tensor_split(2)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0][:4] == 0, found[0][4:] == 0)


@PAIRS
def test_autocast_holds_in_every_replica(devices):
    replicas = Replicas(nn.Linear(8, 8).to(GPU), devices)
    parts = torch.ones(4, 8, device=GPU).tensor_split(2)
    with torch.autocast(torch.device(GPU).type, dtype=torch.bfloat16):
        outputs = replicas.run(move_and_call, list(zip(parts, replicas.devices, strict=True)))
    assert outputs[0].dtype == torch.bfloat16


@needs_cuda
@COPIES
def test_a_wrapper_goes_through_torch_compile(force_copies):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(GPU)
    replicas = Replicas(model, TWICE, force_copies=force_copies)
    x = torch.randn(4, 8, device=GPU)
    compiled = torch.compile(lambda x: run(replicas, x.tensor_split(2)), backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


@needs_cuda
def test_one_device_can_be_captured_in_a_graph():
    model = nn.Linear(8, 8).to(GPU)
    replicas = Replicas(model, [GPU])
    x = torch.ones(2, 8, device=GPU)
    with torch.no_grad():
        for _ in range(3):
            replicas.run(lambda replica, part: replica(part), [x])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (y,) = replicas.run(lambda replica, part: replica(part), [x])
        x.fill_(2.0)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(y, model(torch.full_like(x, 2.0)))


def test_statistics_of_batch_norm_are_those_of_the_first_part():
    model = nn.BatchNorm1d(8).to(GPU)
    replicas = Replicas(model, BESIDE_THE_CPU)
    x = torch.randn(8, 8, device=GPU)
    run(replicas, x.tensor_split(2))
    expected = nn.BatchNorm1d(8).to(GPU)
    expected(x[:4])
    torch.testing.assert_close(model.running_mean, expected.running_mean)
    model.eval()
    torch.testing.assert_close(run(replicas, x.tensor_split(2)), model(x))


def test_parameters_beyond_one_bucket_arrive_whole():
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(3)]).to(GPU)  # 16 MiB each
    model.append(nn.Linear(2048, 1)).to(GPU)
    replicas = Replicas(model, TWICE, force_copies="flat")
    x = torch.randn(4, 2048, device=GPU)
    torch.testing.assert_close(run(replicas, x.tensor_split(2)), model(x), rtol=1e-4, atol=1e-5)
