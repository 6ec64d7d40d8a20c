"""Metrics of the validation are in a run's history, and what looks at metrics can look at them."""

import cloudpickle
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError
from tp_trainer import Checkpoints, FunctionMetric, SchedulerOptions, Validation
from tp_trainer.callbacks import EarlyStopping

from tests.tp_trainer import callback_run
from tests.tp_trainer.callback_run import data, network, train

cloudpickle.register_pickle_by_value(callback_run)  # for ranks, which do not know this folder


def step(model, batch):
    x, y = batch
    found = model(x)
    return {"loss": (found - y).square().mean(), "auroc": (y[:, 0] > 0, found[:, 0]), "rows": x}


def auroc(above, score):
    """The share of pairs in order, as scikit-learn's roc_auc_score, which ranks need a second to import."""
    return np.less.outer(score[~above], score[above]).mean()


def metrics():
    return {"auroc": FunctionMetric(auroc), "rows": FunctionMetric(lambda x: x)}


def fit(backend="single", loaders=None, **options):
    loaders = DataLoader(data(7), batch_size=4) if loaders is None else loaders
    return train([], step=step, validation=Validation(loaders, metrics=metrics()), backend=backend, **options)


def expected(model, samples=7):
    x, y = data(samples).tensors
    with torch.no_grad():
        return auroc(y[:, 0].numpy() > 0, model.eval()(x)[:, 0].numpy())


@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_the_history_has_the_metrics_of_each_validation(backend):
    model, history = fit(backend)
    assert [sorted(record.val) for record in history] == [["auroc", "loss"]] * 2
    assert sorted(history[-1].train) == ["loss"]
    assert history[-1].val["auroc"] == pytest.approx(expected(model))


def on_a_rank():
    model, history = fit("ddp")
    return history[-1].val["auroc"], expected(model)


def test_ranks_have_the_metrics_of_the_whole_set(two_ranks):
    for found, right in two_ranks.run(on_a_rank):
        assert found == pytest.approx(right)


def several():
    return {"few": DataLoader(data(7), batch_size=4), "many": DataLoader(data(19), batch_size=4)}


def test_several_loaders_are_in_the_history_by_name():
    model, history = fit(loaders=several())
    assert sorted(history[-1].val) == ["few/auroc", "few/loss", "many/auroc", "many/loss"]
    assert history[-1].val["few/auroc"] == pytest.approx(expected(model))
    assert history[-1].val["many/auroc"] == pytest.approx(expected(model, 19))


def test_the_best_checkpoint_and_early_stopping_look_at_a_metric(tmp_path):
    best = Checkpoints(tmp_path, best="val_many/auroc", mode="max")
    stopping = EarlyStopping("val_many/auroc", mode="max", patience=2)
    _, history = train(
        [stopping], step=step, validation=Validation(several(), metrics=metrics()), epochs=12, checkpoint=best
    )
    values = [record.val["many/auroc"] for record in history]
    assert stopping.best == max(values)
    assert len(history) == min(values.index(max(values)) + 3, 12)


class Told(ReduceLROnPlateau):
    """Keeps what it is told."""

    def __init__(self, optimizer):
        self.values = []
        super().__init__(optimizer)

    def step(self, metrics):
        self.values.append(metrics)
        super().step(metrics)


@pytest.mark.parametrize(
    ("monitor", "value"),
    [
        ("val_auroc", lambda record: record.val["auroc"]),
        ("loss", lambda record: record.train["loss"]),
        (None, lambda record: record.val["loss"]),
    ],
)
def test_a_scheduler_looks_at_what_was_named(monitor, value):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Told(optimizer)
    _, history = fit(model=model, optimizer=optimizer, scheduler=SchedulerOptions(scheduler, monitor=monitor))
    assert scheduler.values == [value(record) for record in history]


@pytest.mark.parametrize(
    ("monitor", "loaders", "words"),
    [
        (None, several(), "'val_loss', which is none of the metrics of the run: val_few/auroc"),
        ("val_aurok", None, "'val_aurok', which is none of the metrics of the run: val_auroc, val_loss"),
        ("los", None, "'los', which is none of the metrics of the run: loss"),
    ],
)
def test_a_scheduler_that_looks_at_nothing_says_so_before_the_second_step(monitor, loaders, words):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    optimizer.register_step_post_hook(lambda *_: made.append(1))
    scheduler = SchedulerOptions(Told(optimizer), monitor=monitor)
    with pytest.raises(ConfigError, match=f"the scheduler looks at {words}"):
        fit(model=model, optimizer=optimizer, scheduler=scheduler, loaders=loaders)
    assert made == []


def test_a_resumed_run_has_the_same_metrics(tmp_path):
    _, whole = fit()
    fit(folder=tmp_path, epochs=1)
    _, history = fit(folder=tmp_path)
    assert [record.val for record in history] == [record.val for record in whole]
