"""Estimates of a job's memory, from one step on tensors without memory."""

import copy
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment, free_nbytes, tree_leaves, tree_map
from tp_core.compare import call_without_attention_dropout
from tp_core.data import StepOutput
from tp_core.discovery import Contribution, Selection
from tp_core.errors import ConfigError
from tp_core.jobs import Footprint, Precision, Recomputation
from tp_core.plugins import Backend, Job, Verdict
from tp_core.random import preserve_rng_state
from tp_core.tensors import copy_attributes, is_sharded

from tp_trainer._activations import recomputations, recompute
from tp_trainer._opening._agreement import agree_at_start
from tp_trainer._steps._step import LOWER, in_precision, loss_of

# -- The memory of one training step, measured on fake tensors, which have no memory ---------------


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_nbytes(text: str) -> int:
    """Return the bytes of "80GiB", "512 MiB" or "24e9".

    Raises:
        ConfigError: The text is something else.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, flags=re.IGNORECASE)
    if found is None or found[1].count(".") > 1 or not found[1].strip("."):
        msg = f"an amount of memory is written 80GiB, 512MiB or 24e9, got {text!r}"
        raise ConfigError(msg)
    size = _UNITS[found[2].upper()]
    if not found[3]:  # powers of ten
        size = 1000 ** list(_UNITS).index(found[2].upper())
    return int(float(found[1]) * size)


class StandIns:
    """Copies objects with fake tensors; all occurrences of a tensor become the same fake tensor.

    Args:
        device: The device of the fake tensors.
        dtype: The type of floating-point parameters and buffers; ``None`` for their own.
        buffers: Whether buffers have that type, too.

    Attributes:
        mode: The mode in which to compute with the copies.
    """

    def __init__(
        self, device: torch.device, *, dtype: torch.dtype | None = None, buffers: bool = True
    ) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._dtype = dtype
        self._buffers = buffers
        self._copies: dict[int, Any] = {}  # the memo of copy.deepcopy(): by the id of the original

    def of_model(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model, in training mode, without its hooks on parameters."""
        for tensor in [*model.parameters(), *model.buffers()]:
            is_parameter = isinstance(tensor, nn.Parameter)
            is_converted = tensor.is_floating_point() and (is_parameter or self._buffers)
            fake = self.of_tensor(tensor, self._dtype if is_converted else None)
            self._copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            copy_attributes(tensor, self._copies[id(tensor)])
        return copy.deepcopy(model, self._copies).train()

    def of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return a copy of an optimizer over the parameters of a copied model.

        The copy has no hooks, and not the step() that a scheduler has wrapped: its counter belongs to the
        original.
        """
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._copies[id(value)] = self.of_tensor(value) if value.dim() else self._count(value)
        new: Optimizer = object.__new__(type(optimizer))
        left_out = {name for name in vars(optimizer) if name == "step" or "_hooks" in name}
        kept = {name: value for name, value in vars(optimizer).items() if name not in left_out}
        vars(new).update(copy.deepcopy(kept, self._copies))
        vars(new).update({name: type(vars(optimizer)[name])() for name in left_out if name != "step"})
        return new

    def of_batch(self, batch: Any) -> Any:
        """Return a copy of nested values."""
        return tree_map(lambda leaf: self.of_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)

    def _count(self, number: Tensor) -> Tensor:
        """Return a fake tensor with a known value: optimizers read their number of steps."""
        value = 1.0 if number.device.type == "meta" else number.item()
        with self.mode:
            return torch.tensor(value, dtype=number.dtype)

    def of_tensor(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor of the same shape and strides, on the device."""
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=self._device
            )


# -- Living bytes of a computation on fake tensors ------------------------------------------------
# torch's fake tensors have shapes, types and devices without values. A dispatch mode, below autograd, sees
# the results of every operator. Weak references to their storages show when neither a variable nor a tensor
# that autograd has saved refers to them any longer.


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages by kind, and their peaks.

    A storage is "known" if it existed before (weights, optimizer state). It is a "gradient" after
    :meth:`note_gradient`, and otherwise a value of the computation.

    Args:
        known: Tensors that existed before, and are not counted.

    Attributes:
        values: The current bytes of values.
        gradients: The current bytes of gradients.
        casts: The bytes of values that are weights in another type.
        highest_alone: The peak of values since :meth:`reset`, without gradients under computation.
        highest: The peak of values since :meth:`reset`.
        highest_with_gradients: The peak of both together since then.
        timeline: See :class:`tp_core.jobs.Footprint`.
        is_forward: Whether attentions are counted: those that the backward pass computes again are not.
        keys: The bytes of keys and values of all calls of torch's attention.
        attentions: The number of these calls.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.is_forward = True
        self.keys = self.attentions = 0
        self.values = self.gradients = self.casts = 0
        self.highest = self.highest_with_gradients = self.highest_alone = self._making = 0
        self.timeline: dict[str, list[int]] = {}
        self._peak = self._peak_making = 0  # since the last gradient
        self.gradient_shapes: set[tuple[int, ...]] = set()  # of gradients under computation
        self._sizes: dict[int, tuple[int, str]] = {}  # by the address of a living storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._known = {_address(tensor) for tensor in known}

    def __torch_dispatch__(
        self, operator: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count the storages of its outputs."""
        outputs = operator(*args, **(kwargs or {}))
        if self.is_forward and "scaled_dot_product" in str(operator):
            self.attentions += 1
            self.keys += sum(t.numel() * t.element_size() for t in args[1:3])
        is_cast = operator is torch.ops.aten._to_copy.default and _address(args[0]) in self._known
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor):
                self._note(output, is_cast=is_cast)
        return outputs

    def note_gradient(self, gradient: Tensor | None, name: str) -> None:
        """Count the storage of a parameter's gradient as one from now on."""
        if gradient is None:
            return
        address = _address(gradient)
        size, kind = self._sizes.get(address, (0, "gradient"))
        if kind != "gradient":
            self._add(kind, -size)
            self._add("gradient", size)
            self._sizes[address] = size, "gradient"
        left = self.values - self._making
        self.timeline[name] = [self._peak, self._peak_making, left]
        self._peak, self._peak_making = left, 0

    def keep(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors as known from now on, for an optimizer's state; return their bytes."""
        total = 0
        for tensor in tensors:
            address = _address(tensor)
            size, kind = self._sizes.pop(address, (0, ""))
            if kind:
                self._references.pop(address)
                self._add(kind, -size)
                self._known.add(address)
                total += size
        return total

    def reset(self) -> None:
        """Reset the peaks."""
        self.highest, self.highest_with_gradients = self.values, self.values + self.gradients

    def _note(self, tensor: Tensor, *, is_cast: bool) -> None:
        # _cdata is private: the data_ptr() of fake storages does not distinguish them.
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known or address in self._sizes:
            return
        kind = "cast" if is_cast else "value"
        if tuple(sorted(tensor.shape)) in self.gradient_shapes:
            kind = "making"
        self._sizes[address] = storage.nbytes(), kind
        self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        self._add(kind, storage.nbytes())

    def _forget(self, address: int) -> None:
        size, kind = self._sizes.pop(address, (0, ""))
        self._references.pop(address, None)
        if kind:
            self._add(kind, -size)

    def _add(self, kind: str, nbytes: int) -> None:
        if kind == "gradient":
            self.gradients += nbytes
        else:
            self.values += nbytes
            self.casts += nbytes if kind == "cast" else 0
            self._making += nbytes if kind == "making" else 0
        self.highest = max(self.highest, self.values)
        alone = self.values - self._making
        self.highest_alone, self._peak = max(self.highest_alone, alone), max(self._peak, alone)
        if self._making:
            self._peak_making = max(self._peak_making, alone)
        self.highest_with_gradients = max(self.highest_with_gradients, self.values + self.gradients)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# -- The memory of one training step --------------------------------------------------------------


log = logging.getLogger("tp_trainer")


def measure_footprint(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    step: Callable[[Any, Any], StepOutput] | None = None,
    *,
    precision: Precision = "fp32",
    device: torch.device | None = None,
    recomputation: Recomputation | None = None,
) -> Footprint:
    """Return the memory that training a model takes, by one step on copies; the arguments do not change.

    Args:
        model: The plain model; it may be on the meta device.
        optimizer: Its optimizer, if known.
        batch: One device's share of a batch, if known.
        step: As for ``fit``; without it or the batch, activations are unknown.
        precision: As for the trainer.
        device: The device of the training; the copies are on the CPU if torch is not built for it.
        recomputation: What the backward pass computes again.

    If the model cannot be copied, or the step needs values, the reason is in ``unknown``.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    found = Footprint(
        weights=nbytes_of([*model.parameters(), *model.buffers()], dtype),
        gradients=nbytes_of([p for p in model.parameters() if p.requires_grad], dtype),
        unknown="no batch and step are known",
    )
    stand_ins = StandIns(_usable(device), dtype=dtype)
    with preserve_rng_state(), _attention_of(device):
        try:
            copied = stand_ins.of_model(model)
            recompute(copied, recomputation)
        except Exception as error:  # of the user's __deepcopy__, of locks, open files and other handles
            log.debug("a model could not be copied", exc_info=True)
            return replace(found, unknown=f"the model cannot be copied: {_short(error)}")
        trained = [p for p in copied.parameters() if p.requires_grad]
        live = LiveBytes([*copied.parameters(), *copied.buffers()])
        if batch is not None and step is not None:
            try:
                if any(map(is_sharded, model.parameters())):
                    _exchange_nothing()
                values = stand_ins.of_batch(batch)
                with stand_ins.mode:
                    found = _run_step(found, live, copied, values, step, precision)
                if precision in LOWER:
                    found = _with_lower(found, model, batch, step, precision, device, recomputation)
            except Exception as error:
                log.debug("a step could not be run on tensors without memory", exc_info=True)
                found = replace(found, unknown=f"the step needs values: {_short(error)}")
        if optimizer is None:
            return found
        try:
            using = stand_ins.of_optimizer(optimizer)
            with stand_ins.mode:
                return _run_update(found, trained, using)
        except Exception as error:
            log.debug("an optimizer could not be run on tensors without memory", exc_info=True)
            return replace(found, unknown=f"{type(optimizer).__name__} needs values: {_short(error)}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"


def _exchange_nothing() -> None:
    """Register collectives for fake tensors that do nothing; collectives of real tensors do not change.

    The import registers them; torch has them, privately, for its own estimates. Without them, the step of a
    sharded model would wait for other ranks.
    """
    from torch.distributed._tools.fake_collectives import non_functional_collectives  # noqa: F401


def _run_step(
    found: Footprint,
    live: LiveBytes,
    model: nn.Module,
    batch: Any,
    step: Callable[[Any, Any], StepOutput],
    precision: Precision,
) -> Footprint:
    kept: dict[str, int] = {}
    passed: dict[str, int] = {}
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: live.note_gradient(p.grad, name)
                )
                stack.callback(hook.remove)
        for name, module in model.named_modules():
            if name and next(module.children(), None) is not None:
                stack.callback(_watch(module, name, live, kept, passed).remove)
        device = next(iter(model.parameters())).device
        run = in_precision(lambda s, m, b: s(m, b), precision, device)
        batch_nbytes = nbytes_of(_tensors_in(batch))
        with live:
            loss = loss_of(run(step, model, batch), training=True)
            casts = live.casts
            live.gradient_shapes = {
                tuple(sorted(p.shape)) for p in model.parameters() if p.requires_grad and p.dim() > 1
            }
            live.is_forward = False
            loss.backward()
            del loss
    return replace(
        found,
        activations=live.highest,
        alone=live.highest_alone,
        with_gradients=live.highest_with_gradients,
        casts=casts,
        batch=batch_nbytes,
        kept=kept,
        passed=passed,
        timeline=live.timeline,
        keys=live.keys,
        attentions=live.attentions,
        unknown="",
    )


def _with_lower(
    found: Footprint,
    model: nn.Module,
    batch: Any,
    step: Callable[[Any, Any], StepOutput],
    precision: Precision,
    device: torch.device | None,
    recomputation: Recomputation | None,
) -> Footprint:
    """Return the footprint with what backends need that gather parameters in the lower dtype."""
    stand_ins = StandIns(_usable(device), dtype=LOWER[precision], buffers=False)
    copied = stand_ins.of_model(model)
    recompute(copied, recomputation)
    live = LiveBytes([*copied.parameters(), *copied.buffers()])
    values = stand_ins.of_batch(batch)
    try:
        with stand_ins.mode:
            lower = _run_step(found, live, copied, values, step, precision)
    except Exception:  # a step may ask for the dtype of a parameter
        log.debug("a step could not be run with parameters in the lower dtype", exc_info=True)
        return replace(found, alone=max(0, found.alone - found.casts))
    own = {name: getattr(lower, name) for name in ("alone", "kept", "passed", "timeline")}
    return replace(found, **own)


def _watch(
    module: nn.Module, name: str, live: LiveBytes, kept: dict[str, int], passed: dict[str, int]
) -> Any:
    """Record the bytes that a module's forward passes keep, and the bytes of their outputs."""
    began: list[int] = []
    before = module.register_forward_pre_hook(lambda *_: began.append(live.values - live.casts))

    def note(_: nn.Module, __: Any, output: Any) -> None:
        kept[name] = kept.get(name, 0) + max(0, live.values - live.casts - began.pop())
        passed[name] = passed.get(name, 0) + nbytes_of(_tensors_in(output))

    after = module.register_forward_hook(note)

    class _Both:
        def remove(self) -> None:
            before.remove()
            after.remove()

    return _Both()


def _run_update(found: Footprint, trained: list[nn.Parameter], optimizer: Optimizer) -> Footprint:
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    before = list(_state_of(optimizer))
    live = LiveBytes([*owned, *(p.grad for p in owned if p.grad is not None), *before])
    with live:
        optimizer.step()
        live.keep(_state_of(optimizer))
        live.reset()
        optimizer.step()
    return replace(found, optimizer=nbytes_of(list(_state_of(optimizer))), update=live.highest)


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return _tensors_in([list(state.values()) for state in optimizer.state.values()])


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def nbytes_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Return the bytes of tensors, with a dtype as if those of floats had it; repeated ones count once."""
    return sum(
        t.numel() * (dtype.itemsize if dtype and t.is_floating_point() else t.element_size())
        for t in {id(t): t for t in tensors}.values()
    )


class _FusedAttention(TorchFunctionMode):
    """Leaves out the dropout of attention weights.

    With it torch has one kernel on CUDA, and on the CPU a product, a softmax and another product, with
    (queries, keys) matrices that a CUDA device would never have.
    """

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_without_attention_dropout(function, args, kwargs or {})


def _attention_of(device: torch.device | None) -> AbstractContextManager[object]:
    """Let stand-ins, which are on the CPU where a device is missing, attend by the kernels of that device."""
    is_elsewhere = device is not None and device.type != _usable(device).type
    return _FusedAttention() if is_elsewhere else nullcontext()


def _usable(device: torch.device | None) -> torch.device:
    if device is None or device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device if accelerator is not None and accelerator.type == device.type else torch.device("cpu")


# -- The memory that a job needs under each installed backend, as a table; the devices need not exist


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The memory of a job per device, under each installed backend; ``str()`` returns a table.

    Attributes:
        verdicts: The backends' verdicts by their names, the best first; ``verdict.memory`` has the numbers.
        footprint: The memory of a device with the whole model.
        devices: The number of devices.
        free_nbytes: The free bytes of each device; ``None`` if unknown.
        recomputation: What the backward pass computes again, where the trainer chooses it.
    """

    verdicts: Mapping[str, Verdict]
    footprint: Footprint
    devices: int
    free_nbytes: int | None
    recomputation: Recomputation | None = None

    @property
    def best(self) -> str | None:
        """The backend that "auto" would choose; ``None`` if none fits."""
        return next((name for name, verdict in self.verdicts.items() if verdict.is_fit), None)

    def __str__(self) -> str:
        head = f"training on {self.devices} device{'s' * (self.devices != 1)}, each of them"
        if self.recomputation not in (None, "nothing"):
            head += f", computing {self.recomputation} again in backward"
        width = max(map(len, self.verdicts), default=0)
        lines = [head]
        for name, verdict in self.verdicts.items():
            mark = "*" if name == self.best else "-"
            said = verdict.reason if verdict.memory is None else str(verdict.memory)
            more = f"; {verdict.remedy}" if not verdict.is_fit and verdict.remedy else ""
            lines.append(f"  {mark}  {name:{width}}  {'fits ' if verdict.is_fit else 'unfit'}  {said}{more}")
        if self.footprint.unknown:
            lines.append(f"not known: {self.footprint.unknown}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values for JSON."""
        return {
            "devices": self.devices,
            "free_bytes": self.free_nbytes,
            "recomputation": self.recomputation,
            "best": self.best,
            "unknown": self.footprint.unknown,
            "backends": {
                name: {
                    "fits": verdict.is_fit,
                    "reason": verdict.reason,
                    "remedy": verdict.remedy,
                    "memory": None if verdict.memory is None else verdict.memory.to_dict(),
                }
                for name, verdict in self.verdicts.items()
            },
        }


def table_of(
    job: Job, backends: Iterable[Contribution[Backend[Any]]], *, devices: int, kind: str
) -> MemoryTable:
    """Return the table of a job with a footprint.

    Args:
        job: The job, with its model, its footprint and the free bytes of each device.
        backends: The installed backends.
        devices: The number of devices, each with a process, or all in one process.
        kind: The type of the devices.
    """
    names = tuple(torch.device(kind) if kind == "cpu" else torch.device(kind, i) for i in range(devices))
    processes = LaunchEnvironment(world_size=devices, local_world_size=devices)
    ways = [
        replace(job, environment=processes, devices=names[:1]),
        replace(job, environment=LaunchEnvironment(), devices=names),
    ]
    verdicts = {c.item.name: _best([_assess(c.item, way) for way in ways]) for c in backends}
    ordered = sorted(
        ((name, verdict) for name, (verdict, _) in verdicts.items()),
        key=lambda item: (-_rank(item[1]) - verdicts[item[0]][1], item[0]),
    )
    footprint = job.footprint or Footprint(weights=0, gradients=0)
    return MemoryTable(dict(ordered), footprint, devices, job.free_nbytes, job.recomputation)


def resized(batch: Any, samples: int) -> Any:
    """Return a batch with another number of samples: its first ones, repeated if needed."""
    rows = row_count_of(batch)
    if rows is None:
        return batch

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        return leaf[torch.arange(samples, device=leaf.device) % rows]

    return tree_map(resize, batch)


def row_count_of(batch: Any) -> int | None:
    """Return the number of samples in a batch: the rows of its first tensor; ``None`` without a tensor."""
    return next(
        (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None
    )


def _assess(backend: Backend[Any], job: Job) -> Verdict:
    try:
        verdict = backend.assess(job)
        need = backend.estimate_memory(job) if verdict.is_fit else None
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Verdict.unfit(f"its assessment raised {type(error).__name__}: {error}")
    return verdict if need is None else verdict.with_memory(need)


def _best(verdicts: list[Verdict]) -> tuple[Verdict, float]:
    """Return the better verdict of the two ways, and a bonus: a process per device is faster."""
    by_process, in_one = verdicts
    if _rank(by_process) >= _rank(in_one):
        return by_process, 1000.0 if by_process.is_fit else 0.0
    return in_one, 0.0


def _rank(verdict: Verdict) -> float:
    if verdict.score is not None:
        return verdict.score
    return -1.0 if verdict.lacks_memory else -2.0


# -- The memory of a job, before the choice of a backend ------------------------------------------


LEAST_PART = 0.05
"""The part of the free memory for weights, gradients and optimizer state, below which nothing is measured."""

RESERVED = {"cpu": 128 * 2**20}
RESERVED_ELSEWHERE = 512 * 2**20
"""The bytes of a device that are not for tensors: libraries load code and take workspaces at first use."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """The known parts of a job's steps.

    Attributes:
        optimizer: The optimizer, if known.
        loader: The loader of the whole job's batches, if known.
        step: The step, if known.
    """

    optimizer: Optimizer | None = None
    loader: Any = None
    step: Callable[[Any, Any], Any] | None = None


def add_memory(job: Job, work: StepParts) -> Iterator[Job]:
    """Yield the job with its footprint and the free memory, then with more and more recomputation.

    Without the latter, a job that needs little of the free memory is unchanged. Rank 0 measures for all
    ranks: they must choose the same backend.

    Raises:
        DisagreementError: The ranks' models differ in size.
        RankFailedError: Ranks did not arrive in time.

    Collectives: none; for a large model an exchange through the launcher's store, each time.
    """
    if job.recomputation is None or job.model is None:
        yield _with_memory(job, work)
        return
    for what in recomputations(job.model):
        found = _with_memory(replace(job, recomputation=what), work)
        if found.footprint is None or found.footprint.activations is None:
            if job.environment.is_main:
                why = "the free memory is not known" if found.footprint is None else found.footprint.unknown
                log.warning(
                    "activation_checkpointing='auto' has nothing to go by, and changes nothing: %s; "
                    "checkpoint_activations(model) does not need to know",
                    why,
                )
            yield replace(found, recomputation=None)
            return
        yield found


def _with_memory(job: Job, work: StepParts) -> Job:
    traits, model = job.traits, job.model
    if traits is None or model is None:
        return job

    def decide(everyones: list[int | None]) -> dict[str, Any]:
        known = [free for free in everyones if free is not None]
        free = min(known, default=None)
        is_small = job.recomputation is None and 4 * traits.nbytes < LEAST_PART * (free or 0)
        if free is None or is_small:
            return {"footprint": None, "free": None}
        return {"footprint": _measure(model, job, work).to_dict(), "free": free}

    found = agree_at_start(
        job.environment,
        {"bytes of the model": traits.nbytes},
        message=_free(job, model, work.optimizer),
        decide=decide,
    )
    if found["footprint"] is None:
        return job
    return replace(job, footprint=Footprint(**found["footprint"]), free_nbytes=found["free"])


def estimate_job(
    job: Job,
    work: StepParts,
    model: nn.Module,
    batch: Any,
    backends: Iterable[Contribution[Backend[Any]]],
    *,
    devices: int | None,
    memory: int | str | None,
) -> MemoryTable:
    """Return the table of a job; see :meth:`tp_trainer.Trainer.estimate`."""
    count = devices or job.environment.world_size * len(job.devices)
    job = replace(job, model=model)
    free = parse_nbytes(memory) if isinstance(memory, str) else memory
    if free is None:
        free = _free(job, model, work.optimizer)
    rows = row_count_of(batch)
    share = batch if rows is None else resized(batch, -(-rows // count))
    backends = list(backends)
    for what in [None] if job.recomputation is None else recomputations(model):
        job = replace(job, recomputation=what)
        footprint = measure_footprint(
            model,
            work.optimizer,
            share,
            work.step,
            precision=job.precision,
            device=job.devices[0],
            recomputation=what,
        )
        footprint = replace(footprint, part=_part(rows, count))
        job = replace(job, footprint=footprint, free_nbytes=free)
        table = table_of(job, backends, devices=count, kind=job.devices[0].type)
        if table.best is not None or footprint.activations is None:
            break
    return table


def _free(job: Job, model: nn.Module, optimizer: Optimizer | None) -> int | None:
    """Return the free bytes of each device, those that the model occupies already included."""
    device, devices = job.devices[0], len(job.devices)
    free = free_nbytes(device, processes=job.environment.local_world_size * devices)
    if free is None:
        return None
    states = [] if optimizer is None else tree_leaves([dict(state) for state in optimizer.state.values()])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {id(t): t for t in [*model.parameters(), *model.buffers(), *gradients, *states]}
    there = [t for t in held.values() if isinstance(t, Tensor) and t.device.type == device.type]
    free = max(0, free - RESERVED.get(device.type, RESERVED_ELSEWHERE))
    return free + sum(t.numel() * t.element_size() for t in there)


def _measure(model: nn.Module, job: Job, work: StepParts) -> Footprint:
    traits = job.traits
    # No step for DTensors: it makes collectives, and only rank 0 is here.
    batch = None if traits is not None and traits.has_dtensors else _one_share(work.loader, job)
    found = measure_footprint(
        model,
        work.optimizer,
        batch,
        work.step,
        precision=job.precision,
        device=job.devices[0],
        recomputation=job.recomputation,
    )
    return replace(found, part=_part(_batch_size(work.loader), _device_count(job)))


def _part(samples: int | None, devices: int) -> float:
    """Return the share of a device, divided by the whole samples that it gets at most."""
    return samples / devices / -(-samples // devices) if samples else 1.0


def _device_count(job: Job) -> int:
    return job.environment.world_size * len(job.devices)


def _batch_size(loader: Any) -> int | None:
    """Return the number of samples in a loader's batches, if it is known."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _one_share(loader: Any, job: Job) -> Any:
    """Return one device's share of a batch, from the first samples; ``None`` if it cannot be made.

    The random generators are restored.
    """
    size = _batch_size(loader)
    if size is None:
        return None
    share = -(-size // _device_count(job))
    try:
        with preserve_rng_state():
            return loader.collate_fn([loader.dataset[i] for i in range(share)])
    except Exception:  # noqa: BLE001 - any error of the user's dataset: training will raise it again
        return None


# -- Notes on out-of-memory errors ----------------------------------------------------------------


_HEAD = "Memory has run out: "


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__
    return False


def explain_out_of_memory(error: BaseException, selection: Callable[[], Selection]) -> None:
    """Add a note to an out-of-memory error: the memory of each backend, and remedies. Ignore other errors.

    Args:
        error: An error of training.
        selection: Returns the selection of the backend, with the memory of each.
    """
    is_explained = any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ()))
    if not is_explained and is_out_of_memory(error):
        error.add_note(_advice(selection()))


def _advice(selection: Selection) -> str:
    need = selection.chosen.verdict.memory
    remedy = (
        "less is needed with a smaller batch and accumulate=, precision='bf16-mixed', or more devices"
        if need is None
        else need.remedy
    )
    more = "" if need else "\ntrainer.estimate(model, optimizer, batch, step) shows what each backend needs"
    return f"{_HEAD}{remedy}.\n{selection}{more}"
