"""Ranks that make different calls are told so, with the lines of the program that they are at."""

import os
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import DisagreementError, RankFailedError
from tp_trainer import Trainer

from tests.reference_training import mean_square


def rank():
    return int(os.environ["RANK"])


def told(calls):
    """Return the message of the error in which the calls of this rank end."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.rand(8, 2)), batch_size=4)
    with (
        Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer,
        pytest.raises(DisagreementError) as caught,
    ):
        calls(trainer, model, optimizer, loader)
    return str(caught.value)


def _one_evaluates_and_one_trains():
    def calls(trainer, model, optimizer, loader):
        if rank() == 0:
            trainer.evaluate(model, loader, step=mean_square)
        else:
            trainer.fit(model, optimizer, loader, step=mean_square, epochs=1)

    return told(calls)


def _one_validates():
    def calls(trainer, model, optimizer, loader):
        val_loader = loader if rank() else None
        trainer.fit(model, optimizer, loader, step=mean_square, epochs=1, validation=val_loader)

    return told(calls)


def _they_compare_something_else():
    def calls(trainer, model, optimizer, loader):
        trainer.prepare(model)
        trainer.session.check_agreement("the size of the vocabulary" if rank() else "the classes", 7)

    return told(calls)


def _own_exchanges_at_two_places():
    def calls(trainer, model, optimizer, loader):
        trainer.prepare(model)
        session = trainer.session
        got = session.gather_objects(rank()) if rank() else own_gather(session)
        assert got == [0, 1]
        trainer.fit(model, optimizer, loader, step=mean_square, epochs=1 + rank())

    return told(calls)


def _rank_0_cannot_measure():
    # No public call makes the measurement fail on rank 0 alone.
    of = "tp_trainer._memory._job_memory."
    failing = patch(of + "_measure", side_effect=ValueError("no weights"))
    with (
        patch("tp_core._contracts._job._LEAST_PART", 0.0),
        failing,
        Trainer(seed=0, devices="cpu", progress=False) as trainer,
        pytest.raises((ValueError, RankFailedError)) as caught,
    ):
        trainer.prepare(nn.utils.skip_init(nn.Linear, 2**12, 2**12))  # smaller models are not measured
    return f"{type(caught.value).__name__}: {caught.value}"


def own_gather(session):
    return session.gather_objects(0)


def _they_broadcast_at_two_places():
    """Return the message of the error of a rank that gets what it did not ask for, or what it got."""
    with Trainer(devices="cpu", backend="ddp", progress=False) as trainer:
        trainer.prepare(nn.utils.skip_init(nn.Linear, 2**12, 2**12))  # smaller models are not measured
        try:
            return trainer.session.broadcast(7, where=f"place {rank()}")
        except DisagreementError as error:
            return str(error)


@pytest.mark.slow
def test_a_broadcast_that_was_not_asked_for_is_told_to_whom_it_comes(two_ranks):
    first, second = two_ranks.run(_they_broadcast_at_two_places)
    assert first == 7
    assert "(in place 0); rank 1 at" in second
    assert "(in place 1)" in second


def test_the_lines_of_the_program_are_named(two_ranks):
    for message in two_ranks.run(_one_evaluates_and_one_trains):
        assert "rank 0 at " in message
        assert "trainer.evaluate(model, loader, step=mean_square)" in message
        assert "trainer.fit(model, optimizer, loader, step=mean_square, epochs=1)" in message
        assert "test_rank_calls.py:" in message


def test_a_validation_on_one_rank_is_told(two_ranks):
    for message in two_ranks.run(_one_validates):
        assert "ranks are at different places" in message
        assert "validation=val_loader" in message


def test_what_ranks_compare_is_named(two_ranks):
    for message in two_ranks.run(_they_compare_something_else):
        assert "rank 0 compares the classes, rank 1 compares the size of the vocabulary" in message


def test_code_of_others_may_exchange_objects_wherever_it_is(two_ranks):
    for message in two_ranks.run(_own_exchanges_at_two_places):
        assert "ranks disagree on the epochs" in message


def test_an_error_of_rank_0_reaches_ranks_that_wait_for_its_decision(two_ranks):
    assert two_ranks.run(_rank_0_cannot_measure) == [
        "ValueError: no weights",
        "RankFailedError: rank 0 could not decide: ValueError: no weights",
    ]
