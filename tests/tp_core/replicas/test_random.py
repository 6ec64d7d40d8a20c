"""Replicas draw independent numbers that follow from the caller's seed."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tp_core.errors import ModelError
from tp_core.internal import is_random_op
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
    "gamma": lambda r: torch.distributions.Gamma(ONES[0, :9], ONES[0, :9]).sample(),
    "dirichlet": lambda r: torch.distributions.Dirichlet(ONES[0, :9]).sample(),
    "poisson": lambda r: torch.distributions.Poisson(9 * ONES[0, :99]).sample(),
    "an operator": lambda r: torch.ops.aten.bernoulli(ONES * 0.5),
    "an overload of an operator": lambda r: torch.ops.aten.native_dropout.default(ONES, 0.5, True)[0],
    "rrelu": lambda r: F.rrelu(-ONES, training=True),
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


NEVER = {
    "_cudnn_attention_forward",  # an operator, which says so itself
    "_cudnn_attention_forward_no_dropout_inplace",  # has no dropout
    "_fused_sdp_choice",  # only says which kernel it would be
    "_nested_tensor_softmax_with_shape",  # is marked, and is_random_op nothing
    "random",  # a module in torch's namespace
}


def tagged_names():
    """Return the names of all operators of which torch says that they draw."""
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        operator = getattr(packet, overload or "default", None)
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            yield name


def test_every_function_that_draws_is_known():
    homes = (torch, torch.Tensor, F, torch._C._nn, torch.special)
    found = {(name, h): getattr(h, name) for name in tagged_names() for h in homes if hasattr(h, name)}
    assert len(found) > 50
    rate = {"dropout_p": 0.5}
    unknown = [name for (name, _), function in found.items() if not is_random_op(function, (), rate)]
    assert set(unknown) <= NEVER


class Deep(nn.Module):
    """Layers with dropout, each of them within a checkpoint, or not."""

    def __init__(self, how):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
        self.how = how

    def forward(self, x):
        if self.how == "nested":
            return checkpoint(self.in_pairs, x, use_reentrant=False)
        for layer in self.layers:
            x = (
                layer(x)
                if self.how == "plain"
                else checkpoint(layer, x, use_reentrant=self.how == "reentrant")
            )
        return x

    def in_pairs(self, x):
        for i in (0, 2):
            x = checkpoint(nn.Sequential(*self.layers[i : i + 2]), x, use_reentrant=False)
        return nn.functional.dropout(x, 0.25)


def gradients(how, force_copies):
    torch.manual_seed(0)
    model = Deep(how)
    replicas = Replicas(model, ["cpu"] * 3, force_copies=force_copies)
    x = torch.randn(3, 4, 6)
    for _ in range(2):
        outputs = torch.stack(replicas.run(lambda r, p: r(p.clone().requires_grad_()), x))
        outputs.square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("how", "force_copies"), [("not reentrant", False), ("reentrant", True)])
def test_checkpoints_draw_in_backward_what_they_drew_in_forward(how, force_copies):
    expected = gradients("plain", force_copies)
    for _ in range(10):
        torch.testing.assert_close(gradients(how, force_copies), expected)


def test_checkpoints_within_checkpoints_do_so_too():
    class Twice(Deep):
        """The same layers and numbers without the checkpoints."""

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return nn.functional.dropout(x, 0.25)

    def run(make):
        torch.manual_seed(0)
        model = make("nested")
        x = torch.randn(3, 4, 6)
        replicas = Replicas(model, ["cpu"] * 3)
        torch.stack(replicas.run(lambda r, p: r(p), x)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(run(Deep), run(Twice))


def test_a_checkpoint_that_keeps_no_state_is_left_alone():
    layer = nn.Dropout(0.5)
    replicas = Replicas(layer, ["cpu"] * 2)
    x = torch.ones(4, 6, requires_grad=True)
    outputs = replicas.run(
        lambda r, p: checkpoint(r, x, use_reentrant=False, preserve_rng_state=False), [0, 1]
    )
    torch.cat(outputs).sum().backward()


# torch 2.11 cannot close a checkpoint that failed half-way: its own generator raises as it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_whose_state_is_not_found_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.get_rng_state", lambda: None)
    monkeypatch.setattr("torch.random.get_rng_state", lambda: None)
    replicas = Replicas(nn.Dropout(0.5), ["cpu"] * 2)
    x = torch.ones(4, 6, requires_grad=True)
    with pytest.raises(ModelError, match="does not keep a checkpoint's random state in 'fwd_cpu_state'"):
        replicas.run(lambda r, p: checkpoint(r, x, use_reentrant=False), [0, 1])


@pytest.mark.slow
def test_what_a_replica_draws_while_another_one_is_compiled_is_not_drawn_again():
    """The compiler puts the generators back to where they were when it began."""
    began = threading.Event()

    def backend(graph, inputs):
        began.set()
        time.sleep(0.3)  # meanwhile replica 0 would draw
        return graph

    @torch.compile(backend=backend)
    def compiled(x):
        return 2 * x

    def call(replica, part):
        if part == 1:
            return compiled(ONES)
        assert began.wait(800)
        return torch.rand(5)

    first = Replicas(nn.Identity(), ["cpu"] * 2).run(call, [0, 1])[0]
    assert not torch.equal(first, torch.rand(5))
