"""The global order: permutations without memory, and mixtures with exact shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import ConfigError
from tp_data import Shuffle, Stream

SHUFFLES = st.builds(Shuffle, buffer=st.none() | st.integers(1, 40), blocks=st.none() | st.integers(1, 40))


def drawn(stream, stop, epoch=0, start=0):
    """Return (source, index) of positions."""
    sources, indices = stream.order(epoch).locate(range(start, stop))
    return list(zip(sources.tolist(), indices.tolist(), strict=True))


@given(st.integers(1, 200), SHUFFLES | st.booleans(), st.integers(0, 2**40))
def test_every_sample_is_in_an_epoch_once(size, shuffle, seed):
    stream = Stream(range(size), shuffle=shuffle, seed=seed)
    assert sorted(drawn(stream, size)) == [(0, i) for i in range(size)]


@given(st.integers(1, 200), SHUFFLES, st.data())
def test_a_seek_finds_what_reading_would(size, shuffle, data):
    stream = Stream(range(size), shuffle=shuffle)
    start = data.draw(st.integers(0, size - 1))
    assert drawn(stream, size, start=start) == drawn(stream, size)[start:]


@pytest.mark.parametrize("position", [-1, 7])
def test_an_epoch_has_no_sample_outside(position):
    with pytest.raises(IndexError, match=f"position {position} is not in an epoch of 7 samples"):
        Stream(range(7), shuffle=True).sample(position)


def test_seeds_and_epochs_have_orders_of_their_own():
    stream = Stream(range(1000), shuffle=True)
    orders = [
        drawn(stream, 1000),
        drawn(stream, 1000, epoch=1),
        drawn(Stream(range(1000), shuffle=True, seed=1), 1000),
    ]
    assert orders[0] == drawn(Stream(list(range(1000)), shuffle=True), 1000)
    same = [
        sum(a == b for a, b in zip(orders[i], orders[j], strict=True)) for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    assert max(same) < 12, "one place in a thousand is the same by chance"
    assert drawn(Stream(range(9)), 9) == [(0, i) for i in range(9)], (
        "and without a shuffle, the order of the source"
    )


def test_a_permutation_prefers_no_place():
    first = np.array([drawn(Stream(range(10), shuffle=True, seed=seed), 1)[0][1] for seed in range(1000)])
    counts = np.bincount(first, minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 33, "chi-squared, nine degrees of freedom, one in ten thousand"


def test_a_buffer_mixes_within_windows_and_blocks_stay_together():
    inside = [i for _, i in drawn(Stream(range(100), shuffle=Shuffle(buffer=10)), 100)]
    assert all(place // 10 == i // 10 for place, i in enumerate(inside))
    assert inside != sorted(inside)
    blocks = [i for _, i in drawn(Stream(range(96), shuffle=Shuffle(blocks=10)), 96)]
    starts = [place for place, i in enumerate(blocks) if i % 10 == 0]
    whole = [list(range(first, min(first + 10, 96))) for first in (blocks[p] for p in starts)]
    assert [blocks[p : p + len(block)] for p, block in zip(starts, whole, strict=True)] == whole
    assert [blocks[p] for p in starts] != sorted(blocks[p] for p in starts)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.lists(st.integers(1, 20), min_size=4, max_size=4),
    st.sampled_from(["first", "all"]),
    st.booleans(),
)
def test_a_mixture_draws_no_sample_twice(sizes, weights, until, shuffle):
    sources = {f"s{i}": range(size) for i, size in enumerate(sizes)}
    total = sum(weights[: len(sizes)])
    mixture = {name: weights[i] / total for i, name in enumerate(sources)}
    stream = Stream(sources, mixture=mixture, until=until, shuffle=shuffle)
    found = drawn(stream, len(stream))
    assert len(set(found)) == len(found)
    counts = [sum(source == i for source, _ in found) for i in range(len(sizes))]
    if until == "all":
        assert counts == sizes
    else:
        assert any(count == size for count, size in zip(counts, sizes, strict=True))
        assert found[-1][0] in [i for i, size in enumerate(sizes) if counts[i] == size], (
            "it ends with a source"
        )


def test_the_shares_of_a_mixture_hold_in_every_stretch():
    stream = Stream(
        {"a": range(10**6), "b": range(10**6), "c": range(10**6)}, mixture={"a": 0.7, "b": 0.2, "c": 0.1}
    )
    for start in (0, 5000, 123_456):
        found = [source for source, _ in drawn(stream, start + 1024, start=start)]
        assert [round(found.count(i) / 1024, 1) for i in range(3)] == [0.7, 0.2, 0.1]


def test_a_source_may_begin_later_and_another_be_capped():
    sources = {"old": range(1000), "new": range(1000)}
    stream = Stream(
        sources, mixture={0: {"old": 1.0}, 300: {"old": 0.5, "new": 0.5}}, caps={"new": 100}, until="all"
    )
    found = [source for source, _ in drawn(stream, len(stream))]
    assert found[:300] == [0] * 300
    assert abs(found[300:400].count(1) - 50) < 15
    assert found.count(1) == 100
    assert found.count(0) == 1000, "what is left divides the share of the capped one"


@given(
    st.lists(st.integers(5, 60), min_size=2, max_size=4),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 30),
    st.sampled_from(["first", "all"]),
    st.data(),
)
def test_a_source_that_joins_later_with_a_cap_leaves_what_came_before(sizes, stretches, cap, until, data):
    names = [f"s{i}" for i in range(len(sizes))]
    sources = {name: range(size) for name, size in zip(names, sizes, strict=True)}
    mixture, start = {0: {names[0]: 1.0}}, 0
    for stretch in stretches:
        start += stretch
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        mixture[start] = dict.fromkeys(chosen, 1 / len(chosen))
    options = {"until": until, "shuffle": data.draw(SHUFFLES | st.booleans()), "caps": {names[-1]: cap}}
    whole = Stream(sources, mixture=mixture, **options)
    found = drawn(whole, len(whole))
    assert len(set(found)) == len(found)
    assert [source for source, _ in found].count(len(sizes) - 1) <= cap
    at = data.draw(st.integers(0, len(found)))
    assert drawn(whole, len(found), start=at) == found[at:]
    # The same run before its last stretch was thought of, and without the sources that it does not use yet.
    earlier = {first: shares for first, shares in mixture.items() if first < start}
    used = {name for shares in earlier.values() for name in shares} | {names[-1]}
    before = Stream({n: s for n, s in sources.items() if n in used}, mixture=earlier, **options)
    common = min(start, len(before), len(whole))
    order = [n for n in names if n in used]
    assert [(order[source], i) for source, i in drawn(before, common)] == [
        (names[source], i) for source, i in found[:common]
    ]


def test_an_endless_stream_shuffles_each_pass_anew():
    stream = Stream({"a": range(10), "b": range(50)}, mixture={"a": 0.5, "b": 0.5}, repeat=True, shuffle=True)
    with pytest.raises(TypeError, match="repeat=True has no end"):
        len(stream)
    mine = [i for source, i in drawn(stream, 2000) if source == 0]
    passes = [mine[n : n + 10] for n in range(0, 900, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len(set(map(tuple, passes))) > 80
    alone = Stream(range(10), repeat=True, shuffle=True)
    assert sorted(drawn(alone, 20, start=10)) == [(0, i) for i in range(10)]
    assert drawn(alone, 10**12 + 5, start=10**12) == drawn(alone, 10**12 + 5, start=10**12)


def test_a_temperature_makes_shares_more_equal():
    sources = {"large": range(9000), "small": range(1000)}
    by_size = Stream(sources, temperature=1.0, repeat=True)
    warmer = Stream(sources, temperature=2.0, repeat=True)
    shares = [[s for s, _ in drawn(stream, 4096)].count(1) / 4096 for stream in (by_size, warmer)]
    assert shares == pytest.approx([0.1, 0.25], abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixture": {"a": 0.7, "b": 0.2}}, r"must add up to 1, and .* to 0.9"),
        ({"mixture": {"a": 0.5, "c": 0.5}}, r"has weights of \['c'\], and the sources are \['a', 'b'\]"),
        ({"mixture": {"a": 1.5, "b": -0.5}}, "weights are numbers from 0 on"),
        ({"mixture": {5: {"a": 1.0}}}, r"needs weights from position 0 on, got \[5\]"),
        ({"mixture": {0: 0.5}}, "a dict from source to weight, got 0.5"),
        ({"mixture": {"a": 1 - 1e-7, "b": 1e-7}}, "the weight of 'b' is 1e-07; the least"),
        ({"temperature": 0}, "temperature=0: 1 keeps the weights"),
        ({"caps": {"a": 1}}, "caps are of sources of a mixture"),
        ({"caps": {"a": 0}, "temperature": 1}, "give a number of samples above 0"),
        ({"until": "never"}, "until='never'"),
        ({"shuffle": Shuffle}, "shuffle="),
    ],
)
def test_what_makes_no_order_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Stream({"a": range(10), "b": range(10)}, **options)


@pytest.mark.parametrize("options", [{"buffer": 0}, {"blocks": 2.5}, {"blocks": True}])
def test_a_shuffle_needs_numbers(options):
    with pytest.raises(ConfigError, match="give a number of samples above 0, or None"):
        Shuffle(**options)
