"""Replicas draw independent numbers that follow from the caller's seed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from tp_core.replicas import Replicas

ONES = torch.ones(2, 200)


def drawn(replicas, draw, seed=0, calls=2):
    torch.manual_seed(seed)
    return [replicas.run(lambda r, part: draw(r), [0, 1, 2]) for _ in range(calls)]


@pytest.fixture
def replicas():
    return Replicas(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), ["cpu"] * 3)


LSTM = nn.LSTM(4, 6, num_layers=2, dropout=0.5)
ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5)

DRAWS = {
    "a module": lambda r: r(ONES),
    "F.dropout": lambda r: F.dropout(ONES),
    "rand": lambda r: torch.rand(5),
    "a method": lambda r: torch.empty(5).normal_(),
    "lstm": lambda r: LSTM(ONES[:, None, :4])[0],
    "attention": lambda r: ATTENTION(*[ONES[:, :4]] * 3)[0],
    "sdpa": lambda r: F.scaled_dot_product_attention(*[ONES[None, :, :4]] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_one_seed_gives_one_run_and_each_replica_its_own_numbers(replicas, name):
    first, again = (drawn(replicas, DRAWS[name]) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert all(map(torch.equal, a, b))
    flat = [y for outputs in first for y in outputs]
    if name not in {"attention", "sdpa", "lstm"}:  # few units: equal masks can happen
        assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
    assert not all(torch.equal(flat[0], y) for y in flat)
    other = drawn(replicas, DRAWS[name], seed=1)
    assert not all(map(torch.equal, first[0] + first[1], other[0] + other[1]))


def test_replica_0_draws_what_the_module_by_itself_draws(replicas):
    found = drawn(replicas, DRAWS["a module"])
    torch.manual_seed(0)
    assert torch.equal(found[0][0], replicas.module(ONES))
    assert torch.equal(found[1][0], replicas.module(ONES))


def test_numbers_differ_between_calls_where_replica_0_draws_none(replicas):
    torch.manual_seed(0)
    draw = lambda r, part: torch.rand(3) if part else None  # noqa: E731
    first, second = (replicas.run(draw, [0, 1])[1] for _ in range(2))
    assert not torch.equal(first, second)


def test_calls_that_draw_nothing_leave_the_generator_alone(replicas):
    before = torch.get_rng_state()
    replicas.run(lambda r, part: ONES + part, [0, 1, 2])
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_of_the_users_own_is_used_as_it_is(replicas):
    def draw(replica, part):
        return torch.rand(3, generator=torch.Generator().manual_seed(5))

    first, second = replicas.run(draw, [0, 1])
    assert torch.equal(first, second)


def test_training_with_dropout_is_reproducible():
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 1))
        replicas = Replicas(model, ["cpu"] * 3, force_copies=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.randn(3, 4, 6)
            torch.stack(replicas.run(lambda r, p: r(p).square().mean(), x)).sum().backward()
            optimizer.step()
        return model.state_dict()

    torch.testing.assert_close(dict(train()), dict(train()), rtol=0, atol=0)
