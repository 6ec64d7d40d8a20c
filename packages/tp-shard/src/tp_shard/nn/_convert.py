"""The conversion of a finished model's layers to parallel layers."""

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
    """One conversion of a model: a layer or a parameter that is used in two places stays one object.

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
        weight = layer._parameters.get("weight")  # None if it is computed
        return [(p, m) for p, m in self._owners.get(id(weight), ()) if m is not layer]

    def layer(self, layer: nn.Module, dim: int | None, *, gather_output: bool) -> nn.Module:
        """Return the parallel form of a layer of torch, the same object for each call."""
        make = form_of(type(layer))
        return self.replace(
            layer, lambda: make.from_plain(layer, dim, gather_output=gather_output, group=self.group)
        )

    def replace(self, layer: nn.Module, make: Callable[[], ParallelLayer]) -> nn.Module:
        """Return the layer that ``make`` returns, filled with this rank's shards; the same for each call.

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
        """Return the shard of a parameter, the parameter itself if it was not split."""
        return next(
            (shard for (key, _), shard in self._parameters.items() if key == id(parameter)), parameter
        )

    def _shard(self, parameter: nn.Parameter, split: Split | None) -> nn.Parameter:
        """Return this rank's shard of a parameter, the same object for all layers that share it."""
        if split is None or self.group.size == 1:
            return parameter
        key = (id(parameter), split.dim)
        if key not in self._parameters:
            # Kept alive: the key is its id, which Python would give to another parameter after it is freed.
            self._originals.append(parameter)
            self._parameters[key] = self.take(parameter, split, self.group)
        return self._parameters[key]

    @staticmethod
    def take(parameter: nn.Parameter, split: Split, group: Group) -> nn.Parameter:
        """Return this rank's shard of a parameter, with its attributes and its gradient."""
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
    """Convert all layers of a kind to parallel layers, in place; return the root, or the layer in its place.

    A linear layer and an embedding that share a weight get the same split: the rows of the table are the
    outputs of the linear layer. The one that is not of this kind then has whole outputs.

    Args:
        root: A layer, or a module that contains some.
        kind: ``nn.Linear`` or ``nn.Embedding``.
        dim: The dimension to split; ``None`` for none.
        gather_output: Whether to join split outputs.
        group: The ranks.

    Raises:
        ModelError: The root is wrapped, a layer cannot be split, or it shares its weight with one that
            cannot.
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
    """Disable the fast path of torch's encoder layer, which reads weights without calling their layers."""
    if isinstance(module, nn.TransformerEncoderLayer):
        # What torch checks before the fast path: 1 and 2 are its fused relu and gelu. On it a rank would
        # multiply with its shards alone (`encoder_layers_of_torch_are_right_in_evaluation`).
        module.activation_relu_or_gelu = 0


def leave_nested_tensors(module: nn.Module) -> None:
    """Disable nested tensors in torch's encoder, which only the fast path of its layers takes."""
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def _walk(root: nn.Module, path: str = "", seen: set[int] | None = None) -> "list[tuple[str, nn.Module]]":
    """List the modules that get called; torch's attention reads its layers' weights without calling them."""
    seen = set() if seen is None else seen
    if id(root) in seen or isinstance(root, nn.MultiheadAttention):
        return []
    seen.add(id(root))
    found = [(path, root)]
    for name, child in root._modules.items():
        if child is not None:
            found += _walk(child, f"{path}.{name}" if path else name, seen)
    return found


# -- Mixins for modules of any class --------------------------------------------------------------


class Mixin:
    """A base for mixins to a module of any class; subclasses declare their attributes."""

    @classmethod
    def members(cls, kind: type[nn.Module]) -> dict[str, Any]:  # noqa: ARG003 - for subclasses
        """Return further members of the joint class."""
        return {}

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # By its two bases: pickle finds no generated class by name.
        mixin, kind = type(self).__bases__
        return _rebuild, (mixin, kind), self.__dict__


Added = TypeVar("Added", bound=Mixin)
_classes: dict[tuple[type, type], type] = {}


def mix_in(mixin: type[Added], module: nn.Module, **attributes: Any) -> Added:
    """Add ``mixin`` to the class of a module, in place, and set these attributes; return the module."""
    # In place, where a new module would lose hooks and the references that others hold.
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
