"""Tensors that are a part of a larger one, and models that are built without memory."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.tensors._deferred import build_deferred as build_deferred
    from tp_core.tensors._deferred import initial_value as initial_value
    from tp_core.tensors._deferred import is_deferred as is_deferred
    from tp_core.tensors._deferred import materialize as materialize
    from tp_core.tensors._slices import SHARDED_ATTRIBUTE as SHARDED_ATTRIBUTE
    from tp_core.tensors._slices import TensorSlice as TensorSlice
    from tp_core.tensors._slices import is_sharded as is_sharded
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.tensors._deferred": ["build_deferred", "initial_value", "is_deferred", "materialize"],
            "tp_core.tensors._slices": ["SHARDED_ATTRIBUTE", "TensorSlice", "is_sharded"],
        },
    )
