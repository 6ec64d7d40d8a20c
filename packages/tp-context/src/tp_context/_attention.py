"""Attention of this rank's queries to whole sequences: for models by hand, and for those of transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import StepError

from tp_context._algorithms import attend
from tp_context._attention_inputs import Inputs, Masking, Rules, misfit
from tp_context._kernels import plain_attention
from tp_context._slices import Cut
from tp_context._split_state import split_states


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of ``query`` to the keys of whole sequences.

    In a step that the backend ``context`` runs, the tensors have this rank's slices. Elsewhere it is
    ``torch.nn.functional.scaled_dot_product_attention``, with the same arguments.

    Args:
        query: (..., heads, tokens, features).
        key: (..., heads, tokens, features).
        value: (..., heads, tokens, features).
        attn_mask: The mask, boolean or additive: (..., 1 or tokens of this rank or all, all keys). A mask
            with one row may have this rank's keys alone.
        dropout_p: The probability to drop an attention weight: the same ones for any number of ranks.
        is_causal: Whether queries see earlier positions of the whole sequence only.
        scale: The factor of the products.
        enable_gqa: Whether several query heads share one of keys and values.

    Raises:
        StepError: The mask has another shape, for example one that was made for this rank's tokens alone; or
            the algorithm that the option ``attention`` names cannot do it; or tensors of other shapes, types
            or devices do not fit each other.

    Collectives: those of the algorithm: all-gathers of keys and values in forward, their sums in backward; or
    all-to-alls; or sends to the next rank.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 5, 4])
    """
    try:
        return _attention(query, key, value, Masking(attn_mask, dropout_p, is_causal), scale, enable_gqa)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        # Only now: a model calls it for each layer, and torch checks most of it, in words of its own.
        # A slice's queries have a mask of all keys, and an error there may be of the check that runs it.
        if isinstance(error, StepError) or split_states.current.cuts is not None:
            raise
        problem = misfit(query, key, value, Masking(attn_mask, dropout_p, is_causal), enable_gqa)
        if problem is None:
            raise
        raise StepError(problem) from error


def _attention(
    query: Tensor, key: Tensor, value: Tensor, masking: Masking, scale: float | None, enable_gqa: bool
) -> Tensor:
    attn_mask, dropout_p, is_causal = masking
    if key.size(-2) != value.size(-2):  # torch would take values of other tokens
        msg = misfit(query, key, value, masking, enable_gqa) or "key and value have other tokens"
        raise StepError(msg)
    cuts = split_states.current.cuts
    keys = split_states.slice_of(key.size(-2))
    if cuts is None or keys is None:
        with split_states.changed(is_inner=True):
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    rows = split_states.slice_of(query.size(-2))
    if rows is not None:
        attn_mask, is_causal = whole_mask(attn_mask, rows, keys, is_causal)
    if is_causal and rows is not keys:
        # As torch aligns queries and keys of different numbers.
        count = query.size(-2) if rows is None else rows.length
        attn_mask = torch.ones(count, keys.length, dtype=torch.bool, device=query.device).tril()
        if rows is not None:
            attn_mask = rows.take(attn_mask, 0)
        is_causal = False
    rules = Rules(rows, keys, is_causal, scale, enable_gqa, dropout_p)
    with split_states.changed(is_inner=True):
        return attend(Inputs(query, key, value, attn_mask), rules, cuts.attention)


def whole_mask(mask: Tensor | None, rows: Cut, keys: Cut, is_causal: bool) -> tuple[Tensor | None, bool]:
    """Return a mask of this rank's queries and all keys, and whether to mask later positions instead.

    Raises:
        StepError: The mask has another shape.
    """
    if mask is None:
        return None, is_causal
    if mask.dim() == 0:
        mask = mask.expand(1, 1)
    elif mask.dim() == 1:
        mask = mask[None]
    height, width = mask.shape[-2:]
    if width in {1, keys.length} and height in {1, rows.tokens}:
        return mask, is_causal
    if width in {1, keys.length} and height == rows.length:
        return rows.take(mask, -2), is_causal
    if height == 1 and width == keys.tokens:  # from this rank's slice of a mask of padding
        return keys.gather(mask, -1), is_causal
    if height == width == rows.tokens and rows is keys and _is_causal(mask):
        return None, True
    msg = (
        f"an attention mask has shape {tuple(mask.shape)}, and {rows.tokens} of {rows.length} queries are on "
        f"this rank, with {keys.length} keys: it was made for the slice alone. Use is_causal=True; or give "
        "the mask (..., tokens, tokens) in the batch, which splits its rows; or make it from "
        "tp_context.positions()"
    )
    raise StepError(msg)


def _is_causal(mask: Tensor) -> bool:
    """Return whether a square mask is the plain causal one, boolean or additive."""
    sees = mask if mask.dtype is torch.bool else mask == 0
    square = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is not torch.bool and not bool((mask[~sees] == -torch.inf).all()):
        return False
    return bool((sees == square).all())


# -- Attention in models of transformers -----------------------------------------------------------


NAME = "tp_context"


def register_with_transformers() -> None:
    """Register attention and masks under `NAME` with transformers' public interfaces."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _of_transformers)
    AttentionMaskInterface.register(NAME, _mask_of_transformers)


def _mask_of_transformers(**arguments: Any) -> Tensor | None:
    """Return the mask of this rank's queries and all keys, from transformers' function of two positions."""
    from transformers import masking_utils as masks

    cuts = split_states.current.cuts
    keys = split_states.slice_of(arguments["kv_length"])
    rows = split_states.slice_of(arguments["q_length"])
    if cuts is None or keys is None or rows is None:
        mask: Tensor | None = masks.sdpa_mask(**arguments)
        return mask
    function = arguments["mask_function"]
    padding = arguments.get("attention_mask")
    if padding is not None and padding.size(-1) == keys.tokens:
        padding = keys.gather(padding, -1)
    if padding is not None and bool(padding.all()):
        padding = None
    # Documents are looked for by transformers' causal masks alone.
    if "allow_is_bidirectional_skip" in arguments:
        packed = None
    else:
        packed = cuts.packed
    if packed is not None:
        function = masks.remap_positions_for_packed_sequence(function, packed[0])
        function = masks.and_masks(function, masks.packed_sequence_mask_function(packed[1]))
    elif padding is None and rows is keys and _needs_no_mask(arguments, keys, masks.causal_mask_function):
        return None
    if padding is not None:
        function = masks.and_masks(function, masks.padding_mask_function(padding))
    device = arguments["device"]
    batch = torch.arange(arguments["batch_size"], device=device)
    heads = torch.arange(1, device=device)
    at = rows.index(device)
    to = torch.arange(keys.length, device=device)
    if arguments.get("use_vmap", False):  # functions of the user may branch on a position
        for_keys = torch.vmap(function, in_dims=(None, None, None, 0))
        for_rows = torch.vmap(for_keys, in_dims=(None, None, 0, None))
        for_heads = torch.vmap(for_rows, in_dims=(None, 0, None, None))
        own: Tensor = torch.vmap(for_heads, in_dims=(0, None, None, None))(batch, heads, at, to)
        return own
    mask = function(
        batch[:, None, None, None], heads[None, :, None, None], at[None, None, :, None], to[None, None, None]
    )
    spread: Tensor = mask.expand(arguments["batch_size"], -1, rows.tokens, keys.length)
    return spread


def _needs_no_mask(arguments: dict[str, Any], keys: Cut, causal: Any) -> bool:
    """Return whether the mask is the causal one or shows everything, and may be left out."""
    window = arguments.get("local_size")
    if window is not None and window < keys.length:
        return False
    is_causal = arguments["mask_function"] is causal or window is not None
    if arguments.get("allow_is_causal_skip", True) and is_causal:
        return True
    return bool(arguments.get("allow_is_bidirectional_skip", False))


def _of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run attention for a model of transformers."""
    cuts = split_states.current.cuts
    keys = split_states.slice_of(key.size(2))
    rows = split_states.slice_of(query.size(2))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and rows is keys and query.size(2) == key.size(2)
    if others.get("output_attentions") and cuts is not None:
        msg = "attention weights (output_attentions=True) are not there on backend 'context'; leave them out"
        raise StepError(msg)
    if not split_states.current.drops:
        dropout = 0.0
    grouped = query.size(1) > key.size(1)
    if softcap is None and s_aux is None and position_bias is None:
        output = attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None
    if cuts is not None and keys is not None and rows is not None:
        attention_mask, _ = whole_mask(attention_mask, rows, keys, is_causal=False)
        if position_bias is not None:
            position_bias = _whole_bias(position_bias, keys)
    rules = Rules(rows, keys, causal, scaling, grouped, dropout, softcap, by_hand=True)
    inputs = Inputs(query, key, value, attention_mask, position_bias, s_aux)
    algorithm = "all-gather" if cuts is None else cuts.attention
    with split_states.changed(is_inner=True):
        mixed = attend(inputs, rules, algorithm)
    return mixed.transpose(1, 2).contiguous(), None


def _whole_bias(bias: Tensor, keys: Cut) -> Tensor:
    """Return a bias of scores that has a column for each key.

    Raises:
        StepError: It was made for the slice.
    """
    if bias.size(-1) != keys.tokens or keys.tokens == keys.length:
        return bias
    if bool(bias.any()):
        msg = (
            "a bias of attention was made from positions that begin at 0 on each rank; pass it with the "
            "columns of all keys"
        )
        raise StepError(msg)
    return bias.new_zeros((1, 1))
