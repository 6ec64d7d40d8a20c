"""The memory that an allocator reserves on a rank that holds shards.

Blocks belong to the stream on which torch's ``fully_shard`` makes them, and no stream uses what another one
has freed::

    the current stream   shards, whole weights, activations, gradients, inputs of reductions
    copies               what weights are gathered into, and casts of shards
    reductions           their outputs, which are the gradients of shards

The order is the one of torch 2.13, ``_fsdp_param_group.py``.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tp_core._contracts._job import Footprint, Job
from tp_core._contracts._reserved import Replay, nbytes_of, updated
from tp_core._transfer import makes_other_parameters
from tp_core.device_types import memory_block
from tp_core.fully_sharded._options import FullyShardOptions, parameter_type, reduction_type
from tp_core.fully_sharded._units import find_units

_COPIES, _REDUCTIONS = 1, 2
_STEPS = 3


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """The bytes of a parameter.

    Attributes:
        name: Its name.
        whole: The whole one before it is sharded.
        gathered: The whole one in a step.
        shard: The shard that stays.
        sent: The shard as it is gathered.
        reduced: The input of its reduction; 0 where it is frozen.
    """

    name: str
    whole: int
    gathered: int
    shard: int
    sent: int
    reduced: int


class _Group:
    """Parameters that are gathered together, and the keys of their memory."""

    def __init__(self, name: str, pieces: list[ParameterBytes]) -> None:
        self.name, self.pieces = name, pieces
        self.names = {piece.name for piece in pieces if piece.reduced}
        self.output: list[Hashable] = []  # what they are gathered into
        self.whole: list[Hashable] = []
        self.gradients: dict[str, Hashable] = {}
        self.accumulated: set[str] = set()  # of batches before
        self.missing: set[str] = set()


def sharded_peak(
    job: Job, options: FullyShardOptions, footprint: Footprint, model: nn.Module, ranks: int, part: float
) -> int | None:
    """Return what is reserved on a rank; ``None`` if that is not known.

    Args:
        job: The job.
        options: The options, without "auto".
        footprint: The memory of training the whole model.
        model: The model.
        ranks: The number of ranks that hold it together.
        part: The activations, divided by those of the footprint.
    """
    allocator = job.new_allocator()
    if allocator is None or not footprint.trace:
        return None
    return _Rank(job, options, footprint, model, ranks, part, Replay(allocator)).run()


class _Rank:
    """A rank that trains, as its allocator sees it."""

    def __init__(
        self,
        job: Job,
        options: FullyShardOptions,
        footprint: Footprint,
        model: nn.Module,
        ranks: int,
        part: float,
        replay: Replay,
    ) -> None:
        self.job, self.options, self.footprint, self.model = job, options, footprint, model
        self.ranks, self.part, self.replay = ranks, part, replay
        self.rest, self.units = self._groups()
        self.of_parameter = {name: group for group in [self.rest, *self.units] for name in group.names}
        self.by_name = {unit.name: unit for unit in self.units}
        self.previous: list[Hashable] = []  # what the unit before was gathered into
        self.reducing: list[Hashable] = []  # the input of the reduction before
        self.shards_of_gradients: list[Hashable] = []
        self.keeps_whole = options.reshard_after_forward is False
        self.at_work = self.rest

    def run(self) -> int:
        """Return the most that is reserved in some steps."""
        job, replay = self.job, self.replay
        self._shard()
        trace = list(self.footprint.trace)
        if parameter_type(self.options, job) and self.footprint.lower_trace:
            trace = list(self.footprint.lower_trace)
        batch_sizes = [nbytes for what, _, nbytes, _ in trace if what == "batch"]
        first, later = updated(self.footprint)
        batch: list[Hashable] = []
        for step in range(_STEPS):
            for number in range(min(job.accumulate, 2)):
                following = replay.hold(batch_sizes)
                replay.drop(batch)
                batch = following
                if not number:
                    replay.drop(self.shards_of_gradients)
                    self.shards_of_gradients = []
                self._pass(trace, reduces=number == min(job.accumulate, 2) - 1)
            if self.options.offload:
                continue
            if step:
                self._update(later, is_first=False)
            else:
                self._update(first, is_first=True)
        return replay.allocator.peak

    def _groups(self) -> tuple[_Group, list[_Group]]:
        low, reduced = parameter_type(self.options, self.job), reduction_type(self.options, self.job)
        names = {id(p): name for name, p in self.model.named_parameters()}

        def group(name: str, module: nn.Module) -> _Group:
            pieces = []
            for parameter in module.parameters():
                path = names.pop(id(parameter), None)
                if path is None:
                    continue
                own = nbytes_of(self.job, parameter)
                size = own // max(1, parameter.numel())
                sent = size
                if low and parameter.is_floating_point():
                    sent = low.itemsize
                rows = parameter.shape[0] if parameter.dim() else 1
                numel = parameter.numel() // max(1, rows) * -(-rows // self.ranks)
                summed = reduced.itemsize if reduced else sent
                pieces.append(
                    ParameterBytes(
                        path,
                        whole=own,
                        gathered=numel * self.ranks * sent,
                        shard=numel * size,
                        sent=numel * sent,
                        reduced=numel * self.ranks * summed if parameter.requires_grad else 0,
                    )
                )
            return _Group(name, pieces)

        units = list(find_units(self.model, self.options.units).modules.items())
        inner = [group(name, module) for name, module in reversed(units)]
        return group("", self.model), inner[::-1]

    def _shard(self) -> None:
        """Hold the whole model, or a unit of it, until it is sharded."""
        replay, groups = self.replay, [*reversed(self.units), self.rest]
        device = self.job.devices[0]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        # Of a device that is not here it is not known, and CUDA's are the ones that change in place.
        is_here = accelerator is not None and accelerator.type == device.type
        is_moved = is_here and makes_other_parameters(device)
        whole: dict[str, list[Hashable]] = {}
        if is_moved:
            sizes = {piece.name: piece.whole for group in groups for piece in group.pieces}
            whole = {name: replay.hold([sizes[name]]) for name, _ in self.model.named_parameters()}
            replay.hold(nbytes_of(self.job, buffer) for buffer in self.model.buffers())
        for group in groups:
            if not is_moved:
                whole |= {piece.name: replay.hold([piece.whole]) for piece in group.pieces}
            if not self.options.offload:
                replay.hold(piece.shard for piece in group.pieces)
            for piece in group.pieces:
                replay.drop(whole[piece.name])
        if not is_moved:
            replay.hold(nbytes_of(self.job, buffer) for buffer in self.model.buffers())

    # -- A unit's turn ------------------------------------------------------------------------------

    def _gather(self, group: _Group) -> None:
        """Gather shards into one piece of memory."""
        if group.output or group.whole or not group.pieces:
            return
        sent = sum(piece.sent for piece in group.pieces)
        casts: list[Hashable] = []
        if parameter_type(self.options, self.job) or self.options.offload:
            casts = self.replay.hold([sent], stream=_COPIES)
        group.output = self.replay.hold([sent * self.ranks], stream=_COPIES)
        self.replay.drop(casts)

    def _wait(self, group: _Group, *, is_forward: bool) -> None:
        """Copy what was gathered to whole weights; in forward it stays until the next unit's turn."""
        if not group.output:
            return
        if is_forward:
            self.replay.drop(self.previous)
        group.whole = self.replay.hold(piece.gathered for piece in group.pieces)
        if is_forward:
            self.previous = group.output
        else:
            self.replay.drop(group.output)
        group.output = []

    def _reshard(self, group: _Group) -> None:
        self.replay.drop(group.whole)
        group.whole = []

    def _reduce(self, group: _Group) -> None:
        """Sum the gradients of a unit over ranks, and keep a shard of them."""
        self._reshard(group)
        if not group.names:
            return
        replay = self.replay
        replay.drop(self.reducing)
        total = sum(piece.reduced for piece in group.pieces)
        self.reducing = replay.hold([total])
        replay.drop(group.gradients.values())
        group.gradients.clear()
        shards = replay.hold([total // self.ranks], stream=_REDUCTIONS)
        own = sum(piece.shard for piece in group.pieces if piece.reduced)
        if own != total // self.ranks:  # in another dtype
            converted = replay.hold([own], stream=_REDUCTIONS)
            replay.drop(shards)
            shards = converted
        if self.options.offload:
            replay.drop(shards)
        else:
            self.shards_of_gradients += shards

    # -- A step -------------------------------------------------------------------------------------

    def _pass(self, trace: Sequence[Sequence[Any]], *, reduces: bool) -> None:
        """Follow the trace of a forward and a backward pass."""
        order = [name for what, _, _, name in trace if what == "gradient" and name in self.of_parameter]
        for group in [self.rest, *self.units]:
            group.missing = {name for name in order if name in group.names}
            group.accumulated = set(group.gradients)
        self.at_work = self.rest
        backward = False
        self._gather(self.rest)
        self._wait(self.rest, is_forward=True)

        def on_mark(what: str, name: str) -> None:
            nonlocal backward
            if what == "backward":
                backward = True
                self.replay.drop(self.previous)
                self.previous = []
                if self.units:
                    self._gather(self.units[-1])
                self._go_on(order)
            unit = self.by_name.get(name)
            if backward or unit is None:
                return
            if what == "begin":
                self._gather(unit)
                self._wait(unit, is_forward=True)
            elif not self.keeps_whole:
                self._reshard(unit)

        def on_gradient(name: str, key: Hashable) -> bool:
            group = self.of_parameter.get(name)
            if group is None:
                return False
            stays = name not in group.accumulated
            if stays:
                group.gradients[name] = key
            else:
                self.replay.drop([key])
            order.remove(name)
            group.missing.discard(name)
            if not group.missing and group is not self.rest:
                if reduces:
                    self._reduce(group)
                else:
                    self._reshard(group)
            self._go_on(order)
            return stays

        scaled = [
            (what, number, round(self.part * nbytes) if what == "value" else nbytes, name)
            for what, number, nbytes, name in trace
        ]
        self.replay.play(scaled, on_gradient, on_mark)
        if reduces:
            self._reduce(self.rest)
        else:
            self._reshard(self.rest)
        self.replay.drop(self.reducing)
        self.reducing = []

    def _go_on(self, order: list[str]) -> None:
        """Begin the turn of the unit with the next gradient, and gather the unit before it ahead."""
        group = self.of_parameter[order[0]] if order else self.rest
        if group is self.rest or group is self.at_work:
            return
        self.at_work = group
        self._gather(group)
        self._wait(group, is_forward=False)
        at = self.units.index(group)
        if at:
            self._gather(self.units[at - 1])

    def _update(self, events: Sequence[Sequence[Any]], *, is_first: bool) -> None:
        shards = [
            piece.shard for group in [*self.units, self.rest] for piece in group.pieces if piece.reduced
        ]
        if is_first and not events:
            self.replay.hold(nbytes for nbytes in shards for _ in range(2))  # assumed, as AdamW has
        scaled = [(what, number, -(-nbytes // self.ranks), name) for what, number, nbytes, name in events]
        self.replay.play(scaled, lambda *_: False)
        self.replay.drop(self.replay.hold([memory_block(self.job.devices[0].type)] * 2 * len(shards)))
