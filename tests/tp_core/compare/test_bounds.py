"""One table of bounds: by the coarsest type in which a model computes, and by its own rounding."""

import pytest
import torch
from tp_core.compare import (
    Bound,
    ComputedTypes,
    assert_same,
    coarsest,
    difference_in_words,
    distance,
    first_difference,
    norm_of,
    nudged,
    relative_error,
)

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [F64, F32, torch.float16, BF16])
def test_a_bound_is_above_one_rounding_and_grows_with_depth(dtype):
    bounds = [Bound.of([dtype], depth=depth) for depth in ("sum", "pass", "training")]
    assert bounds[0].rtol > torch.finfo(dtype).eps
    assert [b.rtol for b in bounds] == sorted(b.rtol for b in bounds)
    assert [b.atol for b in bounds] == sorted(b.atol for b in bounds)


def test_a_bound_is_that_of_the_coarsest_type():
    assert coarsest([F64, F32, torch.int64]) == F32
    assert coarsest([]) == F64
    assert Bound.of([F64, F32]) == Bound.of([F32])
    assert Bound.of([F32, BF16]) == Bound.of([BF16])
    assert Bound.of([torch.float8_e5m2]).rtol == 2 * torch.finfo(torch.float8_e5m2).eps


def test_a_limit_grows_with_the_references_own_rounding():
    exact = torch.ones(4, dtype=F64)
    bound = Bound(1e-3, 1e-4)
    assert bound.limit(exact) == pytest.approx(2e-3 + 2e-4)
    assert bound.limit(exact, scale=10.0) == pytest.approx(2e-3 + 1e-3)
    assert bound.limit(exact, exact + 0.5) == pytest.approx(2e-3 + 2e-4 + 6.0)


def test_infinite_numbers_differ_only_where_the_other_has_none():
    inf, nan = float("inf"), float("nan")
    one = torch.tensor([1.0, -inf, nan, 3.0])
    assert distance(one, one.clone()) == 0.0
    assert distance(one, torch.tensor([1.0, -inf, nan, 4.0])) == 1.0
    assert distance(one, torch.tensor([1.0, inf, nan, 3.0])) == inf
    assert distance(one, torch.tensor([1.0, -inf, 2.0, 3.0])) == inf
    assert distance(torch.ones(2), torch.ones(3)) == inf
    assert norm_of(torch.tensor([3.0, 4.0, inf])) == 5.0


def test_complex_integer_and_sparse_tensors_are_compared():
    one = torch.tensor([1 + 1j])
    assert distance(one, one + 1j) == 1.0
    assert distance(torch.tensor([True]), torch.tensor([False])) == 1.0
    assert relative_error(torch.eye(2).to_sparse(), torch.eye(2)) == 0.0


def test_the_first_difference_is_named_in_words():
    exact = {"a": torch.ones(4), "b": torch.ones(2), "c": torch.full((2,), 1e-9)}
    bound = Bound.of([F32])
    assert first_difference(exact, {**exact, "c": torch.zeros(2)}, bound=bound) is None  # by the scale of all
    assert first_difference(exact, {"a": exact["a"]}, bound=bound) == ("b", "it is missing")
    found = first_difference(exact, {**exact, "b": 2 * exact["b"]}, bound=bound)
    assert found == ("b", "it differs by 1 of its norm")
    near = {"b": 1.5 * exact["b"]}
    assert first_difference(exact, {**exact, "b": 2 * exact["b"]}, bound=bound, near=near) is None
    said = difference_in_words(torch.ones(2), torch.ones(3), 1.0)
    assert said == "it has the shape (3,), and not (2,)"


def test_tensors_are_asserted_to_be_the_same():
    one = {"a": torch.ones(4, dtype=F64)}
    assert_same({"a": one["a"] + 1e-10}, one)
    assert_same({"a": one["a"] + 1e-3}, one, dtypes=[BF16])
    with pytest.raises(AssertionError, match="a: it differs by 1e-08 of its norm, beyond Bound"):
        assert_same({"a": one["a"] + 1e-8}, one)
    with pytest.raises(AssertionError, match="the names are"):
        assert_same({}, one)
    with pytest.raises(AssertionError, match=r"a: its type is torch\.float32, and not torch\.float64"):
        assert_same({"a": one["a"].float()}, one)


class Mixed(torch.nn.Module):
    """A layer in the type of its weights, and a norm in float32."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.act = torch.nn.Tanh()

    def forward(self, x):
        wide = self.act(self.layer(x)).float()
        return (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x)


def test_the_types_inside_a_model_are_noted():
    model, x = Mixed().double(), torch.randn(2, 4, dtype=F64)
    with ComputedTypes() as computed:
        model.layer(x) + torch.arange(4, dtype=F32)  # exact, and float64 as soon as it meets x
        torch.zeros(4, dtype=F32)
    assert computed.dtypes == {F64}
    with ComputedTypes() as computed:
        model(x)
    assert computed.dtypes == {F64, F32}
    with ComputedTypes() as computed, torch.autocast("cpu", dtype=BF16):
        model.float()(x.float())
    assert BF16 in computed.dtypes


def test_a_nudge_shows_how_far_a_rounding_moves_and_leaves_no_hooks():
    model, x = Mixed().double(), torch.randn(64, 4, dtype=F64)
    exact = model(x)
    with nudged(model, F32):
        near = model(x)
    assert 1e-9 < relative_error(exact, near) < 1e-6
    assert relative_error(exact, model.float()(x.float())) < 6 * relative_error(exact, near)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_nudge_leaves_the_least_number_finite():
    mask = torch.full((8,), torch.finfo(F32).min)
    with nudged(model := torch.nn.Identity(), F32):
        assert bool(model(mask).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_its_own_type_few_numbers_move_and_they_do_not_drift(dtype):
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).add(1).to(dtype)
    with nudged(model := torch.nn.Identity(), dtype):
        moved = (model(x).double() - x.double()) / torch.finfo(dtype).eps
    assert moved.abs().max() == 1
    assert 0.07 < float(moved.ne(0).double().mean()) < 0.09  # a twelfth: the variance of a rounding
    assert abs(float(moved.mean())) < 0.003
    with nudged(model, dtype):
        assert bool(model(torch.full((1000,), torch.finfo(dtype).min, dtype=dtype)).isfinite().all())
