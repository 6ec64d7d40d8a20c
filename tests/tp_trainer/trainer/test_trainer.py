"""Training through the trainer, with fit and with one's own loop."""

import copy
import functools
import gc
import logging
import pickle
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tp_core import LaunchEnvironment
from tp_core.plugins import Session
from tp_testing import run_ranks
from tp_trainer import History, Limits, SchedulerOptions, Trainer

from tests.models import perceptron
from tests.reference_training import mean_square, rows_and_sums

make_model = functools.partial(perceptron, 4, 8, 1)


def make_data(n=22):
    return rows_and_sums(n, 4, curved=True)


def step(model, batch):
    x, y = batch
    error = model(x) - y
    return {"loss": error.square().mean(), "bias": error.mean()}


def fit(trainer, **kwargs):
    model = kwargs.pop("model", None) or make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    defaults = {
        "step": step,
        "epochs": 3,
        "validation": DataLoader(make_data(7), batch_size=3),
    }
    loader = kwargs.pop("loader", None)
    if loader is None:
        loader = DataLoader(make_data(), batch_size=5, shuffle=True)
    history = trainer.fit(model, optimizer, loader, **(defaults | kwargs))
    return model, history


def train_somewhere():
    with Trainer(seed=4, progress=False) as trainer:
        model, history = fit(trainer)
        values = [(dict(r.train), dict(r.val), r.samples) for r in history]
        return trainer.selection.chosen.name, values, [p.tolist() for p in model.parameters()]


def test_training_reduces_the_loss_and_reports_each_epoch():
    with Trainer(seed=0, progress=False) as trainer:
        model, history = fit(trainer, epochs=20)
    assert isinstance(history, History)
    assert len(history) == 20
    assert history[-1].train["loss"] < 0.9 * history[0].train["loss"]
    assert history[-1].steps == 100
    assert history[0].samples == 22
    assert set(history[0].val) == {"loss", "bias"}
    assert model.training


def test_an_optimizer_of_before_trains_a_model_into_which_its_move_would_put_other_parameters():
    """As on the device of an extension of torch, whose tensors are of another kind than the CPU's."""
    with Trainer(seed=0, progress=False) as trainer:
        expected, _ = fit(trainer)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with Trainer(seed=0, progress=False) as trainer:
            model, _ = fit(trainer)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)


def test_losses_are_means_over_samples_of_uneven_batches():
    data = make_data(7)
    model = make_model()
    with torch.no_grad():
        expected = {k: v.item() for k, v in step(model, data.tensors).items()}
    with Trainer(progress=False) as trainer:
        found = trainer.evaluate(model, DataLoader(data, batch_size=3), step=step)
    assert found == pytest.approx(expected)


def test_two_processes_train_to_the_weights_of_one(two_ranks):
    name, values, weights = train_somewhere()
    assert name == "single"
    for other_name, other_values, other_weights in two_ranks.run(train_somewhere):
        assert other_name == "ddp"
        for (train, val, samples), (train2, val2, samples2) in zip(values, other_values, strict=True):
            assert train2 == pytest.approx(train, rel=1e-9)
            assert val2 == pytest.approx(val, rel=1e-9)
            assert samples2 == samples
        for mine, theirs in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(torch.tensor(theirs), torch.tensor(mine))


def own_loop():
    with Trainer(seed=4, progress=False) as trainer:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = trainer.prepare(
            model, optimizer, DataLoader(make_data(), batch_size=5, shuffle=True)
        )
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                trainer.backward(step(model, batch)["loss"])
                trainer.clip_grad_norm(model, 1.0)
                optimizer.step()
        return [p.tolist() for p in model.parameters()]


def test_ones_own_loop_gives_the_same_weights_on_any_number_of_processes(two_ranks):
    alone = own_loop()
    for weights in two_ranks.run(own_loop):
        for mine, theirs in zip(alone, weights, strict=True):
            torch.testing.assert_close(torch.tensor(theirs), torch.tensor(mine))


def test_prepare_returns_one_object_as_itself_and_several_in_order():
    with Trainer() as trainer:
        model = make_model()
        assert trainer.prepare(model) is model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert trainer.prepare(scheduler, model, optimizer) == (scheduler, model, optimizer)


def test_a_prepared_loader_and_model_can_be_given_again():
    with Trainer(progress=False) as trainer:
        model, loader = trainer.prepare(make_model(), DataLoader(make_data(), batch_size=5))
        assert trainer.prepare(loader) is loader
        fit(trainer, model=model, loader=loader, epochs=1)
        assert trainer.evaluate(model, loader, step=step)["loss"] > 0


def test_the_selection_is_known_before_anything_is_started():
    trainer = Trainer()
    assert trainer.selection.chosen.name == "single"
    assert "ddp" in str(trainer.selection)
    assert trainer._preparation.current is None


def test_a_running_trainer_says_where_it_runs():
    with Trainer(devices="cpu") as trainer:
        assert (str(trainer.device), trainer.rank, trainer.world_size) == ("cpu", 0, 1)
        assert trainer.is_main
        assert isinstance(trainer.session, Session)


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    assert train_somewhere() == train_somewhere()
    with Trainer(seed=5, progress=False) as trainer:
        _, history = fit(trainer)
    assert dict(history[0].train) != train_somewhere()[1][0][0]


def test_dropout_differs_between_ranks(two_ranks):
    def masks():
        with Trainer(seed=0) as trainer:
            trainer.prepare(make_model())
            return torch.nn.functional.dropout(torch.ones(64)).tolist()

    first, second = two_ranks.run(masks)
    assert first != second


def test_a_step_may_return_the_loss_alone_and_it_may_be_a_sum():
    def summed(model, batch):
        return step(model, batch)["loss"] * len(batch[0])

    results = []
    for loss, function in (("mean", lambda m, b: step(m, b)["loss"]), ("sum", summed)):
        with Trainer(seed=1, progress=False, loss=loss) as trainer:
            results.append(fit(trainer, step=function, epochs=1)[1][0])
    assert results[0].val["loss"] == pytest.approx(results[1].val["loss"], rel=1)
    assert set(results[1].train) == {"loss"}


@pytest.mark.parametrize(("every", "expected"), [("epoch", 0.1 * 0.5**2), ("step", 0.1 * 0.5**15)])
def test_a_scheduler_moves_every_epoch_or_every_step(every, expected):
    with Trainer(progress=False) as trainer:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader = DataLoader(make_data(), batch_size=5)
        history = trainer.fit(
            model, optimizer, loader, step=step, epochs=3, scheduler=SchedulerOptions(scheduler, every=every)
        )
    assert history[-1].learning_rate == pytest.approx(expected)


def test_a_scheduler_that_watches_a_metric_gets_the_validation_loss():
    with Trainer(progress=False) as trainer:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        history = trainer.fit(model, optimizer, DataLoader(make_data(), 5), step=step, scheduler=scheduler)
    assert scheduler.best == history[0].train["loss"]


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(1000):
            yield torch.full((4,), i / 1000, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)


def test_a_loader_without_length_works_with_steps_per_epoch():
    with Trainer(progress=False) as trainer:
        _, history = fit(
            trainer, loader=DataLoader(Stream(), batch_size=10), limits=Limits(steps_per_epoch=3), epochs=2
        )
    assert (history[0].samples, history[1].steps) == (30, 6)


def test_gradients_are_clipped():
    with Trainer(progress=False) as trainer:
        model = make_model()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loader = DataLoader(make_data(5), batch_size=5)
        trainer.fit(model, optimizer, loader, step=step, clip_norm=1e-3)
        moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_evaluation_gives_each_module_its_mode_back():
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5).eval()).double()
    with Trainer() as trainer:
        trainer.evaluate(model, DataLoader(make_data(), 5), step=step)
    assert [m.training for m in model.modules()] == [True, True, False]


def test_lines_are_printed_where_there_is_no_terminal(capsys, caplog):
    caplog.set_level(logging.INFO, "tp_trainer")
    with Trainer(seed=0) as trainer:
        fit(trainer, epochs=2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    pattern = r"epoch 2/2  loss=\S+  bias=\S+  val_loss=\S+  val_bias=\S+  lr=0.05  [\d,]+ samples/s"
    assert re.fullmatch(pattern, lines[1])
    assert [r.getMessage() for r in caplog.records] == lines


def speaking():
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stderr(out), Trainer(seed=0) as trainer:
        fit(trainer, epochs=1)
    return LaunchEnvironment.read().rank, out.getvalue()


def test_only_rank_0_speaks():
    for rank, text in run_ranks(speaking, 2):
        assert ("epoch 1/1" in text) == (rank == 0)
        assert text.startswith("backend 'ddp' (auto): 2 processes on 1 host(s)") == (rank == 0)


def test_a_bar_is_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("tp_trainer._running._progress._BAR_INTERVAL_S", 0.0)
    with Trainer(seed=0) as trainer:
        fit(trainer, epochs=1)
    assert "epoch 1/1" in capsys.readouterr().err


def test_long_epochs_say_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr("tp_trainer._running._progress._LINE_INTERVAL_S", 0.0)
    with Trainer(seed=0) as trainer:
        fit(trainer, epochs=1)
    assert len(capsys.readouterr().err.splitlines()) == 1, "the epoch's"
    with Trainer(seed=0, progress=True) as trainer:
        fit(trainer, epochs=1)
    assert re.search(r"epoch 1/1  step \d/5  loss=\S+  [\d,.]+ steps/s", capsys.readouterr().err)


def models_left(backend, devices, *, copies=True):
    """Return how many of three models are alive after a trainer has trained one after the other."""
    data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)

    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        alive = []
        for _ in range(3):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.Adam(model.parameters())
            trainer.fit(model, optimizer, data, step=mean_square)
            before = trainer.evaluate(model, data, step=mean_square)
            if copies:  # which are models of their own, without what the trainer keeps for this one
                for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                    assert trainer.evaluate(other, data, step=mean_square) == before
                    alive.append(weakref.ref(other))
                del other
            alive += [weakref.ref(model), *map(weakref.ref, model.parameters())]
            del model, optimizer
        gc.collect()
        return sum(reference() is not None for reference in alive)


@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_models_end_before_the_trainer_that_has_trained_them(backend):
    assert models_left(backend, "cpu" if backend == "single" else "cpu,cpu") == 0


@pytest.mark.slow
def test_models_end_before_the_trainer_of_several_ranks():
    assert run_ranks(models_left, 2, "ddp", "cpu") == [0, 0]


@pytest.mark.slow
def test_sharded_models_end_before_the_trainer():
    assert run_ranks(functools.partial(models_left, copies=False), 2, "fsdp", "cpu") == [0, 0]
