"""What stands between ``Column()`` and ``Row()``: right as on one device, or refused by name."""

import re

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ModelError
from tp_core.plugins import Job

from tests.installed import backend_class

ShardBackend = backend_class("shard")

HIDDEN, HEADS, WIDTH = 16, 4, 4
X = torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8).sin()
OTHERS = torch.linspace(0, 1, 3)[None, :, None]


class Block(nn.Module):
    """Two layers with a function in between, on (batch, seq, features)."""

    def __init__(self, between, hidden=HIDDEN):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(HIDDEN, 8)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


def heads_of(h):
    return h.view(*h.shape[:-1], -1, WIDTH).transpose(1, 2)  # (batch, heads, seq, width)


def joined(heads):
    return heads.transpose(1, 2).flatten(2)


def attention_by_hand(h):
    q = heads_of(h)
    scores = (q @ q.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e9)
    return joined(scores.softmax(-1) @ q)


def attention_in_batches(h):
    """Heads in one dimension with samples, as older models have them."""
    q = heads_of(h).reshape(-1, h.size(1), WIDTH)
    chances = torch.bmm(q, q.transpose(1, 2)).softmax(-1)
    return joined(torch.bmm(chances, q).view(h.size(0), -1, h.size(1), WIDTH))


def rotated(h):
    q = heads_of(h)
    one, other = q.chunk(2, -1)
    angles = torch.arange(h.size(1))[None, None, :, None] / 7
    return joined(q * angles.cos() + torch.cat([-other, one], -1) * angles.sin())


def rotated_in_pairs(h):
    q = heads_of(h)
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
    return joined(torch.view_as_real(pairs * torch.polar(torch.ones(2), torch.ones(2))).flatten(-2))


def written(h):
    out = torch.zeros_like(h)
    out[:, :2] = h[:, 1:]
    out[:, 2] += h[:, 0].tanh()
    return out


def added_by_index(h):
    rows = h.reshape(-1, h.size(-1))
    out = rows.new_zeros(rows.shape)
    out.index_add_(0, torch.tensor([0, 2, 4]), rows[torch.tensor([1, 3, 5])] * 0.5)
    return out.view(h.shape)


RIGHT = {
    "gelu": F.gelu,
    "arithmetic": lambda h: (2 * h - h.square() / (1 + h.abs())).clamp(-1, 1),
    "the larger of two": lambda h: torch.max(h, -h) + torch.min(h * h, torch.tensor(0.5)),
    "other dimensions": lambda h: h - h.mean(1, keepdim=True) + h.amax((0, 1)) + h.cumsum(1),
    "neighbors in the sequence": lambda h: F.pad(h, (0, 0, 1, 0))[:, :-1] + h.roll(1, 1) + h.flip(0),
    "softmax over the sequence": lambda h: h.softmax(1) * h,
    "attention": lambda h: joined(F.scaled_dot_product_attention(*[heads_of(h)] * 3, is_causal=True)),
    "attention by hand": attention_by_hand,
    "attention in batches": attention_in_batches,
    "attention by einsum": lambda h: torch.einsum(
        "bhqk,bkhd->bqhd",
        torch.einsum("bqhd,bkhd->bhqk", h.unflatten(-1, (-1, 4)), h.unflatten(-1, (-1, 4))).softmax(-1),
        h.unflatten(-1, (-1, 4)),
    ).flatten(-2),
    "norms of heads": lambda h: joined(F.rms_norm(heads_of(h), (WIDTH,))),
    "heads for each sample": lambda h: joined(
        heads_of(h) + heads_of(h)[0].repeat(2, 1, 1).view(2, -1, 3, WIDTH)
    ),
    "repeated heads": lambda h: joined(heads_of(h).repeat_interleave(2, 1).unflatten(1, (-1, 2)).sum(2)),
    "expanded heads": lambda h: joined(
        heads_of(h)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2).unflatten(1, (-1, 2)).mean(2)
    ),
    "rotations": rotated,
    "rotations in pairs": rotated_in_pairs,
    "written": written,
    "added by index": added_by_index,
    "rows by a mask": lambda h: torch.where(OTHERS > 0.4, h, 0).masked_fill(OTHERS < 0.1, 1.0),
    "rows by index": lambda h: h[:, torch.tensor([2, 0, 1])] + h[:, [1, 1, 1]],
    "rows selected": lambda h: h.index_select(1, torch.tensor([2, 1, 0])),
    "gathered in the sequence": lambda h: h.gather(1, torch.tensor([2, 0, 1])[None, :, None].expand_as(h)),
    "sorted in the sequence": lambda h: h.sort(1).values + h.topk(1, 1).values,
    "a convolution of each feature": lambda h: F.conv1d(
        h.mT, torch.ones(h.size(-1), 1, 3), padding=1, groups=h.size(-1)
    ).mT,
    "joined in the sequence": lambda h: torch.cat([h[:, :1], h[:, 1:]], 1) + torch.stack([h, h]).sum(0),
    "squeezed": lambda h: h[:1].squeeze(0)[None].expand(2, -1, -1) + h.unsqueeze(0).squeeze(0),
    "shapes": lambda h: h.new_zeros(h.shape) + torch.ones(h.shape[-1]) * h,
    "a matrix over the sequence": lambda h: torch.ones(3, 3).tril() @ h,
    "outer products of rows": lambda h: (OTHERS.mT[..., None] * h[:, None]).sum(2),
}  # fmt: skip


def part_of_table(h):
    table = torch.linspace(0, 1, HIDDEN)
    return h * table[: h.shape[-1]]


WRONG = {
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "amax": lambda h: h - h.amax(-1, keepdim=True),
    "chunk": lambda h: h.chunk(2, -1)[0].repeat(1, 1, 2),
    "flip": lambda h: h.flip(-1),
    "roll": lambda h: h.roll(1, -1),
    "arange": lambda h: h * torch.arange(h.shape[-1]),
    "linspace": lambda h: h + torch.linspace(0, 1, h.size(-1)),
    "mul": lambda h: h * h.shape[-1] ** -0.5,
    "div": lambda h: h / h.size(-1),
    "sum": lambda h: h / h.sum(-1, keepdim=True),
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "var": lambda h: h * h.var(-1, keepdim=True),
    "std": lambda h: h / h.std(dim=-1, keepdim=True),
    "cumsum": lambda h: h.cumsum(-1),
    "cumprod": lambda h: h.cumprod(2),
    "logcumsumexp": lambda h: h.logcumsumexp(-1),
    "sort": lambda h: h.sort(-1).values,
    "argsort": lambda h: h + h.argsort(-1),
    "topk": lambda h: h * (h >= h.topk(2, -1).values[..., -1:]),
    "argmax": lambda h: h + h.argmax(-1, keepdim=True),
    "max": lambda h: h - h.max(-1, keepdim=True).values,
    "min": lambda h: h - h.min(-1).values[..., None],
    "aminmax": lambda h: h - h.aminmax(dim=-1, keepdim=True).min,
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: F.log_softmax(h, -1),
    "softmin": lambda h: F.softmin(h, -1),
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "rms_norm": lambda h: F.rms_norm(h, h.shape[-1:]),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "group_norm": lambda h: F.group_norm(h.mT, 2).mT,
    "cat": lambda h: torch.cat([h[..., :1], h], -1)[..., : h.shape[-1]],
    "__getitem__": lambda h: h * h[..., :1],
    "select": lambda h: h * h.select(-1, 0)[..., None],
    "unbind": lambda h: h * h.unbind(-1)[0][..., None],
    "pad": lambda h: F.pad(h, (1, 0))[..., :-1],
    "interpolate": lambda h: F.interpolate(h, scale_factor=0.5, mode="linear").repeat_interleave(2, -1),
    "einsum": lambda h: h + torch.einsum("bsi,bsi->bs", h, h)[..., None],
    "matmul": lambda h: h + (h @ h.mT).sum(-1, keepdim=True),
    "bmm": lambda h: h + torch.bmm(h, h.mT).sum(-1, keepdim=True),
    "linear": lambda h: h + F.linear(h, torch.ones(1, h.shape[-1])),
    "median": lambda h: h - h.median(-1, keepdim=True).values,
    "logsumexp": lambda h: h - h.logsumexp(-1, keepdim=True),
    "prod": lambda h: h * h.prod(-1, keepdim=True),
    "any": lambda h: h * (h > 0.6).any(-1, keepdim=True),
    "all": lambda h: h * (h > -0.9).all(-1, keepdim=True),
    "count_nonzero": lambda h: h * (h > 0).count_nonzero(-1)[..., None],
    "searchsorted": lambda h: h + torch.searchsorted(h.detach().contiguous(), torch.zeros(2, 3, 1)),
    "histc": lambda h: h * torch.histc(h, 4, -1, 1)[1],
    "unfold": lambda h: h + h.unfold(-1, 2, 2).sum((-1, -2))[..., None],
    "gather": lambda h: h + h.gather(-1, torch.zeros(2, 3, 1, dtype=torch.long)),
    "scatter": lambda h: h.scatter(-1, torch.zeros(2, 3, 1, dtype=torch.long), 7.0),
    "index_select": lambda h: h + h.index_select(-1, torch.tensor([0])),
    "index_fill": lambda h: h.index_fill(-1, torch.tensor([0]), 2.0),
    "triu": lambda h: h.triu(),
    "diff": lambda h: h + F.pad(torch.diff(h, dim=-1), (1, 0)),
    "kthvalue": lambda h: h - h.kthvalue(1, -1, keepdim=True).values,
    "glu": lambda h: torch.cat([F.glu(h, -1)] * 2, -1),
    "cosine_similarity": lambda h: h * F.cosine_similarity(h, h.roll(1, 1), -1)[..., None],
    "unflatten": lambda h: h.unflatten(-1, (2, -1)).softmax(-2).flatten(-2),
    "view": lambda h: h.view(2, 3, 2, -1).transpose(-1, -2).flatten(-2),
    "masked_select": lambda h: h * h.masked_select(h > 0).mean(),
    "avg_pool1d": lambda h: h + F.avg_pool1d(h, 3, 1, 1),
    "trace": lambda h: h * h[0, :3, :3].trace(),
    "maximum of all": lambda h: h / h.max(),
    "fft": lambda h: torch.fft.fft(h, dim=-1).real,
    "cdist": lambda h: h * torch.cdist(h, h).mean(-1, keepdim=True),
    "lerp": lambda h: h.lerp(h.mean(-1, keepdim=True), 0.5),
    "a table's first rows": part_of_table,
    "order": lambda h: heads_of(h).permute(0, 2, 3, 1).flatten(-2),
    "two at once": lambda h: h.repeat(1, 1, 2)[..., ::2],
}  # fmt: skip
SAID = {
    "a table's first rows": "__getitem__ has a number from the shape of the output of 'up'",
    "cat": "__getitem__",
    "diff": "diff",
    "fft": "fft_fft",
    "lerp": "mean",
    "matmul": "matmul|__matmul__",
    "maximum of all": "max",
    "order": "'down' gets the features of 'up' in another order than its weight has them",
    "trace": "__getitem__",
    "two at once": "__getitem__",
    "unflatten": "softmax",
    "view": "'down' gets the features of 'up' in another order",
}


def opened():
    return ShardBackend().open(Job(devices=resolve_devices(["cpu"]), environment=LaunchEnvironment.read()))


def loss(model, x):
    return model(x).square().mean()


def outcomes(functions, **style):
    """Return of each function how far the split block is from the whole one, and what is refused."""
    found = {}
    with opened() as session:
        for name, between in functions.items():
            torch.manual_seed(0)
            block = Block(between)
            with torch.no_grad():
                expected = block(X)
            plan = {"up": ts.Column(**style), "down": ts.Row()}
            model = session.prepare_model(ts.parallelize(block, plan))
            said = []
            for context in (torch.enable_grad, torch.inference_mode):
                with context():
                    try:
                        session.run(loss, model, X)
                        said.append("")
                    except ModelError as error:
                        said.append(str(error))
                model.eval()
            with torch.no_grad():
                found[name] = float((model(X) - expected).abs().max()), said
    return found


def of_parts():
    return outcomes(WRONG), outcomes(RIGHT)


def test_what_takes_a_part_of_the_features_for_all_is_refused_by_name_and_nothing_else(on_ranks):
    for wrong, right in on_ranks(2, of_parts):
        for name, (difference, said) in right.items():
            assert difference < 1e-6, name
            assert said == ["", ""], name
        for name, (difference, said) in wrong.items():
            assert difference > 1e-6 or name in {"interpolate"}, name
            for each in said:
                assert re.search(SAID.get(name, f"^{name} has"), each), (name, each)
                assert "gather_output=True" in each, (name, each)


def joined_parts():
    return outcomes({n: f for n, f in WRONG.items() if n in ("norm", "amax", "arange")}, gather_output=True)


def heads_of_one():
    """Attention with one head on each rank, in words that do not say which dimension has the heads."""

    def attend(h):
        q = h.view(2, 3, h.shape[-1] // WIDTH, WIDTH).transpose(1, 2)
        return (q.mul(0.5) @ q.transpose(-1, -2)).softmax(-1).matmul(q).transpose(1, 2).reshape(2, 3, -1)

    return outcomes({"attention": attend} | RIGHT)


@pytest.mark.slow
def test_one_head_on_each_rank_is_no_fault(on_ranks):
    for found in on_ranks(4, heads_of_one):
        for name, (difference, said) in found.items():
            assert difference < 1e-6, name
            assert said == ["", ""], name


class Fused(nn.Module):
    """A gate and an up layer in one, as most models of today have them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down = nn.Linear(8, 2 * HIDDEN), nn.Linear(HIDDEN, 8)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


def swiglu(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def gated(h):
    return F.glu(h, -1)


def swapped(h):
    return swiglu(h.roll(1, -1))


def half(h):
    return swiglu(torch.cat([h[..., 4:], h[..., :4]], -1))


def fused():
    found = {}
    with opened() as session:
        for between in (swiglu, gated, swapped, half):
            torch.manual_seed(0)
            plan = {"up": ts.Column(sections=2), "down": ts.Row()}
            model = session.prepare_model(ts.parallelize(Fused(between), plan))
            try:
                session.run(loss, model, X)
                found[between.__name__] = ""
            except ModelError as error:
                found[between.__name__] = str(error)
    return found


def test_sections_of_a_fused_layer_may_be_taken_apart_and_nothing_else(on_ranks):
    for found in on_ranks(2, fused):
        assert found["swiglu"] == ""
        assert found["gated"] == ""
        assert found["swapped"].startswith("roll has the output of 'up'")
        assert found["half"].startswith("__getitem__ has the output of 'up'")


def by_hand():
    """A norm of all features, whose sum the ranks join themselves."""

    def joined_norm(h):
        return h / ts.distributed.reduce(h.square().sum(-1, keepdim=True)).sqrt()

    def by_torch(h):
        total = h.square().sum(-1, keepdim=True).detach()
        torch.distributed.all_reduce(total)
        return h / total.sqrt()

    return outcomes({"joined": joined_norm, "by torch": by_torch})


def test_numbers_that_the_ranks_join_themselves_are_no_fault(on_ranks):
    for found in on_ranks(2, by_hand) + on_ranks(2, joined_parts):
        assert all(said == ["", ""] for _, said in found.values()), found


class Tied(nn.Module):
    """A head that shares the table of an embedding."""

    def __init__(self, embed, head):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.of_embedding, self.of_head = embed, head

    def forward(self, tokens):
        return self.of_head(self, self.of_embedding(self, tokens))


def call_embed(model, tokens):
    return model.embed(tokens)


def call_head(model, hidden):
    return model.head(hidden)


def read_table(model, tokens):
    return F.embedding(tokens, model.embed.weight)


def multiply_table(model, hidden):
    return F.linear(hidden, model.embed.weight)


def predict(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def of_tied_tables():
    tokens = torch.tensor([[1, 7, 3], [0, 2, 6]])
    found = []
    with opened() as session:
        for embed, head in ((call_embed, call_head), (read_table, call_head), (call_embed, multiply_table)):
            plan = {"embed": ts.Vocab(), "head": ts.Vocab()}
            model = session.prepare_model(ts.parallelize(Tied(embed, head), plan))
            with pytest.raises(ModelError) as caught:
                session.run(predict, model, tokens)
            found.append(str(caught.value))
    return found


def test_a_class_or_row_of_another_rank_is_answered_with_what_took_a_part_for_all(on_ranks):
    for loss_of_part, rows_of_part, product in on_ranks(2, of_tied_tables):
        assert "Target 7 is out of bounds. cross_entropy has the output of 'head'" in loss_of_part
        assert "ts.nn.functional.parallel_cross_entropy()" in loss_of_part
        assert "embedding computes with 'embed.weight' outside of its layer" in rows_of_part
        assert "linear computes with 'embed.weight' outside of its layer" in product
        assert "Call the layer" in product
