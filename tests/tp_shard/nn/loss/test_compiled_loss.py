"""Compiled losses over class shards have the numbers of eager ones, the split one in a single graph."""

import warnings

import pytest
import torch
import tp_shard as ts
from torch.nn import functional as F

from tests.tp_shard.on_each_rank import own

d = ts.distributed
parallel_cross_entropy = ts.nn.functional.parallel_cross_entropy
fused = ts.nn.functional.parallel_linear_cross_entropy


def a_compiled_loss_gives_the_same_numbers():
    warnings.simplefilter("ignore")
    x, target = torch.randn(6, 4), torch.randint(0, 11, (6,))
    w = own(torch.randn(11, 4), 0).clone()

    def two(a, b):
        return parallel_cross_entropy(F.linear(a, b) * 1.5, target, num_classes=11, parallel=True, z_loss=0.1)

    def one(a, b):
        return fused(a * 1.5, b, target, num_classes=11, label_smoothing=0.1)

    for function in (two, one):
        results = []
        for call in (function, torch.compile(function, backend="aot_eager")):
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            loss = call(a, b)
            loss.backward()
            results.append((loss.detach(), a.grad, b.grad))
        torch.testing.assert_close(results[1], results[0])


def the_loss_is_one_graph():
    warnings.simplefilter("ignore")
    whole, target = torch.randn(6, 11), torch.tensor([3, -100, 10, 0, 0, 7])
    whole[0, 1] = float("-inf")
    weight = torch.rand(11)
    for options in (
        {},
        {"reduction": "none"},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"weight": weight, "label_smoothing": 0.2},
    ):
        smooth = "label_smoothing" in options
        logits = whole.nan_to_num(neginf=-3.0) if smooth else whole
        full = logits.clone().requires_grad_()
        expected = F.cross_entropy(full, target, **options)
        expected.sum().backward()

        def split(x, options=options):
            return parallel_cross_entropy(
                x, target, **options, num_classes=11, parallel=True, class_dim=-1, inplace=True
            )

        mine = own(logits).clone().requires_grad_()
        got = torch.compile(split, backend="aot_eager", fullgraph=True)(mine)
        got.sum().backward()
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(mine.grad, own(full.grad).contiguous())


def a_wrong_target_is_an_error_in_the_graph_too():
    warnings.simplefilter("ignore")
    mine = own(torch.randn(2, 11)).clone()
    split = torch.compile(
        lambda x, y: parallel_cross_entropy(x, y, num_classes=11, parallel=True),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(RuntimeError, match="a target is none of the classes"):
        split(mine, torch.tensor([1, 11]))


CHECKS = [
    a_compiled_loss_gives_the_same_numbers,
    the_loss_is_one_graph,
    a_wrong_target_is_an_error_in_the_graph_too,
]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    with warnings.catch_warnings():
        check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [CHECKS[0], *(pytest.param(c, marks=pytest.mark.nightly) for c in CHECKS[1:])],
    ids=lambda c: c.__name__,
)
def test_on_two_ranks(on_ranks, check):
    on_ranks(2, check)
