"""The backend for one process per device: torch's DistributedDataParallel."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not say so
from torch.nn.parallel import DistributedDataParallel
from tp_core import (
    Backend,
    Job,
    ReduceOp,
    Session,
    Share,
    StepOutput,
    Verdict,
    rendezvous_store,
)
from tp_core.errors import ConfigError, DisagreementError

__all__ = ["DdpBackend", "DdpOptions", "DdpSession"]

T = TypeVar("T")
_opened = count()


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """The options of the backend ``ddp``.

    Attributes:
        sync_batchnorm: Turn batch norms into SyncBatchNorm; needs an accelerator.
        find_unused_parameters: For models that do not use every parameter in every step.
        static_graph: For models that use the same parameters in every step.
        gradient_as_bucket_view: Let gradients live in the communication buckets.
        bucket_cap_mb: Size of a communication bucket in MiB; ``None`` is torch's own choice.
        process_group: torch's name of the communication backend; empty chooses by the device.
        timeout_s: How long a collective waits for the other ranks.
    """

    sync_batchnorm: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float | None = None
    process_group: str = ""
    timeout_s: float = 600.0


class DdpBackend(Backend):
    """Runs one process per device, on one host or several; gradients meet in all-reduces."""

    name: ClassVar[str] = "ddp"
    options_type: ClassVar[type] = DdpOptions

    def assess(self, job: Job) -> Verdict:
        """Fit several processes with one device each."""
        environment, devices = job.environment, job.devices
        if not dist.is_available():
            return Verdict.unfit("this build of torch has no torch.distributed")
        if environment.world_size == 1:
            n = max(2, len(devices))
            return Verdict.unfit(
                "one process, and this takes one per device",
                remedy=f"tp launch -n {n} script.py",
            )
        if len(devices) != 1:
            return Verdict.unfit(f"{len(devices)} devices in each process, and this takes one")
        traits = job.traits
        if traits is not None and traits.has_sharded_parameters:
            return Verdict.unfit(
                "the model has sharded parameters, whose gradients must not be averaged",
                remedy="pip install tp-shard",
            )
        return Verdict.fits(
            50,
            f"{environment.world_size} processes on {environment.hosts} host(s), "
            f"one device each, {devices[0].type}",
        )

    def open(self, job: Job) -> "DdpSession":
        """Join the process group, unless the script has done so already."""
        return DdpSession(job, self.parse_options(job))


class DdpSession(Session):
    """One rank of a data-parallel job."""

    def __init__(self, job: Job, options: DdpOptions) -> None:
        super().__init__(job)
        self.options = options
        self._factor = 1.0
        if options.sync_batchnorm and self.device.type == "cpu":
            msg = "sync_batchnorm=True needs an accelerator: torch's SyncBatchNorm has no CPU form"
            raise ConfigError(msg)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            store = rendezvous_store(job.environment, timeout_s=options.timeout_s)
            dist.init_process_group(
                options.process_group or dist.get_default_backend_for_device(self.device),
                # A second session of this process must not meet the first one's keys.
                store=PrefixStore(f"tp/ddp/{next(_opened)}", store),
                rank=job.environment.rank,
                world_size=job.environment.world_size,
                timeout=timedelta(seconds=options.timeout_s),
                device_id=self.device if self.device.type == "cuda" else None,
            )
        # Asked every step by the loop above; asking torch each time would cost more.
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """This process among those of its host, from 0."""
        return self.job.environment.local_rank

    # -- preparing ----------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and wrap it; every rank starts with rank 0's weights.

        Raises:
            ModelError: It is no module, or it is wrapped already.
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of the weights.
        """
        self.check_plain(model)
        self._check_same_parameters(model)
        model = model.to(self.device)
        if self.options.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # as torch has it
        if not any(p.requires_grad for p in model.parameters()):
            return model  # nothing to reduce, and torch refuses to wrap it
        options = self.options
        return DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
        )

    def _check_same_parameters(self, model: nn.Module) -> None:
        mine = [
            f"{name}: {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in model.named_parameters()
        ]
        everyones = self.gather_objects(mine)
        for rank, theirs in enumerate(everyones):
            if theirs == everyones[0]:
                continue
            here = [d for d in everyones[0] if d not in theirs][:1] or ["nothing of it"]
            there = [d for d in theirs if d not in everyones[0]][:1] or ["nothing of it"]
            msg = (
                f"ranks disagree on the model's parameters: rank 0 has {here[0]}, "
                f"rank {rank} has {there[0]} ({len(everyones[0])} and {len(theirs)} parameters); "
                "build the same model on every rank"
            )
            raise DisagreementError(msg)

    def take_share(self, share: Share | None) -> None:
        """Note the share, and what it makes of a loss that DDP will average over the ranks."""
        self.share = share
        if self.job.loss == "sum":
            self._factor = float(self._world_size) if share is None or share.samples else 0.0
        elif share is None:
            self._factor = 1.0
        else:
            self._factor = share.samples * self._world_size / share.total

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on this rank's share of the batch.

        Without gradients the plain module runs: DDP's forward exchanges buffers, and ranks may
        evaluate different numbers of batches.
        """
        return step(model if torch.is_grad_enabled() else self.unwrap(model), batch)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss over the whole global batch.

        DDP averages over the ranks; each rank's mean loss counts as much as it has samples.

        Collectives: DDP's bucketed all-reduces, unless inside :meth:`no_sync`.
        """
        if self._factor != 1.0:
            loss = loss * self._factor
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's own context that leaves the gradients on the ranks.

        Raises:
            ConfigError: The graph was said to be static.
        """
        if isinstance(model, DistributedDataParallel):
            if self.options.static_graph:
                msg = (
                    "the option static_graph=True does not go with no_sync(): torch's reducer "
                    "fails in it; leave static_graph out to accumulate gradients"
                )
                raise ConfigError(msg)
            context: AbstractContextManager[None] = model.no_sync()
            return context
        return super().no_sync(model)

    # -- between ranks ------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return ``value`` reduced over the ranks, on all of them; the argument is kept.

        Collectives: one all-reduce.
        """
        result = value.detach().to(self.device, copy=True)
        kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(result, kinds.get(op, dist.ReduceOp.SUM))
        if op == "mean":
            result = result / self._world_size  # gloo has no average
        return result.to(value.device)

    def gather(self, value: Tensor) -> Tensor:
        """Return the ranks' tensors concatenated along dim 0; their lengths may differ.

        Collectives: an all-gather of the lengths, an all-gather of the padded tensors.
        """
        mine = value.detach().to(self.device)
        mine = mine.reshape(1) if mine.dim() == 0 else mine.contiguous()
        length = torch.tensor([mine.size(0)], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self._world_size)]
        dist.all_gather(lengths, length)
        sizes = [int(n) for n in lengths]
        padded = mine.new_zeros((max(sizes), *mine.shape[1:]))
        padded[: mine.size(0)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]).to(value.device)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's object, in the order of the ranks."""
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T, *, src: int = 0) -> T:
        """Return the object of rank ``src``, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=src)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    # -- state --------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        if isinstance(model, DistributedDataParallel):
            inner: nn.Module = model.module
            return inner
        return model

    def sync_buffers(self, model: nn.Module) -> None:
        """Give all ranks rank 0's buffers, such as batch norm's running statistics.

        Collectives: one broadcast for each buffer.
        """
        for buffer in model.buffers():
            dist.broadcast(buffer.data, src=0)

    def close(self) -> None:
        """Leave the process group, if this session joined it."""
        if not self.closed and self._owns_group and dist.is_initialized():
            # A DDP module keeps the group alive, and its end joins gloo's threads while it holds
            # the interpreter's lock. A thread that has yet to release a tensor of the last
            # collective needs that lock: both would wait for ever. Asleep, we let it finish.
            time.sleep(0.05)
            dist.destroy_process_group()
        super().close()
