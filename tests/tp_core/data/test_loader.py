"""Which samples each rank sees, in which order, and how many there are."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from tp_core.data import Parts, PreparedLoader, Share, count_samples, split_evenly
from tp_core.errors import LoaderError
from tp_core.random import seeded


def loader_of(n, batch_size, **kwargs):
    return DataLoader(range(n), batch_size=batch_size, **kwargs)


def batches_of(loader, **kwargs):
    return [b.tolist() for b in PreparedLoader(loader, **kwargs)]


def shares_of(loader):
    return [loader.share for _ in loader]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@given(length=st.integers(0, 50), parts=st.integers(1, 9))
def test_splits_cover_everything_and_differ_by_at_most_one(length, parts):
    slices = split_evenly(length, parts)
    assert [i for s in slices for i in range(length)[s]] == list(range(length))
    sizes = [s.stop - s.start for s in slices]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_ranks_together_see_the_batches_of_one_device(n, batch_size, size, drop_last, epoch):
    def prepared(rank, size, *, training):
        loader = PreparedLoader(
            loader_of(n, batch_size, shuffle=True, drop_last=drop_last),
            seed=1,
            rank=rank,
            size=size,
            training=training,
        )
        loader.set_epoch(epoch)
        pairs = [(b.tolist(), loader.share) for b in loader]
        return [batch for batch, _ in pairs], [share for _, share in pairs]

    whole, _ = prepared(0, 1, training=True)
    ranks = [prepared(r, size, training=True) for r in range(size)]
    assert all(len(batches) == len(whole) for batches, _ in ranks)
    for i, batch in enumerate(whole):
        mine = [batches[i][: shares[i].samples] for batches, shares in ranks]
        assert sum(mine, []) == batch
        assert all(shares[i].total == len(batch) for _, shares in ranks)
        assert all(len(batches[i]) >= 1 for batches, _ in ranks)
    evaluated = [prepared(r, size, training=False)[0] for r in range(size)]
    seen = sorted(x for batches in evaluated for batch in batches for x in batch)
    assert seen == sorted(x for batch in whole for x in batch)


def test_the_order_follows_from_seed_and_epoch_and_not_from_the_generators():
    loader = PreparedLoader(loader_of(50, 7, shuffle=True), seed=5)
    first = [b.tolist() for b in loader]
    second = [b.tolist() for b in loader]
    torch.manual_seed(99)
    loader.set_epoch(0)
    assert [b.tolist() for b in loader] == first
    assert first != second
    assert batches_of(loader_of(50, 7, shuffle=True), seed=6) != first


def test_a_generator_of_the_loaders_own_decides_together_with_seed_and_epoch():
    def epochs(seed, own):
        generator = torch.Generator().manual_seed(own)
        loader = PreparedLoader(loader_of(50, 7, shuffle=True, generator=generator), seed=seed)
        found = [[b.tolist() for b in loader] for _ in range(2)]
        loader.set_epoch(1)
        assert [b.tolist() for b in loader] == found[1]
        return found

    assert epochs(5, 1) == epochs(5, 1)
    assert len({str(e) for found in (epochs(5, 1), epochs(5, 2), epochs(6, 1)) for e in found}) == 6


def test_an_epoch_leaves_the_generators_as_they_were():
    torch.manual_seed(3)
    loader_of(9, 2, shuffle=True)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with seeded(1, 2):
        torch.rand(1), random.random(), np.random.rand()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_seeded_blocks_draw_the_same_numbers():
    def draw(*key):
        with seeded(*key):
            return torch.rand(2).tolist(), random.random(), np.random.rand()

    assert draw(1, 2) == draw(1, 2) != draw(2, 1)


def test_the_users_loader_keeps_its_options_and_is_not_changed():
    class Special(DataLoader):
        pass

    def collate(items):
        return torch.tensor(items) + 100

    loader = Special(range(6), batch_size=2, collate_fn=collate, num_workers=0)
    sampler = loader.batch_sampler
    prepared = PreparedLoader(loader, rank=1, size=2)
    assert [b.tolist() for b in prepared] == [[101], [103], [105]]
    assert loader.batch_sampler is sampler
    assert prepared.dataset is loader.dataset
    assert prepared.batch_size == 2
    assert len(prepared) == 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_and_persistent_workers_see_every_epoch_anew():
    loader = loader_of(10, 4, shuffle=True, num_workers=1, persistent_workers=True)
    prepared = PreparedLoader(loader, seed=2)
    epochs = [[b.tolist() for b in prepared] for _ in range(2)]
    expected = PreparedLoader(loader_of(10, 4, shuffle=True), seed=2)
    assert epochs == [[b.tolist() for b in expected] for _ in range(2)]
    assert epochs[0] != epochs[1]


def test_leaving_an_epoch_early_does_not_shift_the_shares_of_the_next():
    loader = PreparedLoader(loader_of(5, 2))
    next(iter(loader))
    assert shares_of(loader) == [Share(2, 2), Share(2, 2), Share(1, 1)]


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0

    def __len__(self):
        return 6


def test_a_sampler_that_never_ends_is_bounded_by_its_length():
    assert batches_of(loader_of(6, 2, sampler=Endless())) == [[0, 0]] * 3


def test_a_custom_batch_sampler_is_split_too():
    sampler = BatchSampler(SequentialSampler(range(5)), 3, drop_last=False)
    loader = DataLoader(range(5), batch_sampler=sampler)
    assert batches_of(loader, rank=0, size=2) == [[0, 1], [3]]
    assert batches_of(loader, rank=1, size=2) == [[2], [4]]


@pytest.mark.parametrize(
    ("sampler", "asked"),
    [
        (None, False),
        (WeightedRandomSampler([1.0] * 6, 6), False),
        (RandomSampler(range(6), generator=torch.Generator()), True),
        (Endless(), True),
    ],
)
def test_ranks_compare_the_order_when_it_is_the_users(sampler, asked):
    compared = []
    loader = PreparedLoader(
        loader_of(6, 2, sampler=sampler), size=2, agree=lambda what, value, **_: compared.append(what)
    )
    list(loader)
    assert compared[:2] == ["the number of batches of a loader", "what a loader draws"]
    assert (compared[2:] == ["the order of the samples in epoch 0"]) == asked


def test_set_epoch_reaches_the_samplers():
    class Told(SequentialSampler):
        def set_epoch(self, epoch):
            self.told = epoch

    sampler = Told(range(4))
    loader = PreparedLoader(loader_of(4, 2, sampler=sampler))
    loader.set_epoch(7)
    list(loader)
    assert sampler.told == 7


class Dated(Dataset):
    """Its samples are the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.epoch


class DatedStream(IterableDataset):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 2)


@pytest.mark.parametrize("kind", [Dated, DatedStream])
@pytest.mark.parametrize("workers", [0, 1])
def test_set_epoch_reaches_datasets_also_in_workers_that_stay(kind, workers):
    loader = DataLoader(kind(), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
    prepared = PreparedLoader(loader)
    assert [batch.tolist() for _ in range(3) for batch in prepared] == [[0, 0], [1, 1], [2, 2]]


def test_batches_are_moved_and_counted():
    moved = []
    loader = PreparedLoader(loader_of(3, 2), move=lambda b: moved.append(b) or "moved")
    assert list(loader) == ["moved", "moved"]


def test_any_iterable_will_do_where_the_data_is_not_split():
    batches = [torch.zeros(3, 1), {"x": torch.zeros(2, 4)}, "text"]
    assert list(PreparedLoader(batches)) == batches
    assert shares_of(PreparedLoader(batches)) == [Share(3, 3), Share(2, 2), Share(1, 1)]


def test_a_loader_that_splits_by_itself_counts_alike_on_all_ranks():
    loader = PreparedLoader(loader_of(4, 2), size=2, rank=1, shard=False)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]
    assert shares_of(loader) == [Share(2, 4), Share(2, 4)]


def test_ranks_know_of_each_other_the_sizes_of_batches_that_their_loaders_choose(caplog):
    sizes = []
    for n, drop_last in ((9, False), (6, False), (8, True)):
        loader = loader_of(n, 4, drop_last=drop_last)
        PreparedLoader(loader, size=3, shard=False, gather=lambda value: sizes.append(value) or [value])
    mine = PreparedLoader(loader_of(9, 4), size=3, shard=False, gather=lambda _: sizes)
    assert shares_of(mine) == [Share(4, 12), Share(4, 10), Share(1, 1)]
    assert not caplog.messages


@pytest.mark.parametrize("unknown", ["here", "there"])
def test_a_smaller_batch_warns_where_the_other_ranks_have_unknown_ones(caplog, unknown):
    batches = [torch.ones(4), torch.ones(4), torch.ones(3), torch.ones(2)]
    loader = batches if unknown == "here" else loader_of(11, 4)
    mine = PreparedLoader(loader, size=2, shard=False, gather=lambda value: [value, None])
    assert shares_of(mine)[:3] == [Share(4, 8), Share(4, 8), Share(3, 6)]
    assert len(caplog.messages) == 1
    assert "has 3 samples, and its first one had 4" in caplog.messages[0]
    evaluated = PreparedLoader(loader, size=2, shard=False, training=False, gather=lambda _: 1 / 0)
    assert len(list(evaluated)) >= 3
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Stream(), batch_size=2), DataLoader(range(4), batch_size=None), [1, 2]],
    ids=["stream", "unbatched", "list"],
)
def test_what_has_no_indices_cannot_be_split(loader):
    with pytest.raises(LoaderError, match=r"cannot be split over 2 ranks.*shard=False"):
        PreparedLoader(loader, size=2)


def test_a_distributed_sampler_would_split_twice():
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    with pytest.raises(LoaderError, match="would split it again"):
        PreparedLoader(loader_of(4, 2, sampler=sampler), size=2)
    in_batches = BatchSampler(sampler, batch_size=2, drop_last=False)
    for size in (1, 2):  # in one process half of the samples were left out without a word
        with pytest.raises(LoaderError, match=f"over 2 ranks, and the backend .* again, over {size}"):
            PreparedLoader(DataLoader(range(4), batch_sampler=in_batches), size=size)
    alone = DistributedSampler(range(4), num_replicas=1, rank=0)
    assert len(PreparedLoader(loader_of(4, 2, sampler=alone))) == 2


def test_a_loader_without_length_says_what_to_give():
    for loader in (iter([1, 2]), DataLoader(Stream(), batch_size=2)):
        with pytest.raises(LoaderError, match=r"has no length.*steps_per_epoch="):
            len(PreparedLoader(loader))


def test_what_cannot_be_iterated_is_refused():
    with pytest.raises(LoaderError, match="a loader must be iterable, got int: 3"):
        PreparedLoader(3)


def test_samples_are_counted_by_the_first_tensor_with_a_length():
    assert count_samples({"a": 3, "b": [torch.tensor(1.0), torch.zeros(4, 2)]}) == 4
    assert count_samples("no tensor") == 1


def test_parts_count_all_of_their_samples():
    parts = Parts([torch.ones(3, 2), torch.ones(2, 2)], counts=[3, 2])
    assert count_samples(parts) == 5
    assert shares_of(PreparedLoader([parts])) == [Share(5, 5)]


class FiveNumbers(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_the_collate_function_of_a_stream_is_turned_too():
    loader = DataLoader(FiveNumbers(), batch_size=2, collate_fn=sum)
    doubled = PreparedLoader(loader, collate=lambda collate: lambda items: 2 * collate(items))
    assert list(doubled) == [2, 10, 8]
    assert list(loader) == [1, 5, 4]


@pytest.mark.parametrize("done", [0, 1, 3, 5, 6])
def test_a_loader_knows_by_itself_how_much_it_has_yielded(done):
    def endless(loader):
        while True:
            yield from loader

    def own():
        return PreparedLoader(loader_of(6, 2, shuffle=True), seed=4)

    whole = [batch.tolist() for batch in islice(endless(own()), 9)]
    parts = own()
    found = [batch.tolist() for batch in islice(endless(parts), done)]
    for _ in range(2):  # saved, and saved again before it is used
        state, parts = parts.state_dict(), own()
        parts.load_state_dict(state)
    found += [batch.tolist() for batch in islice(endless(parts), 9 - done)]
    assert found == whole
