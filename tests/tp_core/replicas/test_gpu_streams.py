"""What is computed on streams of a GPU is computed in order, whoever's thread and stream it is."""

import copy

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas

# private: which device draws in order cannot be seen
from tp_core.replicas._random import SerializedRng, Streams

from tests.accelerator import COUNT, GPU, SECOND, keep_busy, needs_cuda

pytestmark = pytest.mark.gpu

PAIRS = [[GPU, "cpu"], [GPU, GPU], [GPU, SECOND]]


@pytest.fixture(params=PAIRS, ids=["+".join(p) for p in PAIRS])
def devices(request):
    if SECOND in request.param and COUNT < 2:
        pytest.skip("needs two accelerators")
    return request.param


def move_and_call(replica, part):
    x, device = part
    return replica(x.to(device, non_blocking=device != "cpu"))


def train_on_a_side_stream(model, forward, *, steps):
    """Train on inputs that are written late, on a side stream, and return all gradients."""
    side, found = torch.Stream(device=GPU), []
    x = torch.zeros(8, 64, device=GPU)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for step in range(steps):
            x.zero_()
            keep_busy()
            x.copy_(torch.full((8, 64), 1.0 + step))
            model.zero_grad()
            forward(x).backward()
            found.append([p.grad.clone() for p in model.parameters()])
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
    torch.accelerator.synchronize()
    return found


# torch says so of any parameter that goes to another device in a side stream, in `p.to(device)`, too.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("force_copies", [False, True])
def test_a_step_on_a_side_stream_waits_for_its_input_and_its_gradients(devices, force_copies):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(GPU)
    plain = copy.deepcopy(model)
    replicas = Replicas(model, devices, force_copies=force_copies)

    def forward(x):
        outputs = replicas.run(move_and_call, list(zip(x.split([5, 3]), devices, strict=True)))
        return torch.cat([y.to(GPU) for y in outputs]).square().mean()

    found = train_on_a_side_stream(model, forward, steps=5)
    expected = train_on_a_side_stream(plain, lambda x: plain(x).square().mean(), steps=5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_no_replica_waits_for_a_turn_to_draw_whose_generator_is_its_own():
    home, cpu = torch.device(GPU), torch.device("cpu")
    streams = Streams((home, cpu))
    assert not isinstance(streams.of(0), SerializedRng)
    assert isinstance(streams.of(1), SerializedRng)
    assert isinstance(Streams((home, home)).of(0), SerializedRng)


@needs_cuda
@pytest.mark.parametrize("force_copies", [False, True])
def test_a_call_can_be_captured_in_a_graph(force_copies):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).to(GPU).eval()
    replicas = Replicas(model, [GPU, GPU], force_copies=force_copies)
    x = torch.zeros(4, 16, device=GPU)

    def call():
        with torch.no_grad():
            return torch.cat(replicas.run(lambda r, p: r(p), list(x.split(2))))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads launch, too, and this one waits for them.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        output = call()
    x.copy_(torch.randn(4, 16))
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(output, model(x))


def test_memory_does_not_grow_with_nested_batches(memory):
    model = nn.Linear(256, 256).to(GPU)
    devices = [GPU, GPU]
    replicas = Replicas(model, devices)

    def step():
        batch = {"x": [torch.ones(2**14, 256, device=GPU)]}  # 16 MiB
        replicas.run(lambda r, p: r(p["x"][0]), [batch, batch])[1].sum().backward()
        model.zero_grad()

    with memory.without_collector():
        step()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        step()
        peak = torch.accelerator.max_memory_allocated()
        for _ in range(20):
            step()
        assert torch.accelerator.max_memory_allocated() <= 1.1 * peak
