"""Checkpoints as files: kept, damaged, too large for the disk, of other ranks and other loaders."""

import functools
import logging
import random
import resource
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tp_core.errors import ConfigError, LoaderError, StateError
from tp_core.launching import EXIT_REPORT, ExitReport, read_exit_report
from tp_core.state import write_whole
from tp_testing import run_ranks
from tp_trainer import Checkpoints, FunctionMetric, Limits, Trainer, Validation

from tests.cases import first_fast
from tests.models import perceptron
from tests.reference_training import StoppedError, rows_and_sums, squared_error
from tests.tp_trainer.small_run import leave

make_model = functools.partial(perceptron, 3, 6, 1)


def make_data(n=40):
    return rows_and_sums(n, 3, curved=True)


def fit(
    checkpoint,
    *,
    loader=None,
    make_optimizer=torch.optim.Adam,
    stop_at=0,
    resume=None,
    epochs=2,
    trainer=None,
    **kwargs,
):
    """Return the weights after training; with ``stop_at``, raise in that step."""
    left = stop_at

    def step(model, batch):
        nonlocal left
        left -= 1
        if left == 0:
            raise StoppedError
        return squared_error(model, batch)

    with Trainer(seed=3, progress=False, devices="cpu", **(trainer or {})) as running:
        model = make_model()
        optimizer = make_optimizer(model.parameters(), lr=0.05)
        running.fit(
            model,
            optimizer,
            DataLoader(make_data(), batch_size=8, shuffle=True) if loader is None else loader,
            step=step,
            epochs=epochs,
            checkpoint=checkpoint,
            resume=resume,
            **kwargs,
        )
        return [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -- which ones are kept ---------------------------------------------------------------------------


def test_the_newest_are_kept_and_nothing_else_lies_around(tmp_path):
    fit(Checkpoints(tmp_path, every_steps=2, keep=2))
    assert names(tmp_path) == ["step-0000000008", "step-0000000010"]


@pytest.mark.parametrize("rule", [{}, {"every_steps": 1, "every_epochs": None}, {"every_s": 1e-6}])
def test_the_best_is_kept_beside_the_newest(tmp_path, rule):
    losses = iter([0.5, 0.1, 0.7, 0.6])

    def val_step(model, batch):
        return torch.tensor(next(losses), dtype=torch.float64)

    loader = DataLoader(make_data(), batch_size=40)
    val = DataLoader(make_data(4), batch_size=4)
    settings = Checkpoints(tmp_path, keep=1, best="val_loss", **rule)
    fit(settings, loader=loader, epochs=4, validation=Validation(val, step=val_step))
    assert names(tmp_path) == ["step-0000000002", "step-0000000004"]


def mean_output(model, batch):
    return model(batch[0]).mean()


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("val_los", mean_output, "which are val_loss; did you mean 'val_loss'?"),
        (
            "val_ac",
            lambda model, batch: {"loss": mean_output(model, batch), "acc": 1.0},
            "which are val_acc, val_loss; did you mean 'val_acc'?",
        ),
        ("los", None, "which are loss; did you mean 'loss'?"),
    ],
)
def test_a_metric_that_does_not_come_is_named_before_the_second_step(tmp_path, name, step, words):
    loader = DataLoader(make_data(4), batch_size=4)
    with pytest.raises(ConfigError) as caught:
        fit(Checkpoints(tmp_path, best=name, every_steps=1), validation=Validation(loader, step=step))
    assert f"best={name!r} is none of the metrics of the run, {words}" in str(caught.value)
    assert names(tmp_path) == []


def test_a_metric_of_the_whole_validation_is_not_computed_for_its_name(tmp_path):
    calls = []
    metric = FunctionMetric(lambda values: calls.append(len(values)) or 1.0)
    loader = DataLoader(make_data(8), batch_size=4)
    for best in ("val_size", "val_acc"):
        fit(
            Checkpoints(tmp_path / best, best=best, mode="max"),
            validation=Validation(
                loader,
                step=lambda model, batch: {"size": batch[0], "acc": 1.0},
                metrics={"size": metric},
            ),
        )
    assert set(calls) == {8}


def test_no_batch_of_an_iterator_is_taken_for_a_name(tmp_path):
    seen = []

    def step(model, batch):
        if not model.training:
            seen.append(len(batch[0]))
        return {"loss": mean_output(model, batch), "acc": 1.0}

    loader = DataLoader(make_data(8), batch_size=4)
    fit(
        Checkpoints(tmp_path, best="val_acc", mode="max"),
        epochs=1,
        validation=Validation(iter(list(loader)), step=step),
    )
    assert seen == [4, 4]


def test_a_folder_alone_saves_after_every_epoch(tmp_path):
    fit(tmp_path, epochs=3)
    assert names(tmp_path) == [f"step-{n:010d}" for n in (5, 10, 15)]


def test_the_age_of_the_last_one_can_decide(tmp_path):
    fit(Checkpoints(tmp_path, every_s=1e-6, every_epochs=None))
    *before, last = names(tmp_path)  # how often the clock is looked at depends on how fast steps are
    assert before
    assert last == "step-0000000010"
    fit(Checkpoints(tmp_path / "never", every_s=1e6, every_epochs=None))
    assert names(tmp_path / "never") == ["step-0000000010"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_steps": 0}, "every_steps=...) must be a whole number from 1, got 0"),
        ({"every_s": -1.0}, "every_s=...) must be a number of seconds above 0, got -1.0"),
        ({"keep": None}, "keep=...) must be a whole number from 1, got None"),
        ({"mode": "best"}, "must be 'min' or 'max', got 'best'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        Checkpoints("x", **settings)
    assert message in str(caught.value)


def test_resuming_where_nothing_is_begins_anew(tmp_path):
    assert same(fit(tmp_path / "new", resume="auto"), fit(None))


# -- damage ----------------------------------------------------------------------------------------


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-20])


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path):
    path.unlink()


DAMAGE = [(cut_off, r"bytes of"), (alter, "not what was written"), (remove, "is missing")]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
@pytest.mark.parametrize("file", first_fast(["tensors.pt", "state.json", "ranks.json"]))
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path, caplog, damage, message, file):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), stop_at=8)
    newest = max(tmp_path.iterdir())
    assert newest.name == "step-0000000007"
    damage(newest / file)
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        weights = fit(Checkpoints(tmp_path, every_steps=1), resume="auto")
    assert f"{newest} is damaged: {file}" in caplog.text
    assert message in caplog.text
    assert same(weights, fit(None))


def test_a_damaged_one_that_was_asked_for_by_name_is_an_error(tmp_path):
    fit(tmp_path)
    newest = max(tmp_path.iterdir())
    alter(newest / "state.json")
    with pytest.raises(StateError, match=r"is damaged: state\.json is not what was written"):
        fit(tmp_path, resume=newest)
    with pytest.raises(ConfigError, match="is the folder of the run, and no checkpoint"):
        fit(tmp_path, resume=tmp_path)
    with pytest.raises(StateError, match="nowhere is not a checkpoint: it is not there"):
        fit(tmp_path, resume=tmp_path / "nowhere")


def test_one_that_was_being_written_when_the_process_died_does_not_count(tmp_path):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=2), stop_at=6)
    half = tmp_path / ".step-0000000099.tmp"
    half.mkdir()
    (half / "state.json").write_text("{")
    assert same(fit(Checkpoints(tmp_path, every_steps=2), resume="auto"), fit(None))


def test_a_folder_with_the_checkpoints_of_another_run_is_refused(tmp_path):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path / "run", every_steps=2, keep=9), stop_at=8)
    before = names(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"step-0000000006, and the run begins again: give resume='auto'"):
        fit(tmp_path / "run")
    older = tmp_path / "run" / "step-0000000004"
    with pytest.raises(ConfigError, match=r"has step-0000000005, step-\d*6, and the run begins after step 4"):
        fit(tmp_path / "run", resume=older)
    assert names(tmp_path / "run") == before
    assert same(fit(tmp_path / "other", resume=older), fit(None))


def test_another_model_is_refused_and_stays_as_it_is(tmp_path):
    fit(tmp_path)
    with Trainer(seed=3, progress=False, devices="cpu") as trainer:
        model = nn.Linear(3, 1).double()
        before = model.weight.detach().clone()
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(make_data(), batch_size=8)
        with pytest.raises(StateError, match=r"has '0\.bias', which the model lacks"):
            trainer.fit(
                model, optimizer, loader, step=lambda m, b: m(b[0]).mean(), checkpoint=tmp_path, resume="auto"
            )
        assert torch.equal(model.weight, before)


class Counting(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


class Moody:
    def step(self):
        pass

    def state_dict(self):
        return {"mood": object()}


class Calm(Moody):
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("model", "scheduler", "message"),
    [
        (Counting(3, 1), None, r"the model's state has '_extra_state', a dict"),
        (
            nn.Linear(3, 1),
            Moody(),
            r"the state 'scheduler:scheduler' holds what a checkpoint does not, plain values only",
        ),
    ],
)
def test_a_run_that_cannot_be_saved_is_refused_before_its_first_step(tmp_path, model, scheduler, message):
    def step(model, batch):
        raise StoppedError

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(progress=False, devices="cpu") as trainer, pytest.raises(StateError, match=message):
        trainer.fit(model, optimizer, [torch.ones(1, 3)], step=step, scheduler=scheduler, checkpoint=tmp_path)


def test_a_folder_that_cannot_be_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError) as caught:
        fit(tmp_path / "file" / "run", stop_at=1)
    assert "opened, before the first step" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"make_optimizer": torch.optim.SGD}, StateError, r"another kind of optimizer.*'betas'.*SGD lacks"),
        (
            {"loader": DataLoader(make_data(48), batch_size=8)},
            LoaderError,
            r"has 48 samples, and had 40 where",
        ),
        ({"loader": DataLoader(make_data(), batch_size=7)}, LoaderError, r"sample 16 of epoch 1.*end at \[7"),
        ({"scheduler": Calm()}, ConfigError, r"the run has a scheduler and the checkpoint has none"),
    ],
)
def test_what_does_not_go_with_the_checkpoint_is_refused_by_name(tmp_path, change, error, message):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), stop_at=8)
    with pytest.raises(error, match=message):
        fit(tmp_path, resume="auto", **change)
    assert same(fit(tmp_path, resume="auto"), fit(None))


# -- a disk that is full ---------------------------------------------------------------------------


def train_with_a_quota(folder):
    fit(Checkpoints(folder, every_steps=5), epochs=1)
    # The file size limit of a process is a quota that needs no file system of its own.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        fit(Checkpoints(folder, every_steps=2), resume="auto")
    except OSError as error:
        return f"{error} {' '.join(error.__notes__)}"
    return "no error"


def test_a_full_disk_is_an_error_and_leaves_the_checkpoints_before(tmp_path):
    (said,) = run_ranks(train_with_a_quota, 1, tmp_path)
    assert "File too large" in said
    assert "the checkpoints before it are whole" in said
    assert names(tmp_path) == ["step-0000000005"]
    assert same(fit(tmp_path, resume="auto"), fit(None))


# -- written in a thread ---------------------------------------------------------------------------


def test_writing_in_a_thread_gives_the_same_checkpoints(tmp_path):
    settings = Checkpoints(tmp_path, every_steps=1, background=True)
    with pytest.raises(StoppedError):
        fit(settings, stop_at=8)
    for thread in threading.enumerate():
        if thread.name == "tp-checkpoint":
            thread.join(800)
    assert same(fit(settings, resume="auto"), fit(None))


def test_training_goes_on_while_a_thread_writes(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = write_whole

    def slow(*args, **kwargs):
        assert may_write.wait(800)
        return write(*args, **kwargs)

    monkeypatch.setattr("tp_trainer._checkpoint._checkpointer.write_whole", slow)
    steps = 0

    def step(model, batch):
        nonlocal steps
        steps += 1
        if steps == 4:  # a checkpoint was begun after step 2, and cannot be written before this
            may_write.set()
        return model(batch[0]).square().mean()

    with Trainer(seed=3, progress=False, devices="cpu") as trainer:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(make_data(), batch_size=8)
        settings = Checkpoints(tmp_path, every_steps=2, every_epochs=None, background=True)
        trainer.fit(model, optimizer, loader, step=step, checkpoint=settings)
    assert steps == 5
    assert names(tmp_path)[-1] == "step-0000000005"


def test_a_thread_that_cannot_write_is_an_error_of_the_run(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tp_trainer._checkpoint._checkpointer.write_whole", fail)
    with pytest.raises(OSError, match="No space left on device"):
        fit(Checkpoints(tmp_path, every_steps=2, background=True))
    assert names(tmp_path) == []


# -- other ranks -----------------------------------------------------------------------------------


def finish_on_ranks(folder):
    return [p.tolist() for p in fit(Checkpoints(folder), resume="auto")]


@pytest.mark.parametrize("stop_at", first_fast([7, 4]))
def test_more_ranks_go_on_at_the_same_sample(two_ranks, tmp_path, stop_at, caplog):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), stop_at=stop_at)
    expected = fit(None)
    for weights in two_ranks.run(finish_on_ranks, tmp_path):
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted)


def stop_on_ranks(folder):
    with pytest.raises(StoppedError):
        fit(Checkpoints(folder, every_steps=1), stop_at=7)
    return True


def test_fewer_ranks_go_on_and_say_what_is_lost(two_ranks, tmp_path, caplog):
    assert two_ranks.run(stop_on_ranks, tmp_path) == [True, True]
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        found = fit(Checkpoints(tmp_path), resume="auto")
    assert "was saved by 2 ranks, and this run has 1" in caplog.text
    for weight, wanted in zip(found, fit(None), strict=True):
        torch.testing.assert_close(weight, wanted)


def fail_to_write(folder):
    with pytest.raises(OSError, match=r"File too large|the checkpoint could not be written"):
        train_beyond_the_quota(folder)
    return True


def train_beyond_the_quota(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    fit(Checkpoints(folder, every_steps=2))


def test_every_rank_learns_that_a_checkpoint_could_not_be_written(tmp_path):
    assert run_ranks(fail_to_write, 2, tmp_path) == [True, True]


# -- other loaders ---------------------------------------------------------------------------------


class Noisy(Dataset):
    """Adds noise of three generators to its samples, and notes which were read."""

    def __init__(self):
        self.data = make_data()
        self.read = []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read.append(index)
        x, y = self.data[index]
        return x + 0.1 * torch.randn(3) + random.random() * np.random.rand(), y


@pytest.mark.parametrize(("workers", "stop_at"), first_fast([(0, 3), (2, 5), (0, 8)]))
def test_augmentation_is_the_same_with_and_without_an_interruption(tmp_path, workers, stop_at):
    def loader():
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        return DataLoader(Noisy(), batch_size=8, shuffle=True, **options)

    expected = fit(None, loader=loader())
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), loader=loader(), stop_at=stop_at)
    assert same(fit(Checkpoints(tmp_path, every_steps=1), loader=loader(), resume="auto"), expected)


def test_nothing_before_the_checkpoint_is_read_again(tmp_path):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), stop_at=5)
    data = Noisy()
    fit(tmp_path, loader=DataLoader(data, batch_size=8, shuffle=True), resume="auto", epochs=1)
    assert len(data.read) == 8


def test_another_batch_size_goes_on_where_its_batches_meet_the_sample(tmp_path):
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), stop_at=5)  # 32 samples are done
    newest, data = max(tmp_path.iterdir()), Noisy()
    with pytest.raises(
        LoaderError, match="sample 32 of epoch 0, where the checkpoint stands, is not the end"
    ):
        fit(tmp_path / "x", loader=DataLoader(data, batch_size=5), resume=newest, epochs=1)
    fit(tmp_path, loader=DataLoader(data, batch_size=4, shuffle=True), resume="auto", epochs=1)
    assert len(data.read) == 8


class Stream(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        data = make_data()
        if self.position == len(data):
            self.position = 0
        while self.position < len(data):
            self.position += 1
            yield data[self.position - 1]


class StatefulStream(Stream):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def stream_loader(dataset):
    return DataLoader(dataset, batch_size=8)


@pytest.mark.parametrize("stop_at", first_fast([5, 8, 3, 6], 2))
def test_a_stream_that_knows_its_position_is_carried(tmp_path, stop_at):
    arguments = {"limits": Limits(steps_per_epoch=5)}
    expected = fit(None, loader=stream_loader(StatefulStream()), **arguments)
    settings = Checkpoints(tmp_path, every_steps=1)
    with pytest.raises(StoppedError):
        fit(settings, loader=stream_loader(StatefulStream()), stop_at=stop_at, **arguments)
    found = fit(settings, loader=stream_loader(StatefulStream()), resume="auto", **arguments)
    assert same(found, expected)


def test_a_stream_that_does_not_is_refused_unless_it_may_be_replayed(tmp_path):
    arguments = {"limits": Limits(steps_per_epoch=5)}
    expected = fit(None, loader=stream_loader(Stream()), **arguments)
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), loader=stream_loader(Stream()), stop_at=4, **arguments)
    with pytest.raises(LoaderError, match="cannot be put at batch 3 without reading those before it"):
        fit(Checkpoints(tmp_path), loader=stream_loader(Stream()), resume="auto", **arguments)
    settings = Checkpoints(tmp_path, replay=True)
    assert same(fit(settings, loader=stream_loader(Stream()), resume="auto", **arguments), expected)


def test_a_stream_with_its_position_in_workers_is_refused_before_the_first_step(tmp_path):
    loader = DataLoader(StatefulStream(), batch_size=8, num_workers=1)
    with pytest.raises(LoaderError, match=r"StatefulStream.*in the 1 workers.*replay=True"):
        fit(Checkpoints(tmp_path), loader=loader, limits=Limits(steps_per_epoch=5))
    assert not [*tmp_path.glob("step-*")]
    fit(Checkpoints(tmp_path, replay=True), loader=loader, limits=Limits(steps_per_epoch=5))


def test_a_list_of_batches_needs_no_replay(tmp_path):
    batches = list(DataLoader(make_data(), batch_size=8))
    with pytest.raises(StoppedError):
        fit(Checkpoints(tmp_path, every_steps=1), loader=batches, stop_at=4)
    assert same(fit(tmp_path, loader=batches, resume="auto"), fit(None, loader=batches))


def test_a_launcher_learns_of_each_checkpoint(tmp_path, monkeypatch):
    report = tmp_path / "end.json"
    monkeypatch.setenv(EXIT_REPORT, str(report))
    newest = str(tmp_path / "run" / "step-0000000003")
    leave(tmp_path / "run", 3)
    assert read_exit_report(report) == ExitReport(0, newest)
    report.unlink()
    leave(tmp_path / "run", 0)  # it continues, and is killed before it has saved anything
    assert read_exit_report(report) == ExitReport(0, newest)
