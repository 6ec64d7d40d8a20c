"""The order of a rank's work: torch's schedules, and forwards alone where nothing is learned."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _add_send_recv,
    _ComputationType,
    get_schedule_class,
)
from tp_core.errors import ConfigError

from tp_pipeline._pipeline_options import V_SCHEDULES, ScheduleName, default_depth


class StageWork(NamedTuple):
    """A piece of work of a rank.

    Attributes:
        kind: "F" forward, "B" backward, "I" the gradients of inputs alone, "W" those of weights after it;
            "SEND_F", "RECV_F" outputs to the next stage, "SEND_B", "RECV_B" gradients to the one before.
        stage: The stage.
        part: The micro-batch.
    """

    kind: str
    stage: int
    part: int


def rank_of_stage(stage: int, ranks: int, *, is_v: bool) -> int:
    """Return the rank that has a stage.

    Args:
        stage: The stage.
        ranks: The number of ranks.
        is_v: Whether every second lap of stages runs back over the ranks.

    Example:
        >>> [rank_of_stage(s, 2, is_v=True) for s in range(4)]
        [0, 1, 1, 0]
    """
    lap, place = divmod(stage, ranks)
    if is_v and lap % 2:
        return ranks - 1 - place
    return place


class Span(NamedTuple):
    """A piece of work of a rank, with when it began and ended.

    Attributes:
        rank: The rank in the group.
        work: The work.
        begin: The time at which it began.
        end: The time at which it ended.
    """

    rank: int
    work: StageWork
    begin: float
    end: float


COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""About how long each kind of work takes: backward has two products for each one of forward."""


def timeline(order: Mapping[int, Sequence[StageWork]], last_stage: int) -> list[Span]:
    """Return when each rank would compute what, where sending takes no time, by `COSTS`.

    Args:
        order: The work of each rank.
        last_stage: The last stage.
    """
    left = {rank: [w for w in works if w.kind in COSTS] for rank, works in order.items()}
    ended: dict[StageWork, float] = {}
    clock = dict.fromkeys(left, 0.0)
    spans: list[Span] = []
    while any(left.values()):
        for rank, works in left.items():
            while works:
                work = works[0]
                inputs = _inputs_of(work, last_stage, ended)
                if any(needed not in ended for needed in inputs):
                    break
                begin = max([clock[rank], *(ended[needed] for needed in inputs)])
                end = begin + COSTS[work.kind]
                clock[rank] = ended[work] = end
                spans.append(Span(rank, work, begin, end))
                works.pop(0)
    return spans


def _inputs_of(work: StageWork, last_stage: int, ended: Mapping[StageWork, float]) -> list[StageWork]:
    """Return the work that must have ended before another one begins."""
    kind, stage, part = work
    if kind == "F" and stage:
        return [StageWork("F", stage - 1, part)]
    if kind not in {"B", "I"}:
        return []
    inputs = [StageWork("F", stage, part)]
    if stage < last_stage:
        # The next stage has the gradients of its inputs from either kind of backward.
        inputs_alone = StageWork("I", stage + 1, part)
        if inputs_alone in ended:
            backward = inputs_alone
        else:
            backward = StageWork("B", stage + 1, part)
        inputs.append(backward)
    return inputs


def idle_share(spans: Sequence[Span]) -> float:
    """Return the share of time in which ranks compute nothing, between the first and the last work of all."""
    duration = max(s.end for s in spans) - min(s.begin for s in spans)
    ranks = len({s.rank for s in spans})
    return 1.0 - sum(s.end - s.begin for s in spans) / (ranks * duration)


def most_kept(order: Sequence[StageWork]) -> int:
    """Return the most micro-batches of stages that a rank keeps activations of at once."""
    kept = most = 0
    for work in order:
        kept += (work.kind == "F") - (work.kind in {"B", "W"})
        most = max(most, kept)
    return most


class _ScheduleCost(NamedTuple):
    """A schedule to choose from; the least one is the best.

    Attributes:
        idle: The share of time in which ranks compute nothing.
        kept: The most micro-batches of whole ranks that a rank keeps activations of.
        name: The name.
    """

    idle: float
    kept: float
    name: ScheduleName


def choose_schedule(
    names: Sequence[ScheduleName], ranks: int, parts: int, blocks: int
) -> tuple[ScheduleName, str]:
    """Return the schedule of least idle time that keeps no more activations than 1F1B, and why.

    Args:
        names: The schedules.
        ranks: The number of ranks.
        parts: The number of micro-batches.
        blocks: The number of blocks, of which each stage needs one.
    """
    candidates: list[_ScheduleCost] = []
    most: float = ranks
    for name in names:
        orders = Orders(name, ranks)
        if orders.stages > blocks or not orders.is_made_of(parts):
            continue
        order = orders.learning(parts)
        idle = idle_share(timeline(order, orders.stages - 1))
        kept = max(map(most_kept, order.values())) / orders.depth
        candidates.append(_ScheduleCost(round(idle, 6), kept, name))
        if name == "1F1B":
            most = kept
    fitting = [candidate for candidate in candidates if candidate.kept <= most]
    best = min(fitting, default=_ScheduleCost(0.0, 0.0, "1F1B"))
    why = f"idle {best.idle:.0%} of a step of {parts} micro-batches, with the activations of {best.kept:g}"
    return best.name, f"{why} of them"


class Orders:
    """The orders of work of a group of ranks.

    Args:
        schedule: The name of the schedule, as torch has it.
        ranks: The number of ranks.
        depth: The number of stages of each rank; 0 for the schedule's default.
        is_early: Whether a receive begins before the work that comes ahead of it, so that its tensors travel
            during that. It needs messages that are matched by their tags, as gloo's are and NCCL's are not.

    Attributes:
        stages: The number of all stages.
    """

    def __init__(self, schedule: str, ranks: int, depth: int = 0, *, is_early: bool = False) -> None:
        self.schedule, self.ranks = schedule, ranks
        self.depth = depth or default_depth(schedule)
        self.stages = ranks * self.depth
        self._is_v = schedule in V_SCHEDULES
        self._is_early = is_early
        # torch takes long for a large order, and each batch asks for one.
        self.learning = lru_cache(maxsize=64)(self._learning)
        self.forwards = lru_cache(maxsize=64)(self._forwards)
        self.is_made_of = lru_cache(maxsize=64)(self._is_made_of)

    def rank_of(self, stage: int) -> int:
        """Return the rank in the group that has a stage."""
        return rank_of_stage(stage, self.ranks, is_v=self._is_v)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def _learning(self, parts: int) -> dict[int, list[StageWork]]:
        """Return the work of each rank to learn from this many micro-batches.

        Where they are too few for the schedule, as in the last batch of an epoch, all go forward before the
        first goes back: the numbers are the same.
        """
        try:
            return self._with_exchange(self._of_torch(parts))
        except ValueError:
            pass
        order: dict[int, list[Any]] = {}
        for rank in range(self.ranks):
            stages = self.stages_of(rank)
            order[rank] = _actions(_ComputationType.FORWARD, stages, parts)
            order[rank] += _actions(_ComputationType.FULL_BACKWARD, stages[::-1], parts)
        return self._with_exchange(order)

    def _forwards(self, parts: int) -> dict[int, list[StageWork]]:
        """Return the work of each rank to compute outputs alone."""
        order = {}
        for rank in range(self.ranks):
            order[rank] = _actions(_ComputationType.FORWARD, self.stages_of(rank), parts)
        return self._with_exchange(order)

    def _is_made_of(self, parts: int) -> bool:
        """Return whether the schedule can be made of this many micro-batches."""
        try:
            self._of_torch(parts)
        except ValueError:
            return False
        return True

    def check(self, parts: int) -> None:
        """Check that the schedule can be made of this many micro-batches.

        Raises:
            ConfigError: It cannot; the message is torch's.
        """
        try:
            self._of_torch(parts)
        except ValueError as error:
            msg = (
                f"the schedule {self.schedule!r} of backend 'pipeline' cannot be made of {parts} micro-"
                f"batches on {self.ranks} ranks with {self.depth} stages each: {error}; give another "
                "number: options={'pipeline': {'microbatches': ...}}, and batches of at least as many samples"
            )
            raise ConfigError(msg) from error

    def _of_torch(self, parts: int) -> dict[int, list[Any]]:
        if self.schedule == "1F1B":
            # Not torch's description of it, which leaves the last rank's first forward out (2.13).
            return {rank: _one_forward_one_backward(rank, self.ranks, parts) for rank in range(self.ranks)}
        kind: Any = get_schedule_class(self.schedule)
        # What torch reads of its stages to order their work; its own ones need a process group.
        stages: list[Any] = []
        for stage in self.stages_of(0):
            described = SimpleNamespace(
                num_stages=self.stages,
                stage_index=stage,
                group_size=self.ranks,
                group_rank=0,
                is_first=stage == 0,
                is_last=stage == self.stages - 1,
                submod=nn.Identity(),
            )
            stages.append(described)
        if issubclass(kind, PipelineScheduleMulti):
            own = stages
        else:
            own = stages[0]
        schedule = kind(own, parts)
        return {rank: list(order) for rank, order in schedule.pipeline_order.items()}

    def _with_exchange(self, order: dict[int, list[Any]]) -> dict[int, list[StageWork]]:
        """Return the work of each rank, with sends and receives between the computations."""
        computed: dict[int, list[Any]] = {}
        for rank, actions in order.items():
            computed[rank] = []
            for action in actions:
                # A forward and a backward that a GPU may overlap run in turn, and what the first has made is
                # sent at once: after both, as torch sends it, other ranks wait twice as long.
                separate = [action]
                if action is not None and action.sub_actions:
                    separate = action.sub_actions
                computed[rank] += [work for work in separate if work is None or work.is_compute_op]
        # Private to torch: it puts each receive where its send is, so that no two ranks wait for each other.
        exchanged = _add_send_recv(computed, stage_to_rank=self.rank_of, num_stages=self.stages)
        works = {}
        for rank, actions in exchanged.items():
            works[rank] = [_work_of(action) for action in actions if action is not None]
            if self._is_early:
                works[rank] = _receive_early(works[rank])
        return works


def _actions(kind: Any, stages: Sequence[int], parts: int) -> list[Any]:
    """Return the actions of torch for all micro-batches of each stage."""
    return [_Action(stage, kind, part) for stage in stages for part in range(parts)]


def _receive_early(order: Sequence[StageWork]) -> list[StageWork]:
    """Return an order in which each receive begins before the computation that is ahead of it."""
    moved: list[StageWork] = []
    for work in order:
        place = len(moved)
        if work.kind.startswith("RECV"):
            while place and moved[place - 1].kind not in COSTS:
                place -= 1
            place = max(0, place - 1)
        moved.insert(place, work)
    return moved


def _one_forward_one_backward(rank: int, ranks: int, parts: int) -> list[Any]:
    """Return a rank's work: as many forwards as ranks follow, then one of each in turn.

    Source: Narayanan et al., "PipeDream: generalized pipeline parallelism", 2019, section 3.2.
    """
    ahead = min(parts, ranks - 1 - rank)
    kinds = [_ComputationType.FORWARD] * ahead
    kinds += [_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD] * (parts - ahead)
    kinds += [_ComputationType.FULL_BACKWARD] * ahead
    last_part = dict.fromkeys(kinds, -1)
    order = []
    for kind in kinds:
        last_part[kind] += 1
        order.append(_Action(rank, kind, last_part[kind]))
    return order


def _work_of(action: Any) -> StageWork:
    return StageWork(action.computation_type.value, action.stage_index, action.microbatch_index)
