"""Groups of parameters for an optimizer."""

from typing import Any

from torch import nn

from tp_shard._shards._marks import holds_shard

__all__ = ["parameter_groups"]


def parameter_groups(model: nn.Module, *, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Return a model's trained parameters in groups for an optimizer, the same on all ranks.

    Shards and parameters that all ranks have are kept apart, each tied parameter counted once.

    Args:
        model: The model.
        weight_decay: Decay for matrices; vectors (biases, norms) then get none, in groups of their
            own. ``None`` leaves decay to the optimizer.

    Returns:
        Dicts with "params", "name" and "sharded", and "weight_decay" where it was given; none of
        them is empty.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> [(g["name"], len(g["params"])) for g in parameter_groups(model, weight_decay=0.1)]
        [('replicated, decayed', 1), ('replicated', 1)]
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = weight_decay is not None and parameter.dim() > 1
            groups.setdefault((holds_shard(parameter), decays), []).append(parameter)
    found = []
    for (sharded, decays), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        name = ("sharded" if sharded else "replicated") + (", decayed" if decays else "")
        group: dict[str, Any] = {"params": parameters, "name": name, "sharded": sharded}
        if weight_decay is not None:
            group["weight_decay"] = weight_decay if decays else 0.0
        found.append(group)
    return found
