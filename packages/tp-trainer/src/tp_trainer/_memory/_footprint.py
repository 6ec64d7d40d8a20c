"""The memory of one training step, measured on fake tensors, which have no memory."""

import copy
import logging
import re
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import tree_leaves, tree_map
from tp_core.data import StepOutput
from tp_core.errors import ConfigError
from tp_core.internal import call_without_attention_dropout
from tp_core.jobs import Footprint, Precision, Recomputation
from tp_core.tensors import is_sharded

from tp_trainer._activations import recompute
from tp_trainer._memory._operators import OperatorLog
from tp_trainer._steps._step import LOWER, in_precision, loss_of

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
        operators: Where to log the operators; ``None`` for nowhere.

    Attributes:
        values: The current bytes of values.
        gradients: The current bytes of gradients.
        casts: The bytes of values that are weights in another type.
        highest_alone: The peak of values since :meth:`reset`, without gradients under computation.
        highest: The peak of values since :meth:`reset`.
        highest_with_gradients: The peak of both together since then.
        timeline: See :class:`tp_core.jobs.Footprint`.
    """

    def __init__(self, known: Iterable[Tensor], operators: OperatorLog | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self._operators = operators
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
        if self._operators is not None:
            self._operators.note(operator, args, kwargs or {}, outputs)
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
    operators: OperatorLog | None = None,
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
        operators: Where to log the operators of the step; ``None`` for nowhere.

    If the model cannot be copied, or the step needs values, the reason is in ``unknown``.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    found = Footprint(
        weights=nbytes_of([*model.parameters(), *model.buffers()], dtype),
        gradients=nbytes_of([p for p in model.parameters() if p.requires_grad], dtype),
        unknown="no batch and step are known",
    )
    stand_ins = StandIns(_usable(device), dtype=dtype)
    with torch.random.fork_rng(devices=[]), _attention_of(device):
        try:
            copied = stand_ins.of_model(model)
            recompute(copied, recomputation)
        except Exception as error:  # of the user's __deepcopy__, of locks, open files and other handles
            log.debug("a model could not be copied", exc_info=True)
            return replace(found, unknown=f"the model cannot be copied: {_short(error)}")
        trained = [p for p in copied.parameters() if p.requires_grad]
        logged = operators or OperatorLog()
        live = LiveBytes([*copied.parameters(), *copied.buffers()], logged)
        if batch is not None and step is not None:
            try:
                if any(map(is_sharded, model.parameters())):
                    _exchange_nothing()
                values = stand_ins.of_batch(batch)
                with stand_ins.mode:
                    found = _run_step(found, live, copied, values, step, precision, logged)
                found = replace(found, keys=logged.keys, attentions=logged.attentions)
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
                logged.phase = logged.update
                return _run_update(found, trained, using, logged)
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
    operators: OperatorLog,
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
            operators.phase = operators.backward
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
            lower = _run_step(found, live, copied, values, step, precision, OperatorLog())
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


def _run_update(
    found: Footprint, trained: list[nn.Parameter], optimizer: Optimizer, operators: OperatorLog
) -> Footprint:
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    before = list(_state_of(optimizer))
    live = LiveBytes([*owned, *(p.grad for p in owned if p.grad is not None), *before], operators)
    with live:
        optimizer.step()
        live.keep(_state_of(optimizer))
        live.reset()
        operators.update.clear()  # the first step makes the state
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
