"""Sharded layers on an accelerator: one rank, and two ranks, of which each has a card if there are two."""

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from tp_core import LaunchEnvironment
from tp_shard.nn.functional import (
    parallel_cross_entropy,
    parallel_margin_cross_entropy,
    sample_classes,
)
from tp_testing import run_ranks

from tests.accelerator import COLLECTIVES, GPU, group_of_two

pytestmark = pytest.mark.gpu


def join(process_group, device):
    torch.accelerator.set_device_index(torch.device(device))
    dist.init_process_group(process_group)
    ts.distributed.init_process_group()


def leave():
    ts.distributed.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def layers_equal_torchs_own(process_group, device):
    join(process_group, device)
    torch.manual_seed(0)
    x = torch.randn(4, 8, device=device, dtype=torch.double)
    for dim in (None, 0, 1):
        torch.manual_seed(3)
        plain = nn.Linear(8, 6, device=device, dtype=torch.double)
        torch.manual_seed(3)
        layer = ts.nn.ParallelLinear(8, 6, dim=dim, gather_output=True, device=device, dtype=torch.double)
        expected = plain(x)
        torch.testing.assert_close(layer(x), expected)
        layer(x).square().sum().backward()
        expected.square().sum().backward()
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        whole = ts.collect_state_dict(layer, gradients)
        torch.testing.assert_close(whole["weight"], plain.weight.grad)
        norm = ts.clip_grad_norm_(layer, 1.0)
        assert norm.device == torch.device(device)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
        state = ts.collect_state_dict(layer, layer.state_dict(), to="rank0")
        if dist.get_rank() == 0:
            assert state["weight"].device.type == "cpu"
            torch.testing.assert_close(state["weight"], plain.weight.cpu())
    leave()


def split_features_drop_apart_and_whole_ones_alike(process_group, device):
    join(process_group, device)
    model = nn.Sequential(nn.Linear(8, 65), nn.Dropout(0.5), nn.Linear(65, 8), nn.Dropout(0.5)).to(device)
    ts.parallelize(model, {"0": ts.Column(), "2": ts.Row()})
    x = torch.ones(4, 8, device=device, requires_grad=True)
    torch.manual_seed(3)
    for _ in range(2):
        model(x).sum().backward()
    numbers = torch.cat([x.grad.flatten(), torch.rand(3, device=device), torch.rand(3).to(device)])
    everyones = ts.distributed.gather(numbers.unsqueeze(0), 0)
    assert torch.equal(everyones, everyones[:1].expand_as(everyones))
    leave()


def the_embedding_equals_torchs_own(process_group, device):
    join(process_group, device)
    torch.manual_seed(3)
    plain = nn.Embedding(12, 4, device=device)
    torch.manual_seed(3)
    table = ts.nn.ParallelEmbedding(12, 4, dim=0, device=device)
    index = torch.tensor([0, 11, 5, 5], device=device)
    torch.testing.assert_close(table(index), plain(index))
    leave()


def the_loss_equals_torchs_own(process_group, device):
    join(process_group, device)
    torch.manual_seed(0)
    full = torch.randn(16, 10, device=device, dtype=torch.double)
    target = torch.randint(0, 10, (16,), device=device)
    expected_of = full.clone().requires_grad_()
    expected = F.cross_entropy(expected_of, target, label_smoothing=0.1)
    expected.backward()
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = full.tensor_split(size, dim=1)[rank].clone().requires_grad_()
    found = parallel_cross_entropy(mine, target, label_smoothing=0.1, parallel=True)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.grad, expected_of.grad.tensor_split(size, dim=1)[rank])
    leave()


def the_loss_with_margins_equals_a_dense_one(process_group, device):
    join(process_group, device)
    torch.manual_seed(0)
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(16, 5, device=device, dtype=torch.double)
    centers = torch.randn(11, 5, device=device, dtype=torch.double)
    target = torch.randint(0, 11, (16,), device=device)
    for is_sampled in (False, True):
        features, whole = x.clone().requires_grad_(), centers.clone().requires_grad_()
        cosine = F.linear(F.normalize(features), F.normalize(whole))
        is_target = F.one_hot(target, 11).bool()
        logits = 64 * torch.where(is_target, (cosine.acos() + 0.5).cos(), cosine)
        sampled = None
        if is_sampled:
            sampled = sample_classes(11, 0.4, seed=1, device=device)
            takes_part = is_target.any(0)
            begin = sum(t.size(0) for t in centers.tensor_split(size)[:rank])
            drawn = torch.zeros(11, device=device).index_fill_(0, sampled + begin, 1.0)
            dist.all_reduce(drawn)
            logits = logits.masked_fill(~(takes_part | (drawn > 0)), float("-inf"))
        expected = F.cross_entropy(logits, target)
        expected.backward()
        mine = [x.clone().requires_grad_(), centers.tensor_split(size)[rank].clone().requires_grad_()]
        found = parallel_margin_cross_entropy(*mine, target, num_classes=11, sampled=sampled)
        found.backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(mine[0].grad, features.grad)
        torch.testing.assert_close(mine[1].grad, whole.grad.tensor_split(size)[rank])
    leave()


CHECKS = pytest.mark.parametrize(
    "check",
    [
        layers_equal_torchs_own,
        the_embedding_equals_torchs_own,
        the_loss_equals_torchs_own,
        the_loss_with_margins_equals_a_dense_one,
        split_features_drop_apart_and_whole_ones_alike,
    ],
    ids=["layers", "embedding", "loss", "margins", "dropout"],
)


def on_each_rank(check, process_group, devices):
    check(process_group, devices[LaunchEnvironment.read().rank])


@CHECKS
@pytest.mark.timeout(120)
def test_one_rank(check):
    run_ranks(on_each_rank, 1, check, COLLECTIVES, (GPU,), timeout_s=90)


@CHECKS
@pytest.mark.timeout(120)
def test_two_ranks(check):
    run_ranks(on_each_rank, 2, check, *group_of_two(), timeout_s=90)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_loss_without_ranks_equals_torchs(inplace):
    full = torch.randn(64, 1001, device=GPU)
    target = torch.randint(0, 1001, (64,), device=GPU)
    a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected = F.cross_entropy(a, target, label_smoothing=0.1)
    got = parallel_cross_entropy(b * 1, target, label_smoothing=0.1, parallel=True, inplace=inplace)
    torch.testing.assert_close(got, expected)
    expected.backward()
    got.backward()
    torch.testing.assert_close(b.grad, a.grad)
