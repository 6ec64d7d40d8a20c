"""Patches of torch's functions: attention and dropout are of whole sequences while a model runs on slices.

The functions are replaced. A TorchFunctionMode would be off in the forwards that activation checkpointing
repeats within a backward pass.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tp_context._attention import attention, whole_mask
from tp_context._kernels import plain_attention
from tp_context._slices import Cut, Cuts, find_slice
from tp_context._split_state import OuterCall, split_states

# As they are before `patched` replaces them.
_plain_dropout = F.dropout
_plain_multi_head = F.multi_head_attention_forward
_MULTI_HEAD = inspect.signature(_plain_multi_head)

_FLEX = "torch.nn.attention.flex_attention"
_MASKS = "transformers.masking_utils"
_FIND_DOCUMENTS = "find_packed_sequence_indices"


@contextmanager
def patched(*, drops: bool = True) -> Iterator[None]:
    """Patch torch's attention, multi-head attention and dropout for the duration of the context.

    Args:
        drops: Whether dropout drops.
    """
    patches: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", _scaled_dot_product_attention),
        (F, "dropout", _dropout),
        (F, "multi_head_attention_forward", _multi_head_attention),
    ]
    flex = sys.modules.get(_FLEX)  # importing it would load torch's compiler
    if flex is not None and not hasattr(flex.flex_attention, "__wrapped__"):
        plain = flex.flex_attention
        patches.append((flex, "flex_attention", wraps(plain)(partial(_flex_attention, plain))))
    masks = sys.modules.get(_MASKS)
    find_documents = getattr(masks, _FIND_DOCUMENTS, None)
    if find_documents is not None:
        patches.append((masks, _FIND_DOCUMENTS, partial(_documents_of_transformers, find_documents)))
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    # The fused kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer calls no function of torch.
    is_fast = torch.backends.mha.get_fastpath_enabled()
    drops = drops and split_states.current.drops
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for patch in patches:
            setattr(*patch)
        with split_states.changed(drops=drops):
            yield
    finally:
        for patch in before:
            setattr(*patch)
        torch.backends.mha.set_fastpath_enabled(is_fast)


# -- masks of transformers ---------------------------------------------------------------------------


def _documents_of_transformers(
    plain: Callable[[Tensor], Tensor | None], position_ids: Tensor
) -> Tensor | None:
    """Find packed documents by position numbers, but none in a slice: `Cuts.packed` has those of all tokens.

    In a slice it would also be a cumulative sum over its tokens, which the check refuses.
    """
    if split_states.slice_of(position_ids.size(-1)) is not None:
        return None
    return plain(position_ids)


# -- scaled_dot_product_attention -------------------------------------------------------------------


@wraps(plain_attention)
def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    state = split_states.current
    if not state.drops:
        dropout_p = 0.0
    if state.is_inner:
        return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if state.outer_call is not None:
        attn_mask = _joined_masks(state.outer_call, query)
        is_causal = state.outer_call.is_causal
    return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _joined_masks(call: OuterCall, query: Tensor) -> Tensor | None:
    """Return one mask of both, for queries (batch, heads, tokens, features)."""
    mask = call.mask
    padding = call.padding
    if mask is not None and mask.dim() == 3:
        mask = mask.view(*query.shape[:2], *mask.shape[1:])
    if padding is not None:
        padding = padding.view(-1, 1, 1, padding.size(-1))
    if mask is None:
        return padding
    if padding is None:
        return mask
    if mask.dtype is torch.bool and padding.dtype is torch.bool:
        return mask & padding
    return _additive(mask, query.dtype) + _additive(padding, query.dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


# -- flex_attention ---------------------------------------------------------------------------------


_block_masks: Any = WeakIdKeyDictionary()
"""The block mask of a cut's queries and all keys, by the mask that was given: layers share one."""


def _flex_attention(
    plain: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    **options: Any,
) -> Any:
    """Run torch's ``flex_attention`` with gathered keys, and functions of positions in the whole sequence."""
    keys = split_states.slice_of(key.size(-2))
    if keys is None:
        return plain(query, key, value, score_mod, block_mask, **options)
    rows = split_states.slice_of(query.size(-2))
    if rows is not None:
        if score_mod is not None:
            score_mod = _score_at_rows(score_mod, rows.index(query.device))
        if block_mask is not None:
            block_mask = _block_mask_of_rows(block_mask, rows, keys, query.device)
    with split_states.changed(is_inner=True):
        return plain(query, keys.gather(key, -2), keys.gather(value, -2), score_mod, block_mask, **options)


def _score_at_rows(score_mod: Callable[..., Tensor], index: Tensor) -> Callable[..., Tensor]:
    # torch counts the parameters of this function, and of the next one.
    def score(value: Tensor, batch: Tensor, head: Tensor, row: Tensor, to: Tensor) -> Tensor:
        return score_mod(value, batch, head, index[row], to)

    return score


def _block_mask_of_rows(block_mask: Any, rows: Cut, keys: Cut, device: torch.device) -> Any:
    """Return the block mask of this rank's queries and all keys."""
    masks = _block_masks.setdefault(block_mask, {})
    if rows not in masks:
        sees, index = block_mask.mask_mod, rows.index(device)

        def visible(batch: Tensor, head: Tensor, row: Tensor, to: Tensor) -> Tensor:
            return cast("Tensor", sees(batch, head, index[row], to))

        shape = (*block_mask.shape[:2], rows.tokens, keys.length)
        masks[rows] = sys.modules[_FLEX].create_block_mask(visible, *shape, device=device)
    return masks[rows]


# -- dropout ----------------------------------------------------------------------------------------


@wraps(_plain_dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    state = split_states.current
    if state.dropout_shapes is not None:
        state.dropout_shapes.append(input.shape)
    if not state.drops:
        return input
    place = None
    if state.cuts is not None and training and 0 < p < 1:
        place = _dropped_slice(input, state.cuts)
    if place is None:
        return _plain_dropout(input, p, training, inplace)
    dim, cut = place
    # Each rank draws the mask of whole sequences and takes its part of it, so that it matches one device: in
    # the order of memory, as torch draws it.
    order = sorted(range(input.dim()), key=input.stride, reverse=True)
    ones = input.new_ones([cut.length if d == dim else input.size(d) for d in order])
    ones = ones.permute([order.index(d) for d in range(input.dim())])
    mask = cut.take(_plain_dropout(ones, p), dim)
    if inplace:
        return input.mul_(mask)
    return input * mask


def _dropped_slice(input: Tensor, cuts: Cuts) -> tuple[int, Cut] | None:
    """Return the dimension of what dropout gets that has a slice, and its cut; ``None`` if it has none."""
    state = split_states.current
    if not state.is_inner:
        return find_slice(input, cuts, cuts.dims_of_dropout, input.dim())
    # Within tp-context's own functions only weights of nn.MultiheadAttention: (batch * heads, queries, keys).
    rows = None if state.outer_call is None else state.outer_call.rows
    dim = input.dim() - 2
    if rows is None or input.size(dim) != rows.tokens:
        return None
    return dim, rows


# -- multi_head_attention_forward -------------------------------------------------------------------


@wraps(_plain_multi_head)
def _multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Run ``nn.MultiheadAttention`` on slices; the attention that it calls is patched, too.

    Where it returns weights or adds a key, the inputs of keys and values are gathered: torch's own function
    does all the rest.
    """
    # Under a TorchFunctionMode, as in the check, torch's function calls the one of its name again: this one.
    if split_states.current.outer_call is not None:
        return _plain_multi_head(*args, **kwargs)
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    keys = split_states.slice_of(arguments["key"].size(0))
    if keys is None:
        return _plain_multi_head(*bound.args, **bound.kwargs)
    rows = split_states.slice_of(arguments["query"].size(0))
    padding = _whole_padding(arguments["key_padding_mask"], keys)
    needs_weights = arguments["need_weights"]
    adds_key = arguments["bias_k"] is not None or arguments["add_zero_attn"]
    gathers = needs_weights or adds_key or arguments["static_k"] is not None
    mask = _inverted(arguments["attn_mask"])
    is_causal = False
    if mask is not None and rows is not None:
        mask, is_causal = whole_mask(mask, rows, keys, is_causal=False)
        if is_causal and (padding is not None or gathers):
            index = rows.index(arguments["query"].device)
            mask = index[:, None] >= torch.arange(keys.length, device=index.device)
            is_causal = False
    call = OuterCall(rows, mask, _inverted(padding), is_causal)
    if not gathers:
        arguments.update(attn_mask=None, key_padding_mask=None, is_causal=False)
        with split_states.changed(outer_call=call):
            return _plain_multi_head(*bound.args, **bound.kwargs)
    is_same = arguments["key"] is arguments["value"]
    whole_key = keys.gather(arguments["key"], 0)
    if is_same:
        whole_value = whole_key
    else:
        whole_value = keys.gather(arguments["value"], 0)
    arguments.update(key=whole_key, value=whole_value, need_weights=True)
    arguments.update(attn_mask=_inverted(mask), key_padding_mask=padding, is_causal=False)
    with split_states.changed(outer_call=call, is_inner=True):
        mixed, weights = _plain_multi_head(*bound.args, **bound.kwargs)
    return mixed, weights if needs_weights else None


def _whole_padding(padding: Tensor | None, keys: Cut) -> Tensor | None:
    """Return a mask of padding for all keys: a boolean one, if an additive one says no more."""
    if padding is None:
        return None
    if padding.size(-1) == keys.tokens:
        padding = keys.gather(padding, -1)
    if padding.dtype is torch.bool or padding.requires_grad:
        return padding
    hides = padding == -torch.inf  # torch's layers make an additive mask of a boolean one
    if bool((hides | (padding == 0)).all()):
        return hides
    return padding


def _inverted(mask: Tensor | None) -> Any:
    """Return a mask in the other meaning: nn.MultiheadAttention's True hides a key."""
    if mask is not None and mask.dtype is torch.bool:
        return ~mask
    return mask
