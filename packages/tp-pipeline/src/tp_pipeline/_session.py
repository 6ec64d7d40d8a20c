"""The session of a rank that has some stages of the model."""

import json
import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from tp_core import tree_leaves, tree_map
from tp_core.data import (
    Parts,
    Share,
    StepOutput,
    combine_outputs,
    count_samples,
    length_along,
    near_power_of_two,
    split_evenly,
    split_rows,
    step_identity,
)
from tp_core.errors import ConfigError, DisagreementError, ModelError, RankFailedError, StepError
from tp_core.fully_sharded import whole_matrix_optimizer
from tp_core.jobs import CompileOptions
from tp_core.plugins import Job
from tp_core.random import device_rng_state, set_device_rng_state
from tp_core.sessions import (
    PerModule,
    ProcessGroupSession,
    all_gather_single,
    join_process_group,
    new_process_group,
    rendezvous_store,
)
from tp_core.state import load_whole_state, plain_state
from tp_core.tensors import TensorSlice, check_not_quantized, initial_value, is_deferred, materialize

from tp_pipeline._options import PipelineOptions, ScheduleName
from tp_pipeline._plan import Plan, Spec, find_units, make_plan, swapped
from tp_pipeline._run import BatchRun, Exchange, StandIn, weigh_output
from tp_pipeline._schedule import Orders, Span, choose_schedule, idle_share
from tp_pipeline._shards import Pieces, Rows, buckets, can_be_shared
from tp_pipeline._stage_memory import stages_by_order

log = logging.getLogger("tp_pipeline")

_SHORT = 2**14
"""The bytes of what ranks say of a batch, in nearly all models."""

_TRACED = 3
"""The batch of a trace: the first ones are slower."""


class Stages:
    """What is known of a prepared model: its units, where it is cut, and which rank has which parameters.

    Attributes:
        units: The units by name.
        starts: The calls with which stages begin; ``None`` until the first step.
        plans: The plans, by the form of a micro-batch.
        used: The ranks of the group with stages that use each parameter, by name, in the plans so far.
        is_cut: Whether ranks have the parameters of their stages alone.
        is_agreed: Whether data ranks have the same parameters in their stages.
        shapes: The whole shapes of parameters, by identity.
        holders: The ranks of the group that have each parameter, by identity; empty until the first step,
            unless the model was built without memory.
        shared: The identities of parameters of which this rank has rows alone, as its data ranks share them.
        buffers: The rank that has each buffer of a unit, by identity.
        stand_ins: Stand-ins for the parameters of other ranks, by identity.
        compiled: The compiled forwards of units, by name.
        split: Where each rank that holds the model with this one has pieces of split parameters.
    """

    def __init__(self, model: nn.Module, options: PipelineOptions) -> None:
        self.units, _ = find_units(model, options.cuts)
        self.starts: list[tuple[str, int]] | None = None
        self.plans: dict[object, Plan] = {}
        self.used: dict[str, set[int]] = {}
        self.is_cut = self.is_agreed = False
        self.shapes = {id(p): p.shape for p in model.parameters()}
        self.holders: dict[int, list[int]] = {}
        self.shared: set[int] = set()
        self.buffers: dict[int, int] = {}
        self.stand_ins: dict[int, nn.Parameter] = {}
        self.compiled: dict[str, nn.Module] = {}
        self.split = Pieces()


class PipelineSession(ProcessGroupSession):
    """One rank of a job in which groups of ranks hold a model in stages.

    Ranks ``0`` to ``ranks - 1`` hold the first copy, and so on; all of them read the samples of one data
    rank. A step runs for micro-batches, forward and backward. Its loss comes back with the gradients of the
    whole batch, which :meth:`backward` adds.

    Args:
        job: The job.
        options: The options.
        ranks: The number of ranks that hold a model together, or of groups that split its tensors.
        inner: The session that splits tensors in groups, one for each rank of a pipeline; by default ranks
            have whole tensors.
    """

    runs_step_in_parts = True
    cuts_models = True
    takes_deferred_models = True  # a tensor at a time

    def __init__(
        self,
        job: Job,
        options: PipelineOptions,
        ranks: int,
        *,
        inner: ProcessGroupSession | None = None,
    ) -> None:
        self._inner = inner
        if inner is None:
            self._join(job, options, ranks)
        else:
            self._join_split(inner, job, options)
        if options.schedule == "auto":
            options = _chosen(options, job, ranks)
        self.options, self.ranks = options, ranks
        is_early = self.device.type == "cpu"
        self.orders = Orders(options.schedule, ranks, options.depth, is_v=options.is_v, is_early=is_early)
        self._exchange = Exchange(
            self.group,
            self.orders,
            self.device,
            options.timeout_s,
            rendezvous_store(job.environment),
            self._mates(),
        )
        self.takes_deferred_models = self.sample_size == 1  # others are compared with the whole model
        self._stages: PerModule[Stages] = PerModule()
        self._optimizers: list[Optimizer] = []
        data = self._data_group
        self._rows = Rows(data) if options.data == "fsdp" and data is not None else None
        self.evaluates_together = self._rows is not None  # without gradients, too, weights are gathered
        self._syncs = True
        self._is_in_step = False
        self._batches = 0
        # About what the loss was last multiplied by, on which half precision's gradients depend.
        self._scale = 2.0**16 if job.precision == "fp16-mixed" else 1.0

    def _join(self, job: Job, options: PipelineOptions, ranks: int) -> None:
        """Join the process group, and form the groups of ranks with whole tensors."""
        leave = join_process_group(job.environment, device=job.devices[0], timeout_s=options.timeout_s)
        world, rank = dist.get_world_size(), dist.get_rank()
        copies = world // ranks
        mine, data = None, None
        for first in range(0, world, ranks):  # every rank makes every group, in one order
            group = new_process_group(range(first, first + ranks), timeout_s=options.timeout_s)
            mine = group if group is not None else mine
        for first in range(ranks):
            others = range(first, world, ranks)
            group = new_process_group(others, timeout_s=options.timeout_s) if copies > 1 else None
            data = group if group is not None else data
        ProcessGroupSession.__init__(
            self, job, data_group=data, data_rank=rank // ranks, data_size=copies, leave=leave
        )
        if mine is None:
            msg = "torch made no process group for this rank"
            raise ConfigError(msg)
        self.group = self._team = mine
        self.place, self._places = rank % ranks, list(range(ranks))

    def _join_split(self, inner: ProcessGroupSession, job: Job, options: PipelineOptions) -> None:
        """Take the groups of ranks with the same part of tensors, and form those that hold a model.

        ::

            ranks      0 1   2 3     of one model: 2 stages x 2 ranks that split tensors
            places     0 0   1 1     the pipelines are 0, 2 and 1, 3

        Collectives: an all-gather of places, the creation of the groups.
        """
        ProcessGroupSession.__init__(
            self,
            job,
            data_group=inner._data_group,
            data_rank=inner.data_rank,
            data_size=inner.data_size,
            leave=inner.close,
        )
        team = None
        everyone = self.gather_objects((inner.data_rank, inner.sample_rank))
        for number in range(inner.data_size):
            ranks = [rank for rank, (copy, _) in enumerate(everyone) if copy == number]
            group = new_process_group(ranks, timeout_s=options.timeout_s)
            team = group if group is not None else team
        pipeline = inner.sample_group or dist.group.WORLD
        if team is None or pipeline is None:
            msg = "torch made no process group for this rank"
            raise ConfigError(msg)
        self.group, self._team, self.place = pipeline, team, inner.sample_rank
        self._places = [place for copy, place in everyone if copy == inner.data_rank]

    def _mates(self) -> tuple[str, int]:
        """Return a name of the ranks that compute together with this one in its stages, and their number."""
        if self.sample_size > 1:  # of slices of the same sequences
            return getattr(self.sample_group, "group_name", "all"), self.sample_size
        return f"{self._team.group_name}/{self.place}", self._places.count(self.place)

    # -- preparing ----------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, with the weights of the first rank; it is cut at its first step.

        Of a model that was built without memory, a rank gets what its stages seem to need: those that follow
        from the order of its modules. The first step sends what it uses elsewhere.

        Raises:
            ModelError: ``model`` is not a module, is wrapped already, or has no blocks to cut between.
            ConfigError: A cut by hand is no module of the model.
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of each tensor.
        """
        if self._inner is not None:
            return self._prepare_split(self._inner, model)
        self.check_plain(model)
        check_not_quantized(model, "backend 'pipeline'")
        self.check_same_parameters(model)
        stages = Stages(model, self.options)
        guess = self._guess(model)
        known = [(p.shape, guess.get(id(p), list(range(self.ranks)))) for p in model.parameters()]
        materialize(model, partial(self._first_value, guess))
        model = super().prepare_model(model)
        stages.shapes = {id(p): shape for p, (shape, _) in zip(model.parameters(), known, strict=True)}
        if guess:
            stages.holders = {id(p): where for p, (_, where) in zip(model.parameters(), known, strict=True)}
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if len(self._holders(stages, tensor)) == self.ranks:
                    dist.broadcast(tensor.data, src=0)
        self._stages[model] = stages
        self._reductions.know(model)
        return model

    def _prepare_split(self, inner: ProcessGroupSession, model: nn.Module) -> nn.Module:
        stages = Stages(inner.prepare_model(model), self.options)
        stages.shapes = {id(p): p.shape for p in model.parameters()}  # of what was built without memory, too
        stages.split = Pieces.of(model, inner, self._team)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, group_src=0, group=self.group)
                if self._gradient_size > 1:
                    dist.broadcast(tensor.data, group_src=0, group=self._gradient_group)
        self._stages[model] = stages
        self._reductions.know(model)
        return model

    def _guess(self, model: nn.Module) -> dict[int, list[int]]:
        """Return the ranks of the group that seem to need each parameter without memory, if not all do."""
        cuts, count = self.options.cuts, self.orders.stages
        if cuts is None and len(find_units(model, None)[1]) < count:
            return {}  # the first step refuses the model
        where: dict[int, set[int]] = {}
        for number, stage in enumerate(stages_by_order(model, count, cuts)):
            for parameter in stage.parameters.values():
                if is_deferred(parameter):
                    where.setdefault(id(parameter), set()).add(self.orders.rank_of(number))
        return {key: sorted(ranks) for key, ranks in where.items() if len(ranks) < self.ranks}

    def _first_value(self, guess: Mapping[int, list[int]], tensor: Tensor) -> Tensor:
        """Return the initial value of a tensor without memory, or an empty one where it is not needed.

        Only the first rank computes it: what ranks draw differs where their seeds do. What all ranks need
        is not sent yet, as other tensors of all are not.

        Collective: a broadcast, if some ranks do not need it.
        """
        if self.rank == 0:
            value = initial_value(tensor).to(self.device).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if id(tensor) not in guess:
            return value
        dist.broadcast(value, src=0)
        return value if self.place in guess[id(tensor)] else _no_rows(value)

    def compile_model(self, model: nn.Module) -> None:
        """Compile the units, each by itself: the compiler would look past the cuts of a whole model.

        Raises:
            ConfigError: Tensors are split: stages would compile collectives in other orders.
        """
        if self._inner is not None:
            msg = "compile= does not go with weights='shard' of backend 'pipeline' yet; leave it out"
            raise ConfigError(msg)
        stages = self._stages.get(model)
        if stages is not None:
            for name, unit in stages.units.items():
                stages.compiled[name] = body = _Body(unit.forward)
                body.compile(**(self.job.compile or CompileOptions()).arguments())

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer; it steps the parameters of this rank's stages.

        Raises:
            ConfigError: It computes with matrices as a whole or several at once, of which each rank has some.
        """
        name = whole_matrix_optimizer(optimizer)
        if name is not None:
            msg = (
                f"{name} computes with whole matrices, or with all of them at once, and on backend "
                "'pipeline' a rank has those of its stages, or rows of them; take an optimizer that treats "
                "each element by itself, such as AdamW or SGD"
            )
            raise ConfigError(msg)
        self._optimizers.append(optimizer)
        if self._inner is not None:
            self._inner.prepare_optimizer(optimizer)
        return super().prepare_optimizer(optimizer)

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step for micro-batches on all stages, and return the whole batch's output on each rank.

        Before the first call with a step, and with batches of another form, the step runs on stand-ins. The
        first one cuts the model: parameters of other ranks' stages become empty here. Steps of data ranks may
        go other ways, so these ranks agree on them when they first learn.

        Raises:
            ModelError: The model cannot be cut, or normalizes over its batch.
            StepError: The step cannot run for parts of the batch, or does something else than on stand-ins.
            ConfigError: The options do not fit the model or the batch.
            DisagreementError: The ranks find different cuts.

        Collectives: sends and receives between neighboring stages; an all-gather of the outputs over the
        ranks that hold the model. The first time with a form of batch, another one. The first time that data
        ranks learn, an all-gather over them. Where they share weights, all-gathers of them before the batch.
        """
        stages = self._stages.get(model)
        if stages is None:
            msg = "the step runs with a model that was not prepared: trainer.prepare(model) first"
            raise ModelError(msg)
        parts, plans = self._planned(stages, step, model, batch)
        learns = torch.is_grad_enabled() and all(plan.has_loss for plan in plans)
        trained = [p for p in model.parameters() if p.requires_grad and self._has(stages, p)]
        before = [p.grad for p in trained]
        work = BatchRun(
            step,
            model,
            parts,
            plans,
            units=stages.units,
            exchange=self._exchange,
            seed=int(torch.randint(2**62, ())) if learns else self.job.seed,
            weigh=lambda output, part: weigh_output(
                output, parts.counts[part], is_sum=self.job.loss == "sum"
            ),
            trained=trained,
            uncast=self._uncast,
            compiled=stages.compiled,
            scale=self._scale,
            is_timed=self.options.trace is not None,
        )
        orders = (self.orders.learning if learns else self.orders.forwards)(len(parts))
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(device_rng_state(self.device))
        self._is_in_step = True
        try:
            for parameter in trained:
                parameter.grad = None
            with self._gathered(stages, model), swapped(model, lambda _, p: self._stand_in(stages, p)):
                if learns:
                    work.perform(orders[self.place])
                else:
                    with torch.no_grad() if not torch.is_grad_enabled() else nullcontext():
                        work.perform(orders[self.place])
                gradients = [p.grad for p in trained]
        finally:
            self._is_in_step = False
            for parameter, grad in zip(trained, before, strict=True):
                parameter.grad = grad
            torch.set_rng_state(states[0])
            if len(states) > 1:
                set_device_rng_state(self.device, states[1])
        return self._joined(stages, model, parts, work, learns, dict(zip(trained, gradients, strict=True)))

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as :meth:`run` does with one model.

        Raises:
            StepError: As in :meth:`run`; or there are several models.

        Collectives: those of :meth:`run`.
        """
        if len(models) > 1:
            msg = "a step of several models does not go with backend 'pipeline'; put them into one module"
            raise StepError(msg)
        return self.run(step, models[0], batch)

    def check_in_step(self, what: str, *, may_meet: bool = False) -> None:  # noqa: ARG002 - contract
        """Check that the caller sees the whole batch, and not a micro-batch.

        Raises:
            StepError: A step runs.
        """
        if self._is_in_step:
            msg = (
                f"{what} was called in a step, which runs for one micro-batch on backend 'pipeline'; call it "
                "with what the step has returned"
            )
            raise StepError(msg)

    def _split(self, batch: Any, *, is_first: bool) -> Parts:
        """Return the micro-batches.

        Raises:
            StepError: The batch has fewer samples than it takes, or a tensor with other rows than samples.
            ConfigError: The schedule cannot be made of this many parts.
        """
        samples, options = count_samples(batch), self.options
        if options.microbatch_size:
            count = -(-samples // options.microbatch_size)
        else:
            count = options.microbatches or min(samples, 4 * self.ranks)
        if is_first:
            if samples < count:
                msg = (
                    f"the first batch has {samples} samples, and backend 'pipeline' is to make {count} "
                    "micro-batches of it; give larger batches or fewer microbatches"
                )
                raise StepError(msg)
            self.orders.check(count)
        count = max(1, min(count, samples))
        size = options.microbatch_size
        counts = (
            [min(size, samples - i * size) for i in range(count)]
            if size
            else [s.stop - s.start for s in split_evenly(samples, count)]
        )
        if count == 1:
            return Parts([batch], counts=[samples])
        pieces = {}
        for leaf in tree_leaves(batch):
            rows = len(leaf) if isinstance(leaf, list) else length_along(leaf)
            if rows is None or rows == 1:
                continue
            if rows != samples:
                msg = (
                    f"the batch has {samples} samples, and a value with {rows} rows (of type "
                    f"{type(leaf).__name__}), which backend 'pipeline' cannot cut into micro-batches; give "
                    "each sample its row, or one row for all"
                )
                raise StepError(msg)
            pieces[id(leaf)] = split_rows(leaf, counts)

        def piece(number: int) -> Any:
            return tree_map(lambda v: pieces[id(v)][number] if id(v) in pieces else v, batch)

        return Parts([piece(i) for i in range(count)], counts=counts)

    # -- plans --------------------------------------------------------------------------------

    def _planned(
        self, stages: Stages, step: Callable[..., StepOutput], model: nn.Module, batch: Any
    ) -> tuple[Parts, list[Plan]]:
        """Return the micro-batches of a batch and the plan of each; cut the model if it is not cut yet.

        Collectives: as :meth:`run` says, before the batch.
        """
        learns = torch.is_grad_enabled()
        # In evaluation a data rank may have no batch, and does not come here.
        agrees = not stages.is_agreed and self._gradient_size > 1 and (learns or self._rows is not None)
        try:
            parts = self._split(batch, is_first=learns and stages.starts is None)
            plans = self._plans_of(stages, step, model, parts)
        except Exception as error:
            if agrees:
                self._agree(stages, error)
            raise
        if agrees:
            self._agree(stages, None)
        if agrees or not stages.is_cut:
            self._cut(stages, model)
        return parts, plans

    def _plans_of(
        self, stages: Stages, step: Callable[..., StepOutput], model: nn.Module, parts: Parts
    ) -> list[Plan]:
        flags = tuple(p.requires_grad for p in model.parameters())
        modes = (step_identity(step), flags, *_modes(model))
        keys = [(*modes, _form(part)) for part in parts]
        is_new = [key not in stages.plans and key not in keys[:i] for i, key in enumerate(keys)]
        if self.sample_size > 1:  # ranks with other slices exchange some of them, also on stand-ins
            numbers = torch.tensor(is_new, dtype=torch.float32, device=self.device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.sample_group)
            is_new = [bool(number) for number in numbers.tolist()]
        for key, part, makes in zip(keys, parts, is_new, strict=True):
            if makes:
                stages.plans[key] = self._make_plan(stages, step, model, part)
        return [stages.plans[key] for key in keys]

    def _make_plan(
        self, stages: Stages, step: Callable[..., StepOutput], model: nn.Module, part: Any
    ) -> Plan:
        """Run the step on stand-ins, and cut the model if it is not cut yet.

        Raises:
            TpError: As `make_plan` says, on all ranks of the group.

        Collective: an all-gather over the ranks that hold the model.
        """
        plan, starts, failure = None, None, None
        try:
            _check_norms(model)
            plan, starts = make_plan(
                step,
                model,
                part,
                shape_of=lambda p: stages.shapes[id(p)],
                count_of=lambda p: stages.split.whole(p, stages.shapes[id(p)]).numel(),
                cuts=self.options.cuts,
                starts=stages.starts,
                stages=self.orders.stages,
                device=self.device,
            )
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            failure = error
        said = self._shared(plan and plan.describe(), failure, self._team)
        if any(described != said[0] for described in said) or plan is None:
            msg = (
                "the ranks that hold a model together find different stages in the same step; give them the "
                "same model, step and batch"
            )
            raise DisagreementError(msg)
        if stages.starts is None:
            stages.starts = starts
            by_unit = {c.unit: self.orders.rank_of(s) for c, s in zip(plan.calls, plan.stage_of, strict=True)}
            for name, unit in stages.units.items():
                for buffer in unit.buffers():
                    stages.buffers[id(buffer)] = by_unit.get(name, 0)
        for name, where in plan.holders.items():
            ranks = {self.orders.rank_of(stage) for stage in where}
            stages.used[name] = stages.used.get(name, set()) | ranks
            if stages.is_cut and not ranks <= set(self._holders(stages, model.get_parameter(name))):
                msg = (
                    f"the step uses the parameter {name!r} in another stage than the first step did, which "
                    "has given it to that one alone; let the first step use the model as the later ones do"
                )
                raise StepError(msg)
        return plan

    def _shared(self, mine: Any, failure: Exception | None, group: dist.ProcessGroup | None) -> list[Any]:
        """Return what the ranks of a group have, unless one has failed.

        Raises:
            Exception: A rank has failed: its error, on all of them.

        Collective: an all-gather over the group.
        """
        reported = None if failure is None else (time.time(), *_portable(failure))
        try:
            said = _gather_values((mine, reported), group, self.device)
        except RuntimeError as error:
            if failure is not None:
                raise failure from error
            msg = f"a rank that trains the model with this one has ended, or hangs: {error}"
            raise RankFailedError(msg) from error
        failed = [(rank, *reported) for rank, (_, reported) in enumerate(said) if reported is not None]
        if not failed:
            return [value for value, _ in said]
        # What comes later may follow from the first.
        rank, _, pickled, text = min(failed, key=lambda one: one[1])
        if failure is not None and rank == dist.get_rank(group):
            raise failure
        where = rank if group is None else dist.get_global_rank(group, rank)
        if pickled is None:
            msg = f"rank {where} has failed in its stages: {text}"
            raise RankFailedError(msg)
        theirs: Exception = pickle.loads(pickled)
        theirs.add_note(f"It was raised in the stages of rank {where}.")
        raise theirs

    def _agree(self, stages: Stages, failure: Exception | None) -> None:
        """Take what the stages of any data rank use as used: their steps may go other ways.

        Raises:
            Exception: A data rank has failed: its error, on all of them.

        Collective: an all-gather over the data ranks.
        """
        every = self._shared(stages.used, failure, self._gradient_group)
        stages.used = {n: set().union(*(one.get(n, ()) for one in every)) for one in every for n in one}
        stages.is_agreed = True

    def _cut(self, stages: Stages, model: nn.Module) -> None:
        """Free the parameters of other ranks' stages. What no stage uses stays on all.

        Collectives: a broadcast of each parameter that is needed elsewhere than it is, and of what optimizers
        keep of it; an all-gather if there are some.
        """
        everyone = range(self.ranks)
        holders = {n: sorted(stages.used.get(n, everyone)) for n, _ in model.named_parameters()}
        self._send_missing(stages, model, holders)
        stages.holders = {id(p): holders[name] for name, p in model.named_parameters()}
        stages.is_cut = True
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self._has(stages, parameter):
                    # What no stage uses gets no gradient, and is not gathered.
                    if self._rows is not None and name in stages.used and can_be_shared(parameter):
                        stages.shared.add(id(parameter))
                        self._keep(parameter, self._rows.own(len(parameter)))
                    continue
                shape = tuple(stages.shapes[id(parameter)])
                like = StandIn.of(Spec(shape, parameter.dtype, False), self.device)
                stages.stand_ins[id(parameter)] = nn.Parameter(like, parameter.requires_grad)
                self._keep(parameter, slice(0, 0))

    @torch.no_grad()
    def _send_missing(self, stages: Stages, model: nn.Module, holders: Mapping[str, list[int]]) -> None:
        """Send parameters that were built for other stages than use them, with optimizers' state of them."""
        missing = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not set(holders[name]) <= set(self._holders(stages, parameter))
        }
        if not missing:
            return
        kept = {
            name: [dict(optimizer.state.get(parameter, {})) for optimizer in self._optimizers]
            for name, parameter in missing.items()
            if self._holders(stages, parameter)[0] == self.place
        }
        described: dict[str, list[dict[str, Any]]] = {}
        for one in self._shared(tree_map(_without_numbers, kept), None, self._team):
            described |= one
        for name, parameter in missing.items():
            before, shape = self._holders(stages, parameter), stages.shapes[id(parameter)]
            is_new = self.place in holders[name] and self.place not in before
            whole = self._sent(parameter.data, shape, before[0], None)
            for number, state in enumerate(described[name]):
                for key, like in state.items():
                    value = like
                    if isinstance(like, Tensor) and like.dim():  # without memory
                        mine = kept[name][number][key] if name in kept else torch.empty(0, dtype=like.dtype)
                        value = self._sent(mine.to(self.device), like.shape, before[0], None)
                    if is_new:
                        self._optimizers[number].state[parameter][key] = value
            if is_new:
                parameter.data = whole
                stages.stand_ins.pop(id(parameter), None)

    def _keep(self, parameter: nn.Parameter, rows: slice) -> None:
        """Free all but some rows of a parameter, and of what optimizers keep of it."""
        for optimizer in self._optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    optimizer.state[parameter][key] = value[rows].clone()
        parameter.data = parameter.data[rows].clone() if rows.stop else _no_rows(parameter.data)

    @contextmanager
    def _gathered(self, stages: Stages, model: nn.Module) -> Iterator[None]:
        """Have whole the parameters that data ranks share, meanwhile.

        Collective: all-gathers over the data ranks.
        """
        if self._rows is None or not stages.shared:
            yield
            return
        shared = [p for p in model.parameters() if id(p) in stages.shared]
        rows = [p.data for p in shared]
        # All stages at once, as the most memory is in the middle of a batch, where all of them are in use.
        # One by one, they would be whole for as long: from the first micro-batch to the last.
        whole = self._rows.gather(rows, [stages.shapes[id(p)] for p in shared])
        for parameter, value in zip(shared, whole, strict=True):
            parameter.data = value
        versions = [p._version for p in shared]
        try:
            yield
        finally:
            for parameter, own, version in zip(shared, rows, versions, strict=True):
                if parameter._version != version:  # the step has written it
                    own.copy_(parameter.data[self._rows.own(len(parameter))])
                parameter.grad, parameter.data = None, own

    def _stand_in(self, stages: Stages, parameter: nn.Parameter) -> nn.Parameter | None:
        return stages.stand_ins.get(id(parameter))

    def _holders(self, stages: Stages, parameter: Tensor) -> list[int]:
        return stages.holders.get(id(parameter), list(range(self.ranks)))

    def _has(self, stages: Stages, parameter: nn.Parameter) -> bool:
        return not stages.holders or self.place in stages.holders[id(parameter)]

    def _uncast(self) -> AbstractContextManager[Any]:
        # The trainer's autocast is around the whole step, and a backward pass runs in the types of forward.
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    # -- the output and the gradients of the whole batch --------------------------------------

    def backward(self, loss: Tensor, share: Share | None = None, **graph: bool) -> None:
        """Add the gradients of the loss over the whole global batch.

        Raises:
            DisagreementError: The session that splits tensors finds other gradients on ranks that have the
                same parameter; on all ranks that hold the model.

        Collectives: those of :meth:`run`'s gradients; with split tensors those of that session's checks, and
        an all-gather over the ranks that hold the model.
        """
        if self._inner is None:
            super().backward(loss, share, **graph)
            return
        failure = None
        try:
            self._reductions.run_backward(partial(self._inner.backward, loss, share, **graph))
        except DisagreementError as error:
            failure = error
        self._shared(None, failure, self._team)

    def _joined(
        self,
        stages: Stages,
        model: nn.Module,
        parts: Parts,
        work: BatchRun,
        learns: bool,
        gradients: dict[nn.Parameter, Tensor | None],
    ) -> StepOutput:
        is_last = self.orders.rank_of(self.orders.stages - 1) == self.place
        output, failure = None, work.failure
        if is_last and failure is None:
            plain = [tree_map(_detached, o) for o in work.outputs]
            try:
                output = combine_outputs(plain, parts, loss=self.job.loss, device=torch.device("cpu"))
            except StepError as error:
                failure = error
        names = [n for n, p in model.named_parameters() if gradients.get(p) is not None]
        total = sum(work.weights) if self.job.loss == "mean" else 1.0
        said = self._shared((names, output, total * (work.factor or 0.0), work.spans), failure, self._team)
        if learns and self.options.trace is not None:
            one_each = [said[self._places.index(place)][-1] for place in range(self.ranks)]
            ranks = dist.get_process_group_ranks(self.group)
            self._trace([Span(r, *span) for r, spans in zip(ranks, one_each, strict=True) for span in spans])
        _, output, total, _ = said[self._places.index(self.orders.rank_of(self.orders.stages - 1))]
        moved: StepOutput = tree_map(lambda v: v.to(self.device) if isinstance(v, Tensor) else v, output)
        if not learns:
            return moved
        reached = {name for names, *_ in said for name in names}
        found = self._summed(stages, model, gradients, reached)
        loss = moved["loss"] if isinstance(moved, Mapping) else moved
        anchor = torch.zeros((), dtype=loss.dtype, device=self.device, requires_grad=True)
        # After hooks of a leaf, by which the loss of a stand-in counts nothing.
        add = partial(self._add, stages, model, found, total)
        anchor.register_post_accumulate_grad_hook(add)
        loss = _WholeLoss.apply(anchor, loss)  # type: ignore[no-untyped-call]  # torch's
        return {**moved, "loss": loss} if isinstance(moved, Mapping) else loss

    def _trace(self, spans: Sequence[Span]) -> None:
        self._batches += 1
        if self._batches == _TRACED and self.rank == 0 and self.options.trace is not None:
            _write_trace(self.options.trace, spans)
            log.info("idle share of the ranks in batch %d: %.1f %%", _TRACED, 100 * idle_share(spans))

    def _summed(
        self,
        stages: Stages,
        model: nn.Module,
        gradients: dict[nn.Parameter, Tensor | None],
        reached: set[str],
    ) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that were reached on any rank, with those of tied weights summed.

        Collective: the ranks that have a parameter of several stages send each other its gradients.
        """
        found: dict[nn.Parameter, Tensor] = {}
        for name, parameter in model.named_parameters():
            if name not in reached:
                continue
            grad = gradients.get(parameter)
            shape = stages.shapes[id(parameter)] if id(parameter) in stages.shared else parameter.shape
            found[parameter] = parameter.new_zeros(shape) if grad is None else grad
            holders = self._holders(stages, parameter)
            if len(holders) == 1 or self.place not in holders:
                continue
            mine = found[parameter].contiguous()
            theirs = {rank: torch.empty_like(mine) for rank in holders if rank != self.place}
            # Batched, as each rank sends and receives at once.
            operations = [
                operation
                for rank, buffer in theirs.items()
                for operation in (
                    dist.P2POp(dist.isend, mine, group=self.group, group_peer=rank),
                    dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=rank),
                )
            ]
            for waiting in dist.batch_isend_irecv(operations):
                waiting.wait()
            # In one order, so that all have the same sum to the last bit.
            total = torch.zeros_like(mine)
            for rank in holders:
                total += theirs.get(rank, mine)
            found[parameter] = total
        return found

    @torch.no_grad()
    def _add(
        self,
        stages: Stages,
        model: nn.Module,
        found: dict[nn.Parameter, Tensor],
        total: float,
        leaf: Tensor,
    ) -> None:
        """Add gradients, divided by the total weight, times a leaf's, and average them over the data ranks.

        Collective: all-reduces over the data ranks, unless inside :meth:`no_sync`; reduce-scatters of those
        of weights that they share, inside of it, too.
        """
        if not found and not self._gradient_size > 1:
            return
        number = 0.0 if leaf.grad is None else float(leaf.grad)
        leaf.grad = None
        if self.job.precision == "fp16-mixed" and 0.0 < number < math.inf:
            self._scale = near_power_of_two(number)
        scale = number / total if total else 0.0
        for gradient in found.values():
            if not scale:  # a gradient that counts nothing may be NaN
                gradient.zero_()
        for parameter, gradient in self._mean_rows(stages, model, found, scale).items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        first = [gradient for parameter, gradient in found.items() if parameter.grad is None]
        if first:
            torch._foreach_mul_(first, scale)  # private, as torch's optimizers use it: one call for all
        for parameter, gradient in found.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient, alpha=scale)
        found.clear()
        if self._gradient_size > 1 and self._syncs:
            self._average(stages, model)

    def _mean_rows(
        self, stages: Stages, model: nn.Module, found: dict[nn.Parameter, Tensor], scale: float
    ) -> dict[nn.Parameter, Tensor]:
        """Take the gradients of shared parameters out, and return this rank's rows of their means."""
        if self._rows is None:
            return {}
        shared = [p for p in model.parameters() if p.requires_grad and id(p) in stages.shared]
        shared = self._reached(shared, [p in found for p in shared])
        whole = [
            found.pop(p).mul_(scale) if p in found else p.new_zeros(stages.shapes[id(p)]) for p in shared
        ]
        return dict(zip(shared, self._rows.mean(whole), strict=True))

    def _average(self, stages: Stages, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and self._has(stages, p)]
        trained = [p for p in trained if id(p) not in stages.shared]
        gradients = []
        for parameter in self._reached(trained, [p.grad is not None for p in trained]):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for first, end in buckets([g.shape for g in gradients], [g.dtype for g in gradients]):
            self._average_bucket(gradients[first:end])

    def _reached(self, parameters: list[nn.Parameter], here: list[bool]) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on any data rank."""
        flags = torch.tensor(here, dtype=torch.float32, device=self.device)
        if len(flags):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._gradient_group)
        return [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]

    def _average_bucket(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=self._gradient_group)
        flat.div_(self._gradient_size)
        for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        """Return a context in which gradients are not averaged over the data ranks."""
        return self._unsynced()

    @contextmanager
    def _unsynced(self) -> Any:
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, in which each parameter counts once.

        Collective: an all-reduce of one number over the ranks that hold the model, and one over the data
        ranks where they share weights.
        """
        stages = self._stages.get(self.unwrap(model))
        counts_whole = self._rows is None or self.data_rank == 0
        mine = [
            p
            for p in model.parameters()
            if p.grad is not None
            and p.grad.numel()  # a rank may have none of a tensor's rows, which have no largest one
            and (stages is None or self._holders(stages, p)[0] == self.place)
            and (counts_whole or (stages is not None and id(p) in stages.shared))
        ]
        if self._inner is not None:  # a list of parameters, as it looks at no modules
            norm = self._inner.grad_norm(nn.ParameterList(mine), norm_type=norm_type).to(self.device)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None], norm_type)
            norm = norm.to(self.device)
        groups = [self.group] if self._rows is None else [self.group, self._data_group]
        if norm_type == float("inf"):
            for group in groups:
                dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
            return norm
        powers = norm.double() ** norm_type
        for group in groups:
            dist.all_reduce(powers, group=group)
        return (powers ** (1.0 / norm_type)).to(norm.dtype)

    # -- state --------------------------------------------------------------------------------

    def as_slice(self, parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:
        """Return ``value`` as what this rank has of the tensor: all, some rows or no part of it."""
        for model in self._stages:
            stages = self._stages.get(model)
            if stages is None or isinstance(value, TensorSlice):
                continue
            shape, holders = stages.shapes.get(id(parameter)), stages.holders.get(id(parameter))
            if holders is not None and shape is not None and self._inner is not None:
                if self.place not in holders:
                    return TensorSlice(tuple(stages.split.whole(parameter, shape)), [])
                part = self._inner.as_slice(parameter, value)
                if isinstance(part, TensorSlice) or len(holders) == self.ranks:
                    return part
                return TensorSlice(tuple(shape), [((0,) * value.dim(), value)])
            if holders is not None and shape is not None:
                rows = self._rows if id(parameter) in stages.shared else None
                if len(holders) == self.ranks and rows is None:
                    return value
                start = (0 if rows is None else rows.own(shape[0]).start, *(0,) * (len(shape) - 1))
                has = self.place in holders and value.numel()
                return TensorSlice(tuple(shape), [(start[: len(shape)], value)] if has else [])
            owner = stages.buffers.get(id(parameter))
            if owner is not None:
                start = (0,) * value.dim()
                return TensorSlice(tuple(value.shape), [(start, value)] if owner == self.place else [])
        return value if self._inner is None else self._inner.as_slice(parameter, value)

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state on every rank, with the names of the user's own module.

        Collective: a broadcast of each tensor that not all ranks have.
        """
        from tp_core.state import whole

        return {name: whole(value) for name, value in self.state_parts(model).items()}

    def state_parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with tensors of other ranks that are sent when they are asked for.

        Collectives: none; `tp_core.state.whole` broadcasts a tensor.
        """
        plain = self.unwrap(model)
        stages = self._stages.get(plain)
        parts: dict[str, Tensor] = {}
        for name, value in plain.state_dict(keep_vars=True).items():
            owner = None
            if stages is not None and id(value) in stages.split.of_ranks:
                owner = (stages.holders.get(id(value)) or [0])[0]
                parts[name] = stages.split.whole_later(value, self._team, self._places, owner)
                continue
            if stages is not None:
                holders = stages.holders.get(id(value), [])
                is_cut = 0 < len(holders) < self.ranks or id(value) in stages.shared
                owner = holders[0] if is_cut else stages.buffers.get(id(value))
            if owner is None or stages is None:
                parts[name] = value.detach()
                continue
            shape = stages.shapes.get(id(value), value.shape)
            later = torch.empty(shape, dtype=value.dtype, device="meta")
            rows = self._rows if id(value) in stages.shared else None
            later.full_tensor = partial(self._sent, value.detach(), shape, owner, rows)  # type: ignore[attr-defined]
            parts[name] = later
        return plain_state(parts)

    def _sent(self, mine: Tensor, shape: torch.Size, owner: int, rows: Rows | None) -> Tensor:
        if rows is not None and self.place == owner:
            (mine,) = rows.gather([mine], [shape])
        whole = mine.contiguous() if self.place == owner else mine.new_empty(shape)
        raw = whole.view(-1).view(torch.uint8)
        if raw.numel():
            dist.broadcast(raw, group_src=owner, group=self.group)
        return whole

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state of :meth:`model_state`, of any backend.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        plain = self.unwrap(model)
        stages = self._stages.get(plain)
        given = dict(plain_state(state))
        if stages is not None:
            for name, value in plain_state(plain.state_dict(keep_vars=True)).items():
                shape = stages.shapes.get(id(value))
                new = given.get(name)
                if isinstance(new, Tensor) and id(value) in stages.split.of_ranks:
                    given[name] = stages.split.cut(new, value)
                elif isinstance(new, Tensor) and new.shape == shape and value.shape != shape:
                    shared = self._rows is not None and id(value) in stages.shared
                    rows = self._rows.own(len(new)) if self._rows is not None and shared else None
                    given[name] = new.new_empty(value.shape) if rows is None else new[rows]
        load_whole_state(plain, given)

    def close(self) -> None:
        """Leave the process group, if this session has joined it."""
        self._stages.clear()
        self._optimizers.clear()
        super().close()


def _chosen(options: PipelineOptions, job: Job, ranks: int) -> PipelineOptions:
    """Return the options with a schedule in place of "auto"."""
    blocks = ranks if job.model is None else len(find_units(job.model, None)[1])
    names = [name for name in get_args(ScheduleName) if name != "auto"]
    name, why = choose_schedule(names, ranks, options.microbatches or 4 * ranks, blocks)
    log.info("schedule %s: %s", name, why)
    return replace(options, schedule=name)


def _write_trace(path: str, spans: Sequence[Span]) -> None:
    """Write when ranks computed what, as a trace of Chrome: a row for each rank, times in microseconds."""
    first = min(span.begin for span in spans)
    names = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}
    events = [
        {
            "name": f"{names[span.work.kind]} {span.work.part}",
            "cat": f"stage {span.work.stage}",
            "ph": "X",
            "ts": (span.begin - first) * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "pid": 0,
            "tid": span.rank,
            "args": {"stage": span.work.stage, "micro-batch": span.work.part},
        }
        for span in spans
    ]
    rows = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    rows.append({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "stages of a batch"}})
    Path(path).write_text(json.dumps({"traceEvents": rows + events, "displayTimeUnit": "ms"}))


class _Body(nn.Module):
    """The forward of a unit, to compile: its own call is replaced while steps run."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _WholeLoss(torch.autograd.Function):
    """The loss of the whole batch; its gradients are there already, and a leaf stands for them.

    Forward and backward exchange nothing: what follows the leaf's gradient does.
    """

    @staticmethod
    def forward(ctx: Any, _leaf: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return grad.sum(), None


def _gather_values(mine: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Return each rank's value.

    Collective: an all-gather, and a second one if a value is long; torch's ``all_gather_object`` takes two.
    """
    raw = pickle.dumps(mine)
    sent = bytearray(len(raw).to_bytes(8, "little") + raw)
    found: list[bytes] = []
    nbytes = _SHORT
    while not found or nbytes > len(found[0]):
        padded = torch.zeros(nbytes, dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(sent, dtype=torch.uint8)[:nbytes]
        received = torch.empty(dist.get_world_size(group), nbytes, dtype=torch.uint8, device=device)
        all_gather_single(received.view(-1), padded.to(device), group=group)
        found = [row.numpy().tobytes() for row in received.cpu()]
        nbytes = max(8 + int.from_bytes(one[:8], "little") for one in found)
    return [pickle.loads(one[8:]) for one in found]


def _portable(error: Exception) -> tuple[bytes | None, str]:
    """Return an error for other ranks: pickled where it can be, and as text."""
    text = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
        return (pickled if str(pickle.loads(pickled)) == str(error) else None), text
    except Exception:  # noqa: BLE001 - an error of any class, which may do anything when it is pickled
        return None, text


def _detached(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _without_numbers(value: Any) -> Any:
    """Return a tensor without memory for one that has dimensions."""
    return value.to("meta") if isinstance(value, Tensor) and value.dim() else value


def _no_rows(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the type of one, with its other dimensions."""
    return tensor.new_empty(0, *tensor.shape[1:])


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
                "LayerNorm, or freeze it: call its eval() in the step"
            )
            raise ModelError(msg)


def _modes(model: nn.Module) -> tuple[object, ...]:
    """Return what changes the way of a step beside its batch."""
    kinds = ("cpu", "cuda")
    casts = tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
    return tuple(m.training for m in model.modules()), torch.is_grad_enabled(), casts


def _form(batch: Any) -> object:
    """Return the structure of a batch, with the shapes and types of tensors and all other values."""
    names = tuple(map(str, batch)) if isinstance(batch, Mapping) else ()
    leaves = tuple(
        (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else (type(v).__name__, repr(v))
        for v in tree_leaves(batch)
    )
    return type(batch).__name__, names, leaves
