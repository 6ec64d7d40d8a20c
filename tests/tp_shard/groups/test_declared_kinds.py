"""Each collective declares which kinds of tensors ranks hold before and after it, and makes them so."""

import pytest
import torch
import torch.nn.functional as F
import tp_shard as ts

# Private, all of them: the declarations stand where the collectives are.
from tp_shard._groups import _collectives as c
from tp_shard._split import Split, bounds
from tp_shard._verify._simulate import simulate
from tp_shard.nn import _cross_entropy, _sequence, _split_products
from tp_shard.nn._heads import sum_shared

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

RANKS = 3
SILENT = {"_trace._Mark"}  # it marks tensors, and exchanges nothing
TARGET = torch.tensor([0, 3, 6, 5])
TOKENS = torch.tensor([[0, 6, 2], [2, 5, 3]])


def split(whole, dim, rank):
    start, stop = bounds(whole.size(dim), RANKS, rank)
    return whole.narrow(dim, start, stop - start)


def same(*tensors):
    return torch.cat(tensors)


def scaled(x):
    """Return the tensor, with a gradient of three ranks' losses."""
    return RANKS * x - (RANKS - 1) * x.detach()


def summed(start):
    def call(group, x):
        x = x.contiguous()
        if start:
            c.start_all_reduce_(x, group, layer=None).wait()
            return x
        return c.all_reduce_(x, group)

    return call


def gathered_flat(group, x):
    output = x.new_empty(group.size * x.size(0), x.size(1))
    c.all_gather_flat(output, x, group)
    return output


def along_sequence(function):
    return lambda group, x: function(x, _sequence.SequenceState(), group)


def as_compiled(_, logits, target, options, inplace):
    return c.apply(_cross_entropy._Compiled, logits, target, options)


def loss(group, x):
    return ts.nn.functional.parallel_cross_entropy(x, TARGET, num_classes=7, group=group)


def head(reduction):
    def call(group, x, weight):
        return ts.nn.functional.parallel_linear_cross_entropy(
            x, weight, TARGET, num_classes=7, reduction=reduction, group=group
        )

    return call


def head_whole(reduction):
    return lambda x, weight: F.cross_entropy(F.linear(x, weight), TARGET, reduction=reduction)


def embedded(group, weight):
    lookup = _split_products.Lookup(None, None, 2.0, False, False)
    return _split_products.vocabulary_embedding(TOKENS, weight, 7, lookup, group, None)


X, ROWS, EVEN = made(4, 7), made(7, 4), made(6, 4)
COLUMN, ROW = made(7, 5, seed=1), made(5, 7, seed=1)
COPY = Trial(lambda group, x: c.copy(x, group=group), same, [X], [-1, -1])
REDUCE = Trial(lambda group, x: c.reduce(x, group=group), same, [X], [-1, -1])
REDUCE_ = Trial(lambda group, x: c.reduce_(x * 1, group, None), same, [X], [-1, -1])
SCATTER = Trial(lambda group, x: c.scatter(x, group=group), same, [X], [-1, -1])
GATHER = Trial(lambda group, x: c.gather(x, size=7, group=group), same, [X], [-1, -1])
BATCH = Trial(lambda group, x: c.gather_batch(x, size=7, group=group), scaled, [ROWS], [0, 0])
SCATTER_SEQUENCE = Trial(along_sequence(_sequence.scatter_sequence), same, [ROWS], [-2, -2])
GATHER_SEQUENCE = Trial(along_sequence(_sequence.gather_sequence), same, [ROWS], [-2, -2])
JOIN_SEQUENCE = Trial(along_sequence(_sequence.join_sequence), same, [ROWS], [-2, -2])
REDUCE_SCATTER = Trial(along_sequence(_sequence.reduce_scatter_sequence), same, [ROWS], [-2, -2])
SUM_ALL = Trial(
    lambda group, *xs: torch.cat(c.apply(_sequence._SumAll, group, *xs)), same, [X, made(2, 7)], [0, 0, 0]
)
COLUMNS = Trial(
    lambda group, x, w: _split_products.column_linear(x, w, None, group, None),
    F.linear,
    [made(4, 5), COLUMN],
    [-1, 0, -1],
)
ROWS_OF = Trial(
    lambda group, x, w: _split_products.row_linear(x, w, None, group, None), F.linear, [X, ROW], [-1, -1, -1]
)
TABLE = Trial(embedded, lambda weight: F.embedding(TOKENS, weight), [ROWS], [0, 0])
LOSS = Trial(loss, lambda x: F.cross_entropy(x, TARGET), [X], [-1, -1])
IN_FORWARD = Trial(head("mean"), head_whole("mean"), [made(4, 5), COLUMN], [-1, 0, -1])
AGAIN = Trial(head("none"), head_whole("none"), [made(4, 5), COLUMN], [-1, 0, -1])

COMPILED = "_cross_entropy._Compiled"  # which the compiler takes; here it runs as it is

TRIALS = {
    "_collectives.copy": [COPY],
    "_collectives._Copy": [COPY],
    "_collectives.reduce": [REDUCE],
    "_collectives._Reduce": [REDUCE],
    "_collectives.reduce_": [REDUCE_],
    "_collectives._ReduceInPlace": [REDUCE_],
    "_collectives.scatter": [SCATTER],
    "_collectives._Scatter": [SCATTER],
    "_collectives.gather": [GATHER],
    "_collectives._AllGather": [GATHER],
    "_collectives.gather_batch": [BATCH],
    "_collectives.all_gather": [Trial(lambda g, x: c.all_gather(x, -1, [3, 2, 2], g), same, [X], [-1, -1])],
    "_collectives.all_gather_flat": [Trial(gathered_flat, same, [EVEN], [0, 0])],
    "_collectives.all_reduce_": [Trial(summed(False), same, [X], [-1, -1])],
    "_collectives.start_all_reduce_": [Trial(summed(True), same, [X], [-1, -1])],
    "_sequence._sum_and_take": [
        Trial(lambda g, x: _sequence._sum_and_take(x, 0, 7, g), same, [ROWS], [0, 0])
    ],
    "_sequence.scatter_sequence": [SCATTER_SEQUENCE],
    "_sequence._ScatterSequence": [SCATTER_SEQUENCE],
    "_sequence.gather_sequence": [GATHER_SEQUENCE],
    "_sequence._GatherSequence": [GATHER_SEQUENCE, JOIN_SEQUENCE],
    "_sequence.join_sequence": [JOIN_SEQUENCE],
    "_sequence.reduce_scatter_sequence": [REDUCE_SCATTER],
    "_sequence._ReduceScatter": [REDUCE_SCATTER],
    "_sequence._SumAll": [SUM_ALL],
    "_split_products.column_linear": [COLUMNS],
    "_split_products._Column": [COLUMNS],
    "_split_products.row_linear": [ROWS_OF],
    "_split_products._Row": [ROWS_OF],
    "_split_products.vocabulary_embedding": [TABLE],
    "_cross_entropy._CrossEntropy": [LOSS],
    COMPILED: [LOSS],
    "_fused_loss._GradientInForward": [IN_FORWARD],
    "_fused_loss._RecomputeInBackward": [AGAIN],
}
SHARED = "_heads._SumShared"  # ranks hold some pieces twice: a test of its own
FOUND = collectives("tp-shard")


def test_every_collective_declares_what_ranks_hold():
    check_declared(FOUND, silent=SILENT)


def test_a_declaration_is_what_torchs_collective_does():
    check_primitives(FOUND)


def test_every_declaration_of_a_gradient_is_tried():
    with_gradient = {name for name, one in FOUND.items() if any(d.gradient_takes for d in one.declared)}
    assert with_gradient - {SHARED} <= TRIALS.keys()
    assert TRIALS.keys() <= FOUND.keys()


def on_ranks(declared, trial):
    return simulate(RANKS, lambda group: tried(declared, trial, group, group.rank, RANKS, split))


@pytest.mark.parametrize("name", TRIALS)
def test_a_collective_gives_what_it_declares(name, monkeypatch):
    if name == COMPILED:
        monkeypatch.setattr(_cross_entropy, "apply", as_compiled)  # once: simulated ranks are threads
    for declared, trial in zip(FOUND[name].declared, TRIALS[name], strict=True):
        check(declared, trial, on_ranks(declared, trial), split)


def test_pieces_that_ranks_share_get_the_sum_of_their_gradients():
    (declared,) = FOUND[SHARED].declared
    assert declared == Declaration(("sharded",), "sharded", "partial", ("sharded",))
    pieces = Split(0, 6, (((0, 2),), ((0, 2), (2, 4)), ((4, 6),)))
    whole, gradients = made(6, 3), [made(6, 3, seed=r) for r in range(RANKS)]

    def body(group):
        mine = pieces.take(whole, group.rank).clone().requires_grad_()
        output = sum_shared(mine, pieces, group)
        assert torch.equal(output, mine)
        return torch.autograd.grad(output, mine, pieces.take(gradients[group.rank], group.rank))[0]

    first, second, third = simulate(RANKS, body)
    torch.testing.assert_close(first, gradients[0][:2] + gradients[1][:2])
    torch.testing.assert_close(second, torch.cat([first, gradients[1][2:4]]))
    torch.testing.assert_close(third, gradients[2][4:])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_collectives.copy", Declaration(("replicated",), "replicated", "replicated", ("replicated",))),
        ("_collectives.reduce", Declaration(("partial",), "sharded", "replicated", ("replicated",))),
        ("_collectives.gather", Declaration(("sharded",), "replicated", "partial", ("sharded",))),
        (
            "_split_products.row_linear",
            Declaration(("sharded",) * 2, "partial", "replicated", ("sharded",) * 2),
        ),
    ],
)
def test_a_wrong_declaration_is_noticed(name, wrong):
    (trial,) = TRIALS[name]
    with pytest.raises(AssertionError):
        check(wrong, trial, on_ranks(wrong, trial), split)
