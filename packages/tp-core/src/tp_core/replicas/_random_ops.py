"""Which of torch's functions draw random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F

__all__ = ["is_random_op"]

_ALWAYS = """
torch: bernoulli binomial multinomial normal poisson rand rand_like randint randint_like randn
    randn_like randperm dropout dropout_ native_dropout alpha_dropout alpha_dropout_
    feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_
F: dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_
    gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
Tensor: bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_
    random_ uniform_
"""
_SOMETIMES = """
torch: lstm gru rnn_tanh rnn_relu
F: scaled_dot_product_attention multi_head_attention_forward
"""
_INSIDE = """
torch: _standard_gamma _sample_dirichlet _fused_dropout _fill_mem_eff_dropout_mask_
    _cudnn_init_dropout_state _cudnn_rnn _lstm_mps miopen_rnn
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _triton_scaled_dot_attention _flash_attention_forward_no_dropout_inplace
nn: rrelu_with_noise rrelu_with_noise_
"""
"""Operators behind functions that are not intercepted themselves, such as those of distributions."""

_HOMES: dict[str, Any] = {"torch": torch, "nn": torch._C._nn, "F": F, "Tensor": Tensor}


def _parse(table: str) -> frozenset[Callable[..., Any]]:
    found = []
    home: Any = None
    for word in table.split():
        if word.endswith(":"):
            home = _HOMES[word[:-1]]
        elif hasattr(home, word):  # some are missing in some versions
            found.append(getattr(home, word))
    return frozenset(found)


_TAG = torch.Tag.nondeterministic_seeded
_RANDOM = _parse(_ALWAYS)
_RANDOM_INSIDE = _parse(_INSIDE)
_MAYBE_RANDOM = _parse(_SOMETIMES)
_RATE = frozenset({"dropout", "dropout_p"})


def is_random_op(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether the call takes numbers from the default generator of a device."""
    # The compiler traces the first table; functions of the second it takes as a whole.
    if function in _RANDOM or (not torch.compiler.is_compiling() and _is_random_inside(function)):
        return kwargs is None or kwargs.get("generator") is None
    if function not in _MAYBE_RANDOM:
        return False
    # Recurrent layers and attention have a dropout rate: the one float above 0 among the
    # positional arguments, or a keyword.
    named = () if kwargs is None else [v for k, v in kwargs.items() if k in _RATE]
    return any(isinstance(v, float) and v > 0 for v in (*args, *named))


def _is_random_inside(function: Callable[..., Any]) -> bool:
    """Return whether it is one of the second table, or an operator that is tagged as random."""
    if isinstance(function, OpOverloadPacket):
        names: list[str] = function.overloads()
        return any(_TAG in getattr(function, name).tags for name in names)
    if isinstance(function, OpOverload):
        return _TAG in function.tags
    return function in _RANDOM_INSIDE
