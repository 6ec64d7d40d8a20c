"""Split parameters under ``fully_shard``, which shards each rank's shard again over the copies of the model.

It replaces the parameters by DTensors over the data mesh. Each describes this rank's shard alone, because
``fully_shard`` does not know our split. Layers mark them again; see
:class:`tp_shard._shards._layer.ParallelLayer`.
"""

import sys

import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import ConfigError
from tp_core.internal import is_dtensor

from tp_shard._groups._group import Group


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def part_of(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the part of a tensor that this rank holds: its offset in each dimension, and its values."""
    if not is_dtensor(tensor):
        return (0,) * tensor.dim(), tensor
    # The protocol by which torch.distributed.checkpoint asks a DTensor for its offsets.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), local(tensor)


def sharded_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a DTensor is sharded; none for any other tensor, which is whole.

    Raises:
        ConfigError: The DTensor has a partial placement: its sum over the ranks is still to be made.
    """
    if not is_dtensor(tensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        msg = (
            f"a DTensor of shape {tuple(tensor.shape)} has the placements {tensor.placements}: a sum that "
            "is yet to be made has no norm; redistribute it first"
        )
        raise ConfigError(msg)
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def check_data_mesh(parameter: Tensor, group: Group, what: object) -> None:
    """Raise unless ``fully_shard`` shards a parameter over ranks that hold the same shard of it, in order.

    Raises:
        ConfigError: Some hold different shards: their parts would be joined into one tensor. Or the ranks do
            not ascend: the parts would be saved in wrong places.
    """
    if group.size == 1 or not is_dtensor(parameter):
        return
    mesh = parameter.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if len(set(ranks) & set(dist.get_process_group_ranks(group.handle))) > 1:
        msg = (
            f"fully_shard() over the ranks {ranks} would mix the shards of {what}, which some of them hold "
            "together; give it the axes of data alone: mesh = init_device_mesh(device, (2, 2), "
            'mesh_dim_names=("dp", "tp")), ts.distributed.init_process_group(mesh), '
            'fully_shard(module, mesh=mesh["dp"])'
        )
        raise ConfigError(msg)
    # Torch sorts the ranks of a group and cuts in that order; a DTensor counts its parts along the mesh.
    if any((mesh.mesh.diff(dim=axis) < 0).any() for axis in range(mesh.ndim)):
        msg = (
            f"fully_shard() over the ranks {ranks} would save parts of {what} in wrong places: give it a "
            "mesh with ranks that ascend along each axis"
        )
        raise ConfigError(msg)


def reshard(model: nn.Module) -> None:
    """Reshard parameters that ``fully_shard`` gathered for a forward pass without a backward pass."""
    if "torch.distributed.fsdp" not in sys.modules:  # not in use, and slow to import
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
