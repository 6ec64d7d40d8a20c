"""Models that a plan splits train like the whole ones, with and without sequence parallelism."""

import copy
import functools
import io
import pickle

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from tp_core.errors import ConfigError, ModelError

d = ts.distributed
Column, Row, Vocab, Sequence = ts.Column, ts.Row, ts.Vocab, ts.Sequence


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.n_head, self.n_kv_head = heads, kv_heads
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * (dim // heads))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(
            ts.nn.functional.parallel_attention(
                self.qkv(x), self.n_head, self.n_kv_head, causal=True, group=self.group()
            )
        )

    def group(self):
        return getattr(self.qkv, "group", d.Group())  # the whole model has all heads


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.attn, self.mlp = Attention(dim, heads, kv_heads), Mlp(dim, hidden)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=53, dim=24, heads=6, kv_heads=2, hidden=21, places=16, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(places, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, idx):
        x = self.tokens(idx) + self.places(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def plan(heads, kv_heads, *, sequence):
    whole = {"places": Sequence(), "**.norm*": Sequence(), "**.drop": Sequence()} if sequence else {}
    return {
        "tokens": Vocab(),
        "lm_head": Vocab(),
        "blocks.*.attn.qkv": Column(heads=heads, kv_heads=kv_heads, holds="qkv"),
        "blocks.*.attn.out": Row(heads=heads, kv_heads=kv_heads),
        "blocks.*.mlp.gate_up": Column(sections=2),
        "blocks.*.mlp.down": Row(),
        **whole,
    }


# Softmax is deaf to the bias of keys: its gradient is rounding, which an eps of 1e-8 would make steps of.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-6)


def gradients(model):
    state = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    return ts.collect_state_dict(model, state)


def train_both(whole, split, batches, *, vocabulary, steps, tolerance):
    optimizers = [ADAMW(m.parameters()) for m in (whole, split)]
    for step in range(steps):
        idx, target = batches[step % len(batches)]
        expected = F.cross_entropy(whole(idx).flatten(0, 1), target.flatten())
        got = ts.nn.functional.parallel_cross_entropy(
            split(idx), target, num_classes=vocabulary, parallel=True, class_dim=-1, inplace=True
        )
        torch.testing.assert_close(got, expected, **tolerance)
        expected.backward()
        got.backward()
        found = gradients(split)
        for name, p in whole.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(found[name], p.grad, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        norms = [nn.utils.clip_grad_norm_(whole.parameters(), 0.5), ts.clip_grad_norm_(split, 0.5)]
        torch.testing.assert_close(*norms, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = ts.collect_state_dict(split, split.state_dict())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found[name], value, **tolerance)


EXACT = {"rtol": 1e-7, "atol": 1e-9}


def a_gpt_trains_like_the_whole_one():
    for heads, kv_heads in [(6, 2), (4, 4), (4, 1)] if d.get_world_size() > 1 else [(6, 2)]:
        for sequence in (False, True):
            torch.manual_seed(1)
            whole = Gpt(heads=heads, kv_heads=kv_heads).double()
            split = ts.parallelize(copy.deepcopy(whole), plan(heads, kv_heads, sequence=sequence))
            assert split.lm_head.weight is split.tokens.weight
            # 13 places: uneven parts of the sequence.
            batches = [torch.randint(0, 53, (2, 3, 13)).unbind() for _ in range(2)]
            steps = 20 if (heads, kv_heads) == (6, 2) and sequence else 2
            train_both(whole, split, batches, vocabulary=53, steps=steps, tolerance=EXACT)


def copies_of_a_split_gpt_are_gpts():
    torch.manual_seed(1)
    split = ts.parallelize(Gpt().double(), plan(6, 2, sequence=True))
    idx = torch.randint(0, 53, (2, 8))
    expected = split(idx)
    torch.testing.assert_close(copy.deepcopy(split)(idx), expected)
    part = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    ts.parallelize(part, {"0": Sequence(), "1": Column(), "3": Row()})
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(pickle.loads(pickle.dumps(part))(x), part(x))
    if d.get_world_size() > 1:
        with pytest.raises(ValueError, match=r"is 5 wide, and this rank's weight takes"):
            part[3](x[..., :5])
    buffer = io.BytesIO()
    torch.save(ts.collect_state_dict(split, split.state_dict()), buffer)
    buffer.seek(0)
    plain = Gpt().double()
    plain.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(d.gather(expected, -1, size=53), plain(idx))


def bf16_autocast_stays_near_the_whole_model():
    for sequence in (False, True):
        torch.manual_seed(1)
        whole = Gpt()
        split = ts.parallelize(copy.deepcopy(whole), plan(6, 2, sequence=sequence))
        idx, target = torch.randint(0, 53, (2, 2, 12)).unbind()
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.cross_entropy(whole(idx).flatten(0, 1), target.flatten())
            got = ts.nn.functional.parallel_cross_entropy(split(idx), target, num_classes=53, parallel=True)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
        expected.backward()
        got.backward()
        found = gradients(split)
        for name, p in whole.named_parameters(remove_duplicate=False):
            assert found[name].dtype == torch.float32
            assert (found[name] - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-3, name


def blocks_of_their_own_equal_plain_ones():
    for heads, kv_heads in [(4, 4), (4, 2), (8, 1), (6, 2)]:
        torch.manual_seed(1)
        attention = ts.nn.ParallelAttention(24, heads, kv_heads, causal=True).double()
        torch.manual_seed(1)
        plain = Attention(24, heads, kv_heads).double()
        compare(plain, attention, torch.randn(2, 5, 24, dtype=torch.float64))
    torch.manual_seed(1)
    mlp = ts.nn.ParallelSwiGLU(24, 21, bias=True).double()
    torch.manual_seed(1)
    plain = Mlp(24, 21)
    plain.gate_up = nn.Linear(24, 42)
    torch.manual_seed(1)
    for layer in (plain.gate_up, plain.down):
        layer.reset_parameters()
    compare(plain.double(), mlp, torch.randn(3, 24, dtype=torch.float64))


def compare(plain, split, x):
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, got = plain(a), split(b)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(b.grad, a.grad)
    found = gradients(split)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def dropout_differs_between_ranks_and_follows_torchs_generator():
    tracker = ts.RandomTracker(3)
    drop = ts.nn.ParallelDropout(0.5, tracker=tracker)
    before = torch.get_rng_state()
    ones = torch.ones(64)
    first = drop(ones)
    second = drop(ones)
    assert not torch.equal(first, second)
    after = torch.rand(3)
    whole = d.gather(after.unsqueeze(0), 0)
    assert torch.equal(whole, after.expand_as(whole))  # what all ranks draw stays alike
    torch.set_rng_state(before)
    tracker.load_state_dict(tracker.state_dict())
    assert torch.equal(drop(ones), first)
    masks = d.gather(first.unsqueeze(0), 0)
    assert len({tuple(row) for row in masks.tolist()}) == d.get_world_size()
    assert torch.equal(drop.eval()(ones), ones)
    with pytest.raises(RuntimeError, match="random state is from rank"):
        tracker.load_state_dict({**tracker.state_dict(), "rank": 99})


def a_plan_for_usual_names_is_proposed_and_works():
    torch.manual_seed(1)
    whole = Gpt().double()
    proposed = ts.plans.auto(whole, verbose=d.get_rank() == 0)
    expected = plan(6, 2, sequence=False)
    assert {n: proposed[n] for n in ("tokens", "lm_head")} == {
        "tokens": Vocab(),
        "lm_head": Vocab(gather_output=True),
    }
    assert proposed["blocks.1.attn.qkv"] == expected["blocks.*.attn.qkv"]
    assert proposed["blocks.0.attn.out"] == expected["blocks.*.attn.out"]
    assert proposed["blocks.0.mlp.gate_up"] == Column(sections=2)
    assert proposed["blocks.0.mlp.down"] == Row()
    assert len(proposed) == 10
    split = ts.parallelize(copy.deepcopy(whole), proposed)
    idx = torch.randint(0, 53, (2, 8))
    torch.testing.assert_close(split(idx), whole(idx))
    assert ts.plans.auto(whole, parallel_loss=True, verbose=False)["lm_head"] == Vocab()
    table = ts.summary(split)
    assert table.nbytes == sum(p.numel() * p.element_size() for p in split.parameters())
    rows = {row.name: row for row in table.layers}
    assert rows["blocks.0.mlp.down"].full_shape == (24, 21)
    assert rows["tokens"].kind == "vocabulary"
    if d.get_world_size() > 1:
        assert rows["blocks.0.mlp.gate_up"].local_shape[0] < 42
        assert rows["blocks.0.mlp.down"].collectives == "all-reduce forward"
        assert rows["blocks.0.mlp.gate_up"].collectives == "all-reduce backward"
        assert "collectives per step" in str(table)
        apart = ts.summary(ts.parallelize(whole, plan(6, 2, sequence=True)))
        found = {row.name: row.collectives for row in apart.layers}
        assert found["norm"] == "all-reduce backward (one for all such gradients)"
        assert found["lm_head"] == "all-gather forward, reduce-scatter backward"


def a_classifier_with_100003_classes_trains_like_the_whole_one():
    torch.manual_seed(1)
    classes = 100_003
    whole = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, classes)).double()
    split = ts.parallelize(copy.deepcopy(whole), {"2": Vocab()})
    fused = copy.deepcopy(split)
    x, target = torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 50_001, 50_002, 25_001, classes - 1])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (whole, split, fused)]
    for _ in range(20):
        head = fused[2]
        losses = [
            F.cross_entropy(whole(x), target),
            ts.nn.functional.parallel_cross_entropy(split(x), target),  # the mark carries the number
            ts.nn.functional.parallel_linear_cross_entropy(
                fused[:2](x), head.weight, target, head.bias, chunk_rows=2
            ),
        ]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            torch.testing.assert_close(loss, losses[0], **EXACT)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for model in (split, fused):
        found = ts.collect_state_dict(model, model.state_dict())
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(found[name], value, **EXACT)


def two_copies_train_like_one_model_on_all_samples():
    """Four ranks in groups of two, each group with samples of its own, under DistributedDataParallel."""
    torch.manual_seed(1)
    whole = Gpt().double()
    split = ts.parallelize(copy.deepcopy(whole), plan(6, 2, sequence=True))
    ddp = nn.parallel.DistributedDataParallel(split)
    copy_index = torch.distributed.get_rank() // 2
    optimizers = [ADAMW(m.parameters()) for m in (whole, split)]
    loss = ts.nn.ParallelCrossEntropyLoss(num_classes=53, parallel=True, class_dim=-1)
    for _ in range(4):
        idx, target = torch.randint(0, 53, (2, 4, 13)).unbind()
        F.cross_entropy(whole(idx).flatten(0, 1), target.flatten()).backward()
        mine = slice(copy_index * 2, copy_index * 2 + 2)
        loss(ddp(idx[mine]), target[mine]).backward()
        found = gradients(split)
        for name, p in whole.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(found[name], p.grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def what_cannot_be_split_is_refused():
    model = Gpt()
    with pytest.raises(ValueError, match=r"\['block.\*'\] fit no layer; the layers are 'tokens'"):
        ts.parallelize(model, {"block.*": Column()})
    with pytest.raises(TypeError, match="norm is a LayerNorm"):
        ts.parallelize(model, {"norm": Column()})
    with pytest.raises(TypeError, match="tokens is a Embedding"):
        ts.parallelize(model, {"tokens": Row()})
    with pytest.raises(TypeError, match="shares its weight with lm_head"):
        ts.parallelize(model, {"tokens": Vocab()})
    with pytest.raises(TypeError, match=r"Sequence\(\) is for single norms"):
        ts.parallelize(model, {"norm": Sequence(), "blocks.0": Sequence()})
    with pytest.raises(ValueError, match="are not 5 heads"):
        ts.parallelize(model, {"norm": Sequence(), "blocks.*.attn.out": Row(heads=5)})
    assert type(model.norm) is nn.LayerNorm  # an error leaves the model as it was
    with pytest.raises(ValueError, match=r"is a Column\(\), Row\(\)"):
        ts.parallelize(model, {"norm": "column"})
    with pytest.raises(ValueError, match="sequence_dim is counted from the end"):
        ts.parallelize(model, {"blocks.*.mlp.down": Row()}, sequence_dim=1)
    with pytest.raises(ValueError, match="are not 7 heads"):
        ts.parallelize(model, {"blocks.*.attn.out": Row(heads=7)})
    with pytest.raises(ValueError, match="are not 5 sections"):
        ts.parallelize(model, {"blocks.*.mlp.gate_up": Column(sections=5)})
    with pytest.raises(ValueError, match="cannot share 4 key heads"):
        ts.parallelize(model, {"blocks.*.attn.out": Row(heads=6, kv_heads=4)})
    with pytest.raises(TypeError, match="is wrapped in DataParallel"):
        ts.parallelize(nn.DataParallel(model), {})
    with pytest.raises(ValueError, match="no layer of Sequential could be split"):
        ts.plans.auto(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
    with pytest.raises(ValueError, match="do not divide 7 features"):
        ts.nn.functional.parallel_attention(torch.ones(1, 2, 7), 4)
    ts.parallelize(model, {"blocks.*.mlp.down": Row()})
    with pytest.raises(TypeError, match="is split already"):
        ts.parallelize(model, {"blocks.*.mlp.down": Row()})
    if d.get_world_size() == 4:
        with pytest.raises(ValueError, match="cannot be divided over 4 ranks"):
            ts.nn.ParallelAttention(24, 6, 3)


CHECKS = [
    a_gpt_trains_like_the_whole_one,
    copies_of_a_split_gpt_are_gpts,
    bf16_autocast_stays_near_the_whole_model,
    blocks_of_their_own_equal_plain_ones,
    dropout_differs_between_ranks_and_follows_torchs_generator,
    a_plan_for_usual_names_is_proposed_and_works,
    a_classifier_with_100003_classes_trains_like_the_whole_one,
    what_cannot_be_split_is_refused,
]


TRAINED = [
    a_gpt_trains_like_the_whole_one,
    a_plan_for_usual_names_is_proposed_and_works,
    a_classifier_with_100003_classes_trains_like_the_whole_one,
]


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, marks=pytest.mark.slow if c in TRAINED else ()) for c in CHECKS],
    ids=lambda c: c.__name__,
)
def test_without_a_process_group(check):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "check",
    [pytest.param(c, marks=pytest.mark.slow if c in TRAINED[1:] else ()) for c in CHECKS],
    ids=lambda c: c.__name__,
)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


@pytest.mark.slow
def test_two_copies_of_two_ranks(on_ranks):
    on_ranks(4, two_copies_train_like_one_model_on_all_samples, group_size=2)


def test_the_proposal_says_what_it_does_and_what_stays_whole(capsys):
    model = Gpt()
    ts.plans.auto(model)
    printed = capsys.readouterr().out
    assert "blocks.0.attn.qkv: Column(heads=6, kv_heads=2, holds='qkv')" in printed
    assert "bytes on rank 0 of 1" in printed


def test_heads_of_few_classes_stay_whole():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 5))
    assert ts.plans.auto(model, verbose=False) == {"0": Vocab()}
    model[1] = nn.Linear(8, 2000)
    assert ts.plans.auto(model, verbose=False) == {"1": Vocab(gather_output=True)}


class Decoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(100, 8), nn.Linear(8, 9), nn.Linear(9, 8)
        self.decode = prune.l1_unstructured(nn.Linear(8, 100), "bias", 0.5)
        self.decode.weight = self.embed.weight

    def forward(self, tokens):
        return self.decode(self.down(self.up(self.embed(tokens))))


def test_a_table_that_is_tied_to_what_stays_whole_stays_whole(capsys):
    assert set(ts.plans.auto(Decoded())) == {"up", "down"}
    assert "embed: whole, because it shares its weight with decode" in capsys.readouterr().out


def test_layers_are_looked_at_whatever_the_default_device():
    class Plain(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    with torch.device("meta"):
        split = ts.parallelize(nn.Sequential(Plain(4, 2)), {"0": Column()})
    assert split[0].weight.is_meta


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.sinks = 4, nn.Parameter(torch.ones(4))


class OwnTable(nn.Embedding):
    def forward(self, tokens):
        return self.weight[tokens]


@pytest.mark.parametrize(
    "wrong",
    [
        ts.Local(heads=4, query=("head",)),
        ts.Local(heads=4, parameters=("sink",)),
        ts.Gathered(local=ts.Local(heads=3, query=("heads",))),
        ts.Experts(columns=("sinks",), rows=("sinks",)),
        Sequence(),
    ],
)
def test_a_plan_with_one_wrong_number_changes_nothing(wrong):
    model = nn.ModuleDict({"first": Counts(), "norm": nn.LayerNorm(4), "second": Counts()})
    if isinstance(wrong, Sequence):
        model["second"] = OwnTable(4, 4)
    right = ts.Local(heads=4, query=("heads",), parameters=("sinks",))
    with pytest.raises((ConfigError, ModelError), match=r"second|OwnTable"):
        ts.parallelize(model, {"first": right, "norm": Sequence(), "second": wrong}, group=d.Group(0, 2))
    assert (model["first"].heads, model["first"].sinks.numel(), type(model["norm"])) == (4, 4, nn.LayerNorm)
