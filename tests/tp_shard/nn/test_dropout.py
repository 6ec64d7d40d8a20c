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


def differs_between_ranks(own):
    masks = ts.distributed.gather(own.detach().contiguous().unsqueeze(0), 0)
    return len({tuple(row) for row in masks.flatten(1).tolist()}) == ts.distributed.get_world_size()


def heads_and_features_of_different_ranks_drop_apart():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    ts.parallelize(model, {"0": Column(), "1": Replicated(), "2": Row()})
    torch.manual_seed(3)
    assert differs_between_ranks(model[1](torch.ones(2, 16)) > 0)
    qkv = torch.ones(1, 16, 3 * 4 * 4 // ts.distributed.get_world_size())
    assert differs_between_ranks(ts.nn.functional.parallel_attention(qkv, 4, dropout=0.5))
    alike = torch.rand(4)
    assert ts.distributed.gather(alike.unsqueeze(0), 0).unique(dim=0).size(0) == 1


def dropout_between_split_layers_is_found_by_the_proposal():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)
            self.inner, self.outer = nn.Dropout(0.1), nn.Dropout(0.1)

        def forward(self, x):
            return self.outer(self.down_proj(self.inner(self.up_proj(x))))

    proposed = ts.plans.auto(Mlp(), verbose=False)
    assert proposed == {"up_proj": Column(), "down_proj": Row(), "inner": Replicated()}


CHECKS = [
    recomputation_draws_the_same_masks,
    recomputed_attention_draws_the_same_masks,
    heads_and_features_of_different_ranks_drop_apart,
    dropout_between_split_layers_is_found_by_the_proposal,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, check):
    on_ranks(2, check)
