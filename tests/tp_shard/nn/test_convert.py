"""Conversion keeps what a model computes and what it is."""

import copy
import pickle

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from tp_core.errors import ConfigError, ModelError

from tests.tp_shard.on_each_rank import own

d = ts.distributed
to_linear = ts.nn.ParallelLinear.convert_parallel_linear
to_embedding = ts.nn.ParallelEmbedding.convert_parallel_embedding


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def same(plain, model, *inputs, gather=False):
    """Compare outputs and the whole gradients of a plain and a converted model."""
    for module in (plain, model):
        module.zero_grad()
    expected, y = plain(*inputs), model(*inputs)
    close(d.gather(y) if gather else y, expected)
    expected.square().sum().backward()
    (d.gather(y) if gather else y).square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    whole = ts.collect_state_dict(model, gradients)
    for name, parameter in plain.named_parameters():
        close(whole[name], parameter.grad)


def a_linear_layer_becomes_a_new_one_with_its_values():
    plain = nn.Linear(9, 7).double()
    plain.note = "kept"
    seen = []
    plain.register_forward_hook(lambda *_: seen.append(1))
    plain.eval()
    for dim, axis in [(None, None), (1, 0), (-1, 0), (0, 1)]:
        seen.clear()
        made = to_linear(plain, dim)
        assert type(made) is ts.nn.ParallelLinear
        assert type(plain) is nn.Linear
        assert f"in_features=9, out_features=7, bias=True, dim={dim}" in repr(made)
        assert made.note == "kept"
        assert not made.training
        made(torch.ones(1, 9).double())
        assert seen == [1]
        assert torch.equal(made.weight, plain.weight if axis is None else own(plain.weight, axis))
        if d.get_world_size() > 1 and axis is not None:
            nbytes = made.weight.untyped_storage().nbytes()
            assert nbytes == made.weight.numel() * 8
            assert nbytes < plain.weight.untyped_storage().nbytes()
        same(plain, made, torch.randn(3, 9).double(), gather=axis == 0)


def a_whole_mlp_is_converted_in_place():
    for dim in (None, 0, 1):
        plain = nn.Sequential(
            nn.Linear(6, 9), nn.GELU(), nn.Sequential(nn.Linear(9, 5), nn.ReLU()), nn.Linear(5, 4)
        ).double()
        model = copy.deepcopy(plain)
        assert to_linear(model, dim, gather_output=dim == 1) is model
        assert all(isinstance(model.get_submodule(n), ts.nn.ParallelLinear) for n in ("0", "2.0", "3"))
        same(plain, model, torch.randn(3, 6).double())
        halves = to_linear(copy.deepcopy(plain), dim)  # layers that hand their shards on
        same(plain, halves, torch.randn(3, 6).double(), gather=dim == 1)


def a_transformer_is_converted_and_its_attention_stays_whole():
    for dim in (0, 1):
        plain = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ).double()
        model = to_linear(copy.deepcopy(plain), dim, gather_output=True)
        assert isinstance(model.layers[0].linear1, ts.nn.ParallelLinear)
        assert not isinstance(model.layers[0].self_attn.out_proj, ts.nn.ParallelLinear)
        x = torch.randn(2, 3, 8).double()
        same(plain, model, x)
        with torch.no_grad():  # where torch would take its fast path
            close(model.eval()(x), plain.eval()(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=2)
        self.body = nn.Linear(6, 6)
        self.again = self.body
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.again(F.relu(self.body(self.table(tokens)))))


def tied_weights_stay_tied():
    tokens = torch.tensor([[1, 2, 10], [5, 5, 0]])
    for convert, dim, gather in [
        (to_linear, -1, True),
        (to_linear, 0, False),
        (to_embedding, 0, True),
        (to_embedding, 1, True),
    ]:
        plain = Tied().double()
        model = convert(copy.deepcopy(plain), dim, gather_output=gather)
        assert model.head.weight is model.table.weight
        assert model.again is model.body
        assert isinstance(model.table, ts.nn.ParallelEmbedding)
        assert model.table.padding_idx == 2
        same(plain, model, tokens)
        state = ts.collect_state_dict(model, model.state_dict())
        assert list(state) == list(plain.state_dict())
        close(state["head.weight"], plain.head.weight)
        assert state["head.weight"].data_ptr() == state["table.weight"].data_ptr()


class Scaled(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) * self.scale


class ByHand(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2)


class ByHelper(nn.Linear):
    def scaled(self):
        return self.weight * 2

    def forward(self, x):
        return F.linear(x, self.scaled(), self.bias)


class ByProperty(nn.Linear):
    @property
    def scaled(self):
        return self.weight.mul(2)

    def forward(self, x):
        return super().forward(x) + self.scaled.sum()


class ByWidth(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.shape[0]


class OfTwo(nn.Linear):
    """Cannot be tried alone: it needs a second argument."""

    def forward(self, x, scale):
        return super().forward(x) * scale + self.bias * self.reads


class OfTypes(nn.Linear):
    def forward(self, x):
        x = x.to(self.weight.dtype).to(self.weight.device)
        return super().forward(x) if self.bias is None else super().forward(x) * 2


class Counted(nn.Linear):
    """Counts its calls, in a buffer and in an attribute: a trial is none."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        return super().forward(F.dropout(x, 0.0))


def subclasses_stay_what_they_are():
    plain = nn.Sequential(Scaled(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    for dim in (0, 1):
        model = to_linear(copy.deepcopy(plain), dim, gather_output=True)
        assert isinstance(model[0], Scaled)
        assert isinstance(model[0], ts.nn.ParallelLinear)
        same(plain, model, torch.randn(3, 6).double())
        same(plain, copy.deepcopy(model), torch.randn(3, 6).double())
        assert ts.get_parallel_dim(copy.deepcopy(model)[0].weight) == dim
    for kind in (ByHand, ByHelper, ByProperty, ByWidth):
        with pytest.raises(ModelError, match=f"{kind.__name__} uses its weight in a forward of its own"):
            to_linear(nn.Sequential(kind(2, 2)), 1)


def forwards_of_subclasses_are_watched_when_they_run():
    model = to_linear(OfTwo(2, 4).double(), -1, gather_output=True)
    model.reads = 0.0
    with pytest.raises(ModelError, match="OfTwo uses its weight in a forward of its own"):
        model(torch.ones(1, 2).double(), 2.0)
    for layer in (OfTypes(6, 4), OfTypes(6, 4, False)):
        same(
            layer.double(),
            to_linear(copy.deepcopy(layer), -1, gather_output=True),
            torch.randn(3, 6).double(),
        )


def a_trial_of_a_forward_leaves_no_trace():
    plain = nn.Sequential(Counted(4, 4)).double()
    before = torch.get_rng_state()
    model = to_linear(plain, -1, gather_output=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model[0].calls, model[0].count.item()) == (0, 0)
    model(torch.ones(1, 4).double())
    assert (model[0].calls, model[0].count.item()) == (1, 1)


def a_forward_that_was_put_on_the_object_is_refused():
    layer = nn.Linear(2, 2)
    plain = layer.forward
    layer.forward = lambda x: plain(x) * 2
    with pytest.raises(ModelError, match="its forward was replaced on the object"):
        to_linear(nn.Sequential(layer), 1)


def frozen_parameters_gradients_and_flags_are_kept():
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plain[0].weight.requires_grad_(False)
    plain[1].weight.flag = "mine"
    plain(torch.ones(1, 4)).sum().backward()
    model = to_linear(copy.deepcopy(plain), 0)
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    flagged = nn.Linear(4, 4)
    flagged.weight.flag = "mine"
    flagged(torch.ones(1, 4)).sum().backward()
    made = to_linear(flagged, 1)
    assert made.weight.flag == "mine"
    assert torch.equal(made.weight.grad, own(flagged.weight.grad, 0))


def embeddings_keep_their_options():
    plain = nn.Embedding(10, 6, padding_idx=-1, max_norm=1.0, scale_grad_by_freq=True).double()
    tokens = torch.tensor([1, 9, 9, 4, 1])
    for dim in (None, 0, 1):
        made = to_embedding(copy.deepcopy(plain), dim, gather_output=True)
        assert (made.padding_idx, made.max_norm, made.scale_grad_by_freq) == (9, 1.0, True)
        same(copy.deepcopy(plain), made, tokens)
        if d.get_world_size() > 1 and dim is not None:
            assert made.weight.untyped_storage().nbytes() < plain.weight.untyped_storage().nbytes()


def what_cannot_be_converted_is_refused():
    with pytest.raises(ConfigError, match="got 2"):
        to_linear(nn.Linear(2, 2), 2)
    with pytest.raises(ModelError, match="its weight is no parameter but computed"):
        to_linear(weight_norm(nn.Linear(4, 4)), 1)
    with pytest.raises(ModelError, match="has no weight before it has seen an input"):
        to_linear(nn.LazyLinear(4), 1)
    with pytest.raises(ModelError, match="wrapped in DataParallel"):
        to_linear(nn.DataParallel(nn.Linear(4, 4)), 1)
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Bilinear(1, 1, 1)})
    model["b"].weight = model["a"].weight
    with pytest.raises(ModelError, match=r"a shares its weight with b \(Bilinear\)"):
        to_linear(model, 1)


CHECKS = [
    a_linear_layer_becomes_a_new_one_with_its_values,
    a_whole_mlp_is_converted_in_place,
    a_transformer_is_converted_and_its_attention_stays_whole,
    tied_weights_stay_tied,
    subclasses_stay_what_they_are,
    forwards_of_subclasses_are_watched_when_they_run,
    a_trial_of_a_forward_leaves_no_trace,
    a_forward_that_was_put_on_the_object_is_refused,
    frozen_parameters_gradients_and_flags_are_kept,
    embeddings_keep_their_options,
    what_cannot_be_converted_is_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


def test_a_converted_subclass_comes_out_of_a_pickle():
    made = to_linear(Scaled(3, 3), 1)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert torch.equal(again(torch.ones(1, 3)), made(torch.ones(1, 3)))
