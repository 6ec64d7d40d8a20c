"""What callbacks are told of a run, and what they may ask of it."""

import logging
import os
import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import NamedCallback, hookimpl
from tp_testing import run_ranks
from tp_trainer import Callback, Checkpoints, Interrupted, Limits, Trainer, Validation

from tests.reference_training import squared_error

X = torch.arange(20.0).reshape(20, 1) / 20


def loader(n=20):
    return DataLoader(TensorDataset(X[:n], 2 * X[:n]), batch_size=4, shuffle=True)


def fit(*, plugins=None, seed=0, **arguments):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    more = {} if plugins is None else {"plugins": plugins}
    with Trainer(seed=seed, devices="cpu", progress=False, **more) as trainer:
        history = trainer.fit(model, optimizer, loader(), **{"step": squared_error, **arguments})
    return model, history


class Told(Callback):
    """Writes down what it is told, in short."""

    def __init__(self):
        self.words = []

    def on_setup(self, model, optimizer):
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        self.words.append("setup")

    def on_fit_start(self, run):
        self.words.append(f"start on {run.backend}")

    def on_epoch_start(self, run):
        self.words.append(f"epoch {run.epoch}")

    def on_backward_end(self, run):
        self.words.append("b")

    def on_optimizer_step(self, run, grad_norm):
        assert grad_norm > 0
        assert run.model.training
        self.words.append("o")

    def on_step_end(self, run):
        self.words.append(f"s{run.step}")

    def on_validation_start(self, run):
        self.words.append("val")

    def on_validation_end(self, run, metrics):
        self.words.append(sorted(metrics))

    def on_epoch_end(self, run):
        self.words.append(sorted(run.metrics))

    def on_checkpoint_saved(self, run, path):
        assert path.is_dir()
        self.words.append(f"saved {path.name[-1]}")

    def on_interruption(self, run, signal_number):
        self.words.append(f"signal {signal_number}")

    def on_exception(self, run, error):
        self.words.append(type(error).__name__)

    def on_fit_end(self, run):
        self.words.append("end")


def test_events_come_in_the_order_of_the_run(tmp_path):
    told = Told()
    fit(callbacks=[told], validation=loader(8), checkpoint=tmp_path)
    steps = [word for n in range(1, 6) for word in ("b", "o", f"s{n}")]
    after = ["val", ["loss"], ["loss", "val_loss"], "saved 5", "end"]
    assert told.words == ["setup", "start on single", "epoch 1", *steps, *after]


def test_an_error_of_the_step_is_an_event():
    told = Told()

    def fails(model, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(callbacks=[told], step=fails)
    assert told.words[-1] == "ZeroDivisionError"


def test_a_run_with_callbacks_is_the_run_without():
    plain, _ = fit(epochs=2, validation=loader())
    told, _ = fit(epochs=2, validation=loader(), callbacks=[Told()])
    assert torch.equal(plain[0].weight, told[0].weight)


class StopAt(Callback):
    def __init__(self, step, *, rank=0):
        self.step, self.rank = step, rank

    def on_step_end(self, run):
        if run.step == self.step and run.rank == self.rank:
            run.stop("seen enough")


@pytest.mark.parametrize("at", [3, 5, 7])
def test_a_stopped_run_is_saved_and_goes_on_bit_for_bit(tmp_path, at):
    whole, _ = fit(epochs=3)
    _, history = fit(epochs=3, checkpoint=tmp_path, callbacks=[StopAt(at)])
    assert history[-1].steps == at
    resumed, history = fit(epochs=3, checkpoint=tmp_path, resume="auto")
    assert torch.equal(resumed[0].weight, whole[0].weight)
    assert [record.steps for record in history] == [5, 10, 15]


def _stopped_by_one(folder):
    _, history = fit(epochs=200, checkpoint=folder, callbacks=[StopAt(2, rank=1)])
    return history[-1].steps


@pytest.mark.slow
def test_one_ranks_stop_stops_all_at_one_step(tmp_path):
    first, second = run_ranks(partial(_stopped_by_one, tmp_path), 2)
    assert first == second < 1000


class CountSteps(Callback):
    def __init__(self):
        self.seen = 0

    def on_step_end(self, run):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen, "tensor": torch.full((2,), float(self.seen))}

    def load_state_dict(self, state):
        self.seen = state["seen"]
        assert torch.equal(state["tensor"], torch.full((2,), float(self.seen)))


def test_the_state_of_callbacks_is_saved(tmp_path):
    fit(checkpoint=tmp_path, callbacks=[CountSteps(), Told()])
    second = CountSteps()
    fit(epochs=2, checkpoint=tmp_path, resume="auto", callbacks=[second])
    assert second.seen == 10


def test_a_callback_may_ask_for_a_checkpoint(tmp_path):
    class Save(Callback):
        def on_step_end(self, run):
            if run.step == 3:
                run.save()

    fit(checkpoint=Checkpoints(tmp_path, every_epochs=None), callbacks=[Save()])
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")) == [3, 5]
    with pytest.raises(ConfigError, match=r"save\(\) needs a place"):
        fit(callbacks=[Save()])


def test_one_that_joins_and_fails_is_left_out(caplog):
    class Fails(Callback):
        def on_step_end(self, run):
            raise RuntimeError("no sensor")

    plugin = SimpleNamespace(
        tp_callbacks=hookimpl(specname="tp_callbacks")(
            lambda: [NamedCallback("sensor", "", Fails, joins=True), NamedCallback("named", "", Fails)]
        )
    )
    plugins = PluginRegistry()
    plugins.register(plugin, name="sensors")
    with caplog.at_level(logging.ERROR):
        _, history = fit(plugins=plugins)
    assert history[-1].steps == 5
    assert caplog.text.count("'sensor' failed in on_step_end") == 1
    with pytest.raises(RuntimeError, match="no sensor"):
        fit(plugins=plugins, callbacks=["named"])


def _joined_one_that_fails_on_rank_0():
    class Fails(Callback):
        def on_epoch_start(self, run):
            if run.is_main:
                raise RuntimeError("no sensor")

    plugin = SimpleNamespace(
        tp_callbacks=hookimpl(specname="tp_callbacks")(
            lambda: [NamedCallback("sensor", "", Fails, joins=True)]
        )
    )
    plugins = PluginRegistry()
    plugins.register(plugin, name="sensors")
    return fit(plugins=plugins, epochs=2)[1][-1].steps


def test_one_that_joins_and_fails_on_one_rank_keeps_no_other_rank_waiting(two_ranks):
    assert two_ranks.run(_joined_one_that_fails_on_rank_0) == [10, 10]


def _counted_on_rank_0(folder):
    class Counts(Callback):
        steps = 0

        def on_step_end(self, run):
            self.steps += run.is_main

        def state_dict(self):
            return {"steps": self.steps} if self.steps else {}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    first, second = Counts(), Counts()
    fit(callbacks=[first], epochs=1, checkpoint=folder)
    fit(callbacks=[second], epochs=2, checkpoint=folder, resume="auto")
    return first.steps, second.steps


def test_a_callback_with_state_on_one_rank_alone_is_saved_and_no_rank_waits(two_ranks, tmp_path):
    assert two_ranks.run(partial(_counted_on_rank_0, tmp_path)) == [(5, 10), (0, 0)]


# -- limits ------------------------------------------------------------------------------------------


def test_max_steps_ends_a_run_within_an_epoch():
    _, history = fit(max_steps=7, validation=loader())
    assert [(record.epoch, record.steps, list(record.val)) for record in history] == [
        (1, 5, ["loss"]),
        (2, 7, ["loss"]),
    ]


def test_a_run_of_more_steps_goes_on_from_one_of_fewer(tmp_path):
    whole, _ = fit(max_steps=12, validation=loader())
    fit(max_steps=7, checkpoint=tmp_path, validation=loader())
    resumed, history = fit(max_steps=12, checkpoint=tmp_path, resume="auto", validation=loader())
    assert torch.equal(resumed[0].weight, whole[0].weight)
    assert [record.steps for record in history] == [5, 10, 12]
    _, again = fit(max_steps=12, checkpoint=tmp_path, resume="auto", validation=loader())
    assert [record.steps for record in again] == [5, 10]


def test_a_run_of_many_short_epochs_and_a_long_limit_ends_by_its_epochs():
    _, history = fit(limits=Limits(max_time="1h", overfit_batches=1), epochs=100)
    assert history[-1].steps == 100


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h30m", 5400), ("90s", 90), ("2d", 172800), ("00:01:30", 90), (1.5, 1.5), ("1.5h", 5400)],
)
def test_times_are_written_in_several_ways(monkeypatch, text, seconds):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def in_a_quarter(model, batch):
        nonlocal now
        now += seconds / 4
        return squared_error(model, batch)

    _, history = fit(step=in_a_quarter, limits=Limits(max_time=text), epochs=None)
    assert history[-1].steps == 4


@pytest.mark.parametrize("bad", ["", "soon", "5", "1h and a half", -1, 0, True])
def test_other_times_are_refused(bad):
    with pytest.raises(ConfigError, match="max_time must be"):
        Limits(max_time=bad)


def test_validations_between_steps():
    told = Told()
    fit(epochs=2, validation=Validation(loader(8), every_steps=3), callbacks=[told])
    at = [told.words[i - 1] for i, word in enumerate(told.words) if word == "val"]
    assert at == ["s3", "s5", "s6", "s9", "s10"]


@pytest.mark.parametrize("at", [3, 6, 8])
def test_validations_between_steps_leave_a_resumed_run_alone(tmp_path, at):
    arguments = {"epochs": 2, "validation": Validation(loader(8), every_steps=3)}
    whole, one = fit(**arguments)
    fit(**arguments, checkpoint=tmp_path, callbacks=[StopAt(at)])
    resumed, other = fit(**arguments, checkpoint=tmp_path, resume="auto")
    assert torch.equal(resumed[0].weight, whole[0].weight)
    assert [r.val for r in one] == [r.val for r in other]


def test_a_validation_is_tried_before_the_first_step():
    seen = []

    def validating(model, batch):
        seen.append(model.training)
        return squared_error(model, batch)

    plain, _ = fit(validation=loader())
    tried, _ = fit(validation=Validation(loader(), step=validating, sanity_batches=2))
    assert torch.equal(plain[0].weight, tried[0].weight)
    assert seen == [False] * 7  # two, and then those of the epoch


def test_overfitting_meets_the_same_batches_in_every_epoch():
    met = []

    def noting(model, batch):
        met.append(batch[0].flatten().tolist())
        return squared_error(model, batch)

    fit(epochs=3, limits=Limits(overfit_batches=2), step=noting)
    assert len(met) == 6
    assert met[:2] == met[2:4] == met[4:]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"limits": Limits(steps_per_epoch=6)}, LoaderError, "steps_per_epoch=6 is more than the loader has"),
        ({"max_steps": 0}, ConfigError, "max_steps must be"),
        ({"state": {"model": 1}}, ConfigError, r"fit\(\) keeps its own model"),
    ],
)
def test_limits_that_make_no_sense_are_refused_before_the_first_step(arguments, error, words):
    def never(model, batch):
        pytest.fail("a step was made")

    with pytest.raises(error, match=words):
        fit(**{"step": never, **arguments})


# -- signals ------------------------------------------------------------------------------------------


def test_a_signal_is_noticed_within_a_validation(tmp_path):
    seen = []

    def validating(model, batch):
        seen.append(1)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return squared_error(model, batch)

    told = Told()
    whole, one = fit(epochs=2, validation=loader())
    arguments = {"epochs": 2, "checkpoint": tmp_path}
    with pytest.raises(Interrupted):
        fit(**arguments, validation=Validation(loader(), step=validating), callbacks=[told])
    assert len(seen) == 2, "the rest of the validation is not waited for"
    assert told.words[-2:] == ["saved 5", f"signal {int(signal.SIGUSR1)}"]
    resumed, other = fit(**arguments, validation=loader(), resume="auto")
    assert torch.equal(resumed[0].weight, whole[0].weight)
    assert [r.val for r in one] == [r.val for r in other]


def _signalled_in_a_validation(folder, to_rank, at):
    """Run on this rank thrice: undisturbed, cut short in a validation, resumed."""
    seen = []

    def validating(model, batch):
        seen.append(1)
        time.sleep(0.1)  # so that the ranks ask each other after at most so many batches as half a second has
        if len(seen) == at and int(os.environ["RANK"]) == to_rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return squared_error(model, batch)

    many = DataLoader(TensorDataset(X.repeat(8, 1), 2 * X.repeat(8, 1)), batch_size=4)  # 40 batches
    often = Validation(many, every_steps=3)
    whole, one = fit(epochs=2, validation=often)
    with pytest.raises(Interrupted):
        fit(epochs=2, validation=replace(often, step=validating), checkpoint=folder)
    resumed, other = fit(epochs=2, validation=often, checkpoint=folder, resume="auto")
    is_same = torch.equal(resumed[0].weight, whole[0].weight)
    return len(seen), is_same and [(r.val, r.train, r.samples) for r in one] == [
        (r.val, r.train, r.samples) for r in other
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("to_rank", "at"), [(0, 2), (1, 43)])  # of a validation within an epoch; at its end
def test_a_signal_to_one_rank_is_noticed_by_all_within_a_validation(tmp_path, to_rank, at):
    found = run_ranks(partial(_signalled_in_a_validation, tmp_path, to_rank, at), 2)
    assert [is_same for _, is_same in found] == [True, True]
    assert found[0][0] == found[1][0], "all leave between the same two batches"
    assert at <= found[0][0] < at + 12, "the rest of the validation is not waited for"


# -- state of one's own ---------------------------------------------------------------------------------


def test_an_average_of_weights_in_state_is_resumed(tmp_path):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def train(epochs, folder=None):
        torch.manual_seed(1)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
        more = {} if folder is None else {"checkpoint": folder, "resume": "auto"}
        with Trainer(seed=0, devices="cpu", progress=False) as trainer:
            trainer.fit(
                model, optimizer, loader(), step=squared_error, epochs=epochs, state={"ema": ema}, **more
            )
        return ema.module.weight, int(ema.n_averaged)

    whole = train(3)
    train(1, tmp_path)
    assert train(3, tmp_path) == whole


def test_a_checkpoint_that_lacks_what_the_run_keeps_is_refused(tmp_path):
    fit(checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="has no state of 'count'"):
        fit(epochs=2, checkpoint=tmp_path, resume="auto", state={"count": 1})


def _own_state(folder):
    rank = int(os.environ["RANK"])
    state = {"mine": torch.full((2,), float(rank)), "number": rank, "same": [1, 2]}
    fit(checkpoint=folder, state=state)
    again = {"mine": torch.zeros(2), "number": -1, "same": []}
    fit(epochs=2, checkpoint=folder, resume="auto", state=again)
    return again["mine"].tolist(), again["number"], again["same"]


def test_state_that_differs_between_ranks_is_each_ranks_own(tmp_path):
    found = run_ranks(partial(_own_state, tmp_path), 2)
    assert found == [([0.0, 0.0], 0, [1, 2]), ([1.0, 1.0], 1, [1, 2])]


# -- state that would be lost ---------------------------------------------------------------------------


def test_an_optimizer_that_nothing_saves_is_pointed_out(tmp_path, caplog):
    other = nn.Linear(1, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)

    def stepping(model, batch):
        second.step()
        return squared_error(model, batch)

    with caplog.at_level(logging.WARNING):
        fit(step=stepping, checkpoint=tmp_path)
    assert caplog.text.count("nothing of SGD, which steps in this run too") == 1
