"""Streams: epochs that go on in them, their shares of ranks and workers, and where they stand."""

from itertools import count, islice

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from tp_core.data import PreparedLoader, Share
from tp_core.errors import LoaderError


class Numbers(IterableDataset):
    """The numbers below ``n``, or all of them; in a pass p they begin at 100 p."""

    def __init__(self, n=None, index=0, step=1):
        self.n, self.index, self.step, self.first = n, index, step, 0

    def set_epoch(self, epoch):
        self.first = 100 * epoch

    def __iter__(self):
        numbers = count() if self.n is None else range(self.n)
        return map(self.first.__add__, islice(numbers, self.index, None, self.step))

    def shard(self, index, n_shards):
        assert (self.index, self.step) == (0, 1), "a share of a share"
        share = type(self)(self.n, index, n_shards)
        share.first = self.first
        return share


class Placed(Numbers):
    """Knows where it stands."""

    done = 0

    def __iter__(self):
        first, self.done = self.done, 0
        for i, number in enumerate(super().__iter__()):
            self.done = i + 1
            if i >= first:
                yield number
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class NoShares(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def stream(dataset, **options):
    options = {"batch_size": 2} | options
    loader = PreparedLoader(DataLoader(dataset, collate_fn=list, **options))
    loader.continues_stream = True
    return loader


def epochs(loader, steps, n):
    return [list(islice(loader, steps)) for _ in range(n)]


def test_epochs_go_on_where_the_ones_before_ended():
    loader = stream(Numbers())
    assert epochs(loader, 2, 3) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


def test_a_stream_that_ends_begins_another_pass_within_an_epoch():
    loader = stream(Numbers(5))
    assert epochs(loader, 2, 3) == [[[0, 1], [2, 3]], [[4], [100, 101]], [[102, 103], [104]]]
    assert epochs(loader, 3, 1) == [[[200, 201], [202, 203], [204]]]


def test_a_stream_shorter_than_an_epoch_ends_with_it():
    loader = stream(Numbers(3))
    assert epochs(loader, 4, 2) == [[[0, 1], [2]], [[100, 101], [102]]]


def test_each_epoch_begins_anew_where_that_is_wanted():
    loader = stream(Numbers())
    loader.continues_stream = False
    assert epochs(loader, 2, 2) == [[[0, 1], [2, 3]], [[100, 101], [102, 103]]]


def test_two_iterations_at_once_are_their_own():
    loader = stream(Numbers())
    loader.continues_stream = False
    first, second = iter(loader), iter(loader)
    assert [next(first), next(second), next(first)] == [[0, 1], [100, 101], [2, 3]]


@given(n=st.integers(4, 12), steps=st.integers(1, 4), done=st.integers(0, 3), before=st.integers(0, 5))
@example(n=9, steps=1, done=0, before=5)  # a dataset that begins again by itself has done so
def test_a_stream_goes_on_as_if_it_had_never_ended(n, steps, done, before):
    done %= steps
    for kind in (Numbers, Placed):
        whole, parts = stream(kind(n)), stream(kind(n))
        expected = [batch for epoch in epochs(whole, steps, before + 3) for batch in epoch]
        found = [batch for epoch in epochs(parts, steps, before) for batch in epoch]
        if steps * 2 > n:  # an epoch that no pass can fill
            continue
        if done:
            found += list(islice(parts, done))
            state = parts.state_dict(batches=done)
        else:
            state = parts.state_dict(batches=0) | {"epoch": parts.next_epoch}
        resumed = stream(kind(n))
        assert resumed.load_state_dict(state, replay=kind is Numbers) == done
        found += list(islice(resumed, steps - done))
        found += [batch for epoch in epochs(resumed, steps, 2) for batch in epoch]
        assert found[: len(expected)] == expected


def test_what_a_stream_cannot_find_again_is_said():
    loader = stream(Numbers())
    list(islice(loader, 3))
    state = loader.state_dict(batches=3)
    with pytest.raises(LoaderError, match=r"cannot be put at batch 3 .*StatefulDataLoader.*replay=True"):
        stream(Numbers()).load_state_dict(state)
    with pytest.raises(LoaderError, match="was split over 1 ranks, and it is over 2 now"):
        PreparedLoader(DataLoader(Numbers(), 2), rank=1, size=2).load_state_dict(state, replay=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_have_each_sample_once(workers):
    seen = []
    for rank in range(2):
        loader = DataLoader(Numbers(24), batch_size=4, collate_fn=list, num_workers=workers)
        prepared = PreparedLoader(loader, rank=rank, size=2)
        batches = list(prepared)
        assert {len(batch) for batch in batches} == {2}, "the batch size is that of the whole job"
        seen += sum(batches, [])
    assert sorted(seen) == list(range(24))


def test_a_share_of_a_stream_counts_as_one_of_equal_shares():
    tensors = DataLoader(Numbers(8), batch_size=4, collate_fn=torch.tensor)
    prepared = PreparedLoader(tensors, rank=1, size=2)
    assert [prepared.share for _ in prepared] == [Share(2, 4), Share(2, 4)]


def test_one_rank_leaves_a_stream_as_it_is_without_workers():
    assert list(stream(Numbers(4))) == [[0, 1], [2, 3]]


def test_a_split_stream_goes_on_and_is_put_where_it_stood():
    def own():
        loader = PreparedLoader(DataLoader(Placed(20), batch_size=4, collate_fn=list), rank=1, size=2)
        loader.continues_stream = True
        return loader

    whole = epochs(own(), 3, 3)
    parts = own()
    assert list(islice(parts, 3)) == whole[0] == [[1, 3], [5, 7], [9, 11]]
    list(islice(parts, 1))
    state, resumed = parts.state_dict(batches=1), own()
    resumed.load_state_dict(state)
    assert [*islice(resumed, 2), *islice(resumed, 3)] == [*whole[1][1:], *whole[2]]


def test_what_cannot_be_split_says_what_it_takes():
    with pytest.raises(LoaderError, match=r"iterable one with shard\(index, count\).*shard=False"):
        PreparedLoader(DataLoader(NoShares(), batch_size=2), size=2)
    with pytest.raises(LoaderError, match="batch_size=3, the whole job's, is not a multiple"):
        PreparedLoader(DataLoader(Numbers(8), batch_size=3), size=2)
    with pytest.raises(LoaderError, match="length of a stream says nothing of the shares of 2 ranks"):
        len(PreparedLoader(DataLoader(Numbers(8), batch_size=2), size=2))


class Noisy(Numbers):
    def __iter__(self):
        return (number + torch.rand(()) for number in super().__iter__())


@pytest.mark.parametrize("continues_stream", [False, True])
def test_what_is_read_again_draws_nothing_from_the_generators_of_the_run(continues_stream):
    loaders = [PreparedLoader(DataLoader(Noisy(12), batch_size=2), seed=1) for _ in range(2)]
    for loader in loaders:
        loader.continues_stream = continues_stream
    batches = iter(loaders[0])
    for _ in range(3):
        next(batches)
    state, drawn = loaders[0].state_dict(), torch.get_rng_state()
    wanted = [next(batches) for _ in range(2)]
    loaders[1].load_state_dict(state, replay=True)
    torch.set_rng_state(drawn)
    assert torch.equal(torch.cat(list(islice(loaders[1], 2))), torch.cat(wanted))
