"""How a model is cut into stages: which calls, parameters and values belong to each, by a dry run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from tp_core.errors import ConfigError, ModelError, StepError

from tp_pipeline._stage_dry_run import (
    InnerCall,
    NeedsNumbersError,
    Origin,
    RefusedError,
    StageDryRun,
    TensorSpec,
    UnitCall,
    call_last_hooks,
    call_of,
    own_batch,
    tensors_of,
)
from tp_pipeline._stage_units import find_units, smallest_largest

Start = tuple[str, int]
"""A call with which a stage begins: the name of a unit, and which of its calls it is."""


@dataclass(slots=True)
class StagePlan:
    """The stages of a step, for batches of one form.

    Attributes:
        calls: The calls of units, in their order.
        stage_of: The stage of each call.
        sends: For each stage, the origins of the values that it sends to the next one.
        holders: For each parameter that is used, the stages that use it.
        specs: What is known of the values.
        replayed: For each call, the calls within it with outputs that are used outside.
        has_loss: Whether the step returns a loss to differentiate.
        draws: Whether it draws random numbers.
        writes_batch: Whether it writes tensors of its batch in place.
        kept: The names of attributes of modules that forward changes.
        stages: The number of stages.
    """

    calls: list[UnitCall]
    stage_of: list[int]
    sends: list[list[Origin]]
    holders: dict[str, set[int]]
    specs: dict[Origin, TensorSpec]
    replayed: list[list[InnerCall]]
    has_loss: bool
    draws: bool
    writes_batch: bool
    kept: list[str]
    stages: int

    def last_call(self, stage: int) -> int:
        """Return the number of a stage's last call."""
        return max(number for number, of_call in enumerate(self.stage_of) if of_call == stage)

    def describe(self) -> object:
        """Return what must be the same on all ranks."""
        return [call.unit for call in self.calls], self.stage_of, self.sends, self.has_loss


@dataclass(frozen=True, slots=True)
class CutRules:
    """Where stages may begin, and what forward may do.

    Attributes:
        stages: The number of stages.
        cuts: The modules with which stages begin, or ``None`` to balance them.
        starts: The calls with which stages begin, if the model is cut already.
        count_of: Returns the number of elements of a whole parameter by its name, the same on all ranks.
        accepts_statistics: Whether forward may write buffers, once for each micro-batch.
        is_split: Whether a batch may have several micro-batches, for each of which forward runs.
    """

    stages: int
    cuts: Sequence[str] | None
    starts: Sequence[Start] | None
    count_of: Callable[[str], int]
    accepts_statistics: bool = False
    is_split: bool = True


def make_plan(
    step: Callable[..., Any],
    model: nn.Module,
    batch: Any,
    *,
    rules: CutRules,
    shape_of: Callable[[str], torch.Size],
    device: torch.device,
) -> tuple[StagePlan, list[Start]]:
    """Run a step on stand-ins, and return its stages and the calls with which they begin.

    Args:
        step: The user's step.
        model: The plain model; parameters that this rank does not have may be empty.
        batch: A micro-batch.
        rules: Where stages may begin.
        shape_of: Returns the shape of a parameter by its name, before parts of it were freed.
        device: The device.

    Raises:
        ModelError: The model cannot be cut.
        ConfigError: The options do not fit the model.
        StepError: The step does not call a block that begins a stage, or reads parameters of other stages.
    """
    units, can_start = find_units(model, rules.cuts)
    with_numbers: set[type] = set()
    while True:
        own = own_batch(batch, clones=True)
        run = StageDryRun(model, own, units, shape_of, with_numbers, device)
        try:
            with run.recording():
                output = step(model, own)
            if rules.is_split:
                _check_parameters_kept(run)
            if rules.accepts_statistics:
                _check_statistics_of_blocks(run)
            else:
                _check_buffers(run)
            starts, stage_of = _find_stages(run, can_start, rules)
            return _plan_stages(run, output, stage_of, can_start, rules.stages), starts
        except NeedsNumbersError as error:
            call_last_hooks(error)
            with_numbers.add(error.kind)
        except RefusedError as refused:
            call_last_hooks(refused)
            raise cast("ModelError", refused.__cause__) from None
        finally:
            run.forget()


def _check_parameters_kept(run: StageDryRun) -> None:
    """Check that forward, and the step, write no parameter: it runs for each micro-batch, on its stage alone.

    Raises:
        ModelError: One is written, or replaced.
    """
    if not run.written_parameters:
        return
    name = run.written_parameters[0]
    owner = run.model.get_submodule(name.rpartition(".")[0])
    msg = (
        f"forward, or the step, writes the parameter {name!r} ({type(owner).__name__}), and on backend "
        "'pipeline' it runs for each micro-batch, on the ranks of its stage: an average would move as often, "
        "and other micro-batches are under way. Write it between steps, as in a callback's on_step_end, "
        "compute the changed weight anew in each forward pass (torch.nn.utils.parametrize), give the option "
        "microbatches=1, or take ddp, which runs the step once"
    )
    raise ModelError(msg)


def _check_buffers(run: StageDryRun) -> None:
    """Check that forward writes no buffer: it runs for each micro-batch.

    Raises:
        ModelError: It does, and the numbers would be others than those of one device.
    """
    if not run.written_buffers:
        return
    name = run.written_buffers[0]
    owner = run.model.get_submodule(name.rpartition(".")[0])
    msg = (
        f"the model's forward writes the buffer {name!r} ({type(owner).__name__}), and on backend 'pipeline' "
        "it runs for each micro-batch: statistics would be of these, and a count would be of all of them; "
        "write it after the step, or accept this: PipelineOptions(statistics='microbatch')"
    )
    raise ModelError(msg)


def _check_statistics_of_blocks(run: StageDryRun) -> None:
    """Check that forward writes buffers within blocks alone: each of those has a rank, whose values are kept.

    Raises:
        ModelError: Code between blocks writes one.
    """
    blocks = tuple(f"{name}." for name in run.units)
    name = next((name for name in run.written_buffers if not name.startswith(blocks)), None)
    if name is None:
        return
    owner = run.model.get_submodule(name.rpartition(".")[0])
    msg = (
        f"the model's forward writes the buffer {name!r} ({type(owner).__name__}) between its blocks, and on "
        "backend 'pipeline' only the rank of that stage would: checkpoints and other ranks would have the "
        "old values. Put the buffer, and what writes it, into a module that forward calls, or take ddp"
    )
    raise ModelError(msg)


def _find_stages(run: StageDryRun, can_start: set[str], rules: CutRules) -> tuple[list[Start], list[int]]:
    """Return the calls with which stages begin, and the stage of each call.

    Raises:
        ModelError: The model decides between its blocks by numbers that one stage has.
        ConfigError: There are fewer blocks than stages.
        StepError: The step does not call a block with which a stage begins.
    """
    _check_decisions(run)
    times: dict[str, int] = {}
    calls: list[Start] = []
    for call in run.calls:
        time = times[call.unit] = times.get(call.unit, -1) + 1
        calls.append((call.unit, time))
    if rules.starts is not None:
        starts = list(rules.starts)
    elif rules.cuts is not None:
        starts = [(name, 0) for name in rules.cuts]
    else:
        starts = _balanced_starts(run.units, calls, can_start, rules)
    missing = next((start for start in starts if start not in calls), None)
    if missing is not None:
        msg = (
            f"the step does not call {missing[0]!r}, with which a stage begins; the first step that runs "
            "must call all blocks, and the later ones in the same order"
        )
        raise StepError(msg)
    numbers = [calls.index(start) for start in starts]
    stage_of = [sum(call >= first for first in numbers) for call in range(len(calls))]
    return starts, stage_of


def _check_decisions(run: StageDryRun) -> None:
    """Check that all ranks can decide between blocks as one device does.

    Raises:
        ModelError: The model decides there by what a block returns, and calls another block after it.
    """
    for calls_before, origins in run.decisions:
        made_by = [call for origin in origins if (call := call_of(origin)) is not None]
        if made_by and calls_before < len(run.calls):
            unit = run.calls[min(made_by)].unit
            msg = (
                "backend 'pipeline' cannot cut the model: between its blocks it decides by the numbers "
                f"that {unit!r} returns (an if, item(), numpy() or nonzero()), which other stages do "
                "not have; put that into a block"
            )
            raise ModelError(msg)


def _balanced_starts(
    units: dict[str, nn.Module], calls: list[Start], can_start: set[str], rules: CutRules
) -> list[Start]:
    """Return the calls with which stages begin, so that the largest stage is as small as can be.

    By parameters, which are the same on all ranks whatever their batch: an embedding is looked up and counts
    nothing.

    Raises:
        ConfigError: There are fewer blocks than stages.
    """
    blocks = [number for number, (name, _) in enumerate(calls) if name in can_start]
    if len(blocks) < rules.stages:
        msg = (
            f"backend 'pipeline' has {rules.stages} stages, and the step calls {len(blocks)} blocks, of "
            "which each stage needs one; take fewer ranks for a model, or other cuts"
        )
        raise ConfigError(msg)
    costs = [_multiplied(units[name], name, rules) for name, _ in calls]
    # The calls before the second block belong to the first stage, and so on.
    bounds = [0, *blocks[1:], len(calls)]
    pieces = [float(sum(costs[first:end])) for first, end in pairwise(bounds)]
    return [calls[bounds[piece]] for piece in smallest_largest(pieces, rules.stages)]


def _multiplied(unit: nn.Module, name: str, rules: CutRules) -> int:
    """Return the number of parameters of a unit, without those of embeddings."""
    count = 0
    for prefix, module in unit.named_modules(prefix=name):
        if not isinstance(module, nn.Embedding):
            count += sum(rules.count_of(f"{prefix}.{n}") for n, _ in module.named_parameters(recurse=False))
    return count


# -- The plan of stages -----------------------------------------------------------------------------


def _plan_stages(
    run: StageDryRun, output: Any, stage_of: list[int], can_start: set[str], stages: int
) -> StagePlan:
    """Return what each stage has, and what it sends to the next one.

    Raises:
        ModelError: Stages need what they cannot be sent.
        StepError: The step reads the parameters of a stage in another one.
    """
    needs = _needs_of_stages(run, output, stage_of, stages)
    _check_random_numbers(needs)

    holders: dict[str, set[int]] = {}
    last_use: dict[Origin, int] = {}  # the last stage that needs a value of an earlier one
    for stage, origins in enumerate(needs):
        for origin in origins:
            call = call_of(origin)
            if origin[0] == "param":
                holders.setdefault(origin[1], set()).add(stage)
            elif call is not None and stage_of[call] < stage:
                last_use[origin] = max(stage, last_use.get(origin, 0))
    _check_inner_values(run, last_use, stage_of)
    _check_parameters(run, holders, stage_of, can_start)

    sends: list[list[Origin]] = []
    for stage in range(stages):
        crossing = [origin for origin, last in last_use.items() if stage_of[origin[1]] <= stage < last]
        sends.append(sorted(crossing, key=repr))
    specs, replayed = _specs_of(run.calls, set().union(*needs))
    loss = output.get("loss") if hasattr(output, "get") else output
    return StagePlan(
        calls=run.calls,
        stage_of=stage_of,
        sends=sends,
        holders=holders,
        specs=specs,
        replayed=replayed,
        has_loss=isinstance(loss, Tensor) and loss.requires_grad,
        draws=run.tracker.draws,
        writes_batch=run.writes_batch,
        kept=run.kept,
        stages=stages,
    )


def _needs_of_stages(run: StageDryRun, output: Any, stage_of: list[int], stages: int) -> list[set[Origin]]:
    """Return the origins of what each stage uses; the last one computes the output of the step."""
    needs = [set[Origin]() for _ in range(stages)]
    for call, stage in zip(run.calls, stage_of, strict=True):
        needs[stage] |= call.needs
    for leaf in tensors_of(output):
        needs[-1] |= run.tracker.resolve(set(run.origins_of(leaf)), [leaf])
    for _, origins in run.decisions:
        needs[-1] |= origins
    return needs


def _specs_of(
    calls: list[UnitCall], needed: set[Origin]
) -> tuple[dict[Origin, TensorSpec], list[list[InnerCall]]]:
    """Return what is known of the values of calls; and for each call, the inner ones that are needed."""
    specs: dict[Origin, TensorSpec] = {}
    replayed: list[list[InnerCall]] = [[] for _ in calls]
    for number, call in enumerate(calls):
        for index, spec in enumerate(call.output.specs):
            specs["out", number, index] = spec
        for inner in call.inner:
            origins = []
            for index, spec in enumerate(inner.output.specs):
                origin = ("inner", number, inner.name, inner.time, index)
                specs[origin] = spec
                origins.append(origin)
            if needed.intersection(origins):
                replayed[number].append(inner)
    return specs, replayed


def _check_random_numbers(needs: list[set[Origin]]) -> None:
    """Check that random numbers that are drawn between blocks are used in one stage.

    Raises:
        ModelError: Several would draw different ones.
    """
    used: set[Origin] = set()
    for origins in needs:
        random = {origin for origin in origins if origin[0] == "random"}
        if random & used:
            msg = (
                "backend 'pipeline' cannot cut the model: random numbers that are drawn between its blocks "
                "are used in several stages, which would draw different ones; put the dropout into a module "
                "of its block"
            )
            raise ModelError(msg)
        used |= random


def _check_inner_values(run: StageDryRun, last_use: dict[Origin, int], stage_of: list[int]) -> None:
    """Check that a hook can collect each value from within a unit that crosses a cut.

    Raises:
        ModelError: The module has no hook: the step finds the value elsewhere, as in an attribute.
    """
    for origin in sorted((origin for origin in last_use if origin[0] == "inner"), key=repr):
        unit = run.calls[origin[1]].unit
        module = run.units[unit].get_submodule(origin[2])
        # A hook may collect it where the step finds it; torch has no public list of a module's hooks.
        if not module._forward_hooks and not _global_forward_hooks:
            msg = (
                f"the step uses in stage {last_use[origin]} what {unit!r} of stage {stage_of[origin[1]]} "
                f"keeps of its {origin[2]!r}, for example as an attribute, which other stages do not have; "
                f"return it from {unit!r}, or collect it with register_forward_hook() of {origin[2]!r}"
            )
            raise ModelError(msg)


def _check_parameters(
    run: StageDryRun, holders: dict[str, set[int]], stage_of: list[int], can_start: set[str]
) -> None:
    """Check that a block's parameters are used in the stages that call it.

    Raises:
        StepError: The step reads them in another stage.
    """
    stages_of_unit: dict[str, set[int]] = {}
    for call, stage in zip(run.calls, stage_of, strict=True):
        stages_of_unit.setdefault(call.unit, set()).add(stage)
    for name, stages in sorted(holders.items()):  # sets differ between processes
        owner = next((unit for unit in can_start if name.startswith(f"{unit}.")), "")
        own = stages_of_unit.get(owner)
        if own and not stages <= own:
            msg = (
                f"the step reads the parameter {name!r} of stage {min(own)} in stage {max(stages)}, "
                "which does not have it; compute what needs it in its block, or let "
                "the optimizer do it (weight_decay=)"
            )
            raise StepError(msg)
