"""The loader: the same samples in each step on any ranks and workers, and states of all of them."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import ConfigError, LoaderError, StateError
from tp_data import BatchSize, Loader, Shuffle, Stream


def make(size=100, batch=8, *, workers=0, seed=3, shuffle=True, **options):
    return Loader(Stream(range(size), shuffle=shuffle, seed=seed), batch, workers=workers, **options)


def steps(loader, ranks, state=None, number=None):
    """Return the samples of each step over all ranks, and a state behind the last."""
    own = [loader.for_rank(rank, ranks) for rank in range(ranks)]
    for one in own:
        if state is not None:
            one.load_state_dict(state)
    iterators, found = [iter(one) for one in own], []
    while number is None or len(found) < number:
        parts = [next(one, None) for one in iterators]
        if parts[0] is None:
            assert parts == [None] * ranks, "all ranks take the same number of steps"
            break
        found.append(
            [x for one, part in zip(own, parts, strict=True) for x in part.tolist()[: one.share.samples]]
        )
    states = [json.loads(json.dumps(one.state_dict())) for one in own]
    assert states == [states[0]] * ranks, "the same on all ranks"
    return found, states[0]


WHOLE = steps(make(), 1)[0]


def test_one_epoch_has_each_sample_once_and_the_next_another_order():
    loader = make()
    first, second = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(100))
    assert first == WHOLE != second
    assert len(loader) == len(first) == 13


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_each_step_has_the_same_samples_on_any_number_of_ranks(ranks):
    assert steps(make(), ranks)[0] == WHOLE


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), max_size=3),
    st.integers(1, 6),
    st.sampled_from(["spread", "drop"]),
)
def test_the_number_of_ranks_may_change_in_the_epoch(changes, last_ranks, last):
    # More batches than the changes take: a state behind the last one begins the next epoch.
    loader, state, found = make(50, BatchSize(7, last=last)), None, []
    for ranks, number in changes:
        more, state = steps(loader, ranks, state, number)
        found += more
    found += steps(loader, last_ranks, state)[0]
    assert found == steps(loader, 1)[0]


def test_a_batch_of_a_mixture_has_its_samples_in_the_order_of_the_stream():
    mixture = {"a": 0.3, "b": 0.7}
    stream = Stream({"a": range(100), "b": range(100, 400)}, mixture=mixture, shuffle=True)
    found = sum((batch.tolist() for batch in Loader(stream, 8)), [])
    assert found == [stream.sample(position) for position in range(len(stream))]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_change_nothing(workers):
    found, state = steps(make(workers=workers), 2, number=5)
    assert found == WHOLE[:5]
    assert steps(make(), 1, state)[0] == WHOLE[5:]


def test_a_state_is_small_and_a_resume_reads_nothing_before():
    class Noting(list):
        read = []

        def __getitem__(self, index):
            self.read.append(index)
            return index

    data = Noting(range(1000))
    loader = Loader(Stream(data, shuffle=True), 10)
    for number, _ in enumerate(loader):
        if number == 89:
            break
    state = loader.state_dict()
    assert len(json.dumps(state)) < 300
    data.read.clear()
    again = Loader(Stream(data, shuffle=True), 10)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == data.read
    assert len(data.read) == 10


def test_a_state_at_the_end_begins_the_next_epoch():
    loader = make()
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_another_batch_size_continues_at_the_same_sample():
    found, state = steps(make(), 1, number=3)
    more, _ = steps(make(batch=5), 1, state)
    assert sum(found + more, []) == sum(WHOLE, [])


def test_a_loop_that_breaks_begins_the_next_epoch_and_set_epoch_chooses():
    loader = make()
    next(iter(loader))
    second = [batch.tolist() for batch in loader]
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == second
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == WHOLE


def noisy(sample):
    return torch.tensor(
        [sample, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64
    )


def test_random_numbers_of_a_sample_are_the_same_on_any_ranks_and_workers():
    def rows(workers, ranks):
        loader = Loader(Stream(range(20), shuffle=True, transform=noisy), 4, workers=workers)
        parts = [[*loader.for_rank(rank, ranks)] for rank in range(ranks)]
        return torch.cat([part for step in zip(*parts, strict=True) for part in step])

    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate()
    whole = rows(0, 1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate(), "those of the program are left alone"
    assert torch.equal(whole, rows(0, 2))
    assert torch.equal(whole, rows(1, 1))
    assert len(whole[:, 1:].flatten().unique()) == 60


def test_generators_are_seeded_once_something_draws(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f"{i}\n" for i in range(40)))

    def seeds(draws_from):
        found = []

        def transform(sample):
            found.append(torch.initial_seed())
            return noisy(sample).tolist() if sample >= draws_from else sample

        list(Loader(Stream(str(tmp_path / "a.jsonl"), transform=transform), BatchSize(8, collate=list)))
        return found

    before = torch.get_rng_state(), random.getstate()
    assert len(set(seeds(40))) == 1, "nothing draws, and nothing is seeded"
    late = seeds(20)
    assert len(late) == 48, "the batch in which something draws is loaded again"
    assert (len(set(late[:24])), len(set(late[24:]))) == (1, 24)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def rarely_noisy(sample):
    return noisy(sample).tolist() if sample % 7 == 6 else [sample]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_that_are_rarely_drawn_are_those_of_their_samples(workers):
    stream = Stream(range(40), shuffle=True, transform=rarely_noisy)
    expected = [stream.sample(position) for position in range(40)]
    loader = Loader(stream, BatchSize(4, collate=list), workers=workers)
    assert [sample for batch in loader for sample in batch] == expected
    loader.set_epoch(0)
    assert [sample for batch in loader for sample in batch] == expected


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn, torch.rand])
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_a_draw_of_any_generator_is_seen_and_leaves_that_of_the_program(draw, drawn_before):
    def transform(sample):
        return sample + float(draw(1) if draw is torch.rand else draw())

    stream = Stream(range(4), transform=transform)
    expected = [stream.sample(position) for position in range(4)]
    np.random.seed(5)
    for _ in range(drawn_before):
        np.random.randn()  # numpy keeps a second number, which it draws without a step of its generator
    before = np.random.get_state(legacy=False)
    assert list(Loader(stream, BatchSize(2, collate=list))) == [expected[:2], expected[2:]]
    after = np.random.get_state(legacy=False)
    assert (after["state"]["key"] == before["state"]["key"]).all()
    assert (after["state"]["pos"], after["has_gauss"]) == (before["state"]["pos"], before["has_gauss"])


def noise_in_place(sample):
    sample["x"] += random.random()
    return sample["x"]


def test_a_sample_that_a_transform_changes_in_place_is_changed_once():
    expected = Stream([{"x": 0.0}], transform=noise_in_place).sample(0)
    assert list(Loader(Stream([{"x": 0.0}], transform=noise_in_place), BatchSize(1, collate=list))) == [
        [expected]
    ]


def noisy_collate(samples):
    return [sample + random.random() for sample in samples]


def test_a_number_that_numpy_has_at_hand_again_is_no_sample():
    def loaded(transform):
        return list(Loader(Stream(range(1), transform=transform), BatchSize(1, collate=list)))

    def noisy(sample):
        return sample + np.random.normal()

    before = np.random.get_state()
    try:
        expected = loaded(noisy)
        np.random.normal()
        with_spare = np.random.get_state()
        np.random.normal()
        loaded(abs)
        np.random.set_state(with_spare)  # as a program does that goes back
        assert loaded(noisy) == expected
    finally:
        np.random.set_state(before)


@pytest.mark.parametrize("draw", [random.gauss, random.random])
def test_so_is_none_that_python_has_at_hand(draw):
    def loaded():
        arguments = () if draw is random.random else (0.0, 1.0)
        transform = lambda sample: sample + draw(*arguments)  # noqa: E731 - a transform as people have it
        return list(Loader(Stream(range(3), transform=transform), BatchSize(2, collate=list)))

    before = random.getstate()
    try:
        expected = loaded()
        random.gauss(0.0, 1.0)  # keeps a second one
        kept = random.getstate()
        assert loaded() == expected
        assert random.getstate() == kept
    finally:
        random.setstate(before)


def test_a_collate_that_draws_has_the_same_numbers_after_a_resume(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f"{i}\n" for i in range(40)))

    def loader():
        stream = Stream(str(tmp_path / "a.jsonl"), transform=abs)
        return Loader(stream, BatchSize(8, collate=noisy_collate))

    first = loader()
    whole = list(first)
    again = loader()
    next(iter(again))
    state = again.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(resumed) == whole[1:]


def test_a_rank_without_a_row_has_a_stand_in_or_no_batch():
    loader = make(size=9, batch=8)
    shares = [[rank.share.samples for rank in [loader.for_rank(n, 2)] for _ in rank] for n in range(2)]
    assert shares == [[4, 1], [4, 0]]
    assert [len([*loader.for_rank(n, 2, stand_ins=False)]) for n in range(2)] == [2, 1]


def test_the_launchers_variables_choose_the_part(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert next(iter(make())).tolist() == WHOLE[0][4:]


class Broken(list):
    def __getitem__(self, index):
        if index in {3, 4, 50}:
            raise ValueError(f"no sample {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_loaded_is_named(workers):
    loader = Loader(Stream(Broken(range(100))), 8, workers=workers)
    with pytest.raises(
        LoaderError, match="Broken, sample 3: it could not be loaded: ValueError: no sample 3"
    ):
        next(iter(loader))

    def fails(sample):
        raise KeyError("text")

    with pytest.raises(LoaderError, match=r"range, sample 0: the transform raised KeyError: 'text'"):
        next(iter(Loader(Stream(range(10), transform=fails), 8)))


def test_the_place_of_a_skipped_sample_is_taken_by_the_next_on_any_ranks():
    loader = Loader(Stream(Broken(range(100))), 8, errors="skip")
    found = steps(loader, 1)[0]
    assert found == steps(loader, 3)[0]
    assert found[0] == [0, 1, 2, 5, 5, 5, 6, 7]
    loader = Loader(Stream(Broken(range(100))), 8, errors="skip")
    list(loader.for_rank(0, 1))
    assert loader.stats.skipped == 4
    assert loader.stats.errors[0].startswith("Broken, sample 3: it could not be loaded")
    assert (loader.stats.batches, loader.stats.rows) == (13, 100)
    with pytest.raises(LoaderError, match="the transform raised ZeroDivisionError"):
        next(iter(Loader(Stream(Broken(range(100)), transform=lambda s: 1 / 0), 8, errors="skip")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 101}, "a source 'data' with other samples"),
        ({"seed": 4}, "another order of the same sources"),
        ({"shuffle": Shuffle(blocks=2)}, "another order of the same sources"),
    ],
)
def test_a_state_of_another_stream_is_refused(change, message):
    _, state = steps(make(), 1, number=2)
    with pytest.raises(StateError, match=message):
        make(**change).load_state_dict(state)


def test_what_is_no_state_is_refused():
    with pytest.raises(StateError, match=r"no state of tp_data's Loader: it lacks \['batch', 'order'"):
        make().load_state_dict({"epoch": 1, "position": 2})
    _, state = steps(make(), 1, number=2)
    with pytest.raises(StateError, match="another batcher held back, and BatchSize holds none"):
        make().load_state_dict(state | {"batcher": {"held": [1]}})


def test_a_source_that_is_added_later_leaves_a_state_as_it_was():
    whole = steps(Loader(Stream({"a": range(100)}, mixture={"a": 1.0}, shuffle=True), 8), 1)[0]
    _, state = steps(Loader(Stream({"a": range(100)}, mixture={"a": 1.0}, shuffle=True), 8), 1, number=5)
    mixture = {0: {"a": 1.0}, 48: {"a": 0.5, "b": 0.5}}
    more = Stream({"b": range(100), "a": range(100)}, mixture=mixture, shuffle=True)
    assert steps(Loader(more, 8), 2, state)[0][0] == whole[5]
    late = Stream({"a": range(100), "b": range(100)}, mixture={0: {"a": 1.0}, 16: {"b": 1.0}}, shuffle=True)
    with pytest.raises(StateError, match="no source 'b' before this position"):
        Loader(late, 8).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers=-1: give a number from 0 on"),
        ({"prefetch": 0}, "prefetch=0: give a number from 1 on"),
        ({"errors": "ignore"}, "errors='ignore'"),
        ({"timeout_s": 5.0}, "timeout_s ends the wait for worker processes"),
        ({"batch": 0}, "a batch needs a number of samples above 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)
    with pytest.raises(ConfigError, match=r"a Loader needs a Stream, got range"):
        Loader(range(3), 8)


def sleeps(sample):
    import time

    time.sleep(1)


def test_a_source_that_says_nothing_is_named_after_a_while():
    loader = Loader(Stream(range(1), transform=sleeps), 1, workers=1, timeout_s=0.2)
    with pytest.raises(
        LoaderError, match=r"no batch came within 0.2 s, behind position 0 .* range, sample 0"
    ):
        next(iter(loader))
