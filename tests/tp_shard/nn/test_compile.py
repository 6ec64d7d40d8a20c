"""Split models are compiled in one graph and differentiated by torch.func, with the numbers of eager ones."""

import copy
import functools
import warnings

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.func import functional_call, grad

TOKENS = torch.arange(10).reshape(2, 5)


def quietly(check):
    """Let torch's compiler warn of what it does itself, when it comes upon an autograd function."""

    @functools.wraps(check)
    def run():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
            # It looks at what a hook is given, and hides the warning where warnings are not errors.
            warnings.filterwarnings(
                "ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning
            )
            check()

    return run


def same_in_one_graph(model, loss):
    split, compiled = copy.deepcopy(model), copy.deepcopy(model)
    expected = loss(split)
    found = loss(torch.compile(compiled, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for (name, p), q in zip(compiled.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}")


def a_llama_is_compiled_in_one_graph():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 1}  # a shared key head
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
    ts.parallelize(model, ts.plans.auto(model, verbose=False))
    same_in_one_graph(model, lambda m: m(TOKENS).logits.square().mean())


def split_sequences_are_compiled_in_one_graph():
    model = nn.Sequential(
        nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6)
    )
    plan = {"0": ts.Vocab(), "1": ts.Sequence(), "2": ts.Column(), "4": ts.Row(), "5": ts.Sequence()}
    ts.parallelize(model, plan)
    same_in_one_graph(model, lambda m: m(TOKENS).square().mean())


def layers_are_compiled_in_one_graph():
    model = nn.Sequential(
        ts.nn.ParallelEmbedding(11, 6, dim=1),
        ts.nn.ParallelLinear(6, 7, dim=-1, gather_output=True),
        ts.nn.ParallelLinear(7, 8, dim=0),
    )
    same_in_one_graph(model, lambda m: m(TOKENS).square().mean())


class LiteralRate(nn.Module):
    """A block with a dropout that its code alone shows, in a method that ``forward`` calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))

    def act(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def drop_half(x, training):
    return nn.functional.dropout(x, 0.5, training)


class RateInFunction(LiteralRate):
    """A block with a dropout that its own code does not show: it is seen in a call."""

    def act(self, x):
        return drop_half(x, self.training)


def a_literal_rate_drops_other_features_on_each_rank():
    for block in (LiteralRate, RateInFunction):
        drops_other_features(block())


def drops_other_features(block):
    model = ts.parallelize(block, {"up": ts.Column(), "down": ts.Row()})
    runs = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        torch.manual_seed(0)
        own = []
        handle = model.down.register_forward_pre_hook(lambda _m, args, own=own: own.append(args[0].detach()))
        run(torch.ones(64, 8))
        handle.remove()
        runs.append(own[0])
    dropped = (runs[1] == 0).float()
    torch.testing.assert_close(runs[1], runs[0])
    both = ts.distributed.reduce(dropped)
    assert (both == 1).any(), "the ranks drop the same features"
    same_in_one_graph(model.eval(), lambda m: m(torch.ones(2, 8)).square().mean())


def a_token_beyond_the_table_is_an_error_in_compiled_code():
    table = torch.compile(ts.nn.ParallelEmbedding(11, 6, dim=0), fullgraph=True, backend="aot_eager")
    for token in (11, -1):
        with pytest.raises(IndexError, match="index out of range"):
            table(torch.tensor([1, token]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        a_llama_is_compiled_in_one_graph,
        split_sequences_are_compiled_in_one_graph,
        layers_are_compiled_in_one_graph,
        a_literal_rate_drops_other_features_on_each_rank,
        a_token_beyond_the_table_is_an_error_in_compiled_code,
    ],
    ids=lambda c: c.__name__,
)
def test_on_two_ranks(on_ranks, check):
    on_ranks(2, quietly(check))


def torch_func_differentiates_once_and_twice():
    model = nn.Sequential(
        nn.Embedding(11, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Linear(6, 11)
    ).double()
    plan = {"0": ts.Vocab(), "1": ts.Column(), "3": ts.Row(), "4": ts.Column(gather_output=True)}
    ts.parallelize(model, plan)
    parameters = dict(model.named_parameters())

    def loss(values):
        return functional_call(model, values, (TOKENS,)).square().mean()

    def squares(gradients):
        return sum(g.square().sum() for g in gradients)

    once = torch.autograd.grad(loss(parameters), list(parameters.values()), create_graph=True)
    twice = torch.autograd.grad(squares(once), list(parameters.values()))
    values = {name: p.detach() for name, p in parameters.items()}
    found = grad(loss)(values)
    again = grad(lambda v: squares(grad(loss)(v).values()))(values)
    for name, first, second in zip(parameters, once, twice, strict=True):
        torch.testing.assert_close(found[name], first)
        torch.testing.assert_close(again[name], second)


def test_torch_func_on_two_ranks(on_ranks):
    on_ranks(2, torch_func_differentiates_once_and_twice)
