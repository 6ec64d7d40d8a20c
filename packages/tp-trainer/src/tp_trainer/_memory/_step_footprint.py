"""The memory of one training step, measured on fake tensors, which have no memory."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from tp_core.compare import call_without_attention_dropout
from tp_core.data import StepOutput
from tp_core.jobs import Footprint, Precision, Recomputation
from tp_core.output import get_logger
from tp_core.random import preserve_rng_state
from tp_core.tensors import is_sharded

from tp_trainer._activations import recompute
from tp_trainer._memory._fake_tensors import LiveBytes, StandIns, block_of, nbytes_of, tensors_in
from tp_trainer._steps._step import LOWER, in_precision, loss_of

log = get_logger("tp_trainer")


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
    block = block_of(device)
    footprint = Footprint(
        weights=nbytes_of([*model.parameters(), *model.buffers()], dtype, block=block),
        gradients=nbytes_of([p for p in model.parameters() if p.requires_grad], dtype, block=block),
        unknown="no batch and step are known",
    )
    stand_ins = StandIns(_usable(device), dtype=dtype)
    attending = _FusedAttention()
    is_elsewhere = device is not None and device.type != _usable(device).type
    with preserve_rng_state(), attending if is_elsewhere else nullcontext():
        try:
            copied = stand_ins.of_model(model)
            recompute(copied, recomputation)
        except Exception as error:  # of the user's __deepcopy__, of locks, open files and other handles
            log.debug("a model could not be copied", exc_info=True)
            return replace(footprint, unknown=f"the model cannot be copied: {_short(error)}")
        trained = [p for p in copied.parameters() if p.requires_grad]
        live = LiveBytes([*copied.parameters(), *copied.buffers()], block=block)
        if batch is not None and step is not None:
            try:
                if any(map(is_sharded, model.parameters())):
                    _exchange_nothing()
                values = stand_ins.of_batch(batch)
                with stand_ins.mode:
                    footprint = _run_step(footprint, live, copied, values, step, precision)
                if footprint.attention and attending.drops:
                    footprint = replace(footprint, attention={**footprint.attention, "dropout": 1})
                if precision in LOWER:
                    footprint = _with_lower(footprint, model, batch, step, precision, device, recomputation)
            except Exception as error:
                log.debug("a step could not be run on tensors without memory", exc_info=True)
                footprint = replace(footprint, unknown=f"the step needs values: {_short(error)}")
        if optimizer is None:
            return footprint
        try:
            using = stand_ins.of_optimizer(optimizer)
            _choose_kernels(using, device)
            with stand_ins.mode:
                return _run_update(footprint, trained, using, block)
        except Exception as error:
            log.debug("an optimizer could not be run on tensors without memory", exc_info=True)
            return replace(footprint, unknown=f"{type(optimizer).__name__} needs values: {_short(error)}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.120}"


def _exchange_nothing() -> None:
    """Register collectives for fake tensors that do nothing; collectives of real tensors do not change.

    The import registers them; torch has them, privately, for its own estimates. Without them, the step of a
    sharded model would wait for other ranks.
    """
    from torch.distributed._tools.fake_collectives import non_functional_collectives  # noqa: F401


def _run_step(
    footprint: Footprint,
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
            if name:
                stack.callback(_mark(module, name, live).remove)
            if name and next(module.children(), None) is not None:
                stack.callback(_watch(module, name, live, kept, passed).remove)
        device = next(iter(model.parameters())).device
        run = in_precision(lambda s, m, b: s(m, b), precision, device)
        batch_nbytes = nbytes_of(tensors_in(batch), block=live.block)
        for number, tensor in enumerate(tensors_in(batch)):
            live.note("batch", -number, nbytes_of([tensor], block=live.block))
        with live:
            loss = loss_of(run(step, model, batch), training=True)
            casts = live.casts
            live.gradient_shapes = {
                tuple(sorted(p.shape)) for p in model.parameters() if p.requires_grad and p.dim() > 1
            }
            live.is_forward = False
            live.note("backward")
            loss.backward()
            del loss
    return replace(
        footprint,
        activations=live.highest,
        alone=live.highest_alone,
        with_gradients=live.highest_with_gradients,
        casts=casts,
        batch=batch_nbytes,
        kept=kept,
        passed=passed,
        timeline=live.timeline,
        trace=live.events,
        keys=live.keys,
        attentions=live.attentions,
        attention=live.attention,
        unknown="",
    )


def _with_lower(
    footprint: Footprint,
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
    live = LiveBytes([*copied.parameters(), *copied.buffers()], block=block_of(device))
    values = stand_ins.of_batch(batch)
    try:
        with stand_ins.mode:
            lower = _run_step(footprint, live, copied, values, step, precision)
    except Exception:  # a step may ask for the dtype of a parameter
        log.debug("a step could not be run with parameters in the lower dtype", exc_info=True)
        return replace(footprint, alone=max(0, footprint.alone - footprint.casts))
    own = {name: getattr(lower, name) for name in ("alone", "kept", "passed", "timeline")}
    return replace(footprint, **own, lower_trace=lower.trace)


def _mark(module: nn.Module, name: str, live: LiveBytes) -> "_Hooks":
    """Note in the trace where the forward pass of a module begins and ends."""
    before = module.register_forward_pre_hook(lambda *_: live.note("begin", name=name))
    after = module.register_forward_hook(lambda *_: live.note("end", name=name))
    return _Hooks((before, after))


def _watch(
    module: nn.Module, name: str, live: LiveBytes, kept: dict[str, int], passed: dict[str, int]
) -> "_Hooks":
    """Record the bytes that a module's forward passes keep, and the bytes of their outputs."""
    began: list[int] = []
    before = module.register_forward_pre_hook(lambda *_: began.append(live.values - live.casts))

    def note(_: nn.Module, __: Any, output: Any) -> None:
        kept[name] = kept.get(name, 0) + max(0, live.values - live.casts - began.pop())
        passed[name] = passed.get(name, 0) + nbytes_of(tensors_in(output), block=live.block)

    after = module.register_forward_hook(note)

    return _Hooks((before, after))


class _Hooks:
    """Hooks that are removed together."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _choose_kernels(optimizer: Optimizer, device: torch.device | None) -> None:
    """Let a copied optimizer compute with all parameters at once where torch does so by default.

    torch asks for the class of the parameters, too, and fake ones have another. The values of one operation
    on all of them are as large as the model.
    """
    # Private, and what torch's own optimizers ask.
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    if device is None or device.type not in _get_foreach_kernels_supported_devices():
        return
    for group in optimizer.param_groups:
        is_default = "foreach" in group and group["foreach"] is None and not group.get("fused")
        is_plain = not group.get("differentiable") and not isinstance(group.get("lr"), Tensor)
        if is_default and (is_plain or group.get("capturable")):
            group["foreach"] = True


def _run_update(
    footprint: Footprint, trained: list[nn.Parameter], optimizer: Optimizer, block: int
) -> Footprint:
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    before = list(_state_of(optimizer))
    live = LiveBytes([*owned, *(p.grad for p in owned if p.grad is not None), *before], block=block)
    with live:
        optimizer.step()
        live.keep(_state_of(optimizer))
        live.reset()
        live.note("again")
        optimizer.step()
    states = _state_of(optimizer)
    # Numbers of steps, which torch leaves with the host.
    counts = [state for state in states if state.device.type == "cpu" and not state.dim()]
    others = [state for state in states if state.device.type != "cpu" or state.dim()]
    # At the end of an epoch, and to clip gradients: the norm of each tensor, then of all of them.
    norms = block * (len(owned) + 2)
    return replace(
        footprint,
        optimizer=nbytes_of(counts) + nbytes_of(others, block=block),
        update=max(live.highest, norms),
        update_trace=live.events,
    )


def _state_of(optimizer: Optimizer) -> list[Tensor]:
    return tensors_in([list(state.values()) for state in optimizer.state.values()])


class _FusedAttention(TorchFunctionMode):
    """Leaves out the dropout of attention weights, for stand-ins on the CPU of devices that are missing here.

    With it torch has one kernel on CUDA, and on the CPU a product, a softmax and another product, with
    (queries, keys) matrices that a CUDA device would never have.

    Attributes:
        drops: Whether there was any.
    """

    drops = False

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            self.drops |= bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
        elif function is nn.functional.multi_head_attention_forward and kwargs.get("training", True):
            self.drops |= bool(args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0))
        return call_without_attention_dropout(function, args, kwargs)


def _usable(device: torch.device | None) -> torch.device:
    if device is None or device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == device.type:
        return device
    return torch.device("cpu")
