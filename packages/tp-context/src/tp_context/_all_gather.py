"""Attention by gathered keys: each rank computes the rows of its own queries. Any mask is exact.

Source: Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tp_context._attention_inputs import Inputs, Rules
from tp_context._dropout_mask import DropoutMask
from tp_context._fused_kernels import Kernel, kernel_for
from tp_context._kernels import Sums, mix, partial_attention, partial_attention_backward, sum_dtype
from tp_context._score_blocks import ScoreBlock, fused_blocks, score_blocks


class AllGatherAttention(torch.autograd.Function):
    """Attention by gathered keys, which keeps slices for the backward pass, and gathers them again there.

    Forward: all-gathers of keys and values. Backward: the same, then sums of their gradients. None of them if
    all keys are here.
    Ranks hold: sharded -> sharded; gradient: sharded -> sharded.
    """

    @staticmethod
    def forward(ctx: Any, rules: Rules, noise: DropoutMask | None, *tensors: Tensor | None) -> Tensor:
        ctx.rules, ctx.noise = rules, noise
        sliced = Inputs(*tensors)  # type: ignore[arg-type]  # autograd has no names
        inputs = _whole(sliced, rules)
        ctx.kernel = kernel_for(sliced, rules)
        if ctx.kernel is None:
            ctx.save_for_backward(*tensors)
            drawn = None if noise is None else noise.draw()
            return _mixed_rows(inputs, rules, drawn)
        sums = Sums(inputs)
        for block in fused_blocks(inputs, rules):
            sums.add(block, *partial_attention(ctx.kernel, block.of(inputs), block, rules))
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
            return None, None, *twice(grad, sliced, rules, noise, needs)
        whole = _whole(sliced, rules)
        if ctx.kernel is not None:
            total = results[1].nan_to_num(neginf=0.0)  # of rows that see nothing: their scores are all -inf
            own = _fused_backward(ctx.kernel, grad, whole, rules, (results[0], total))
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


def _fused_backward(
    kernel: Kernel, grad: Tensor, inputs: Inputs, rules: Rules, results: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of a kernel, from its output and log-sum-exps."""
    blocks = fused_blocks(inputs, rules)
    first = next(blocks)
    counts = inputs.query.size(2), inputs.key.size(2)
    if (first.first, first.last, first.begin, first.end) == (0, counts[0], 0, counts[1]):
        # No other follows: its gradients are all.
        own = partial_attention_backward(kernel, grad, first.of(inputs), results, first, rules)
        return [*own, None, None, None]
    exact = sum_dtype(inputs.query)
    places = [torch.zeros_like(t, dtype=exact, memory_format=torch.contiguous_format) for t in inputs[:3]]
    add_gradients(kernel, grad, inputs, rules, results, chain([first], blocks), places)
    return [*(t.to(inputs.query.dtype) for t in places), None, None, None]


def add_gradients(
    kernel: Kernel | None,
    grad: Tensor,
    inputs: Inputs,
    rules: Rules,
    results: Sequence[Tensor],
    blocks: Iterable[ScoreBlock],
    places: Sequence[Tensor],
) -> None:
    """Add the gradients of some blocks to those of queries, keys and values."""
    out, total = results
    of_queries, *of_keys = places
    for block in blocks:
        rows, keys = slice(block.first, block.last), slice(block.begin, block.end)
        parts = [t[:, :, rows] for t in (out, total)]
        own = block.of(inputs)
        grads = partial_attention_backward(kernel, grad[:, :, rows], own, parts, block, rules)
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
    for block in score_blocks(inputs, rules):
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
            mixed = mix(block_inputs, rules, block_noise)
        grads = torch.autograd.grad(mixed, wanted, grad[..., block.first : block.last, :])
        totals = _places(Inputs(*sums), block)  # type: ignore[arg-type]  # those that are needed
        for total, other in zip(totals, grads, strict=True):
            total.add_(other)
    return sums


def _places(sums: Inputs, block: ScoreBlock) -> list[Tensor]:
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


def twice(
    grad: Tensor, inputs: Inputs, rules: Rules, noise: DropoutMask | None, needs: Sequence[bool]
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


def _mixed_rows(inputs: Inputs, rules: Rules, noise: Tensor | None) -> Tensor:
    outputs = []
    for block in score_blocks(inputs, rules):
        block_noise = None if noise is None else block.part(noise)
        outputs.append(mix(block.of(inputs), rules, block_noise))
    return _joined_rows(outputs)


def _joined_rows(blocks: Sequence[Tensor]) -> Tensor:
    """Return rows of all blocks, in the layout of torch's function: models flatten heads without a copy."""
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat([block.transpose(1, 2) for block in blocks], 1).transpose(1, 2)
