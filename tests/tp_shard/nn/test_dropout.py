"""Dropout of what is split: independent between ranks, and the same again in a recomputation."""

import copy

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Column, Row, Sequence, Replicated, Vocab = ts.Column, ts.Row, ts.Sequence, ts.Replicated, ts.Vocab


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.inner, self.drop = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(self.inner(F.gelu(self.up(self.norm(x))))))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.out(ts.nn.functional.parallel_attention(self.qkv(x), 4, dropout=0.4))


class Net(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.tok, self.head, self.norm = nn.Embedding(20, 8), nn.Linear(8, 20), nn.LayerNorm(8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            recompute = self.use_reentrant is not None
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if recompute else block(x)
        return self.head(self.norm(x))


def plan(*, sequence):
    parts = {"norm": Sequence(), "blocks.*.norm": Sequence(), "blocks.*.drop": Sequence()} if sequence else {}
    return {
        "tok": Vocab(),
        "head": Vocab(gather_output=True),
        "blocks.*.up": Column(),
        "blocks.*.inner": Replicated(),
        "blocks.*.down": Row(),
        **parts,
    }


def gradients(model, ids):
    torch.manual_seed(5)
    loss = model(ids).square().mean()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def recomputation_draws_the_same_masks():
    for sequence in (False, True):
        torch.manual_seed(1)
        kept = Net().double()
        ids = torch.randint(0, 20, (2, 7))
        expected = None
        for use_reentrant in (None, True, False):
            model = copy.deepcopy(kept)
            model.use_reentrant = use_reentrant
            found = gradients(ts.parallelize(model, plan(sequence=sequence), seed=7), ids)
            expected = expected or found
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")


def recomputed_attention_draws_the_same_masks():
    torch.manual_seed(1)
    plain = Attending().double()
    split = {"qkv": Column(heads=4, holds="qkv"), "out": Row(heads=4)}
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for use_reentrant in (None, True, False):
        model = ts.parallelize(copy.deepcopy(plain), split)
        torch.manual_seed(5)
        x.grad = None
        y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        found.append((x.grad, *(p.grad for p in model.parameters())))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def everyones(tensor):
    return ts.distributed.gather(tensor.detach().contiguous().unsqueeze(0), 0)


def differs_between_ranks(own):
    return len({tuple(row) for row in everyones(own).flatten(1).tolist()}) == ts.distributed.get_world_size()


def is_alike(tensor):
    masks = everyones(tensor)
    return torch.equal(masks, masks[:1].expand_as(masks))


def heads_and_features_of_different_ranks_drop_apart():
    seen = []
    for plan in ({"0": Column(), "1": Replicated(), "2": Row()}, {"0": Column(), "2": Row()}):
        model = ts.parallelize(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)), plan)
        model[1].register_forward_hook(lambda _m, _args, output: seen.append(output == 0))
        torch.manual_seed(3)
        model(torch.ones(2, 8))
        assert differs_between_ranks(seen.pop())
        assert is_alike(torch.rand(4))
    qkv = torch.ones(1, 16, 3 * 4 * 4 // ts.distributed.get_world_size())
    assert differs_between_ranks(ts.nn.functional.parallel_attention(qkv, 4, dropout=0.5))
    assert is_alike(torch.rand(4))


class Inside(nn.Module):
    """A block with ``function`` between a column and a row layer, and dropout of what is whole after them."""

    def __init__(self, function, width=15):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, width), nn.Linear(width, 8), nn.Linear(8, 8)
        self.function, self.seen = function, []

    def forward(self, x):
        return self.out(F.dropout(self.function(self, x), 0.5))

    def see(self, drawn):
        self.seen.append(drawn.detach())
        return drawn


def after_the_row_layer(m, x):
    h = m.up(x)
    return m.down(h) + m.down(m.see(F.dropout(h)))


def with_dropout_of_the_input(m, x):
    h, whole = m.up(x), m.see(F.dropout(F.layer_norm(x, (8,))))
    return m.down(h.relu()) + whole


def with_depth(m, x):
    h = m.up(x)
    return m.down(h * m.see(torch.rand(h.shape[0], 1, 1) < 0.5))


def with_depth_in_place(m, x):
    h = m.up(x)
    return m.down(h * m.see(h.new_empty((h.shape[0], 1, 1)).bernoulli_(0.5)))


DRAWS_APART = {
    "F.dropout": lambda m, x: m.down(m.see(F.dropout(m.up(x)))),
    "alpha_dropout": lambda m, x: m.down(m.see(F.alpha_dropout(m.up(x), training=True))),
    "rrelu": lambda m, x: m.down(m.see(F.rrelu(m.up(x), training=True))),
    "rand_like": lambda m, x: m.down(m.see(torch.rand_like(h := m.up(x))) + h),
    "rand": lambda m, x: m.down(m.see(torch.rand((h := m.up(x)).shape)) + h),
    "bernoulli": lambda m, x: m.down(m.see(torch.bernoulli(m.up(x).sigmoid()))),
    "after a row layer": after_the_row_layer,
    "in a function of torch": lambda m, x: m.down(m.see(torch.empty_like(h := m.up(x)).normal_()) + h),
}
DRAWS_ALIKE = {
    "whole input": with_dropout_of_the_input,
    "stochastic depth": with_depth,
    "stochastic depth in place": with_depth_in_place,
    "dropout1d of places": lambda m, x: m.down(
        m.up(x) * m.see(F.dropout1d(torch.ones_like(m.up(x)))[:, :, :1])
    ),
}


def what_is_split_draws_apart_and_all_else_alike():
    for draws, apart in ((DRAWS_APART, True), (DRAWS_ALIKE, False)):
        for name, function in draws.items():
            for width in (15, 16):
                torch.manual_seed(1)
                model = ts.parallelize(Inside(function, width), {"up": Column(), "down": Row()})
                x = torch.randn(3, 5, 8, requires_grad=True)
                for _ in range(3):  # the block is watched in the first call, and then where it draws
                    model(x).square().mean().backward()
                assert is_alike(torch.rand(4)), name
                assert is_alike(model.out.weight.grad), name
                assert is_alike(model.down.bias.grad), name
                assert is_alike(x.grad), name
                seen = torch.stack([m.float() if m.dim() == 0 else m.float()[..., :7] for m in model.seen])
                assert (differs_between_ranks if apart else is_alike)(seen), name


def a_block_without_draws_draws_what_the_whole_one_draws():
    torch.manual_seed(0)
    whole = Inside(lambda m, x: m.down(m.up(x).relu()))
    split = ts.parallelize(copy.deepcopy(whole), {"up": Column(), "down": Row()})
    found = []
    for model in (whole, split):
        torch.manual_seed(4)
        found.append((model(torch.ones(2, 3, 8)), model(torch.ones(2, 3, 8)), torch.rand(3)))
    torch.testing.assert_close(*found)


def masks_of_split_features_are_as_independent_as_those_of_whole_ones():
    torch.manual_seed(0)
    whole = Inside(lambda m, x: m.down(F.dropout(m.up(x), 0.5)), 64)
    whole.out = nn.Identity()
    with torch.no_grad():  # both halves alike: equal masks would show most
        for side in (whole.up.weight, whole.up.bias, whole.down.weight.t()):
            side[32:] = side[:32]
    split = ts.parallelize(copy.deepcopy(whole), {"up": Column(), "down": Row()})
    torch.manual_seed(0)
    x = torch.randn(1, 8)
    spreads = []
    for model in (whole, split):
        spreads.append(torch.stack([model(x).detach() for _ in range(600)]).std(0).mean())
    assert abs(spreads[1] / spreads[0] - 1) < 0.1  # with equal masks it is 1.4


class Recomputing(nn.Module):
    """A block of which all, a method with its layers, or a function between them is computed again."""

    def __init__(self, what, use_reentrant):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 15), nn.Linear(15, 8), nn.Linear(8, 8)
        self.what, self.use_reentrant = what, use_reentrant

    def recomputed(self, what, function, x):
        return checkpoint(function, x, use_reentrant=self.use_reentrant) if what == self.what else function(x)

    def inner(self, h):
        return F.dropout(h.relu())

    def method(self, x):
        h = self.recomputed("function", self.inner, self.up(F.layer_norm(x, (8,))))
        return F.dropout(self.down(h) + F.dropout(x, 0.3))

    def forward(self, x):
        return self.out(self.recomputed("method", self.method, x))


class Twice(nn.Module):
    def __init__(self, what, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([Recomputing(what, use_reentrant) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block.recomputed("block", block, x)
        return x


def whatever_is_computed_again_draws_the_same():
    expected = None
    for what in ("nothing", "block", "method", "function"):
        for use_reentrant in (False, True):
            torch.manual_seed(1)
            plan = {"blocks.*.up": Column(), "blocks.*.down": Row()}
            model = ts.parallelize(Twice(what, use_reentrant).double(), plan)
            torch.manual_seed(3)
            x = torch.ones(2, 4, 8, dtype=torch.float64, requires_grad=True)
            for _ in range(2):
                model(x).square().mean().backward()
            found = [x.grad, torch.rand(3), *(p.grad for p in model.parameters())]
            expected = expected or found
            for got, right in zip(found, expected, strict=True):
                assert torch.equal(got, right), (what, use_reentrant)
    model.blocks[0].inner = lambda h: F.dropout(h.relu()) * F.dropout(torch.ones(2, 1, 1))  # one per sample
    model.blocks[0].what = "method"
    loss = model(x).sum()
    with pytest.raises(Exception, match="put the checkpoint around the whole block"):
        loss.backward()


def dropout_between_split_layers_is_found_by_the_proposal():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)
            self.inner, self.outer = nn.Dropout(0.1), nn.Dropout(0.1)

        def forward(self, x):
            return self.outer(self.down_proj(self.inner(self.up_proj(x))))

    proposed = ts.plans.auto(Mlp(), torch.randn(3, 8), verbose=False)
    assert proposed == {"up_proj": Column(), "down_proj": Row(), "inner": Replicated()}


CHECKS = [
    recomputation_draws_the_same_masks,
    recomputed_attention_draws_the_same_masks,
    heads_and_features_of_different_ranks_drop_apart,
    what_is_split_draws_apart_and_all_else_alike,
    a_block_without_draws_draws_what_the_whole_one_draws,
    pytest.param(masks_of_split_features_are_as_independent_as_those_of_whole_ones, marks=pytest.mark.slow),
    whatever_is_computed_again_draws_the_same,
    dropout_between_split_layers_is_found_by_the_proposal,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, check):
    on_ranks(2, check)
