"""What an attention is given: tensors, rules, and how sequences are cut."""

from typing import NamedTuple

from torch import Tensor

from tp_context._slices import Cut


class Inputs(NamedTuple):
    """The tensors of an attention.

    Attributes:
        query: (..., heads, tokens, features).
        key: (..., heads, tokens, features).
        value: (..., heads, tokens, features).
        mask: (..., this rank's queries or 1, all keys or 1), boolean or additive.
        bias: What is added to scores before the mask, (..., heads, queries, keys).
        sinks: A score for each head of a key with the value zero: (heads,).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class Rules(NamedTuple):
    """The rules of an attention.

    Attributes:
        rows: The cut of the queries; ``None`` if all of them are here.
        keys: The cut of the keys; ``None`` if all of them are here.
        is_causal: Whether a query sees earlier positions only.
        scale: The factor of the products.
        grouped: Whether several heads of queries share one of keys.
        dropout: The probability to drop a weight.
        softcap: The limit of scores.
        by_hand: Whether scores are computed in memory as transformers does it, and not by torch's function.
    """

    rows: Cut | None
    keys: Cut | None
    is_causal: bool = False
    scale: float | None = None
    grouped: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    by_hand: bool = False


class QueryKeyCuts(NamedTuple):
    """The cuts of queries and of keys, in an attention of which each rank has slices of both."""

    rows: Cut
    keys: Cut
