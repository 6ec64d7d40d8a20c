"""The doors by which models reach attention to whole sequences: torch's, transformers', and our own."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from tp_core.errors import StepError

from tp_context._slices import Cut, active
from tp_context._ways import Inputs, Rules, attend, plain_attention

# As they are before `doors` replaces them.
_plain_dropout = F.dropout
_plain_multi_head = F.multi_head_attention_forward
_MULTI_HEAD = inspect.signature(_plain_multi_head)


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
            the way that the option ``attention`` names cannot do it.

    Collectives: those of the way: all-gathers of keys and values in forward, their sums in backward; or
    all-to-alls; or sends to the next rank.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 5, 4])
    """
    cuts = active()
    keys = None if cuts is None else cuts.of_slice(key.size(-2))
    if cuts is None or keys is None:
        with _inside():
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    rows = cuts.of_slice(query.size(-2))
    if rows is not None:
        attn_mask, is_causal = _whole_mask(attn_mask, rows, keys, is_causal)
    if is_causal and rows is not keys:  # as torch aligns queries and keys of different numbers
        count = query.size(-2) if rows is None else rows.length
        attn_mask = torch.ones(count, keys.length, dtype=torch.bool, device=query.device).tril()
        attn_mask, is_causal = attn_mask if rows is None else rows.take(attn_mask, 0), False
    rules = Rules(rows, keys, is_causal, scale, enable_gqa, dropout_p)
    with _inside():
        return attend(Inputs(query, key, value, attn_mask), rules, cuts.attention)


def _whole_mask(mask: Tensor | None, rows: Cut, keys: Cut, is_causal: bool) -> tuple[Tensor | None, bool]:
    """Return a mask of this rank's queries and all keys, and whether to mask later positions instead.

    Raises:
        StepError: The mask has another shape.
    """
    if mask is None:
        return None, is_causal
    if mask.dim() < 2:
        mask = mask.expand(1, *mask.shape) if mask.dim() else mask.expand(1, 1)
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
        f"an attention mask has shape {tuple(mask.shape)}, and {rows.tokens} of {rows.length} queries are "
        "on this "
        f"rank, with {keys.length} keys: it was made for the slice alone. Use is_causal=True; or give the "
        "mask "
        "(..., tokens, tokens) in the batch, which splits its rows; or make it from tp_context.positions()"
    )
    raise StepError(msg)


def _is_causal(mask: Tensor) -> bool:
    """Return whether a square mask is the plain causal one, boolean or additive."""
    sees = mask if mask.dtype is torch.bool else mask == 0
    square = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is not torch.bool and not bool((mask[~sees] == -torch.inf).all()):
        return False
    return bool((sees == square).all())


# -- The door of torch's functions ------------------------------------------------------------------


_depth = 0
"""How many calls of these doors are on the way: what they call themselves passes."""

_drops = True
"""Whether dropout drops: not in a check, as a slice draws other numbers than the whole."""


@contextmanager
def _inside() -> Iterator[None]:
    global _depth  # noqa: PLW0603 - as `_active` of _slices
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def doors(*, drops: bool = True) -> Iterator[None]:
    """Lead attention and dropout of torch to whole sequences meanwhile, wherever a model calls them.

    The functions are replaced. A TorchFunctionMode would be off in the forwards that activation checkpointing
    repeats within a backward pass.

    Args:
        drops: Whether dropout drops.
    """
    global _drops  # noqa: PLW0603 - as `_active` of _slices
    ours: dict[str, Any] = {
        "dropout": _dropout,
        "multi_head_attention_forward": _multi_head,
        "scaled_dot_product_attention": _scaled_dot_product_attention,
    }
    patches: list[tuple[Any, str, Any]] = [(F, name, function) for name, function in ours.items()]
    flex = sys.modules.get(_FLEX)  # importing it would load torch's compiler
    if flex is not None and not hasattr(flex.flex_attention, "__wrapped__"):
        patches.append(
            (flex, "flex_attention", wraps(flex.flex_attention)(partial(_flex, flex.flex_attention)))
        )
    before, drops_before = [(place, name, getattr(place, name)) for place, name, _ in patches], _drops
    # The fused kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer calls no function of torch.
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _drops = drops and _drops
    try:
        for patch in patches:
            setattr(*patch)
        yield
    finally:
        for patch in before:
            setattr(*patch)
        torch.backends.mha.set_fastpath_enabled(is_fast)
        _drops = drops_before


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
    function = plain_attention if _depth else attention
    if _outer_call is not None and not _depth:
        attn_mask, is_causal = _outer_call.joined(query), _outer_call.is_causal
    return function(query, key, value, attn_mask, dropout_p if _drops else 0.0, is_causal, **options)


_FLEX = "torch.nn.attention.flex_attention"

_block_masks: Any = WeakIdKeyDictionary()
"""The block mask of a cut's queries and all keys, by the mask that was given: layers share one."""


def _flex(
    plain: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    **options: Any,
) -> Any:
    """Run torch's ``flex_attention`` with gathered keys, and functions of positions in the whole sequence."""
    cuts = active()
    keys, rows = (None if cuts is None else cuts.of_slice(t.size(-2)) for t in (key, query))
    if keys is None:
        return plain(query, key, value, score_mod, block_mask, **options)
    if rows is not None:
        at, of_score, sees = rows.index(query.device), score_mod, getattr(block_mask, "mask_mod", None)

        # torch counts the parameters of both.
        def score(value: Tensor, batch: Tensor, head: Tensor, row: Tensor, to: Tensor) -> Tensor:
            return cast("Tensor", of_score(value, batch, head, at[row], to))  # type: ignore[misc]

        def visible(batch: Tensor, head: Tensor, row: Tensor, to: Tensor) -> Tensor:
            return cast("Tensor", sees(batch, head, at[row], to))  # type: ignore[misc]

        score_mod = None if of_score is None else score
        if block_mask is not None:
            made = _block_masks.setdefault(block_mask, {})
            if rows not in made:
                shape = (*block_mask.shape[:2], rows.tokens, keys.length)
                made[rows] = sys.modules[_FLEX].create_block_mask(visible, *shape, device=query.device)
            block_mask = made[rows]
    with _inside():
        return plain(query, keys.gather(key, -2), keys.gather(value, -2), score_mod, block_mask, **options)


@wraps(_plain_dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    cuts = active()
    if not _drops:
        return input
    rows = None if _outer_call is None else _outer_call.rows
    if cuts is None or (_depth and rows is None) or inplace or not training or not 0 < p < 1:
        return _plain_dropout(input, p, training, inplace)
    for dim in (1, *range(2, input.dim()), 0):
        cut = cuts.of_slice(input.size(dim)) if dim < input.dim() else None
        if cut is not None:
            # What one device drops: drawn for whole sequences, in the order of memory, and cut.
            order = sorted(range(input.dim()), key=input.stride, reverse=True)
            ones = input.new_ones([cut.length if d == dim else input.size(d) for d in order])
            ones = ones.permute([order.index(d) for d in range(input.dim())])
            return input * cut.take(_plain_dropout(ones, p), dim)
    return _plain_dropout(input, p)


@wraps(_plain_multi_head)
def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """Run the attention of ``nn.MultiheadAttention``; its inner call comes back to these doors.

    Where it returns weights or adds a key, the inputs of keys and values are gathered: torch's own function
    does all the rest.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    given, cuts = bound.arguments, active()
    keys = None if cuts is None else cuts.of_slice(given["key"].size(0))
    if cuts is None or keys is None:
        return _plain_multi_head(*bound.args, **bound.kwargs)
    rows, padding = cuts.of_slice(given["query"].size(0)), given["key_padding_mask"]
    if padding is not None and padding.size(-1) == keys.tokens:
        padding = keys.gather(padding, -1)
    if padding is not None and padding.dtype is not torch.bool and not padding.requires_grad:
        hides = padding == -torch.inf  # torch's layers make an additive mask of a boolean one
        padding = hides if bool((hides | (padding == 0)).all()) else padding
    mask, is_causal = _inverted(given["attn_mask"]), False
    if mask is not None and rows is not None:
        mask, is_causal = _whole_mask(mask, rows, keys, is_causal=False)
        if is_causal and rows is not None and (padding is not None or given["need_weights"]):
            at = rows.index(given["query"].device)[:, None]
            mask, is_causal = at >= torch.arange(keys.length, device=at.device), False
    adds = given["bias_k"] is not None or given["add_zero_attn"] or given["static_k"] is not None
    with _outer(_Outer(rows, mask, _inverted(padding), is_causal)):
        if not given["need_weights"] and not adds:
            given |= {"attn_mask": None, "key_padding_mask": None, "is_causal": False}
            return _plain_multi_head(*bound.args, **bound.kwargs)
        is_same, needs_weights = given["key"] is given["value"], given["need_weights"]
        given["key"] = keys.gather(given["key"], 0)
        given["value"] = given["key"] if is_same else keys.gather(given["value"], 0)
        if is_causal and rows is not None:
            at = rows.index(given["query"].device)[:, None]
            mask = at >= torch.arange(keys.length, device=at.device)
        given |= {"attn_mask": _inverted(mask), "key_padding_mask": padding, "is_causal": False}
        given["need_weights"] = True
        with _inside():
            mixed, weights = _plain_multi_head(*bound.args, **bound.kwargs)
        return mixed, weights if needs_weights else None


class _Outer(NamedTuple):
    """What a call of ``nn.MultiheadAttention`` leaves to its inner call: masks, in torch's other meaning."""

    rows: Cut | None
    mask: Tensor | None
    padding: Tensor | None
    is_causal: bool

    def joined(self, query: Tensor) -> Tensor | None:
        """Return one mask of both, for queries (batch, heads, tokens, features)."""
        mask, padding = self.mask, self.padding
        if mask is not None and mask.dim() == 3:
            mask = mask.view(*query.shape[:2], *mask.shape[1:])
        if padding is not None:
            padding = padding.view(-1, 1, 1, padding.size(-1))
        if mask is None or padding is None:
            return padding if mask is None else mask
        if mask.dtype is torch.bool and padding.dtype is torch.bool:
            return mask & padding
        return sum(_additive(t, query.dtype) for t in (mask, padding))  # type: ignore[return-value]  # two


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


_outer_call: _Outer | None = None


@contextmanager
def _outer(call: _Outer | None) -> Iterator[None]:
    global _outer_call  # noqa: PLW0603 - as `_active` of _slices
    before, _outer_call = _outer_call, call
    try:
        yield
    finally:
        _outer_call = before


def _inverted(mask: Tensor | None) -> Any:
    """Return a mask in the other meaning: nn.MultiheadAttention's True hides a key."""
    return ~mask if mask is not None and mask.dtype is torch.bool else mask


# -- The door of transformers -----------------------------------------------------------------------


NAME = "tp_context"


def register_with_transformers() -> None:
    """Register attention and masks under `NAME` with transformers' public interfaces."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _of_transformers)
    AttentionMaskInterface.register(NAME, _mask_of_transformers)


def _mask_of_transformers(**given: Any) -> Tensor | None:
    """Return the mask of this rank's queries and all keys, from transformers' function of two positions."""
    from transformers import masking_utils as masks

    cuts = active()
    keys, rows = (None if cuts is None else cuts.of_slice(given[n]) for n in ("kv_length", "q_length"))
    if cuts is None or keys is None or rows is None:
        mask: Tensor | None = masks.sdpa_mask(**given)
        return mask
    device, function = given["device"], given["mask_function"]
    padding = given.get("attention_mask")
    if padding is not None and padding.size(-1) == keys.tokens:
        padding = keys.gather(padding, -1)
    if padding is not None and bool(padding.all()):
        padding = None
    # Documents are looked for by transformers' causal masks alone.
    packed = None if "allow_is_bidirectional_skip" in given else cuts.packed
    if packed is not None:
        function = masks.remap_positions_for_packed_sequence(function, packed[0])
        function = masks.and_masks(function, masks.packed_sequence_mask_function(packed[1]))
    elif padding is None and rows is keys:
        window = given.get("local_size")
        is_whole = window is None or window >= keys.length
        if (
            given.get("allow_is_causal_skip", True)
            and is_whole
            and _is_plain(given, masks.causal_mask_function)
        ):
            return None
        if given.get("allow_is_bidirectional_skip", False) and is_whole:
            return None
    if padding is not None:
        function = masks.and_masks(function, masks.padding_mask_function(padding))
    batch, heads = torch.arange(given["batch_size"], device=device), torch.arange(1, device=device)
    at, to = rows.index(device), torch.arange(keys.length, device=device)
    if given.get("use_vmap", False):  # functions of the user may branch on a position
        for_keys = torch.vmap(function, in_dims=(None, None, None, 0))
        for_rows = torch.vmap(for_keys, in_dims=(None, None, 0, None))
        for_heads = torch.vmap(for_rows, in_dims=(None, 0, None, None))
        own: Tensor = torch.vmap(for_heads, in_dims=(0, None, None, None))(batch, heads, at, to)
        return own
    mask = function(
        batch[:, None, None, None], heads[None, :, None, None], at[None, None, :, None], to[None, None, None]
    )
    spread: Tensor = mask.expand(given["batch_size"], -1, rows.tokens, keys.length)
    return spread


def _is_plain(given: dict[str, Any], causal: Any) -> bool:
    """Return whether the mask is the causal one, or the one of a window that holds everything."""
    return given["mask_function"] is causal or given.get("local_size") is not None


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
    cuts = active()
    keys, rows = (None if cuts is None else cuts.of_slice(t.size(2)) for t in (key, query))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and rows is keys and query.size(2) == key.size(2)
    if others.get("output_attentions") and cuts is not None:
        msg = "attention weights (output_attentions=True) are not there on backend 'context'; leave them out"
        raise StepError(msg)
    dropout, grouped = dropout if _drops else 0.0, query.size(1) > key.size(1)
    if softcap is None and s_aux is None and position_bias is None:
        output = attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None
    if cuts is not None and keys is not None and rows is not None:
        attention_mask, _ = _whole_mask(attention_mask, rows, keys, is_causal=False)
        position_bias = None if position_bias is None else _whole_bias(position_bias, keys)
    rules = Rules(rows, keys, causal, scaling, grouped, dropout, softcap, by_hand=True)
    inputs = Inputs(query, key, value, attention_mask, position_bias, s_aux)
    with _inside():
        mixed = attend(inputs, rules, "all-gather" if cuts is None else cuts.attention)
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
