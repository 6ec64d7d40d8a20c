"""`TokenBudget` and `Packed`: the same batches for any number of ranks, resumed anywhere."""

import json
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import ConfigError, LoaderError
from tp_data import Item, Loader, Packed, Stream, TokenBudget

COSTS = [(i * 7919) % 37 + 1 for i in range(400)]
lengths = st.lists(st.integers(0, 40), max_size=150)
stops = st.sets(st.integers(0, 30))
batchers = st.sampled_from(
    [
        lambda: TokenBudget(90, window=20, multiple=3),
        lambda: TokenBudget(64, window=7, buckets=(16, 41), multiple=1),
        lambda: Packed(16, 3, how="concat"),
        lambda: Packed(16, 2, how="best-fit", window=12),
        lambda: Packed(16, 2, how="best-fit", long="truncate", window=30, last="drop"),
        lambda: Packed(45, 4, how="best-fit", window=10, last="pad"),
    ]
)


def batches_of(make, costs, stops=()):
    """Return all batches of an epoch; at each of ``stops`` a new batcher continues from the state as JSON."""
    batcher, found, taken = make(), [], 0
    batcher.start(None, list)

    def items():
        nonlocal taken
        while taken < len(costs):
            taken += 1
            yield Item(taken - 1, costs[taken - 1])

    source = items()
    while True:
        if len(found) in stops:
            state = json.loads(json.dumps(batcher.state_dict()))
            batcher, source = make(), items()
            batcher.start(state, lambda positions: [Item(p, costs[p]) for p in positions])
        rows = batcher.next_batch(source)
        if rows is None:
            return found
        found.append(rows)


def tokens_of(batches):
    return sorted(
        (piece.position, token)
        for rows in batches
        for row in rows
        for piece in row.pieces
        for token in range(piece.start, piece.stop)
    )


@given(batchers, lengths, stops)
def test_batches_are_the_same_however_often_an_epoch_is_resumed(make, costs, stops):
    assert batches_of(make, costs, stops) == batches_of(make, costs)


@given(batchers, lengths, st.sampled_from([1, 2, 3, 4, 6]))
def test_ranks_share_each_batch_without_loss_or_repetition(make, costs, ranks):
    batcher = make()
    for rows in batches_of(make, costs):
        parts = batcher.split(rows, ranks)
        assert len(parts) == ranks
        assert sorted((row for part in parts for row in part), key=repr) == sorted(rows, key=repr)


@given(lengths)
def test_every_token_comes_once(costs):
    expected = sorted((i, token) for i, cost in enumerate(costs) for token in range(cost))
    for make in (
        lambda: TokenBudget(90, window=20, multiple=3),
        lambda: Packed(16, 3, how="concat"),
        lambda: Packed(16, 2, how="best-fit", window=12),
    ):
        assert tokens_of(batches_of(make, costs)) == expected


@given(lengths)
def test_rows_and_batches_have_at_most_the_tokens_that_are_asked_for(costs):
    for how in ("concat", "best-fit"):
        for rows in batches_of(lambda how=how: Packed(16, 3, how=how, window=9), costs):
            assert len(rows) <= 3
            assert all(sum(p.stop - p.start for p in row.pieces) <= 16 for row in rows)
    for rows in batches_of(lambda: TokenBudget(90, window=20, buckets=(10, 45)), costs):
        longest = max(p.stop for row in rows for p in row.pieces)
        assert len(rows) * (10 if longest <= 10 else 45) <= 90


def test_best_fit_splits_no_document_that_fits_into_a_row():
    pieces = [p for rows in batches_of(lambda: Packed(40, 4), COSTS) for row in rows for p in row.pieces]
    assert len(pieces) == len(COSTS)
    full = [
        sum(p.stop - p.start for p in row.pieces)
        for rows in batches_of(lambda: Packed(40, 4), COSTS)
        for row in rows
    ]
    assert sum(full) / (40 * len(full)) > 0.97


def test_what_is_held_back_comes_in_the_next_window():
    last_window = {}
    for window, rows in enumerate(batches_of(lambda: Packed(40, 4, window=40), COSTS)):
        for row in rows:
            for piece in row.pieces:
                last_window[piece.position] = window
    for position, batch in last_window.items():
        assert batch <= position // 40 * 6 + 14  # 40 documents are about 5 batches


def test_a_state_has_about_a_thousand_bytes_at_most():
    costs = COSTS * 20
    for make in (
        lambda: TokenBudget(1200),
        lambda: Packed(128, 8),
        lambda: Packed(128, 8, how="concat"),
    ):
        batcher = make()
        items = iter([Item(i, cost) for i, cost in enumerate(costs)])
        most = 0
        while batcher.next_batch(items):
            most = max(most, len(json.dumps(batcher.state_dict())))
        assert most < 1100


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ranks_of_a_step_have_about_as_much_to_do(ranks):
    batcher = TokenBudget(1000)
    loads, means = [], []
    for rows in batches_of(lambda: TokenBudget(1000), COSTS)[:-2]:
        padded = [len(part) * max(row.pieces[0].stop for row in part) for part in batcher.split(rows, ranks)]
        loads.append(max(padded) - min(padded))
        means.append(sum(padded) / ranks)
    assert sum(loads) / sum(means) < 0.05


def long_tailed(count=12_000):
    """Return lengths of which few are long: a log-normal distribution with a sigma of 0.8, up to 2,000."""
    draw = random.Random(0)
    return [max(1, min(2000, int(draw.lognormvariate(math.log(90), 0.8)))) for _ in range(count)]


def test_batches_of_lengths_with_a_long_tail_are_full_and_shared_evenly():
    def make():
        return TokenBudget(16_384)

    costs = long_tailed()
    lengths = [[row.pieces[0].stop for row in rows] for rows in batches_of(make, costs)]
    padded = sum(len(batch) * max(batch) for batch in lengths)
    assert sum(costs) / padded > 0.95
    for ranks in (2, 3, 4, 6):
        loads, means = 0, 0
        for rows in batches_of(make, costs):
            parts = make().split(rows, ranks)
            own = [len(part) * max((row.pieces[0].stop for row in part), default=0) for part in parts]
            loads, means = loads + max(own) - min(own), means + sum(own) / ranks
        assert loads / means < 0.05


@pytest.mark.parametrize(("count", "batches"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_a_last_batch_that_is_full_is_not_dropped(count, batches):
    found = batches_of(lambda: TokenBudget(8, multiple=1, last="drop"), [4] * count)
    assert [len(rows) for rows in found] == [2] * batches


def test_a_last_batch_is_dropped_where_it_has_space_for_a_sample():
    def kept(costs):
        batches = batches_of(lambda: TokenBudget(48, multiple=12, last="drop"), costs)
        return sorted(len(rows) for rows in batches)

    assert kept([3] * 16) == [16]
    assert kept([3] * 15) == []
    assert kept([3] * 40) == [12, 12, 16]


def test_slow_ranks_get_fewer_tokens():
    batcher = TokenBudget(900, speeds=[2, 1])
    rows = batches_of(lambda: TokenBudget(900), [10] * 90)[0]
    fast, slow = batcher.split(rows, 2)
    assert abs(len(fast) - 2 * len(slow)) <= 2
    with pytest.raises(ConfigError, match="speeds of 2 ranks, and there are 3"):
        batcher.split(rows, 3)


def test_rows_of_ranks_have_about_as_many_pairs_of_tokens():
    rows = batches_of(lambda: Packed(40, 12), COSTS)[0]
    pairs = [
        sum((p.stop - p.start) ** 2 for row in part for p in row.pieces)
        for part in Packed(40, 12).split(rows, 3)
    ]
    assert [len(part) for part in Packed(40, 12).split(rows, 3)] == [4, 4, 4]
    assert max(pairs) < 1.1 * min(pairs)


# -- Bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBudget(0), "tokens=0: give a whole number above 0"),
        (lambda: TokenBudget(8, buckets=(4, 0)), "buckets=0: give a whole number"),
        (lambda: TokenBudget(8, speeds=[1, 0]), "give a number above 0 for each rank"),
        (lambda: TokenBudget(8, last="pad"), "last='pad': take one of 'spread', 'drop'"),
        (lambda: Packed(8, how="fit"), "how='fit': take one of 'best-fit', 'concat'"),
        (lambda: Packed(8, long="cut"), "long='cut': take one of"),
        (lambda: Packed(8, rows=1.5), "rows=1.5: give a whole number"),
        (lambda: Packed(8, arguments="flex"), "arguments='flex': take one of 'mask'"),
        (lambda: Packed(8, arguments="positions", causal=False), "which are causal; take 'mask'"),
    ],
)
def test_an_argument_without_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("batcher", "message"),
    [
        (TokenBudget(8), r"position 1 has 9 tokens, more than the budget of 8 for a whole batch"),
        (
            TokenBudget(64, buckets=(4, 8)),
            r"position 1 has 9 tokens, and the longest of TokenBudget's buckets 8; give a longer one",
        ),
        (Packed(8, long="refuse"), r"position 1 has 9 tokens, and a row 8; take Packed\(long='split'\)"),
    ],
)
def test_a_sample_that_is_too_long_is_named(batcher, message):
    with pytest.raises(LoaderError, match=message):
        batcher.next_batch(iter([Item(0, 3), Item(1, 9)]))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "a"}, r"no field 'input_ids' to count tokens in, but \['text'\]"),
        ({"input_ids": "a b"}, "got str: 'a b'; tokenize the samples first"),
        ("a b", "got str: 'a b'; tokenize the samples first"),
        (torch.tensor(3), "got Tensor"),
    ],
)
def test_a_sample_without_tokens_is_refused(sample, message):
    with pytest.raises(LoaderError, match=message):
        Packed(8).cost(sample)


def test_a_sample_without_tokens_is_named_by_its_file_and_offset(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2]}\n{"text": "b"}\n')
    with pytest.raises(LoaderError, match=r"a\.jsonl.* a sample has no field 'input_ids'"):
        list(Loader(Stream(str(tmp_path / "a.jsonl")), Packed(8)))


@pytest.mark.parametrize(
    "batcher", [TokenBudget(8), TokenBudget(64, buckets=(4, 8)), Packed(8, long="refuse")]
)
def test_a_sample_that_is_too_long_is_named_by_its_file_and_offset(batcher, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps([1] * n) + "\n" for n in (3, 9)))
    with pytest.raises(
        LoaderError, match=r"a\.jsonl, sample 1, byte 10: the sample at position 1 has 9 tokens"
    ):
        list(Loader(Stream(str(tmp_path / "a.jsonl")), batcher))


def test_the_field_that_is_counted_can_be_named():
    assert TokenBudget(8, length="audio").cost({"audio": [0.0] * 5}) == 5
    assert TokenBudget(8, length=lambda sample: sample["frames"]).cost({"frames": 3}) == 3


# -- Costs that are noted --------------------------------------------------------------------------


class Words(list):
    """Samples that count how often one was loaded."""

    loaded = 0

    def __getitem__(self, index):
        Words.loaded += 1
        return {"input_ids": super().__getitem__(index)}


def loader_with_costs(folder, transform=None, **options):
    data = Words([[1] * cost for cost in COSTS])
    return Loader(Stream(data, shuffle=True, transform=transform), TokenBudget(300), costs=folder, **options)


def test_a_sample_is_counted_once_by_all_epochs_and_runs(tmp_path):
    plain = Loader(Stream(Words([[1] * cost for cost in COSTS]), shuffle=True), TokenBudget(300))
    expected = [[batch["input_ids"].tolist() for batch in plain] for _ in range(2)]
    Words.loaded = 0
    first = loader_with_costs(tmp_path)
    assert [len(first), Words.loaded] == [len(expected[0]), len(COSTS)]
    again = loader_with_costs(tmp_path)
    found = [[batch["input_ids"].tolist() for batch in again] for _ in range(2)]
    assert found == expected
    assert Words.loaded == 3 * len(COSTS), "counted once, and each is loaded in both epochs"
    with pytest.raises(TypeError, match=r"depends on the samples; Loader\(costs=folder\) counts these once"):
        len(plain)


def test_costs_that_are_known_in_part_are_completed(tmp_path):
    begun = iter(loader_with_costs(tmp_path))
    next(begun)
    rest = [batch["input_ids"].tolist() for batch in loader_with_costs(tmp_path, workers=1)]
    assert rest == [batch["input_ids"].tolist() for batch in loader_with_costs(tmp_path)]


def shorter(sample):
    return {"input_ids": sample["input_ids"][1:]}


def test_costs_of_another_transform_are_refused(tmp_path):
    len(loader_with_costs(tmp_path))
    with pytest.raises(LoaderError, match=r"Words, sample \d+: the sample costs \d+, and \d+ is noted of it"):
        next(iter(loader_with_costs(tmp_path, transform=shorter)))
