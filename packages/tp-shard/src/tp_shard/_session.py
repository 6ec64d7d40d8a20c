"""The session of a model that is split over processes, in one copy or several."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tp_core import Job, ReduceOp, Session, Share, StepOutput, TensorSlice
from tp_core.errors import DisagreementError

from tp_shard import distributed
from tp_shard._clip import clip_grad_norm_
from tp_shard._comm import all_gather, gather_sizes
from tp_shard._group import ALONE, current_data_group, current_group
from tp_shard._pieces import Piece
from tp_shard._state import collect_state_dict, relocate_state_dict
from tp_shard._table import Shard, ShardTable

__all__ = ["ShardSession"]

T = TypeVar("T")


class ShardSession(Session):
    """One rank of a job whose model is split.

    The ranks of one group hold a copy of the model together and read the same samples; the groups
    share each batch. Between those who hold the same shards gradients are averaged by
    DistributedDataParallel, shards and whole parameters alike.

    Args:
        job: What is to be done.
        group_size: How many ranks hold a copy together, if the groups are not formed yet.
        find_unused_parameters: As DDP takes it.
        bucket_cap_mb: As DDP takes it.
    """

    def __init__(
        self, job: Job, *, group_size: int, find_unused_parameters: bool, bucket_cap_mb: float | None
    ) -> None:
        super().__init__(job)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)
        self._owns_groups = not distributed.is_initialized()
        if self._owns_groups:
            distributed.init_process_group(group_size)
        self.tensor_group = current_group() or ALONE
        self.data_group = current_data_group() or ALONE
        self._find_unused_parameters = find_unused_parameters
        self._bucket_cap_mb = bucket_cap_mb
        self._factor = 1.0
        self._shards: dict[int, Shard] = {}  # by the identity of the parameter
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

    @property
    def data_rank(self) -> int:
        """Which share of the data is this process's: that of its copy of the model."""
        return self.data_group.rank

    @property
    def data_size(self) -> int:
        """How many copies of the model there are."""
        return self.data_group.size

    # -- preparing ----------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, and wrap it where there are several copies.

        Raises:
            ModelError: It is no module, or it is wrapped already.
            DisagreementError: The ranks' parameters differ in name, whole shape or type.

        Collectives: an all-gather of the parameters' descriptions; a broadcast of the weights to
        the other copies, and of what is not split within a copy.
        """
        self.check_plain(model)
        self._check_same_parameters(model)
        model = model.to(self.device)
        self._share_whole_parameters(model)
        self._shards |= {id(shard.tensor): shard for shard in ShardTable(model).exact.values()}
        if self.data_size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model
        return DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=self.data_group.handle,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused_parameters,
            bucket_cap_mb=self._bucket_cap_mb,
        )

    def _check_same_parameters(self, model: nn.Module) -> None:
        table, mine = ShardTable(model), []
        for name, p in model.named_parameters():
            shard = table.get(name)
            shape = tuple(p.shape) if shard is None else shard.full_shape
            mine.append(f"{name}: {shape} {p.dtype}{'' if p.requires_grad else ' frozen'}")
        for rank, theirs in enumerate(everyones := self.gather_objects(mine)):
            if theirs == everyones[0]:
                continue
            here = [line for line in everyones[0] if line not in theirs][:1] or ["nothing of it"]
            there = [line for line in theirs if line not in everyones[0]][:1] or ["nothing of it"]
            msg = (
                f"ranks disagree on the model's parameters: rank 0 has {here[0]}, rank {rank} has "
                f"{there[0]} ({len(everyones[0])} and {len(theirs)} parameters); build the same model "
                "on every rank"
            )
            raise DisagreementError(msg)

    def _share_whole_parameters(self, model: nn.Module) -> None:
        """Give the ranks of a copy the first one's parameters and buffers that are not split."""
        if self.tensor_group.size == 1:
            return
        table = ShardTable(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if table.get(name) is None:
                dist.broadcast(tensor.data, group_src=0, group=self.tensor_group.handle)

    def take_share(self, share: Share | None) -> None:
        """Note the share, and what it makes of a loss that is averaged over the copies."""
        self.share = share
        if self.job.loss == "sum":
            self._factor = float(self.data_size) if share is None or share.samples else 0.0
        elif share is None:
            self._factor = 1.0
        else:
            self._factor = share.samples * self.data_size / share.total

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on this copy's share of the batch; without gradients on the plain module."""
        return step(model if torch.is_grad_enabled() else self.unwrap(model), batch)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss over the whole global batch.

        Collectives: those of the layers; DDP's all-reduces between copies, unless in :meth:`no_sync`.
        """
        if self._factor != 1.0:
            loss = loss * self._factor
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients stay within each copy."""
        if isinstance(model, DistributedDataParallel):
            context: AbstractContextManager[None] = model.no_sync()
            return context
        return super().no_sync(model)

    def clip_grad_norm(self, model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that the norm of the whole gradient is at most ``max_norm``.

        Collectives: an all-reduce of one number.
        """
        return clip_grad_norm_(model, max_norm, norm_type)

    # -- between ranks ------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return ``value`` reduced over the copies, on all ranks; the argument is kept.

        Collectives: one all-reduce.
        """
        if self.data_size == 1:
            return value.detach().clone()
        result = value.detach().to(self.device, copy=True)
        kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(result, kinds.get(op, dist.ReduceOp.SUM), group=self.data_group.handle)
        if op == "mean":
            result = result / self.data_size  # gloo has no average
        return result.to(value.device)

    def gather(self, value: Tensor) -> Tensor:
        """Return the copies' tensors concatenated along dim 0; their lengths may differ.

        Collectives: an all-gather of the lengths, an all-gather of the padded tensors.
        """
        mine = value.detach().to(self.device)
        mine = mine.reshape(1) if mine.dim() == 0 else mine
        if self.data_size == 1:
            return mine.to(value.device)
        sizes = gather_sizes(mine.size(0), self.data_group, mine.device)
        return all_gather(mine, 0, sizes, self.data_group).to(value.device)

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
        """Give all copies the first one's buffers, such as batch norm's running statistics.

        Collectives: one broadcast for each buffer.
        """
        if self.data_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer.data, group_src=0, group=self.data_group.handle)

    def as_slice(self, parameter: Tensor, value: Tensor) -> Tensor | TensorSlice:
        """Say which part of the whole ``value`` is: the part that its parameter is."""
        return Piece(value, self._shards.get(id(parameter))).as_slice()

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, on every rank."""
        plain = self.unwrap(model)
        return dict(collect_state_dict(plain, plain.state_dict()))

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state that :meth:`model_state` returned, whichever backend's it was.

        Raises:
            StateError: A whole tensor has another shape.
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        plain = self.unwrap(model)
        plain.load_state_dict(relocate_state_dict(plain, state))

    def close(self) -> None:
        """Leave the groups, if this session formed them."""
        if not self.closed and self._owns_groups and distributed.is_initialized():
            # As DDP keeps the group alive and its end joins gloo's threads, which may need the
            # interpreter's lock for a tensor of the last collective: asleep, we let them finish.
            time.sleep(0.05)
            distributed.destroy_process_group()
        super().close()
