"""Tensors that are a part of a larger one, and models that are built without memory."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.tensors._deferred import build_deferred as build_deferred
    from tp_core.tensors._deferred import initial_value as initial_value
    from tp_core.tensors._deferred import is_deferred as is_deferred
    from tp_core.tensors._deferred import materialize as materialize
    from tp_core.tensors._digests import DIGESTS as DIGESTS
    from tp_core.tensors._digests import INDEX as INDEX
    from tp_core.tensors._digests import read_digests as read_digests
    from tp_core.tensors._slices import SHARDED_ATTRIBUTE as SHARDED_ATTRIBUTE
    from tp_core.tensors._slices import TensorSlice as TensorSlice
    from tp_core.tensors._slices import check_initialized as check_initialized
    from tp_core.tensors._slices import check_not_quantized as check_not_quantized
    from tp_core.tensors._slices import is_dtensor as is_dtensor
    from tp_core.tensors._slices import is_sharded as is_sharded
    from tp_core.tensors._slices import quantized_parts as quantized_parts
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.tensors._deferred": ["build_deferred", "initial_value", "is_deferred", "materialize"],
            "tp_core.tensors._digests": ["DIGESTS", "INDEX", "read_digests"],
            "tp_core.tensors._slices": [
                "SHARDED_ATTRIBUTE",
                "TensorSlice",
                "check_initialized",
                "check_not_quantized",
                "is_dtensor",
                "is_sharded",
                "quantized_parts",
            ],
        },
    )
