"""Subclasses with a forward of their own: it must leave the weight to the layer, as a rank has a shard of it.

A subclass may do something before and after ``super().forward(x)``. If it reads the weight itself, there or
in whatever that calls, it would compute with this rank's shard, and say nothing. So it gets a tensor that
refuses to be computed with: on trial when the layer is converted, and in each forward of the parallel layer.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ModelError
from tp_core.random import preserve_torch_rng_state

_SPLIT = ("weight", "bias")
_IS_OWN = "_runs_own_forward"
# What a shard has as the whole weight has it.
_COMMON = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_cuda", "layout")
)


class _WeightReadError(RuntimeError):
    """Raised in place of a `ModelError`: of an error of types torch's operators make one of their own."""


class _GuardedWeight(Tensor):
    """A weight that says its dtype and device, and refuses everything else."""

    reader: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guarded = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, _GuardedWeight))
        if func in _COMMON:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        msg = (
            f"{guarded.reader} uses its weight in a forward of its own, where it would meet a shard; let it "
            "call super().forward, or leave it out of the conversion"
        )
        raise _WeightReadError(msg)


def _guard(value: Any, kind: type[nn.Module]) -> Any:
    if not isinstance(value, Tensor):
        return value
    guarded = value.detach().as_subclass(_GuardedWeight)
    guarded.reader = kind.__name__
    return guarded


class _LinearOnTrial(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input.new_zeros(*input.shape[:-1], self.out_features)


class _EmbeddingOnTrial(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        dtype = self.weight.dtype
        return torch.zeros(*input.shape, self.embedding_dim, dtype=dtype, device=input.device)


def has_own_forward(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return whether a subclass of one of torch's layers has a forward of its own."""
    return kind.forward is not base.forward


def check_own_forward(layer: nn.Module) -> None:
    """Try the forward of a subclass of ``nn.Linear`` or ``nn.Embedding``, whose own forward computes nothing.

    A forward that needs other arguments cannot be tried here: it is watched when it runs.

    Raises:
        ModelError: It uses the weight.
    """
    kind = type(layer)
    weight = layer._parameters.get("weight")
    if weight is None:
        return
    base: type[nn.Module]
    stub: type[nn.Module]
    if isinstance(layer, nn.Embedding):
        base, stub = nn.Embedding, _EmbeddingOnTrial
        example = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
    elif isinstance(layer, nn.Linear):
        base, stub = nn.Linear, _LinearOnTrial
        example = torch.zeros(1, layer.in_features, dtype=weight.dtype, device=weight.device)
    else:
        return
    if not has_own_forward(kind, base):
        return
    tried = _copy_for_trial(layer, type(kind.__name__, (kind, stub), {}))
    with torch.no_grad(), preserve_torch_rng_state([weight.device]):
        try:
            tried.forward(example)
        except _WeightReadError as error:
            raise ModelError(str(error)) from None
        except Exception:  # noqa: BLE001 - whatever it needs, it is watched when it runs
            return


def _copy_for_trial(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a copy of a layer with guarded weights, whose trial leaves no trace on the layer."""
    tried = kind.__new__(kind)
    parameters = {id(p): p for p in layer.parameters()}  # too large to be copied, and not written
    for name, value in vars(layer).items():
        tried.__dict__[name] = value
        if name in ("_modules", "_buffers"):
            tried.__dict__[name] = copy.deepcopy(value, dict(parameters))
    tried.__dict__["_parameters"] = {
        name: _guard(value, type(layer)) if name in _SPLIT else value
        for name, value in layer._parameters.items()
    }
    return tried


def watch_own_forward(
    kind: type[nn.Module], parallel: type[nn.Module]
) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return what a parallel layer of a subclass has beside the subclass: the base after it, and its members.

    The weight is guarded in the forward of the subclass, and is the shard in that of the parallel layer.
    """

    def forward_of_layer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = self.__dict__.get(_IS_OWN, False)
        self.__dict__[_IS_OWN] = False
        try:
            return parallel.forward(self, *args, **kwargs)
        finally:
            self.__dict__[_IS_OWN] = outer

    def own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_IS_OWN] = True
        try:
            return kind.forward(self, *args, **kwargs)
        except _WeightReadError as error:
            raise ModelError(str(error)) from None
        finally:
            self.__dict__[_IS_OWN] = False

    inner = type(
        parallel.__name__, (parallel,), {"forward": forward_of_layer, "__module__": parallel.__module__}
    )

    def read(self: nn.Module, name: str) -> Any:
        value = kind.__getattr__(self, name)
        if name in _SPLIT and self.__dict__.get(_IS_OWN, False):
            return _guard(value, kind)
        return value

    return inner, {"forward": own_forward, "__getattr__": read}
