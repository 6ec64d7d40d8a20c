"""The memory that an allocator reserves on a rank with stages, by the traced step of the whole model.

The trace is cut where stages begin: in the forward pass by the modules of their units, in the backward pass
by the parameters whose gradients come. A rank plays its parts for each micro-batch, in the order of its work.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from tp_core.jobs import CachingAllocator, Footprint
from tp_core.plugins import Job
from tp_core.tensors import is_deferred

from tp_pipeline._schedule import StageWork

_STEPS = 2


@dataclass(slots=True)
class StageEvents:
    """The events of a stage: of its forward pass, and of its backward pass."""

    forward: list[Sequence[Any]] = field(default_factory=list)
    backward: list[Sequence[Any]] = field(default_factory=list)


def cut_trace(trace: Iterable[Sequence[Any]], parameters: Sequence[Iterable[str]]) -> list[StageEvents]:
    """Return the events of each stage.

    Args:
        trace: A trace of a footprint.
        parameters: The names of the parameters of each stage, in order.
    """
    of_parameter: dict[str, int] = {}
    of_module: dict[str, set[int]] = defaultdict(set)
    for number, names in enumerate(parameters):
        for name in names:
            of_parameter.setdefault(name, number)
            parts = name.split(".")
            for end in range(1, len(parts)):
                of_module[".".join(parts[:end])].add(number)
    stages = [StageEvents() for _ in parameters]
    current, is_backward = 0, False
    waiting: list[Sequence[Any]] = []
    for event in trace:
        what, _, _, name = event
        if what == "backward":
            is_backward = True
        elif what in {"begin", "end"}:
            own = of_module.get(name, set())
            if what == "begin" and not is_backward and len(own) == 1:
                current = max(current, *own)
        elif not is_backward:
            stages[current].forward.append(event)
        else:
            waiting.append(event)
            if what == "gradient" and name in of_parameter:
                stages[of_parameter[name]].backward += waiting
                waiting = []
    stages[0].backward += waiting
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The work of a rank on a batch.

    Attributes:
        order: It, in order.
        stages: The events of the rank's stages, by their numbers.
        passed: The bytes that each stage receives for a micro-batch.
        parts: The number of micro-batches.
        parameters: The parameters of the stages by name, with their bytes.
        shared: The number of ranks that hold equal parts of these together.
        communication: The bytes of what is exchanged after the batch.
    """

    order: Sequence[StageWork]
    stages: Mapping[int, StageEvents]
    passed: Mapping[int, float]
    parts: int
    parameters: Mapping[str, tuple[nn.Parameter, int]]
    shared: int
    communication: int


class _StageMemory:
    """A rank's memory as its allocator sees it.

    Args:
        allocator: The allocator.
        work: The rank's work.
    """

    def __init__(self, allocator: CachingAllocator, work: RankWork) -> None:
        self._allocator, self._work = allocator, work
        self._count = 0
        self._living: dict[tuple[int, int], dict[int, Hashable]] = defaultdict(dict)  # by stage and part
        self._received: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
        self._sent: list[Hashable] = []
        self._gradients: dict[str, Hashable] = {}

    def hold(self, sizes: Iterable[int]) -> list[Hashable]:
        """Allocate memory that stays; return its keys."""
        keys: list[Hashable] = []
        for nbytes in sizes:
            self._count += 1
            keys.append(self._count)
            self._allocator.allocate(self._count, nbytes)
        return keys

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Free memory."""
        for key in keys:
            self._allocator.free(key)

    def clear_gradients(self) -> None:
        """Free all gradients."""
        self.drop(self._gradients.values())
        self._gradients.clear()

    def follow(self) -> None:
        """Do the work of a batch."""
        for kind, number, part in self._work.order:
            place = (number, part)
            stage = self._work.stages[number]
            if kind in {"RECV_F", "RECV_B"}:
                self._received[place] += self.hold([round(self._work.passed[number])])
            elif kind == "F":
                self._play(stage.forward, place)
            elif kind == "B":
                self._play(stage.backward, place)
                self._end(place)
            elif kind == "I":
                self._play(stage.backward, place, keeps=True)
            elif kind == "W":
                self._play([event for event in stage.backward if event[0] == "free"], place)
                self._end(place)
            elif kind in {"SEND_F", "SEND_B"}:
                # What is sent stays until the end of the batch.
                self._sent += self.hold([round(self._work.passed[number])])
        self.drop(self._sent)
        self._sent.clear()

    def _play(self, events: Iterable[Sequence[Any]], place: tuple[int, int], *, keeps: bool = False) -> None:
        """Play events of a micro-batch; with ``keeps`` what the forward pass has made stays."""
        living = self._living[place]
        before = set(living)
        for what, number, nbytes, name in events:
            if what in {"value", "fixed"}:
                size = round(nbytes / self._work.parts) if what == "value" else nbytes
                (living[number],) = self.hold([size])
            elif what == "gradient" and number in living:
                key = living.pop(number)
                if name in self._gradients:  # to which it is added
                    self.drop([key])
                else:
                    self._gradients[name] = key
            elif what == "free" and number in living and not (keeps and number in before):
                self.drop([living.pop(number)])

    def _end(self, place: tuple[int, int]) -> None:
        self.drop(self._living.pop(place, {}).values())
        self.drop(self._received.pop(place, []))


def peak_of_rank(job: Job, footprint: Footprint, model: nn.Module, work: RankWork) -> int | None:
    """Return the most that is reserved on a rank in some steps; ``None`` if that is not known.

    Args:
        job: The job.
        footprint: The memory of training the whole model with the rank's batch.
        model: The model, whose weights are there until the first step.
        work: The rank's work.
    """
    allocator = job.new_allocator()
    if allocator is None or not footprint.trace:
        return None
    memory, own, shared = _StageMemory(allocator, work), work.parameters, work.shared
    sizes = {id(p): nbytes for p, nbytes in own.values()}
    scale = sum(sizes.values()) / max(1, sum(p.nbytes for p, _ in own.values()))
    elsewhere: list[Hashable] = []
    for parameter in model.parameters():
        if id(parameter) in sizes:
            memory.hold([sizes[id(parameter)] // shared])
        elif not is_deferred(parameter):
            elsewhere += memory.hold([round(parameter.nbytes * scale)])
    trained = [sizes[id(p)] // shared for p, _ in own.values() if p.requires_grad]
    batch_sizes = [nbytes for what, _, nbytes, _ in footprint.trace if what == "batch"]
    state = footprint.optimizer_nbytes / max(1, footprint.gradients)
    updated = footprint.update / max(1, footprint.gradients)
    batch: list[Hashable] = []
    for step in range(_STEPS):
        for number in range(min(job.accumulate, 2)):
            following = memory.hold(batch_sizes)
            memory.drop(batch)
            batch = following
            if not number:
                memory.clear_gradients()
            memory.drop(elsewhere)
            elsewhere = []
            memory.follow()
        memory.drop(memory.hold([work.communication]))
        if not step:
            for nbytes in trained:
                memory.hold(_multiples(state, nbytes))
        if updated >= 1:
            temporary = [piece for nbytes in trained for piece in _multiples(updated, nbytes)]
        else:
            temporary = [max(trained, default=0)]
        memory.drop(memory.hold(temporary))
    return allocator.peak


def _multiples(times: float, nbytes: int) -> list[int]:
    """Return ``times`` as many bytes in pieces of so many, and the rest."""
    pieces = [nbytes] * int(times)
    return [*pieces, round((times - int(times)) * nbytes)]
