"""The kinds of layers that can be split, and the class of parallel layers for each.

The parallel layers register themselves with :func:`stands_for`. So a linear layer can be converted together
with the embedding that shares its weight, without an import of either.
"""

import dis
import itertools
from collections.abc import Callable
from inspect import isfunction
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tp_core.errors import ModelError

Layer = TypeVar("Layer", bound=nn.Module)
_forms: dict[type[nn.Module], type[nn.Module]] = {}
_parallel_classes: dict[tuple[type, type], type] = {}


def stands_for(plain: type[nn.Module]) -> Callable[[type[Layer]], type[Layer]]:
    """Register a class of parallel layers as the one to which ``plain`` layers are converted."""

    def note(parallel: type[Layer]) -> type[Layer]:
        _forms[plain] = parallel
        return parallel

    return note


def form_of(kind: type[nn.Module]) -> Any:
    """Return the parallel class, with a ``from_plain``, to which layers of a class are converted.

    Raises:
        ModelError: Its own ``forward`` uses the weight, and would get a shard.
    """
    plain = next(plain for plain in _forms if issubclass(kind, plain))
    return parallel_class(kind, plain, _forms[plain])


def parallel_class(kind: type[nn.Module], base: type[nn.Module], parallel: type[Layer]) -> type[Layer]:
    """Return the class of a parallel layer that is also a ``kind``, a subclass of ``base``.

    Raises:
        ModelError: Its own ``forward`` uses the weight, and would get a shard.
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
        # In the order of bases ours stands between the subclass and torch's layer: `super().forward()` of the
        # subclass then finds ours (`subclasses_stay_what_they_are`).
        _parallel_classes[kind, parallel] = type(
            f"Parallel{kind.__name__}",
            (kind, parallel),
            {"__module__": kind.__module__, "__reduce_ex__": _reduce, "_kinds": (kind, base, parallel)},
        )
    return _parallel_classes[kind, parallel]


def computes_linear(layer: nn.Module) -> bool:
    """Return whether a subclass of ``nn.Linear`` with its own ``forward`` computes what ``nn.Linear`` does.

    It is tried with small weights on the CPU, so that neither the size nor the device of its own matters.
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
    """Return whether a method reads the values of a weight, and not only its type or device."""
    # By its bytecode: the source may be missing, and calling it would need an input.
    if getattr(forward, "__code__", None) is None or "weight" not in forward.__code__.co_names:
        return False
    steps = [step for step in dis.get_instructions(forward) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    return any(
        step.argval == "weight" and following.argval not in ("dtype", "device")
        for step, following in itertools.pairwise(steps)
    )


def _reduce(self: Any, protocol: int) -> Any:  # noqa: ARG001 - as pickle calls it
    """Pickle a layer of a generated class by its base classes: pickle finds no generated class by name."""
    return _rebuild, self._kinds, self.__dict__


def _rebuild(kind: type[nn.Module], base: type[nn.Module], parallel: type[nn.Module]) -> nn.Module:
    cls = parallel_class(kind, base, parallel)
    return cls.__new__(cls)


def why_not_split(layer: nn.Module) -> str | None:
    """Return the reason why a layer has no weight and bias of its own to split, ``None`` if it has."""
    for name in ("weight", "bias"):
        if isinstance(layer._parameters.get(name), nn.UninitializedParameter):
            return (
                f"{type(layer).__name__} has no {name} before it has seen an input; call the model with a "
                "batch first"
            )
        made = parametrize.is_parametrized(layer, name) or name in vars(layer) or name in layer._buffers
        if name not in layer._parameters and made:
            transforms: Any = layer._forward_pre_hooks.values()  # torch's older functions and pruning
            if parametrize.is_parametrized(layer, name):
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
    # By name, so that transformers need not be installed.
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that a plan can split."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the input and output features of a linear layer or of an embedding, over all ranks."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight: Tensor = module.weight  # type: ignore[assignment]  # a Conv1D's
    return weight.size(0), weight.size(1)
