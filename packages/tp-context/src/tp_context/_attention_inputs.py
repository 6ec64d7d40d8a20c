"""What an attention is given: tensors, rules, and how sequences are cut."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
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


class Masking(NamedTuple):
    """What an attention leaves out.

    Attributes:
        mask: The mask, boolean or additive.
        dropout: The probability to drop a weight.
        is_causal: Whether queries see earlier positions only.
    """

    mask: Tensor | None
    dropout: float
    is_causal: bool


def misfit(query: Tensor, key: Tensor, value: Tensor, masking: Masking, grouped: bool) -> str | None:
    """Return why the arguments of `tp_context.attention` do not fit each other; ``None`` if they do."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            return f"attention's {name} must be a tensor (..., heads, tokens, features), got {tensor!r:.80}"
        if tensor.dim() < 2:
            shape = tuple(tensor.shape)
            return f"attention's {name} must be (..., heads, tokens, features), got shape {shape}"
    for what in ("dtype", "device"):
        if len({getattr(tensor, what) for tensor in named.values()}) > 1:
            found = ", ".join(f"{name} {getattr(tensor, what)}" for name, tensor in named.items())
            return f"attention's tensors must have one {what}, got {found}; write key.to(query.{what})"
    if not query.is_floating_point():
        return f"attention needs floating-point tensors, got {query.dtype}; write query.float()"
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
    if query.size(-1) != key.size(-1):
        return f"attention's query and key must have as many features, their last dimension, got {shapes}"
    if key.size(-2) != value.size(-2):
        return f"attention's key and value must have as many tokens, their dimension -2, got {shapes}"
    if grouped and query.dim() > 2 and key.dim() > 2 and query.size(-3) % key.size(-3):
        return f"with enable_gqa=True the heads of query must be a multiple of those of key, got {shapes}"
    leads = [tensor.shape[:-2] for tensor in named.values()]
    if grouped:
        leads = [tensor.shape[:-3] for tensor in named.values()]
    if not _broadcast_together(leads):
        hint = ""
        if not grouped and _broadcast_together(lead[:-1] for lead in leads):
            hint = "; where several heads of query share one of key, write enable_gqa=True"
        return f"attention's tensors must agree in heads and batch, got {shapes}{hint}"
    return _misfit_of_masking(query, key, masking)


def _misfit_of_masking(query: Tensor, key: Tensor, masking: Masking) -> str | None:
    mask, dropout, is_causal = masking
    if not isinstance(is_causal, bool):
        return f"attention's is_causal must be True or False, got {is_causal!r:.80}"
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        return f"attention's dropout_p must be a probability from 0 to 1, got {dropout!r:.80}"
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return f"attention's attn_mask must be a tensor, got {type(mask).__name__}; write torch.tensor(mask)"
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        return (
            f"attention's attn_mask must be boolean, or floating-point and added, got {mask.dtype}; "
            "write mask.bool()"
        )
    scores = (*query.shape[:-1], key.size(-2))
    if not _broadcast_together([mask.shape, scores]):
        return (
            f"attention's attn_mask must fit the scores, (..., queries, keys) = {scores}, got shape "
            f"{tuple(mask.shape)}"
        )
    return None


def _broadcast_together(shapes: Iterable[Sequence[int]]) -> bool:
    try:
        torch.broadcast_shapes(*map(tuple, shapes))
    except RuntimeError:
        return False
    return True


class QueryKeyCuts(NamedTuple):
    """The cuts of queries and of keys, in an attention of which each rank has slices of both."""

    rows: Cut
    keys: Cut
