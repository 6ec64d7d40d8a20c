"""Modules that keep more than parameters, on a GPU and beside one."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_core.errors import ModelError
from tp_core.replicas import Replicas

from tests.accelerator import COUNT, GPU, SECOND

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("change", ["half", "double"])
def test_recurrent_weights_stay_in_one_piece_when_their_dtype_changes(change):
    model = nn.LSTM(16, 32, num_layers=2).to(GPU)
    replicas = Replicas(model, [GPU, GPU], force_copies=True)
    x = torch.randn(5, 4, 16, device=GPU)

    def outputs():
        dtype = next(model.parameters()).dtype
        return replicas.run(lambda r, p: r(p)[0], [x.to(dtype), x.to(dtype)])

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # cuDNN's, of weights that are not in a single chunk
        outputs()
        getattr(model, change)()
        for _ in range(2):
            found = outputs()
    torch.testing.assert_close(found[1], model(x.to(found[1].dtype))[0])


class Rotary(nn.Module):
    """Builds a table in its first forward and keeps it as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table = None

    def forward(self, x):
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)[:, None]
        return self.layer(x) * self.table[: x.shape[0]]


@pytest.mark.parametrize("second", ["cpu", SECOND])
def test_a_table_that_the_first_forward_builds_is_on_every_device(second):
    if second == SECOND and COUNT < 2:
        pytest.skip("needs two accelerators")
    devices = [GPU, second]
    model = Rotary().to(GPU)
    replicas = Replicas(model, devices)
    for rows in (2, 2, 4):
        parts = [torch.ones(rows, 8, device=d) for d in devices]
        outputs = replicas.run(lambda r, p: r(p), parts)
        torch.testing.assert_close(outputs[1].to(GPU), model(parts[0]))


@pytest.mark.parametrize("second", ["cpu", GPU])
def test_dropout_on_a_gpu_follows_from_the_seed(second):
    model = nn.Dropout(0.5)
    devices = [GPU, second]
    replicas = Replicas(model, devices)

    def draw():
        torch.manual_seed(0)
        return replicas.run(lambda r, p: r(p), [torch.ones(999, device=d) for d in devices])

    first, again = draw(), draw()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1].to(GPU))


def draw_in_checkpoints(devices, forward):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).to(GPU)
    replicas = Replicas(model, devices)
    outputs = replicas.run(forward, [torch.ones(4, 16, device=d) for d in devices])
    torch.cat([y.to(GPU) for y in outputs]).square().sum().backward()
    return [p.grad for p in model.parameters()]


def plain(replica, x):
    return replica(x)


def checkpointed(replica, x):
    return checkpoint(replica, x, use_reentrant=False)


def test_draws_in_checkpoints_of_replicas_on_one_gpu_are_refused():
    with pytest.raises(ModelError, match=f"on '{GPU}', whose generator several replicas share"):
        draw_in_checkpoints([GPU, GPU], checkpointed)


def test_checkpoints_of_a_replica_alone_on_its_gpu_draw_in_backward_what_they_drew_in_forward():
    devices = [GPU, "cpu"]

    def on_the_gpu_alone(replica, x):
        return checkpointed(replica, x) if x.device.type != "cpu" else replica(x)

    expected = draw_in_checkpoints(devices, plain)
    torch.testing.assert_close(draw_in_checkpoints(devices, on_the_gpu_alone), expected)
