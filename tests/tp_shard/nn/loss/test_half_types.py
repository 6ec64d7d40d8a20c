"""Losses of half types are computed in float32, and small float16 gradients survive under a loss scale."""

import pytest
import torch
import tp_shard as ts
from torch.nn import functional as F

from tests.tp_shard.on_each_rank import own

d = ts.distributed
parallel_cross_entropy = ts.nn.functional.parallel_cross_entropy
fused = ts.nn.functional.parallel_linear_cross_entropy


def half_types_are_computed_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        logits = (torch.randn(6, 300) * 20).to(dtype)
        logits[0, 0] = 20000.0  # its exponential overflows in any type
        target = torch.randint(0, 300, (6,))
        full = logits.float().requires_grad_()
        expected = F.cross_entropy(full, target, label_smoothing=0.1)
        expected.backward()
        for inplace in (False, True):
            mine = own(logits).clone().requires_grad_()
            got = parallel_cross_entropy(
                mine * 1, target, label_smoothing=0.1, num_classes=300, parallel=True, inplace=inplace
            )
            got.backward()
            assert got.dtype == mine.grad.dtype == dtype
            torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(mine.grad.float(), own(full.grad), rtol=1e-2, atol=1e-3)


def autocast_returns_float32_and_trains_the_float32_head():
    x, w = torch.randn(8, 16), torch.randn(33, 16) * 0.3
    target = torch.randint(0, 33, (8,))
    full = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(*full), target)
    expected.backward()
    for together in (True, False):
        a, b = x.clone().requires_grad_(), own(w, 0).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if together:
                got = fused(a, b, target, num_classes=33, chunk_rows=3)
            else:
                logits = ts.nn.functional.parallel_linear(a, b, None, -1, out_features=33)
                got = parallel_cross_entropy(logits, target)
        got.backward()
        assert got.dtype == a.grad.dtype == b.grad.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(a.grad, full[0].grad, rtol=5e-2, atol=5e-3)
        torch.testing.assert_close(b.grad, own(full[1].grad, 0), rtol=5e-2, atol=5e-3)


def small_float16_gradients_survive_under_a_loss_scale():
    scale, classes = 65536.0, 4000
    x, w = torch.randn(256, 16) * 0.3, torch.randn(classes, 16) * 0.3
    target = torch.randint(0, classes, (256,))
    features, centers = x.double().requires_grad_(), w.double().requires_grad_()
    F.cross_entropy(features @ centers.t(), target).backward()
    # Centers without a target in the batch have gradients that are less than float16 can tell from 0.
    rare = torch.ones(classes, dtype=torch.bool)
    rare[target] = False
    expected = own(torch.where(rare.unsqueeze(1), centers.grad, 0), 0)
    for reduction, rows in (("mean", None), ("mean", 100), ("none", 100)):
        a, b = x.clone().requires_grad_(), own(w, 0).clone().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            loss = fused(a, b, target, num_classes=classes, reduction=reduction, chunk_rows=rows)
        (loss.mean() * scale).backward()
        got = torch.where(own(rare, 0).unsqueeze(1), b.grad.double() / scale, 0)
        assert (got - expected).norm() < 2e-3 * expected.norm()
        assert (a.grad.double() / scale - features.grad).norm() < 2e-3 * features.grad.norm()


CHECKS = [
    half_types_are_computed_in_float32,
    autocast_returns_float32_and_trains_the_float32_head,
    small_float16_gradients_survive_under_a_loss_scale,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    check()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)
