"""The conformance tests of what users hang on models and optimizers, for a backend's author to subclass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from tp_core.compare import assert_same
from tp_core.data import StepOutput
from tp_core.errors import TpError
from tp_core.plugins import Callback
from tp_trainer import Trainer

from tp_testing._kit import ConformanceKit
from tp_testing._training_conformance import (
    BATCH_SIZE,
    EPOCHS,
    RATE,
    State,
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


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


class Calls(Callback):
    """A callback that calls a function with the model at one event of a run."""

    def __init__(self, event: str, call: Callable[[nn.Module], object]) -> None:
        self._call = call
        # On the object: a run calls what it overrides.
        setattr(self, event, self._with_model if event != "on_setup" else self._with_both)

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
        make_optimizer: Makes the optimizer from the trained parameters.
        make_step: Makes the step.
    """

    plant: Callable[[nn.Module], object] = do_nothing
    event: str = ""
    call: Callable[[nn.Module], object] = do_nothing
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer] = momentum_sgd
    make_step: Callable[[], Step] = lambda: mean_error


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


def with_assigning_hook(parameters: Iterable[Tensor]) -> Optimizer:
    optimizer = SGD(parameters, lr=RATE)

    def assign(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clamp(-0.3, 0.3)

    optimizer.register_step_post_hook(assign)
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
        return torch.zeros(()) if self._is_tensor else 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            if "count" not in group:
                group["count"] = self._zero()
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / float(group["count"]))


class CountingLamb(CountingSgd):
    """The same by the norm of each matrix, as LAMB has it, which a backend with parts must gather."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(float(parameter.norm() / (parameter.grad.norm() + 1.0)))
        super().step(closure)


def counting_step() -> Step:
    """Return a step whose loss grows by a counter of its own."""
    count = 0

    def step(model: nn.Module, batch: Any) -> StepOutput:
        nonlocal count
        count += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * min(1.0, count / 10)

    return step


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
    "data assigned in a hook of the optimizer": Kind(make_optimizer=with_assigning_hook),
    "a number counted in a group": Kind(make_optimizer=partial(CountingSgd, is_tensor=False, is_made=True)),
    "a tensor counted in a group": Kind(make_optimizer=partial(CountingSgd, is_tensor=True, is_made=False)),
    "a number counted beside norms of matrices": Kind(
        make_optimizer=partial(CountingLamb, is_tensor=False, is_made=False)
    ),
    "a tensor counted beside norms of matrices": Kind(
        make_optimizer=partial(CountingLamb, is_tensor=True, is_made=True)
    ),
    "a count of the step's own": Kind(make_step=counting_step),
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


def outcome_of(make_trainer: Callable[[], Trainer], model: nn.Module, kind: Kind) -> UserStateOutcome:
    """Train a model with a kind of state planted, and return what became of it."""
    kind.plant(model)
    optimizer = kind.make_optimizer([p for p in model.parameters() if p.requires_grad])
    callbacks = [Calls(kind.event, kind.call)] if kind.event else []
    loader = DataLoader(samples(), batch_size=BATCH_SIZE)
    try:
        with make_trainer() as trainer:
            trainer.fit(model, optimizer, loader, step=kind.make_step(), epochs=EPOCHS, callbacks=callbacks)
            state = trainer.session.model_state(model)
            return UserStateOutcome({n: t.detach().cpu().clone() for n, t in state.items()})
    except TpError as error:
        return UserStateOutcome(refusal=f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - the report says which one it was
        return UserStateOutcome(crash=f"{type(error).__name__}: {error}")


def user_state_outcomes(kit: ConformanceKit) -> dict[str, UserStateOutcome]:
    return {
        name: outcome_of(partial(make_trainer, kit), kit.make_model(), kind) for name, kind in KINDS.items()
    }


# -- The tests -----------------------------------------------------------------------------------


class UserStateConformance(ConformanceKit):
    """The conformance tests of what users hang on objects. A subclass in a test module names the backend.

    A backend replaces parameters by shards, copies modules, and runs a step in parts. Gradient hooks,
    attributes of parameters, values written through ``.data``, counters in an optimizer's groups and in the
    step must count as on one device. Or an error of `tp_core.errors` refuses them.

    Example:
        >>> class TestMine(UserStateConformance):
        ...     backend = MyBackend
    """

    _outcomes: ClassVar[list[dict[str, UserStateOutcome]]]

    def outcomes(self) -> list[dict[str, UserStateOutcome]]:
        """Return each rank's outcomes of all kinds; the processes are started once."""
        kit = type(self)
        if "_outcomes" not in kit.__dict__:
            kit._outcomes = self.everywhere(user_state_outcomes)
        return kit._outcomes

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_carried_or_refused(self, kind: str) -> None:
        alone = partial(Trainer, backend="single", devices="cpu", seed=5, progress=False)
        expected = outcome_of(alone, self.make_reference(), KINDS[kind])
        assert expected.state is not None, expected
        for outcomes in self.outcomes():
            found = outcomes[kind]
            assert not found.crash, "an error that does not say what to do"
            assert kind != NOTHING or not found.refusal
            if found.state is not None:
                assert_same(found.state, expected.state, depth="training")
