"""Parallel layers equal torch's own: outputs, every gradient, and many optimizer steps."""

import warnings

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from tp_core.errors import ConfigError
from tp_core.tensors import is_sharded

from tests.tp_shard.on_each_rank import own

d = ts.distributed
Linear, Embedding = ts.nn.ParallelLinear, ts.nn.ParallelEmbedding


def close(a, b, **kw):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, **kw)


def a_seeded_layer_holds_its_shard_of_torchs_own():
    for n_in, n_out in [(20, 30), (9, 9), (7, 5)]:
        for dim in (None, 0, 1, -1):
            torch.manual_seed(3)
            plain = nn.Linear(n_in, n_out)
            after = torch.rand(1)
            torch.manual_seed(3)
            layer = Linear(n_in, n_out, dim=dim)
            assert torch.equal(torch.rand(1), after)
            weight = plain.weight if dim is None else own(plain.weight, 1 if dim == 0 else 0)
            bias = plain.bias if dim in (None, 0) else own(plain.bias, 0)
            assert torch.equal(layer.weight, weight)
            assert torch.equal(layer.bias, bias)
            assert layer.weight.untyped_storage().nbytes() == layer.weight.numel() * 4
            assert is_sharded(layer.weight) == (dim is not None and d.get_world_size() > 1)
            assert ts.get_parallel_dim(layer.weight) == dim
            assert ts.get_parallel_dim(layer.bias) == (None if dim == 0 else dim)


def train(plain, layer, x, *, shards, gather_dim=None, steps=20):
    """Take the same steps with both, in float64, and compare everything on the way."""
    plain, layer = plain.double(), layer.double()
    x = x.double() if x.is_floating_point() else x
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, layer)]
    for _ in range(steps):
        x1, x2 = (
            x.clone().requires_grad_(x.is_floating_point()),
            x.clone().requires_grad_(x.is_floating_point()),
        )
        expected, y = plain(x1), layer(x2)
        whole = y if gather_dim is None else d.gather(y, gather_dim)
        close(whole, expected)
        for output in (expected, whole):
            (output.square().mean() + output.sum() * 0.01).backward()
        if x.is_floating_point():
            close(x2.grad, x1.grad)
        for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
            close(a.grad, b.grad if shards.get(name) is None else own(b.grad, shards[name]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), (_, b) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
        close(a.detach(), b.detach() if shards.get(name) is None else own(b.detach(), shards[name]))


def linear_layers_train_like_torchs_own():
    for n_in, n_out, bias in [(6, 10, True), (9, 7, True), (9, 9, False)]:
        for dim, shards in [(None, {}), (0, {"weight": 1}), (1, {"weight": 0, "bias": 0})]:
            for gather_output in (False, True):
                torch.manual_seed(1)
                plain = nn.Linear(n_in, n_out, bias)
                torch.manual_seed(1)
                layer = Linear(n_in, n_out, bias, dim, gather_output=gather_output)
                x = torch.randn(4, 3, n_in)
                joined = -1 if dim == 1 and not gather_output else None
                train(plain, layer, x, shards=shards, gather_dim=joined, steps=3)


class Mlp(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return self.down(F.gelu(self.up(x) * 2)) + x  # element-wise code between them, and a residual


def an_mlp_of_column_and_row_trains_like_torchs_own():
    torch.manual_seed(2)
    plain = Mlp(nn.Linear(6, 9), nn.Linear(9, 6))
    torch.manual_seed(2)
    layer = Mlp(Linear(6, 9, dim=1), Linear(9, 6, dim=0))
    shards = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    train(plain, layer, torch.randn(5, 6), shards=shards)


def a_stack_of_any_dims_trains_like_torchs_own():
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 11), nn.ReLU(), nn.Linear(11, 8), nn.Linear(8, 7))
    torch.manual_seed(2)
    layer = nn.Sequential(
        Linear(6, 9, dim=-1), Linear(9, 11, dim=-1), nn.ReLU(), Linear(11, 8), Linear(8, 7, dim=0)
    )
    shards = {"0.weight": 0, "0.bias": 0, "1.weight": 0, "1.bias": 0, "4.weight": 1}
    train(plain, layer, torch.randn(5, 6), shards=shards)


def embeddings_train_like_torchs_own():
    tokens = torch.tensor([[0, 3, 3, 9], [10, 5, 1, 3]])
    for kw in [
        {},
        {"padding_idx": 3},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"max_norm": 0.7},
        {"max_norm": 0.7, "norm_type": float("inf")},
    ]:
        for dim, shards in [(None, {}), (0, {"weight": 0}), (1, {"weight": 1})]:
            torch.manual_seed(4)
            plain = nn.Embedding(11, 5, **kw)
            torch.manual_seed(4)
            layer = Embedding(11, 5, **kw, dim=dim, gather_output=False)
            assert torch.equal(
                layer.weight, plain.weight if dim is None else own(plain.weight, shards["weight"])
            )
            joined = -1 if dim == 1 else None
            train(plain, layer, tokens, shards=shards, gather_dim=joined, steps=20 if kw == {} else 3)


def sparse_gradients_of_embeddings_equal_torchs():
    tokens = torch.tensor([0, 3, 3, 9])
    for dim, axis in [(0, 0), (1, 1)]:
        torch.manual_seed(4)
        plain = nn.Embedding(11, 4, sparse=True)
        torch.manual_seed(4)
        layer = Embedding(11, 4, sparse=True, dim=dim, gather_output=True)
        plain(tokens).square().sum().backward()
        layer(tokens).square().sum().backward()
        close(layer.weight.grad.to_dense(), own(plain.weight.grad.to_dense(), axis))


def a_column_embedding_followed_by_a_row_layer_is_right():
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Embedding(11, 6), nn.ReLU(), nn.Linear(6, 3))
    torch.manual_seed(4)
    layer = nn.Sequential(Embedding(11, 6, dim=1, gather_output=False), nn.ReLU(), Linear(6, 3, dim=0))
    train(plain, layer, torch.tensor([1, 10, 4]), shards={"0.weight": 1, "2.weight": 1}, steps=3)


def tokens_out_of_range_raise_before_anything_is_sent():
    for dim in (None, 0, 1):
        layer = Embedding(11, 4, dim=dim)
        for wrong in (11, -1):
            with pytest.raises(IndexError, match=f"token {wrong} is not in the table: it has 11 rows"):
                layer(torch.tensor([0, wrong]))
            # Only one rank is wrong: the others would hang if it had sent something first.
        layer(torch.tensor([0, 10]))


def bf16_autocast_equals_torchs_own():
    torch.manual_seed(2)
    plain = Mlp(nn.Linear(6, 8), nn.Linear(8, 6))
    torch.manual_seed(2)
    layer = Mlp(Linear(6, 8, dim=1), Linear(8, 6, dim=0))
    x = torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, y = plain(x), layer(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    for output in (expected, y):
        output.float().square().mean().backward()
    assert layer.up.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.up.weight.grad, own(plain.up.weight.grad, 0), rtol=0.1, atol=0.02)
    torch.testing.assert_close(layer.down.weight.grad, own(plain.down.weight.grad, 1), rtol=0.1, atol=0.02)


def second_derivatives_equal_torchs_own():
    torch.manual_seed(2)
    plain = Mlp(nn.Linear(6, 8), nn.Linear(8, 6)).double()
    torch.manual_seed(2)
    layer = Mlp(Linear(6, 8, dim=1), Linear(8, 6, dim=0)).double()
    gradients = []
    for model in (plain, layer):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6).requires_grad_()
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
        gradients.append((x.grad, model.up.weight.grad, model.down.weight.grad))
    close(gradients[1][0], gradients[0][0])
    close(gradients[1][1], own(gradients[0][1], 0))
    close(gradients[1][2], own(gradients[0][2], 1))


def frozen_parameters_and_inputs_get_no_gradient():
    layer = Mlp(Linear(6, 8, dim=1), Linear(8, 6, dim=0))
    layer.up.weight.requires_grad_(False)
    layer.down.bias.requires_grad_(False)
    layer(torch.randn(2, 6)).sum().backward()
    assert layer.up.weight.grad is None
    assert layer.down.bias.grad is None
    assert layer.up.bias.grad is not None
    with torch.no_grad():
        assert not layer(torch.randn(6)).requires_grad  # and one sample without a batch


def a_layer_on_the_meta_device_is_materialised():
    torch.manual_seed(7)
    expected = Linear(9, 9, dim=0)
    torch.manual_seed(7)
    with torch.device("meta"):
        layer = Linear(9, 9, dim=0)
        table = Embedding(9, 4, dim=0, dtype=torch.float64)
    assert layer.weight.is_meta
    assert ts.get_parallel_dim(layer.to_empty(device="cpu").weight) == 0
    layer.reset_parameters()
    assert torch.equal(layer.weight, expected.weight)
    table.to_empty(device="cpu").reset_parameters()
    assert table.weight.dtype == torch.float64


def the_functional_forms_take_shards_of_ones_own():
    weight, bias, x = torch.randn(7, 9), torch.randn(7), torch.randn(2, 9)
    f = ts.nn.functional
    expected = F.linear(x, weight, bias)
    close(f.parallel_linear(x, weight, bias), expected)
    close(d.gather(f.parallel_linear(x, own(weight, 0), own(bias, 0), 1)), expected)
    close(f.parallel_linear(x, own(weight, 0), own(bias, 0), -1, gather_output=True), expected)
    close(f.parallel_linear(x, own(weight, 1), bias, 0), expected)
    close(f.parallel_linear(own(x, 1), own(weight, 1), bias, 0), expected)
    tokens = torch.tensor([[1, 2], [4, 6]])
    close(f.parallel_embedding(tokens, own(weight, 0), num_embeddings=7, dim=0), F.embedding(tokens, weight))
    close(
        f.parallel_embedding(tokens, own(weight, 1), dim=1, gather_output=True), F.embedding(tokens, weight)
    )


def split_features_are_joined_unless_they_are_wanted_apart():
    tokens = torch.tensor([0, 3])
    rows = ts.nn.functional.parallel_embedding
    for dim in (1, -1):
        table = Embedding(5, 6, dim=dim)
        assert table(tokens).shape == rows(tokens, table.weight, dim=dim).shape == (2, 6)
        converted = Embedding.convert_parallel_embedding(nn.Embedding(5, 6), dim)
        assert converted(tokens).shape == (2, 6)
        apart = Embedding(5, 6, dim=dim, gather_output=False)
        assert apart(tokens).shape == apart.weight[:2].shape
        assert "gather_output=False" in repr(apart)


CHECKS = [
    split_features_are_joined_unless_they_are_wanted_apart,
    a_seeded_layer_holds_its_shard_of_torchs_own,
    linear_layers_train_like_torchs_own,
    an_mlp_of_column_and_row_trains_like_torchs_own,
    a_stack_of_any_dims_trains_like_torchs_own,
    embeddings_train_like_torchs_own,
    sparse_gradients_of_embeddings_equal_torchs,
    a_column_embedding_followed_by_a_row_layer_is_right,
    tokens_out_of_range_raise_before_anything_is_sent,
    bf16_autocast_equals_torchs_own,
    second_derivatives_equal_torchs_own,
    frozen_parameters_and_inputs_get_no_gradient,
    a_layer_on_the_meta_device_is_materialised,
    the_functional_forms_take_shards_of_ones_own,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    torch.manual_seed(0)
    check()


def replicated_and_split_values_agree_whatever_the_ranks_seeds():
    torch.manual_seed(d.get_rank())
    before = torch.random.get_rng_state()
    layer, table = Linear(8, 6, dim=0), Embedding(8, 6, dim=None)
    # Who was seeded otherwise goes on from where it was.
    assert torch.equal(torch.random.get_rng_state(), before) == (d.get_rank() > 0)
    for replicated in (layer.bias, table.weight):
        copies = d.gather(replicated.detach().reshape(1, -1), 0)
        assert (copies == copies[0]).all()
    torch.manual_seed(0)
    assert torch.equal(layer.weight, own(nn.Linear(8, 6).weight, 1))


def what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="split along dim 1 or -1"):
        Linear(4, 4, dim=2)
    with pytest.raises(ConfigError, match="1 input features cannot be split over 2"):
        Linear(1, 4, dim=0)
    with pytest.raises(ConfigError, match=r"is 5 wide, and this rank's weight takes 4.*gather_output"):
        Linear(4, 4, dim=-1)(torch.ones(1, 5))
    with pytest.raises(ConfigError, match="padding_idx must be one of the 4 rows, got 4"):
        Embedding(4, 4, padding_idx=4, dim=0)
    with pytest.raises(ConfigError, match=r"has shape \(4, 4\)"):
        Embedding(4, 4, _weight=torch.ones(3, 4), dim=0)
    with pytest.raises(ConfigError, match="holds 3 of 6 rows"):
        ts.nn.functional.parallel_embedding(torch.tensor([0]), torch.ones(2, 2), num_embeddings=6, dim=0)
    with pytest.raises(ConfigError, match="ranges must be pieces"):
        Linear(4, 4, dim=1, ranges=(((0, 4),),))


def fewer_features_than_ranks_leave_empty_shards():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(2)
        plain = nn.Linear(6, 3)
        torch.manual_seed(2)
        layer = Linear(6, 3, dim=1)
        train(plain, layer, torch.randn(5, 6), shards={"weight": 0, "bias": 0}, gather_dim=-1, steps=2)
        torch.manual_seed(4)
        table = nn.Embedding(3, 5)
        torch.manual_seed(4)
        split = Embedding(3, 5, dim=0)
        train(table, split, torch.tensor([0, 2, 2]), shards={"weight": 0}, steps=2)


def pieces_of_ones_own_are_held_in_their_order():
    rank = d.get_rank()
    pieces = (((0, 2), (4, 5)), ((2, 4), (5, 6)))
    torch.manual_seed(2)
    plain = nn.Linear(4, 6)
    torch.manual_seed(2)
    layer = Linear(4, 6, dim=1, ranges=pieces)
    index = torch.cat([torch.arange(a, b) for a, b in pieces[rank]])
    assert torch.equal(layer.weight, plain.weight[index])
    assert torch.equal(layer.bias, plain.bias[index])
    with pytest.raises(ConfigError, match="cannot be joined"):
        Linear(4, 6, dim=1, ranges=pieces, gather_output=True)
    with pytest.raises(ConfigError, match="input_is_parallel=True"):
        Linear(6, 4, dim=0, ranges=pieces)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


@pytest.mark.parametrize(
    "check",
    [
        replicated_and_split_values_agree_whatever_the_ranks_seeds,
        what_cannot_be_is_refused,
        pieces_of_ones_own_are_held_in_their_order,
    ],
    ids=lambda c: c.__name__,
)
def test_on_two_ranks(on_ranks, check):
    on_ranks(2, check)


def test_fewer_features_than_ranks(on_ranks):
    on_ranks(4, fewer_features_than_ranks_leave_empty_shards)


def test_a_layer_of_several_processes_without_a_group_says_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="no model-parallel group"):
        Linear(4, 4, dim=1)
