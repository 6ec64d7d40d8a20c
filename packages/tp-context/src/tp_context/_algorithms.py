"""Three context-parallel attention algorithms: all-gather, Ulysses, ring; and what each of them costs.

all-gather
    Each rank gathers keys and values of all ranks, and computes the rows of its own queries. Any mask is
    exact. Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
ulysses
    Two all-to-alls change slices of the sequence for some of the heads, and back. Source: Jacobs et al.,
    "DeepSpeed Ulysses", 2023.
ring
    Keys and values pass from rank to rank. Each block is attended to as it comes, and results are joined by
    their log-sum-exps; no rank ever has whole keys. Sources: Liu et al., "Ring Attention with Blockwise
    Transformers", 2023; balanced as Brandon et al., "Striped Attention", 2023, and zig-zag rings are.

All save only this rank's slices for the backward pass. The second backward pass always uses all-gathers.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakIdKeyDictionary
from tp_core.errors import StepError
from tp_core.random import device_rng_state, preserve_torch_rng_state, set_device_rng_state

from tp_context._slices import Cut, resized, views

_log = logging.getLogger("tp_context")

# As it is before `_patches.patched` replaces it.
plain_attention = F.scaled_dot_product_attention

_BLOCK = 256
"""Rows of queries with a mask at a time: a mask of all would need more memory than the split saves."""


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


def attend(inputs: Inputs, rules: Rules, algorithm: str) -> Tensor:
    """Return the attention of this rank's queries to the keys of whole sequences: as `Inputs.query`.

    Raises:
        StepError: The algorithm cannot do it.

    Collectives: those of the algorithm, in forward and in backward.
    """
    device = inputs.query.device
    shape = inputs.query.shape
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        cast = [t.to(dtype) if t is not None and _is_cast(t) else t for t in inputs[:5]]
        inputs = Inputs(*cast, inputs.sinks)  # type: ignore[arg-type,call-arg]  # the same are None
    inputs = _with_batch(inputs)
    cuts = None
    if rules.rows is not None and rules.keys is not None:
        cuts = QueryKeyCuts(rules.rows, rules.keys)
    if cuts is None:
        algorithm = "all-gather"  # each rank has all queries
    elif algorithm == "auto":
        algorithm = _choose(inputs, rules, cuts.keys)
    problem = ""
    if cuts is not None:
        problem = refusal(algorithm, inputs, rules, cuts.keys.size)
    if problem:
        msg = (
            f"attention={algorithm!r} of backend 'context' cannot do this attention: {problem}; choose "
            "'all-gather'"
        )
        raise StepError(msg)
    with torch.autocast(device.type, enabled=False):
        if cuts is not None and algorithm == "ulysses":
            mixed = _ulysses(inputs, rules, cuts)
        elif cuts is not None and algorithm == "ring":
            mixed = _Ring.apply(rules, cuts, *inputs)  # type: ignore[no-untyped-call]  # torch's
        else:
            noise = _Noise(inputs, rules) if rules.dropout else None
            mixed = _Gathered.apply(rules, noise, *inputs)  # type: ignore[no-untyped-call]  # torch's
    return mixed.reshape(*shape[:-1], mixed.size(-1))


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _with_batch(inputs: Inputs) -> Inputs:
    """Return inputs of (batch, heads, tokens, features); masks may have fewer dimensions, which come last."""
    query, key, value, mask, bias, sinks = inputs
    lead = query.shape[:-3]
    if query.dim() < 3:
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
    if len(lead) > 1:
        mask = _flat_batch(mask, lead)
        bias = _flat_batch(bias, lead)
    query, key, value = (
        t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in (query, key, value)
    )
    return Inputs(query, key, value, mask, bias, sinks)


def _flat_batch(table: Tensor | None, lead: torch.Size) -> Tensor | None:
    """Return a mask or bias with one dimension for several of the batch, if it has them."""
    if table is None or table.dim() < 4:
        return table
    return table.expand(*lead, *table.shape[-3:]).flatten(0, -4)


def refusal(algorithm: str, inputs: Inputs, rules: Rules, ranks: int) -> str:
    """Return why an algorithm cannot do an attention; nothing if it can."""
    query, _, _, mask, bias, sinks = inputs
    if algorithm == "ulysses" and query.size(1) < ranks:
        return f"it splits the heads, and there are {query.size(1)} for {ranks} ranks"
    if algorithm == "ring":
        if rules.dropout:
            return "dropout of attention weights is not in it"
        if bias is not None or sinks is not None or rules.softcap is not None:
            return "biases by position, sinks and soft caps of scores are not in it"
        if mask is not None and mask.dtype is not torch.bool:
            return "it takes boolean masks, and this one is additive"
    return ""


# -- One block of rows ------------------------------------------------------------------------------


def _mix(inputs: Inputs, rules: Rules, noise: Tensor | None, *, is_causal: bool) -> Tensor:
    """Return the attention of some rows to keys that are all here."""
    query, key, value, mask, bias, sinks = inputs
    if not rules.by_hand and noise is None:
        options: dict[str, Any] = {"scale": rules.scale, "enable_gqa": rules.grouped}
        return plain_attention(query, key, value, mask, 0.0, is_causal, **options)
    if rules.grouped:
        shared = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    scores = query @ key.transpose(-1, -2) * _scale_of(query, rules)
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if bias is not None:
        scores = scores + bias
    hidden = None
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min if rules.by_hand else -torch.inf
        scores = scores.masked_fill(~mask, lowest) if mask.dtype is torch.bool else scores + mask
        if not rules.by_hand:  # a query that sees nothing is zero in torch's function, and not NaN
            hidden = (scores == -torch.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(hidden, 0.0)
    if sinks is not None:
        column = sinks.reshape(-1, 1, 1).expand(*scores.shape[:-3], -1, scores.size(-2), 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    # In float32 where transformers' own functions are, so that the numbers are theirs.
    exact = torch.float32 if rules.by_hand and bias is None else scores.dtype
    weights = scores.softmax(-1, dtype=exact).to(query.dtype)[..., : key.size(-2)]
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    if noise is not None:
        weights = weights * (noise.to(weights.dtype) / (1 - rules.dropout))
    return weights @ value


def _scale_of(query: Tensor, rules: Rules) -> float:
    return query.size(-1) ** -0.5 if rules.scale is None else rules.scale


class _Noise:
    """Dropout mask: every rank draws that of whole sequences and takes its part, so it matches one device.

    It is drawn again for the backward pass, so that it need not be saved.
    """

    def __init__(self, inputs: Inputs, rules: Rules, heads: tuple[slice, int] | None = None) -> None:
        queries = inputs.query.size(-2) if rules.rows is None else rules.rows.length
        keys = inputs.key.size(-2) if rules.keys is None else rules.keys.length
        self.rows = rules.rows
        self.heads = heads
        self.keeps = 1 - rules.dropout
        self.device = inputs.query.device
        self.shape = [*inputs.query.shape[:-2], queries, keys]
        self.state: Tensor | None = None

    def draw(self) -> Tensor:
        """Return the noise of this rank's rows or heads; the first time it moves the generator on."""
        if self.state is None:
            self.state = device_rng_state(self.device)
            return self._drawn()
        with preserve_torch_rng_state([self.device]):
            set_device_rng_state(self.device, self.state)
            return self._drawn()

    def _drawn(self) -> Tensor:
        noise = torch.empty(self.shape, dtype=torch.bool, device=self.device).bernoulli_(self.keeps)
        if self.heads is not None:
            mine, each = self.heads
            return _padded(noise[:, mine], 1, each)
        if self.rows is not None:
            return self.rows.take(noise, -2)
        return noise


class _ScoreBlock(NamedTuple):
    """Rows ``first`` to ``last`` of the queries, keys ``begin`` to ``end``, and which see which.

    ``sees`` may be an additive mask. If ``is_causal``, rows and keys are the same ones.
    """

    first: int
    last: int
    begin: int
    end: int
    sees: Tensor | None
    is_causal: bool = False

    def of(self, inputs: Inputs) -> Inputs:
        """Return the inputs of this block."""
        query, key, value, _, bias, sinks = inputs
        query = query[..., self.first : self.last, :]
        key = key[..., self.begin : self.end, :]
        value = value[..., self.begin : self.end, :]
        if bias is not None:
            bias = self.part(bias)
        return Inputs(query, key, value, self.sees, bias, sinks)

    def part(self, table: Tensor) -> Tensor:
        """Return a view of what a table of queries and keys has for this block."""
        if table.size(-2) > 1:
            table = table[..., self.first : self.last, :]
        return table[..., self.begin : self.end] if table.size(-1) > 1 else table


def _blocks(inputs: Inputs, rules: Rules) -> Iterator[_ScoreBlock]:
    """Return blocks of rows that do all the work; each has the keys alone that one of its rows sees."""
    mask = inputs.mask
    # Scores in memory are of few rows at a time, whatever the mask.
    in_memory = rules.by_hand or rules.dropout > 0
    if rules.is_causal:
        return _causal_blocks(inputs, rules, in_memory=in_memory)
    if mask is not None and mask.dim() > 1 and mask.size(-2) > 1:
        return _masked_blocks(inputs, mask, rules)
    return _plain_blocks(inputs, in_memory=in_memory)


def _causal_blocks(inputs: Inputs, rules: Rules, *, in_memory: bool) -> Iterator[_ScoreBlock]:
    """Yield rows that see the keys up to their own: those at the beginning of the sequence as one block."""
    device = inputs.query.device
    ranges = [(0, inputs.query.size(-2))] if rules.rows is None else rules.rows.own
    at = 0
    for begin, end in ranges:
        if begin == 0 and end and not in_memory:
            yield _ScoreBlock(0, end, 0, end, None, is_causal=True)
            at = end
            continue
        for first in range(begin, end, _BLOCK):
            last = min(first + _BLOCK, end)
            sees = torch.arange(first, last, device=device)[:, None] >= torch.arange(last, device=device)
            yield _ScoreBlock(at, at + last - first, 0, last, sees)
            at += last - first


def _masked_blocks(inputs: Inputs, mask: Tensor, rules: Rules) -> Iterator[_ScoreBlock]:
    """Yield neighbors in the sequence, with the keys from the first to the last that one of them sees."""
    count, length = inputs.query.size(-2), inputs.key.size(-2)
    for first, last in _steps(rules.rows, count, _BLOCK):
        begin, end = 0, length
        if mask.size(-1) > 1:
            begin, end = _seen_keys(mask[..., first:last, :])
        block = _ScoreBlock(first, last, begin, end, None)
        yield block._replace(sees=block.part(mask))


def _plain_blocks(inputs: Inputs, *, in_memory: bool) -> Iterator[_ScoreBlock]:
    """Yield rows that see the same keys: all, or those that a mask of one row shows."""
    count, length = inputs.query.size(-2), inputs.key.size(-2)
    step = _BLOCK if in_memory else max(count, 1)
    for first, last in _steps(None, count, step):
        block = _ScoreBlock(first, last, 0, length, None)
        if inputs.mask is not None:
            block = block._replace(sees=block.part(inputs.mask))
        yield block


def _steps(rows: Cut | None, count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of each block, which are neighbors in the sequence."""
    at = 0
    lengths = [count] if rows is None else [last - first for first, last in rows.own]
    for length in lengths:
        for first in range(at, at + length, step):
            yield first, min(first + step, at + length)
        at += length


def _seen_keys(mask: Tensor) -> tuple[int, int]:
    """Return the range of keys that rows see.

    If a row is fully masked, it is the range of all keys: the softmax over them may be uniform.
    """
    sees = mask
    if mask.dtype is not torch.bool:
        sees = mask.detach() > torch.finfo(mask.dtype).min / 2
    sees = sees.reshape(-1, sees.size(-1))
    if not bool(sees.any(-1).all()):
        return 0, sees.size(-1)
    seen = sees.any(0).nonzero()
    return int(seen[0]), int(seen[-1]) + 1


def _mixed_rows(inputs: Inputs, rules: Rules, noise: Tensor | None) -> Tensor:
    outputs = []
    for block in _blocks(inputs, rules):
        block_noise = None if noise is None else block.part(noise)
        outputs.append(_mix(block.of(inputs), rules, block_noise, is_causal=block.is_causal))
    return _joined_rows(outputs)


def _joined_rows(blocks: Sequence[Tensor]) -> Tensor:
    """Return rows of all blocks, in the layout of torch's function: models flatten heads without a copy."""
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat([block.transpose(1, 2) for block in blocks], 1).transpose(1, 2)


# -- All-gather -------------------------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Attention by gathered keys, which keeps slices for the backward pass, and gathers them again there.

    Forward: all-gathers of keys and values. Backward: the same, then sums of their gradients. None of them if
    all keys are here.
    """

    @staticmethod
    def forward(ctx: Any, rules: Rules, noise: _Noise | None, *tensors: Tensor | None) -> Tensor:
        ctx.rules, ctx.noise = rules, noise
        sliced = Inputs(*tensors)  # type: ignore[arg-type]  # autograd has no names
        inputs = _whole(sliced, rules)
        learned = sliced.mask is not None and sliced.mask.requires_grad
        ctx.fused = (
            not rules.by_hand and noise is None and not learned and _is_fused(inputs.query, inputs.value)
        )
        if not ctx.fused:
            ctx.save_for_backward(*tensors)
            drawn = None if noise is None else noise.draw()
            return _mixed_rows(inputs, rules, drawn)
        sums = _Sums(inputs)
        for block in _fused_blocks(inputs, rules):
            sums.add(block, *_partial(block.of(inputs), block, rules))
        out, total = sums.results()
        ctx.save_for_backward(*tensors, out, total)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rules, noise, needs = ctx.rules, ctx.noise, ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # once: checkpointing lets them be unpacked no second time
        sliced = Inputs(*saved[:6])
        results = saved[6:]
        if torch.is_grad_enabled():
            return None, None, *_twice(grad, sliced, rules, noise, needs)
        whole = _whole(sliced, rules)
        if ctx.fused:
            total = results[1].nan_to_num(neginf=0.0)  # of rows that see nothing: their scores are all -inf
            own = _fused_backward(grad, whole, rules, (results[0], total))
        else:
            drawn = None if noise is None else noise.draw()
            with torch.autocast(grad.device.type, enabled=False):
                own = _again(grad, whole, rules, drawn, needs)
            del drawn
        del whole  # before the sums need memory
        of_keys = [i for i in (1, 2) if own[i] is not None]  # keys and values
        if rules.keys is not None and of_keys:
            totals = [cast("Tensor", own[i]) for i in of_keys]
            for i in of_keys:
                own[i] = None
            for i, total in zip(of_keys, rules.keys.sum_and_take(totals, 2), strict=True):
                own[i] = total
        return None, None, *own


def _fused_blocks(inputs: Inputs, rules: Rules) -> Iterator[_ScoreBlock]:
    """Yield blocks for torch's kernel; rows in several of them have the sum. A causal mask costs nothing."""
    if not rules.is_causal:
        yield from _blocks(inputs, rules)
        return
    ranges = [(0, inputs.query.size(-2))] if rules.rows is None else rules.rows.own
    at = 0
    for begin, end in ranges:
        rows = at, at + end - begin
        if 0 < begin < end:
            yield _ScoreBlock(*rows, 0, begin, None)
        if begin < end:
            yield _ScoreBlock(*rows, begin, end, None, is_causal=True)
        at = rows[1]


class _Sums:
    """Attention to some keys after others, joined by the log-sum-exps of scores."""

    def __init__(self, inputs: Inputs) -> None:
        query, exact = inputs.query, _sum_dtype(inputs.query)
        batch, heads, count = query.shape[:3]
        # In the layout of torch's function: models flatten heads without a copy.
        shape = (batch, count, heads, inputs.value.size(-1))
        self.dtype = query.dtype
        self.out = query.new_zeros(shape, dtype=exact).transpose(1, 2)
        self.total = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)

    def add(self, block: _ScoreBlock, part: Tensor, sums: Tensor) -> None:
        """Add the attention of the rows of a block to its keys, with their log-sum-exps."""
        rows = slice(block.first, block.last)
        out, before = self.out[:, :, rows], self.total[:, :, rows]
        joined = torch.logaddexp(before, sums.to(before.dtype))
        # Where nothing is seen yet, -inf less -inf.
        first, second = ((t - joined).exp().nan_to_num(0.0)[..., None] for t in (before, sums))
        out.mul_(first).addcmul_(part.to(out.dtype), second)
        before.copy_(joined)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the output in the dtype of queries, and the log-sum-exps."""
        return self.out.to(self.dtype), self.total


def _fused_backward(
    grad: Tensor, inputs: Inputs, rules: Rules, results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of torch's kernel, from its output and log-sum-exps."""
    exact = _sum_dtype(inputs.query)
    own, *sums = (torch.zeros_like(t, dtype=exact, memory_format=torch.contiguous_format) for t in inputs[:3])
    _add_gradients(grad, inputs, rules, results, _fused_blocks(inputs, rules), (own, *sums))
    return [*(t.to(inputs.query.dtype) for t in (own, *sums)), None, None, None]


def _add_gradients(
    grad: Tensor,
    inputs: Inputs,
    rules: Rules,
    results: Sequence[Tensor],
    blocks: Iterable[_ScoreBlock],
    places: Sequence[Tensor],
) -> None:
    """Add the gradients of some blocks to those of queries, keys and values."""
    out, total = results
    of_queries, *of_keys = places
    for block in blocks:
        rows, keys = slice(block.first, block.last), slice(block.begin, block.end)
        parts = (t[:, :, rows] for t in (out, total))
        grads = _partial_backward(grad[:, :, rows], block.of(inputs), tuple(parts), block, rules)
        of_queries[:, :, rows] += grads[0]
        for place, other in zip(of_keys, grads[1:], strict=True):
            place[:, :, keys] += other


def _again(
    grad: Tensor, inputs: Inputs, rules: Rules, noise: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients from attention that is computed again, block by block."""
    sums = [
        torch.zeros_like(t) if t is not None and needed else None
        for t, needed in zip(inputs, needs, strict=True)
    ]
    for block in _blocks(inputs, rules):
        leaves: list[Tensor | None] = []
        wanted: list[Tensor] = []
        for tensor, total in zip(block.of(inputs), sums, strict=True):
            leaf = tensor
            if leaf is not None and total is not None:
                leaf = leaf.detach().requires_grad_()
                wanted.append(leaf)
            leaves.append(leaf)
        block_inputs = Inputs(*leaves)  # type: ignore[arg-type]  # the same are None
        block_noise = None if noise is None else block.part(noise)
        with torch.enable_grad():
            mixed = _mix(block_inputs, rules, block_noise, is_causal=block.is_causal)
        grads = torch.autograd.grad(mixed, wanted, grad[..., block.first : block.last, :])
        totals = _places(Inputs(*sums), block)  # type: ignore[arg-type]  # those that are needed
        for total, other in zip(totals, grads, strict=True):
            total.add_(other)
    return sums


def _places(sums: Inputs, block: _ScoreBlock) -> list[Tensor]:
    """Return views of the sums to which a block adds."""
    query, *keys_and_values = sums[:3]
    places: list[Tensor] = []
    if query is not None:
        places.append(query[..., block.first : block.last, :])
    places += [t[..., block.begin : block.end, :] for t in keys_and_values if t is not None]
    places += [block.part(t) for t in (sums.mask, sums.bias) if t is not None]
    if sums.sinks is not None:
        places.append(sums.sinks)
    return places


def _whole(inputs: Inputs, rules: Rules) -> Inputs:
    keys = rules.keys
    if keys is None:
        return inputs
    key, value = keys.all_gather_together([inputs.key, inputs.value], -2)
    return inputs._replace(key=key, value=value)


def _twice(
    grad: Tensor, inputs: Inputs, rules: Rules, noise: _Noise | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Compute gradients with ``create_graph=True``, by the all-gathers of any algorithm.

    Collectives: all-gathers of keys and values, and their sums; in the next backward sums, then all-gathers.
    """
    keys = rules.keys
    whole = inputs
    if keys is not None:
        whole = inputs._replace(key=keys.gather(inputs.key, -2), value=keys.gather(inputs.value, -2))
    drawn = None if noise is None else noise.draw()
    # torch's other kernels cannot be differentiated twice.
    with torch.autocast(grad.device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        mixed = _mixed_rows(whole, rules, drawn)
        wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed and t is not None]
        grads = iter(torch.autograd.grad(mixed, wanted, grad, create_graph=True))
    return [next(grads) if needed else None for needed in needs]


# -- Ulysses ----------------------------------------------------------------------------------------


def _ulysses(inputs: Inputs, rules: Rules, cuts: QueryKeyCuts) -> Tensor:
    """Attend with some heads to whole sequences, which are all here."""
    query, key, value, mask, bias, sinks = inputs
    rows, keys = cuts
    heads = query.size(-3)
    grouped = rules.grouped
    if grouped and key.size(-3) % keys.size:  # a group may lie on two ranks
        grouped = False
        shared = heads // key.size(-3)
        key = key.repeat_interleave(shared, -3)
        value = value.repeat_interleave(shared, -3)
    each = -(-heads // keys.size)
    mine = slice(min(keys.rank * each, heads), min((keys.rank + 1) * each, heads))
    noise = _Noise(inputs, rules, (mine, each)) if rules.dropout else None
    if rows is keys:
        query, key, value = _ToHeads.apply(keys, query, key, value)  # type: ignore[no-untyped-call]  # torch's
    else:
        (query,) = _ToHeads.apply(rows, query)  # type: ignore[no-untyped-call]  # as above
        key, value = _ToHeads.apply(keys, key, value)  # type: ignore[no-untyped-call]  # as above
    if mask is not None:
        mask = _rows_of_heads(mask, rows, mine, each)
    if bias is not None:
        bias = _rows_of_heads(bias, rows, mine, each)
    if sinks is not None:
        sinks = _padded(sinks[mine], 0, each)
    own = Inputs(query, key, value, mask, bias, sinks)
    here = rules._replace(rows=None, keys=None, grouped=grouped)
    mixed = _Gathered.apply(here, noise, *own)  # type: ignore[no-untyped-call]
    (back,) = _ToTokens.apply(rows, (heads,), mixed)  # type: ignore[no-untyped-call]
    return cast("Tensor", back)


_rows_of_masks: Any = WeakIdKeyDictionary()
"""All rows of a mask, by the mask of this rank's rows: layers share one."""


def _rows_of_heads(table: Tensor, rows: Cut, mine: slice, each: int) -> Tensor:
    """Return all rows of a mask or bias for this rank's heads.

    Collective: an all-to-all where heads differ, an all-gather where they do not.
    """
    has_heads = table.dim() > 2 and table.size(-3) > 1
    if table.size(-2) == 1:
        if not has_heads:
            return table
        return _padded(table[..., mine, :, :], -3, each)
    if has_heads:
        (moved,) = _ToHeads.apply(rows, table)  # type: ignore[no-untyped-call]
        return cast("Tensor", moved)
    if table.requires_grad:
        return rows.gather(table, -2)
    if table not in _rows_of_masks:
        _rows_of_masks[table] = rows.all_gather(table, -2)
    whole: Tensor = _rows_of_masks[table]
    return whole


def _padded(tensor: Tensor, dim: int, count: int) -> Tensor:
    missing = count - tensor.size(dim)
    if not missing:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _to_heads(tensors: Sequence[Tensor], cut: Cut) -> list[Tensor]:
    """Return whole sequences of some heads, from slices of all. Collective: an all-to-all.

    Heads that do not divide are padded with zeros at the end: all ranks have as many.
    """
    cut.announce(("to heads", [[*t.shape[:-2], *t.shape[-1:]] for t in tensors], str(tensors[0].dtype)))
    shapes = [resized(t.shape, -3, -(-t.size(-3) // cut.size)) for t in tensors]
    count = sum(shape.numel() for shape in shapes)
    dtype = tensors[0].dtype
    sent_dtype = torch.uint8 if dtype is torch.bool else dtype  # gloo has no bool
    sent = tensors[0].new_zeros((cut.size, count), dtype=sent_dtype)
    for rank, flat in enumerate(sent):
        for tensor, place in zip(tensors, views(flat, shapes), strict=True):
            heads = _heads_of(tensor, rank, place.size(-3)).detach()
            place[..., : heads.size(-3), :, :].copy_(heads)
    counts = [count // cut.tokens * n for n in cut.counts]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent.view(-1), counts, [count] * cut.size, group=cut.group)
    del sent
    return [whole.to(dtype) for whole in cut.joined(received.split(counts), shapes, -2)]


def _to_tokens(wholes: Sequence[Tensor], cut: Cut, heads: Sequence[int]) -> list[Tensor]:
    """Return slices of all heads, from whole sequences of some. Collective: an all-to-all."""
    cut.announce(("to tokens", [[*t.shape[:-2], *t.shape[-1:]] for t in wholes], str(wholes[0].dtype)))
    shapes = [resized(w.shape, -2, cut.tokens) for w in wholes]
    count = sum(shape.numel() for shape in shapes)
    sent = cut.divided(wholes, -2)
    received = sent.new_empty((cut.size, count))
    counts = [count // cut.tokens * n for n in cut.counts]
    dist.all_to_all_single(received.view(-1), sent, [count] * cut.size, counts, group=cut.group)
    del sent
    slices = [received.new_empty(resized(s, -3, n)) for s, n in zip(shapes, heads, strict=True)]
    for rank, flat in enumerate(received):
        for tensor, part in zip(slices, views(flat, shapes), strict=True):
            place = _heads_of(tensor, rank, part.size(-3))
            place.copy_(part[..., : place.size(-3), :, :])
    return slices


def _heads_of(tensor: Tensor, rank: int, each: int) -> Tensor:
    """Return a view of the heads of a rank, of which there may be fewer than ``each``, or none."""
    return tensor[..., rank * each : (rank + 1) * each, :, :]


class _ToHeads(torch.autograd.Function):
    """Forward: the all-to-all to heads. Backward: the one to tokens."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cut, ctx.heads = cut, [t.size(-3) for t in tensors]
        return tuple(_to_heads(tensors, cut))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_ToTokens.apply(ctx.cut, ctx.heads, *grads)  # type: ignore[no-untyped-call]  # torch's


class _ToTokens(torch.autograd.Function):
    """Forward: the all-to-all to tokens. Backward: the one to heads."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, heads: Sequence[int], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.cut = cut
        return tuple(_to_tokens(wholes, cut, heads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_ToHeads.apply(ctx.cut, *grads)  # type: ignore[no-untyped-call]  # torch's


# -- Ring -------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Attention to one rank's keys after another's.

    Forward: keys and values go around, each step to the next rank. Backward: they go around again, and their
    gradients with them, to end where they began.
    """

    @staticmethod
    def forward(ctx: Any, rules: Rules, cuts: QueryKeyCuts, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]  # autograd has no names
        sums = _Sums(inputs)
        for source, (key, value) in _rounds([inputs.key, inputs.value], cuts.keys):
            here = inputs._replace(key=key, value=value)
            for block in _ring_blocks(inputs.mask, cuts, source, is_causal=rules.is_causal):
                sums.add(block, *_partial(block.of(here), block, rules))
        out, total = sums.results()
        ctx.save_for_backward(*tensors, out, total)
        ctx.rules, ctx.cuts = rules, cuts
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rules, cuts, needs = ctx.rules, ctx.cuts, ctx.needs_input_grad[2:]
        *tensors, out, total = ctx.saved_tensors
        inputs = Inputs(*tensors)
        if torch.is_grad_enabled():
            return None, None, *_twice(grad, inputs, rules, None, needs)
        exact = _sum_dtype(inputs.query)
        total = total.nan_to_num(neginf=0.0)  # of rows that see nothing: their scores are all -inf
        own = torch.zeros_like(inputs.query, dtype=exact)
        sums = [torch.zeros_like(t, dtype=exact) for t in (inputs.key, inputs.value)]
        for source, (key, value, *places) in _rounds([inputs.key, inputs.value], cuts.keys, sums):
            here = inputs._replace(key=key, value=value)
            blocks = _ring_blocks(inputs.mask, cuts, source, is_causal=rules.is_causal)
            _add_gradients(grad, here, rules, (out, total), blocks, (own, *places))
        ends = [t.to(inputs.query.dtype) for t in (own, *sums)]
        return None, None, *ends, None, None, None


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _rounds(
    sent: list[Tensor], cut: Cut, sums: list[Tensor] | None = None
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each rank's tensors in turn, this rank's first, while the next are on the way.

    ``sums``, to which the caller adds in each round, travel with the tensors; they end here with this rank's.
    """
    most = max(cut.counts)
    shapes = [resized(t.shape, -2, most) for t in sent]
    here = _packed(sent, shapes)
    totals = None if sums is None else _packed(sums, shapes)
    for step in range(cut.size):
        source = (cut.rank - step) % cut.size
        cut.announce(("ring", step, [list(t.shape[:-2]) for t in sent]))
        coming = here
        waits: list[Any] = []
        if step < cut.size - 1:
            coming, waits = _pass_on(here, cut)
        tensors = views(here, shapes)
        if totals is not None:
            tensors += views(totals, shapes)
        yield source, tensors
        for wait in waits:
            wait.wait()
        if totals is not None:
            totals, waits = _pass_on(totals, cut)
            for wait in waits:
                wait.wait()
        here = coming
    if sums is not None and totals is not None:
        for own, total in zip(sums, views(totals, shapes), strict=True):
            own.copy_(total[..., : own.size(-2), :])


def _packed(tensors: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Tensor:
    """Return a flat tensor with parts of some shapes, which begin with these tensors."""
    flat = tensors[0].new_zeros(sum(shape.numel() for shape in shapes))
    for tensor, place in zip(tensors, views(flat, shapes), strict=True):
        place[..., : tensor.size(-2), :].copy_(tensor)
    return flat


def _pass_on(tensor: Tensor, cut: Cut) -> tuple[Tensor, list[Any]]:
    """Send a tensor to the next rank, and receive the one before's. It arrives after the waits."""
    following = (cut.rank + 1) % cut.size
    before = (cut.rank - 1) % cut.size
    if cut.group is not None:
        following, before = (dist.get_global_rank(cut.group, r) for r in (following, before))
    received = torch.empty_like(tensor)
    sending = dist.P2POp(dist.isend, tensor, following, cut.group)
    receiving = dist.P2POp(dist.irecv, received, before, cut.group)
    return received, dist.batch_isend_irecv([sending, receiving])


def _ring_blocks(
    mask: Tensor | None, cuts: QueryKeyCuts, source: int, *, is_causal: bool = False
) -> Iterator[_ScoreBlock]:
    """Yield what this rank's queries see of a rank's keys; what they do not is skipped."""
    rows, keys = cuts
    if mask is None and not is_causal:
        yield _ScoreBlock(0, rows.tokens, 0, keys.counts[source], None)
        return
    if mask is not None:
        columns = mask
        if mask.size(-1) > 1:
            columns = keys.take(mask, -1, source)
        for first, last in _steps(rows, rows.tokens, _BLOCK):
            sees = _ScoreBlock(first, last, 0, keys.counts[source], None).part(columns)
            seen = sees.reshape(-1, sees.size(-1)).any(0).nonzero()
            if not len(seen):
                continue
            begin, end = 0, keys.counts[source]
            if sees.size(-1) > 1:
                begin, end = int(seen[0]), int(seen[-1]) + 1
            sees = sees[..., begin:end]
            yield _ScoreBlock(first, last, begin, end, None if bool(sees.all()) else sees)
        return
    at = 0
    for begin, end in rows.own:
        to = 0
        for left, right in keys.ranges[source]:  # the same or apart, as each belongs to one rank
            if left <= begin < end and left < right:
                yield _ScoreBlock(at, at + end - begin, to, to + right - left, None, is_causal=left == begin)
            to += right - left
        at += end - begin


# -- torch's kernel, and the same by hand -----------------------------------------------------------


def _is_fused(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel takes these."""
    return query.device.type == "cpu" and query.size(-1) == value.size(-1)


def _added(block: _ScoreBlock, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the additive mask of a block, of four dimensions."""
    sees = block.sees
    if sees is None:
        return None
    if sees.dtype is torch.bool:
        sees = torch.where(sees, torch.zeros((), dtype=query.dtype, device=query.device), -torch.inf)
    sees = sees[(None,) * (4 - sees.dim())]
    return sees.expand(-1, -1, query.size(2), key.size(2))


def _partial(inputs: Inputs, block: _ScoreBlock, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return attention to some of the keys, and the log-sum-exp of scores: -inf where nothing is seen."""
    query, key, value = inputs[:3]
    added = _added(block, query, key)
    if _is_fused(query, value):
        # Private in torch 2.13, and the only one to return log-sum-exps: a test notices if it goes.
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.is_causal, attn_mask=added, scale=rules.scale
        )
        if added is not None:  # the kernel says 0 of a row that sees nothing
            sums = sums.masked_fill((added == -torch.inf).all(-1), -torch.inf)
        return out, sums
    scores, _ = _scores(query, key, block, rules)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.nan_to_num(neginf=0.0)[..., None]).exp()
    return weights @ _spread(value, query).to(weights.dtype), sums


def _partial_backward(
    grad: Tensor, inputs: Inputs, results: Sequence[Tensor], block: _ScoreBlock, rules: Rules
) -> tuple[Tensor, ...]:
    """Return what some of the keys add to gradients, with the output and log-sum-exp of all keys."""
    query, key, value = inputs[:3]
    out, sums = results
    if _is_fused(query, value):
        grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, block.is_causal,
            attn_mask=_added(block, query, key), scale=rules.scale,
        )  # fmt: skip
        return grads
    scores, scale = _scores(query, key, block, rules)
    weights = (scores - sums[..., None]).exp()
    exact = weights.dtype
    grad, out = grad.to(exact), out.to(exact)
    slopes = grad @ _spread(value, query).to(exact).mT - (grad * out).sum(-1, keepdim=True)
    slopes = weights * slopes * scale
    of_keys, of_values = slopes.mT @ query.to(exact), weights.mT @ grad
    shared = query.size(1) // key.size(1)
    of_keys, of_values = (t.unflatten(1, (-1, shared)).sum(2) for t in (of_keys, of_values))
    return slopes @ _spread(key, query).to(exact), of_keys, of_values


def _scores(query: Tensor, key: Tensor, block: _ScoreBlock, rules: Rules) -> tuple[Tensor, float]:
    scale = _scale_of(query, rules)
    scores = (query @ _spread(key, query).mT).to(_sum_dtype(query)) * scale
    if block.is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~square, -torch.inf)
    if block.sees is not None:
        scores = scores.masked_fill(~block.sees, -torch.inf)
    return scores, scale


def _spread(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values for each head of the queries."""
    return tensor.repeat_interleave(query.size(1) // tensor.size(1), 1)


# -- Costs ------------------------------------------------------------------------------------------


class _Rates(NamedTuple):
    """What a machine of a kind does in a second, roughly: algorithms are compared, and not timed.

    Measured rates would choose differently in two runs, and their last digits would then differ.
    """

    operations: float
    nbytes: float
    latency_s: float


_RATES = {"cpu": _Rates(3e10, 1.5e9, 6e-4), "cuda": _Rates(3e14, 1e11, 3e-5)}


class Size(NamedTuple):
    """The size of an attention: heads are the queries', and ``itemsize`` the bytes of a number."""

    samples: int
    heads: int
    key_heads: int
    features: int
    tokens: int
    ranks: int
    itemsize: int = 4


def costs(size: Size, *, seen: float = 0.5, device: str = "cpu") -> dict[str, float]:
    """Return the seconds that forward and backward take by each algorithm, roughly.

    Args:
        size: The size of the attention.
        seen: The part of all pairs of a query and a key that are computed: half of them under a causal mask.
        device: The type of the device.
    """
    rates = _RATES.get(device, _RATES["cuda"])
    pairs = size.samples * size.heads * size.tokens**2 * seen / size.ranks
    # Two products of as many multiplications and additions in forward, 2.5 times as much in backward.
    work = 3.5 * 4 * pairs * size.features / rates.operations
    others = (size.ranks - 1) / size.ranks
    token = size.samples * size.features * size.itemsize * size.tokens * others / rates.nbytes
    both = 2 * size.key_heads * token  # the keys and values of all other ranks
    # They are gathered in forward and in backward, and their gradients change places once.
    gathered = 3 * both + 3 * rates.latency_s
    key_heads = size.key_heads
    if key_heads % size.ranks:
        key_heads = size.heads  # which are repeated, as a group may lie on two ranks
    changed = 2 * (2 * size.heads + 2 * key_heads) * token / size.ranks + 4 * rates.latency_s
    padded = -(-size.heads // size.ranks) * size.ranks / size.heads
    # Twice around with all but the last step, and gradients with all steps.
    passed = (2 + 1 / others) * both + (3 * size.ranks - 2) * rates.latency_s
    return {"all-gather": work + gathered, "ulysses": work * padded + changed, "ring": work + passed}


_chosen: set[tuple[str, Size]] = set()
"""What is in the log already."""


def _choose(inputs: Inputs, rules: Rules, keys: Cut) -> str:
    """Return the cheapest algorithm that can do an attention, the same on all ranks."""
    query, key = inputs.query, inputs.key
    size = Size(
        query.size(0),
        query.size(1),
        key.size(1),
        query.size(-1),
        keys.length,
        keys.size,
        query.element_size(),
    )
    seen = 0.5 if rules.is_causal else 1.0
    seconds = {
        algorithm: cost
        for algorithm, cost in costs(size, seen=seen, device=query.device.type).items()
        if not refusal(algorithm, inputs, rules, keys.size)
    }
    cheapest = min(seconds, key=seconds.__getitem__)
    if (cheapest, size) not in _chosen and keys.before is None:
        _chosen.add((cheapest, size))
        ordered = sorted(seconds.items(), key=lambda pair: pair[1])
        listed = ", ".join(f"{algorithm} {1e3 * cost:.2g} ms" for algorithm, cost in ordered)
        _log.info(
            "attention over %d tokens on %d ranks by %s (%s)", size.tokens, size.ranks, cheapest, listed
        )
    return cheapest
