"""The session of a process in torch's default process group: the base of all backends over groups."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_core._contracts._batch import Share, StepOutput
from tp_core._contracts._job import Job
from tp_core._contracts._session import ReduceOp, Session, check_reduce
from tp_core.data._step_outputs import zero_backward
from tp_core.device_types import binds_process_groups
from tp_core.errors import ConfigError, DisagreementError, ModelError
from tp_core.modules._parameters import check_no_max_norm, quantized_parts
from tp_core.output import get_logger
from tp_core.sessions._object_exchange import broadcast_object, gather_objects
from tp_core.sessions._optimizer_draws import share_draws
from tp_core.sessions._process_group import new_process_group
from tp_core.sessions._reduction_watch import ReductionWatch
from tp_core.sessions._stepping_data_parallel import SteppingDataParallel
from tp_core.state._training import load_whole_state

log = get_logger("tp_core")

T = TypeVar("T")

_MOST_SAMPLES = 16  # of a parameter: two draws differ in nearly all


class ProcessGroupSession(Session):
    """One rank of a job with processes in torch's default process group.

    Ranks that read different samples form a data group, all ranks by default. Over it
    DistributedDataParallel averages gradients, and values are reduced. A backend that splits models over
    ranks passes its own data group. With `Job.ranks_per_sample` consecutive ranks of it share samples.
    Gradients are still averaged over all of them, and values are reduced over those with other samples::

        data ranks       0     0     1     1        8 ranks: 2 of data x 2 that share samples x 2 of tensors
        sample ranks     0     1     0     1        the outermost axis first, whichever of them there are
        ranks           0 1   2 3   4 5   6 7

    Args:
        job: The job.
        data_group: The ranks that read different samples; ``None`` for all.
        data_rank: The rank of this process among them; by default its rank in ``data_group``.
        data_size: The number of these ranks; by default the size of ``data_group``.
        leave: The function that leaves the process group, as `join_process_group` returned it, called when
            the session is closed; ``None`` if other code leaves it.

    Attributes:
        sample_group: The ranks that share this rank's samples; ``None`` for all ranks, or if it is one.
        sample_rank: The rank of this process among them.
        sample_size: The number of these ranks.

    Raises:
        ConfigError: The ranks of the data group are no multiple of those that share samples.

    Collectives: where ranks share samples, an all-gather of the groups, and the creation of theirs.
    """

    def __init__(
        self,
        job: Job,
        *,
        data_group: ProcessGroup | None = None,
        data_rank: int | None = None,
        data_size: int | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(job)
        # Read once: the training loop needs them in every step, and torch's functions cost more.
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if data_rank is None:
            rank = dist.get_rank(data_group)
        else:
            rank = data_rank
        if data_size is None:
            size = dist.get_world_size(data_group)
        else:
            size = data_size
        self._gradient_group, self._gradient_size = data_group, size
        if job.ranks_per_sample == -1:
            shared = size
        else:
            shared = job.ranks_per_sample
        if size % shared:
            if leave is not None:
                leave()
            msg = (
                f"each sample is to be shared by {shared} ranks, and {size} ranks, which hold the same "
                "weights, are not a multiple of it"
            )
            raise ConfigError(msg)
        self._data_group, self._data_rank, self._data_size = data_group, rank // shared, size // shared
        self.sample_group: ProcessGroup | None = None
        self.sample_rank, self.sample_size = rank % shared, shared
        if shared > 1:
            self._data_group, self.sample_group = self._divide(shared)
        self._leave = leave
        self._reductions = ReductionWatch(self.check_optimizer, ranks=self._gradient_size)

    def _divide(self, shared: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Return the group of ranks with other samples, and the group of those with the same."""
        groups: list[ProcessGroup | None] = [None, None]
        own = dist.get_process_group_ranks(self._gradient_group or dist.group.WORLD)
        for ranks in sorted(
            set(map(tuple, self.gather_objects(own, where="groups of ranks")))
        ):  # every rank makes all, in one order
            others = [ranks[i::shared] for i in range(shared)]
            same = [ranks[i : i + shared] for i in range(0, len(ranks), shared)]
            for i, parts in enumerate((others, same)):
                for part in parts:
                    if 1 < len(part) < self._world_size:
                        groups[i] = new_process_group(part) or groups[i]
        return groups[0], groups[1]

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of processes that run the job."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host, from 0."""
        return self.job.environment.local_rank

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the data, from 0."""
        return self._data_rank

    @property
    def data_size(self) -> int:
        """The number of shares that the data is split into."""
        return self._data_size

    # -- preparing ----------------------------------------------------------------------------

    def check_same_parameters(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Check that all ranks have the same model.

        Buffers are compared where no parameter is split. All ranks then get the first rank's buffers, and
        torch ends the process where shapes differ. They get its weights, too: the first rank warns where
        some values of another one differ.

        Args:
            model: The plain module.
            shapes: The whole shapes of split parameters, by name.

        Raises:
            DisagreementError: On every rank, if parameters or buffers differ in name, shape or type.

        Collective: one all-gather of the parameters' descriptions.
        """
        whole = shapes or {}
        own = [
            f"{name}: {whole.get(name, tuple(p.shape))} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in model.named_parameters()
        ]
        # Private to torch: DDP ignores the tensors that this attribute names, so they may differ.
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        buffers = [
            f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers() if name not in ignored
        ]
        samples = {} if whole else _samples_of(model, without=ignored)
        buffers = [] if whole else buffers
        own_and_buffers = (own, buffers)
        everyones = self.gather_objects((*own_and_buffers, samples), where="shapes of parameters")
        for i, what in enumerate(("parameters", "buffers")):
            first = everyones[0][i]
            for rank, each in enumerate(everyones):
                theirs = each[i]
                if theirs == first:
                    continue
                in_first = [line for line in first if line not in theirs][:1] or ["nothing of it"]
                in_other = [line for line in theirs if line not in first][:1] or ["nothing of it"]
                msg = (
                    f"ranks disagree on the model's {what}: rank 0 has {in_first[0]}, rank {rank} has "
                    f"{in_other[0]} ({len(first)} and {len(theirs)} {what}); build the same model on "
                    "every rank"
                )
                raise DisagreementError(msg)
        if self.is_main:
            _warn_other_values([each[2] for each in everyones])

    def average_gradients(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the model in a wrapper that averages its gradients over the ranks that train it together.

        A model without trained parameters is returned as it is, and so is one of a data group of one, or of a
        job with ``averages_gradients=False``.

        Args:
            model: The plain module, on its device.
            **options: The options of DistributedDataParallel.

        Raises:
            ModelError: An embedding writes its weight in the forward pass (``max_norm``); or ranks have
                weights of bitsandbytes with other scales.

        Collective: a broadcast of the weights of the group's first rank. Later, forward broadcasts buffers
        and backward all-reduces gradients in buckets, as DDP does.
        """
        if self._gradient_size == 1 or not self.job.averages_gradients:
            return model
        if not any(p.requires_grad for p in model.parameters()):
            self._reductions.listen()
            return model  # torch refuses to wrap a model without gradients
        check_no_max_norm(model, "each rank")
        self._share_quantized(model)
        self._check_scales(model)
        if self.device.type == "cpu":
            device_ids = None
        else:
            device_ids = [self.device]
        averaging = SteppingDataParallel(
            model,
            device_ids=device_ids,
            process_group=self._gradient_group,
            **options,
        )
        self._reductions.watch(averaging)
        return averaging

    def _share_quantized(self, model: nn.Module) -> None:
        """Share the first rank's quantized weights with those that train them, which torch's wrapper cannot.

        Collective: a broadcast of each of the tensors of which they consist.
        """
        weights = {n: parts for n, p in model.named_parameters() if (parts := quantized_parts(p)) is not None}
        for part in (part for parts in weights.values() for part in parts):
            whole = part.contiguous()
            dist.broadcast(whole, group_src=0, group=self._gradient_group)
            if whole is not part:
                part.copy_(whole)
        if weights:
            # Private to torch: it has no public way to name what its wrapper ignores.
            ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *weights]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    def _check_scales(self, model: nn.Module) -> None:
        """Check that ranks have the same scales of quantized weights that are attributes of parameters.

        Collective: one all-gather of digests, where there are weights of bitsandbytes.
        """
        parameters = dict(model.named_parameters())
        if not any(type(p).__module__.startswith("bitsandbytes.") for p in parameters.values()):
            return
        names = parameters.keys() | dict(model.named_buffers()).keys()
        digests = {
            name: hashlib.sha256(bytes(value.cpu().reshape(-1).view(torch.uint8).numpy())).digest()
            for name, value in model.state_dict().items()
            if name not in names and isinstance(value, Tensor)
        }
        for other in self.gather_objects(digests, where="scales of quantized weights"):
            if other != digests:
                name = min(n for n in digests.keys() | other.keys() if digests.get(n) != other.get(n))
                msg = (
                    f"ranks have quantized the model's base from other weights: {name!r} differs, and nobody "
                    "shares these scales of bitsandbytes; load the same base on every rank, from files or "
                    "after the same torch.manual_seed"
                )
                raise ModelError(msg)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer, which from now on must step averaged gradients only.

        Random numbers of its steps are the same on all ranks, as of stochastic rounding.
        """
        self._reductions.add_optimizer(optimizer)
        # torch's own draw nothing, and need no hooks.
        is_own = all(kind.__module__.startswith("torch.") for kind in type(optimizer).__mro__[:-1])
        if self._world_size > 1 and not is_own:
            gather = partial(self.gather_objects, where="the random numbers of an optimizer")
            share_draws(optimizer, self.job.seed, self.device, gather)
        return optimizer

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on this rank's share of the batch.

        The step gets the user's own module, with all methods and attributes, and runs within the forward of
        the wrapper. Without gradients the wrapper is left out: DDP's forward broadcasts buffers, and ranks
        that evaluate different numbers of batches would wait for each other without an end.

        Collective: in forward DDP's broadcast of buffers, with gradients only; in backward its all-reduces.
        """
        if not torch.is_grad_enabled():
            return step(self.unwrap(model), batch)
        if isinstance(model, SteppingDataParallel):
            return model.run(step, batch)
        return step(model, batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` with the user's own modules, each within its own wrapper's forward.

        Collective: those of :meth:`run`, for each model.
        """
        return self._enter(step, models, batch, [])

    # A method, and no function within the other: one that calls itself would be in a cycle with the batch,
    # which would stay in memory until the garbage collector runs.
    def _enter(
        self,
        step: Callable[..., StepOutput],
        models: Sequence[nn.Module],
        batch: Any,
        entered: Sequence[nn.Module],
    ) -> StepOutput:
        if len(entered) == len(models):
            return step(*entered, batch)
        model = models[len(entered)]
        if not torch.is_grad_enabled():
            return self._enter(step, models, batch, [*entered, self.unwrap(model)])
        if isinstance(model, SteppingDataParallel):
            return model.run(lambda module: self._enter(step, models, batch, [*entered, module]))
        return self._enter(step, models, batch, [*entered, model])

    def backward(
        self,
        loss: Tensor,
        share: Share | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of the loss over the whole global batch.

        DDP averages over the ranks, and each rank's mean loss counts by its samples. The loss of a stand-in
        counts nothing, even if it is NaN.

        Raises:
            StepError: A parameter was reached again before the gradients of all others were there.

        Collective: DDP's bucketed all-reduces, unless inside :meth:`no_sync`.
        """
        retain_graph = retain_graph or create_graph
        if self.job.loss == "sum":
            if share is None or share.samples:
                factor = float(self._data_size)
            else:
                factor = 0.0
        elif share is None:
            factor = 1.0
        else:
            factor = share.samples * self._data_size / share.total

        def run() -> None:
            if factor:
                scaled = loss if factor == 1.0 else loss * factor
                scaled.backward(None, retain_graph, create_graph)
            else:
                zero_backward(loss, lambda of: (of * 0.0).backward(None, retain_graph, create_graph))

        self._reductions.run_backward(run, loss)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's own context, in which gradients stay on the ranks."""
        if isinstance(model, DistributedDataParallel):
            context: AbstractContextManager[None] = model.no_sync()
            return context
        return super().no_sync(model)

    # -- between ranks ------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return ``value`` reduced over the data group, on all ranks; the argument is kept.

        Raises:
            ConfigError: ``value`` is no tensor, or ``op`` none of the four.

        Collective: one all-reduce; no gradients.
        """
        check_reduce(value, op)
        result = value.detach().to(self.device, copy=True)
        if self._data_size > 1:
            kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
            # On a copy on the device: NCCL reduces no CPU tensors.
            dist.all_reduce(result, kinds.get(op, dist.ReduceOp.SUM), group=self._data_group)
        if op == "mean":
            # A sum, then a division: gloo has no average.
            result = result / self._data_size
        return result.to(value.device)

    def gather(self, value: Tensor) -> Tensor:
        """Return the data group's tensors concatenated along dim 0; their lengths may differ.

        Collective: an all-gather of the lengths, an all-gather of the padded tensors; no gradients.
        """
        local = value.detach().to(self.device)
        if local.dim() == 0:
            local = local.reshape(1)
        else:
            local = local.contiguous()
        if self._data_size == 1:
            return local.to(value.device)
        # The lengths first: all_gather takes tensors of one shape, so each is padded to the longest.
        length = torch.tensor([local.size(0)], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self._data_size)]
        dist.all_gather(lengths, length, group=self._data_group)
        sizes = [int(n) for n in lengths]
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: local.size(0)] = local
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._data_group)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]).to(value.device)

    def gather_objects(self, value: T, *, where: str | None = None) -> list[T]:
        """Return every rank's object, in the order of the ranks.

        Collective: one all-gather of pickled objects.
        """
        return gather_objects(value, where=where)

    def broadcast(self, value: T, *, src: int = 0, where: str | None = None) -> T:
        """Return the object of rank ``src``, on all ranks.

        Collective: one broadcast of a pickled object.
        """
        return broadcast_object(value, src=src, where=where)

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Collective: one barrier over all ranks.
        """
        # NCCL's barrier is an all-reduce on a device: named here, or torch would choose one by itself.
        if binds_process_groups(self.device):
            device_ids = [self.device.index]
        else:
            device_ids = None
        dist.barrier(device_ids=device_ids)

    # -- state --------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state of ``model_state``; this rank's part of a DTensor is cut out of the whole."""
        load_whole_state(self.unwrap(model), state)

    def sync_buffers(self, model: nn.Module) -> None:
        """Give the data group its first rank's buffers, for example batch norm's running statistics.

        Collective: one broadcast for each buffer.
        """
        if self._gradient_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer.data, group_src=0, group=self._gradient_group)

    def close(self) -> None:
        """Leave the process group, if this session has joined it."""
        self._reductions.close()  # first: its hook on all optimizers must not outlive the group
        if not self.closed and self._leave is not None:
            self._leave()
        super().close()


def _samples_of(model: nn.Module, *, without: Iterable[str]) -> dict[str, bytes]:
    """Return a few values of each parameter, by name: a model of another seed or file has others."""
    pieces = {}
    for name, parameter in model.named_parameters():
        # Not of subclasses: shards and quantized weights have no plain view.
        is_plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.is_contiguous()
        if name not in without and is_plain and parameter.is_floating_point() and parameter.numel():
            flat = parameter.detach().view(-1)
            pieces[name] = flat[:: -(-len(flat) // _MOST_SAMPLES)].float()
    if not pieces:
        return {}
    # One transfer from the device, which each parameter's own would wait for.
    values = torch.cat([*pieces.values()]).cpu().split([len(piece) for piece in pieces.values()])
    return {name: piece.numpy().tobytes() for name, piece in zip(pieces, values, strict=True)}


def _warn_other_values(everyones: Sequence[Mapping[str, bytes]]) -> None:
    """Warn of the first rank whose parameters have other values than the first rank's."""
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        names = [name for name in first if name in theirs and theirs[name] != first[name]]
        if names:
            log.warning(
                "ranks were given models with other values (%r of rank %d), and all train on from those of "
                "rank 0; to make the same model on every rank, seed before: Trainer(seed=0), or "
                "torch.manual_seed with the same number, or load it on every rank",
                names[0],
                rank,
            )
            return
