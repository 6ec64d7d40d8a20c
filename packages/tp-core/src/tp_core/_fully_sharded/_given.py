"""Models that were sharded before they came to the backend."""

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from tp_core._tensors._sharding import check_no_first_fsdp
from tp_core.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["describe_given", "given_mesh", "sharded_modules"]


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that have been through ``fully_shard``, in the model's order."""
    # Where nobody has imported it, nobody has used it; importing it takes long.
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, torch_fsdp.FSDPModule)]


def describe_given(model: nn.Module) -> str | None:
    """Return what was done to a model that ``fully_shard`` has sharded; ``None`` for a plain one.

    Raises:
        ModelError: The model was sharded in a way that the backend cannot go on with.
    """
    check_no_first_fsdp(model)
    modules = sharded_modules(model)
    if not modules:
        return None
    given_mesh(model)
    return f"taken over as fully_shard left it, with {len(modules)} module(s) sharded"


def given_mesh(model: nn.Module) -> "DeviceMesh | None":
    """Return the mesh that ``fully_shard`` has sharded a model over; ``None`` for a plain one.

    Raises:
        ModelError: There are several, or parameters split otherwise; or the mesh is not that of all ranks.
    """
    mesh: DeviceMesh | None = None
    for name, parameter in model.named_parameters():
        its: DeviceMesh | None = getattr(parameter, "device_mesh", None)
        if its is None:
            continue
        if mesh is not None and its != mesh:
            msg = (
                f"the model's parameters lie on different meshes: {name!r} on {its}, others on {mesh}; "
                "backend 'fsdp' takes over a model that fully_shard has sharded over one mesh, of all ranks"
            )
            raise ModelError(msg)
        mesh = its
        placements = parameter.placements  # type: ignore[attr-defined]  # a DTensor's
        if any(p.is_shard() for p in placements[:-1]) or not placements[-1].is_shard():
            msg = (
                f"the model's {name!r} has the placements {placements}, which fully_shard alone does not "
                "make; give the plain model, which backend 'fsdp' shards"
            )
            raise ModelError(msg)
    return mesh
