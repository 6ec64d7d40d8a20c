"""What one training step takes, from a run of it on stand-ins."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core import tree_leaves
from tp_core.plugins import Footprint, Precision, StepOutput, is_sharded

from tp_trainer._memory._live_bytes import LiveBytes
from tp_trainer._memory._stand_ins import StandIns
from tp_trainer._steps._loss import loss_of
from tp_trainer._steps._precision import in_precision

__all__ = ["measure_footprint", "nbytes_of"]

log = logging.getLogger("tp_trainer")


def measure_footprint(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    step: Callable[[Any, Any], StepOutput] | None = None,
    *,
    precision: Precision = "fp32",
    device: torch.device | None = None,
) -> Footprint:
    """Return what training a model takes, by one step on stand-ins; nothing that was given is touched.

    Args:
        model: The plain model; it may be on the meta device.
        optimizer: Its optimizer, if known.
        batch: One device's share of a batch, if known.
        step: As for ``fit``; where it or the batch is missing, activations are unknown.
        precision: As of the trainer.
        device: Where it would run; stand-ins are on the CPU where torch is not built for that.

    What cannot be found out, as the step needs values, is said in ``unknown``.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    stand_ins = StandIns(_usable(device), dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        copied = stand_ins.of_model(model)
        tensors = [*copied.parameters(), *copied.buffers()]
        trained = [p for p in copied.parameters() if p.requires_grad]
        found = Footprint(
            weights=nbytes_of(tensors), gradients=nbytes_of(trained), unknown="no batch and step are known"
        )
        live = LiveBytes(tensors)
        if batch is not None and step is not None:
            try:
                if any(map(is_sharded, model.parameters())):
                    _exchange_nothing()
                values = stand_ins.of_batch(batch)
                with stand_ins.mode:
                    found = _run_step(found, live, copied, values, step, precision)
            except Exception as error:
                log.debug("a step could not be run on tensors without memory", exc_info=True)
                first = str(error).partition("\n")[0]
                found = replace(found, unknown=f"the step needs values: {type(error).__name__}: {first:.120}")
        if optimizer is None:
            return found
        try:
            using = stand_ins.of_optimizer(optimizer)
            with stand_ins.mode:
                return _run_update(found, trained, using)
        except Exception as error:
            log.debug("an optimizer could not be run on tensors without memory", exc_info=True)
            first = str(error).partition("\n")[0]
            return replace(found, unknown=f"{type(optimizer).__name__} needs values: {first:.120}")


def _exchange_nothing() -> None:
    """Let collectives of a split model leave tensors without memory as they are; others stay what they are.

    Torch registers that for estimates of its own: no rank waits for another.
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
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: live.note_gradient(p.grad))
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
            live.gradient_shapes = {tuple(sorted(p.shape)) for p in model.parameters() if p.dim() > 1}
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
        unknown="",
    )


def _watch(
    module: nn.Module, name: str, live: LiveBytes, kept: dict[str, int], passed: dict[str, int]
) -> Any:
    """Note what the forward passes of a module leave behind, and what they give on."""
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


def nbytes_of(tensors: list[Tensor] | list[nn.Parameter]) -> int:
    """Return the bytes of tensors, those that are met twice counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _usable(device: torch.device | None) -> torch.device:
    if device is None or device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return device if accelerator is not None and accelerator.type == device.type else torch.device("cpu")
