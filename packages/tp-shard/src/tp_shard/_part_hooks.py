"""A line for hooks of users that see this rank's part of a tensor, and the whole on one device."""

from collections.abc import Iterator

from torch import nn
from tp_core.modules import has_users_hooks, is_users_hook
from tp_core.output import get_logger

from tp_shard._shards import ParallelLayer, holds_shard
from tp_shard.nn import ParallelLinear

log = get_logger("tp_shard")

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where torch keeps the hooks of a module; there is no public list."""


class PartHooks:
    """Warns of hooks on split layers, once for each layer."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, model: nn.Module) -> None:
        """Warn of the hooks that a plain model has now, if there are new ones."""
        sizes = {name: size for name, size in _hooked(model) if name not in self._warned}
        if not sizes:
            return
        self._warned |= sizes.keys()
        log.warning(
            "the hooks on %s see this rank's part of a tensor, as the layer is split over %d ranks: of a "
            "gradient, or of the layer's features. What they do to each element by itself is right; a row, a "
            "norm or a sum is of this part alone. Leave the layer whole, or take a backend with whole "
            "layers: ddp, fsdp",
            ", ".join(map(repr, sizes)),
            max(sizes.values()),
        )


def _hooked(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of split parameters and layers with hooks of the user's, and the number of ranks."""
    for path, layer in model.named_modules():
        if not isinstance(layer, ParallelLayer) or layer.group.size == 1:
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            if holds_shard(parameter) and has_users_hooks(parameter):
                yield f"{path}.{name}".lstrip("."), layer.group.size
        hooks = [hook for table in _OF_MODULES for hook in getattr(layer, table).values()]
        if _passes_parts(layer) and any(map(is_users_hook, hooks)):
            yield path, layer.group.size


def _passes_parts(layer: nn.Module) -> bool:
    """Return whether a rank's part of the features goes into a layer, or comes out of it."""
    if not isinstance(layer, ParallelLinear) or layer.dim is None:
        return False
    return layer.dim == 0 or not layer.gather_output
