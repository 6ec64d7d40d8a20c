"""The layouts of stages over ranks, and what the fullest rank of one needs, before anything runs.

A stage has consecutive units, cut by parameters as a run cuts them. A rank holds its stages' parameters,
and what each micro-batch that is on its way keeps of them, by the order of its work. On "1F1B"::

    first rank   the most micro-batches on their way, and the embedding
    last rank    one micro-batch, and the head with its logits, the largest values
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from torch import nn
from tp_core.errors import TpError
from tp_core.jobs import BUCKET_NBYTES, Axis, Footprint, Layout, MemoryNeed, divisors, replicated_memory
from tp_core.plugins import Job
from tp_core.tensors import is_deferred

from tp_pipeline._options import PipelineOptions, ScheduleName, depth_of
from tp_pipeline._plan import find_units, smallest_largest
from tp_pipeline._schedule import Orders, Work

_PARTS = (2, 4, 8)
"""The micro-batches of a batch for each rank: more of them wait less, and keep more."""

_SCHEDULES: tuple[ScheduleName, ...] = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
"""The schedules of the layouts, from the fewest stages on a rank to the least waiting."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage: the names of its blocks, its parameters, and the number of those that it multiplies with."""

    blocks: list[str]
    parameters: dict[str, nn.Parameter]
    multiplied: int


def list_layouts(model: nn.Module, size: int) -> Iterator[Layout]:
    """Yield the layouts of a model on ``size`` ranks: how many hold it together, schedules, micro-batches.

    Raises:
        ModelError: The model has no blocks to cut between.
    """
    _, starts = find_units(model, None)
    for ranks in divisors(size):
        axes: dict[Axis, int] = {"data": size // ranks, "pipeline": ranks}
        for schedule in _SCHEDULES:
            if ranks * depth_of(schedule) > len(starts):
                continue
            orders = _orders(schedule, ranks, depth_of(schedule), is_v=False)
            for parts in (each * ranks for each in _PARTS):
                if orders.is_made_of(parts):
                    options = {"ranks": ranks, "schedule": schedule, "microbatches": parts}
                    yield Layout(axes=axes, options={"pipeline": options}, microbatches=parts)


# Torch takes seconds for a large order, and layouts of one differ in what is around their stages.
@lru_cache(maxsize=8)
def _orders(schedule: str, ranks: int, depth: int, *, is_v: bool) -> Orders:
    return Orders(schedule, ranks, depth, is_v=is_v)


# -- Memory -----------------------------------------------------------------------------------------


def estimate(job: Job, ranks: int, options: PipelineOptions, *, split: int = 1) -> MemoryNeed | None:
    """Return what the fullest of the ranks needs that hold a model together.

    Args:
        job: The job; with split tensors, its model has this rank's pieces.
        ranks: The number of ranks with other stages.
        options: The options.
        split: The number of ranks that split each tensor.
    """
    if job.footprint is None or job.model is None:
        return None
    if options.schedule == "auto":  # which keeps no more than this one
        options = replace(options, schedule="1F1B")
    try:
        _, starts = find_units(job.model, options.cuts)
    except TpError:  # the session refuses it with the reason
        return replicated_memory(job, job.footprint)
    if options.cuts is None and len(starts) < ranks * options.depth:
        return replicated_memory(job, job.footprint)
    # Ranks that hold a model together read the same samples.
    of_group = job.footprint.with_batch_of(ranks * split * job.footprint.part)
    needs = memory_of_ranks(replace(job, footprint=of_group), ranks, options, split=split)
    return max(needs, key=lambda need: need.total)


def with_split_tensors(need: MemoryNeed, group: MemoryNeed, footprint: Footprint) -> MemoryNeed:
    """Return the need of stages of whole tensors as it is where a group splits these.

    Args:
        need: What the fullest rank needs with whole tensors.
        group: What a rank needs of the whole model on such a group.
        footprint: The memory of a device with the whole model, for the batch of the group.
    """
    part = group.weights / max(1, footprint.weights)
    kept = (group.activations or 0) / max(1, footprint.activations or 0)
    activations = None if need.activations is None else int(min(1.0, kept) * need.activations)
    return replace(
        need,
        weights=int(part * need.weights),
        gradients=int(part * need.gradients),
        optimizer=int(part * need.optimizer),
        communication=int(part * need.communication),
        activations=activations,
    )


def memory_of_ranks(job: Job, ranks: int, options: PipelineOptions, *, split: int = 1) -> list[MemoryNeed]:
    """Return what each rank with other stages needs, for a footprint of their batch; see `estimate`."""
    footprint, model = job.footprint, job.model
    if footprint is None or model is None:
        return []
    orders = _orders(options.schedule, ranks, options.depth, is_v=options.is_v)
    parts = options.microbatches or 4 * ranks
    stages = stages_by_order(model, orders.stages, options.cuts)
    order = orders.learning(parts)
    of_rank = [{i: s for i, s in enumerate(stages) if orders.rank_of(i) == r} for r in range(ranks)]
    ranks_of = Counter(k for own in of_rank for k in {id(p) for p in _parameters(own.values())})
    multiplied = sum(stage.multiplied for stage in stages)
    found = []
    for rank, own in enumerate(of_rank):
        values = {i: _values(footprint, stage, i == orders.stages - 1, parts) for i, stage in own.items()}
        # Gradients of tied weights: those of the other rank, and the sum.
        summed = 2 * sum(p.nbytes for p in _parameters(own.values()) if ranks_of[id(p)] > 1)
        trained = {i: _nbytes(job, [one], trained=True) for i, one in own.items()}
        most = _most(order[rank], values, trained, before=job.accumulate > 1)
        activations = max(int(most), summed)
        share = sum(stage.multiplied for stage in own.values()) / max(1, multiplied)
        activations += int(footprint.casts * share)
        copies = job.environment.world_size // (ranks * split)
        shared = copies if options.data == "fsdp" else 1
        found.append(_need(job, footprint, list(own.values()), activations, copies, shared))
    return found


def _parameters(stages: Iterable[_Stage]) -> list[nn.Parameter]:
    """Return the parameters of stages; tied ones once."""
    return list({id(p): p for stage in stages for p in stage.parameters.values()}.values())


@dataclass(frozen=True, slots=True)
class _Values:
    """The bytes of a stage for a micro-batch.

    Attributes:
        kept: Those that its forward keeps for backward.
        passed: Those that it receives, and about those that it sends.
        beyond: Those that a kind of backward needs besides what was kept, at its peak.
        waiting: The gradients of outputs that wait for the weights' turn, where inputs have theirs before.
    """

    kept: float
    passed: float
    beyond: dict[str, float]
    waiting: float


def _values(footprint: Footprint, stage: _Stage, is_last: bool, parts: int) -> _Values:
    kept = sum(footprint.kept.get(name, 0) for name in stage.blocks)
    passed = next((footprint.passed[n] for n in stage.blocks if n in footprint.passed), 0)
    own = [(footprint.timeline[n], p) for n, p in stage.parameters.items() if n in footprint.timeline]
    left = min((both[-1] for both, _ in own), default=0)
    waiting = kept / 2
    if is_last:
        # The loss keeps log-probabilities; at the peak their gradients and the logits' are there together.
        # While the weights wait, it has gone, and the logits' gradient is there.
        kept += max(0, max((both[0] for both, _ in own), default=0) - left - kept) // 3
    highest = max((both[0] - left for both, _ in own), default=0.0) / parts
    # The gradient of a weight is computed beside the sum of the micro-batches before.
    weight = max((p.nbytes for _, p in own), default=0) * (parts > 1)
    making = max(((both[1] - left) / parts + p.nbytes * (parts > 1) for both, p in own), default=0.0)
    beyond = {"B": max(highest, making), "I": highest}
    beyond = {kind: max(0.0, most - kept / parts) for kind, most in beyond.items()} | {"W": float(weight)}
    return _Values(kept / parts, passed / parts, beyond, waiting / parts)


def _most(
    order: Sequence[Work], values: Mapping[int, _Values], gradients: Mapping[int, int], *, before: bool
) -> float:
    """Return the most bytes that a rank needs beside gradients, by following its work.

    A stage has its ``gradients`` from its first backward pass on, and the most activations before that.
    Those of accumulated batches ``before`` are there, too.
    """
    held: defaultdict[tuple[int, int], float] = defaultdict(float)
    now = most = 0.0 if before else -float(sum(gradients.values()))
    missing = dict(gradients)
    for kind, stage, part in order:
        own, key = values[stage], (stage, part)
        gained = {"RECV_F": own.passed, "RECV_B": own.passed, "I": own.waiting}.get(kind, 0.0)
        if kind == "F":
            gained = own.kept + (0.0 if stage else own.passed)  # the embedding's output
        held[key] += gained
        now += gained
        most = max(most, now + own.beyond.get(kind, 0.0))
        # What is sent stays until the end of the batch.
        if kind == "SEND_F":
            held[key] -= own.passed
        elif kind == "SEND_B":
            now += own.passed
        elif kind in {"B", "W"}:
            now += missing.pop(stage, 0) - held.pop(key)
    return max(0.0, most)


def _need(
    job: Job, footprint: Footprint, own: list[_Stage], activations: int, copies: int, shared: int
) -> MemoryNeed:
    """Return what a rank needs that has its weights in equal parts with ``shared`` data ranks."""
    weights, gradients = _nbytes(job, own), _nbytes(job, own, trained=True)
    part = gradients / max(1, footprint.gradients) / shared
    optimizer = int(footprint.optimizer_nbytes * part)
    updated = part
    model = job.model or nn.Module()
    parameters = list(model.parameters())
    largest = max((p.nbytes for p in parameters if p.requires_grad), default=1)
    deferred = {id(p): p.nbytes for p in parameters if is_deferred(p)}
    if footprint.update < footprint.gradients:  # of a parameter at a time
        updated = max((p.nbytes for p in _parameters(own) if p.requires_grad), default=0) / largest / shared
    activations = max(activations, int(footprint.update * updated)) + footprint.batch
    # Gradients are averaged when the activations have gone, and whole weights, too.
    whole = weights if shared > 1 else 0
    bucket = min(gradients, BUCKET_NBYTES) if copies > 1 else 0
    communication = max(whole, bucket - activations)
    weights //= shared
    # Until the first step cuts it, each rank holds the weights of the whole model, if it was not built here.
    here = {id(p) for p in _parameters(own)}
    elsewhere = sum(nbytes for key, nbytes in deferred.items() if key not in here)
    at_start = footprint.weights - elsewhere - gradients - optimizer - activations - communication
    return MemoryNeed(
        weights=max(weights, at_start),
        gradients=gradients,
        optimizer=optimizer,
        communication=communication,
        activations=None if footprint.activations is None else activations,
        free=job.free_nbytes,
        device=str(job.devices[0]),
        assumed=footprint.assumed,
        remedy="less is needed with more ranks, more microbatches, or checkpoint_activations(model)",
    )


def stages_by_order(model: nn.Module, count: int, cuts: Sequence[str] | None) -> list[_Stage]:
    """Cut a model by hand, or so that the largest stage is as small as can be; see `make_plan`.

    Units are taken in the model's order; a step shows in which order it calls them.
    """
    units, starts = find_units(model, cuts)
    names = list(units)
    places = [i for i, name in enumerate(names) if name in starts]
    costs = [_multiplied(units[name]) for name in names]
    if cuts is None:
        bounds = [0, *places[1:], len(names)]
        pieces = [float(sum(costs[a:b])) for a, b in pairwise(bounds)]
        places = [bounds[e] for e in smallest_largest(pieces, count)]
    found = []
    for a, b in pairwise([0, *places, len(names)]):
        own = names[a:b]
        parameters = {f"{name}.{n}": p for name in own for n, p in units[name].named_parameters()}
        found.append(_Stage([n for n in own if cuts or n in starts], parameters, sum(costs[a:b])))
    return found


def _multiplied(unit: nn.Module) -> int:
    layers = [m for m in unit.modules() if not isinstance(m, nn.Embedding)]
    return sum(p.numel() for m in layers for p in m.parameters(recurse=False))


def _nbytes(job: Job, own: list[_Stage], *, trained: bool = False) -> int:
    """Return the bytes of the parameters of stages."""
    return sum(
        p.numel() * (2 if job.precision == "bf16-true" and p.is_floating_point() else p.element_size())
        for p in _parameters(own)
        if p.requires_grad or not trained
    )
