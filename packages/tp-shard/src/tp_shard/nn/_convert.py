"""The conversion of a finished model's layers to parallel layers: which can be split, and into what."""

import sys
from collections.abc import Callable
from inspect import isfunction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tp_core.errors import ModelError
from tp_core.random import preserve_torch_rng_state, seed_torch
from tp_core.tensors import copy_attributes

from tp_shard._groups._group import Group
from tp_shard._guards import guard_saving
from tp_shard._shards import ParallelLayer, check_dim
from tp_shard._split import Split
from tp_shard.nn._own_forward import check_own_forward, has_own_forward, watch_own_forward

# -- The kinds of layers that can be split, and the class of parallel layers for each -------------
# The parallel layers register themselves with :func:`converts_from`. So a linear layer can be converted
# together with the embedding that shares its weight, without an import of either.


Layer = TypeVar("Layer", bound=nn.Module)
_registered: dict[type[nn.Module], type[nn.Module]] = {}
_parallel_classes: dict[tuple[type, type], type] = {}


def converts_from(plain: type[nn.Module]) -> Callable[[type[Layer]], type[Layer]]:
    """Register a class of parallel layers as the one to which ``plain`` layers are converted."""

    def register(parallel: type[Layer]) -> type[Layer]:
        _registered[plain] = parallel
        return parallel

    return register


def parallel_class_of(kind: type[nn.Module]) -> Any:
    """Return the parallel class, with a ``from_plain``, to which layers of a class are converted."""
    plain = next(plain for plain in _registered if issubclass(kind, plain))
    return parallel_class(kind, plain, _registered[plain])


def parallel_class(kind: type[nn.Module], base: type[nn.Module], parallel: type[Layer]) -> type[Layer]:
    """Return the class of a parallel layer that is also a ``kind``, a subclass of ``base``."""
    if kind is base or kind.__module__.startswith("torch.nn."):
        return parallel
    if (kind, parallel) not in _parallel_classes:
        # In the order of bases ours stands between the subclass and torch's layer: `super().forward()` of the
        # subclass then finds ours (`subclasses_stay_what_they_are`).
        inner: type[nn.Module] = parallel
        members: dict[str, Any] = {}
        if has_own_forward(kind, base):
            inner, members = watch_own_forward(kind, parallel)
        members |= {"__module__": kind.__module__, "__reduce_ex__": _reduce, "_kinds": (kind, base, parallel)}
        _parallel_classes[kind, parallel] = type(f"Parallel{kind.__name__}", (kind, inner), members)
    return _parallel_classes[kind, parallel]


def computes_linear(layer: nn.Module) -> bool:
    """Return whether a subclass of ``nn.Linear`` with its own ``forward`` computes what ``nn.Linear`` does.

    It is tried with small weights on the CPU, so that neither the size nor the device of its own matters.
    """
    if not isinstance(layer, nn.Linear) or set(layer._parameters) - {"weight", "bias"} or layer._modules:
        return False
    with torch.device("cpu"), preserve_torch_rng_state(()), torch.no_grad():
        seed_torch(0, ())
        weight = torch.randn(5, 3)
        bias = None if layer.bias is None else torch.randn(5)
        own = {"weight": weight, "bias": bias}
        tried = type(layer).__new__(type(layer))
        tried.__dict__.update(layer.__dict__, _parameters=own, in_features=3, out_features=5)
        for shape in ((2, 3), (2, 4, 3)):
            x = torch.randn(shape)
            try:
                output = type(layer).forward(tried, x)
            except Exception:  # noqa: BLE001 - whatever it needs, it is something else
                return False
            expected = nn.functional.linear(x, weight, bias)
            if not isinstance(output, Tensor) or not torch.allclose(output, expected, atol=1e-5):
                return False
    return True


def _reduce(self: Any, protocol: int) -> Any:  # noqa: ARG001 - as pickle calls it
    """Pickle a layer of a generated class by its base classes: pickle finds no generated class by name."""
    return _rebuild_parallel, self._kinds, self.__dict__


def _rebuild_parallel(kind: type[nn.Module], base: type[nn.Module], parallel: type[nn.Module]) -> nn.Module:
    cls = parallel_class(kind, base, parallel)
    return cls.__new__(cls)


def why_not_split(layer: nn.Module) -> str | None:
    """Return the reason why a layer has no weight and bias of its own to split, ``None`` if it has."""
    if "forward" in vars(layer):
        return (
            "its forward was replaced on the object, by one that has the whole weight; split it before that"
        )
    for name in ("weight", "bias"):
        if isinstance(layer._parameters.get(name), nn.UninitializedParameter):
            return (
                f"{type(layer).__name__} has no {name} before it has seen an input; call the model with a "
                "batch first"
            )
        if name in layer._parameters:
            continue
        is_parametrized = parametrize.is_parametrized(layer, name)
        if is_parametrized or name in vars(layer) or name in layer._buffers:
            transforms: Any = layer._forward_pre_hooks.values()  # torch's older functions and pruning
            if is_parametrized:
                transforms = layer.parametrizations[name]  # type: ignore[index]  # a ModuleDict
            kinds = [type(t).__name__.strip("_") for t in transforms if not isfunction(t)]
            by = ", ".join(kinds) or "code of its own"
            return (
                f"its {name} is no parameter but computed, by {by}, which would meet a rank's shard; remove "
                "that before the layer is split, or leave the layer whole"
            )
    return None


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is the ``Conv1D`` of transformers, a linear layer with a weight (in, out)."""
    # Of a module of transformers that the model's own code has imported: nothing is imported for it.
    utils = sys.modules.get("transformers.pytorch_utils")
    return utils is not None and type(module) is utils.Conv1D


def base_of(module: nn.Module) -> nn.Module:
    """Return the linear layer around which peft has put LoRA, DoRA or IA3; any other module as it is."""
    inside = module._modules
    base = inside.get("base_layer")
    has_adapter = isinstance(inside.get("lora_A"), nn.ModuleDict) or "ia3_l" in inside
    if base is None or not has_adapter:
        return module
    if isinstance(base, nn.Linear) or is_transposed(base):
        return base
    return module


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that a plan can split, with adapters or without."""
    base = base_of(module)
    return isinstance(base, nn.Linear) or is_transposed(base)


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer or of an embedding, over all ranks."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    layer = base_of(module)
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    weight: Tensor = layer.weight  # type: ignore[assignment]  # a Conv1D's
    return weight.size(0), weight.size(1)


# -- The conversion of a finished model's layers to parallel layers -------------------------------


class Conversion:
    """One conversion of a model: a layer or a parameter that is used in two places stays one object."""

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
        """Return the parallel form of a layer of torch, the same object for each call.

        Raises:
            ModelError: It is of a subclass that uses its weight itself.
        """
        check_own_forward(layer)
        make = parallel_class_of(type(layer))
        return self.replace(
            layer, lambda: make.from_plain(layer, dim, gather_output=gather_output, group=self.group)
        )

    def replace(self, layer: nn.Module, make: Callable[[], ParallelLayer]) -> nn.Module:
        """Return the layer that ``make`` returns, filled with this rank's shards; the same for each call."""
        if id(layer) in self._layers:
            return self._layers[id(layer)]
        reason = why_not_split(layer)
        if reason is not None:
            msg = f"{type(layer).__name__} cannot be split: {reason}"
            raise ModelError(msg)
        converted = make()
        for name, parameter in layer._parameters.items():
            converted._parameters[name] = None
            if parameter is not None:
                converted._parameters[name] = self._shard(parameter, converted.splits.get(name))
        converted.mark_parameters()
        self._layers[id(layer)] = converted
        return converted

    def shard_of(self, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Return the shard of a parameter, the parameter itself if it was not split."""
        for (key, _), shard in self._parameters.items():
            if key == id(parameter):
                return shard
        return parameter

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
        """Return this rank's shard of a parameter, with its attributes and its gradient.

        Raises:
            ModelError: The parameter has a gradient hook.
        """
        if group.size == 1:
            return parameter
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            msg = (
                f"a parameter of shape {tuple(parameter.shape)} that is split has a gradient hook "
                "(register_hook or register_post_accumulate_grad_hook), which would be lost: this rank's "
                "gradient covers its part alone. Put the hook on after the model is split, for the part, or "
                "change gradients before the optimizer steps, as in a callback's on_optimizer_step"
            )
            raise ModelError(msg)
        shard = nn.Parameter(split.take(parameter.detach(), group.rank), parameter.requires_grad)
        copy_attributes(parameter, shard)
        if parameter.grad is not None:
            shard.grad = split.take(parameter.grad, group.rank)
        return shard


def without_parameters(kind: type[Layer], plain: nn.Module) -> Layer:
    """Return a layer with the attributes of a plain one, its hooks and mode too, without parameters."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.__dict__.update({k: v for k, v in plain.__dict__.items() if k != "_parameters"})
    return layer


def convert_layers(
    root: nn.Module, kind: type[nn.Module], dim: int | None, *, gather_output: bool, group: Group
) -> nn.Module:
    """Convert all layers of a kind to parallel layers, in place; return the root, or the layer in its place.

    A linear layer and an embedding that share a weight get the same split: the rows of the table are the
    outputs of the linear layer. The one that is not of this kind then has whole outputs.
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
    for path, layer in _called_modules(root, "", set()):
        if isinstance(layer, ParallelLayer) or not isinstance(layer, kind):
            continue
        replaced[id(layer)] = conversion.layer(layer, dim, gather_output=gather_output)
        if not split:
            continue
        for partner_path, partner in conversion.partners(layer):
            if not isinstance(partner, nn.Linear | nn.Embedding):
                msg = (
                    f"{path or 'the layer'} shares its weight with {partner_path} "
                    f"({type(partner).__name__}), which cannot be split; untie them first"
                )
                raise ModelError(msg)
            if isinstance(partner, kind):
                other = conversion.layer(partner, dim, gather_output=gather_output)
            else:
                # Its other dimension: the rows of a table are the outputs of a linear layer.
                other_dim = -1 if dim == 0 else 0
                other = conversion.layer(partner, other_dim, gather_output=True)
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


def _called_modules(root: nn.Module, path: str, seen: set[int]) -> list[tuple[str, nn.Module]]:
    """List the modules that get called; torch's attention reads its layers' weights without calling them."""
    if id(root) in seen or isinstance(root, nn.MultiheadAttention):
        return []
    seen.add(id(root))
    modules = [(path, root)]
    for name, child in root._modules.items():
        if child is not None:
            child_path = f"{path}.{name}" if path else name
            modules += _called_modules(child, child_path, seen)
    return modules
