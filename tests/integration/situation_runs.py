"""Two ways to run a training program: by hand on one device in plain PyTorch, and by the trainer on a layout.

A program gets `start`, calls it for its run, and trains with what the run offers: the calls of the trainer,
which are few lines of PyTorch by hand. At its end the weights and what it reported are compared.
"""

import logging
import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.errors import TpError
from tp_trainer import GradientRules, Limits, SchedulerOptions, Trainer, Validation

__all__ = ["LAYOUTS", "Layout", "Outcome", "by_hand", "outcome_of"]

STOP_AT = 4
"""The optimizer step after which a run is stopped, to be resumed: in a second epoch, mostly."""


@dataclass(frozen=True)
class Layout:
    """Where a program runs: a backend, and its number of processes or of devices in one process."""

    backend: str
    processes: int = 1
    devices: int = 1

    @property
    def parts(self):
        return self.processes * self.devices


LAYOUTS = {
    "one device": Layout("single"),
    "tuple": Layout("tuple", devices=2),
    "dp-gather": Layout("dp-gather", devices=2),
    "ddp 2": Layout("ddp", processes=2),
    "ddp 3": Layout("ddp", processes=3),
    "fsdp 2": Layout("fsdp", processes=2),
    "fsdp 3": Layout("fsdp", processes=3),
}


class StoppedError(Exception):
    """Ends a program whose run has stopped in its middle."""


def units_of(output, batch):
    """Return over how many units a step's loss is a mean, by hand: its weight, or the samples."""
    if isinstance(output, dict) and "weight" in output:
        return float(output["weight"])
    return float(samples_of(batch))


def samples_of(batch):
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


def loss_of(output):
    return output["loss"] if isinstance(output, dict) else output


def metrics_of(output):
    """Return the metrics of a step's output, each with its own weight or none."""
    if not isinstance(output, dict):
        return {"loss": (output, None)}
    found = {name: value for name, value in output.items() if name != "weight"}
    return {name: value if isinstance(value, tuple) else (value, None) for name, value in found.items()}


class Means:
    """The means of what steps return, over all batches since the last look; a loss may be a sum already."""

    def __init__(self, *, sums_losses=False):
        self.sums, self.weights, self.sums_losses = {}, {}, sums_losses

    def add(self, output, units):
        for name, (value, own) in metrics_of(output).items():
            weight = units if own is None else float(own)
            if weight:
                factor = 1.0 if self.sums_losses and name == "loss" else weight
                self.sums[name] = self.sums.get(name, 0.0) + float(torch.as_tensor(value).detach()) * factor
                self.weights[name] = self.weights.get(name, 0.0) + weight

    def take(self):
        return {name: self.sums[name] / self.weights[name] for name in self.sums}


class Run:
    """What a program trains with. Its reports are compared by name, beside the weights of its models."""

    is_by_hand = False
    is_resumed = False  # started again after a stop
    parts = 1

    def __init__(self):
        self.models, self.reports = [], {}

    def report(self, **numbers):
        for name, value in numbers.items():
            self.reports[name] = torch.as_tensor(value).detach().double().clone()

    def numbers(self):
        """Return the weights of all models, and the reports, by name."""
        found = dict(self.reports)
        for number, model in enumerate(self.models):
            for name, tensor in self.state_of(model).items():
                found[f"model {number}: {name}"] = tensor.detach().cpu().double().clone()
        return found

    def keep(self, *models):
        self.models += [model for model in models if all(model is not kept for kept in self.models)]


class HandRun(Run):
    """A run in plain PyTorch: the loops that are usual in scripts for one device."""

    is_by_hand = True

    def __init__(self, *, accumulate=1, loss="mean", precision="fp32", **_):
        super().__init__()
        self.accumulate, self.sums_losses, self.precision = accumulate, loss == "sum", precision
        self.means = Means(sums_losses=self.sums_losses)

    def state_of(self, model):
        return model.state_dict()

    def autocast(self):
        if self.precision == "bf16-mixed":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def whole(self, tensor):
        return tensor

    def all_gather(self, rows):
        return rows

    # -- a loop of one's own

    def prepare(self, *objects, training=True):
        self.keep(*[o for o in objects if isinstance(o, nn.Module)])
        return objects[0] if len(objects) == 1 else objects

    def run(self, step, *models_and_batch):
        *models, batch = models_and_batch
        self.batch = batch
        with self.autocast():
            return step(*models, batch)

    def backward(self, output, *, retain_graph=False, batch=None, weight=None):
        loss_of(output).backward(retain_graph=retain_graph)

    def no_sync(self, model):
        return nullcontext()

    def clip_grad_norm(self, model, max_norm):
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model, optimizer, *, clip_norm=None):
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()

    def loop(self, loader, *, epochs=1, state=None, validation=None):
        self.step = 0
        for epoch in range(1, epochs + 1):
            self.means = Means()
            for batch in loader:
                self.batch = batch
                yield batch
                self.step += 1
            self.report(**{f"{name} of epoch {epoch}": mean for name, mean in self.means.take().items()})
            if validation is not None:
                self.report(**{f"val_{n} of epoch {epoch}": value for n, value in validation().items()})

    def log(self, **numbers):
        self.means.add({name: loss_of(value) for name, value in numbers.items()}, samples_of(self.batch))

    def evaluate(self, model, loader, step):
        means, modes = Means(), [module.training for module in model.modules()]
        model.eval()
        with torch.no_grad(), self.autocast():
            for batch in loader:
                output = step(model, batch)
                means.add(output, units_of(output, batch))
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        return means.take()

    # -- fit

    def fit(
        self,
        model,
        optimizer,
        loader,
        step,
        *,
        epochs=1,
        steps_per_epoch=None,
        scheduler=None,
        every="epoch",
        clip_norm=None,
        clip_value=None,
        nonfinite="raise",
        validation=None,
        validation_step=None,
        callbacks=(),
        state=None,
    ):
        self.keep(model)
        self.view = view = SimpleNamespace(model=model, optimizer=optimizer, step=0, epoch=0, is_over=False)
        view.stop = lambda _: setattr(view, "is_over", True)
        model.train()
        self.send(callbacks, "on_fit_start")
        for epoch in range(1, epochs + 1):
            view.epoch = epoch
            self.send(callbacks, "on_epoch_start")
            batches = list(loader)[:steps_per_epoch]
            means = Means(sums_losses=self.sums_losses)
            for first in range(0, len(batches), self.accumulate):
                optimizer.zero_grad()
                window = batches[first : first + self.accumulate]
                counted = self.add_gradients(model, step, window, callbacks)
                norm = self.clip(model, clip_norm, clip_value)
                if nonfinite == "skip" and not math.isfinite(norm):
                    continue
                for output, batch in counted:
                    means.add(output, units_of(output, batch))
                self.send(callbacks, "on_optimizer_step", norm)
                optimizer.step()
                view.step += 1
                if scheduler is not None and every == "step":
                    scheduler.step()
                self.send(callbacks, "on_step_end")
            train = means.take()
            self.report(**{f"{name} of epoch {epoch}": mean for name, mean in train.items()})
            val = {}
            if validation is not None:
                val = self.evaluate(model, validation, validation_step or step)
                self.report(**{f"val_{name} of epoch {epoch}": mean for name, mean in val.items()})
                self.send(callbacks, "on_validation_end", val)
            if scheduler is not None and every == "epoch":
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(val["loss"] if val else train["loss"])
                else:
                    scheduler.step()
            self.send(callbacks, "on_epoch_end")
            if view.is_over:
                break
        self.report(rates=[float(group["lr"]) for group in optimizer.param_groups])

    def send(self, callbacks, event, *arguments):
        for callback in callbacks:
            getattr(callback, event)(self.view, *arguments)

    def add_gradients(self, model, step, window, callbacks):
        """Add the gradient of the mean, or of the sum, over the batches of an optimizer step."""
        counted, total = [], 0.0
        for batch in window:
            with self.autocast():
                output = step(model, batch)
            units = units_of(output, batch)
            factor = 1.0 if len(window) == 1 or self.sums_losses else units
            if units:
                (loss_of(output) * factor).backward()
            total += units
            self.send(callbacks, "on_backward_end")
            counted.append((output, batch))
        if len(window) > 1 and not self.sums_losses:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= total
        return counted

    def clip(self, model, clip_norm, clip_value):
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        return nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)


class TrainerRun(Run):
    """A run of the trainer on a layout; with a folder it is stopped in its middle, or resumed from there."""

    def __init__(self, layout, folder=None, *, is_resumed=False, **options):
        super().__init__()
        self.parts, self.folder, self.is_resumed = layout.parts, folder, is_resumed
        self.trainer = Trainer(
            backend=layout.backend,
            devices=["cpu"] * layout.devices,
            seed=0,
            progress=False,
            **options,
        )
        self.calls = 0

    def state_of(self, model):
        return self.trainer.session.model_state(model)

    def whole(self, tensor):
        """Return the whole of a parameter, of which a rank may have a part."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def all_gather(self, rows):
        return self.trainer.all_gather(rows)

    def _arguments(self, epochs, state):
        stops = self.folder is not None and not self.is_resumed
        arguments = {"limits": Limits(epochs=epochs, max_steps=STOP_AT if stops else None)}
        if self.folder is not None:
            self.calls += 1
            arguments |= {"checkpoint": self.folder / str(self.calls), "resume": "auto"}
        if state is not None:
            arguments["state"] = state
        return arguments

    def _check_stopped(self):
        if self.folder is not None and not self.is_resumed:
            raise StoppedError

    # -- a loop of one's own

    def prepare(self, *objects, training=True):
        found = self.trainer.prepare(*objects, training=training)
        self.keep(*[o for o in (found if len(objects) > 1 else [found]) if isinstance(o, nn.Module)])
        return found

    def run(self, step, *models_and_batch):
        return self.trainer.run(step, *models_and_batch)

    def backward(self, output, **options):
        self.trainer.backward(output, **options)

    def no_sync(self, model):
        return self.trainer.no_sync(model)

    def clip_grad_norm(self, model, max_norm):
        return self.trainer.clip_grad_norm(model, max_norm)

    def update(self, model, optimizer, **options):
        self.trainer.update(model, optimizer, **options)

    def loop(self, loader, *, epochs=1, state=None, validation=None):
        arguments = self._arguments(epochs, state)
        with self.trainer.loop(loader, validation=validation, **arguments) as self.current:
            for batch in self.current:
                self.step = self.current.step
                yield batch
        self._check_stopped()
        self._report_history(self.current.history)

    def log(self, **numbers):
        self.current.log(**{name: loss_of(value) for name, value in numbers.items()})

    def evaluate(self, model, loader, step):
        return self.trainer.evaluate(model, loader, step=step)

    # -- fit

    def fit(
        self,
        model,
        optimizer,
        loader,
        step,
        *,
        epochs=1,
        steps_per_epoch=None,
        scheduler=None,
        every="epoch",
        clip_norm=None,
        clip_value=None,
        nonfinite="raise",
        validation=None,
        validation_step=None,
        callbacks=(),
        state=None,
    ):
        arguments = self._arguments(epochs, state)
        if steps_per_epoch is not None:
            most = arguments["limits"].max_steps
            arguments["limits"] = Limits(epochs=epochs, max_steps=most, steps_per_epoch=steps_per_epoch)
        history = self.trainer.fit(
            model,
            optimizer,
            loader,
            step=step,
            scheduler=None if scheduler is None else SchedulerOptions(scheduler, every=every),
            gradients=GradientRules(clip_norm=clip_norm, clip_value=clip_value, nonfinite=nonfinite),
            validation=None if validation is None else Validation(validation, step=validation_step),
            callbacks=callbacks,
            **arguments,
        )
        self._check_stopped()
        self.keep(model)
        self._report_history(history)
        self.report(rates=[float(group["lr"]) for group in optimizer.param_groups])

    def _report_history(self, history):
        for record in history:
            self.report(**{f"{name} of epoch {record.epoch}": mean for name, mean in record.train.items()})
            self.report(**{f"val_{name} of epoch {record.epoch}": mean for name, mean in record.val.items()})


def by_hand(program):
    """Return the numbers of a program that runs in plain PyTorch."""
    torch.manual_seed(0)
    started = []

    def start(**options):
        started.append(HandRun(**options))
        return started[-1]

    program(start)
    return started[-1].numbers()


def with_tp(program, layout, folder=None):
    """Return the numbers of a program that the trainer runs; with a folder it is stopped once and resumed."""
    numbers = _once(program, layout, folder, is_resumed=False)
    return numbers if folder is None else _once(program, layout, folder, is_resumed=True)


def _once(program, layout, folder, *, is_resumed):
    torch.manual_seed(0)
    with ExitStack() as stack:
        started = []

        def start(**options):
            run = TrainerRun(layout, folder, is_resumed=is_resumed, **options)
            stack.enter_context(run.trainer)
            started.append(run)
            return run

        try:
            program(start)
        except StoppedError:
            return {}
        return started[-1].numbers()


@dataclass(frozen=True)
class Outcome:
    """What became of a program on a layout: its numbers, or what refused it, or the error that it died of."""

    numbers: dict | None = None
    refusal: str = ""
    crash: str = ""
    warnings: tuple = ()


def outcome_of(program, layout, folder=None):
    """Return what becomes of a program on a layout, with the warnings that it got."""
    warned = []

    class Kept(logging.Handler):
        def emit(self, record):
            warned.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("tp_trainer").addHandler(handler)
    try:
        return Outcome(with_tp(program, layout, folder), warnings=tuple(warned))
    except TpError as error:
        return Outcome(refusal=f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - the table says which one it was
        return Outcome(crash=f"{type(error).__name__}: {error}")
    finally:
        logging.getLogger("tp_trainer").removeHandler(handler)
