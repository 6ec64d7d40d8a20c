"""Replicas draw independent numbers that follow from the caller's seed."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tp_core.errors import ModelError
from tp_core.replicas import Replicas, is_random_op
from tp_core.replicas._random import HiddenGenerator

from tests.installed import needs_failed_checkpoints_to_end

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


def test_a_device_that_shows_no_generator_has_the_same_numbers(monkeypatch):
    """As on an accelerator whose module in torch has functions for the state alone."""

    def outputs():
        return drawn(Replicas(nn.Dropout(0.5), ["cpu"] * 3), lambda r: r(ONES))

    expected = outputs()
    monkeypatch.setattr("tp_core.replicas._random._generator", HiddenGenerator)
    for before, now in zip(expected, outputs(), strict=True):
        assert all(map(torch.equal, before, now))


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


def test_dropout_at_a_rate_of_0_leaves_the_generator_alone():
    before = torch.get_rng_state()
    Replicas(nn.Dropout(0.0), ["cpu"] * 3).run(lambda r, part: r(ONES), [0, 1, 2])
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


LAYER = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))


class OwnFunction(torch.autograd.Function):
    """Stands for another library's checkpoint: a function whose forward may run again in backward."""

    @staticmethod
    def forward(ctx, x):
        return F.dropout(x, 0.5)


def twice(x):
    """Layers in a checkpoint within a checkpoint, with hooks of the program's own between them."""
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(LAYER, x, use_reentrant=True)


CHECKPOINTS = {
    "not reentrant": lambda x: checkpoint(LAYER, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(LAYER, x, use_reentrant=True),
    "nested": lambda x: checkpoint(twice, x, use_reentrant=False),
    "without gradients inside": lambda x: checkpoint(torch.no_grad()(LAYER), x, use_reentrant=False),
    "another library's": OwnFunction.apply,
}


def inputs():
    return [torch.ones(4, 6, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("drawing", [0, 2])
@pytest.mark.parametrize(
    "name",
    [
        "reentrant",
        "another library's",
        pytest.param("not reentrant", marks=needs_failed_checkpoints_to_end),
        pytest.param("nested", marks=needs_failed_checkpoints_to_end),
        pytest.param("without gradients inside", marks=needs_failed_checkpoints_to_end),
    ],
)
def test_draws_in_a_checkpoint_over_a_shared_generator_are_refused(replicas, name, drawing):
    def call(replica, numbered):
        number, x = numbered
        return CHECKPOINTS[name](x) if number == drawing else F.dropout(x, 0.5)

    before = torch.get_rng_state()
    words = (
        r"within an activation checkpoint .* 'cpu', whose generator .* give each replica a device of its own"
    )
    with pytest.raises(ModelError, match=words) as caught:
        replicas.run(call, list(enumerate(inputs())))
    assert caught.value.__notes__[-1] == f"in part {drawing} of 3, on device cpu"
    torch.set_rng_state(before)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_that_draw_nothing_or_beside_draws_are_right(is_reentrant):
    def gradients(run):
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        replicas = Replicas(model, ["cpu"] * 3)
        outputs = replicas.run(lambda r, x: F.dropout(run(r, F.dropout(x, 0.5)), 0.25), inputs())
        torch.stack(outputs).square().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(lambda replica, x: replica(x))
    found = gradients(lambda replica, x: checkpoint(replica, x, use_reentrant=is_reentrant))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_around_the_whole_call_computes_again_what_it_computed(is_reentrant, dropout):
    def gradients(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6))
        replicas = Replicas(model, ["cpu"] * 3)
        whole = lambda x: torch.stack(replicas.run(lambda r, part: r(part), x.chunk(3)))  # noqa: E731
        run(whole, torch.arange(36.0).view(6, 6).requires_grad_() / 36).square().sum().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(lambda whole, x: whole(x))
    found = gradients(lambda whole, x: checkpoint(whole, x, use_reentrant=is_reentrant))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("dropout", [nn.Dropout(0.0), nn.Dropout(0.5).eval()], ids=["rate 0", "evaluation"])
def test_dropout_that_drops_nothing_may_be_in_a_checkpoint(replicas, dropout, is_reentrant):
    outputs = replicas.run(lambda r, x: checkpoint(dropout, x, use_reentrant=is_reentrant), inputs())
    assert torch.equal(torch.stack(outputs), torch.ones(3, 4, 6))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_draws_without_gradients_are_not_refused(replicas, mode):
    with mode():
        assert len(replicas.run(lambda r, x: CHECKPOINTS["reentrant"](x), inputs())) == 3

    def call(replica, x):
        with mode():
            noise = torch.rand(6)
        return x + noise

    assert len(replicas.run(call, inputs())) == 3


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
