"""What a rank that holds shards needs of its device's memory, and which options are therefore taken.

::

    throughout      1/ranks of weights and optimizer state; what lies in no unit, whole, while a step runs
    a unit's turn   its weights and the next unit's, gathered; its gradients, and what of them is reduced
    at the end      1/ranks of the gradients; gradients of what lies in no unit, and those to be reduced
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from tp_core._contracts._job import Footprint, Job, MemoryNeed
from tp_core._fully_sharded._options import FullyShardOptions, parameter_type, reduction_type
from tp_core._fully_sharded._units import find_units

OptionsT = TypeVar("OptionsT", bound=FullyShardOptions)

_SAFE = 0.9
"""Only where this part of what is free is enough, more memory is taken than has to be."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes of the parameters of a unit, or of those in none: whole, their gradients, what is reduced."""

    name: str
    whole: int
    gradients: int
    reduced: int


def resolve_options(job: Job, options: OptionsT, *, ranks: int) -> OptionsT:
    """Return the options with a value where they say "auto": the fastest with which the job fits.

    Args:
        job: The job.
        options: As they were given.
        ranks: Over how many ranks the model is sharded.
    """
    ways = list(_ways(job, options))
    footprint, model = job.footprint, job.model
    if footprint is None or model is None:
        return ways[0] if len(ways) == 1 else _usual(options)
    for way in ways:
        need = _need(job, way, footprint, model, ranks)
        is_generous = way.reshard_after_forward is False and options.reshard_after_forward == "auto"
        is_safe = need.is_known and (need.free is None or need.total <= _SAFE * need.free)
        if need.fits and (is_safe or not is_generous):
            return way
    return ways[-1]


def sharded_memory(job: Job, options: FullyShardOptions, *, ranks: int) -> MemoryNeed | None:
    """Return what a job needs on each rank with its options; ``None`` where too little is known.

    Args:
        job: The job.
        options: As they were given.
        ranks: Over how many ranks the model is sharded.
    """
    if job.footprint is None or job.model is None:
        return None
    return _need(job, resolve_options(job, options, ranks=ranks), job.footprint, job.model, ranks)


def _usual(options: OptionsT) -> OptionsT:
    return replace(
        options,
        reshard_after_forward=options.reshard_after_forward in (True, "auto"),
        activation_checkpointing=options.activation_checkpointing is True,
        offload=options.offload is True,
    )


def _ways(job: Job, options: OptionsT) -> Iterator[OptionsT]:
    """Yield what "auto" may mean, the fastest first."""
    can_offload = job.devices[0].type != "cpu"
    for reshards, checkpoints, offloads in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ):
        wanted = (
            (options.reshard_after_forward, reshards),
            (options.activation_checkpointing, checkpoints),
            (options.offload, offloads),
        )
        if offloads and options.offload == "auto" and not can_offload:
            continue
        values = [way if given == "auto" else given for given, way in wanted]
        chosen = replace(
            options,
            reshard_after_forward=values[0],
            activation_checkpointing=values[1],
            offload=values[2],
        )
        yield chosen


def _need(
    job: Job, options: FullyShardOptions, footprint: Footprint, model: nn.Module, ranks: int
) -> MemoryNeed:
    rest, units = _gathered(job, options, model)
    kept = options.reshard_after_forward is False
    turn = rest.whole + rest.gradients + max(_turns(units, ranks, kept=kept), default=0)
    # A unit is let go before its gradients, which have been copied to be reduced, are.
    end = rest.gradients + max(rest.whole, _reduced(rest, ranks))
    weights, gradients, optimizer = (
        -(-n // ranks) for n in (footprint.weights, footprint.gradients, footprint.optimizer_nbytes)
    )
    update = footprint.update // ranks
    if options.offload:  # what is throughout lies in the host's memory
        weights = gradients = optimizer = update = 0
    activations = _activations(job, options, footprint, tuple(unit.name for unit in units))
    # While a pass is at its highest, there are no gradients of this rank's slices yet.
    beyond = max((activations or 0) + turn - gradients, end, update)
    return MemoryNeed(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        communication=min(turn, beyond),
        activations=None if activations is None else beyond - min(turn, beyond) + footprint.batch,
        free=job.free_nbytes,
        device=str(job.devices[0]),
        assumed=footprint.assumed,
        remedy=_remedy(options),
    )


def _activations(
    job: Job, options: FullyShardOptions, footprint: Footprint, units: tuple[str, ...]
) -> int | None:
    """Return the most that a pass has of activations, of which units may keep their inputs alone."""
    if footprint.activations is None:
        return None
    # Parameters that are gathered in the lower type are not copied to it again.
    found = footprint.alone - (footprint.casts if parameter_type(options, job) else 0)
    if options.activation_checkpointing:
        kept = [max(0, footprint.kept.get(name, 0) - footprint.passed.get(name, 0)) for name in units]
        found = max(0, found - sum(kept) + max(kept, default=0))
    return found


def _turns(units: list[_Unit], ranks: int, *, kept: bool) -> Iterator[int]:
    """Yield what is whole in the backward pass while each unit, in the order of the model, has its turn."""
    before = 0  # of units before this one: all of them, or the next, which is gathered ahead
    for unit in units:
        yield before + unit.gradients + max(unit.whole, _reduced(unit, ranks))
        before = before + unit.whole if kept else unit.whole


def _reduced(unit: _Unit, ranks: int) -> int:
    """Return what a reduction holds: its input, and its output on this rank."""
    return unit.reduced + unit.reduced // ranks


def _gathered(job: Job, options: FullyShardOptions, model: nn.Module) -> tuple[_Unit, list[_Unit]]:
    """Return what lies in no unit, and the units."""
    units = find_units(model, options.units).modules
    low, reduced = parameter_type(options, job), reduction_type(options, job)
    seen: set[int] = set()

    def measured(name: str, module: nn.Module) -> _Unit:
        whole = gradients = sums = 0
        for parameter in module.parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            n = parameter.numel()
            size = n * (low.itemsize if low and parameter.is_floating_point() else _size_of(job, parameter))
            whole += size
            if parameter.requires_grad:
                gradients += size
                sums += n * reduced.itemsize if reduced else size
        return _Unit(name, whole, gradients, sums)

    # Inner ones first: what a unit has, one around it does not.
    of_units = [measured(name, module) for name, module in reversed(list(units.items()))]
    return measured("", model), of_units[::-1]


def _size_of(job: Job, parameter: nn.Parameter) -> int:
    lowers = job.precision == "bf16-true" and parameter.is_floating_point()
    return torch.bfloat16.itemsize if lowers else parameter.element_size()


def _remedy(options: FullyShardOptions) -> str:
    ways = [
        "more ranks" if options.replicas == 1 else "fewer replicas",
        *(["activation_checkpointing=True"] if not options.activation_checkpointing else []),
        *(["offload=True on an accelerator"] if not options.offload else []),
        "a smaller batch with accumulate=",
    ]
    return f"less is needed with {', '.join(ways[:-1])} or {ways[-1]}"
