"""The session of the backend ``fsdp``, on torch's ``fully_shard``."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from tp_core.errors import ModelError
from tp_core.fully_sharded import (
    FullyShardedSession,
    FullyShardOptions,
    Sharding,
    describe_presharded,
    presharded_mesh,
    total_shard_norm,
)
from tp_core.plugins import Job

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FsdpSession(FullyShardedSession):
    """One rank of a job with DTensor parameters."""

    takes_deferred_models = True  # unit by unit

    def __init__(self, job: Job, options: FullyShardOptions, *, leave: Callable[[], None]) -> None:
        super().__init__(job, leave=leave)
        self.options = options
        self.sharding = Sharding(job, options, self._mesh)

    def _mesh(self) -> "DeviceMesh":
        """Return a mesh of all ranks: an axis "shard", and an axis "replica" in front if there are several.

        Collectives: torch makes the groups of the mesh.
        """
        from torch.distributed.device_mesh import init_device_mesh

        size, replicas = self.world_size, self.options.replicas
        shape: tuple[int, ...] = (size,)
        names: tuple[str, ...] = ("shard",)
        if replicas > 1:
            shape, names = (replicas, size // replicas), ("replica", "shard")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Give all ranks rank 0's weights, and shard the module in place.

        A model that the user has sharded with ``fully_shard`` keeps its shards; the rest of it is sharded.

        Raises:
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of each parameter and
        buffer, an all-gather of what lies in no unit.
        """
        self._check(model)
        self.check_same_parameters(model)
        return self.shard_model(model)

    def _check(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module) or describe_presharded(model) is None:
            self.check_plain(model)
            return
        mesh = presharded_mesh(model)
        if mesh is None:
            return
        if mesh.size() != self.world_size:
            msg = (
                f"the model was sharded by fully_shard over {mesh.size()} ranks, and the job "
                f"has {self.world_size}; give fully_shard a mesh of all ranks, or give the plain model, "
                "which backend 'fsdp' shards"
            )
            raise ModelError(msg)
        self.sharding.mesh = mesh

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, over the shards of all ranks.

        Collectives: one all-reduce of a number.
        """
        return total_shard_norm(model, norm_type, device=self.device)
