"""The session of a model that is split over processes, in one copy or several."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core import move_module
from tp_core.data import Share, StepOutput
from tp_core.fully_sharded import (
    FullyShardedSession,
    FullyShardOptions,
    Sharding,
    WholeSteps,
    gathers_matrices,
    reshard,
)
from tp_core.plugins import Job
from tp_core.sessions import ProcessGroupSession
from tp_core.state import load_whole_state, plain_state, whole
from tp_core.tensors import TensorSlice, check_not_quantized, initial_value, is_dtensor, materialize

from tp_shard import distributed
from tp_shard._groups import _debug
from tp_shard._groups._group import ALONE, current_data_group, current_group, mesh_of_copies
from tp_shard._guards import check_optimizer
from tp_shard._part_hooks import PartHooks
from tp_shard._shards import Shard, ShardTable, TrainedParameters, slice_of
from tp_shard._state_dict import collect_state_dict, gather_shard, relocate_state_dict
from tp_shard._step_outputs import StepOutputs
from tp_shard._training import check_gradients, total_grad_norm


class ShardSession(ProcessGroupSession):
    """One rank of a job with a split model.

    The ranks of one group hold a copy of the model together and read the same samples. The groups divide each
    batch. DistributedDataParallel averages the gradients of shards and of whole parameters, over the ranks
    that hold the same shards.
    """

    takes_deferred_models = True

    def __init__(
        self,
        job: Job,
        *,
        group_size: int,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        if job.devices[0].type != "cpu":
            torch.accelerator.set_device_index(job.devices[0])
        forms = not distributed.is_initialized()
        if forms:
            distributed.init_process_group(group_size)
        leave = distributed.destroy_process_group if forms else None
        data = current_data_group() or ALONE
        super().__init__(
            job,
            data_group=data.process_group,
            data_rank=data.rank,
            data_size=data.size,
            leave=leave,
        )
        self.tensor_group = current_group() or ALONE
        self._find_unused_parameters = find_unused_parameters
        self._bucket_cap_mb = bucket_cap_mb
        self._shards: dict[int, Shard] = {}  # by the identity of the parameter
        # By model, which parameters were trained when its gradients were compared, if they were.
        self._compared: dict[nn.Module, tuple[bool, ...]] = {}
        self._parameters: dict[nn.Module, TrainedParameters] = {}
        self._outputs = StepOutputs(self.tensor_group, self.device)
        self._part_hooks = PartHooks()

    # -- preparing ----------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, and wrap it if there are several copies.

        Raises:
            DisagreementError: The ranks' parameters differ in name, whole shape or type.

        Collectives: an all-gather of the parameters' descriptions; a broadcast of the weights to the other
        copies, and of all tensors that are not split within a copy.
        """
        self.check_plain(model, may_be_split=True)
        if self.tensor_group.size > 1:
            check_not_quantized(model, "tp_shard")
        shards = ShardTable(model).exact
        self.check_same_parameters(model, {name: shard.full_shape for name, shard in shards.items()})
        if self.is_main:
            self._part_hooks.warn(model)
        prepared = self._join_copies(model)
        self._shards |= {id(shard.tensor): shard for shard in ShardTable(model).exact.values()}
        if self.tensor_group.size > 1:
            self._parameters[model] = TrainedParameters(model)
        return prepared

    def _join_copies(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, and average gradients over the ranks that hold the same shards."""
        materialize(model, lambda tensor: initial_value(tensor).to(self.device))
        model = move_module(model, self.device)
        self._share_whole_parameters(model)
        return self.average_gradients(
            model,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused_parameters,
            bucket_cap_mb=self._bucket_cap_mb,
        )

    def _share_whole_parameters(self, model: nn.Module) -> None:
        """Copy the parameters and buffers that are not split from the first rank of a copy to the others.

        Collectives: a broadcast of each such tensor.
        Ranks hold: varying -> replicated.
        """
        if self.tensor_group.size == 1:
            return
        table = ShardTable(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if table.get(name) is None and not is_dtensor(tensor):
                dist.broadcast(tensor.data, group_src=0, group=self.tensor_group.handle)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check the optimizer and return it; one that needs whole matrices gathers them for its steps."""
        optimizer = super().prepare_optimizer(optimizer)  # first: its hooks enclose the gathered steps
        if gathers_matrices(optimizer):
            WholeSteps(optimizer, whole=self.whole_of, cut=self.as_slice)
        check_optimizer(optimizer)
        return optimizer

    def whole_of(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return the whole of a value that is cut as its parameter is.

        Collectives: those of `gather_shard`, and of a DTensor an all-gather.
        """
        shard = self._shards.get(id(parameter))
        if shard is None:
            return whole(value)
        return gather_shard("a parameter", value, shard, to="all")

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on the batch of this rank's copy.

        Raises:
            ModelError: The first time: the ranks of a copy return different values, as a function of torch
                has taken a rank's part of a split output for the whole.

        Collectives: those of `ProcessGroupSession.run`; the first time an all-gather of a few numbers.
        """
        return super().run(self._outputs.watched(step, [model]), model, batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as :meth:`run` does with one model.

        Raises:
            ModelError: As in :meth:`run`.

        Collectives: those of :meth:`run`, for each model.
        """
        return super().run_several(self._outputs.watched(step, models), models, batch)

    def backward(self, loss: Tensor, share: Share | None = None, **graph: bool) -> None:
        """Add the gradients of the loss over the whole global batch.

        Raises:
            DisagreementError: The first time, where other parameters are trained than before, and in debug
                mode each time: the ranks of a copy have different gradients of a parameter that is not split.

        Collectives: those of DDP; where gradients are compared, those of ``check_gradients``.
        """
        super().backward(loss, share, **graph)
        # Once outside of debug mode, because each check costs an exchange, and again where other parameters
        # are trained. A model without gradients so far keeps its turn.
        for model, parameters in self._parameters.items():
            trained = parameters.flags()
            if self._compared.get(model) != trained or _debug.state.enabled:
                if self.is_main:
                    self._part_hooks.warn(model)  # those that a callback has put on
                check_gradients(model)
                if any(parameter.grad is not None for parameter in model.parameters()):
                    self._compared[model] = trained

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, from the shards of all ranks.

        Collectives: an all-reduce of one number.
        """
        return total_grad_norm(model.parameters(), norm_type)

    def as_slice(self, parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:
        """Return ``value`` with the place of its parameter in the whole tensor."""
        return slice_of(value, self._shards.get(id(parameter)))

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state on every rank, with the names of the user's own module.

        Collectives: those of ``collect_state_dict``.
        """
        plain = self.unwrap(model)
        return plain_state(collect_state_dict(plain, plain.state_dict()))

    def state_parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with split tensors that take memory only when they are gathered.

        Collectives: none; `tp_core.state.whole` broadcasts the shards of a tensor.
        """
        plain = self.unwrap(model)
        table = ShardTable(plain)
        parts: dict[str, Tensor] = {}
        for name, value in plain.state_dict().items():
            shard = table.get(name)
            if shard is None:
                parts[name] = value
            else:
                parts[name] = _whole_later(name, value, shard)
        return plain_state(parts)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state that :meth:`model_state` of any backend returned."""
        plain = self.unwrap(model)
        reshard(plain)
        load_whole_state(plain, relocate_state_dict(plain, state))


def _whole_later(name: str, local: Tensor, shard: Shard) -> Tensor:
    """Return a tensor without memory that `tp_core.state.whole` can gather."""
    tensor = torch.empty(shard.full_shape, dtype=local.dtype, device="meta")
    tensor.full_tensor = partial(gather_shard, name, local.detach(), shard, to="all")  # type: ignore[attr-defined]
    return tensor


class ShardFsdpSession(FullyShardedSession, ShardSession):
    """One rank of a job in two dimensions: tensors split in a group, their shards sharded over the copies.

    Raises:
        ConfigError: The options do not fit the ranks.
    """

    def __init__(self, job: Job, *, group_size: int, options: FullyShardOptions) -> None:
        ShardSession.__init__(self, job, group_size=group_size)
        mesh = mesh_of_copies(self.device.type, options.replicas)
        # A rank alone with its shards has no data group. None would mean all ranks, which hold other shards.
        group = (current_data_group() or ALONE).process_group or mesh.get_group(mesh.ndim - 1)
        self.sharding = Sharding(job, options, lambda: mesh, group=group, share=self._share_whole_parameters)

    def _join_copies(self, model: nn.Module) -> nn.Module:
        return self.shard_model(model)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as the forward pass of each of the models.

        Raises:
            ModelError: As in `ShardSession.run`.

        Collectives: those of `FullyShardedSession.run_several`, and of `ShardSession.run`.
        """
        return super().run_several(self._outputs.watched(step, models), models, batch)

    def whole_of(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Return the whole of a value, of both cuts.

        Collectives: as in `ShardSession.whole_of`.
        """
        return ShardSession.whole_of(self, parameter, value)
