"""A run ends where its metric has not become better for a while."""

import math

import cloudpickle
import pytest
from tp_core.errors import ConfigError
from tp_trainer.callbacks import EarlyStopping

from tests.tp_trainer import callback_run
from tests.tp_trainer.callback_run import stop, train

cloudpickle.register_pickle_by_value(callback_run)  # for ranks, which do not know this folder


def epochs_with(values, *, patience=2, **options):
    """Return after how many epochs a run ends whose validations come out so."""
    left = iter(values)

    class Told(EarlyStopping):
        def on_validation_end(self, run, metrics):
            super().on_validation_end(run, {"score": next(left)})

    callback = Told("val_score", patience=patience, **options)
    callback.on_epoch_end = lambda run: None  # which would miss the score among the metrics
    return len(train([callback], epochs=len(values))[1]), callback


@pytest.mark.parametrize(
    ("values", "options", "epochs", "best"),
    [
        ([3, 2, 1, 0.5], {}, 4, 0.5),
        ([3, 2, 2, 2, 1], {}, 4, 2),
        ([1, 2, 3, 3, 3], {"mode": "max"}, 5, 3),
        ([3, 2, 1, 1], {"mode": "max"}, 3, 3),
        ([3, 2.9, 2.8, 1], {"min_delta": 0.5}, 3, 3),
        ([3, math.nan, 2, math.nan, math.nan, 1], {}, 5, 2),
        ([3, 4, 1], {"patience": 1}, 2, 3),
        ([3, math.nan, 1], {"check_finite": True}, 2, 3),
        ([3, math.inf, 1], {"mode": "max", "check_finite": True}, 2, 3),
    ],
)
def test_a_run_ends_after_so_many_looks_without_an_improvement(values, options, epochs, best):
    ended, callback = epochs_with(values, **options)
    assert ended == epochs
    assert callback.best == best


def first_rest(losses, patience):
    """Return after how many losses there were so many in a row that are not the largest so far."""
    best = max(range(1, len(losses) + 1), key=lambda n: losses[n - 1])
    return best + patience


def test_a_metric_of_the_training_is_looked_at_after_each_epoch():
    losses = [record.train["loss"] for record in train([], epochs=6)[1]]
    expected = first_rest(losses, 2)
    assert expected < 6
    assert len(train([EarlyStopping("loss", mode="max", patience=2)], epochs=6)[1]) == expected


def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path):
    def callback():
        return EarlyStopping("loss", mode="max", patience=3)

    whole = train([callback()], epochs=8)[1]
    stop(12, [callback()], folder=tmp_path, epochs=8)
    assert len(train([callback()], folder=tmp_path, epochs=8)[1]) == len(whole) < 8


def test_a_validation_where_the_run_was_cut_counts_for_nobody_later(tmp_path):
    def ended(**options):
        return len(train([EarlyStopping(mode="max", patience=3)], epochs=8, **options)[1])

    saved = {"checkpoint": tmp_path, "resume": "auto"}
    for most in (7, 12):
        ended(**saved, max_steps=most)
    assert ended(**saved) == ended() < 8


def on_a_rank():
    return len(train([EarlyStopping(mode="max", patience=2)], backend="ddp", epochs=9)[1])


@pytest.mark.slow
def test_all_ranks_end_alike(two_ranks):
    first, second = two_ranks.run(on_a_rank)
    assert first == second == len(train([EarlyStopping(mode="max", patience=2)], epochs=9)[1]) < 9


@pytest.mark.parametrize("name", ["val_lost", "lost"])
def test_a_metric_that_the_run_does_not_have_is_named(name):
    with pytest.raises(ConfigError, match=rf"EarlyStopping\('{name}'\) looks at none of the metrics .*loss"):
        train([EarlyStopping(name)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience"),
        ({"mode": "best"}, r"EarlyStopping\(mode=...\) must be 'min' or 'max', got 'best'"),
        ({"min_delta": -1}, r"EarlyStopping\(min_delta=...\) must be a finite number from 0, got -1"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**options)
