"""Streams in runs: epochs that go on in them, interrupted and resumed, on one device and on ranks."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from tp_core.errors import LoaderError
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Limits, Trainer

from tests.cases import first_fast


class Rows(IterableDataset):
    """Every row once in a pass: those of one share."""

    def __init__(self, n=40, index=0, count=1):
        self.n, self.index, self.count = n, index, count

    def __iter__(self):
        for i in range(self.index, self.n, self.count):
            yield torch.tensor([float(i)], dtype=torch.float64), i

    def shard(self, index, count):
        return Rows(self.n, index, count)


class PlacedRows(Rows):
    done = first = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for i, row in enumerate(super().__iter__()):
            self.done = i + 1
            if i >= first:
                yield row

    def shard(self, index, count):
        return PlacedRows(self.n, index, count)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = self.first = state["done"]


def fit(dataset, *, folder=None, replay=False, calls=1, limits=None, **arguments):
    """Return the weight, and which rows were seen."""
    seen = []

    def step(model, batch):
        seen.extend(batch[1].tolist())
        return model(batch[0]).square().mean()

    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoint = None if folder is None else Checkpoints(folder, every_steps=2, replay=replay)
    arguments = {"epochs": 3} | arguments
    limits = Limits(steps_per_epoch=4) if limits is None else replace(limits, steps_per_epoch=4)
    loader = DataLoader(dataset, batch_size=4)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        for _ in range(calls):
            trainer.fit(
                model,
                optimizer,
                loader,
                step=step,
                limits=limits,
                checkpoint=checkpoint,
                resume=None if folder is None else "auto",
                **arguments,
            )
    return model.weight.item(), seen


def test_an_epoch_goes_on_in_the_stream_unless_it_is_to_restart():
    assert fit(Rows())[1] == [*range(40), *range(8)]
    assert fit(Rows(), limits=Limits(restart_stream=True))[1] == [*range(16)] * 3
    assert fit(Rows(), limits=Limits(overfit_batches=1), max_steps=2)[1] == [*range(4)] * 2


def test_calls_of_one_epoch_see_what_one_call_sees():
    assert fit(Rows(), epochs=1, calls=3) == fit(Rows(), epochs=3)


@pytest.mark.parametrize("stop", first_fast([4, 5, 11], 5))
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", [Rows, PlacedRows])
def test_a_stream_is_resumed_where_it_stood(tmp_path, kind, restart, stop):
    whole = fit(kind(), limits=Limits(restart_stream=restart))
    replay = kind is Rows
    fit(kind(), folder=tmp_path, max_steps=stop, limits=Limits(restart_stream=restart))
    found = fit(kind(), folder=tmp_path, replay=replay, limits=Limits(restart_stream=restart))
    assert found[0] == whole[0]
    assert found[1] == whole[1][stop * 4 :] or replay


def test_a_stream_is_resumed_at_the_end_of_a_later_pass(tmp_path):
    whole = fit(PlacedRows(16))
    fit(PlacedRows(16), folder=tmp_path, max_steps=8)
    assert fit(PlacedRows(16), folder=tmp_path) == (whole[0], [*range(16)])


def _on_a_rank(folder, kind):
    whole = fit(kind())
    fit(kind(), folder=folder, max_steps=7)
    parts = fit(kind(), folder=folder, replay=kind is Rows)
    return whole[0], parts[0], whole[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PlacedRows, Rows])
def test_ranks_have_their_own_rows_and_are_resumed_in_them(tmp_path, kind):
    first, second = run_ranks(functools.partial(_on_a_rank, tmp_path, kind), 2)
    assert first[0] == first[1] == second[0] == second[1]
    assert sorted(first[2][:20] + second[2][:20]) == list(range(40))


class NoShares(IterableDataset):
    def __iter__(self):
        return iter(Rows())


def _refused():
    with pytest.raises(LoaderError) as caught:
        fit(NoShares())
    return str(caught.value)


@pytest.mark.slow
def test_a_stream_that_cannot_be_split_says_so_on_every_rank():
    for message in run_ranks(_refused, 2):
        assert "(DataLoader over NoShares) cannot be split over 2 ranks" in message
