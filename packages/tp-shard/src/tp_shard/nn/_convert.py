"""Turning the layers of a finished model into parallel ones."""

import dis
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tp_core.errors import ModelError

from tp_shard._groups._group import Group
from tp_shard._guards._refusals import guard_saving
from tp_shard._shards._layer import ParallelLayer
from tp_shard._shards._marks import check_dim
from tp_shard._split import Split
from tp_shard.nn._embedding import ParallelEmbedding
from tp_shard.nn._linear import ParallelLinear

__all__ = [
    "Conversion",
    "computes_linear",
    "convert_embedding",
    "convert_linear",
    "leave_fast_path",
    "leave_nested_tensors",
]

Layer = TypeVar("Layer", bound=nn.Module)
_parallel_classes: dict[tuple[type, type], type] = {}


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
        weight = layer._parameters["weight"]
        return [(p, m) for p, m in self._owners.get(id(weight), ()) if m is not layer]

    def linear(self, layer: nn.Linear, dim: int | None, *, gather_output: bool) -> nn.Module:
        """Return the parallel form of a linear layer, the same one if it is asked for again."""
        make = parallel_class(type(layer), nn.Linear, ParallelLinear)
        return self._convert(
            layer, lambda: make.from_linear(layer, dim, gather_output=gather_output, group=self.group)
        )

    def embedding(self, layer: nn.Embedding, dim: int | None, *, gather_output: bool) -> nn.Module:
        """Return the parallel form of an embedding, the same one if it is asked for again."""
        make = parallel_class(type(layer), nn.Embedding, ParallelEmbedding)
        return self._convert(
            layer, lambda: make.from_embedding(layer, dim, gather_output=gather_output, group=self.group)
        )

    def _convert(self, layer: nn.Module, make: Callable[[], ParallelLayer]) -> nn.Module:
        if id(layer) in self._layers:
            return self._layers[id(layer)]
        if "weight" not in layer._parameters:
            msg = (
                f"{type(layer).__name__} computes its weight (a parametrization?), so it cannot be "
                "split; take that away first"
            )
            raise ModelError(msg)
        if isinstance(layer._parameters["weight"], nn.UninitializedParameter):
            msg = f"{type(layer).__name__} has no weight before it has seen an input; show it one first"
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


def convert_linear(module: nn.Module, dim: int | None, *, gather_output: bool, group: Group) -> nn.Module:
    """Do what :meth:`ParallelLinear.convert_parallel_linear` says.

    An embedding that shares its weight with a linear layer is split alike, with whole outputs.
    """
    check_dim(dim)
    conversion = Conversion(module, group)

    def convert(layer: nn.Module) -> nn.Module | None:
        return (
            conversion.linear(layer, dim, gather_output=gather_output)
            if isinstance(layer, nn.Linear)
            else None
        )

    def follow(layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, nn.Embedding):
            return None
        # The rows of the table are the outputs of the linear layer.
        return conversion.embedding(layer, {None: None, 0: -1}.get(dim, 0), gather_output=True)

    return _convert_tree(module, conversion, convert, follow, split=dim is not None)


def convert_embedding(module: nn.Module, dim: int | None, *, gather_output: bool, group: Group) -> nn.Module:
    """Do what :meth:`ParallelEmbedding.convert_parallel_embedding` says.

    A linear layer that shares its weight with an embedding is split alike, with whole outputs.
    """
    check_dim(dim)
    conversion = Conversion(module, group)

    def convert(layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, nn.Embedding):
            return None
        return conversion.embedding(layer, dim, gather_output=gather_output)

    def follow(layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, nn.Linear):
            return None
        return conversion.linear(layer, {None: None, 0: -1}.get(dim, 0), gather_output=True)

    return _convert_tree(module, conversion, convert, follow, split=dim is not None)


def _convert_tree(
    root: nn.Module,
    conversion: Conversion,
    convert: Callable[[nn.Module], nn.Module | None],
    follow: Callable[[nn.Module], nn.Module | None],
    *,
    split: bool,
) -> nn.Module:
    if isinstance(root, nn.parallel.DistributedDataParallel | nn.DataParallel):
        msg = (
            f"the module is wrapped in {type(root).__name__}, which holds its parameters; convert the "
            "plain module first and wrap it then"
        )
        raise ModelError(msg)
    replaced: dict[int, nn.Module] = {}
    for path, layer in list(_walk(root)):
        if isinstance(layer, ParallelLayer):
            continue
        made = convert(layer)
        if made is None:
            continue
        replaced[id(layer)] = made
        for partner_path, partner in conversion.partners(layer) if split else ():
            if isinstance(partner, nn.Linear | nn.Embedding):
                other = convert(partner) or follow(partner)
                if other is not None:
                    replaced[id(partner)] = other
                    continue
            msg = (
                f"{path or 'the layer'} shares its weight with {partner_path} "
                f"({type(partner).__name__}), which cannot be split; untie them first"
            )
            raise ModelError(msg)
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


def parallel_class(kind: type[nn.Module], base: type[nn.Module], parallel: type[Layer]) -> type[Layer]:
    """Return the class of a parallel layer that is also a ``kind``, a subclass of ``base``.

    Raises:
        ModelError: Its own ``forward`` uses the weight, and would meet a shard.
    """
    if kind is base or kind.__module__.startswith("torch.nn."):
        return parallel
    if (kind, parallel) not in _parallel_classes:
        for cls in kind.__mro__:
            if issubclass(cls, base) and cls is not base and _uses_weight(vars(cls).get("forward")):
                msg = (
                    f"{kind.__name__} uses its weight in a forward of its own, where it would meet a "
                    "shard; let it call super().forward, or leave it out of the conversion"
                )
                raise ModelError(msg)
        # Between the subclass and torch's layer: super().forward() of the one finds the other's.
        _parallel_classes[kind, parallel] = type(
            f"Parallel{kind.__name__}",
            (kind, parallel),
            {"__module__": kind.__module__, "__reduce_ex__": _reduce, "_kinds": (kind, base, parallel)},
        )
    return _parallel_classes[kind, parallel]


def computes_linear(layer: nn.Module) -> bool:
    """Whether a subclass of ``nn.Linear`` with a ``forward`` of its own computes what ``nn.Linear`` does.

    It is tried with other weights, so that neither their size nor their device matters; nor does a
    default device.
    """
    if not isinstance(layer, nn.Linear) or set(layer._parameters) - {"weight", "bias"} or layer._modules:
        return False
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        own = {"weight": torch.randn(5, 3), "bias": None if layer.bias is None else torch.randn(5)}
        tried = type(layer).__new__(type(layer))
        tried.__dict__.update(layer.__dict__, _parameters=own, in_features=3, out_features=5)
        for shape in ((2, 3), (2, 4, 3)):
            x = torch.randn(shape)
            try:
                made = type(layer).forward(tried, x)
            except Exception:  # noqa: BLE001 - whatever it needs, it is something else
                return False
            expected = nn.functional.linear(x, own["weight"], own["bias"])
            if not isinstance(made, Tensor) or not torch.allclose(made, expected, atol=1e-5):
                return False
    return True


def _uses_weight(forward: Any) -> bool:
    """Whether a method takes the values of a weight, and not only its type or device."""
    if getattr(forward, "__code__", None) is None or "weight" not in forward.__code__.co_names:
        return False
    steps = [step for step in dis.get_instructions(forward) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    return any(
        step.argval == "weight" and following.argval not in ("dtype", "device")
        for step, following in itertools.pairwise(steps)
    )


def _reduce(self: Any, protocol: int) -> Any:  # noqa: ARG001 - as pickle calls it
    """Pickle a layer of a made-up class by the classes that it was made of."""
    return _rebuild, self._kinds, self.__dict__


def _rebuild(kind: type[nn.Module], base: type[nn.Module], parallel: type[nn.Module]) -> nn.Module:
    cls = parallel_class(kind, base, parallel)
    return cls.__new__(cls)
