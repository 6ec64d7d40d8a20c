"""What stands between column and row layers gets the gradients of the whole model, or is named."""

import copy

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from tp_core.errors import ConfigError, ModelError

Column, Row, Replicated = ts.Column, ts.Row, ts.Replicated


class NormedHeads(nn.Module):
    def __init__(self, *, dim=16, heads=4):
        super().__init__()
        self.num_heads, self.width = heads, dim // heads
        self.q_norm, self.k_norm = nn.RMSNorm(self.width), nn.LayerNorm(self.width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class NeedsMore(NormedHeads):
    def forward(self, x, factor):
        return super().forward(x) * factor["scale"]


class Interleaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.query_key_value, self.dense = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 12)).transpose(1, 2).chunk(3, -1)
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Swish(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.norm, self.up_proj, self.between = nn.LayerNorm(8), nn.Linear(8, 12), between
        self.down_proj = nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down_proj(self.between(self.up_proj(self.norm(x))))


class CountsHeads(NormedHeads):
    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, self.width).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def same_gradients(whole, split, *inputs):
    expected, got = whole(*inputs), split(*inputs)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    found = ts.collect_state_dict(split, {n: p.grad for n, p in split.named_parameters()})
    for name, p in whole.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=lambda m, n=name: f"{n}: {m}")


def split_by_auto(model, *inputs):
    return ts.parallelize(copy.deepcopy(model), ts.plans.auto(model, inputs, verbose=False))


def norms_of_heads_get_the_sum_of_the_ranks_gradients():
    for kind in (NormedHeads, NeedsMore):
        whole = kind().double()
        inputs = [torch.randn(2, 5, 16, dtype=torch.float64)]
        inputs += [{"scale": 2.0}] if kind is NeedsMore else []
        proposed = ts.plans.auto(whole, inputs, verbose=False)
        assert proposed["q_norm"] == proposed["k_norm"] == Replicated(), kind
        same_gradients(whole, split_by_auto(whole, *inputs), *inputs)


def a_slope_between_up_and_down_gets_the_sum_of_the_ranks_gradients():
    whole = Swish(nn.PReLU()).double()
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    proposed = ts.plans.auto(whole, x, verbose=False)
    assert proposed == {"up_proj": Column(), "down_proj": Row(), "between": Replicated()}
    same_gradients(whole, split_by_auto(whole, x), x)


def a_plan_that_forgets_what_stands_inside_names_it_at_the_first_forward():
    for model, plan, name in [
        (NormedHeads(), {"o_proj": Row(heads=4), "?_proj": Column(heads=4)}, "k_norm"),
        (Swish(nn.PReLU()), {"up_proj": Column(), "down_proj": Row()}, "between"),
    ]:
        split = ts.parallelize(model, plan)
        x = torch.randn(2, 5, 16 if name == "k_norm" else 8)
        if ts.distributed.get_world_size() == 1:
            split(x)
            continue
        with pytest.raises(ModelError, match=rf'"{name}": ts.Replicated\(\)'):
            split(x)
        inside = split.get_submodule(name)
        inside.requires_grad_(False)
        if name == "between":
            split(x)  # what is not trained needs no gradient
            inside.requires_grad_(True)
            with pytest.raises(ModelError, match=rf'"{name}": ts.Replicated\(\)'):
                split(x)


def a_replicated_module_whose_input_is_whole_is_refused():
    plan = {"up_proj": Column(), "down_proj": Row(), "norm": Replicated()}
    split = ts.parallelize(
        nn.Sequential(nn.Linear(8, 8), Swish(nn.GELU())), {f"1.{k}": v for k, v in plan.items()}
    )
    if ts.distributed.get_world_size() > 1:
        with pytest.raises(ModelError, match=r"1.norm is Replicated\(\) .* comes from no column layer"):
            split(torch.randn(2, 8))


def interleaved_queries_keys_and_values_are_not_taken_for_others():
    whole, x = Interleaved().double(), torch.randn(2, 5, 16, dtype=torch.float64)
    proposed = ts.plans.auto(whole, x, verbose=False)
    assert proposed == {"query_key_value": Column(heads=4, kv_heads=4), "dense": Row(heads=4, kv_heads=4)}
    same_gradients(whole, split_by_auto(whole, x), x)


def the_order_of_fused_layers_is_proven_and_not_guessed():
    class Gated(nn.Module):
        def __init__(self, interleaved):
            super().__init__()
            self.interleaved = interleaved
            self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

        def forward(self, x):
            both = self.gate_up_proj(x)
            apart = both.unflatten(-1, (12, 2)).unbind(-1) if self.interleaved else both.chunk(2, -1)
            return self.down_proj(F.silu(apart[0]) * apart[1])

    x = torch.randn(2, 5, 8)
    assert ts.plans.auto(Gated(False), x, verbose=False)["gate_up_proj"] == Column(sections=2)
    with pytest.raises(ConfigError, match="no layer of"):
        ts.plans.auto(Gated(True), x, verbose=False)


def blocks_that_cannot_work_in_parts_stay_whole_or_are_joined_or_count_their_heads():
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with pytest.raises(ConfigError, match="no layer of"):
        ts.plans.auto(Swish(nn.LayerNorm(12)).double(), x, verbose=False)
    joined = Swish(nn.Softmax(-1)).double()
    assert ts.plans.auto(joined, x, verbose=False)["up_proj"].gather_output
    same_gradients(joined, split_by_auto(joined, x), x)
    counts, x = CountsHeads().double(), torch.randn(2, 5, 16, dtype=torch.float64)
    assert ts.plans.auto(counts, x, verbose=False)[""].query == ("num_heads",)
    same_gradients(counts, split_by_auto(counts, x), x)


def encoder_layers_of_torch_are_right_in_evaluation():
    layer = nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    for whole in (layer, nn.TransformerEncoder(layer, 2)):
        whole.use_nested_tensor = False  # which warns
        split = split_by_auto(whole, torch.randn(2, 3, 16)).eval()
        whole.eval()
        x, padded = torch.randn(2, 3, 16), torch.tensor([[False, False, True], [False] * 3])
        with torch.no_grad():
            for given in ({}, {"src_key_padding_mask": padded}):
                keep = ~padded if given else slice(None)
                torch.testing.assert_close(split(x, **given)[keep], whole(x, **given)[keep])


def a_column_layer_without_its_row_layer_is_named():
    if ts.distributed.get_world_size() > 1:
        with pytest.raises(ConfigError, match=r"up_proj is Column.*, and down_proj beside it .* Row\(\)"):
            ts.parallelize(Swish(nn.GELU()), {"up_proj": Column()})


CHECKS = [
    norms_of_heads_get_the_sum_of_the_ranks_gradients,
    a_slope_between_up_and_down_gets_the_sum_of_the_ranks_gradients,
    a_plan_that_forgets_what_stands_inside_names_it_at_the_first_forward,
    a_replicated_module_whose_input_is_whole_is_refused,
    interleaved_queries_keys_and_values_are_not_taken_for_others,
    the_order_of_fused_layers_is_proven_and_not_guessed,
    blocks_that_cannot_work_in_parts_stay_whole_or_are_joined_or_count_their_heads,
    encoder_layers_of_torch_are_right_in_evaluation,
    a_column_layer_without_its_row_layer_is_named,
]
LONG = [
    blocks_that_cannot_work_in_parts_stay_whole_or_are_joined_or_count_their_heads,
    encoder_layers_of_torch_are_right_in_evaluation,
]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=pytest.mark.slow if check in LONG else ()) for check in CHECKS],
    ids=lambda c: c.__name__,
)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)
