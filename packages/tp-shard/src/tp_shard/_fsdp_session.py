"""The session of a model that is split over processes, whose copies share what each rank holds of it."""

from torch import nn
from tp_core.internal import FullyShardedSession, Sharding
from tp_core.plugins import FullyShardOptions, Job

from tp_shard._groups._group import ALONE, current_data_group
from tp_shard._groups._mesh import mesh_of_copies
from tp_shard._session import ShardSession

__all__ = ["ShardFsdpSession"]


class ShardFsdpSession(FullyShardedSession, ShardSession):
    """One rank of a job in two dimensions: tensors split in a group, their shards sharded over the copies.

    Args:
        job: What is to be done.
        group_size: As `ShardSession` takes it.
        options: How shards are sharded over the copies.

    Raises:
        ConfigError: The options do not go with the ranks.
    """

    def __init__(self, job: Job, *, group_size: int, options: FullyShardOptions) -> None:
        ShardSession.__init__(self, job, group_size=group_size)
        mesh = mesh_of_copies(self.device.type, options.replicas)
        # None would be all ranks, where each is the only one with its shards.
        group = (current_data_group() or ALONE).process_group or mesh.get_group(mesh.ndim - 1)
        self.sharding = Sharding(job, options, lambda: mesh, group=group, share=self._share_whole_parameters)

    def _join_copies(self, model: nn.Module) -> nn.Module:
        return self.shard_model(model)
