"""Tensors that are a part of a larger one, and models that are built without memory."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.modules._parameters import SHARDED_ATTRIBUTE as SHARDED_ATTRIBUTE
    from tp_core.modules._parameters import TensorSlice as TensorSlice
    from tp_core.modules._parameters import check_initialized as check_initialized
    from tp_core.modules._parameters import check_not_quantized as check_not_quantized
    from tp_core.modules._parameters import is_dtensor as is_dtensor
    from tp_core.modules._parameters import is_sharded as is_sharded
    from tp_core.modules._parameters import norm_dtype as norm_dtype
    from tp_core.modules._parameters import quantized_parts as quantized_parts
    from tp_core.modules._user_state import copy_attributes as copy_attributes
    from tp_core.modules._user_state import hooked_parameters as hooked_parameters
    from tp_core.modules._user_state import move_gradient_hooks as move_gradient_hooks
    from tp_core.tensors._deferred import build_deferred as build_deferred
    from tp_core.tensors._deferred import initial_value as initial_value
    from tp_core.tensors._deferred import is_deferred as is_deferred
    from tp_core.tensors._deferred import materialize as materialize
    from tp_core.tensors._digests import DIGESTS as DIGESTS
    from tp_core.tensors._digests import INDEX as INDEX
    from tp_core.tensors._digests import read_digests as read_digests
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.tensors._deferred": ["build_deferred", "initial_value", "is_deferred", "materialize"],
            "tp_core.tensors._digests": ["DIGESTS", "INDEX", "read_digests"],
            "tp_core.modules._parameters": [
                "SHARDED_ATTRIBUTE",
                "TensorSlice",
                "check_initialized",
                "check_not_quantized",
                "is_dtensor",
                "is_sharded",
                "norm_dtype",
                "quantized_parts",
            ],
            "tp_core.modules._user_state": ["copy_attributes", "hooked_parameters", "move_gradient_hooks"],
        },
    )
