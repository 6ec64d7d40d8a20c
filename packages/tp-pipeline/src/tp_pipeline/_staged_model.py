"""A model in stages: which ranks have which of its parameters and buffers, and how they are put together.

::

    built               every rank has all, or what its stages seem to need of a model without memory
    first step          a dry run shows which stages use which parameters, and the model is cut
    from then on        a rank has the parameters of its stages; the others are empty
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from tp_core import tree_leaves, tree_map
from tp_core.data import step_identity
from tp_core.errors import DisagreementError, ModelError, StepError
from tp_core.modules import has_users_hooks
from tp_core.output import get_logger
from tp_core.plugins import Session
from tp_core.state import load_whole_state, plain_state
from tp_core.tensors import TensorSlice, initial_value, is_deferred, materialize

from tp_pipeline._row_shards import RowShards, can_be_sharded
from tp_pipeline._schedule import Orders
from tp_pipeline._stage_agreement import gather_or_raise
from tp_pipeline._stage_dry_run import TensorSpec
from tp_pipeline._stage_memory import stages_by_order
from tp_pipeline._stage_plan import CutRules, StagePlan, Start, make_plan
from tp_pipeline._stage_units import find_units, swapped
from tp_pipeline._stand_in import StandIn
from tp_pipeline._tensor_pieces import TensorPieces, gather_pieces

log = get_logger("tp_pipeline")

_MOST_NAMED = 3  # parameters in a message

ParameterStates = Mapping[Tensor, dict[str, Any]]
"""What an optimizer, or something else, keeps of parameters, by name."""


@dataclass(frozen=True, slots=True)
class PipelineRanks:
    """The ranks that hold a model together with this one.

    ::

        ranks       0 1   2 3     of one model: two stages, each of two ranks that split its tensors
        places      0 0   1 1     the pipelines are 0, 2 and 1, 3

    Attributes:
        group: The pipeline of this rank, with one rank for each place.
        size: The number of places.
        place: The place of this rank.
        model_group: All ranks that hold the model; it is ``group`` where tensors are whole.
        places: The place of each rank of ``model_group``.
        host_group: The ranks of ``model_group``, for what the host has: its collectives wait for no device.
        device: The device of this rank.
        sample_group: The ranks that compute slices of the same sequences; ``None`` for all, or if it is one.
        sample_size: Their number.
    """

    group: ProcessGroup
    size: int
    place: int
    model_group: ProcessGroup
    places: Sequence[int]
    host_group: ProcessGroup
    device: torch.device
    sample_group: ProcessGroup | None = None
    sample_size: int = 1


@dataclass(slots=True)
class Placement:
    """Where a parameter or buffer is.

    Attributes:
        name: Its name in the model; of a tied parameter, the first one.
        shape: Its shape before the model was cut.
        places: The places of the pipeline that have it, in order. The first one sends it to others.
        is_buffer: Whether it is a buffer. Each rank keeps its memory, and its value is right at its places.
        is_sharded: Whether data-parallel ranks have some of its rows each, between batches.
        pieces: The pieces that ranks have of it where another session splits tensors.
        stand_in: What takes its place in steps of a rank that does not have it.
    """

    name: str
    shape: torch.Size
    places: list[int]
    is_buffer: bool = False
    is_sharded: bool = False
    pieces: TensorPieces | None = None
    stand_in: nn.Parameter | None = None

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the whole tensor, also where another session splits it."""
        if self.pieces is None:
            return self.shape
        return self.pieces.shape


_ENOUGH_VALUES = 3
"""After so many values with the same plan, other values of the same types are taken to have it, too."""
_MOST_PLANS = 64
"""Plans that are kept, for values that have different ones."""


@dataclass(slots=True)
class _PlanOfTypes:
    """A plan that several values beside tensors have had; ``seen`` counts them, -inf if plans differ."""

    plan: StagePlan
    seen: float = 0


class StagedModel:
    """A model that a group of ranks holds in stages.

    Args:
        model: The plain model.
        cuts: The modules with which stages begin; ``None`` to balance them.
        orders: The orders of work, which know the rank of a stage.
        ranks: The ranks that hold the model.
        rows: The rows of parameters that this rank has, where data-parallel ranks shard them.
        inner: The session that has split the model's tensors over ranks, if there is one.
        accepts_statistics: Whether forward may write buffers, once for each micro-batch.
        is_split: Whether a batch may have several micro-batches.

    Attributes:
        model: The plain model.
        units: The units by name.
        placements: Where each parameter is, and each buffer of a unit from the first step on, by name. All
            names of a tied parameter have one placement.
        is_agreed: Whether data-parallel ranks have the same parameters in their stages.
        is_cut: Whether ranks have the parameters of their stages alone.
        compiled: The compiled forwards of units, by name.

    Raises:
        ModelError: The model has no blocks to cut between.
        ConfigError: A cut by hand is no module of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[str] | None,
        orders: Orders,
        ranks: PipelineRanks,
        *,
        rows: RowShards | None = None,
        inner: Session | None = None,
        accepts_statistics: bool = False,
        is_split: bool = True,
    ) -> None:
        self.model = model
        self._accepts_statistics, self._is_split = accepts_statistics, is_split
        self.units, _ = find_units(model, cuts)
        self.compiled: dict[str, nn.Module] = {}
        self._cuts, self._orders, self._ranks = cuts, orders, ranks
        self._rows, self._inner = rows, inner

        # What the dry runs of steps have shown: the plans by the form of a micro-batch, the calls with which
        # stages begin, and the places with stages that use each parameter.
        self._plans: dict[tuple[object, ...], StagePlan] = {}
        self._plans_by_type: dict[object, _PlanOfTypes] = {}
        self._starts: list[Start] | None = None
        self._used: dict[str, set[int]] = {}
        self._warned: set[str] = set()  # attributes of modules that were warned of
        self.is_agreed = False
        self.is_cut = False

        self.placements: dict[str, Placement] = {}
        by_parameter: dict[nn.Parameter, Placement] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter not in by_parameter:
                by_parameter[parameter] = Placement(name, parameter.shape, list(range(ranks.size)))
            self.placements[name] = by_parameter[parameter]
        self._names: dict[Tensor, str] = {}
        self._index_tensors()

    def _index_tensors(self) -> None:
        """Note the name of each tensor, for functions that are given tensors, as optimizers' state is."""
        tensors: list[tuple[str, Tensor]] = [*self.model.named_parameters()]
        tensors += self.model.named_buffers(remove_duplicate=False)
        self._names = {tensor: name for name, tensor in tensors if name in self.placements}

    def placement_of(self, tensor: Tensor) -> Placement | None:
        """Return where a tensor is; ``None`` for one that no stage has for itself."""
        name = self._names.get(tensor)
        if name is None:
            return None
        return self.placements[name]

    def has(self, name: str) -> bool:
        """Return whether this rank has a parameter."""
        return self._ranks.place in self.placements[name].places

    def is_everywhere(self, placement: Placement) -> bool:
        """Return whether all places have a tensor."""
        return len(placement.places) == self._ranks.size

    # -- built without memory -----------------------------------------------------------------

    def materialize(self, *, is_first: bool) -> None:
        """Allocate what was built without memory, on the ranks whose stages seem to need it.

        The stages follow from the order of modules. The first step sends what it uses elsewhere.

        Args:
            is_first: Whether this is the first of all ranks. It alone computes initial values: what ranks
                draw differs where their seeds do.

        Collective: a broadcast of each parameter that some ranks do not need. The others are not sent yet,
        like tensors that were built with memory.
        """
        self._place_by_order()
        device = self._ranks.device

        def value_of(tensor: Tensor) -> Tensor:
            if is_first:
                value = initial_value(tensor).to(device).contiguous()
            else:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            placement = self.placement_of(tensor)
            if placement is None or self.is_everywhere(placement):
                return value
            dist.broadcast(value, src=0)
            if self._ranks.place in placement.places:
                return value
            return _without_rows(value)

        materialize(self.model, value_of)

    def _place_by_order(self) -> None:
        """Place the parameters without memory on the ranks of the stages that the order of modules makes."""
        count = self._orders.stages
        if self._cuts is None and len(find_units(self.model, None)[1]) < count:
            return  # the first step refuses the model
        places: dict[str, set[int]] = {}
        for number, stage in enumerate(stages_by_order(self.model, count, self._cuts)):
            for name, parameter in stage.parameters.items():
                if is_deferred(parameter):
                    first_name = self.placements[name].name
                    places.setdefault(first_name, set()).add(self._orders.rank_of(number))
        for name, where in places.items():
            self.placements[name].places = sorted(where)

    def share_initial(self, groups: Sequence[ProcessGroup | None]) -> None:
        """Take the values of the first rank of each group, in turn; ``None`` stands for all ranks.

        Collectives: a broadcast of each tensor that all ranks have.
        """
        self._index_tensors()  # the model may have been moved
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                placement = self.placement_of(tensor)
                if placement is None or self.is_everywhere(placement):
                    for group in groups:
                        dist.broadcast(tensor.data, group_src=0, group=group)

    def find_pieces(self) -> None:
        """Learn which pieces of split tensors the ranks have.

        Collective: an all-gather over the ranks that hold the model.
        """
        if self._inner is not None:
            pieces = gather_pieces(self.model, self._inner, self._ranks.model_group)
            for name, of_ranks in pieces.items():
                self.placements[name].pieces = of_ranks

    # -- plans --------------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        """Whether a step has shown with which calls stages begin."""
        return self._starts is not None

    def plans_of(self, step: Callable[..., Any], parts: Sequence[Any]) -> list[StagePlan]:
        """Return the plan of each micro-batch; a form that is new is run on stand-ins.

        Raises:
            TpError: As `make_plan` says, on all ranks that hold the model.

        Collectives: for each new form, an all-gather over the ranks that hold the model. Where ranks compute
        slices of the same sequences, an all-reduce over these.
        """
        trained = tuple(p.requires_grad for p in self.model.parameters())
        modes = (step_identity(step, unwraps=True), trained, *_modes(self.model, self._ranks.device))
        forms = [(*modes, *_form_of(part)) for part in parts]
        plans = [self._known_plan(form) for form in forms]
        is_new = [plans[i] is None and form not in forms[:i] for i, form in enumerate(forms)]
        if self._ranks.sample_size > 1:
            # Ranks with other slices exchange some of them, also on stand-ins: all run if one does.
            flags = torch.tensor(is_new, dtype=torch.float32, device=self._ranks.device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._ranks.sample_group)
            is_new = [bool(flag) for flag in flags.tolist()]
        for form, part, makes in zip(forms, parts, is_new, strict=True):
            if makes:
                self._keep_plan(form, self._make_plan(step, part))
        if self._is_split:
            self._warn_of_hooks()
        return [cast("StagePlan", self._known_plan(form)) for form in forms]

    def _known_plan(self, form: tuple[object, ...]) -> StagePlan | None:
        """Return the plan for a form, if there is one; its last entry is the values beside tensors."""
        of_types = self._plans_by_type.get(form[:-1])
        if of_types is not None and of_types.seen >= _ENOUGH_VALUES:
            return of_types.plan
        return self._plans.get(form)

    def _keep_plan(self, form: tuple[object, ...], plan: StagePlan) -> None:
        """Keep a plan by its form; by types alone once several values have had the same one.

        Batches have the names or numbers of their samples, and each would be planned anew. If a later value
        leads to other blocks after all, the run of the step notices.
        """
        self._plans[form] = plan
        if not form[-1]:
            return
        of_types = self._plans_by_type.setdefault(form[:-1], _PlanOfTypes(plan))
        if of_types.plan == plan:
            of_types.seen += 1
        else:
            of_types.seen = -math.inf
        if of_types.seen >= _ENOUGH_VALUES:
            self._plans = {old: kept for old, kept in self._plans.items() if old[:-1] != form[:-1]}
        elif len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]

    def _make_plan(self, step: Callable[..., Any], part: Any) -> StagePlan:
        """Run the step on stand-ins.

        Raises:
            TpError: As `make_plan` says, on all ranks that hold the model.

        Collective: an all-gather over the ranks that hold the model.
        """
        plan, starts, failure = None, None, None
        try:
            if not self._accepts_statistics:
                _check_norms(self.model)
            plan, starts = make_plan(
                step,
                self.model,
                part,
                rules=CutRules(
                    stages=self._orders.stages,
                    cuts=self._cuts,
                    starts=self._starts,
                    count_of=lambda name: self.placements[name].whole_shape.numel(),
                    accepts_statistics=self._accepts_statistics,
                    is_split=self._is_split,
                ),
                shape_of=lambda name: self.placements[name].shape,
                device=self._ranks.device,
            )
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            failure = error
        own = None if plan is None else plan.describe()
        described = self.gather(own, failure)
        if plan is None or any(description != described[0] for description in described):
            msg = (
                "the ranks that hold a model together find different stages in the same step; give them the "
                "same model, step and batch"
            )
            raise DisagreementError(msg)
        if not self._accepts_statistics:
            self._warn_kept(plan)
        if self._starts is None:
            self._starts = starts
            self._place_buffers(plan)
        for name, stages in plan.holders.items():
            places = {self._orders.rank_of(stage) for stage in stages}
            self._used.setdefault(name, set()).update(places)
            if self.is_cut and not places <= set(self.placements[name].places):
                msg = (
                    f"the step uses the parameter {name!r} in another stage than the first step did, which "
                    "has given it to that one alone; let the first step use the model as the later ones do"
                )
                raise StepError(msg)
        return plan

    def _warn_kept(self, plan: StagePlan) -> None:
        """Warn of what forward keeps on modules, once for each attribute."""
        names = [name for name in plan.kept if name not in self._warned]
        if names:
            self._warned.update(names)
            log.warning(
                "forward sets the module attributes %s. Backend 'pipeline' runs forward once for each "
                "micro-batch, and only on the ranks of its stage: a hidden state is that of the previous "
                "micro-batch, a counter counts micro-batches, and other ranks have neither. Return such "
                "values from forward, take a backend that runs forward once (ddp, fsdp), or accept this: "
                "PipelineOptions(statistics='microbatch')",
                ", ".join(map(repr, names)),
            )

    def _warn_of_hooks(self) -> None:
        """Warn of hooks that see the gradients of micro-batches, once for each parameter."""
        if dist.get_rank():
            return  # all ranks have the same
        names = []
        for name, parameter in self.model.named_parameters():
            if name not in self._warned and has_users_hooks(parameter):
                names.append(name)
        if names:
            self._warned.update(names)
            log.warning(
                "the hooks on the gradients of %s see those of each micro-batch, on backend 'pipeline': what "
                "is linear, a mask or a factor, is right; a clamp, a norm or noise is of the micro-batch "
                "alone. Change gradients in a callback's on_optimizer_step, which sees the whole batch's, or "
                "give the option microbatches=1",
                ", ".join(map(repr, names[:_MOST_NAMED])) + ", ..." * (len(names) > _MOST_NAMED),
            )

    def _place_buffers(self, plan: StagePlan) -> None:
        """Place the buffers of each unit on the rank of its last call; those of no call on the first."""
        place_of = {}
        for call, stage in zip(plan.calls, plan.stage_of, strict=True):
            place_of[call.unit] = self._orders.rank_of(stage)
        for unit_name, unit in self.units.items():
            for inner_name, buffer in unit.named_buffers():
                name = f"{unit_name}.{inner_name}"
                places = [place_of.get(unit_name, 0)]
                self.placements[name] = Placement(name, buffer.shape, places, is_buffer=True)
        self._index_tensors()

    def gather(self, value: Any, failure: Exception | None) -> list[Any]:
        """Return the value of each rank that holds the model, unless one has failed.

        Raises:
            Exception: A rank has failed: its error, on all of them.

        Collective: an all-gather over the ranks that hold the model.
        """
        return gather_or_raise(value, failure, group=self._ranks.host_group)

    def agree(self, failure: Exception | None, group: ProcessGroup) -> None:
        """Take what the stages of any data-parallel rank use as used: their steps may call other modules.

        Args:
            failure: The error that this rank had when it planned its batch, or ``None``.
            group: The data-parallel ranks, for what the host has.

        Raises:
            Exception: A data-parallel rank has failed: its error, on all of them.

        Collective: an all-gather over the data-parallel ranks.
        """
        for used in gather_or_raise(self._used, failure, group=group):
            for name, places in used.items():
                self._used.setdefault(name, set()).update(places)
        self.is_agreed = True

    # -- the cut ------------------------------------------------------------------------------

    def cut(self, states: Sequence[ParameterStates]) -> None:
        """Free the parameters of other ranks' stages. What no stage uses stays on all.

        Args:
            states: What optimizers and others keep of parameters, which is freed, too.

        Collectives: a broadcast of each parameter that is needed elsewhere than it is, and of what is kept of
        it; an all-gather if there are some.
        """
        everywhere = set(range(self._ranks.size))
        places = {}
        for name, _ in self.model.named_parameters():
            places[name] = sorted(self._used.get(name, everywhere))
        self._send_missing(places, states)
        for name, where in places.items():
            self.placements[name].places = where
        self.is_cut = True
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                placement = self.placements[name]
                if not self.has(name):
                    spec = TensorSpec(tuple(placement.shape), parameter.dtype, False)
                    like = StandIn.of(spec, self._ranks.device)
                    placement.stand_in = nn.Parameter(like, parameter.requires_grad)
                    _keep_rows(parameter, slice(0, 0), states)
                # What no stage uses gets no gradient, and is not gathered.
                elif self._rows is not None and name in self._used and can_be_sharded(parameter):
                    placement.is_sharded = True
                    _keep_rows(parameter, self._rows.own(len(parameter)), states)

    @torch.no_grad()
    def _send_missing(self, places: Mapping[str, list[int]], states: Sequence[ParameterStates]) -> None:
        """Send parameters that were built for other stages than use them, with the states of them.

        Collectives: an all-gather, if there are some; a broadcast of each tensor.
        """
        missing = {}
        for name, parameter in self.model.named_parameters():
            if not set(places[name]) <= set(self.placements[name].places):
                missing[name] = parameter
        if not missing:
            return
        # The first place that has a parameter sends it, and says before what is kept of it.
        kept = {}
        for name, parameter in missing.items():
            if self.placements[name].places[0] == self._ranks.place:
                kept[name] = [dict(state.get(parameter, {})) for state in states]
        described: dict[str, list[dict[str, Any]]] = {}
        for theirs in self.gather(tree_map(_without_memory, kept), None):
            described |= theirs
        for name, parameter in missing.items():
            placement = self.placements[name]
            is_new = self._ranks.place in places[name] and not self.has(name)
            whole = self._broadcast(parameter.data, placement.shape, placement.places[0])
            for number, of_parameter in enumerate(described[name]):
                for key, like in of_parameter.items():
                    value = like
                    if isinstance(like, Tensor) and like.dim():  # without memory
                        if name in kept:
                            local = kept[name][number][key].to(self._ranks.device)
                        else:
                            local = torch.empty(0, dtype=like.dtype, device=self._ranks.device)
                        value = self._broadcast(local, like.shape, placement.places[0])
                    if is_new:
                        states[number][parameter][key] = value
            if is_new:
                parameter.data = whole
                placement.stand_in = None

    # -- in a step ----------------------------------------------------------------------------

    def stand_ins(self) -> AbstractContextManager[None]:
        """Return a context in which stand-ins take the place of parameters that this rank does not have."""
        return swapped(self.model, lambda name, _: self.placements[name].stand_in)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the shards of data-parallel ranks for the duration of the context.

        Collective: all-gathers over the data-parallel ranks.
        """
        sharded = self.sharded()
        if self._rows is None or not sharded:
            yield
            return
        own_rows = [parameter.data for parameter in sharded.values()]
        # All stages at once, as the most memory is in the middle of a batch, where all of them are in use.
        # One by one, they would be whole for as long: from the first micro-batch to the last.
        whole = self._rows.gather(own_rows, [self.placements[name].shape for name in sharded])
        for parameter, value in zip(sharded.values(), whole, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, own in zip(sharded.values(), own_rows, strict=True):
                # The step may have written them; through `data` no version tells.
                own.copy_(parameter.data[self._rows.own(len(parameter))])
                parameter.grad, parameter.data = None, own

    def sharded(self) -> dict[str, nn.Parameter]:
        """Return the parameters that data-parallel ranks shard, by name."""
        if self._rows is None:
            return {}
        return {n: p for n, p in self.model.named_parameters() if self.placements[n].is_sharded}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters that this rank has, by name."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad and self.has(n)}

    # -- state --------------------------------------------------------------------------------

    def slice_of(self, placement: Placement, tensor: Tensor, value: Tensor) -> Tensor | TensorSlice:
        """Return a value of a tensor's shape as what this rank has of the whole: all, some rows or nothing.

        Args:
            placement: Where the tensor is.
            tensor: The parameter or buffer.
            value: The value, for example a moment of an optimizer.
        """
        is_here = self._ranks.place in placement.places
        is_everywhere = self.is_everywhere(placement)
        if placement.is_buffer and not is_everywhere:
            if is_here:
                return _whole_slice(value, value.shape)
            return TensorSlice(tuple(value.shape), [])
        if self._inner is not None:
            if not is_here:
                return TensorSlice(tuple(placement.whole_shape), [])
            own = self._inner.as_slice(tensor, value)
            if isinstance(own, TensorSlice) or is_everywhere:
                return own
            return _whole_slice(value, placement.shape)
        if is_everywhere and not placement.is_sharded:
            return value
        if not is_here or not value.numel():
            return TensorSlice(tuple(placement.shape), [])
        start = [0] * len(placement.shape)
        if self._rows is not None and placement.is_sharded:
            start[0] = self._rows.own(placement.shape[0]).start
        return TensorSlice(tuple(placement.shape), [(tuple(start), value)])

    def state_parts(self) -> dict[str, Tensor]:
        """Return the model's state. Tensors that not all ranks have are sent when they are asked for.

        Collectives: none; `tp_core.state.whole` broadcasts a tensor.
        """
        parts: dict[str, Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            # By name where a forward pass has put another tensor in place of a buffer.
            placement = self.placement_of(value) or self.placements.get(name)
            if placement is None:
                parts[name] = value.detach()
            elif placement.pieces is not None:
                gather = partial(self._gather_pieces, value, placement.pieces, placement.places[0])
                parts[name] = _deferred(placement.pieces.shape, value.dtype, gather)
            elif self.is_everywhere(placement) and not placement.is_sharded:
                parts[name] = value.detach()
            else:
                if placement.is_buffer:
                    shape = value.shape
                else:
                    shape = placement.shape
                rows = self._rows if placement.is_sharded else None
                gather = partial(self._broadcast, value.detach(), shape, placement.places[0], rows)
                parts[name] = _deferred(shape, value.dtype, gather)
        return plain_state(parts)

    def _gather_pieces(self, value: Tensor, pieces: TensorPieces, source: int) -> Tensor:
        """Return the whole of a split parameter from the ranks of a place.

        Collectives: a broadcast of each piece.
        """
        senders = [rank for rank, place in enumerate(self._ranks.places) if place == source]
        return pieces.gather(value, group=self._ranks.model_group, senders=senders)

    def _broadcast(
        self, local: Tensor, shape: torch.Size, source: int, rows: RowShards | None = None
    ) -> Tensor:
        """Return a tensor that the rank of a place has, or of which it has rows.

        Collectives: a broadcast over the pipeline; before it, an all-gather of rows at their place.
        """
        is_source = self._ranks.place == source
        if rows is not None and is_source:
            (local,) = rows.gather([local], [shape])
        if is_source:
            whole = local.contiguous()
        else:
            whole = local.new_empty(shape)
        raw = whole.view(-1).view(torch.uint8)
        if raw.numel():
            dist.broadcast(raw, group_src=source, group=self._ranks.group)
        return whole

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a whole state, of any backend.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        own = dict(plain_state(state))
        for name, value in plain_state(self.model.state_dict(keep_vars=True)).items():
            new = own.get(name)
            if not isinstance(value, Tensor) or not isinstance(new, Tensor):
                continue
            placement = self.placement_of(value)
            if placement is None or placement.is_buffer:
                continue
            if placement.pieces is not None:
                own[name] = placement.pieces.cut(new, value)
            elif new.shape == placement.shape and value.shape != placement.shape:
                if self._rows is not None and placement.is_sharded:
                    own[name] = new[self._rows.own(len(new))]
                else:
                    own[name] = new.new_empty(value.shape)
        load_whole_state(self.model, own)


def _deferred(shape: torch.Size, dtype: torch.dtype, gather: Callable[[], Tensor]) -> Tensor:
    """Return a tensor without memory that `tp_core.state.whole` gathers."""
    deferred = torch.empty(shape, dtype=dtype, device="meta")
    deferred.full_tensor = gather  # type: ignore[attr-defined]
    return deferred


def _whole_slice(value: Tensor, shape: torch.Size) -> TensorSlice:
    return TensorSlice(tuple(shape), [((0,) * value.dim(), value)])


def _without_memory(value: Any) -> Any:
    """Return a tensor without memory for one that has dimensions; other values as they are."""
    if isinstance(value, Tensor) and value.dim():
        return value.to("meta")
    return value


def _without_rows(tensor: Tensor) -> Tensor:
    """Return a tensor without rows, with the same dtype, device and other dimensions."""
    return tensor.new_empty(0, *tensor.shape[1:])


def _keep_rows(parameter: nn.Parameter, rows: slice, states: Sequence[ParameterStates]) -> None:
    """Free all but some rows of a parameter, and of what is kept of it."""
    for state in states:
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                state[parameter][key] = value[rows].clone()
    if rows.stop:
        parameter.data = parameter.data[rows].clone()
    else:
        parameter.data = _without_rows(parameter.data)


def _check_norms(model: nn.Module) -> None:
    """Check that no layer normalizes over the samples of its batch.

    Raises:
        ModelError: One does, and would over those of a micro-batch alone.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            msg = (
                f"{name!r} ({type(module).__name__}) normalizes over all samples of the batch, and on "
                "backend 'pipeline' it would over those of a micro-batch; take GroupNorm or "
                "LayerNorm, freeze it (call its eval() in the step), or accept this: "
                "PipelineOptions(statistics='microbatch')"
            )
            raise ModelError(msg)


def _modes(model: nn.Module, device: torch.device) -> tuple[object, ...]:
    """Return what else than its batch changes which modules a step calls, and how."""
    kinds = dict.fromkeys(["cpu", device.type])
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return tuple(module.training for module in model.modules()), torch.is_grad_enabled(), casts


def _form_of(batch: Any) -> tuple[object, object]:
    """Return the structure of a batch with the shapes and dtypes of tensors, and all other values."""
    if isinstance(batch, Mapping):
        names = tuple(map(str, batch))
    else:
        names = ()
    leaves: list[object] = []
    values: list[object] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            leaves.append((tuple(leaf.shape), leaf.dtype))
        else:
            leaves.append(type(leaf).__name__)
            values.append(repr(leaf))
    return (type(batch).__name__, names, tuple(leaves)), tuple(values)
