"""Turning the layers of a finished model into parallel ones."""

from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar, cast

from torch import nn
from tp_core.errors import ModelError

from tp_shard._groups._group import Group
from tp_shard._guards import guard_saving
from tp_shard._shards._attributes import check_dim
from tp_shard._shards._layer import ParallelLayer
from tp_shard._split import Split
from tp_shard.nn._kinds import form_of, why_not_split


class Conversion:
    """One conversion of a model: what was a layer or a parameter in two places stays one.

    Args:
        root: The model.
        group: The ranks.
    """

    def __init__(self, root: nn.Module, group: Group) -> None:
        self.group = group
        self._layers: dict[int, nn.Module] = {}
        self._parameters: dict[tuple[int, int | None], nn.Parameter] = {}
        self._originals: list[nn.Parameter] = []
        self._owners: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in root.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append((path, module))

    def partners(self, layer: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the other modules, with their paths, that share the weight of ``layer``."""
        weight = layer._parameters.get("weight")  # None where it is computed
        return [(p, m) for p, m in self._owners.get(id(weight), ()) if m is not layer]

    def layer(self, layer: nn.Module, dim: int | None, *, gather_output: bool) -> nn.Module:
        """Return the parallel form of a layer of torch's, the same one if it is asked for again."""
        make = form_of(type(layer))
        return self.replace(
            layer, lambda: make.from_plain(layer, dim, gather_output=gather_output, group=self.group)
        )

    def replace(self, layer: nn.Module, make: Callable[[], ParallelLayer]) -> nn.Module:
        """Return what ``make`` makes of a layer, with this rank's shards; the same if it is asked for again.

        Raises:
            ModelError: The layer has no weight of its own to split.
        """
        if id(layer) in self._layers:
            return self._layers[id(layer)]
        reason = why_not_split(layer)
        if reason is not None:
            msg = f"{type(layer).__name__} cannot be split: {reason}"
            raise ModelError(msg)
        made = make()
        for name, parameter in layer._parameters.items():
            split = made.splits.get(name)
            made._parameters[name] = None if parameter is None else self._shard(parameter, split)
        made.mark_parameters()
        self._layers[id(layer)] = made
        return made

    def shard_of(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Return what a parameter has become, itself if it was not split."""
        return next(
            (shard for (key, _), shard in self._parameters.items() if key == id(parameter)), parameter
        )

    def _shard(self, parameter: nn.Parameter, split: Split | None) -> nn.Parameter:
        """Return this rank's shard of a parameter, the same one for all who share it."""
        if split is None or self.group.size == 1:
            return parameter
        key = (id(parameter), split.dim)
        if key not in self._parameters:
            self._originals.append(parameter)  # so that no other gets its id
            self._parameters[key] = self.take(parameter, split, self.group)
        return self._parameters[key]

    @staticmethod
    def take(parameter: nn.Parameter, split: Split, group: Group) -> nn.Parameter:
        """Return this rank's shard of a parameter, with all that it carries."""
        if group.size == 1:
            return parameter
        shard = nn.Parameter(split.take(parameter.detach(), group.rank), parameter.requires_grad)
        shard.__dict__.update(parameter.__dict__)
        if parameter.grad is not None:
            shard.grad = split.take(parameter.grad, group.rank)
        return shard


def convert_layers(
    root: nn.Module, kind: type[nn.Module], dim: int | None, *, gather_output: bool, group: Group
) -> nn.Module:
    """Turn all layers of a kind into parallel ones, in place; return the root, or what became of it.

    A linear layer and an embedding that share a weight are split alike: the rows of the table are the
    outputs of the linear layer. The one that is not of this kind then has whole outputs.

    Args:
        root: A layer, or a module with some in it.
        kind: ``nn.Linear`` or ``nn.Embedding``.
        dim: Along which dimension they are split; ``None`` for none.
        gather_output: Whether split outputs are joined.
        group: The ranks.

    Raises:
        ModelError: The root is wrapped, a layer cannot be split, or shares its weight with what cannot.
        ConfigError: ``dim`` is not a dimension to split along.
    """
    check_dim(dim)
    if isinstance(root, nn.parallel.DistributedDataParallel | nn.DataParallel):
        msg = (
            f"the module is wrapped in {type(root).__name__}, which holds its parameters; convert the "
            "plain module first and wrap it then"
        )
        raise ModelError(msg)
    split = dim is not None
    conversion = Conversion(root, group)
    replaced: dict[int, nn.Module] = {}
    for path, layer in _walk(root):
        if isinstance(layer, ParallelLayer) or not isinstance(layer, kind):
            continue
        replaced[id(layer)] = conversion.layer(layer, dim, gather_output=gather_output)
        for partner_path, partner in conversion.partners(layer) if split else ():
            if not isinstance(partner, nn.Linear | nn.Embedding):
                msg = (
                    f"{path or 'the layer'} shares its weight with {partner_path} "
                    f"({type(partner).__name__}), which cannot be split; untie them first"
                )
                raise ModelError(msg)
            if isinstance(partner, kind):
                other = conversion.layer(partner, dim, gather_output=gather_output)
            else:
                other = conversion.layer(partner, -1 if dim == 0 else 0, gather_output=True)
            replaced[id(partner)] = other
    if id(root) in replaced:
        return replaced[id(root)]
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
                if split:
                    leave_fast_path(parent)
        if split:
            leave_nested_tensors(parent)
    guard_saving(root)
    return root


def leave_fast_path(module: nn.Module) -> None:
    """Keep an encoder layer of torch's from the path that reads its weights past their layers."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0


def leave_nested_tensors(module: nn.Module) -> None:
    """Keep an encoder of torch's from nested tensors, which only its layers' fast path takes."""
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def _walk(root: nn.Module, path: str = "", seen: set[int] | None = None) -> "list[tuple[str, nn.Module]]":
    """List the modules whose ``forward`` is called: torch's attention reads its layers' weights itself."""
    seen = set() if seen is None else seen
    if id(root) in seen or isinstance(root, nn.MultiheadAttention):
        return []
    seen.add(id(root))
    found = [(path, root)]
    for name, child in root._modules.items():
        if child is not None:
            found += _walk(child, f"{path}.{name}" if path else name, seen)
    return found


# -- Modules of any class that get a class made of their own and one of ours, also out of a pickle


class Mixin:
    """What is added to a module of any class, with the attributes that subclasses declare."""

    @classmethod
    def members(cls, kind: type[nn.Module]) -> dict[str, Any]:  # noqa: ARG003 - for those who need it
        """Return what else the class of both gets."""
        return {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        mixin, kind = type(self).__bases__
        return _rebuild, (mixin, kind), self.__dict__


Added = TypeVar("Added", bound=Mixin)
_classes: dict[tuple[type, type], type] = {}


def mix_in(mixin: type[Added], module: nn.Module, **attributes: Any) -> Added:
    """Let a module be one of a class of its own and ``mixin``, in place, with these attributes; return it."""
    module.__class__ = _mixed(mixin, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)
    return cast(Added, module)


def _mixed(mixin: type[Mixin], kind: type[nn.Module]) -> type[Any]:
    if (mixin, kind) not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **mixin.members(kind)}
        _classes[mixin, kind] = type(kind.__name__, (mixin, kind), names)
    return _classes[mixin, kind]


def _rebuild(mixin: type[Mixin], kind: type[nn.Module]) -> nn.Module:
    cls: Any = _mixed(mixin, kind)
    module: nn.Module = cls.__new__(cls)
    return module
