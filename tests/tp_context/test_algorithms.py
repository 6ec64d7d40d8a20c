"""Each algorithm of attention on slices equals torch's function on whole sequences, or is refused by name."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from tp_context import _slices, attention

# private, as `_slices` is: without a model and its check
from tp_context._attention import _of_transformers
from tp_context._patches import patched
from tp_core.errors import StepError
from tp_testing import RankPool

from tests.launches import process_group
from tests.tp_context.cuts import activate, cuts_of

TOKENS = 13


def made(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def documents(tokens):
    """Return a causal mask of documents of uneven lengths, in which one query sees nothing."""
    at = torch.arange(tokens)
    numbers = (at > tokens // 3).long() + (at > tokens // 2)
    mask = (numbers[:, None] == numbers) & (at[:, None] >= at)
    mask[tokens // 2] = False
    return mask


def window(tokens):
    at = torch.arange(tokens)
    return (at[:, None] >= at) & (at[:, None] - at < 4)


def padding(tokens):
    return (torch.arange(tokens) < tokens - 2)[None, None, None].expand(2, 1, 1, -1)


def shaped(rows=TOKENS, keys=TOKENS, heads=4, shared=4, features=4):
    """Return queries, keys and values of some sizes."""
    of_values = features if isinstance(features, int) else features[1]
    features = features if isinstance(features, int) else features[0]
    return (
        made(2, heads, rows, features),
        made(2, shared, keys, features, seed=1),
        made(2, shared, keys, of_values, seed=2),
    )


def bias(tokens):
    return made(4, tokens, tokens, seed=3)


def prefix(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril() | (torch.arange(tokens) < 5)


def alibi(tokens):
    """Return a causal mask with a slope for each head."""
    at, slopes = torch.arange(tokens), 2.0 ** -torch.arange(1, 5, dtype=torch.float64)
    hidden = torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(at[:, None] < at, -torch.inf)
    return (at - at[:, None]).clamp(max=0) * slopes[:, None, None] + hidden


def in_transformers(query, key, value, attn_mask=None, **scores):
    """Call attention as a model of transformers does."""
    mixed, _ = _of_transformers(nn.Module(), query, key, value, attn_mask, **scores)
    return mixed.transpose(1, 2)


# Sinks are a score for each head.
SCORES = {
    "soft caps": {"softcap": 0.7},
    "sinks": {"s_aux": made(4, seed=5)},
    "sinks of heads that do not divide": {"s_aux": made(3, seed=5), "softcap": 2.0},
}

# What is asked for: the sizes, a mask, and whether causal.
CASES = {
    "bidirectional": ({}, None, False),
    "causal": ({}, None, True),
    "grouped": ({"shared": 2}, None, True),
    "one group": ({"shared": 1}, None, True),
    "heads that do not divide": ({"heads": 3, "shared": 3}, None, True),
    "groups that do not divide": ({"heads": 9, "shared": 3}, documents, False),
    "documents": ({}, documents, False),
    "a window": ({"shared": 2}, window, False),
    "padding": ({}, padding, False),
    "values of other sizes": ({"features": (4, 6), "shared": 2}, None, True),
    "values of other sizes, documents": ({"features": (4, 6)}, documents, False),
    "crossed": ({"rows": 23}, None, False),
    "bias": ({}, bias, False),
    "prefix": ({"shared": 2}, prefix, False),
    "alibi": ({}, alibi, False),
    "soft caps": ({}, window, False),
    "sinks": ({"shared": 2}, prefix, False),
    "sinks of heads that do not divide": ({"heads": 3, "shared": 3}, prefix, False),
    "dropout": ({"drops": 0.4}, None, True),
    "dropout, documents": ({"drops": 0.4, "heads": 3, "shared": 3}, documents, False),
    "many rows": ({"rows": 600, "keys": 600, "heads": 2, "shared": 2}, None, True),
    "many rows in a window": ({"rows": 600, "keys": 600, "heads": 2, "shared": 2}, window, False),
}
REFUSED = {
    ("ring", "bias"): "this one is additive",
    ("ring", "alibi"): "this one is additive",
    **{("ring", name): "sinks and soft caps of scores are not in it" for name in SCORES},
    ("ring", "dropout"): "dropout of attention weights",
    ("ring", "dropout, documents"): "dropout of attention weights",
}


def compared(tensors, call, algorithm, mask=None):
    """Return the largest differences of the output, of gradients, and of a penalty's gradients."""
    import torch.distributed as dist

    lengths = [tensors[0].size(-2), tensors[1].size(-2)]
    cuts = cuts_of(*lengths, rank=dist.get_rank(), size=dist.get_world_size(), algorithm=algorithm)
    rows, keys = (cuts.of_whole(n) for n in lengths)
    own_mask = mask if mask is None or mask.size(-2) == 1 else rows.take(mask, -2)
    parts = [c.take(t, -2).requires_grad_() for t, c in zip(tensors, (rows, keys, keys), strict=True)]
    whole = [t.clone().requires_grad_() for t in tensors]
    grad = made(*tensors[0].shape[:-1], tensors[2].size(-1), seed=7)

    def differences(split, full, cut):
        return float((split - cut.take(full, -2)).detach().abs().max())

    torch.manual_seed(4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = call(*whole, attn_mask=mask)
        wanted = torch.autograd.grad(expected, whole, grad, create_graph=True)
        twice = torch.autograd.grad(sum(t.square().sum() for t in wanted), whole)
    torch.manual_seed(4)
    with activate(cuts), patched():
        found = call(*parts, attn_mask=own_mask)
        once = torch.autograd.grad(found, parts, rows.take(grad, -2), retain_graph=True)
        again = torch.autograd.grad(found, parts, rows.take(grad, -2), create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in again), parts)
    worst = [differences(found, expected, rows)]
    for split, full in ((once, wanted), (again, wanted), (second, twice)):
        worst.append(max(map(differences, split, full, (rows, keys, keys))))
    return worst


def table(algorithms, names, store):
    """Return what is seen of each case, as far as there are heads for all ranks."""
    torch.set_num_threads(1)
    with process_group(store):
        return {(algorithm, name): outcome(algorithm, name) for algorithm in algorithms for name in names}


def outcome(algorithm, name):
    """Return the largest differences of a case, or the refusal."""
    sizes, mask, causal = CASES[name]
    sizes = dict(sizes)
    drops = sizes.pop("drops", 0.0)
    tensors = shaped(**sizes)
    mask = None if mask is None else mask(tensors[0].size(-2))
    call = partial(
        attention,
        dropout_p=drops,
        is_causal=causal,
        enable_gqa=sizes.get("shared", 4) < sizes.get("heads", 4),
    )
    if name in SCORES:
        call = partial(in_transformers, **SCORES[name])
    try:
        with patch.object(torch, "float32", torch.float64):  # transformers' type of weights
            return compared(tensors, call, algorithm, mask)
    except StepError as error:
        return str(error)


ALGORITHMS = ("all-gather", "ulysses", "ring")


def check(results):
    assert len({str(sorted(r)) for r in results}) == 1
    for result in results:
        for case, worst in result.items():
            if case in REFUSED:
                assert REFUSED[case] in worst, (case, worst)
            elif isinstance(worst, str):
                assert "it splits the heads" in worst, (case, worst)
            else:
                assert max(worst) < 1e-11, (case, worst)


@pytest.mark.parametrize("names", [["causal", "documents"], pytest.param([*CASES], marks=pytest.mark.slow)])
def test_each_algorithm_equals_attention_on_one_device(two_ranks, names, tmp_path):
    check(two_ranks.run(table, ALGORITHMS, names, tmp_path / "store"))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_each_algorithm_on_more_ranks_equals_attention_on_one_device(size, tmp_path):
    with RankPool(size) as ranks:
        check(ranks.run(table, ALGORITHMS, [*CASES], tmp_path / "store"))


def exchanged(most, store):
    """Return whether tensors are gathered and summed, and in how many messages of at most so many bytes."""
    import torch.distributed as dist

    wholes = [made(2, 3, TOKENS, 4, seed=seed) for seed in range(2)]
    with (
        process_group(store),
        patch.object(_slices, "TOGETHER", most),
        patch.object(_slices, "all_gather_single", wraps=_slices.all_gather_single) as gathers,
        patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sums,
    ):
        cut = _slices.Cut(TOKENS, dist.get_rank(), dist.get_world_size(), None)
        parts = [cut.take(whole, 2) for whole in wholes]
        gathered = cut.all_gather_together(parts, 2)
        summed = cut.sum_and_take(list(wholes), 2)
    are_gathered = all(map(torch.equal, gathered, wholes))
    are_summed = all(torch.equal(total, part * cut.size) for total, part in zip(summed, parts, strict=True))
    return are_gathered, are_summed, gathers.call_count, sums.call_count


@pytest.mark.parametrize(("most", "messages"), [(2**22, 1), (0, 2)])
def test_keys_and_values_are_exchanged_together_unless_they_are_large(two_ranks, most, messages, tmp_path):
    for found in two_ranks.run(exchanged, most, tmp_path / "store"):
        assert found == (True, True, messages, messages)
