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

from tp_pipeline._options import V_SCHEDULES, ScheduleName, depth_of


class Work(NamedTuple):
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

    Example:
        >>> [rank_of_stage(s, 2, is_v=True) for s in range(4)]
        [0, 1, 1, 0]
    """
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if is_v and lap % 2 else place


class Span(NamedTuple):
    """A piece of work of a rank, with when it began and ended.

    Attributes:
        rank: The rank in the group.
        work: The work.
        begin: The time at which it began.
        end: The time at which it ended.
    """

    rank: int
    work: Work
    begin: float
    end: float


COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""About how long each kind of work takes: backward has two products for each one of forward."""


def timeline(order: Mapping[int, Sequence[Work]], last_stage: int) -> list[Span]:
    """Return when each rank would compute what, where sending takes no time, by `COSTS`.

    Args:
        order: The work of each rank.
        last_stage: The last stage.
    """
    left = {rank: [w for w in works if w.kind in COSTS] for rank, works in order.items()}
    ended: dict[Work, float] = {}
    clock = dict.fromkeys(left, 0.0)
    spans: list[Span] = []
    while any(left.values()):
        for rank, works in left.items():
            while works:
                kind, stage, part = work = works[0]
                needs = [Work("F", stage - 1, part)] if kind == "F" and stage else []
                if kind in "BI":
                    needs = [Work("F", stage, part)]
                    if stage < last_stage:
                        after = Work("I", stage + 1, part)
                        needs.append(after if after in ended else Work("B", stage + 1, part))
                if any(n not in ended for n in needs):
                    break
                begin = max([clock[rank], *(ended[n] for n in needs)])
                clock[rank] = ended[work] = begin + COSTS[kind]
                spans.append(Span(rank, work, begin, clock[rank]))
                works.pop(0)
    return spans


def idle_share(spans: Sequence[Span]) -> float:
    """Return which part of the time ranks compute nothing, between the first and the last work of all."""
    whole = max(s.end for s in spans) - min(s.begin for s in spans)
    ranks = len({s.rank for s in spans})
    return 1.0 - sum(s.end - s.begin for s in spans) / (ranks * whole)


def most_kept(order: Sequence[Work]) -> int:
    """Return the most micro-batches of stages that a rank keeps activations of at once."""
    kept = most = 0
    for work in order:
        kept += (work.kind == "F") - (work.kind in {"B", "W"})
        most = max(most, kept)
    return most


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
    found: list[tuple[float, float, ScheduleName]] = []
    for name in names:
        depth = depth_of(name)
        orders = Orders(name, ranks, depth, is_v=name in V_SCHEDULES)
        if orders.stages > blocks or not orders.is_made_of(parts):
            continue
        order = orders.learning(parts)
        idle = idle_share(timeline(order, orders.stages - 1))
        found.append((round(idle, 6), max(map(most_kept, order.values())) / depth, name))
    most = next((kept for _, kept, name in found if name == "1F1B"), ranks)
    fitting = [one for one in found if one[1] <= most] or [(0.0, 0.0, "1F1B")]
    idle, kept, name = min(fitting)
    why = f"idle {idle:.0%} of a step of {parts} micro-batches, with the activations of {kept:g} of them"
    return name, why


class Orders:
    """The orders of work of a group of ranks.

    Args:
        schedule: The name of the schedule, as torch has it.
        ranks: The number of ranks.
        depth: The number of stages of each rank.
        is_v: Whether stages go back over the ranks, as `PipelineOptions.is_v` says.
        is_early: Whether a receive begins before the work that comes ahead of it, so that its tensors travel
            meanwhile. That needs messages that are found by their tags, as gloo's are and NCCL's are not.
    """

    def __init__(self, schedule: str, ranks: int, depth: int, *, is_v: bool, is_early: bool = False) -> None:
        self.schedule, self.ranks, self.stages = schedule, ranks, ranks * depth
        self._is_v, self._depth, self._is_early = is_v, depth, is_early
        self.learning = lru_cache(maxsize=64)(self._learning)
        self.forwards = lru_cache(maxsize=64)(self._forwards)
        self.is_made_of = lru_cache(maxsize=64)(self._is_made_of)

    def rank_of(self, stage: int) -> int:
        """Return the rank in the group that has a stage."""
        return rank_of_stage(stage, self.ranks, is_v=self._is_v)

    def _learning(self, parts: int) -> dict[int, list[Work]]:
        """Return the work of each rank to learn from this many micro-batches.

        Where they are too few for the schedule, as in the last batch of an epoch, all go forward before the
        first goes back: the numbers are the same.
        """
        try:
            return self._with_exchange(self._of_torch(parts))
        except ValueError:
            there = [[s for s in range(self.stages) if self.rank_of(s) == r] for r in range(self.ranks)]
            kinds = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
            return self._with_exchange(
                {
                    r: [_Action(s, kinds[0], p) for s in own for p in range(parts)]
                    + [_Action(s, kinds[1], p) for s in reversed(own) for p in range(parts)]
                    for r, own in enumerate(there)
                }
            )

    def _forwards(self, parts: int) -> dict[int, list[Work]]:
        """Return the work of each rank to compute outputs alone."""
        forward = _ComputationType.FORWARD
        return self._with_exchange(
            {
                r: [
                    _Action(s, forward, p)
                    for s in range(self.stages)
                    if self.rank_of(s) == r
                    for p in range(parts)
                ]
                for r in range(self.ranks)
            }
        )

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
                f"batches on {self.ranks} ranks with {self._depth} stages each: {error}; give another "
                "number: options={'pipeline': {'microbatches': ...}}, and batches of at least as many samples"
            )
            raise ConfigError(msg) from error

    def _of_torch(self, parts: int) -> dict[int, list[Any]]:
        if self.schedule == "1F1B":
            # Not torch's description of it, which leaves the last rank's first forward out (2.13).
            return {rank: _one_forward_one_backward(rank, self.ranks, parts) for rank in range(self.ranks)}
        kind: Any = get_schedule_class(self.schedule)
        # What torch reads of its stages to order their work; its own ones need a process group.
        stages: Any = [
            SimpleNamespace(
                num_stages=self.stages,
                stage_index=s,
                group_size=self.ranks,
                group_rank=0,
                is_first=s == 0,
                is_last=s == self.stages - 1,
                submod=nn.Identity(),
            )
            for s in range(self.stages)
            if self.rank_of(s) == 0
        ]
        made = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], parts)
        return {rank: list(order) for rank, order in made.pipeline_order.items()}

    def _with_exchange(self, order: dict[int, list[Any]]) -> dict[int, list[Work]]:
        # A forward and a backward that a GPU may overlap run in turn, and what the first has made is sent at
        # once: after both, as torch sends it, other ranks wait twice as long.
        apart = {
            r: [one for a in actions for one in (a and a.sub_actions) or [a]] for r, actions in order.items()
        }
        computed = {r: [a for a in actions if a is None or a.is_compute_op] for r, actions in apart.items()}
        # Private to torch: it puts each receive where its send is, so that no two ranks wait for each other.
        whole = _add_send_recv(computed, stage_to_rank=self.rank_of, num_stages=self.stages)
        works = {r: [_work(a) for a in actions if a is not None] for r, actions in whole.items()}
        return {r: _early(order) for r, order in works.items()} if self._is_early else works


def _early(order: Sequence[Work]) -> list[Work]:
    """Return an order in which each receive begins before the computation that is ahead of it."""
    moved: list[Work] = []
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
    seen = dict.fromkeys(kinds, -1)
    order = []
    for kind in kinds:
        seen[kind] += 1
        order.append(_Action(rank, kind, seen[kind]))
    return order


def _work(action: Any) -> Work:
    return Work(action.computation_type.value, action.stage_index, action.microbatch_index)
