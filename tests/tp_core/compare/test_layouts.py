"""A rank's tensor is related to the whole: the same, a share, a slice, a summand, or none of these."""

import torch
from tp_core.compare import (
    BatchSelection,
    LocalTensor,
    difference_on_ranks,
    joined_parts,
    relate,
    selected,
)

WHOLE = torch.arange(24.0).view(4, 6)
ROWS = [{"x": BatchSelection((4, 6), rows, None)} for rows in torch.arange(4).split(2)]


def related(*parts, shares=(), **options):
    return relate(WHOLE, [LocalTensor(part) for part in parts], shares, 1e-6, **options)


def test_whole_shares_slices_and_summands_are_known():
    assert related(WHOLE, WHOLE).kind == "same"
    assert related(WHOLE[:2], WHOLE[2:], shares=ROWS).kind == "same"
    assert related(WHOLE[:, :2], WHOLE[:, 2:]).kind == "same"
    assert related(WHOLE - 1, torch.ones(4, 6)).kind == "partial"
    assert related(WHOLE[:1], WHOLE[:1]).kind == "unknown"


def test_the_rank_that_differs_is_named():
    match = related(WHOLE, WHOLE + 1)
    assert (match.kind, match.where) == ("parts", " on rank 1")
    assert match.error > 0


def test_slices_in_another_order_are_right_where_that_is_said():
    swapped = WHOLE[:, 3:], WHOLE[:, :3]
    assert related(*swapped).kind == "parts"
    assert related(*swapped, reorders=True).kind == "same"


def test_a_laid_out_tensor_is_joined_as_it_says():
    halves = [LocalTensor(half, (("shard", 1, rank, 2),)) for rank, half in enumerate(WHOLE.chunk(2, 1))]
    assert relate(WHOLE, halves, [], 1e-6).kind == "same"
    means = [LocalTensor(WHOLE + n, (("mean", 0, rank, 2),)) for rank, n in enumerate((-1, 1))]
    assert relate(WHOLE, means, [], 1e-6).kind == "same"
    copies = [LocalTensor(WHOLE + rank, (("same", 0, rank, 2),)) for rank in range(2)]
    assert relate(WHOLE, copies, [], 1e-6).kind == "parts"


def test_a_share_selects_rows_and_places():
    share = {"x": BatchSelection((4, 6), torch.tensor([1, 2]), torch.tensor([0, 5]))}
    assert torch.equal(selected(WHOLE, share), WHOLE[[1, 2]][:, [0, 5]])
    assert selected(torch.ones(3), share).shape == (3,)


def test_ranks_differ_in_words():
    assert difference_on_ranks(WHOLE, {0: WHOLE, 1: WHOLE}, 1e-6) == ""
    said = difference_on_ranks(WHOLE, {0: WHOLE / 2, 1: WHOLE / 2}, 1e-6)
    assert said == "the ranks' parts sum to it, and were not summed"
    assert (
        difference_on_ranks(WHOLE, {0: WHOLE, 1: 2 * WHOLE}, 1e-6) == "it differs by 1 of its norm on rank 1"
    )
    said = difference_on_ranks(WHOLE, {0: 2 * WHOLE, 1: 3 * WHOLE}, 1e-6)
    assert said == "it differs by 2 of its norm; ranks differ from each other"
    assert difference_on_ranks(WHOLE, {0: WHOLE[:, :2], 1: WHOLE[:, 2:]}, 1e-6) == ""
    assert "do not join to (4, 6)" in difference_on_ranks(WHOLE, {0: WHOLE[:1], 1: WHOLE[:1]}, 1e-6)


def test_slices_are_joined_by_name():
    whole = joined_parts({"a": WHOLE, "b": WHOLE}, [{"a": WHOLE[:1]}, {"a": WHOLE[1:], "b": WHOLE}])
    assert all(torch.equal(one, WHOLE) for one in (whole["a"], whole["b"]))
