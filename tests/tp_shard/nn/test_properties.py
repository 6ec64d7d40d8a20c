"""Layers of drawn shapes and options equal torch's own, on ranks and without."""

import functools
import warnings

import pytest
import torch
import tp_shard as ts
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.tp_shard.on_each_rank import drawn

d = ts.distributed

linear_cases = st.tuples(
    st.integers(4, 13),  # input features: as many as ranks, at least
    st.integers(1, 13),
    st.booleans(),
    st.sampled_from([None, 0, 1, -1]),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=2),
)
embedding_cases = st.tuples(
    st.integers(1, 13),
    st.integers(1, 9),
    st.sampled_from([None, 0, 1, -1]),
    st.booleans(),
    st.lists(st.integers(0, 12), max_size=6),
)


def compare(plain, layer, expected, output):
    joined = d.gather(output, -1, size=expected.size(-1)) if layer_is_split(layer) else output
    torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-10)
    weights = torch.arange(expected.numel(), dtype=torch.float64).reshape(expected.shape).cos()
    (expected * weights).sum().backward()
    (joined * weights).sum().backward()
    gradients = ts.collect_state_dict(layer, {n: p.grad for n, p in layer.named_parameters()})
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-10)


def layer_is_split(layer):
    return layer.dim in (1, -1) and not layer.gather_output


def linear_equals(case):
    n_in, n_out, bias, dim, gather, lead = case
    torch.manual_seed(1)
    plain = nn.Linear(n_in, n_out, bias, dtype=torch.float64)
    torch.manual_seed(1)
    layer = ts.nn.ParallelLinear(n_in, n_out, bias, dim, gather_output=gather, dtype=torch.float64)
    x1 = torch.randn(*lead, n_in, dtype=torch.float64).requires_grad_()
    x2 = x1.detach().clone().requires_grad_()
    compare(plain, layer, plain(x1), layer(x2))
    torch.testing.assert_close(x2.grad, x1.grad, rtol=1e-9, atol=1e-10)


def embedding_equals(case):
    rows, width, dim, gather, tokens = case
    torch.manual_seed(1)
    padding = rows - 1 if gather else None
    plain = nn.Embedding(rows, width, padding, dtype=torch.float64)
    torch.manual_seed(1)
    layer = ts.nn.ParallelEmbedding(rows, width, padding, dim=dim, gather_output=gather, dtype=torch.float64)
    ids = torch.tensor([t % rows for t in tokens], dtype=torch.long)
    compare(plain, layer, plain(ids), layer(ids))


def all_equal(linears, embeddings):
    warnings.filterwarnings("ignore", "Initializing zero-element tensors")
    for case in linears:
        try:
            linear_equals(case)
        except Exception as error:
            error.add_note(f"in the linear case {case}")
            raise
    for case in embeddings:
        try:
            embedding_equals(case)
        except Exception as error:
            error.add_note(f"in the embedding case {case}")
            raise


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_of_drawn_shapes_equal_torchs_own(on_ranks, world):
    check = functools.partial(all_equal, drawn(linear_cases, 40), drawn(embedding_cases, 30))
    if world == 1:
        check()
    else:
        on_ranks(world, check)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ts.nn.ParallelLinear(6, 9, dim=1)
        self.down = ts.nn.ParallelLinear(9, 6, dim=0)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def a_compiled_mlp_gives_the_same_numbers():
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    mlp = Mlp()
    x1 = torch.randn(4, 6, requires_grad=True)
    x2 = x1.detach().clone().requires_grad_()
    mlp(x1).square().sum().backward()
    expected = [x1.grad, *(p.grad.clone() for p in mlp.parameters())]
    mlp.zero_grad()
    compiled = torch.compile(mlp, backend="aot_eager")
    out = compiled(x2)
    torch.testing.assert_close(out, mlp(x1))
    out.square().sum().backward()
    for a, b in zip([x2.grad, *(p.grad for p in mlp.parameters())], expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_compiled_mlp_without_a_process_group():
    with warnings.catch_warnings():
        a_compiled_mlp_gives_the_same_numbers()


@pytest.mark.slow
def test_a_compiled_mlp_on_ranks(on_ranks):
    on_ranks(2, a_compiled_mlp_gives_the_same_numbers)
