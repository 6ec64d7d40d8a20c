"""The user's step: its loss, its precision, the modes of its modules, and the checks of its first call."""

import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from tp_core import tree_map
from tp_core.data import CountedBatch, Parts, StepOutput, is_array
from tp_core.errors import ConfigError, StepError
from tp_core.jobs import Precision
from tp_core.output import get_logger
from tp_core.plugins import Session

log = get_logger("tp_trainer")


NO_GRADIENTS = (
    "the step's loss leads to no parameter (it does not require grad); compute it from the model's output, "
    "without .item(), .detach() or torch.no_grad()"
)


def loss_of(output: Any, *, training: bool) -> Tensor:
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = output
    if not isinstance(loss, Tensor):
        msg = (
            "the step must return its loss, a scalar tensor, or a dict with it as 'loss'; it returned "
            f"{_returned(output)}"
        )
        raise StepError(msg)
    if loss.dim() != 0 and loss.numel() != 1:
        msg = (
            f"the step's loss must be a scalar, got shape {tuple(loss.shape)}; return its mean over the "
            "samples (loss.mean()), and where a method of the model makes it on parts of the batch, as with "
            "dp-gather, make it in the step instead, from the model's output"
        )
        raise StepError(msg)
    if training and not loss.requires_grad:
        raise StepError(NO_GRADIENTS)
    return loss


def _returned(output: Any) -> str:
    """Return what a step returned that is no loss, and what to return instead."""
    if isinstance(output, Mapping) and "loss" in output:
        return f"a dict whose 'loss' is {_returned(output['loss'])}"
    if isinstance(output, Mapping):
        return f"a dict with {sorted(map(str, output))}"
    if isinstance(output, Real) or is_array(output):
        return f"{output!r}, which has no gradients; return the tensor, without .item(), float() or .numpy()"
    kind = type(output).__name__
    if isinstance(getattr(output, "loss", None), Tensor):
        return f"an object of {kind}; return its loss: output.loss"
    if isinstance(output, Coroutine):
        output.close()  # or Python would warn that nobody awaited it
        return "a coroutine; write the step without async"
    if isinstance(output, Iterator):
        return f"a {kind}; return the loss in place of yielding it"
    if isinstance(output, tuple | list) and any(isinstance(value, Tensor) for value in output):
        return f"a {kind} of {len(output)}; return one value: {{'loss': loss}} with the numbers to log"
    return repr(output)


def weighed(step: "Step", unchecked: list["Step"] | None = None) -> "Step":
    """Return a step with its batch's own weight in the output, where it returns none.

    Its first batch checks the steps that are ``unchecked``. One function does both, as a backend checks each
    function that it has not seen.
    """

    def run(model: Any, batch: Any) -> StepOutput:
        if unchecked and isinstance(batch, CountedBatch):
            for each in [*unchecked]:  # parts of a batch may run in several threads
                batch.check(each, model)
            unchecked.clear()
        output = step(model, batch)
        named = {"loss": output} if isinstance(output, Tensor) else output
        if not isinstance(batch, CountedBatch) or not isinstance(named, Mapping) or "weight" in named:
            return output
        weight = batch.weight()
        if weight is None:
            return output
        return {**named, "weight": weight}

    run.wrapped_step = step  # type: ignore[attr-defined]  # functions take any
    return run


# -- Precision, and the scale that keeps fp16 gradients from underflow ----------------------------


Step = Callable[[Any, Any], StepOutput]
"""``step(model, batch)``; it may be typed for the user's own classes of model and batch."""
RunStep = Callable[[Step, nn.Module, Any], StepOutput]
RunAny = Callable[[Any, Any, Any], StepOutput]

LOWER = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""The lower dtype of each mixed precision."""


def autocast(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a factory of the context for a step, or ``None`` if it needs none."""
    if precision not in LOWER:
        return None
    return lambda: torch.autocast(device.type, dtype=LOWER[precision])


def in_precision(run: RunAny, precision: Precision, device: torch.device) -> RunAny:
    """Return a function that runs a step in a precision; ``run`` itself for fp32.

    ``run`` is as `Session.run`, or with several models as `Session.run_several`.
    """
    if precision == "bf16-true":
        return lambda step, model, batch: run(step, model, to_bfloat16(batch))
    context = autocast(precision, device)
    if context is None:
        return run

    def run_under_autocast(step: Any, model: Any, batch: Any) -> StepOutput:
        with context():
            return run(step, model, batch)

    return run_under_autocast


def is_inherited(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Return whether a session's bound ``method`` is the ``default`` of `Session`, for a single device."""
    return getattr(method, "__func__", None) is default


def to_bfloat16(batch: Any) -> Any:
    """Return ``batch`` with its floating-point tensors in bfloat16; other values unchanged."""
    if isinstance(batch, Parts):
        return batch.map(to_bfloat16)
    return tree_map(_as_bfloat16, batch)


def _as_bfloat16(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.to(torch.bfloat16)
    return leaf


class LossScaler:
    """A factor on the loss, which keeps fp16 gradients from underflow.

    It is halved after an infinite or NaN gradient, and doubled after 2000 good steps in a row. torch's own
    scaler decides on each rank alone, and ranks with different shards would decide differently. Here the
    caller passes the result for all ranks.

    Between two backward passes every gradient is at this scale, or unscaled and known to be. So several
    optimizers of a model and several models share one scale: :meth:`unscale` divides a gradient once, and the
    scale changes only before a backward pass, which puts all gradients that are left at the new scale. Scales
    are powers of two, so this rounds nothing.

    Attributes:
        scale: The factor of the next loss.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; the defaults are as in
    ``torch.amp.GradScaler``.
    """

    def __init__(self) -> None:
        self.scale = 65536.0
        self._good = 0  # steps in a row
        self._all_finite: bool | None = None  # the gradients of the updates since the last backward pass
        self._unscaled: dict[int, weakref.ref[nn.Parameter]] = {}  # by id: tensors do not compare to a bool
        # Models that accumulate: on fsdp nobody can reach the gradients that are not reduced yet.
        self._accumulating: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._makes_step = False

    def keep_while_accumulating(self, model: nn.Module) -> None:
        """Keep the scale until the next :meth:`unscale` of a model, whose gradients accumulate unreduced."""
        self._accumulating.add(model)

    @torch.no_grad()
    def begin_backward(self, models: Iterable[nn.Module]) -> None:
        """Decide on the scale, and put all gradients that these models have at it."""
        for reference in self._unscaled.values():
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                parameter.grad.mul_(self.scale)
        self._unscaled.clear()
        if self._all_finite is None or self._accumulating:
            return
        before = self.scale
        self.scale, self._good = self._next()
        self._all_finite = None
        if self.scale == before:
            return
        # By id: models may share parameters.
        parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale / before)

    @torch.no_grad()
    def unscale(self, session: Session, model: nn.Module, factor: float) -> None:
        """Multiply a model's gradients by a factor, and divide by the scale those that are at it."""
        self._accumulating.discard(model)
        graded = [parameter for parameter in model.parameters() if parameter.grad is not None]
        unscaled = [parameter for parameter in graded if id(parameter) in self._unscaled]
        if len(unscaled) < len(graded):
            # Rare: this model shares parameters with another one, which was unscaled before.
            for parameter in unscaled:
                parameter.grad.mul_(self.scale)  # type: ignore[union-attr]  # they have one, as seen
            factor /= self.scale
        if factor != 1.0:
            session.scale_gradients(model, factor)
        self._unscaled.update({id(parameter): weakref.ref(parameter) for parameter in graded})

    def note(self, *, finite: bool) -> None:
        """Note whether the gradients of an update were finite, for the scale of the next backward pass."""
        self._all_finite = finite and self._all_finite is not False

    def guard(self, optimizer: Optimizer) -> None:
        """Have an optimizer refuse steps other than those of :meth:`step`, as its gradients are scaled."""
        optimizer.register_step_pre_hook(self._refuse_scaled)

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer, whose gradients are unscaled now."""
        self._makes_step = True
        try:
            optimizer.step()
        finally:
            self._makes_step = False

    def _refuse_scaled(self, *_: object) -> None:
        if not self._makes_step:
            msg = (
                "with precision='fp16-mixed' the gradients are scaled, and the optimizer must not take "
                "them as they are; call trainer.update(model, optimizer) instead of optimizer.step()"
            )
            raise ConfigError(msg)

    def _next(self) -> tuple[float, int]:
        """Return the scale of the next backward pass, and the good steps before it."""
        if self._all_finite is None:
            return self.scale, self._good
        if not self._all_finite:
            return self.scale / 2, 0
        if self._good + 1 == 2000:
            return self.scale * 2, 0
        return self.scale, self._good + 1

    def state_dict(self) -> dict[str, Any]:
        scale, good = self._next()
        return {"scale": scale, "good": good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self._good = float(state["scale"]), int(state["good"])
        self._all_finite = None
        self._unscaled.clear()


# -- Training and evaluation modes of modules -----------------------------------------------------


@contextmanager
def restore_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module: ``model.train()`` at the end would unfreeze norms in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def switch_weights(optimizer: Optimizer, *, training: bool) -> None:
    """Have an optimizer that trains other weights than those to evaluate put these into the model.

    Optimizers without a schedule have ``train()`` and ``eval()`` for that; torch's own have neither.

    Source: Defazio et al., "The Road Less Scheduled", 2024, section 4.
    """
    train, evaluate = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    if not callable(train) or not callable(evaluate):
        return
    if training:
        train()
    else:
        evaluate()


def warn_evaluation_mode(model: nn.Module) -> None:
    """Warn of norms in evaluation mode within a model in training mode: ``fit`` calls ``model.train()``.

    They may be frozen on purpose. A part without running statistics, such as a pretrained transformer that
    adapters were put into, is in evaluation mode as it was loaded.
    """
    if not model.training:
        return
    frozen = [
        name
        for name, part in model.named_modules()
        if not part.training and any(getattr(m, "track_running_stats", False) for m in part.modules())
    ]
    # Only the outermost module of each frozen part.
    outermost = [name for name in frozen if name.rpartition(".")[0] not in frozen]
    if outermost:
        log.warning(
            "in evaluation mode, while fit sets the whole model to training mode: %s; to keep one out of it, "
            "call its eval() in the step or in a callback's on_fit_start, or override its train()",
            ", ".join(outermost[:3]) + ", ..." * (len(outermost) > 3),
        )


def warn_batch_statistics(session: Session, model: nn.Module) -> None:
    """Warn of norms that take the statistics of a device's share of a batch, where there are several."""
    if not session.is_main or (session.data_size == 1 and len(session.job.devices) == 1):
        return
    local = [
        name or "the model"
        for name, module in session.unwrap(model).named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if local:
        log.warning(
            "batch norms in training mode take the statistics of each device's share of a batch, so the "
            "numbers differ from one device's (%s); take a norm without batch statistics, such as GroupNorm, "
            "keep pretrained ones in evaluation mode, or set DdpOptions(sync_batchnorm=True) on accelerators",
            ", ".join(local[:3]) + ", ..." * (len(local) > 3),
        )


@contextmanager
def guard_stop_iteration() -> Iterator[None]:
    """Turn a ``StopIteration`` of the user's code into a StepError that names its place.

    Python would take it for the end of the iteration around the call. Out of a generator it becomes a
    ``RuntimeError`` without its place.
    """
    try:
        yield
    except StopIteration as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        msg = (
            f"StopIteration was raised in {last.name} ({last.filename}, line {last.lineno}): next() was "
            "called on an iterator that has ended; begin it again there, as in itertools.cycle(loader), or "
            "give next() a default"
        )
        raise StepError(msg) from error


# -- Checks of the first step alone ---------------------------------------------------------------


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def warn_no_gradients(parameters: Sequence[Tensor], *, owner: str) -> None:
    """Log a warning if no parameter has a gradient after the first backward pass or step.

    Then the loss comes from another model, or from a copy. It is no error, since a phase that trains
    something else may come first.
    """
    if parameters and all(p.grad is None for p in parameters):
        log.warning(
            "no parameter of %s has a gradient after the first backward pass, so nothing of it is trained: "
            "the loss comes from other parameters. Compute it with the model that the step is given, not "
            "with a copy or another one, and make the optimizer from that model's parameters",
            owner,
        )


def run_watched(
    run: RunStep, optimizer: Optimizer, scheduler: Any, step: Step, model: Any, batch: Any
) -> StepOutput:
    """Run the step on a batch of the first optimizer step, and check that it leaves ``fit`` its tasks.

    Gradients of a backward() in the step would be added to the returned loss's, and averaged by nobody. A
    scheduler that the step moves would be moved by ``fit`` too.
    """
    moved = getattr(scheduler, "last_epoch", None)
    parameters = parameters_of(optimizer)
    before = [_state(p.grad) for p in parameters]
    handle = optimizer.register_step_pre_hook(_refuse)
    try:
        output = run(step, model, batch)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        error.add_note(f"the batch that the step was given, on its device: {outline(batch)}")
        raise
    finally:
        handle.remove()
    after = [_state(p.grad) for p in parameters]
    if any(old is not None and new is None for old, new in zip(before, after, strict=True)):
        msg = (
            "the step has cleared the gradients of the batches before it, of which fit() makes one optimizer "
            "step with this loss; leave zero_grad() to fit()"
        )
        raise StepError(msg)
    if before != after:
        msg = (
            "the step has called backward() itself, and fit() adds the gradients of the loss that it returns "
            "to those; return the loss alone, or take a loop of your own: trainer.loop(...)"
        )
        raise StepError(msg)
    if getattr(scheduler, "last_epoch", None) != moved:
        msg = (
            f"the step has called step() of the scheduler, {type(scheduler).__name__}, which fit() does; "
            "leave it out of the step, or scheduler= out of fit()"
        )
        raise StepError(msg)
    return output


def outline(value: Any, depth: int = 3) -> str:
    """Return what a batch is made of: ``"list of 2 (Tensor(8, 3), Tensor(8,))"``."""
    kind = type(value).__name__
    if isinstance(value, Parts):
        return f"in {len(value)} parts, the first: {outline(value[0], depth)}"
    if isinstance(value, Tensor):
        return f"{kind}{tuple(value.shape)}"
    if not depth or not isinstance(value, Mapping | list | tuple):
        return kind
    if isinstance(value, Mapping):
        items = [f"{key!r}: {outline(item, depth - 1)}" for key, item in list(value.items())[:8]]
    else:
        items = [outline(item, depth - 1) for item in value[:8]]
    return f"{kind} of {len(value)} ({', '.join(items)}{', ...' * (len(value) > 8)})"


def _refuse(optimizer: Optimizer, *_: object) -> None:
    msg = (
        f"the step has called step() of the optimizer, {type(optimizer).__name__}, which fit() does after "
        "the backward pass; return the loss alone, or take a loop of your own: trainer.loop(...)"
    )
    raise StepError(msg)


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    # _version is private: torch has no public counter of a tensor's changes in place.
    if gradient is None:
        return None
    return (id(gradient), gradient._version)
