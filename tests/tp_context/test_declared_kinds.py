"""Each collective declares which kinds of tensors ranks hold before and after it, and makes them so."""

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from tp_context import gather

# Private, all of them: the declarations stand where the collectives are.
from tp_context._all_gather import AllGatherAttention
from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._ring import RingAttention
from tp_context._slices import Cut, Cuts, _GatherSlices, _SumAndTake
from tp_context._ulysses import _to_heads, _to_tokens, _ToHeads, _ToTokens
from tp_testing import RankPool

from tests.declared_kinds import (
    Declaration,
    Trial,
    check,
    check_declared,
    check_primitives,
    collectives,
    made,
    tried,
)
from tests.tp_context.cuts import activate

RANKS, LENGTH, HEADS = 3, 7, 6
SILENT = {"_session._SequenceLoss"}  # it exchanges nothing: each rank goes back from its own loss
FOUND = collectives("tp-context")


def split(whole, dim, rank):
    """Return a rank's part: of tokens what the cut says, of heads as many as the others have."""
    if whole.size(dim) == HEADS:
        return whole.chunk(RANKS, dim)[rank]
    return Cut(LENGTH, rank, RANKS, None).take(whole, dim)


def first(call):
    return lambda cut, x: call(cut, x)[0]


def gathered(cut, x):
    with activate(Cuts([cut], "all-gather")):
        return gather(x, 1)


def by_keys(cut, *tensors):
    return AllGatherAttention.apply(Rules(cut, cut), None, *Inputs(*tensors))


def around(cut, *tensors):
    return RingAttention.apply(Rules(cut, cut), QueryKeyCuts(cut, cut), *Inputs(*tensors))


def same(x):
    return x * 1


X = made(2, LENGTH, 3)
OF_HEADS = made(2, HEADS, LENGTH, 4)
QKV = [made(2, HEADS, LENGTH, 4, seed=seed) for seed in range(3)]
TO_HEADS = Trial(first(_ToHeads.apply), same, [OF_HEADS], [-2, -3])
TO_TOKENS = Trial(first(lambda cut, x: _ToTokens.apply(cut, [HEADS], x)), same, [OF_HEADS], [-3, -2])

TRIALS = {
    "_all_gather.AllGatherAttention": Trial(by_keys, F.scaled_dot_product_attention, QKV, [-2] * 4),
    "_ring.RingAttention": Trial(around, F.scaled_dot_product_attention, QKV, [-2] * 4),
    "_slices.gather": Trial(lambda cut, x: cut.gather(x, 1), same, [X], [1, 1]),
    "_slices._GatherSlices": Trial(lambda cut, x: _GatherSlices.apply(x, cut, 1), same, [X], [1, 1]),
    "_slices._SumAndTake": Trial(lambda cut, x: _SumAndTake.apply(x, cut, 1), same, [X], [1, 1]),
    "_slices.all_gather_together": Trial(
        first(lambda cut, x: cut.all_gather_together([x], 1)), same, [X], [1, 1]
    ),
    "_slices.sum_and_take": Trial(first(lambda cut, x: cut.sum_and_take([x], 1)), same, [X], [1, 1]),
    "_split_state.gather": Trial(gathered, same, [X], [1, 1]),
    "_ulysses._to_heads": Trial(first(lambda cut, x: _to_heads([x], cut)), same, [OF_HEADS], [-2, -3]),
    "_ulysses._to_tokens": Trial(
        first(lambda cut, x: _to_tokens([x], cut, [HEADS])), same, [OF_HEADS], [-3, -2]
    ),
    "_ulysses._ToHeads": TO_HEADS,
    "_ulysses._ToTokens": TO_TOKENS,
}


def test_every_collective_declares_what_ranks_hold():
    check_declared(FOUND, silent=SILENT)


def test_a_declaration_is_what_torchs_collective_does():
    check_primitives(FOUND)


def test_every_declaration_of_a_gradient_is_tried():
    with_gradient = {name for name, one in FOUND.items() if any(d.gradient_takes for d in one.declared)}
    assert with_gradient <= TRIALS.keys() <= FOUND.keys()


@pytest.fixture(scope="module")
def pool():
    with RankPool(RANKS) as ranks:
        yield ranks


def _tried(declared, name):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    return tried(declared, TRIALS[name], Cut(LENGTH, rank, RANKS, None), rank, RANKS, split)


@pytest.mark.parametrize("name", TRIALS)
def test_a_collective_gives_what_it_declares(pool, name):
    (declared,) = FOUND[name].declared
    check(declared, TRIALS[name], pool.run(_tried, declared, name), split)


def test_a_wrong_declaration_is_noticed(pool):
    for wrong in (
        Declaration(("sharded",), "partial", "partial", ("sharded",)),
        Declaration(("sharded",), "replicated", "replicated", ("sharded",)),
    ):
        results = pool.run(_tried, wrong, "_slices.gather")
        with pytest.raises(AssertionError):
            check(wrong, TRIALS["_slices.gather"], results, split)
