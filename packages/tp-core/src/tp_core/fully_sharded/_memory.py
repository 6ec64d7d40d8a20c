"""The device memory of a rank that holds shards, and the values of "auto" options that follow from it.

::

    throughout      1/ranks of weights and optimizer state; parameters in no unit, whole, during a step
    a unit's turn   its weights and the next unit's, gathered; its gradients, and their reduction
    after it        1/ranks of its gradients, and the input of its reduction until the next one
    at the end      gradients of parameters in no unit, and their reduction

The backward pass is followed gradient by gradient, with the activations that are left then.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from tp_core._contracts._job import Footprint, Job, MemoryNeed
from tp_core.device_types import memory_block
from tp_core.fully_sharded._options import FullyShardOptions, parameter_type, reduction_type, remedy
from tp_core.fully_sharded._reserved import sharded_peak
from tp_core.fully_sharded._units import find_units

OptionsT = TypeVar("OptionsT", bound=FullyShardOptions)

_SAFE = 0.9
"""The part of the free memory that must be enough before "auto" takes more memory than necessary."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes of the parameters of a unit, or of those in none: whole, their gradients, a reduction's input."""

    name: str
    whole: int
    sizes: Mapping[str, int]  # of each gradient, by the parameter's name
    reduced: int

    @property
    def gradients(self) -> int:
        return sum(self.sizes.values())


def resolve_options(job: Job, options: OptionsT, *, ranks: int) -> OptionsT:
    """Return the options with values in place of "auto": the fastest ones with which the job fits.

    A job that is small has the usual ones, whether its memory was measured, as in estimates, or not.
    """
    candidates = list(_candidates(job, options))
    footprint, model = job.footprint, job.model
    if footprint is None or model is None or job.is_small(job.free_nbytes):
        if len(candidates) == 1:
            return candidates[0]
        return _usual(options)
    if all(candidate == candidates[0] for candidate in candidates):
        return candidates[0]
    for candidate in candidates:
        need = _need(job, candidate, footprint, model, ranks)
        is_generous = candidate.reshard_after_forward is False and options.reshard_after_forward == "auto"
        is_safe = need.is_known and (need.free is None or need.taken <= _SAFE * need.free)
        if need.fits and (is_safe or not is_generous):
            return candidate
    return candidates[-1]


def sharded_memory(job: Job, options: FullyShardOptions, *, ranks: int) -> MemoryNeed | None:
    """Return the memory that a job needs on each rank; ``None`` where too little is known."""
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


def _candidates(job: Job, options: OptionsT) -> Iterator[OptionsT]:
    """Yield the options with each value that "auto" may have, the fastest first."""
    # Where the trainer chooses what is computed again, offloading, which is slower, comes after all of that.
    can_offload = job.devices[0].type != "cpu" and job.recomputation in (None, "every block")
    for reshards, checkpoints, offloads in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ):
        wanted = (
            (options.reshard_after_forward, reshards),
            (options.activation_checkpointing, checkpoints and job.recomputation is None),
            (options.offload, offloads),
        )
        if offloads and options.offload == "auto" and not can_offload:
            continue
        values = [automatic if option == "auto" else option for option, automatic in wanted]
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
    held, trained = _held_parts(job, model, ranks)
    weights = round(footprint.weights * held)
    gradients, optimizer, update = (
        round(n * trained) for n in (footprint.gradients, footprint.optimizer_nbytes, footprint.update)
    )
    # A check at the end of an epoch takes two numbers of each parameter, and each number a block.
    numbers = 2 * sum(len(unit.sizes) for unit in [rest, *units])
    update = max(update, numbers * memory_block(job.devices[0].type))
    if options.offload:  # shards and optimizer state are in the host's memory
        weights = gradients = optimizer = update = 0
    activations = _activations(job, options, footprint, tuple(unit.name for unit in units))
    activations_in_pass = activations
    moments = _moments(footprint, activations or 0, rest, units)
    beyond = max(_highest(job, options, moments, rest, units, ranks) - gradients, update)
    communication = max(0, beyond - (activations or 0))
    if activations is not None:
        activations = beyond - communication + footprint.batch
    part = (activations_in_pass or 0) / max(1, footprint.alone)
    need = MemoryNeed(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        communication=communication,
        activations=activations,
        free=job.free_nbytes,
        device=str(job.devices[0]),
        assumed=footprint.assumed,
        remedy=remedy(options),
    )
    return need.with_reserved(lambda: sharded_peak(job, options, footprint, model, ranks, part))


class _Moment(NamedTuple):
    """The end of a gradient's computation, and the activations before it, beside it, and afterwards."""

    unit: _Unit
    nbytes: int
    before: int
    beside: int
    left: int


def _moments(footprint: Footprint, activations: int, rest: _Unit, units: list[_Unit]) -> list[_Moment]:
    """Return the gradients in their order; where that is not known, each of them at the peak."""
    owners = {name: unit for unit in [rest, *units] for name in unit.sizes}
    timeline: Mapping[str, Sequence[int]] = dict.fromkeys(reversed(owners), [activations] * 3)
    part = 1.0
    if footprint.timeline.keys() >= owners.keys():
        # Less of it where more is computed again; more where weights are cast.
        timeline, part = footprint.timeline, activations / max(1, footprint.alone)
    # Frozen units are gathered, too.
    moments = [_Moment(unit, 0, *[activations] * 3) for unit in reversed(units) if not unit.sizes]
    for name, values in timeline.items():
        if name in owners:
            unit = owners[name]
            moments.append(_Moment(unit, unit.sizes[name], *(round(part * n) for n in values)))
    return moments


def _highest(
    job: Job, options: FullyShardOptions, moments: list[_Moment], rest: _Unit, units: list[_Unit], ranks: int
) -> int:
    """Return the peak of activations, whole weights and gradients in a step."""
    kept = options.reshard_after_forward is False
    is_cpu = job.devices[0].type == "cpu"
    next_ones = {unit.name: ahead.whole for ahead, unit in pairwise(units)}
    missing = {unit.name: len(unit.sizes) for unit in units}
    # Gradients of batches that only accumulate are not reduced: each rank holds them whole.
    accumulates = job.accumulate > 1
    if accumulates:
        gradients = sum(unit.gradients for unit in units)
    else:
        gradients = 0
    # Units that stay whole after the forward are whole where the backward begins; else the last one alone is.
    whole_units = units if kept else units[-1:]
    gathered = rest.whole + sum(unit.whole for unit in whole_units)
    peak = _forward(moments, rest, units, ranks, kept=kept, is_cpu=is_cpu) + gradients
    waiting = activations = 0
    at_work = rest
    for unit, nbytes, before, beside, after in moments:
        ahead = next_ones.get(unit.name, 0)
        if unit is not rest and unit is not at_work and not kept:
            at_work, gathered = unit, rest.whole + unit.whole + ahead
            # gloo gathers into a buffer of its own, from a copy of the shard.
            copied = ahead + ahead // ranks if is_cpu else 0
            peak = max(peak, max(activations, after) + gradients + waiting + gathered + copied)
        peak = max(peak, before + gathered + gradients + waiting)
        if unit is rest or not accumulates:
            gradients += nbytes
        activations = after
        peak = max(peak, max(beside, activations) + gathered + gradients + waiting)
        if unit is rest:
            continue
        missing[unit.name] -= 1
        if not missing[unit.name]:
            if kept:
                gathered = gathered - unit.whole
            else:
                gathered = rest.whole + ahead
            # The reduction's input stays until the next one.
            peak = max(peak, activations + gathered + gradients + _reducing(unit, ranks, is_cpu=is_cpu))
            gradients -= unit.gradients
            if not options.offload:
                gradients += unit.reduced // ranks
            waiting = unit.reduced
    # Whole weights are freed before the reduction.
    return max(peak, activations + gradients + max(rest.whole, _reducing(rest, ranks, is_cpu=is_cpu)))


def _forward(
    moments: list[_Moment], rest: _Unit, units: list[_Unit], ranks: int, *, kept: bool, is_cpu: bool
) -> int:
    """Return the bytes when the last unit is whole, and what it was gathered into is there still.

    So is what the unit before was gathered into: torch frees that when it waits for the next one.
    """
    if not units:
        return 0
    before = min((moment.left for moment in moments if moment.unit is units[-1]), default=0)
    whole_units = units if kept else units[-1:]
    gathered_into = sum(unit.whole for unit in units[-2:])
    if is_cpu:
        # While the last unit is gathered, gloo has a buffer of its own, and a copy of the shard.
        gathered_into += units[-1].whole // ranks + (0 if kept else units[-1].whole)
    return before + rest.whole + sum(unit.whole for unit in whole_units) + gathered_into


def _reducing(unit: _Unit, ranks: int, *, is_cpu: bool) -> int:
    """Return the bytes of a reduction beside the unit's gradients: its input, into which they are copied."""
    needed = unit.reduced + unit.reduced // ranks
    if is_cpu and unit.sizes:
        # gloo copies the input, when torch has freed all of the gradients but the last one.
        needed += max(0, unit.reduced + list(unit.sizes.values())[-1] - unit.gradients)
    return needed


def _activations(
    job: Job, options: FullyShardOptions, footprint: Footprint, units: tuple[str, ...]
) -> int | None:
    """Return the peak of activations in a pass; with checkpointing units keep their inputs only."""
    if footprint.activations is None:
        return None
    # Parameters that are gathered in the lower dtype are not cast to it again.
    peak = footprint.alone
    if not parameter_type(options, job):
        peak += footprint.casts
    if options.activation_checkpointing:
        kept = [max(0, footprint.kept.get(name, 0) - footprint.passed.get(name, 0)) for name in units]
        peak = max(0, peak - sum(kept) + max(kept, default=0))
    return peak


def _gathered(job: Job, options: FullyShardOptions, model: nn.Module) -> tuple[_Unit, list[_Unit]]:
    """Return the bytes of parameters in no unit, and of each unit."""
    low, reduced = parameter_type(options, job), reduction_type(options, job)
    block = memory_block(job.devices[0].type)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def measured(name: str, module: nn.Module) -> _Unit:
        whole = sums = 0
        sizes: dict[str, int] = {}
        for parameter in module.parameters():
            path = names.pop(id(parameter), None)
            if path is None:
                continue
            n = parameter.numel()
            if low and parameter.is_floating_point():
                size = n * low.itemsize
            else:
                size = n * _size_of(job, parameter)
            whole += _round_up(size, block)
            if parameter.requires_grad:
                sizes[path] = _round_up(size, block)
                if reduced:
                    sums += n * reduced.itemsize
                else:
                    sums += size
        return _Unit(name, whole, sizes, _round_up(sums, block))

    # Inner units first: a parameter belongs to the innermost unit around it.
    units = list(find_units(model, options.units).modules.items())
    inner = [measured(name, module) for name, module in reversed(units)]
    return measured("", model), inner[::-1]


def _held_parts(job: Job, model: nn.Module, ranks: int) -> tuple[float, float]:
    """Return the parts of a model's memory, and of its trained parameters', that a rank holds.

    Parameters are cut along their first dimension, and each piece takes whole blocks. Buffers are not cut.
    """
    block = memory_block(job.devices[0].type)
    buffers = sum(_round_up(b.numel() * b.element_size(), block) for b in model.buffers())
    whole = cut = buffers
    trained_whole = trained_cut = 0
    for parameter in model.parameters():
        nbytes = parameter.numel() * _size_of(job, parameter)
        rows = parameter.shape[0] if parameter.dim() else 1
        piece = nbytes // max(1, rows) * -(-rows // ranks)
        whole += _round_up(nbytes, block)
        cut += _round_up(piece, block)
        if parameter.requires_grad:
            trained_whole += _round_up(nbytes, block)
            trained_cut += _round_up(piece, block)
    return cut / max(1, whole), trained_cut / max(1, trained_whole)


def _round_up(nbytes: int, block: int) -> int:
    return -(-nbytes // block) * block


def _size_of(job: Job, parameter: nn.Parameter) -> int:
    lowers = job.precision == "bf16-true" and parameter.is_floating_point()
    if lowers:
        return torch.bfloat16.itemsize
    return parameter.element_size()
