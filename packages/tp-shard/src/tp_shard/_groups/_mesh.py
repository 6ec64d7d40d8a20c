"""The axes of a mesh of all ranks: over which tensors are split, and along which copies of the model lie."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tp_core.errors import ConfigError

from tp_shard._groups._group import ALONE, current_group, current_mesh

__all__ = ["data_axes", "mesh_of_copies", "tensor_axis"]

_TENSOR_AXES = ("tp", "tensor", "model")
_DATA_WORDS = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard"})
_OTHER_WORDS = frozenset({"pp", "pipe", "pipeline", "stage", "cp", "context", "sp", "ep", "expert"})


def tensor_axis(mesh: DeviceMesh) -> int:
    """Return the axis over which tensors are split.

    Raises:
        ConfigError: The axes do not say it.
    """
    names = mesh.mesh_dim_names or ()
    named = [i for i, name in enumerate(names) if name in _TENSOR_AXES]
    if len(named) > 1 or (not named and mesh.ndim > 2):
        msg = (
            f"a mesh of {mesh.ndim} axes of sizes {tuple(mesh.shape)} has one named 'tp', 'tensor' or "
            f"'model', over which tensors are split; got the names {names or None}"
        )
        raise ConfigError(msg)
    return named[0] if named else mesh.ndim - 1


def data_axes(mesh: DeviceMesh, tensor_axis: int) -> list[int]:
    """Return the axes along which copies of the model lie.

    Raises:
        ConfigError: What an axis is for is not known.
    """
    others = [i for i in range(mesh.ndim) if i != tensor_axis]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    words = {i: set(names[i].lower().split("_")) for i in others}
    data = [i for i in others if words[i] & _DATA_WORDS]
    foreign = [i for i in others if words[i] & _OTHER_WORDS and i not in data]
    unknown = [i for i in others if i not in data and i not in foreign]
    if len(others) == 1:
        return data + unknown  # data by tensor, whatever it is called
    if unknown:
        msg = (
            f"what the axis {names[unknown[0]]!r} of a mesh of {names} is for is not known: name axes of "
            "data 'dp', 'dp_replicate', 'dp_shard', 'fsdp' or 'data', or give the mesh without it, such as "
            f"mesh[{', '.join(repr(names[i]) for i in sorted({tensor_axis, *data}))}]"
        )
        raise ConfigError(msg)
    return data


def mesh_of_copies(device_type: str, replicas: int) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same shards as this one, to shard those once more.

    It is a part of the mesh that the groups were formed from, or of a new one of the same groups, with the
    axes "dp" and "tp"; with ``replicas``, "dp_replicate", "dp_shard" and "tp".

    Args:
        device_type: What the ranks compute on.
        replicas: Over how many copies of the shards' shards these ranks are spread.

    Raises:
        ConfigError: The ranks, or the axes of the mesh that was given, do not go with so many replicas.

    Collectives: where there is no mesh yet, every rank makes new groups.
    """
    mesh = current_mesh()
    if mesh is not None:
        return _part_for_data(mesh, replicas)
    tensor, size = (current_group() or ALONE).size, dist.get_world_size()
    copies = size // tensor
    if copies % replicas:
        msg = (
            f"replicas={replicas} spreads the copies of the model over as many sets of ranks, and {size} "
            f"ranks in groups of {tensor} hold {copies} copies; give a divisor of {copies}"
        )
        raise ConfigError(msg)
    if replicas == 1:
        return init_device_mesh(device_type, (copies, tensor), mesh_dim_names=("dp", "tp"))["dp"]
    shape = (replicas, copies // replicas, tensor)
    whole = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return whole["dp_replicate", "dp_shard"]


def _part_for_data(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    names = mesh.mesh_dim_names
    axes = data_axes(mesh, tensor_axis(mesh))
    wide = [i for i in axes if mesh.size(i) > 1] or axes[-1:]
    if names is None or not 1 <= len(wide) <= 2:
        msg = (
            "fully sharded data needs a mesh with one named axis of data, or two, of which the first has "
            f"copies; ts.distributed.init_process_group was given {mesh}"
        )
        raise ConfigError(msg)
    given = mesh.size(wide[0]) if len(wide) == 2 else 1
    if replicas not in (1, given):
        msg = (
            f"replicas={replicas} does not go with the mesh that ts.distributed.init_process_group was "
            f"given, {mesh}: it has {given}; leave replicas out, or give the mesh an axis for them, "
            "such as ('dp_replicate', 'dp_shard', 'tp')"
        )
        raise ConfigError(msg)
    return mesh[names[wide[0]]] if len(wide) == 1 else mesh[names[wide[0]], names[wide[1]]]
