"""Loaders of other numbers of batches than they say, and iterators that end within a user's function."""

import gc
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from tp_core.errors import LoaderError, StepError
from tp_trainer import Callback, Limits, Trainer, Validation

DATA = torch.arange(20.0).reshape(20, 1)


class Batches:
    """Five batches of four samples each, and says that it has ``length``."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(DATA.split(4))


class Samples(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(DATA)


class Sampler(SequentialSampler):
    def __init__(self, length):
        super().__init__(DATA)
        self.length = length

    def __len__(self):
        return self.length


def loaders(length):
    """Return loaders of five batches that say that they have ``length``."""
    return {
        "an iterable": Batches(length),
        "a stream": DataLoader(Samples(4 * length), batch_size=4),
        "a sampler": DataLoader(DATA, batch_size=4, sampler=Sampler(4 * length)),
        "a batch sampler": DataLoader(
            DATA, batch_sampler=BatchSampler(Sampler(4 * length), 4, drop_last=False)
        ),
    }


def train(loader, *, seen=None, step=None, **options):
    seen = [] if seen is None else seen

    def plain(model, batch):
        seen.append(batch.flatten().tolist())
        return model(batch).mean()

    model = nn.Linear(1, 1)
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return trainer.fit(model, optimizer, loader, step=step or plain, **options)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("kind", loaders(3))
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_loader_of_more_batches_than_it_says_is_told_once_with_its_number(kind, caplog):
    seen = []
    train(loaders(3)[kind], seen=seen, epochs=3)
    (message,) = warnings(caplog)
    assert message.startswith("the loader has more than the 3 batches that its len() sa")
    assert len(seen) == 9


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_the_batch_that_was_read_to_learn_of_it_is_trained_on_next():
    seen = []
    train(loaders(3)["a stream"], seen=seen, epochs=3)
    assert [batch[0] for batch in seen] == [0, 4, 8, 12, 16, 0, 4, 8, 12]


@pytest.mark.parametrize("kind", loaders(5))
def test_a_loader_that_says_what_it_has_is_not_told(kind, caplog):
    train(loaders(5)[kind], epochs=2)
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", ["an iterable", "a stream"])
def test_epochs_that_the_user_has_cut_are_not_told(kind, caplog):
    train(loaders(3)[kind], limits=Limits(steps_per_epoch=2))
    train(loaders(3)[kind], limits=Limits(overfit_batches=2))
    assert not warnings(caplog)


def test_a_custom_loop_is_told(caplog):
    with Trainer(progress=False, devices="cpu") as trainer, trainer.loop(Batches(3)) as loop:
        assert len(list(loop)) == 3
    assert "more than the 3 batches" in warnings(caplog)[0]


def test_a_loader_of_fewer_batches_is_an_error():
    words = r"ended after 5 of 7 batches; give Limits\(steps_per_epoch=5\), or a loader"
    with pytest.raises(LoaderError, match=words):
        train(Batches(7))


class Ends(Dataset):
    """Its tenth sample asks an iterator that has ended."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return DATA[i] if i != 9 else next(iter([]))


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_end_by_mistake_are_an_error_wherever_they_are_read(workers, monkeypatch):
    # torch asks a worker whose data ended so to end, and waits these seconds, 5, before it ends it.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    loader = DataLoader(Ends(), batch_size=4, num_workers=workers)
    model, match = nn.Linear(1, 1), "ended after 2 of 5 batches, without an error: .* StopIteration"
    with pytest.raises(LoaderError, match=match):
        train(loader)
    with Trainer(progress=False, devices="cpu") as trainer:
        with pytest.raises(LoaderError, match=match):
            trainer.evaluate(model, loader, step=lambda m, b: m(b).mean())
        with pytest.raises(LoaderError, match=match):
            trainer.predict(model, loader, lambda m, b: m(b)).collect()
        with pytest.raises(LoaderError, match=match):
            list(trainer.prepare(loader))
    gc.collect()  # errors hold the iterators, and with them the workers, in circles


def asks_too_much(*_):
    return next(iter([]))


class Asks(Callback):
    """Asks an iterator for more than it has, in an event."""

    def __init__(self, event):
        setattr(self, event, asks_too_much)


@pytest.mark.parametrize(
    "options",
    [
        {"step": asks_too_much},
        {"validation": Validation(Batches(5), step=asks_too_much)},
        *(
            {"callbacks": [Asks(f"on_{event}")]}
            for event in ("fit_start", "step_end", "epoch_end", "fit_end")
        ),
    ],
)
def test_an_iterator_that_ends_in_a_function_of_the_user_is_named(options):
    with pytest.raises(
        StepError, match=r"StopIteration was raised in asks_too_much \(.*test_lengths.py, line"
    ):
        train(Batches(5), **options)


def test_an_iterator_that_ends_in_an_evaluation_is_named():
    with Trainer(progress=False, devices="cpu") as trainer:
        with pytest.raises(StepError, match="StopIteration was raised in asks_too_much"):
            trainer.evaluate(nn.Linear(1, 1), Batches(5), step=asks_too_much)
        with pytest.raises(StepError, match="StopIteration was raised in asks_too_much"):
            trainer.predict(nn.Linear(1, 1), Batches(5), asks_too_much).collect()


class Growing(Dataset):
    samples = 8

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return DATA[i]


def test_a_dataset_that_has_grown_since_the_run_began_is_told(caplog):
    data, seen = Growing(), []
    callback = Callback()
    callback.on_epoch_end = lambda run: setattr(data, "samples", 20)
    train(DataLoader(data, batch_size=4), seen=seen, epochs=3, callbacks=[callback])
    (message,) = warnings(caplog)
    assert message.startswith("the loader has more than the 2 batches that its len() said when the run began")
    assert len(seen) == 6


class LeavesOut(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() if batch.sum() > 30)


class Repeats(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() for _ in range(2))


@pytest.mark.parametrize(
    ("kind", "mean"),
    [(LeavesOut, sum(range(8, 18)) / 10), (Repeats, sum(range(18)) / 18)],
)
def test_a_class_that_leaves_batches_out_or_repeats_them_is_evaluated_by_what_it_yields(kind, mean):
    loader = kind(DATA[:18], batch_size=4)
    with Trainer(progress=False, devices="cpu") as trainer:
        found = trainer.evaluate(nn.Linear(1, 1), loader, step=lambda m, b: {"mean": b.mean()})
    assert found["mean"] == pytest.approx(mean)


def test_a_class_that_repeats_batches_is_told_where_its_length_does_not_say_so(caplog):
    train(Repeats(DATA, batch_size=4))
    assert "more than the 5 batches" in warnings(caplog)[0]


def leave_out(samples):
    return torch.stack([sample for sample in samples if sample % 4])


def test_samples_that_collate_leaves_out_are_told_once(caplog):
    loader = DataLoader(DATA, batch_size=4, collate_fn=leave_out)
    train(loader, epochs=2)
    (message,) = warnings(caplog)
    assert message.startswith("a batch has fewer rows than the 4 samples that were chosen for it")


def leave_one_out(samples):
    return torch.stack([sample for sample in samples if sample != 13])


def test_a_sample_that_collate_leaves_out_of_a_later_batch_is_told(caplog):
    train(DataLoader(DATA, batch_size=4, collate_fn=leave_one_out))
    (message,) = warnings(caplog)
    assert message.startswith("a batch has fewer rows than the 4 samples that were chosen for it")


class Images(Dataset):
    """Images of several heights, each with as many boxes as no other."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(3, 5 + i, 5), {"boxes": torch.ones(i, 4), "image": i}


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


def as_dict(samples):
    images, targets = as_lists(samples)
    return {"images": list(images), "boxes": [target["boxes"] for target in targets]}


def with_time_first(samples):
    return torch.stack([image[:, 0] for image, _ in samples], 1)


def without_the_first(samples):
    return as_lists([sample for sample in samples if sample[1]["image"] != 4])


@pytest.mark.parametrize(
    ("collate", "is_told"),
    [(as_lists, False), (as_dict, False), (with_time_first, False), (without_the_first, True)],
)
def test_what_is_a_sample_in_lists_is_known(collate, is_told, caplog):
    loader = DataLoader(Images(), batch_size=4, collate_fn=collate)
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        assert len(list(trainer.prepare(loader))) == 2
    assert [message[:26] for message in warnings(caplog)] == ["a batch has fewer rows tha"] * is_told


def test_what_can_be_gone_through_once_is_an_error_where_it_has_ended(caplog):
    with pytest.raises(LoaderError, match="after 0 of 5 batches; an iterator or a generator is gone"):
        train((batch for batch in DATA.split(4)), limits=Limits(steps_per_epoch=5), epochs=2)
    loaders = {"a": Batches(5), "b": (batch for batch in DATA.split(4))}
    with pytest.raises(LoaderError, match="the validation's loader 'b' has yielded no sample"):
        train(Batches(5), validation=loaders, epochs=2)
    assert not warnings(caplog)
    with Trainer(progress=False, devices="cpu") as trainer:
        assert trainer.evaluate(nn.Linear(1, 1), iter([]), step=lambda m, b: m(b).mean()) == {}
    assert "evaluate() has no result" in warnings(caplog)[0]
