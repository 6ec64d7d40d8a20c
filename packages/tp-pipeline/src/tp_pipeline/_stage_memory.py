"""The layouts of stages over ranks, and what the fullest rank of one needs, before anything runs.

A stage has consecutive units, cut by parameters as a run cuts them. A rank holds its stages' parameters,
and what each micro-batch that is on its way keeps of them, by the order of its work. On "1F1B"::

    first rank   the most micro-batches on their way, and the embedding
    last rank    one micro-batch, and the head with its logits, the largest values
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from torch import nn
from tp_core.errors import TpError
from tp_core.jobs import BUCKET_NBYTES, Axis, Footprint, Layout, MemoryNeed, divisors, replicated_memory
from tp_core.plugins import Job
from tp_core.tensors import is_deferred

from tp_pipeline._pipeline_options import PipelineOptions, ScheduleName, default_depth, depth_of
from tp_pipeline._schedule import Orders, StageWork
from tp_pipeline._stage_segments import RankWork, cut_trace, peak_of_rank
from tp_pipeline._stage_units import find_units, smallest_largest

_PARTS = (2, 4, 8)
"""The micro-batches of a batch for each rank: more of them wait less, and keep more."""

_SCHEDULES: tuple[ScheduleName, ...] = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
"""The schedules of the layouts, from the fewest stages on a rank to the least waiting."""


@dataclass(frozen=True, slots=True)
class StageUnits:
    """The consecutive units of a stage.

    Attributes:
        blocks: The names of its blocks.
        parameters: Its parameters by name; tied ones under each name.
        multiplied: The number of parameters that it multiplies with, which those of embeddings are not.
    """

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
            if ranks * default_depth(schedule) > len(starts):
                continue
            orders = _orders(schedule, ranks)
            for parts in (each * ranks for each in _PARTS):
                if orders.is_made_of(parts):
                    options = {"ranks": ranks, "schedule": schedule, "microbatches": parts}
                    yield Layout(axes=axes, options={"pipeline": options}, microbatches=parts)


# Torch takes seconds for a large order, and layouts of one differ in what is around their stages.
@lru_cache(maxsize=8)
def _orders(schedule: str, ranks: int, depth: int = 0) -> Orders:
    return Orders(schedule, ranks, depth)


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
    if options.cuts is None and len(starts) < ranks * depth_of(options):
        return replicated_memory(job, job.footprint)
    # Ranks that hold a model together read the same samples.
    of_group = job.footprint.with_batch_of(ranks * split * job.footprint.part)
    needs = memory_of_ranks(replace(job, footprint=of_group), ranks, options, split=split)
    return max(needs, key=lambda need: need.taken)


def with_split_tensors(need: MemoryNeed, group: MemoryNeed, footprint: Footprint) -> MemoryNeed:
    """Return the need of stages of whole tensors as it is where a group splits these.

    Args:
        need: What the fullest rank needs with whole tensors.
        group: What a rank needs of the whole model on such a group.
        footprint: The memory of a device with the whole model, for the batch of the group.
    """
    part = group.weights / max(1, footprint.weights)
    kept = (group.activations or 0) / max(1, footprint.activations or 0)
    if need.activations is None:
        activations = None
    else:
        activations = int(min(1.0, kept) * need.activations)
    split = replace(
        need,
        weights=int(part * need.weights),
        gradients=int(part * need.gradients),
        optimizer=int(part * need.optimizer),
        communication=int(part * need.communication),
        activations=activations,
        reserved=None,
    )
    return split.with_reserved_as(need)


def memory_of_ranks(job: Job, ranks: int, options: PipelineOptions, *, split: int = 1) -> list[MemoryNeed]:
    """Return what each rank with other stages needs, for a footprint of their batch; see `estimate`."""
    footprint, model = job.footprint, job.model
    if footprint is None or model is None:
        return []
    orders = _orders(options.schedule, ranks, depth_of(options))
    parts = options.microbatches or 4 * ranks
    stages = stages_by_order(model, orders.stages, options.cuts)
    order = orders.learning(parts)
    of_ranks = [{number: stages[number] for number in orders.stages_of(rank)} for rank in range(ranks)]
    ranks_with = Counter(p for own in of_ranks for p in _parameters(own.values()))
    multiplied = sum(stage.multiplied for stage in stages)
    copies = job.environment.world_size // (ranks * split)
    shared = copies if options.data == "fsdp" else 1
    events = cut_trace(footprint.trace, [stage.parameters for stage in stages])
    needs = []
    for rank, own in enumerate(of_ranks):
        stage_bytes, trained = {}, {}
        for number, stage in own.items():
            is_last = number == orders.stages - 1
            stage_bytes[number] = _bytes_of_stage(footprint, stage, is_last=is_last, parts=parts)
            trained[number] = _nbytes(job, [stage], trained=True)
        most = _most(order[rank], stage_bytes, trained, before=job.accumulate > 1)
        # Gradients of tied weights: those of the other rank, and the sum. See Note [how gradients of stages
        # are counted], 2.
        summed = 2 * sum(p.nbytes for p in _parameters(own.values()) if ranks_with[p] > 1)
        activations = max(int(most), summed)
        part = sum(stage.multiplied for stage in own.values()) / max(1, multiplied)
        activations += int(footprint.casts * part)
        need = _need(job, footprint, list(own.values()), activations, copies, shared)
        parameters = {name: p for stage in own.values() for name, p in stage.parameters.items()}
        at_work = RankWork(
            order=order[rank],
            stages={number: events[number] for number in own},
            passed={number: each.passed for number, each in stage_bytes.items()},
            parts=parts,
            parameters={name: (p, _nbytes_of(job, p)) for name, p in parameters.items()},
            shared=shared,
            communication=need.communication,
        )
        needs.append(need.with_reserved(partial(peak_of_rank, job, footprint, model, at_work)))
    return needs


def _parameters(stages: Iterable[StageUnits]) -> list[nn.Parameter]:
    """Return the parameters of stages; tied ones once."""
    return list(dict.fromkeys(p for stage in stages for p in stage.parameters.values()))


@dataclass(frozen=True, slots=True)
class _StageBytes:
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


def _bytes_of_stage(footprint: Footprint, stage: StageUnits, *, is_last: bool, parts: int) -> _StageBytes:
    kept = sum(footprint.kept.get(name, 0) for name in stage.blocks)
    passed = next((footprint.passed[name] for name in stage.blocks if name in footprint.passed), 0)
    waiting = kept / 2

    # What is there of the activations when a parameter's gradient is computed: at the peak, then, at the end.
    timelines = [(footprint.timeline[n], p) for n, p in stage.parameters.items() if n in footprint.timeline]
    left = min((timeline[-1] for timeline, _ in timelines), default=0)
    peak = max((timeline[0] for timeline, _ in timelines), default=0)
    if is_last:
        # The loss keeps log-probabilities; at the peak their gradients and the logits' are there together.
        # While the weights wait, it has gone, and the logits' gradient is there.
        kept += max(0, peak - left - kept) // 3
    highest = (peak - left) / parts if timelines else 0.0
    # The gradient of a weight is computed beside the sum of the micro-batches before.
    is_added = parts > 1
    weight = max((p.nbytes for _, p in timelines), default=0) * is_added
    with_weight = ((timeline[1] - left) / parts + p.nbytes * is_added for timeline, p in timelines)
    backward = max(highest, max(with_weight, default=0.0))
    beyond = {
        "B": max(0.0, backward - kept / parts),
        "I": max(0.0, highest - kept / parts),
        "W": float(weight),
    }
    return _StageBytes(kept / parts, passed / parts, beyond, waiting / parts)


def _most(
    order: Sequence[StageWork],
    stages: Mapping[int, _StageBytes],
    gradients: Mapping[int, int],
    *,
    before: bool,
) -> float:
    """Return the most bytes that a rank needs beside gradients, by following its work.

    A stage has its ``gradients`` from its first backward pass on, and the most activations before that.
    Those of accumulated batches ``before`` are there, too.
    """
    kept: defaultdict[tuple[int, int], float] = defaultdict(float)
    now = most = 0.0 if before else -float(sum(gradients.values()))
    missing = dict(gradients)
    for kind, number, part in order:
        stage, key = stages[number], (number, part)
        gained = 0.0
        if kind == "F":
            gained = stage.kept
            if number == 0:  # the embedding's output
                gained += stage.passed
        elif kind in {"RECV_F", "RECV_B"}:
            gained = stage.passed
        elif kind == "I":
            gained = stage.waiting
        kept[key] += gained
        now += gained
        most = max(most, now + stage.beyond.get(kind, 0.0))
        # What is sent stays until the end of the batch.
        if kind == "SEND_F":
            kept[key] -= stage.passed
        elif kind == "SEND_B":
            now += stage.passed
        elif kind in {"B", "W"}:
            now += missing.pop(number, 0) - kept.pop(key)
    return max(0.0, most)


def _need(
    job: Job, footprint: Footprint, own: list[StageUnits], activations: int, copies: int, shared: int
) -> MemoryNeed:
    """Return what a rank needs that has its weights in equal parts with ``shared`` data ranks."""
    weights, gradients = _nbytes(job, own), _nbytes(job, own, trained=True)
    part = gradients / max(1, footprint.gradients) / shared
    optimizer = int(footprint.optimizer_nbytes * part)
    if job.model is None:
        parameters = []
    else:
        parameters = list(job.model.parameters())
    here = _parameters(own)

    updated = part
    if footprint.update < footprint.gradients:  # of a parameter at a time
        largest = max((p.nbytes for p in parameters if p.requires_grad), default=1)
        updated = max((p.nbytes for p in here if p.requires_grad), default=0) / largest / shared
    activations = max(activations, int(footprint.update * updated)) + footprint.batch

    # Gradients are averaged when the activations have gone, and whole weights, too.
    gathered = weights if shared > 1 else 0
    bucket = min(gradients, BUCKET_NBYTES) if copies > 1 else 0
    communication = max(gathered, bucket - activations)
    weights //= shared

    # Until the first step cuts it, each rank holds the weights of the whole model, if it was not built here.
    here_set = set(here)
    elsewhere = sum(p.nbytes for p in parameters if is_deferred(p) and p not in here_set)
    at_start = footprint.weights - elsewhere - gradients - optimizer - activations - communication
    is_known = footprint.activations is not None
    return MemoryNeed(
        weights=max(weights, at_start),
        gradients=gradients,
        optimizer=optimizer,
        communication=communication,
        activations=activations if is_known else None,
        free=job.free_nbytes,
        device=str(job.devices[0]),
        assumed=footprint.assumed,
        remedy="less is needed with more ranks, more microbatches, or checkpoint_activations(model)",
    )


def stages_by_order(model: nn.Module, count: int, cuts: Sequence[str] | None) -> list[StageUnits]:
    """Cut a model by hand, or so that the largest stage is as small as can be; see `make_plan`.

    Units are taken in the model's order; a step shows in which order it calls them.
    """
    units, can_start = find_units(model, cuts)
    names = list(units)
    firsts = [number for number, name in enumerate(names) if name in can_start]
    costs = [_multiplied(units[name]) for name in names]
    if cuts is None:
        bounds = [0, *firsts[1:], len(names)]
        pieces = [float(sum(costs[first:end])) for first, end in pairwise(bounds)]
        firsts = [bounds[piece] for piece in smallest_largest(pieces, count)]
    stages = []
    for first, end in pairwise([0, *firsts, len(names)]):
        own = names[first:end]
        parameters: dict[str, nn.Parameter] = {}
        for name in own:
            parameters |= units[name].named_parameters(prefix=name)
        blocks = [name for name in own if cuts or name in can_start]
        stages.append(StageUnits(blocks, parameters, sum(costs[first:end])))
    return stages


def _multiplied(unit: nn.Module) -> int:
    layers = [module for module in unit.modules() if not isinstance(module, nn.Embedding)]
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False))


def _nbytes(job: Job, own: list[StageUnits], *, trained: bool = False) -> int:
    """Return the bytes of the parameters of stages."""
    nbytes = 0
    for parameter in _parameters(own):
        if trained and not parameter.requires_grad:
            continue
        nbytes += _nbytes_of(job, parameter)
    return nbytes


def _nbytes_of(job: Job, parameter: nn.Parameter) -> int:
    size = parameter.element_size()
    if job.precision == "bf16-true" and parameter.is_floating_point():
        size = 2
    return parameter.numel() * size
