"""The conformance tests of what users hang on models and optimizers, for a backend's author to subclass."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tp_core.compare import assert_same
from tp_core.data import StepOutput
from tp_core.errors import TpError
from tp_core.plugins import Callback
from tp_trainer import Checkpoints, SchedulerOptions, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage

from tp_testing._kit import ConformanceKit
from tp_testing._training_conformance import (
    BATCH_SIZE,
    EPOCHS,
    RATE,
    State,
    StoppedError,
    make_trainer,
    mean_error,
    samples,
)

Step = Callable[[nn.Module, Any], StepOutput]
Run = Any  # what callbacks are given


def do_nothing(_: Any) -> None:
    pass


def momentum_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=RATE, momentum=0.9)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in trained(model) if p.dim() != 2]


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


class Calls(Callback):
    """A callback that calls a function with the model at one event of a run."""

    def __init__(self, event: str, call: Callable[[nn.Module], object]) -> None:
        self._call = call
        # On the object: a run calls what it overrides.
        method = self._with_model if event != "on_setup" else self._with_both
        setattr(self, event, method)

    def _with_model(self, run: Run, *_: object) -> None:
        self._call(run.model)

    def _with_both(self, model: nn.Module, _: Optimizer) -> None:
        self._call(model)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of state that hangs on an object which a backend may replace, copy or cut.

    Attributes:
        plant: Called with the model before training.
        event: The event of a run at which ``call`` is called with the model, or "".
        call: The function for the event.
        make_callback: Makes a further callback.
        make_optimizer: Makes the optimizer from the trained parameters.
        make_scheduler: Makes a scheduler from the optimizer, stepped after each step.
        make_step: Makes the step.
        train: Trains, and returns the whole model's state; by default `fit_once`.
        trainer: Arguments of the trainer.
        fit: Further arguments of ``fit``.
        dtype: The type of the model and the data.
    """

    plant: Callable[[nn.Module], object] = do_nothing
    event: str = ""
    call: Callable[[nn.Module], object] = do_nothing
    make_callback: Callable[[], Callback] | None = None
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer] = momentum_sgd
    make_scheduler: Callable[[Optimizer], Any] | None = None
    make_step: Callable[[], Step] = lambda: mean_error
    train: "Callable[[Kind, Setting], State] | None" = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a kind is trained.

    Attributes:
        make_trainer: Makes a trainer from arguments.
        make_model: Makes the model.
        folder: A folder of this kind's own, the same for all ranks.
        stops: Whether runs that are to be stopped and resumed are; the reference goes through.
    """

    make_trainer: Callable[..., Trainer]
    make_model: Callable[[], nn.Module]
    folder: str
    stops: bool


def fit_once(kind: Kind, setting: Setting) -> State:
    """Return the state after one call of ``fit``."""
    with setting.make_trainer(**kind.trainer) as trainer:
        return state_of(trainer, fitted(trainer, kind, setting))


def fitted(trainer: Trainer, kind: Kind, setting: Setting, **arguments: Any) -> nn.Module:
    model = setting.make_model().to(kind.dtype)
    kind.plant(model)
    optimizer = kind.make_optimizer(trained(model))
    callbacks: list[Callback] = [Calls(kind.event, kind.call)] if kind.event else []
    if kind.make_callback is not None:
        callbacks.append(kind.make_callback())
    if kind.make_scheduler is not None:
        arguments["scheduler"] = SchedulerOptions(kind.make_scheduler(optimizer), every="step")
    callbacks += arguments.pop("callbacks", [])
    arguments = {"step": kind.make_step(), "epochs": EPOCHS, "callbacks": callbacks, **kind.fit, **arguments}
    trainer.fit(model, optimizer, loader_of(kind), **arguments)
    return model


def loader_of(kind: Kind) -> DataLoader[Any]:
    return DataLoader(samples(dtype=kind.dtype), batch_size=BATCH_SIZE)


def state_of(trainer: Trainer, *models: nn.Module) -> State:
    """Return the whole state of models that were trained, on the CPU."""
    state = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if number else ""
        for name, tensor in trainer.session.model_state(trainer.prepare(model)).items():
            state[prefix + name] = tensor.detach().cpu().clone()
    return state


# -- Hooks on gradients ---------------------------------------------------------------------------


def mask_first_rows(model: nn.Module) -> None:
    for parameter in matrices(model):
        parameter.register_hook(lambda gradient: torch.cat([torch.zeros_like(gradient[:1]), gradient[1:]]))


def halve_gradients(model: nn.Module) -> None:
    for parameter in matrices(model):
        parameter.register_hook(lambda gradient: gradient * 0.5)


def clamp_gradients(model: nn.Module) -> None:
    for parameter in matrices(model):
        parameter.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))


def halve_accumulated(model: nn.Module) -> None:
    def halve(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    for parameter in matrices(model):
        parameter.register_post_accumulate_grad_hook(halve)


# -- Values that users write ----------------------------------------------------------------------


def assign_data(parameters: Callable[[nn.Module], list[nn.Parameter]], model: nn.Module) -> None:
    for parameter in parameters(model):
        parameter.data = parameter.data * 0.9


def write_data(parameters: Callable[[nn.Module], list[nn.Parameter]], model: nn.Module) -> None:
    for parameter in parameters(model):
        parameter.data.mul_(0.9)


class AssigningSgd(Optimizer):
    """Writes its updates by ``parameter.data = ...``, as optimizers of users do."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": RATE})

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


class WritingSgd(AssigningSgd):
    """The same in place, which no version counter counts."""

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"]).clamp_(-0.5, 0.5)


def with_hook(register: str, parameters: Iterable[Tensor], *, assigns: bool) -> Optimizer:
    """Return an optimizer with a hook before or after its steps that writes parameters."""
    optimizer = SGD(parameters, lr=RATE)

    def write(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if assigns:
                    parameter.data = parameter.data.clamp(-0.3, 0.3)
                else:
                    parameter.data.clamp_(-0.3, 0.3)

    getattr(optimizer, register)(write)
    return optimizer


# -- Attributes and counters ----------------------------------------------------------------------


def mark_matrices(model: nn.Module) -> None:
    for parameter in matrices(model):
        parameter.rate = 0.1  # type: ignore[attr-defined]  # as Mamba and muP mark parameters


class ReadsAttributes(SGD):
    """Steps marked parameters by their own rate."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=RATE)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(getattr(parameter, "rate", 1.0))
        super().step(closure)


class CountingSgd(Optimizer):
    """Divides its rate by a counter in its groups: a number, or a tensor, that is there before or is made."""

    def __init__(self, parameters: Iterable[Tensor], *, is_tensor: bool, is_made: bool) -> None:
        super().__init__(parameters, {"lr": RATE})
        self._is_tensor = is_tensor
        if not is_made:
            for group in self.param_groups:
                group["count"] = self._zero()

    def _zero(self) -> Any:
        if self._is_tensor:
            return torch.zeros(())
        return 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            if "count" not in group:
                group["count"] = self._zero()
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / float(group["count"]))


class ScalingSgd(CountingSgd):
    """The same by the norm of each matrix, as LAMB has it, which a backend with parts must gather."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(float(parameter.norm() / (parameter.grad.norm() + 1.0)))
        super().step(closure)


class CountingLamb(ScalingSgd):
    """The same under a name that says so."""


class Interpolating(Optimizer):
    """Trains a point between its average and its own weights, and evaluates the average.

    Source: Defazio et al., "The Road Less Scheduled", 2024, section 2.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": RATE, "count": 0, "is_training": True})

    @torch.no_grad()
    def _switch(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] is not training:
                group["is_training"] = training
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        z = self.state[parameter]["z"]
                        # From x to y = x + (z - x) / 10, and back.
                        weight = 0.1 if training else -1 / 9
                        parameter.lerp_(z, weight)

    def train(self) -> None:
        self._switch(training=True)

    def eval(self) -> None:
        self._switch(training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], -1 / 9)
                state["z"].sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(state["z"], 1 / group["count"])
                parameter.lerp_(state["z"], 0.1)


def groups_of_parameters(parameters: Iterable[Tensor]) -> Optimizer:
    groups = [{"params": [p], "lr": RATE / (i + 1)} for i, p in enumerate(parameters)]
    return SGD(groups, lr=RATE, momentum=0.9)


def schedules_of_parameters(optimizer: Optimizer) -> Any:
    def rule(number: int) -> Callable[[int], float]:
        return lambda step: 1 / (1 + number * step)

    return LambdaLR(optimizer, [rule(number) for number in range(len(optimizer.param_groups))])


def begin_with_first(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD([next(iter(parameters))], lr=RATE, momentum=0.9)


class AddsGroup(Callback):
    """Gives the optimizer the parameters that it lacks, after some steps."""

    def on_step_end(self, run: Run) -> None:
        if run.step == 3:
            grouped = {p for group in run.optimizer.param_groups for p in group["params"]}
            ungrouped = [p for p in trained(run.model) if p not in grouped]
            run.optimizer.add_param_group({"params": ungrouped, "lr": RATE / 2})


# -- What forward, and what the step, keep --------------------------------------------------------


def keep(make: Callable[[], Any], factor: Callable[[nn.Module], Any], model: nn.Module) -> None:
    """Have a model keep something as an attribute, which scales its outputs by a factor at each call."""
    model.kept = make()
    model.register_forward_hook(lambda module, _, output: output * factor(module))


def count_in_tensor(module: Any) -> Any:
    module.kept = module.kept + 1
    return 1 / (1 + module.kept / 10)


def count_in_list(module: Any) -> Any:
    module.kept.append(len(module.kept))
    return 1 / (1 + len(module.kept) / 10)


def count_in_dict(module: Any) -> Any:
    module.kept["calls"] += 1
    return 1 / (1 + module.kept["calls"] / 10)


def draw(module: Any) -> Any:
    return 1 + torch.rand((), generator=module.kept, dtype=torch.float64) / 10


class RegistersBuffer(Callback):
    """Registers a buffer once the model is prepared, which the step uses and a callback changes."""

    def on_fit_start(self, run: Run) -> None:
        run.model.register_buffer("gain", torch.ones((), dtype=torch.float64))

    def on_step_end(self, run: Run) -> None:
        run.model.gain.data.mul_(0.9)


def error_with_gain(model: Any, batch: Any) -> StepOutput:
    loss: Tensor = nn.functional.mse_loss(model(batch[0]) * model.gain, batch[1])
    return loss


def step_by_number(numbers: list[Any]) -> Step:
    """Return a step whose loss grows by the number of the run's steps, which a callback gives it."""

    def step(model: nn.Module, batch: Any) -> StepOutput:
        part: float = min(1.0, (1 + numbers[0].step) / 10)
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * part

    return step


def fit_by_number(kind: Kind, setting: Setting) -> State:
    numbers: list[Any] = []

    class GivesRun(Callback):
        def on_fit_start(self, run: Run) -> None:
            numbers[:] = [run]

    numbered = replace(kind, make_callback=GivesRun, make_step=partial(step_by_number, numbers))
    return fit_once(numbered, setting)


def counting_step() -> Step:
    """Return a step whose loss grows by a counter of its own."""
    count = 0

    def step(model: nn.Module, batch: Any) -> StepOutput:
        nonlocal count
        count += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * min(1.0, count / 10)

    return step


# -- Several optimizers, several models -----------------------------------------------------------


def train_in_loop(kind: Kind, setting: Setting, *, cuts: int, models: int) -> State:
    """Train in a loop of its own, each model by several optimizers, each of a part of the parameters."""
    with setting.make_trainer(**kind.trainer) as trainer:
        pairs = []
        for _ in range(models):
            model = setting.make_model().to(kind.dtype)
            kind.plant(model)
            parameters = trained(model)
            parts = [parameters[i::cuts] for i in range(cuts)]
            optimizers = [SGD(part, lr=RATE / (1 + i), momentum=0.9) for i, part in enumerate(parts)]
            pairs.append(trainer.prepare(model, *optimizers))
        loader = trainer.prepare(loader_of(kind))
        for _ in range(EPOCHS):
            for batch in loader:
                for model, *optimizers in pairs:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    trainer.backward(trainer.run(mean_error, model, batch))
                for model, *optimizers in pairs:
                    for optimizer in optimizers:
                        trainer.update(model, optimizer)
        return state_of(trainer, *(model for model, *_ in pairs))


def second_after_first(kind: Kind, setting: Setting) -> State:
    """Train a model, then another one whose weights are drawn after that."""

    def scale(model: nn.Module) -> None:
        factor = 0.5 + torch.rand((), dtype=torch.float64)
        for parameter in model.parameters():
            parameter.data.mul_(factor)

    with setting.make_trainer() as trainer:
        models = [fitted(trainer, replace(kind, plant=scale), setting) for _ in range(2)]
        return state_of(trainer, *models)


# -- Averages of weights, in runs that are stopped and resumed -------------------------------------


class Stops(Callback):
    """Ends the run as an error does: in a step, at the end of an epoch, or within a validation."""

    def __init__(self, place: str, step: Step) -> None:
        self._place, self._step = place, step
        self.is_now = False

    def on_step_end(self, run: Run) -> None:
        self.is_now = self._place == "in a step" and run.step == 4

    def on_epoch_end(self, run: Run) -> None:  # noqa: ARG002 - contract
        if self._place == "at an epoch's end":
            raise StoppedError

    def on_validation_start(self, run: Run) -> None:  # noqa: ARG002 - contract
        self.is_now = self._place == "within a validation"

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        if self.is_now:
            raise StoppedError
        return self._step(model, batch)


def resumed(
    place: str,
    train: "Callable[[Kind, Setting, Trainer, dict[str, Any]], State]",
    kind: Kind,
    setting: Setting,
) -> State:
    """Return what ``train`` returns of a run that was stopped in a place and resumed.

    It gets the kind, the setting, a trainer, and arguments of ``fit``.
    """

    def run(stops: Stops) -> State:
        arguments = {
            "step": stops.step,
            "callbacks": [stops],
            "validation": DataLoader(samples(7, dtype=kind.dtype), batch_size=BATCH_SIZE),
            "checkpoint": Checkpoints(setting.folder, every_steps=1),
            "resume": "auto",
        }
        with setting.make_trainer(**kind.trainer) as trainer:
            return train(kind, setting, trainer, arguments)

    step = kind.make_step()
    if setting.stops:
        try:
            run(Stops(place, step))
        except StoppedError:
            pass
        else:
            msg = "the run was not stopped"
            raise RuntimeError(msg)
    return run(Stops("nowhere", step))


def weights(kind: Kind, setting: Setting, trainer: Trainer, arguments: dict[str, Any]) -> State:
    """Return the state of a model after a run."""
    return state_of(trainer, fitted(trainer, kind, setting, **arguments))


def averaged(kind: Kind, setting: Setting, trainer: Trainer, arguments: dict[str, Any]) -> State:
    """Return a run's average of weights."""
    average = ExponentialMovingAverage(0.6)
    arguments["callbacks"] = [average, *arguments["callbacks"]]
    model = fitted(trainer, kind, setting, **arguments)
    with average.in_place_of(model):
        return state_of(trainer, model)


def average_begun_before(kind: Kind, setting: Setting) -> State:
    """Return an average over two calls of ``fit``."""
    average = ExponentialMovingAverage(0.6)
    with setting.make_trainer(**kind.trainer) as trainer:
        model = fitted(trainer, kind, setting, callbacks=[average])
        again = replace(kind, plant=do_nothing)
        model = fitted(trainer, again, replace(setting, make_model=lambda: model), callbacks=[average])
        with average.in_place_of(model):
            return state_of(trainer, model)


class MovesAverage(Callback):
    """Moves torch's average of a model after each step."""

    def __init__(self, average: AveragedModel) -> None:
        self._average = average

    def on_step_end(self, run: Run) -> None:
        self._average.update_parameters(run.model)


def averaged_by_torch(kind: Kind, setting: Setting, trainer: Trainer, arguments: dict[str, Any]) -> State:
    """Return the state of torch's average of a model, which was made before the model was prepared."""
    model = setting.make_model().to(kind.dtype)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6))
    arguments["callbacks"] = [MovesAverage(average), *arguments.get("callbacks", [])]
    fitted(trainer, kind, replace(setting, make_model=lambda: model), state={"average": average}, **arguments)
    state = trainer.session.model_state(average.module)
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def torchs_average(kind: Kind, setting: Setting) -> State:
    """Return torch's average over a run that goes through."""
    with setting.make_trainer(**kind.trainer) as trainer:
        return averaged_by_torch(kind, setting, trainer, {})


PLACES = ("in a step", "at an epoch's end", "within a validation")
"""Where runs are stopped."""
HALF: dict[str, Any] = {"trainer": {"precision": "fp16-mixed"}, "dtype": torch.float32}
"""A run with a scale of its losses."""
resumed_in_a_step = partial(resumed, "in a step", weights)

NOTHING = "nothing"
"""The kind without any state, which has to be carried: a backend that refuses all others is none."""

KINDS: dict[str, Kind] = {
    NOTHING: Kind(),
    "gradient hooks before": Kind(plant=mask_first_rows),
    "accumulated gradient hooks before": Kind(plant=halve_accumulated),
    "nonlinear gradient hooks before": Kind(plant=clamp_gradients),
    "gradient hooks in on_setup": Kind(event="on_setup", call=mask_first_rows),
    "gradient hooks in a callback": Kind(event="on_fit_start", call=halve_gradients),
    "attributes": Kind(plant=mark_matrices, make_optimizer=ReadsAttributes),
    "data assigned before": Kind(plant=partial(assign_data, matrices)),
    "data assigned in a callback": Kind(event="on_step_end", call=partial(assign_data, matrices)),
    "frozen data assigned in a callback": Kind(event="on_step_end", call=partial(assign_data, frozen)),
    "data written in a callback": Kind(event="on_step_end", call=partial(write_data, matrices)),
    "frozen data written in a callback": Kind(event="on_step_end", call=partial(write_data, frozen)),
    "data assigned by the optimizer": Kind(make_optimizer=AssigningSgd),
    "data written by the optimizer": Kind(make_optimizer=WritingSgd),
    "data assigned in a hook after the optimizer": Kind(
        make_optimizer=partial(with_hook, "register_step_post_hook", assigns=True)
    ),
    "data assigned in a hook before the optimizer": Kind(
        make_optimizer=partial(with_hook, "register_step_pre_hook", assigns=True)
    ),
    "data written in a hook after the optimizer": Kind(
        make_optimizer=partial(with_hook, "register_step_post_hook", assigns=False)
    ),
    "data written in a hook before the optimizer": Kind(
        make_optimizer=partial(with_hook, "register_step_pre_hook", assigns=False)
    ),
    "a number counted in a group": Kind(make_optimizer=partial(CountingSgd, is_tensor=False, is_made=True)),
    "a tensor counted in a group": Kind(make_optimizer=partial(CountingSgd, is_tensor=True, is_made=False)),
    "a number counted beside norms of matrices": Kind(
        make_optimizer=partial(CountingLamb, is_tensor=False, is_made=False)
    ),
    "a tensor counted beside norms of matrices": Kind(
        make_optimizer=partial(CountingLamb, is_tensor=True, is_made=True)
    ),
    "norms of matrices under another name": Kind(
        make_optimizer=partial(ScalingSgd, is_tensor=False, is_made=True)
    ),
    "an optimizer with train and eval": Kind(make_optimizer=Interpolating),
    "a schedule of each parameter": Kind(
        make_optimizer=groups_of_parameters, make_scheduler=schedules_of_parameters
    ),
    "a group added in a callback": Kind(make_optimizer=begin_with_first, make_callback=AddsGroup),
    "two optimizers of a model": Kind(train=partial(train_in_loop, cuts=2, models=1)),
    "three optimizers of a model": Kind(train=partial(train_in_loop, cuts=3, models=1)),
    "two models with one scale": Kind(train=partial(train_in_loop, cuts=1, models=2), **HALF),
    "a second model after the first": Kind(train=second_after_first),
    "a tensor kept by forward": Kind(plant=partial(keep, partial(torch.zeros, ()), count_in_tensor)),
    "a list kept by forward": Kind(plant=partial(keep, list, count_in_list)),
    "a dict kept by forward": Kind(plant=partial(keep, lambda: {"calls": 0}, count_in_dict)),
    "a generator kept by forward": Kind(plant=partial(keep, lambda: torch.Generator().manual_seed(3), draw)),
    "a buffer registered later": Kind(make_callback=RegistersBuffer, make_step=lambda: error_with_gain),
    "a count of the step's own": Kind(make_step=counting_step),
    "the number of the run's steps": Kind(train=fit_by_number),
    **{f"an average stopped {place}": Kind(train=partial(resumed, place, averaged)) for place in PLACES},
    "an average begun before": Kind(train=average_begun_before),
    "an average of torch": Kind(train=torchs_average),
    **{
        f"an average of torch stopped {place}": Kind(train=partial(resumed, place, averaged_by_torch))
        for place in PLACES
    },
    # Pairs, of kinds that meet in one object.
    "gradient hooks and a count in a group": Kind(
        plant=mask_first_rows, make_optimizer=partial(CountingLamb, is_tensor=False, is_made=True)
    ),
    "attributes and data written in a callback": Kind(
        plant=mark_matrices,
        make_optimizer=ReadsAttributes,
        event="on_step_end",
        call=partial(write_data, frozen),
    ),
    "gradient hooks and a group added": Kind(
        plant=halve_gradients, make_optimizer=begin_with_first, make_callback=AddsGroup
    ),
    "gradient hooks and two optimizers": Kind(
        plant=mask_first_rows, train=partial(train_in_loop, cuts=2, models=1)
    ),
    "gradient hooks and a scale": Kind(plant=mask_first_rows, **HALF),
    "gradient hooks and accumulation": Kind(plant=halve_gradients, trainer={"accumulate": 2}),
    "gradient hooks and clipping": Kind(plant=mask_first_rows, fit={"clip_norm": 0.05}),
    "a list kept by forward and an average": Kind(
        plant=partial(keep, list, count_in_list), train=average_begun_before
    ),
    "an average and accumulation": Kind(train=average_begun_before, trainer={"accumulate": 2}),
    "an average of torch and accumulation": Kind(train=torchs_average, trainer={"accumulate": 2}),
    "an average and data written by the optimizer": Kind(
        make_optimizer=WritingSgd, train=average_begun_before
    ),
    "an optimizer with train and eval, and clipping": Kind(
        make_optimizer=Interpolating, fit={"clip_norm": 0.05}
    ),
    "a count in a group and accumulation": Kind(
        make_optimizer=partial(CountingLamb, is_tensor=True, is_made=True), trainer={"accumulate": 2}
    ),
    "two optimizers with one scale": Kind(train=partial(train_in_loop, cuts=2, models=1), **HALF),
    **{
        f"{name}, resumed": replace(kind, train=resumed_in_a_step)
        for name, kind in {
            "gradient hooks": Kind(plant=mask_first_rows),
            "attributes": Kind(plant=mark_matrices, make_optimizer=ReadsAttributes),
            "frozen data written": Kind(event="on_step_end", call=partial(write_data, frozen)),
            "frozen data assigned": Kind(event="on_step_end", call=partial(assign_data, frozen)),
            "a count in a group": Kind(make_optimizer=partial(CountingSgd, is_tensor=True, is_made=True)),
            "a count beside norms of matrices": Kind(
                make_optimizer=partial(CountingLamb, is_tensor=False, is_made=True)
            ),
            "an optimizer with train and eval": Kind(make_optimizer=Interpolating),
            "a schedule of each parameter": Kind(
                make_optimizer=groups_of_parameters, make_scheduler=schedules_of_parameters
            ),
            "a group added in a callback": Kind(make_optimizer=begin_with_first, make_callback=AddsGroup),
            "a buffer registered later": Kind(
                make_callback=RegistersBuffer, make_step=lambda: error_with_gain
            ),
        }.items()
    },
}


# -- On every rank --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserStateOutcome:
    """What became of one kind: the state after training, or the error that refused it.

    Attributes:
        state: The whole model's state after training.
        refusal: The sentence of the error.
        crash: Another error, which names no remedy.
    """

    state: State | None = None
    refusal: str = ""
    crash: str = ""


def outcome_of(kind: Kind, setting: Setting) -> UserStateOutcome:
    """Train a model with a kind of state planted, and return what became of it."""
    try:
        return UserStateOutcome((kind.train or fit_once)(kind, setting))
    except TpError as error:
        return UserStateOutcome(refusal=f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - the report says which one it was
        return UserStateOutcome(crash=f"{type(error).__name__}: {error}")


def user_state_outcomes(kit: ConformanceKit, folder: str) -> dict[str, UserStateOutcome]:
    outcomes = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        place = str(Path(folder, str(number)))
        outcomes[name] = outcome_of(
            kind, Setting(partial(make_trainer, kit), kit.make_model, place, stops=True)
        )
    return outcomes


# -- The tests -----------------------------------------------------------------------------------


@cache  # of a process that has several kits, each of which asks for all kinds
def state_alone(make_reference: Callable[[], nn.Module], name: str) -> State:
    """Return the state after training with a kind of state planted, on one device."""
    alone = partial(Trainer, backend="single", devices="cpu", seed=5, progress=False)
    with TemporaryDirectory() as folder:
        outcome = outcome_of(KINDS[name], Setting(alone, make_reference, folder, stops=False))
    assert outcome.state is not None, outcome
    return outcome.state


class UserStateConformance(ConformanceKit):
    """The conformance tests of what users hang on objects. A subclass in a test module names the backend.

    A backend replaces parameters by shards, copies modules, and runs a step in parts. Gradient hooks,
    attributes of parameters, values written through ``.data``, counters in an optimizer's groups and in the
    step, what ``forward`` keeps, buffers and groups that come later, several optimizers and models, and
    averages of weights must count as on one device. Or an error of `tp_core.errors` refuses them.

    Example:
        >>> class TestMine(UserStateConformance):
        ...     backend = MyBackend
    """

    _outcomes: ClassVar[list[dict[str, UserStateOutcome]]]

    def outcomes(self) -> list[dict[str, UserStateOutcome]]:
        """Return each rank's outcomes of all kinds; the processes are started once."""
        kit = type(self)
        if "_outcomes" not in kit.__dict__:
            with TemporaryDirectory() as folder:
                kit._outcomes = self.everywhere(user_state_outcomes, folder)
        return kit._outcomes

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_carried_or_refused(self, kind: str) -> None:
        expected = state_alone(self.make_reference, kind)
        for outcomes in self.outcomes():
            outcome = outcomes[kind]
            assert not outcome.crash, "an error that does not say what to do"
            assert kind != NOTHING or not outcome.refusal
            if outcome.state is not None:
                if "precision" in KINDS[kind].trainer:
                    dtypes = [torch.bfloat16]
                else:
                    dtypes = []
                assert_same(outcome.state, expected, dtypes=dtypes, depth="training")
