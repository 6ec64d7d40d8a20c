"""Time per step of a run that logs and measures, in one process: python -m tests.bench.trainer.equipped

CSV and TensorBoard every 50 steps, three callbacks (learning rate, gradient norm, early stopping), a
validation with an accuracy of torchmetrics: by the trainer, by a hand-written loop that does the same, and
by the peers that are installed. The model is a tiny MLP, which leaves nothing for the loop's own cost to hide
behind.
"""

import contextlib
import csv
import io
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.classification import BinaryAccuracy
from tp_trainer import LogOptions, Trainer, Validation
from tp_trainer.callbacks import EarlyStopping, GradientNorm, LearningRateMonitor
from tp_trainer.loggers import CsvLogger, TensorBoardLogger

from tests.bench._results import Results
from tests.bench.trainer.loops import Way, is_installed, measure, note

STEPS, EVERY = 600, 50

_numbers = itertools.count()


class Batches(Dataset):
    """Batches that are there already."""

    def __init__(self, count: int) -> None:
        inputs = torch.randn(count, 8, 16)
        self._batches = [(x, (x.sum(1) > 0).float()) for x in inputs]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int):
        return self._batches[index]


def loaders() -> tuple[DataLoader, DataLoader]:
    return DataLoader(Batches(STEPS), batch_size=None), DataLoader(Batches(20), batch_size=None)


def make():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(scores, targets):
    return nn.functional.binary_cross_entropy_with_logits(scores, targets)


def folder(base: Path) -> Path:
    made = base / str(next(_numbers))
    made.mkdir()
    return made


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        run()
    return (time.perf_counter() - began) / STEPS


def by_hand(base: Path, *, equipped: bool, setup=lambda model, optimizer: (model, optimizer, None)) -> Way:
    """Return a loop that its user writes, with what the trainer is asked for or bare."""
    train, val = loaders()
    model, optimizer, backward = setup(*make())
    backward = backward or torch.Tensor.backward

    def run() -> None:
        if not equipped:
            for x, y in train:
                optimizer.zero_grad()
                backward(loss_of(model(x), y))
                optimizer.step()
            return
        place, accuracy, total, best = folder(base), BinaryAccuracy(), 0.0, float("inf")
        with (place / "metrics.csv").open("w") as file, SummaryWriter(place) as writer:
            rows = csv.writer(file)
            kept: list[tuple[int, object, float]] = []
            for i, (x, y) in enumerate(train, start=1):
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                backward(loss)
                norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                kept.append((i, norm, optimizer.param_groups[0]["lr"]))
                optimizer.step()
                total += loss.item()
                if i % EVERY == 0:
                    for at, n, rate in kept:
                        rows.writerow([at, float(n), rate])
                        writer.add_scalar("grad_norm", float(n), at)
                        writer.add_scalar("lr", rate, at)
                    kept.clear()
                    rows.writerow([i, total / EVERY])
                    writer.add_scalar("loss", total / EVERY, i)
                    total = 0.0
            model.eval()
            with torch.no_grad():
                losses = []
                for x, y in val:
                    scores = model(x)
                    accuracy.update(scores, y.int())
                    losses.append(float(loss_of(scores, y)))
            model.train()
            best = min(best, sum(losses) / len(losses))
            writer.add_scalar("val_accuracy", float(accuracy.compute()), STEPS)

    return lambda: timed(run)


def tp(base: Path) -> Way:
    train, val = loaders()
    model, optimizer = make()

    def step(model, batch):
        return loss_of(model(batch[0]), batch[1])

    def val_step(model, batch):
        scores = model(batch[0])
        return {"loss": loss_of(scores, batch[1]), "accuracy": (scores, batch[1].int())}

    trainer = Trainer(devices="cpu")

    def run() -> None:
        place = folder(base)
        trainer.fit(
            model,
            optimizer,
            train,
            step=step,
            validation=Validation(val, step=val_step, metrics={"accuracy": BinaryAccuracy()}),
            callbacks=[LearningRateMonitor(), GradientNorm(), EarlyStopping("val_loss", patience=3)],
            log=LogOptions([CsvLogger(place), TensorBoardLogger(place)], every_steps=EVERY),
        )

    return lambda: timed(run)


def accelerate() -> Callable:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return lambda model, optimizer: (*accelerator.prepare(model, optimizer), accelerator.backward)


def fabric() -> Callable:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return lambda model, optimizer: (*fabric.setup(model, optimizer), fabric.backward)


def lightning(base: Path) -> Way:
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as Lightning
    from lightning.pytorch import callbacks as ready
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loggers import TensorBoardLogger as Board

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self._optimizer = make()
            self.accuracy = BinaryAccuracy()

        def training_step(self, batch, _):
            loss = loss_of(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, _):
            scores = self.model(batch[0])
            self.accuracy.update(scores, batch[1].int())
            self.log("val_loss", loss_of(scores, batch[1]), batch_size=8)
            self.log("val_accuracy", self.accuracy, batch_size=8)

        def configure_optimizers(self):
            return self._optimizer

    class Norm(ready.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            module.log(
                "grad_norm", torch.nn.utils.get_total_norm([p.grad for p in module.model.parameters()])
            )

    train, val = loaders()

    def run() -> None:
        place = folder(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Lightning(
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                log_every_n_steps=EVERY,
                num_sanity_val_steps=0,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                logger=[CSVLogger(place), Board(place)],
                callbacks=[ready.LearningRateMonitor("step"), Norm(), ready.EarlyStopping("val_loss")],
            )
            trainer.fit(Module(), train, val)

    return lambda: timed(run)


def hugging_face(base: Path) -> Way:
    from transformers import Trainer as Theirs
    from transformers import TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = make()

        def forward(self, x, labels):
            scores = self.model(x)
            return {"loss": loss_of(scores, labels), "logits": scores}

    def collate(samples):
        return {"x": samples[0][0], "labels": samples[0][1]}

    accuracy = BinaryAccuracy()

    def measured(found) -> dict[str, float]:
        scores, targets = (torch.as_tensor(part) for part in (found.predictions, found.label_ids))
        return {"accuracy": float(accuracy(scores, targets.int()))}

    train, val = Batches(STEPS), Batches(20)

    def run() -> None:
        model = Model()
        Theirs(
            model=model,
            args=TrainingArguments(
                output_dir=str(folder(base)),
                num_train_epochs=1,
                per_device_train_batch_size=1,
                per_device_eval_batch_size=1,
                logging_steps=EVERY,
                report_to=["tensorboard"],
                eval_strategy="epoch",
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=train,
            eval_dataset=val,
            data_collator=collate,
            compute_metrics=measured,
            optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3), None),
        ).train()

    return lambda: timed(run)


def run(results: Results, *, rounds: int = 9) -> None:
    """An MLP 16-16-1, batches of 8, SGD, one process; whole runs, with opening and closing loggers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        ways = {
            "hand-written, doing the same": by_hand(base, equipped=True),
            "hand-written, nothing logged": by_hand(base, equipped=False),
            "tp fit": tp(base),
        }
        if is_installed("accelerate"):
            ways["accelerate, doing the same by hand"] = by_hand(base, equipped=True, setup=accelerate())
        if is_installed("lightning_fabric"):
            ways["fabric, doing the same by hand"] = by_hand(base, equipped=True, setup=fabric())
        if is_installed("lightning"):
            ways["lightning"] = lightning(base)
        if is_installed("transformers") and is_installed("accelerate"):
            ways["transformers"] = hugging_face(base)
        note(results, "with loggers, callbacks and an accuracy", measure(ways, rounds=rounds))


if __name__ == "__main__":
    with Results("trainer-equipped") as found:
        run(found)
