"""Attention of this rank's queries to the keys of whole sequences, and the doors by which models reach it.

Each rank gathers keys and values of all ranks, and computes the rows of its own queries: so any mask is
exact.
Source: the all-gather of keys and values in Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from tp_core.errors import StepError

from tp_context._slices import Cut, active

# As they are before `doors` replaces them.
_plain_attention: Callable[..., Tensor] = F.scaled_dot_product_attention
_plain_dropout: Callable[..., Tensor] = F.dropout
_plain_multi_head: Callable[..., Any] = F.multi_head_attention_forward
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
        dropout_p: The probability to drop an attention weight. Each rank draws its own rows.
        is_causal: Whether queries see earlier positions of the whole sequence only.
        scale: The factor of the products.
        enable_gqa: Whether several query heads share one of keys and values.

    Raises:
        StepError: The mask has another shape, for example one that was made for this rank's tokens alone.

    Collectives: all-gathers of keys and values in forward, their sums in backward.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 5, 4])
    """
    cuts = active()
    cut = None if cuts is None else cuts.of_slice(key.size(-2))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    with _inside():
        if cuts is None or cut is None:
            return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        rows = cuts.of_slice(query.size(-2))
        if rows is not None:
            attn_mask, is_causal = _whole_mask(attn_mask, rows, cut, is_causal)
        is_learned = attn_mask is not None and attn_mask.requires_grad
        if not dropout_p and not is_learned and rows is not None and (rows is cut or not is_causal):
            mixed: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]  # torch's
                query, key, value, attn_mask, _Rows(cut, is_causal, options)
            )
            return mixed
        key, value = cut.gather(key, -2), cut.gather(value, -2)
        with rank_draws(cut, query.device, draws=dropout_p > 0):
            if is_causal and rows is cut:
                return _causal(query, key, value, cut, dropout_p, options)
            return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


_BLOCK = 256
"""Rows of queries with a mask at a time: a mask of all would need more memory than the split saves."""


class _Rows(NamedTuple):
    """How this rank's queries see the keys of whole sequences: their cut, and arguments of attention."""

    keys: Cut
    is_causal: bool
    options: dict[str, Any]

    def blocks(self, mask: Tensor | None, query: Tensor) -> Iterator[tuple[int, int, int, Any]]:
        """Yield the first and the last row of each block, the number of its keys, and its mask."""
        count, device = query.size(-2), query.device
        if not self.is_causal:
            step = count if mask is None or mask.size(-2) == 1 else _BLOCK
            for at in range(0, count, step):
                to = min(at + step, count)
                has_rows = mask is not None and mask.size(-2) > 1
                yield at, to, self.keys.length, mask[..., at:to, :] if mask is not None and has_rows else mask
            return
        at = 0
        for begin, end in self.keys.own:
            for first in range(begin, end, _BLOCK):
                last = min(first + _BLOCK, end)
                sees = torch.arange(first, last, device=device)[:, None] >= torch.arange(last, device=device)
                yield at, at + last - first, last, sees
                at += last - first


class _Attend(torch.autograd.Function):
    """Attention to whole sequences that keeps slices for the backward pass, and gathers them again there.

    Forward: all-gathers of keys and values. Backward: the same, then sums of their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: _Rows
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.rows = rows
        ctx.autocast = (
            torch.is_autocast_enabled(query.device.type),
            torch.get_autocast_dtype(query.device.type),
        )
        keys, values = rows.keys.all_gather(key, -2), rows.keys.all_gather(value, -2)
        outputs = [
            _plain_attention(query[..., a:b, :], keys[..., :n, :], values[..., :n, :], m, **rows.options)
            for a, b, n, m in rows.blocks(mask, query)
        ]
        return torch.cat(outputs, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        rows: _Rows = ctx.rows
        keys, values = rows.keys.all_gather(key, -2), rows.keys.all_gather(value, -2)
        sums, own = [torch.zeros_like(keys), torch.zeros_like(values)], torch.empty_like(query)
        enabled, dtype = ctx.autocast
        for a, b, n, m in rows.blocks(mask, query):
            inputs = [query[..., a:b, :], keys[..., :n, :], values[..., :n, :]]
            inputs = [t.detach().requires_grad_() for t in inputs]
            with (
                torch.enable_grad(),
                torch.autocast(query.device.type, dtype=dtype, enabled=enabled),
                _inside(),
            ):
                mixed = _plain_attention(*inputs, m, **rows.options)
            own[..., a:b, :], *others = torch.autograd.grad(mixed, inputs, grad[..., a:b, :])
            for total, other in zip(sums, others, strict=True):
                total[..., :n, :] += other
        return own, *(rows.keys.sum_and_take(total, -2 % total.dim()) for total in sums), None, None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, cut: Cut, dropout_p: float, options: dict[str, Any]
) -> Tensor:
    """Return causal attention: each chunk of queries sees the keys up to its end."""
    outputs, at = [], 0
    for begin, end in cut.own:
        if begin == end:
            continue
        rows = query.narrow(-2, at, end - begin)
        at += end - begin
        keys, values = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        mask = None
        if begin:
            ends = torch.arange(begin, end, device=query.device)[:, None]
            mask = ends >= torch.arange(end, device=query.device)
        outputs.append(_plain_attention(rows, keys, values, mask, dropout_p, mask is None, **options))
    return torch.cat(outputs, -2)


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
        "(..., tokens, tokens) in the batch, whose rows are split; or make it from tp_context.positions()"
    )
    raise StepError(msg)


def _is_causal(mask: Tensor) -> bool:
    """Return whether a square mask is the plain causal one, boolean or additive."""
    sees = mask if mask.dtype is torch.bool else mask == 0
    square = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is not torch.bool and not bool((mask[~sees] == -torch.inf).all()):
        return False
    return bool((sees == square).all())


# -- Random numbers ---------------------------------------------------------------------------------


@contextmanager
def rank_draws(cut: Cut, device: torch.device, *, draws: bool) -> Iterator[None]:
    """Draw other random numbers on each rank meanwhile, and leave the ranks' generators alike."""
    if not draws:
        yield
        return
    seed = int(torch.randint(2**62, ())) + cut.rank
    if device.type == "cpu":
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(state)
        return
    with torch.random.fork_rng([device.index], device_type=device.type):
        torch.get_device_module(device).manual_seed(seed)
        yield


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
    before, drops_before = {name: getattr(F, name) for name in ours}, _drops
    # The fused kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer calls no function of torch.
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _drops = drops and _drops
    try:
        for name, function in ours.items():
            setattr(F, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)
        torch.backends.mha.set_fastpath_enabled(is_fast)
        _drops = drops_before


@wraps(_plain_attention)
def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    function = _plain_attention if _depth else attention
    return function(query, key, value, attn_mask, dropout_p if _drops else 0.0, is_causal, **options)


@wraps(_plain_dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    cuts = active()
    if not _drops:
        return input
    if cuts is None or _depth or inplace or not training or not 0 < p < 1:
        return _plain_dropout(input, p, training, inplace)
    for dim in (1, *range(2, input.dim()), 0):
        cut = cuts.of_slice(input.size(dim)) if dim < input.dim() else None
        if cut is not None:
            # What one device would drop: the mask is drawn for whole sequences, and cut.
            shape = [*input.shape]
            shape[dim] = cut.length
            return input * cut.take(_plain_dropout(input.new_ones(shape), p), dim)
    return _plain_dropout(input, p)


@wraps(_plain_multi_head)
def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """Run the attention of ``nn.MultiheadAttention`` with the whole inputs of keys and values.

    Inputs are gathered and not the projected keys: so torch's own function does all the rest, weights
    included.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    given, cuts = bound.arguments, active()
    given["dropout_p"] = given["dropout_p"] if _drops else 0.0
    with _inside():
        keys = None if cuts is None else cuts.of_slice(given["key"].size(0))
        if cuts is None or keys is None:
            return _plain_multi_head(*bound.args, **bound.kwargs)
        rows = cuts.of_slice(given["query"].size(0))
        is_same = given["key"] is given["value"]
        given["key"] = keys.gather(given["key"], 0)
        given["value"] = given["key"] if is_same else keys.gather(given["value"], 0)
        padding = given["key_padding_mask"]
        if padding is not None and padding.size(-1) == keys.tokens:
            given["key_padding_mask"] = keys.gather(padding, -1)
        if given["attn_mask"] is not None and rows is not None:
            mask, is_causal = _whole_mask(_inverted(given["attn_mask"]), rows, keys, is_causal=False)
            if is_causal:
                at = rows.index(given["query"].device)[:, None]
                mask = at >= torch.arange(keys.length, device=at.device)
            given["attn_mask"], given["is_causal"] = _inverted(mask), False
        with rank_draws(keys, given["query"].device, draws=given["training"] and given["dropout_p"] > 0):
            return _plain_multi_head(*bound.args, **bound.kwargs)


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
    shared = query.size(1) // key.size(1)
    if softcap is None and s_aux is None and position_bias is None:
        output = attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=shared > 1
        )
        return output.transpose(1, 2).contiguous(), None
    extra = _Extra(position_bias, softcap, s_aux)
    return _by_hand(query, key, value, attention_mask, dropout, scaling, causal, extra), None


class _Extra:
    """What torch's attention does not do: a bias by position, a soft cap of scores, and sinks of heads."""

    def __init__(self, bias: Tensor | None, softcap: float | None, sinks: Tensor | None) -> None:
        self.bias, self.softcap, self.sinks = bias, softcap, sinks


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    extra: _Extra,
) -> Tensor:
    """Return attention with scores in memory, as transformers wants it: (batch, tokens, heads, features)."""
    cuts = active()
    keys = None if cuts is None else cuts.of_slice(key.size(2))
    rows = None if cuts is None else cuts.of_slice(query.size(2))
    if keys is not None:
        key, value = keys.gather(key, 2), keys.gather(value, 2)
    if keys is not None and rows is not None:
        mask, _ = _whole_mask(mask, rows, keys, is_causal=False)
    shared = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    if extra.bias is not None:
        bias = extra.bias
        if keys is not None and rows is not None and bias.size(-1) == keys.tokens:
            if bool(bias.any()):
                msg = (
                    "a bias of attention was made from positions that begin at 0 on each rank; pass it "
                    "with the "
                    "columns of all keys"
                )
                raise StepError(msg)
            bias = bias.new_zeros(())
        scores = scores + bias
    if causal:
        at = torch.arange(query.size(2), device=query.device) if rows is None else rows.index(query.device)
        mask = at[:, None] >= torch.arange(key.size(2), device=query.device)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype is torch.bool else scores + mask
    if extra.sinks is not None:
        sinks = extra.sinks.reshape(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(2), -1)
        scores = torch.cat([scores, sinks], -1)
    # In float32 where transformers' own functions are, so that the numbers are theirs.
    exact = scores.dtype if extra.bias is not None else torch.float32
    weights = scores.softmax(-1, dtype=exact).to(query.dtype)[..., : key.size(2)]
    if dropout and _drops:
        if keys is None:
            weights = _plain_dropout(weights, dropout)
        else:
            with rank_draws(keys, query.device, draws=True):
                weights = _plain_dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()
