"""Which of torch's functions draw random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

__all__ = ["draws"]

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
_HOMES: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}


def _parse(table: str) -> frozenset[Callable[..., Any]]:
    found = []
    home: Any = None
    for word in table.split():
        if word.endswith(":"):
            home = _HOMES[word[:-1]]
        elif hasattr(home, word):  # some are missing in some versions
            found.append(getattr(home, word))
    return frozenset(found)


_DRAW = _parse(_ALWAYS)
_MAY_DRAW = _parse(_SOMETIMES)
_RATE = frozenset({"dropout", "dropout_p"})


def draws(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether the call takes numbers from the default generator of a device."""
    if function in _DRAW:
        return kwargs is None or kwargs.get("generator") is None
    if function not in _MAY_DRAW:
        return False
    # Recurrent layers and attention have a dropout rate: the one float above 0 among the
    # positional arguments, or a keyword.
    named = () if kwargs is None else [v for k, v in kwargs.items() if k in _RATE]
    return any(isinstance(v, float) and v > 0 for v in (*args, *named))
