"""Attention by a ring: keys and values pass from rank to rank; no rank ever has whole keys.

Each block is attended to as it comes, and results are joined by their log-sum-exps. Sources: Liu et al.,
"Ring Attention with Blockwise Transformers", 2023; balanced as Brandon et al., "Striped Attention", 2023, and
zig-zag rings are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_context._all_gather import add_gradients, twice
from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._fused_kernels import Kernel, kernel_for
from tp_context._kernels import Sums, partial_attention, sum_dtype
from tp_context._score_blocks import ScoreBlock, ring_blocks, tiles
from tp_context._slices import Cut, resized, views


class RingAttention(torch.autograd.Function):
    """Attention to one rank's keys after another's.

    Forward: keys and values go around, each step to the next rank. Backward: they go around again, and their
    gradients with them, to end where they began.
    Ranks hold: sharded -> sharded; gradient: sharded -> sharded.
    """

    @staticmethod
    def forward(ctx: Any, rules: Rules, cuts: QueryKeyCuts, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]  # autograd has no names
        kernel = kernel_for(inputs, rules)
        sums = Sums(inputs)
        for source, (key, value) in _rounds([inputs.key, inputs.value], cuts.keys):
            here = inputs._replace(key=key, value=value)
            for block in _blocks(kernel, inputs, rules, cuts, source):
                sums.add(block, *partial_attention(kernel, block.of(here), block, rules))
        out, total = sums.results()
        ctx.save_for_backward(*tensors, out, total)
        ctx.rules, ctx.cuts, ctx.kernel = rules, cuts, kernel
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rules, cuts, needs = ctx.rules, ctx.cuts, ctx.needs_input_grad[2:]
        *tensors, out, total = ctx.saved_tensors
        inputs = Inputs(*tensors)
        if torch.is_grad_enabled():
            return None, None, *twice(grad, inputs, rules, None, needs)
        exact = sum_dtype(inputs.query)
        total = total.nan_to_num(neginf=0.0)  # of rows that see nothing: their scores are all -inf
        own = torch.zeros_like(inputs.query, dtype=exact)
        sums = [torch.zeros_like(t, dtype=exact) for t in (inputs.key, inputs.value)]
        for source, (key, value, *places) in _rounds([inputs.key, inputs.value], cuts.keys, sums):
            here = inputs._replace(key=key, value=value)
            blocks = _blocks(ctx.kernel, inputs, rules, cuts, source)
            add_gradients(ctx.kernel, grad, here, rules, (out, total), blocks, (own, *places))
        ends = [t.to(inputs.query.dtype) for t in (own, *sums)]
        return None, None, *ends, None, None, None


def _blocks(
    kernel: Kernel | None, inputs: Inputs, rules: Rules, cuts: QueryKeyCuts, source: int
) -> Iterator[ScoreBlock]:
    """Return blocks for a kernel; without one, of few rows."""
    blocks = ring_blocks(inputs.mask, cuts, source, is_causal=rules.is_causal)
    if kernel is None:
        return tiles(blocks, inputs.query.device)
    return blocks


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
    """Send a tensor to the next rank, and receive the one before's. It arrives after the waits.

    Ranks hold: varying -> varying.
    """
    following = (cut.rank + 1) % cut.size
    before = (cut.rank - 1) % cut.size
    if cut.group is not None:
        following, before = (dist.get_global_rank(cut.group, r) for r in (following, before))
    received = torch.empty_like(tensor)
    sending = dist.P2POp(dist.isend, tensor, following, cut.group)
    receiving = dist.P2POp(dist.irecv, received, before, cut.group)
    return received, dist.batch_isend_irecv([sending, receiving])
