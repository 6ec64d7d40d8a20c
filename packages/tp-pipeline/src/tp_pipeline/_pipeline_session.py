"""The session of a rank that has some stages of the model."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tp_core import recursive_to, tree_leaves, tree_map
from tp_core.data import (
    LoadedBatches,
    Parts,
    PreparedLoader,
    Scattering,
    Share,
    StepOutput,
    combine_outputs,
    near_power_of_two,
)
from tp_core.device_types import wide_float
from tp_core.errors import ConfigError, DisagreementError, ModelError, StepError, TpError
from tp_core.fully_sharded import whole_matrix_optimizer
from tp_core.jobs import CompileOptions
from tp_core.output import get_logger
from tp_core.plugins import Job
from tp_core.random import preserve_torch_rng_state
from tp_core.sessions import (
    PerModule,
    ProcessGroupSession,
    join_process_group,
    new_process_group,
    rendezvous_store,
)
from tp_core.state import load_whole_state, plain_state, whole
from tp_core.tensors import TensorSlice, check_not_quantized, norm_dtype

from tp_pipeline._batch_run import BatchRun, PlannedBatch
from tp_pipeline._batch_trace import BatchTrace
from tp_pipeline._micro_batches import split_batch
from tp_pipeline._pipeline_options import PipelineOptions, ScheduleName
from tp_pipeline._row_shards import RowShards
from tp_pipeline._schedule import Orders, Span, StageWork, choose_schedule
from tp_pipeline._stage_agreement import gather_or_raise
from tp_pipeline._stage_exchange import StageExchange
from tp_pipeline._stage_gradients import (
    DataParallelGradients,
    PendingGradients,
    counted_in_norm,
    sum_over_stages,
)
from tp_pipeline._stage_units import find_units
from tp_pipeline._staged_model import ParameterStates, PipelineRanks, StagedModel

log = get_logger("tp_pipeline")

KeptStates = Callable[[], AbstractContextManager[ParameterStates]]


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
        self._timeout_s = options.timeout_s
        if inner is None:
            self._pipeline = self._join(job, options, ranks)
        else:
            self._pipeline = self._join_split(inner, job, options, ranks)
        if options.schedule == "auto":
            options = _choose_options(options, job, ranks)
        self.options = options
        self.loaded = LoadedBatches()
        self._scattering = Scattering.by_names(
            options.samples,
            options.broadcast,
            loaded=self.loaded,
            backend="pipeline",
            part="micro-batch",
            instead="or take a backend with whole batches (ddp, fsdp)",
        )
        is_early = self.device.type == "cpu"
        self.orders = Orders(options.schedule, ranks, options.stages_per_rank, is_early=is_early)
        self._exchange = StageExchange(
            self._pipeline.group,
            self.orders,
            self.device,
            options.timeout_s,
            rendezvous_store(job.environment),
            self._mates(),
        )
        self.takes_deferred_models = self.sample_size == 1  # others are compared with the whole model
        self._staged: PerModule[StagedModel] = PerModule()
        self._share = 0  # samples of this rank in a whole batch to train on
        self._optimizers: list[Optimizer] = []
        self._kept: list[KeptStates] = []  # what else has a state of parameters

        # Data-parallel ranks: those with the same stages.
        self._rows: RowShards | None = None
        if options.data == "fsdp" and self._data_group is not None:
            self._rows = RowShards(self._data_group)
        self.evaluates_together = self._rows is not None  # without gradients, too, weights are gathered
        self._agreeing: dist.ProcessGroup | None = None  # of data-parallel ranks, for what the host has
        if self._gradient_size > 1:
            self._agreeing = self._host_group(self._gradient_group)
        self._data_parallel = DataParallelGradients(
            self._gradient_group, self._agreeing, self._gradient_size, self._rows
        )
        self._syncs = True

        self._is_in_step = False
        self._trace: BatchTrace | None = None
        if options.trace is not None and self.rank == 0:
            self._trace = BatchTrace(options.trace)
        # About what the loss was last multiplied by, on which half precision's gradients depend.
        if job.precision == "fp16-mixed":
            self._scale = 2.0**16
        else:
            self._scale = 1.0

    def _join(self, job: Job, options: PipelineOptions, ranks: int) -> PipelineRanks:
        """Join the process group, and form the groups of ranks with whole tensors."""
        leave = join_process_group(
            job.environment,
            device=job.devices[0],
            timeout_s=options.timeout_s,
            bind_device=options.bind_device,
        )
        world, rank = dist.get_world_size(), dist.get_rank()
        copies = world // ranks
        pipeline, data_group = None, None
        # Every rank makes every group, in one order; of those without it, it gets `None`.
        for first in range(0, world, ranks):
            group = new_process_group(range(first, first + ranks), timeout_s=options.timeout_s)
            pipeline = group or pipeline
        if copies > 1:
            for first in range(ranks):
                group = new_process_group(range(first, world, ranks), timeout_s=options.timeout_s)
                data_group = group or data_group
        ProcessGroupSession.__init__(
            self, job, data_group=data_group, data_rank=rank // ranks, data_size=copies, leave=leave
        )
        if pipeline is None:
            msg = "torch made no process group for this rank"
            raise ConfigError(msg)
        return self._pipeline_ranks(pipeline, pipeline, rank % ranks, list(range(ranks)), ranks)

    def _join_split(
        self, inner: ProcessGroupSession, job: Job, options: PipelineOptions, ranks: int
    ) -> PipelineRanks:
        """Take the groups of ranks with the same part of tensors, and form those that hold a model.

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
        everyone = self.gather_objects((inner.data_rank, inner.sample_rank), where="the ranks of a pipeline")
        model_group = None
        for copy in range(inner.data_size):
            members = [rank for rank, (data_rank, _) in enumerate(everyone) if data_rank == copy]
            model_group = new_process_group(members, timeout_s=options.timeout_s) or model_group
        pipeline = inner.sample_group or dist.group.WORLD
        if model_group is None or pipeline is None:
            msg = "torch made no process group for this rank"
            raise ConfigError(msg)
        places = [place for data_rank, place in everyone if data_rank == inner.data_rank]
        return self._pipeline_ranks(pipeline, model_group, inner.sample_rank, places, ranks)

    def _pipeline_ranks(
        self, group: Any, model_group: Any, place: int, places: list[int], size: int
    ) -> PipelineRanks:
        return PipelineRanks(
            group=group,
            size=size,
            place=place,
            model_group=model_group,
            places=places,
            host_group=self._host_group(model_group),
            device=self.device,
            sample_group=self.sample_group,
            sample_size=self.sample_size,
        )

    def _host_group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Return a group of the same ranks for what the host has; ``None`` stands for all ranks.

        What a rank says through an accelerator's own group it can read only when the device has done all
        that it was given before. In each step this would undo that work is launched ahead.

        Collective: with an accelerator, the creation of the group.
        """
        own = group or dist.group.WORLD
        if self.device.type != "cpu":
            ranks = dist.get_process_group_ranks(own)
            own = new_process_group(ranks, backend="gloo", known_to_all=False, timeout_s=self._timeout_s)
        if own is None:
            msg = "torch made no process group for this rank"
            raise ConfigError(msg)
        return own

    def _mates(self) -> tuple[str, int]:
        """Return a name of the ranks that compute together with this one in its stages, and their number."""
        if self.sample_size > 1:  # of slices of the same sequences
            return getattr(self.sample_group, "group_name", "all"), self.sample_size
        ranks = self._pipeline
        return f"{ranks.model_group.group_name}/{ranks.place}", list(ranks.places).count(ranks.place)

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
            model = self._inner.prepare_model(model)
            staged = self._staged_model(model)
            staged.find_pieces()
            groups: list[dist.ProcessGroup | None] = [self._pipeline.group]
            if self._gradient_size > 1:
                groups.append(self._gradient_group)
            staged.share_initial(groups)
        else:
            self.check_plain(model)
            check_not_quantized(model, "backend 'pipeline'")
            self.check_same_parameters(model)
            staged = self._staged_model(model)
            staged.materialize(is_first=self.rank == 0)
            model = super().prepare_model(model)
            staged.share_initial([None])
        self._staged[model] = staged
        self._reductions.know(model)
        return model

    def _staged_model(self, model: nn.Module) -> StagedModel:
        return StagedModel(
            model,
            self.options.cuts,
            self.orders,
            self._pipeline,
            rows=self._rows,
            inner=self._inner,
            accepts_statistics=self.options.statistics == "microbatch",
            is_split=self.options.microbatches != 1,
        )

    def compile_model(self, model: nn.Module) -> None:
        """Compile the units, each by itself: the compiler would look past the cuts of a whole model.

        Raises:
            ConfigError: Tensors are split: stages would compile collectives in other orders.
        """
        if self._inner is not None:
            msg = "compile= does not go with weights='shard' of backend 'pipeline' yet; leave it out"
            raise ConfigError(msg)
        staged = self._staged.get(model)
        if staged is not None:
            options = self.job.compile or CompileOptions()
            for name, unit in staged.units.items():
                forward = _UnitForward(unit.forward)
                forward.compile(**options.arguments())
                staged.compiled[name] = forward

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

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> PreparedLoader:
        """Return a loader of this rank's share of every batch; a loader to train on says how large that is.

        Raises:
            LoaderError: As for every session.

        Collectives: those of every session.
        """
        prepared = super().prepare_loader(loader, training=training, shard=shard)
        size = getattr(loader, "batch_size", None)
        if training and isinstance(loader, DataLoader) and size is not None:
            copies = self.data_size if shard else 1
            self._share = max(self._share, size // copies)
        return prepared

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step for micro-batches on all stages, and return the whole batch's output on each rank.

        Before the first call with a step, and with batches of another form, the step runs on stand-ins. The
        first one cuts the model: parameters of other ranks' stages become empty here. Steps of data ranks may
        call other modules, so these ranks agree on them when they first learn.

        Raises:
            ModelError: The model cannot be cut, or normalizes over its batch.
            StepError: The step cannot run for parts of the batch, or does something else than on stand-ins.
            ConfigError: The options do not fit the model or the batch.
            DisagreementError: The ranks find different cuts.

        Collectives: sends and receives between neighboring stages; an all-gather of the outputs over the
        ranks that hold the model, and a broadcast of each of its tensors on an accelerator. The first time
        with a form of batch, another all-gather. The first time that data ranks learn, an all-gather over
        them. Where they share weights, all-gathers of them before the batch.
        """
        staged = self._staged.get(model)
        if staged is None:
            msg = "the step runs with a model that was not prepared: trainer.prepare(model) first"
            raise ModelError(msg)
        planned = self._plan(staged, step, batch)
        learns = torch.is_grad_enabled() and all(plan.has_loss for plan in planned.plans)
        trained = staged.trained()
        if learns:
            seed = int(torch.randint(2**62, ()))
        else:
            seed = self.job.seed
        run = BatchRun(
            planned,
            staged,
            self._exchange,
            trained=list(trained.values()),
            seed=seed,
            is_sum=self.job.loss == "sum",
            scale=self._scale,
            is_timed=self.options.trace is not None,
        )
        number = len(planned.parts)
        if learns:
            orders = self.orders.learning(number)
        else:
            orders = self.orders.forwards(number)
        before = {name: parameter.grad for name, parameter in trained.items()}
        gradients: dict[str, Tensor] = {}
        self._is_in_step = True
        try:
            # Gradients of the batch are counted apart: see Note [how gradients of stages are counted].
            for parameter in trained.values():
                parameter.grad = None
            with preserve_torch_rng_state([self.device]), staged.gathered(), staged.stand_ins():
                run.perform(orders[self._pipeline.place])
                for name, parameter in trained.items():
                    if parameter.grad is not None:
                        gradients[name] = parameter.grad
        finally:
            self._is_in_step = False
            for name, parameter in trained.items():
                parameter.grad = before[name]
        output, reached, total = self._gather_outputs(
            staged, planned.parts, run, list(gradients), learns=learns
        )
        if not learns:
            return output
        gradients = sum_over_stages(staged, self._pipeline, gradients, reached)
        return self._with_gradients(output, PendingGradients(staged, gradients, total))

    def _plan(self, staged: StagedModel, step: Callable[..., StepOutput], batch: Any) -> PlannedBatch:
        """Return a batch that is ready to run; cut the model if it is not cut yet.

        Collectives: as :meth:`run` says, before the batch.
        """
        learns = torch.is_grad_enabled()
        # In evaluation a data rank may have no batch, and does not come here.
        all_come = learns or self._rows is not None
        if all_come and not staged.is_agreed:
            agreeing = self._agreeing
        else:
            agreeing = None
        try:
            is_first = learns and not staged.is_planned
            parts = split_batch(
                batch, self._scattering, self.options, self.orders, is_first=is_first, share=self._share
            )
            plans = staged.plans_of(step, parts)
        except Exception as error:
            if agreeing is not None:
                staged.agree(error, agreeing)
            raise
        if agreeing is not None:
            staged.agree(None, agreeing)
        if agreeing is not None or not staged.is_cut:
            with ExitStack() as stack:
                states: list[ParameterStates] = [optimizer.state for optimizer in self._optimizers]
                states += [stack.enter_context(kept()) for kept in self._kept]
                staged.cut(states)
        return PlannedBatch(step, parts, plans)

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

    def _gather_outputs(
        self, staged: StagedModel, parts: Parts, run: BatchRun, names: list[str], *, learns: bool
    ) -> tuple[StepOutput, set[str], float]:
        """Return the batch's output, which parameters have gradients on any rank, and what divides these.

        Args:
            staged: The model.
            parts: The micro-batches.
            run: Their run.
            names: The names of parameters with gradients on this rank.
            learns: Whether the batch has gone backward.

        Raises:
            Exception: A rank has failed: its error, on all that hold the model.

        Collectives: an all-gather over the ranks that hold the model; with accelerators a broadcast of each
        tensor of the output.
        """
        ranks = self._pipeline
        last_place = self.orders.rank_of(self.orders.stages - 1)
        output, failure = None, run.failure
        if ranks.place == last_place and failure is None:
            try:
                output = combine_outputs(run.outputs, parts, loss=self.job.loss, device=self.device)
            except StepError as error:
                failure = error
        total = sum(run.weights) if self.job.loss == "mean" else 1.0
        sent = _SentOutput(output)
        gathered = staged.gather((names, sent.described, total * (run.factor or 0.0), run.spans()), failure)
        if learns and self._trace is not None:
            self._trace.add(self._spans_of([spans for *_, spans in gathered]))
        reached = {name for names, *_ in gathered for name in names}
        sender = ranks.places.index(last_place)
        _, described, total, _ = gathered[sender]
        return sent.receive(described, sender, ranks), reached, total

    def _spans_of(self, works: Sequence[Sequence[tuple[StageWork, float, float]]]) -> list[Span]:
        """Return the spans of one rank of each place, by the work of all ranks that hold the model."""
        ranks = self._pipeline
        spans = []
        for place, rank in enumerate(dist.get_process_group_ranks(ranks.group)):
            spans += [Span(rank, *work) for work in works[ranks.places.index(place)]]
        return spans

    # -- the gradients of the whole batch -----------------------------------------------------

    def _with_gradients(self, output: StepOutput, pending: PendingGradients) -> StepOutput:
        """Return an output whose loss adds gradients: see Note [how gradients of stages are counted], 3."""
        if isinstance(output, Mapping):
            loss = output["loss"]
        else:
            loss = output
        anchor = torch.zeros((), dtype=loss.dtype, device=self.device, requires_grad=True)
        # After hooks of a leaf, by which the loss of a stand-in counts nothing.
        anchor.register_post_accumulate_grad_hook(partial(self._add, pending))
        loss = _BatchLoss.apply(anchor, loss)  # type: ignore[no-untyped-call]  # torch's
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _add(self, pending: PendingGradients, anchor: Tensor) -> None:
        factor, anchor.grad = anchor.grad, None
        if factor is None:
            factor = torch.zeros((), device=self.device)
        if self.job.precision == "fp16-mixed" and 0.0 < float(factor) < math.inf:  # the scaler waits, too
            self._scale = near_power_of_two(float(factor))
        pending.add(factor, self._data_parallel, averages=self._syncs)

    def backward(self, loss: Tensor, share: Share | None = None, **graph: bool) -> None:
        """Add the gradients of the loss over the whole global batch.

        Raises:
            StepError: The loss is another value than the "loss" that the step has returned.
            DisagreementError: The session that splits tensors finds other gradients on ranks that have the
                same parameter; on all ranks that hold the model.

        Collectives: those of :meth:`run`'s gradients; with split tensors those of that session's checks, and
        an all-gather over the ranks that hold the model.
        """
        if not loss.requires_grad:
            msg = (
                "backward() was called with a value that has no gradient: on backend 'pipeline' the 'loss' "
                "that a step returns goes back, and nothing else of it; add the losses in the step, or run a "
                "step for each of them"
            )
            raise StepError(msg)
        if self._inner is None:
            super().backward(loss, share, **graph)
            return
        failure = None
        try:
            self._reductions.run_backward(partial(self._inner.backward, loss, share, **graph), loss)
        except DisagreementError as error:
            failure = error
        gather_or_raise(None, failure, group=self._pipeline.host_group)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        """Return a context in which gradients are not averaged over the data ranks."""
        return self._unsynced()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
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
        plain = self.unwrap(model)
        counted = counted_in_norm(
            plain,
            self._staged.get(plain),
            place=self._pipeline.place,
            counts_unsharded=self._rows is None or self.data_rank == 0,
        )
        if self._inner is not None:  # a list of parameters, as it looks at no modules
            norm = self._inner.grad_norm(nn.ParameterList(counted), norm_type=norm_type)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None], norm_type)
        powers = norm.to(self.device, wide_float(self.device))
        groups: list[dist.ProcessGroup | None] = [self._pipeline.group]
        if self._rows is not None:
            groups.append(self._data_group)
        if norm_type == float("inf"):
            for group in groups:
                dist.all_reduce(powers, dist.ReduceOp.MAX, group=group)
            return powers.to(norm_dtype(plain.parameters()))
        powers = powers**norm_type
        for group in groups:
            dist.all_reduce(powers, group=group)
        return (powers ** (1.0 / norm_type)).to(norm_dtype(plain.parameters()))

    def explain_error(self, error: Exception, models: Iterable[nn.Module]) -> None:
        """Raise an error that names the remedy for torch's own one of code with empty parameters.

        Errors of steps are those of the model.
        """
        if isinstance(error, TpError) or not _is_of_empty_tensors(error):
            return
        staged = [staged_model for model in models if (staged_model := self._staged.get(model)) is not None]
        name = next((n for each in staged for n in each.placements if each.is_cut and not each.has(n)), None)
        if name is not None:
            msg = (
                f"code of this run computes with parameters that this rank does not have, such as {name!r}: "
                "on backend 'pipeline' those of other stages are empty here "
                f"({type(error).__name__}: {error}). Change each parameter by itself, in place, as with "
                "parameter.data.mul_(0.9); average weights by ExponentialMovingAverage or "
                "StochasticWeightAveraging; or take the backend 'ddp', with whole parameters on each rank"
            )
            raise StepError(msg) from error

    # -- state --------------------------------------------------------------------------------

    @contextmanager
    def states_following(self, states: KeptStates) -> Iterator[None]:
        """Cut and send ``states`` as the parameters, if the first run with a model is within the context."""
        self._kept.append(states)
        try:
            yield
        finally:
            self._kept.remove(states)

    def as_slice(self, parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:
        """Return ``value`` as what this rank has of the tensor: all, some rows or no part of it."""
        if not isinstance(value, TensorSlice):
            for model in self._staged:
                staged = self._staged.get(model)
                if staged is None:
                    placement = None
                else:
                    placement = staged.placement_of(parameter)
                if staged is not None and placement is not None:
                    return staged.slice_of(placement, parameter, value)
        if self._inner is None:
            return value
        return self._inner.as_slice(parameter, value)

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state on every rank, with the names of the user's own module.

        Collective: a broadcast of each tensor that not all ranks have.
        """
        return {name: whole(value) for name, value in self.state_parts(model).items()}

    def state_parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with tensors of other ranks that are sent when they are asked for.

        Collectives: none; `tp_core.state.whole` broadcasts a tensor.
        """
        plain = self.unwrap(model)
        staged = self._staged.get(plain)
        if staged is not None:
            return staged.state_parts()
        return plain_state({n: value.detach() for n, value in plain.state_dict(keep_vars=True).items()})

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state of :meth:`model_state`, of any backend.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        plain = self.unwrap(model)
        staged = self._staged.get(plain)
        if staged is not None:
            staged.load_state(state)
        else:
            load_whole_state(plain, plain_state(state))

    def close(self) -> None:
        """Leave the process group, if this session has joined it."""
        self._staged.clear()
        self._optimizers.clear()
        super().close()


def _choose_options(options: PipelineOptions, job: Job, ranks: int) -> PipelineOptions:
    """Return the options with a schedule in place of "auto"."""
    if job.model is None:
        blocks = ranks
    else:
        blocks = len(find_units(job.model, None)[1])
    names = [name for name in get_args(ScheduleName) if name != "auto"]
    name, reason = choose_schedule(names, ranks, options.microbatches or 4 * ranks, blocks)
    log.info("schedule %s: %s", name, reason)
    return replace(options, schedule=name)


class _UnitForward(nn.Module):
    """The forward of a unit, to compile: its own call is replaced while steps run."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _BatchLoss(torch.autograd.Function):
    """The loss of the whole batch: see Note [how gradients of stages are counted], 3.

    Forward and backward exchange nothing: the hook of the anchor does.
    """

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return grad.sum(), None


class _SentOutput:
    """The output of a step on its way from the last stage to all ranks that hold the model.

    What the host has goes with what the ranks tell each other anyway. Tensors of an accelerator follow
    through its own group, so that no host waits until they are computed.

    Args:
        output: The output on the rank of the last stage; ``None`` on others.

    Attributes:
        described: The output, with tensors without memory in place of those of an accelerator.
    """

    def __init__(self, output: Any) -> None:
        self._tensors: list[Tensor] = []
        self.described = tree_map(self._describe, output)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value.cpu()
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        self._tensors.append(value.contiguous())
        return value.to("meta")

    def receive(self, described: Any, sender: int, ranks: PipelineRanks) -> Any:
        """Return the sender's output, on this rank's device.

        Args:
            described: The sender's description.
            sender: Its rank among those that hold the model.
            ranks: These.

        Collectives: a broadcast of each tensor of an accelerator.
        """
        own = iter(self._tensors)

        def receive_leaf(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_meta:
                if dist.get_rank(ranks.model_group) == sender:
                    tensor = next(own)
                else:
                    tensor = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
                dist.broadcast(tensor, group_src=sender, group=ranks.model_group)
                return tensor
            if isinstance(value, Tensor | PackedSequence):
                return recursive_to(value, ranks.device)
            return value

        return tree_map(receive_leaf, described)


def _is_of_empty_tensors(error: BaseException) -> bool:
    """Return whether an error comes from a function with an empty tensor, and from no step of a batch."""
    trace = error.__traceback__
    has_empty = False
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == __name__:
            return False
        # Of the innermost function: torch's words name sizes at best.
        leaves = tree_leaves([*trace.tb_frame.f_locals.values()])
        has_empty = any(isinstance(leaf, Tensor) and not leaf.numel() for leaf in leaves)
        trace = trace.tb_next
    return has_empty
