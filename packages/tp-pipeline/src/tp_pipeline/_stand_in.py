"""Tensors without numbers, which take the place of those that a stage does not have."""

from typing import Any, Self

import torch
from torch import Tensor
from tp_core import tree_leaves, tree_map

from tp_pipeline._stage_dry_run import TensorSpec, exchange_nothing


class StandIn(Tensor):
    """A tensor without numbers, for one that a stage does not have. What is computed with it has none, too.

    Args:
        like: A tensor without memory (on the device "meta"), of its shape and type.
        device: The device that it seems to be on.
    """

    # Private to torch, and how its own wrappers are made: results are not to be made of this class by it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's way
    like: Tensor

    def __new__(cls, like: Tensor, device: torch.device) -> Self:
        """Make the tensor."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # private, too
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.like = like
        return made

    @classmethod
    def of(cls, spec: TensorSpec, device: torch.device) -> "StandIn":
        """Return one of a shape and type."""
        return cls(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a plain function
        cls, func: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute shapes and types alone."""
        devices = [t.device for t in tree_leaves((args, kwargs or {})) if isinstance(t, cls)]

        def to_meta(value: Any) -> Any:
            if isinstance(value, cls):
                return value.like
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return value

        if func.namespace == "c10d":
            return exchange_nothing(func, args)
        args, named = tree_map(to_meta, (args, dict(kwargs or {})))
        device = named.get("device") or devices[0]
        if "device" in named:
            named["device"] = torch.device("meta")
        outputs = func(*args, **named)
        return tree_map(lambda v: cls(v, torch.device(device)) if isinstance(v, Tensor) else v, outputs)
