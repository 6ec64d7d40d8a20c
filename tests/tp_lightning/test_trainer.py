"""Modules of Lightning under tp's ``Trainer`` of that name: Lightning's numbers, on one rank and on two."""

import importlib
import math
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError, StepError
from tp_lightning import Trainer
from tp_testing import run_ranks
from tp_trainer import Callback
from tp_trainer.loggers import CsvLogger

from tests.tp_lightning import examples

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Plain(nn.Module):
    """A module with the methods of the protocol and none of Lightning's code, for tests without Lightning."""

    automatic_optimization = True

    @property
    def current_epoch(self):
        return self.trainer.current_epoch

    @property
    def global_step(self):
        return self.trainer.global_step


def make(**options):
    return Trainer(**QUIET, **options)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, list) and value and isinstance(value[0], float):
            assert other[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        elif isinstance(value, dict):  # Lightning adds them up in float32
            assert other[name] == pytest.approx(value, rel=1e-6), name
        else:
            assert other[name] == value, name


@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("ignore")  # Lightning's own, of workers and devices
@pytest.mark.parametrize("run", examples.RUNS, ids=lambda run: run.__name__)
def test_modules_of_its_documents_come_to_lightnings_numbers(run, tmp_path):
    lightning = importlib.import_module("lightning")
    own = examples.modules(lightning.LightningModule, lightning.LightningDataModule)

    def theirs(**options):
        off = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
        return lightning.Trainer(**QUIET, **off, default_root_dir=tmp_path, **options)

    same(run(theirs, own), run(make, own))


def on_ranks(number):
    done = examples.RUNS[number](make, examples.modules(Plain, object))
    # A step's own value is of the rank that reads it; means are of all ranks.
    done["metrics"] = {name: value for name, value in done["metrics"].items() if not name.endswith("_step")}
    return done


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(examples.RUNS)))
def test_two_ranks_come_to_the_numbers_of_one(number):
    (one,) = run_ranks(on_ranks, 1, number)
    first, second = run_ranks(on_ranks, 2, number)
    same(one, first)
    same(first, second)


def test_any_module_with_the_methods_is_trained():
    encoder, classifier, _, data = examples.modules(Plain, object)
    found = examples.classifier(make, (encoder, classifier, None, data))
    # Five batches of an epoch, two in a step: the last one is a step by itself.
    assert [entry for entry in found["seen"] if entry != "step"][:5] == [
        (0, 0, 0), (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 3),
    ]  # fmt: skip
    assert found["metrics"]["val_epoch"] == 2
    assert found["metrics"].keys() == {"train_loss", "train_acc", "val_loss", "val_acc", "val_epoch"}


def test_a_run_that_was_cut_continues_to_the_same_numbers(tmp_path):
    _, classifier, _, data = examples.modules(Plain, object)

    def run(folder, **options):
        trainer = make(checkpoint=str(folder), accumulate_grad_batches=2, **options)
        module = classifier()
        trainer.fit(module, datamodule=data(), ckpt_path="last")
        return examples.summary(trainer, module)

    whole = run(tmp_path / "whole", max_epochs=3)
    run(tmp_path / "parts", max_epochs=3, max_steps=4)
    resumed = run(tmp_path / "parts", max_epochs=3)
    assert resumed["weights"] == whole["weights"]
    assert resumed["metrics"]["val_loss"] == whole["metrics"]["val_loss"]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_and_callbacks_may_be_set_later(algorithm):
    class Ends:
        def on_fit_end(self, trainer, module):
            self.ended = True

    def weight(trainer):
        module = Line()
        trainer.fit(module, batches())
        return module.weight.item()

    ends = Ends()
    given = make(max_epochs=1, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm, callbacks=[ends])
    changed = make(max_epochs=1)
    changed.gradient_clip_val, changed.gradient_clip_algorithm = 0.1, algorithm
    changed.callbacks = [other := Ends()]
    assert weight(changed) == weight(given) != weight(make(max_epochs=1))
    assert ends.ended
    assert other.ended


class Line(Plain):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return (self.weight - batch.mean()).square()

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=0.1)


def batches():
    return DataLoader(torch.ones(6, dtype=torch.float32), 2)


@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "patience": 2},
        {"monitor": "valid_loss", "mode": "max", "patience": 2},
        {"monitor": "train_loss", "patience": 1, "min_delta": 0.05},
    ],
)
def test_early_stopping_of_lightning_ends_at_lightnings_epoch(options):
    lightning = importlib.import_module("lightning")

    class Down(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def training_step(self, batch, index):
            loss = (self.weight - batch.mean()).square()
            self.log("train_loss", loss, on_epoch=True, on_step=False)
            return loss

        def validation_step(self, batch, index):
            self.log_dict({name: (self.weight - 1.3).abs() for name in ("val_loss", "valid_loss")})

        def configure_optimizers(self):
            return SGD([self.weight], lr=0.1)

    def steps(make, **others):
        stopping = lightning.pytorch.callbacks.EarlyStopping(**options)
        trainer = make(**QUIET, max_epochs=12, callbacks=[stopping], **others)
        trainer.fit(Down(), batches(), batches())
        return trainer.global_step

    theirs = steps(lightning.Trainer, logger=False, enable_checkpointing=False, num_sanity_val_steps=0)
    assert steps(Trainer) == theirs < 36


@pytest.mark.needs("lightning")
def test_options_of_lightnings_callbacks_are_kept_or_refused(tmp_path):
    theirs = importlib.import_module("lightning.pytorch.callbacks")

    def kept(**options):
        return make(callbacks=[theirs.ModelCheckpoint(tmp_path, **options)])._saving.checkpoint

    found = kept(monitor="val_loss", save_top_k=-1, every_n_train_steps=5)
    assert (found.every_steps, found.every_epochs, found.best) == (5, None, "val_loss")
    assert found.keep > 10**6
    assert kept(every_n_epochs=2).every_epochs == 2
    assert kept(train_time_interval=timedelta(minutes=1)).every_s == 60
    assert kept(save_top_k=0) is None
    assert kept(monitor="val_loss").keep == 1
    last = kept(monitor="val_loss", save_top_k=0, save_last=True)
    assert (last.keep, last.best) == (1, None)


@pytest.mark.needs("lightning")
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("LearningRateMonitor", {"logging_interval": "epoch"}, "with the steps"),
        ("ModelCheckpoint", {"filename": "{epoch}"}, "find_checkpoint"),
        ("ModelCheckpoint", {"auto_insert_metric_name": False}, "names have the step"),
        ("ModelCheckpoint", {"enable_version_counter": False}, "names have the step"),
        ("ModelCheckpoint", {"save_last": "link"}, "save_last=True"),
        ("ModelCheckpoint", {"monitor": "val_loss", "save_top_k": 3}, "save_top_k=1, the best one"),
        ("ModelCheckpoint", {"save_weights_only": True}, r"trainer.save_checkpoint\(path\)"),
        ("ModelCheckpoint", {"save_on_exception": True}, "every_n_train_steps"),
        ("ModelCheckpoint", {"save_on_train_epoch_end": False}, "after its validation"),
        ("EarlyStopping", {"monitor": "val_loss", "stopping_threshold": 0.2}, r"call run.stop\(\)"),
        ("EarlyStopping", {"monitor": "val_loss", "divergence_threshold": 9.0}, r"call run.stop\(\)"),
        ("EarlyStopping", {"monitor": "val_loss", "strict": False}, "log the metric"),
        ("EarlyStopping", {"monitor": "val_loss", "check_on_train_epoch_end": True}, "after each validation"),
        ("EarlyStopping", {"monitor": "loss", "check_on_train_epoch_end": False}, "after each epoch"),
    ],
)
def test_options_of_lightnings_callbacks_that_are_not_here_are_refused(kind, options, said, tmp_path):
    theirs = importlib.import_module("lightning.pytorch.callbacks")
    name, value = list(options.items())[-1]
    given = rf"{kind}\({name}={re.escape(repr(value))}\) is not here; with tp, .*{said}"
    with pytest.raises(ConfigError, match=given):
        make(callbacks=[getattr(theirs, kind)(**options)])


@pytest.mark.needs("lightning")
def test_lightnings_checkpoint_callback_names_the_best_and_the_newest(tmp_path):
    theirs = importlib.import_module("lightning.pytorch.callbacks")
    values = iter([3.0, 1.0, 2.0, 1.5])

    class Validates(Line):
        def validation_step(self, batch):
            pass

        def on_validation_epoch_start(self):
            self.trainer.model.log("val_loss", next(values))

    kept = theirs.ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    trainer, module = make(max_epochs=4, callbacks=[kept]), Validates()
    trainer.fit(module, batches(), batches())
    assert trainer.checkpoint_callback is kept
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        Path(kept.best_model_path).name, Path(kept.last_model_path).name,
    ]  # fmt: skip
    assert [int(path[-8:]) for path in (kept.best_model_path, kept.last_model_path)] == [6, 12]
    assert kept.best_model_score == 1.0


@pytest.mark.needs("lightning")
def test_the_best_of_validations_within_an_epoch_is_kept_and_rates_are_logged(tmp_path):
    theirs = importlib.import_module("lightning.pytorch.callbacks")
    values = iter([3.0, 1.0, 2.0])

    class Validates(Line):
        def validation_step(self, batch):
            pass

        def on_validation_epoch_start(self):
            self.trainer.model.log("val_loss", next(values))

    kept = theirs.ModelCheckpoint(tmp_path / "run", monitor="val_loss")
    log = CsvLogger(tmp_path / "log")
    callbacks = [kept, theirs.LearningRateMonitor("step")]
    trainer = make(
        max_epochs=1, val_check_interval=1 / 3, callbacks=callbacks, logger=log, log_every_n_steps=1
    )
    trainer.fit(Validates(), batches(), batches())
    assert (int(kept.best_model_path[-8:]), kept.best_model_score) == (2, 1.0)
    assert "lr" in next((tmp_path / "log").glob("*.csv")).read_text()


@pytest.mark.needs("lightning")
def test_validations_within_some_epochs_are_not_saved_and_refused(tmp_path):
    theirs = importlib.import_module("lightning.pytorch.callbacks")

    class Validates(Line):
        def validation_step(self, batch):
            pass

    trainer = make(callbacks=[theirs.ModelCheckpoint(tmp_path, every_n_epochs=2)], val_check_interval=1 / 3)
    with pytest.raises(ConfigError, match=r"every_n_epochs=2\) with validations within an epoch is not here"):
        trainer.fit(Validates(), batches(), batches())


@pytest.mark.needs("lightning")
def test_checkpoints_are_asked_for_once(tmp_path):
    theirs = importlib.import_module("lightning.pytorch.callbacks")
    kept = theirs.ModelCheckpoint(tmp_path)
    with pytest.raises(ConfigError, match="a run has one ModelCheckpoint here"):
        make(callbacks=[kept, kept])
    with pytest.raises(ConfigError, match="checkpoint= and a ModelCheckpoint contradict"):
        make(callbacks=[kept], checkpoint="run")


def test_callbacks_have_lightnings_hooks_or_tps():
    seen = []

    class Theirs:
        def on_train_start(self, trainer, module):
            seen.append("start")

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 1

    class Ours(Callback):
        def on_fit_end(self, run):
            seen.append(run.step)

    make(max_epochs=5, callbacks=[Theirs(), Ours()]).fit(Line(), batches())
    assert seen == ["start", 2]


def test_forms_of_logging():
    class Logs(Line):
        def training_step(self, batch, batch_idx):
            self.log("last", float(batch_idx))
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            self.log("most", float(batch_idx), on_epoch=True, reduce_fx="max")
            self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("heavy", float(batch_idx), on_step=False, on_epoch=True, batch_size=batch_idx)
            return super().training_step(batch)

    trainer = make(max_epochs=1)
    trainer.fit(Logs(), batches())
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    expected = {"last": 2, "both": 1, "both_step": 2, "both_epoch": 1, "sum": 3, "heavy": 5 / 3}
    assert found == pytest.approx({**expected, "most": 2, "most_step": 2, "most_epoch": 2})


def test_validation_within_an_epoch_and_limits():
    seen = []

    class Validates(Line):
        def validation_step(self, batch, batch_idx):
            seen.append((self.trainer.global_step, batch_idx))

    make(max_epochs=1, val_check_interval=2, limit_val_batches=1).fit(Validates(), batches(), batches())
    assert seen == [(2, 0), (3, 0)]
    seen.clear()
    make(max_epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=1).fit(
        Validates(), batches(), batches()
    )
    assert seen == [(0, 0), (6, 0), (6, 1), (6, 2)]


def test_estimates_and_saved_weights(tmp_path):
    class Schedules(Line):
        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module, trainer = Schedules(), make(max_epochs=4, accumulate_grad_batches=2)
    trainer.fit(module, batches())
    assert module.steps == trainer.global_step == 8
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert saved["state_dict"]["weight"] == module.weight
    assert math.isclose(saved["global_step"], 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_epoch": 3}, "did you mean 'max_epochs'"),
        ({"profiler": "simple"}, "with tp, write callbacks=\\[tp_trainer.callbacks.Profiler"),
        ({"devices": 2}, "start it with: tp launch -n 2 script.py"),
        ({"strategy": "deepspeed"}, "or write backend='shard'"),
        ({"precision": 64}, "precision=64 is not here"),
        ({"accelerator": "tpu"}, "accelerator='tpu' is not here"),
    ],
)
def test_arguments_that_are_not_here_are_refused_by_name(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Trainer(**{"accelerator": "cpu", **arguments})


def refused(**methods):
    return type("Refused", (Line,), methods)()


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (refused(backward=lambda self, loss: loss.backward()), ConfigError, "self.manual_backward"),
        (refused(transfer_batch_to_device=lambda *_: None), ConfigError, "which is moved"),
        (refused(training_step=lambda self, batch: None), StepError, "NoneType; return the loss"),
        (refused(on_train_batch_start=lambda self, batch, i: -1), ConfigError, "limit_train_batches"),
        (refused(configure_optimizers=lambda self: "adam"), ConfigError, "has returned str"),
        (refused(configure_optimizers=lambda self: [SGD([self.weight])] * 2), ConfigError, "takes one"),
        (nn.Linear(1, 1), ConfigError, "Linear has no training_step"),
        (3, ConfigError, "got int"),
    ],
)  # fmt: skip
def test_modules_that_are_not_trained_are_refused_by_name(module, error, said):
    with pytest.raises(error, match=said):
        make(max_epochs=1).fit(module, batches())


def test_a_missing_loader_and_a_missing_folder_are_named():
    with pytest.raises(ConfigError, match=r"a datamodule with train_dataloader\(\)"):
        make(max_epochs=1).fit(Line())
    with pytest.raises(ConfigError, match="Line has no test_step"):
        make().test(Line(), batches())
    tested = type("Tested", (Line,), {"test_step": lambda self, batch, i: self.log("x", 1.0)})()
    with pytest.raises(ConfigError, match="needs a run's folder"):
        make().test(tested, batches(), ckpt_path="best")
    assert make().test(tested, batches(), verbose=False) == [{"x": 1.0}]


class _Plain(nn.Linear):
    """A module with what training needs, and no validation."""

    def __init__(self, logged=0.0):
        super().__init__(3, 1)
        self.logged = logged

    def training_step(self, batch, batch_idx):
        self.log("number", self.logged)
        return self(batch).mean()

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def _quick():
    return Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False)


def test_a_loader_that_nothing_validates_with_is_warned_of():
    with pytest.warns(match=r"_Plain has no validation_step\(\): nothing is validated; write it, or leave"):
        _quick().fit(_Plain(), DataLoader(torch.ones(4, 3)), DataLoader(torch.ones(4, 3)))


def test_a_text_cannot_be_logged():
    with pytest.raises(ConfigError, match=r"log\('number'\) takes a number, a tensor or a metric, got 'x'"):
        _quick().fit(_Plain("x"), DataLoader(torch.ones(4, 3)))
