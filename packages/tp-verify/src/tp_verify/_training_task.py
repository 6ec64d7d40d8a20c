"""Training on one process, with a record of everything that is compared."""

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.compare import (
    BatchSelection,
    ComputedTypes,
    ForwardLines,
    LocalTensor,
    Recording,
    TensorPlace,
    WithoutDropout,
    copy_of,
    named_tensors,
    nudged,
)
from tp_core.errors import ModelError
from tp_core.random import capture_rng_state, seed_everything, seed_torch
from tp_core.tensors import is_dtensor

from tp_verify._dropout_masks import DropoutCall, DropoutRecording
from tp_verify._strategy import (
    MakeOptimizer,
    Step,
    Strategy,
    loss_and_weight,
    mapped,
    repeat_first_row,
    rows_of,
)

_WATCHED_SEEDS = 3  # whose masks are recorded; some hundred elements tell masks apart
_UNSAVED_SEED = 2**31 - 1  # of generators before a checkpoint is loaded; no checkpoint has their states


@dataclass
class StepRecord:
    """What one process has seen of one optimizer step, or of an evaluation. Orders are in time."""

    forward: dict[TensorPlace, LocalTensor] = field(default_factory=dict)
    backward: dict[tuple[TensorPlace, str], LocalTensor] = field(default_factory=dict)
    loss: float | None = None
    weight: float = 0.0
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    norm: float | None = None
    clipped: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class RunRecord:
    """What one process has seen of a training, and afterwards: ``draws`` are losses and weights by seed.

    Evaluations have the numbers of their batches. ``next_rates`` are the learning rates after one more step
    that follows the checkpoint. On one device ``idle_lines`` are the lines of the modules'
    own forward that did not run, and ``dtypes`` the types in which it computed. ``generators`` are the states
    of random numbers that a checkpoint could save. Of dropout there are the tensors that it drops from, the
    ``masks`` of the first seeds, and the modules whose masks the backward pass draws otherwise.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: dict[int, StepRecord] = field(default_factory=dict)
    generated: dict[str, Tensor] = field(default_factory=dict)
    draws: list[tuple[float, float]] = field(default_factory=list)
    shares: list[dict[str, BatchSelection]] = field(default_factory=list)
    idle_lines: tuple[str, ...] = ()
    dtypes: frozenset[torch.dtype] = frozenset()
    generators: dict[str, str] = field(default_factory=dict)
    next_rates: dict[str, float] = field(default_factory=dict)
    dropped_from: dict[DropoutCall, Tensor] = field(default_factory=dict)
    masks: list[dict[DropoutCall, Tensor]] = field(default_factory=list)
    redrawn: list[str] = field(default_factory=list)


class Loaded(NamedTuple):
    """What a process holds once it has loaded a checkpoint.

    Attributes:
        state: Weights, the optimizer's state and buffers.
        generators: The states of its random numbers.
        next_rates: The learning rates after one more step; empty where it makes none.
        makes: Whether its optimizer is the user's, with the scheduler that is hooked into it.
    """

    state: StepRecord
    generators: dict[str, str]
    next_rates: dict[str, float]
    makes: bool


class Followed(NamedTuple):
    """The weights before a step and the gradients of its update, as ranks had them, in whole tensors."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class TrainingTask:
    """What a process trains: the plain model's builder, whole batches, and how.

    Attributes:
        follow: The ranks' weights and gradients, for a reference that follows them.
        generate: What is generated afterwards.
        own: How many batches, the last ones, are not the user's.
        seeds: The number of seeds with which the first batch's loss is drawn afterwards.
        folder: Where a checkpoint is saved, or loaded; empty for none.
        continues: Whether one more step follows what is saved, and what is loaded.
        evaluates: Whether an evaluation follows the training.
        nudge: The type of one more rounding of what modules return, for a reference that shows how far
            roundings grow; ``None`` for none.
        nudge_seed: Which of the numbers it rounds.
    """

    build: Any
    batches: Sequence[Any]
    step: Step
    make_optimizer: MakeOptimizer
    micro: int
    max_norm: float | None
    dtype: torch.dtype | None
    follow: Sequence[Followed] = ()
    generate: Step | None = None
    own: int = 0
    seeds: int = 0
    folder: str = ""
    continues: bool = False
    evaluates: bool = True
    nudge: torch.dtype | None = None
    nudge_seed: int = 0


class OneDevice(Strategy):
    """The reference: one process with the whole batch."""

    name = "one device"

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    def share(self, batch: Any) -> Any:
        """Return the whole batch."""
        return batch

    def backward(self, model: nn.Module, step: Step, parts: Sequence[Any]) -> Tensor:
        """Run forward and backward once, on the whole batch."""
        (batch,) = parts
        loss, _ = loss_and_weight(step(model, batch), batch)
        if not loss.requires_grad:
            msg = (
                "the loss has no gradient: on one device, the step uses no trained parameter, or detaches it"
            )
            raise ModelError(msg)
        loss.backward()
        return loss.detach()

    def seed(self, number: int) -> None:
        """Seed this process, which is alone."""
        seed_torch(number)


def build_model(task: TrainingTask) -> nn.Module:
    """Build the plain model, from the seed that all processes use."""
    seed_torch(0)
    model: nn.Module = task.build()
    if not isinstance(model, nn.Module):
        msg = f"build has to return the plain model, a torch.nn.Module, and returned {type(model).__name__}"
        raise ModelError(msg)
    if task.dtype is None:
        return model
    return model.to(task.dtype)


def least_epsilon(dtype: torch.dtype) -> float:
    """Return the smallest root of a square that a type has.

    Adam divides by the root of squared gradients, and adds its epsilon: one of 1e-8 is 0 in float16, and
    gradients below this have squares of 0. Weights would be no numbers after the first step.
    """
    digits = torch.finfo(dtype)
    return math.sqrt(digits.smallest_normal * digits.eps)


def make_with_epsilon(make: MakeOptimizer, least: float, model: nn.Module) -> Optimizer:
    """Make an optimizer, and raise epsilons that are smaller than ``least``."""
    optimizer = make(model)
    for group in groups_below(optimizer, least):
        group["eps"] = least
    return optimizer


def groups_below(optimizer: Optimizer, least: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer whose epsilon is smaller."""
    return [group for group in optimizer.param_groups if group.get("eps", least) < least]


def cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return a batch with its floating-point tensors in ``dtype``."""
    if dtype is None:
        return batch
    return mapped(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def run_task(task: TrainingTask, strategy: Strategy, *, seed: int = 0) -> RunRecord:
    """Train as a strategy does, and return the record of this process."""
    record = RunRecord()
    model, optimizer = strategy.prepare(build_model(task), task.make_optimizer)
    record.initial = _whole(strategy, {n: p.detach() for n, p in model.named_parameters()})
    model.train()
    seed_torch(seed)
    lines = ForwardLines(model)
    computed = ComputedTypes()
    noting_lines: AbstractContextManager[Any] = nullcontext()
    watching: AbstractContextManager[Any] = nullcontext()
    if isinstance(strategy, OneDevice):
        noting_lines = lines
        watching = computed
    with noting_lines:
        for number, batch in enumerate(task.batches):
            record.shares.append(_selection(strategy, batch))
            followed = task.follow[number] if task.follow else None
            if followed is not None:
                _put(model, followed.weights, lambda parameter: parameter.data)
            seen = _one_step(task, strategy, model, optimizer, cast(batch, task.dtype), followed, watching)
            record.steps.append(seen)
        model.eval()
        if task.evaluates:
            _evaluate_batches(task, strategy, model, record, watching)
    record.idle_lines = lines.idle()
    record.dtypes = frozenset(computed.dtypes)
    share = strategy.share(cast(task.batches[0], task.dtype))
    if task.generate is not None:
        with torch.no_grad():
            record.generated = {n: copy_of(t) for n, t in named_tensors(task.generate(model, share))}
    if task.folder:
        _seed_generators(strategy)
        record.generators = _generators()
        strategy.save(model, optimizer, task.folder)
    if task.seeds:
        _record_draws(record, task, strategy, model)
    if task.continues:  # the last of all: it changes the weights
        record.next_rates = _next_rates(task, strategy, model, optimizer)
    strategy.close()
    return record


def _evaluate_batches(
    task: TrainingTask,
    strategy: Strategy,
    model: nn.Module,
    record: RunRecord,
    watching: AbstractContextManager[Any],
) -> None:
    """Record the losses of the first batch and of the first one that is not the user's.

    `verify` finds its name in the traceback of ranks that raise here.
    """
    numbers = [0]
    if task.own:
        numbers.append(len(task.batches) - task.own)
    for number in numbers:
        seen = StepRecord()
        batch = cast(task.batches[number], task.dtype)
        with _recorded(task, strategy, model, seen), watching, WithoutDropout(model):
            loss_and_its_weight = strategy.evaluate(model, task.step, strategy.share(batch))
        if loss_and_its_weight is not None:
            seen.loss, seen.weight = loss_and_its_weight
            record.evaluations[number] = seen


def draw_task(task: TrainingTask, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> RunRecord:
    """Return what one device draws with weights and buffers that ranks have at the end of a training."""
    record, model = RunRecord(), build_model(task)
    _put(model, weights, lambda parameter: parameter.data)
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    _record_draws(record, task, OneDevice(), model)
    return record


def load_task(task: TrainingTask, strategy: Strategy) -> Loaded:
    """Load the checkpoint into a new model, and return what it and the generators hold then."""
    made: list[Optimizer] = []

    def make(model: nn.Module) -> Optimizer:
        made.append(task.make_optimizer(model))
        return made[-1]

    model, optimizer = strategy.prepare(build_model(task), make)
    seed_everything(_UNSAVED_SEED)
    strategy.load(model, optimizer, task.folder)
    generators = _generators()
    seen = StepRecord()
    _record_state(seen, strategy, model, optimizer)
    rates = {}
    if task.continues:
        rates = _next_rates(task, strategy, model, optimizer)
    strategy.close()
    return Loaded(seen, generators, rates, makes=bool(made))


def _next_rates(
    task: TrainingTask, strategy: Strategy, model: nn.Module, optimizer: Optimizer
) -> dict[str, float]:
    """Train one more step, and return the learning rates of the one that would follow.

    A checkpoint of the optimizer has its rates. What the scheduler makes of them shows only after its step.
    """
    model.train()
    _one_step(task, strategy, model, optimizer, cast(task.batches[0], task.dtype), None, nullcontext())
    return _rates(strategy, model, optimizer)


def _seed_generators(strategy: Strategy) -> None:
    """Seed torch's generator as the strategy does, and Python's and numpy's by the seed that it took."""
    strategy.seed(0)
    seed = torch.initial_seed()
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _generators() -> dict[str, str]:
    """Return the states of Python's, numpy's and torch's generators."""
    states = capture_rng_state(())
    return {kind: str(states[kind]) for kind in ("python", "numpy", "torch") if kind in states}


def _record_draws(record: RunRecord, task: TrainingTask, strategy: Strategy, model: nn.Module) -> None:
    """Record the loss with dropout, and its weight, for each seed; all rows of the batch are equal."""
    model.train()
    batch = cast(task.batches[0], task.dtype)
    # Of rows that differ, so that it shows which ranks have the same activations.
    watching = DropoutRecording(model, strategy.plain_name)
    with WithoutDropout(model), watching:
        strategy.backward(model, task.step, [strategy.share(batch)])
    model.zero_grad()
    record.dropped_from = watching.inputs
    share = strategy.share(repeat_first_row(batch))
    for number in range(task.seeds):
        seen = StepRecord()
        strategy.seed(number)
        drawing = DropoutRecording(model, strategy.plain_name)
        with drawing if number < _WATCHED_SEEDS else nullcontext():
            loss = float(strategy.backward(model, _noting(task.step, seen), [share]))
        record.draws.append((loss, seen.weight))
        if number < _WATCHED_SEEDS:
            record.masks.append(drawing.masks)
            record.redrawn += drawing.redrawn()
        model.zero_grad()


def _put(model: nn.Module, values: dict[str, Tensor], place: Callable[[nn.Parameter], Tensor | None]) -> None:
    """Copy whole values into the parameters of a plain model, or into their gradients."""
    for name, parameter in model.named_parameters():
        into = place(parameter)
        if into is not None and name in values:
            into.copy_(values[name])


def _one_step(
    task: TrainingTask,
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    followed: Followed | None,
    watching: AbstractContextManager[Any],
) -> StepRecord:
    seen = StepRecord()
    share = strategy.share(batch)
    parts = [share]
    if task.micro > 1:
        parts = [rows_of(share, number, task.micro) for number in range(task.micro)]
    with _recorded(task, strategy, model, seen), watching, WithoutDropout(model):
        seen.loss = float(strategy.backward(model, _noting(task.step, seen), parts))
    seen.gradients = _whole(strategy, {n: strategy.gradient(p) for n, p in model.named_parameters()})
    if task.max_norm is not None:
        norm = strategy.clip(model, task.max_norm)
        if is_dtensor(norm):
            norm = norm.full_tensor()
        seen.norm = float(norm)
        seen.clipped = _whole(strategy, {n: strategy.gradient(p) for n, p in model.named_parameters()})
    if followed is not None:
        seen.before = followed.weights
        _put(model, followed.gradients, lambda parameter: parameter.grad)
    seen.rates = _rates(strategy, model, optimizer)
    strategy.update(model, optimizer)
    _record_state(seen, strategy, model, optimizer)
    return seen


@contextmanager
def _recorded(task: TrainingTask, strategy: Strategy, model: nn.Module, seen: StepRecord) -> Iterator[None]:
    """Record what modules return, and the gradients between them, but for single numbers, as a loss is."""
    recording = Recording(model, plain_name=strategy.plain_name, gradients=True)
    rounding = nullcontext() if task.nudge is None else nudged(model, task.nudge, seed=task.nudge_seed)
    with rounding, recording:
        yield
    seen.forward = {place: one for place, one in recording.outputs.items() if one.tensor.dim()}
    seen.backward = {place: one for place, one in recording.gradients.items() if one.tensor.dim()}


def _noting(step: Step, seen: StepRecord) -> Step:
    """Return a step that notes its loss's weight."""

    def noting(module: nn.Module, part: Any) -> Any:
        output = step(module, part)
        _, weight = loss_and_weight(output, part)
        if torch.is_grad_enabled():  # else it evaluates
            seen.weight += weight
        return output

    return noting


def _record_state(seen: StepRecord, strategy: Strategy, model: nn.Module, optimizer: Optimizer) -> None:
    seen.weights = _whole(strategy, {n: p.detach() for n, p in model.named_parameters()})
    seen.states = _states(strategy, model, optimizer)
    for name, buffer in model.named_buffers():
        plain = strategy.plain_name(name)
        if plain is not None:
            if is_dtensor(buffer):
                buffer = buffer.full_tensor()  # noqa: PLW2901 - the whole of it
            seen.buffers[plain] = copy_of(buffer)


def _whole(strategy: Strategy, tensors: dict[str, Any]) -> dict[str, Any]:
    wholes: dict[str, Any] = {}
    for name, tensor in tensors.items():
        plain = strategy.plain_name(name)
        if plain is not None:
            wholes[plain] = None
            if tensor is not None:
                wholes[plain] = copy_of(strategy.whole(plain, tensor))
    return wholes


def _rates(strategy: Strategy, model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Return the learning rate of each parameter, for the step that comes."""
    names = {id(p): strategy.plain_name(n) for n, p in model.named_parameters()}
    rates = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            plain = names.get(id(parameter))
            if plain is not None and "lr" in group:
                rates[plain] = float(group["lr"])
    return rates


def _states(strategy: Strategy, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by the parameter's name and their own: ``layer.weight:exp_avg``."""
    names = {id(p): strategy.plain_name(n) for n, p in model.named_parameters()}
    states = optimizer.state  # once: ZeRO's are gathered
    wholes = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            plain = names.get(id(parameter))
            for key, value in sorted(states.get(parameter, {}).items()):
                if plain is None or not isinstance(value, Tensor):
                    continue
                if value.dim() > 0 or value.shape == parameter.shape:  # and no count of steps
                    value = strategy.whole(plain, value)  # noqa: PLW2901 - the whole of it
                wholes[f"{plain}:{key}"] = copy_of(value)
    return wholes


def _selection(strategy: Strategy, batch: Any) -> dict[str, BatchSelection]:
    """Return which elements of each tensor this rank has."""
    shapes = {place: tuple(tensor.shape) for place, tensor in named_tensors(batch)}
    numbers = mapped(batch, lambda t: torch.arange(t.numel()).view(t.shape))
    try:
        mine = dict(named_tensors(strategy.share(numbers)))
    except Exception:  # noqa: BLE001 - a share that computes with values; what it selects stays unknown
        return {}
    selections = {}
    for place, local in mine.items():
        shape = shapes.get(place)
        if shape and len(shape) == local.dim() and local.numel():
            row = math.prod(shape[1:])
            rows = local
            places = None
            if local.dim() > 1:
                rows = local.flatten(1)[:, 0] // row
            if local.dim() == 2:
                places = local[0] % row
            elif local.dim() > 2:
                places = local[0].flatten(1)[:, 0] % row // math.prod(shape[2:])
            selections[place] = BatchSelection(shape, rows, places)
    return selections


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
