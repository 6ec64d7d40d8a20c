"""The layouts of stages over ranks, and what the fullest rank of one needs, before anything runs.

A stage has consecutive units, cut by parameters as a run cuts them. A rank holds its stages' parameters,
and what each micro-batch that is on its way keeps of them::

    first rank   the most micro-batches on their way, and the embedding
    last rank    one micro-batch, and the head, whose logits are the largest values
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from tp_core.internal import BUCKET_NBYTES, averaged_gradients, divisors
from tp_core.jobs import Footprint, Forecast, Layout, MemoryNeed, StepWork, Transfer
from tp_core.plugins import Job

from tp_pipeline._options import PipelineOptions, ScheduleName
from tp_pipeline._plan import find_units, smallest_largest

_PARTS = (2, 4, 8)
"""The micro-batches of a batch for each rank: more of them wait less, and keep more."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage: the names of its blocks, its parameters, and those of them that it multiplies with."""

    blocks: list[str]
    parameters: dict[int, nn.Parameter]
    multiplied: int


def list_layouts(model: nn.Module, size: int) -> Iterator[Layout]:
    """Yield the layouts of a model on ``size`` ranks: how many hold it together, schedules, micro-batches.

    Raises:
        ModelError: The model has no blocks to cut between.
    """
    _, starts = find_units(model, None)
    schedules: tuple[tuple[ScheduleName, int], ...] = (("1F1B", 1), ("Interleaved1F1B", 2))
    for ranks in divisors(size):
        for schedule, depth in schedules:
            if ranks * depth > len(starts):
                continue
            for each in _PARTS:
                options = {"ranks": ranks, "schedule": schedule, "microbatches": each * ranks}
                axes = {"data": size // ranks, "pipeline": ranks}
                yield Layout(axes=axes, options={"pipeline": options})  # type: ignore[arg-type]  # of names


def forecast(job: Job, layout: Layout, options: PipelineOptions) -> Forecast | None:
    """Return the memory of the fullest rank, and the work of the one with the most parameters."""
    footprint, model = job.footprint, job.model
    if footprint is None or model is None or footprint.activations is None:
        return None
    ranks, parts = layout.axes["pipeline"], options.microbatches
    stages = _stages(model, ranks * options.depth)
    # What the whole model keeps outside of blocks: logits and their loss, of the last rank.
    of_blocks = sum(footprint.kept.get(name, 0) for stage in stages for name in stage.blocks)
    beside = max(0, footprint.alone - footprint.casts - of_blocks)
    of_rank = [[s for i, s in enumerate(stages) if i % ranks == r] for r in range(ranks)]
    needs = [
        _need(job, footprint, own, ranks - 1 - rank, options, beside if rank == ranks - 1 else 0)
        for rank, own in enumerate(of_rank)
    ]
    fullest = max(needs, key=lambda need: need.total)
    multiplied = [sum(stage.multiplied for stage in own) for own in of_rank]
    share = max(multiplied) / max(1, sum(multiplied))
    crossing = max((footprint.passed.get(name, 0) for s in stages for name in s.blocks), default=0)
    sends = Transfer(kind="send", nbytes=crossing // parts, ranks=ranks, times=2 * parts * options.depth)
    gradients = max(_nbytes(job, own, trained=True) for own in of_rank)
    work = StepWork(
        operations=share,
        starts=share * parts,
        bubble=(ranks - 1) / (parts * options.depth),
        transfers=(sends, *averaged_gradients(gradients, layout.axes.get("data", 1), stride=ranks)),
    )
    return Forecast(memory=fullest, work=work)


def _need(
    job: Job, footprint: Footprint, own: list[_Stage], behind: int, options: PipelineOptions, beside: int
) -> MemoryNeed:
    parts, depth = options.microbatches, options.depth
    weights, gradients = _nbytes(job, own), _nbytes(job, own, trained=True)
    optimizer = footprint.optimizer_nbytes * gradients // max(1, footprint.gradients)
    # As many forwards as ranks follow come before the first backward; with several stages, rounds of them.
    ahead = behind + 1 if depth == 1 else 2 * behind + (depth - 1) * (behind + 1) + 1
    on_their_way = min(parts * depth, ahead) / depth
    blocks = [name for stage in own for name in stage.blocks]
    kept = sum(footprint.kept.get(name, 0) for name in blocks)
    received = sum(footprint.passed.get(stage.blocks[0], 0) for stage in own if stage.blocks)
    computed = max(0, (footprint.activations or 0) - footprint.alone)  # the gradient of one weight
    activations = (on_their_way * (kept + received) + beside) / parts + computed + footprint.casts
    activations = max(int(activations), footprint.update * gradients // max(1, footprint.gradients))
    at_start = footprint.weights - gradients - optimizer - activations
    copies = job.environment.world_size // max(1, options.ranks)
    return MemoryNeed(
        # Until the first step cuts it, each rank holds the weights of the whole model.
        weights=max(weights, at_start),
        gradients=gradients,
        optimizer=optimizer,
        communication=min(gradients, BUCKET_NBYTES) if copies > 1 else 0,
        activations=activations + footprint.batch,
        free=job.free_nbytes,
        device=str(job.devices[0]),
        assumed=footprint.assumed,
        remedy="less is needed with more ranks, more microbatches, or checkpoint_activations(model)",
    )


def _stages(model: nn.Module, count: int) -> list[_Stage]:
    """Cut a model before blocks so that the largest stage is as small as can be; see `make_plan`."""
    units, starts = find_units(model, None)
    names = list(units)
    places = [i for i, name in enumerate(names) if name in starts]
    bounds = [0, *places[1:], len(names)]
    costs = [_multiplied(units[name]) for name in names]
    pieces = [float(sum(costs[a:b])) for a, b in pairwise(bounds)]
    ends = [0, *(bounds[e] for e in smallest_largest(pieces, count)), len(names)]
    found = []
    for a, b in pairwise(ends):
        own = names[a:b]
        parameters = {id(p): p for name in own for p in units[name].parameters()}
        found.append(_Stage([n for n in own if n in starts], parameters, sum(costs[a:b])))
    return found


def _multiplied(unit: nn.Module) -> int:
    layers = [m for m in unit.modules() if not isinstance(m, nn.Embedding)]
    return sum(p.numel() for m in layers for p in m.parameters(recurse=False))


def _nbytes(job: Job, own: list[_Stage], *, trained: bool = False) -> int:
    """Return the bytes of the parameters of stages; tied ones once."""
    parameters = {key: p for stage in own for key, p in stage.parameters.items()}
    return sum(
        p.numel() * (2 if job.precision == "bf16-true" and p.is_floating_point() else p.element_size())
        for p in parameters.values()
        if p.requires_grad or not trained
    )
