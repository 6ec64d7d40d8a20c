"""Models that know nothing of it work on parts of sequences, and on several lengths at once."""

import copy
import warnings

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tp_core.errors import ModelError

# Ranks that are simulated do not hang where one of them calls less; the lengths are asked for in no API.
from tp_shard._verify import _simulate as simulation  # private: it counts collectives of ranks in threads
from tp_shard.nn._sequence import SequenceState  # private: a state that no plan can leave


class Attention(nn.Module):
    """As others write it: it looks at the shape of what it is given."""

    def __init__(self, cross=False):
        super().__init__()
        self.num_heads, self.head_dim, self.p = 4, 4, 0.0
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden_states, key_value_states=None):
        batch, length, _ = hidden_states.shape
        seen = hidden_states if key_value_states is None else key_value_states
        q = self.q(hidden_states).view(batch, length, -1, 4).transpose(1, 2)
        k, v = (f(seen).view(batch, seen.size(1), -1, 4).transpose(1, 2) for f in (self.k, self.v))
        drop = self.p if self.training else 0.0
        return self.o(
            F.scaled_dot_product_attention(q, k, v, dropout_p=drop).transpose(1, 2).reshape(batch, length, -1)
        )


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 20), nn.Linear(20, 16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, cross=False, p=0.0):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(16), Attention()
        self.cross = Attention() if cross else None
        self.norm2, self.mlp, self.p = nn.LayerNorm(16), Mlp(), p

    def forward(self, x, memory=None):
        x = x + F.dropout(self.attention(self.norm1(x)), self.p, self.training)
        if self.cross is not None:
            x = x + self.cross(x, key_value_states=memory)
        return x + F.dropout(self.mlp(self.norm2(x)), self.p, self.training)


class Coder(nn.Module):
    def __init__(self, p=0.0, recompute=None):
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.encoder = nn.ModuleList(Block(p=p) for _ in range(2))
        self.decoder = nn.ModuleList(Block(cross=True, p=p) for _ in range(2))
        self.norm, self.recompute = nn.LayerNorm(16), recompute

    def forward(self, ids, other=None):
        memory = self.tokens(ids)
        for block in self.encoder:
            memory = self.call(block, memory)
        x = self.tokens(ids[:, :3] if other is None else other)
        for block in self.decoder:
            x = self.call(block, x, memory)
        return self.head(self.norm(x))

    def call(self, block, *args):
        if self.recompute is None:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=self.recompute)


def gradients(model):
    return ts.collect_state_dict(model, {n: p.grad for n, p in model.named_parameters()})


def an_encoder_and_a_decoder_work_on_parts_of_their_sequences():
    torch.manual_seed(0)
    whole = Coder().double()
    batch = torch.randint(0, 40, (2, 9)), torch.randint(0, 40, (2, 5))
    plan = ts.plans.auto(whole, batch, sequence=True, verbose=False)
    assert plan["encoder"] == plan["decoder"] == plan["decoder.1.norm1"] == ts.Sequence()
    assert plan["encoder.0.attention"] == plan["decoder.0.mlp"] == ts.Gathered()
    assert "norm" not in plan
    split = ts.parallelize(copy.deepcopy(whole), plan)
    for model in (whole, split):
        (model(*batch).square().sum() + 2 * model(batch[0][:, :6], batch[1][:, :4]).square().sum()).backward()
    found = gradients(split)
    for name, p in whole.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(copy.deepcopy(split)(*batch), whole(*batch))


def batches_of_several_lengths_may_be_computed_again():
    for reentrant in (False, True):
        torch.manual_seed(0)
        whole = Coder().double()
        ids = [torch.randint(0, 40, (2, n)) for n in (6, 10, 9, 7)]
        plan = ts.plans.auto(whole, (ids[0],), sequence=True, verbose=False)
        split = ts.parallelize(copy.deepcopy(whole), plan)
        split.recompute = reentrant
        for model in (whole, split):
            sum(model(i).square().sum() for i in ids).backward()
        found = gradients(split)
        for name, p in whole.named_parameters():
            torch.testing.assert_close(found[name], p.grad, msg=lambda m, n=name: f"{n}: {m}")


def dropout_on_parts_differs_between_ranks_and_leaves_them_in_step():
    torch.manual_seed(0)
    whole = Coder(p=0.5)
    ids = torch.randint(0, 40, (2, 7))
    plan = ts.plans.auto(whole, (ids,), sequence=True, verbose=False)
    split = ts.parallelize(copy.deepcopy(whole), plan)
    seen = []
    split.encoder[0].mlp.register_forward_pre_hook(lambda m, a: seen.append(torch.rand(4)))
    out = split(ids)
    everyones = ts.distributed.gather(seen[0].unsqueeze(0), 0)
    assert len({tuple(row) for row in everyones.tolist()}) == ts.distributed.get_world_size()
    after = ts.distributed.gather(torch.rand(1, 3), 0)
    assert torch.equal(after, after[:1].expand_as(after))
    joined = ts.distributed.gather(out.detach().unsqueeze(0), 0)
    assert torch.equal(joined, joined[:1].expand_as(joined))  # what follows the blocks is the same
    out.sum().backward()
    ts.check_gradients(split)


def blocks_of_transformers_work_on_parts_of_sequences():
    import transformers

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    whole = transformers.LlamaForCausalLM(config).double()
    plan = ts.plans.from_hf(whole, sequence=True, verbose=False)
    assert plan["model.layers.0.self_attn"] == ts.Gathered()
    split = ts.parallelize(copy.deepcopy(whole), plan)
    split.gradient_checkpointing_enable()
    ids = torch.randint(0, 40, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for model in (whole, split):
        model.train()
        sum(
            model(i, attention_mask=mask[:, : i.size(1)], labels=i).loss for i in (ids, ids[:, :5])
        ).backward()
    found = gradients(split)
    for name, p in whole.named_parameters():
        torch.testing.assert_close(
            found[name], p.grad, rtol=1e-5, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(*(m.eval().generate(ids, attention_mask=mask, **settings) for m in (whole, split)))


@pytest.mark.slow
def test_what_works_on_whole_sequences_drops_the_same_on_all_ranks():
    torch.manual_seed(0)
    model = Coder(p=0.3)
    ids = torch.randint(0, 40, (2, 7))
    plan = ts.plans.auto(model, (ids,), sequence=True, verbose=False)
    plan = {name: style for name, style in plan.items() if ".attention" not in name}
    plan |= {f"{coder}.*.attention": ts.Gathered(whole=True) for coder in ("encoder", "decoder")}
    for block in (*model.encoder, *model.decoder):
        block.attention.p = 0.5
    ts.verify(model, plan, (ids,)).assert_ok()


CHECKS = [
    an_encoder_and_a_decoder_work_on_parts_of_their_sequences,
    batches_of_several_lengths_may_be_computed_again,
    dropout_on_parts_differs_between_ranks_and_leaves_them_in_step,
    blocks_of_transformers_work_on_parts_of_sequences,
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_blocks_on_parts_are_equal_in_every_number(ranks):
    torch.manual_seed(0)
    model, batch = Coder(), (torch.randint(0, 40, (2, 9)), torch.randint(0, 40, (2, 5)))
    plan = ts.plans.auto(model, batch, sequence=True, verbose=False)
    ts.verify(model, plan, batch, ranks=ranks).assert_ok()
    missing = "encoder.0.attention" if ranks == 2 else "decoder.1.norm2"
    wrong = {n: style for n, style in plan.items() if n != missing}
    assert not ts.verify(model, wrong, batch, ranks=ranks).ok


class Flattens(nn.Module):
    """Its column layer stands in the block itself, and gets samples and places in one dimension."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 20), nn.Linear(20, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x.reshape(-1, 16)))).view(x.shape)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Flattens(), Flattens()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_flattens_sequences_is_named():
    batch = torch.randn(2, 5, 16)
    with pytest.raises(ModelError, match=r"sequence=True blocks.0.up: .*; write Sequence\(\) and"):
        ts.plans.auto(Chain(), batch, sequence=True, verbose=False)
    assert ts.plans.auto(Chain(), batch, verbose=False)["blocks.1.down"] == ts.Row()


def test_a_model_without_blocks_that_share_sequences_has_no_plan_for_them():
    with pytest.raises(ModelError, match="has no list of blocks with split layers"):
        ts.plans.auto(Mlp(), torch.randn(2, 3, 16), sequence=True)
    with pytest.raises(ModelError, match="is an empty list"):
        ts.parallelize(nn.ModuleDict({"blocks": nn.ModuleList()}), {"blocks": ts.Sequence()})


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_ask_one_another_for_a_length_all_or_none(ranks):
    asked = []

    def body(group):
        state = SequenceState(is_split_here=True)
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(60):
            length = int(torch.randint(ranks, 40, (), generator=generator))
            state.note(length)
            part = length // ranks + (group.rank < length % ranks)
            found.append((length, state.whole(part, group, torch.device("cpu"))))
        asked.append(len(state.lengths))
        return found

    for found in simulation.simulate(ranks, body):  # ranks that did not do the same would be an error
        assert all(length == told for length, told in found)


def test_gradients_of_norms_and_biases_on_parts_are_one_all_reduce(monkeypatch):
    counts = []
    original = simulation._SimulatedGroup.allreduce

    def counted(self, *args, **kwargs):
        counts.append(self.rank())
        return original(self, *args, **kwargs)

    torch.manual_seed(0)
    whole = Chains()
    x = torch.randn(2, 6, 16)
    whole(x).square().sum().backward()
    norms = {"blocks": ts.Sequence(), "blocks.*.norm2": ts.Sequence(), "blocks.*.mlp": ts.Gathered()}
    plan = {**norms, "blocks.*.mlp.up": ts.Column(), "blocks.*.mlp.down": ts.Row()}
    second = []

    def body(group):
        split = ts.parallelize(copy.deepcopy(whole), plan)
        split.zero_grad()
        loss = split(x).square().sum()
        loss.backward()
        for (name, p), q in zip(split.named_parameters(), whole.parameters(), strict=True):
            if p.shape == q.shape:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )
        weight = split.blocks[0].norm2.weight
        first = torch.autograd.grad(split(x).square().sum(), weight, create_graph=True)[0]
        second.append(torch.autograd.grad(first.square().sum(), weight)[0])

    monkeypatch.setattr(simulation._SimulatedGroup, "allreduce", counted)
    counts_of_first = []

    def once(group):
        split = ts.parallelize(copy.deepcopy(whole), plan)
        loss = split(x).square().sum()
        before = len(counts)
        loss.backward()
        counts_of_first.append(len([r for r in counts[before:] if r == group.rank]))

    simulation.simulate(2, once)
    assert counts_of_first == [1, 1]
    simulation.simulate(2, body)
    torch.testing.assert_close(second[0], second[1])
    weight = whole.blocks[0].norm2.weight
    first = torch.autograd.grad(whole(x).square().sum(), weight, create_graph=True)[0]
    torch.testing.assert_close(
        second[0], torch.autograd.grad(first.square().sum(), weight)[0], rtol=1e-4, atol=1e-3
    )


class NormedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm2, self.mlp = nn.LayerNorm(16), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm2(x))


class Chains(Chain):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([NormedMlp(), NormedMlp(), NormedMlp()])
