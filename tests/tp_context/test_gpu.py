"""Attention over slices on accelerators: fused kernels, one CPU's numbers, memory linear in the tokens."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from tp_context import attention

# private, all: without a model and its check
from tp_context._algorithms import attend
from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._patches import patched
from tp_context._score_blocks import ROWS, ring_blocks, score_blocks
from tp_testing import run_ranks

from tests.accelerator import GPU, group_of_two, needs_two, on_a_card
from tests.tp_context.cuts import activate, cuts_of

pytestmark = pytest.mark.gpu

ALGORITHMS = ("all-gather", "ulysses", "ring")
FEATURES = 8


def noting_operators():
    """Return a mode that notes the operators of attention, and those that would have its scores in memory."""

    class Operators(TorchDispatchMode):  # in here: a mode that was used cannot be sent to ranks
        def __init__(self):
            super().__init__()
            self.fused, self.others = set(), set()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = operator.name().removeprefix("aten::")
            if "scaled_dot_product" in name:
                self.fused.add(name)
            elif any(part in name for part in ("bmm", "softmax", "logsumexp")):
                self.others.add(name)
            return operator(*args, **(kwargs or {}))

    return Operators()


def documents(tokens):
    at = torch.arange(tokens)
    mask = (at[:, None] // 5 == at // 5) & (at[:, None] >= at)
    mask[3] = False  # a query that sees nothing
    return mask


def padding(tokens):
    return (torch.arange(tokens) < tokens - 2)[None, None, None].expand(2, 1, 1, -1)


def slopes(tokens):
    at = torch.arange(tokens)
    return -(at[:, None] - at).abs() / 7


# The mask, whether causal, and the heads of keys.
CASES = {
    "bidirectional": (None, False, 4),
    "causal": (None, True, 4),
    "grouped": (None, True, 2),
    "documents": (documents, False, 2),
    "padding": (padding, False, 4),
    "slopes": (slopes, False, 4),
}


def made(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case_of(name, dtype, tokens):
    """Return queries, keys and values, a mask, whether causal, and what one CPU computes in float64."""
    make_mask, is_causal, shared = CASES[name]
    tensors = [made(2, heads, tokens, FEATURES, seed=heads) for heads in (4, shared, shared)]
    tensors = [t.to(dtype) for t in tensors]
    mask = None if make_mask is None else make_mask(tokens)
    whole = [t.double().requires_grad_() for t in tensors]
    exact = mask.double() if mask is not None and mask.is_floating_point() else mask
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*whole, exact, is_causal=is_causal, enable_gqa=shared < 4)
    grads = torch.autograd.grad(out, whole, torch.ones_like(out))
    return tensors, mask, is_causal, [out.detach(), *grads]


def by_slices(tensors, mask, is_causal, cut, device):
    """Return the output and gradients of this rank's slices."""
    parts = [cut.take(t, -2).to(device).requires_grad_() for t in tensors]
    if mask is not None:
        mask = mask if mask.size(-2) == 1 else cut.take(mask, -2)
        mask = mask.to(device, parts[0].dtype if mask.is_floating_point() else None)
    grouped = parts[0].size(1) > parts[1].size(1)
    found = attention(*parts, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    return [found.detach(), *torch.autograd.grad(found, parts, torch.ones_like(found))]


def worst_differences(device, dtype):
    """Return the largest difference from one CPU, beside the largest number, of each case; and what ran."""
    tokens, found = 37, {}
    for name in CASES:
        tensors, mask, is_causal, expected = case_of(name, dtype, tokens)
        for algorithm in ALGORITHMS:
            if (algorithm, name) == ("ring", "slopes"):
                continue  # which is refused
            cuts = cuts_of(tokens, rank=dist.get_rank(), size=2, algorithm=algorithm)
            cut = cuts.of_whole(tokens)
            with activate(cuts), patched():
                by_slices(tensors, mask, is_causal, cut, device)  # a kernel of others is tried out once
                with noting_operators() as operators:
                    results = by_slices(tensors, mask, is_causal, cut, device)
            worst = max(
                float((own.cpu().double() - cut.take(right, -2)).abs().max() / right.abs().max())
                for own, right in zip(results, expected, strict=True)
            )
            found[algorithm, name] = worst, sorted(operators.fused), sorted(operators.others)
    return found


def peaks(device, lengths):
    """Return the device's peak of forward and backward beside the inputs, of each algorithm and length."""
    found = {}
    for algorithm in ALGORITHMS:
        for tokens in lengths:
            cuts = cuts_of(tokens, rank=dist.get_rank(), size=2, algorithm=algorithm)
            count = cuts.of_whole(tokens).tokens
            parts = [torch.randn(1, 2, count, FEATURES, device=device, requires_grad=True) for _ in range(3)]
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            with activate(cuts), patched():
                attention(*parts, is_causal=True).sum().backward()
            torch.accelerator.synchronize()
            found[algorithm, tokens] = torch.accelerator.max_memory_allocated() - before
    return found


def on_each_rank(check, process_group, devices, *arguments):
    device = torch.device(devices[int(os.environ["RANK"])])
    torch.accelerator.set_device_index(device)
    dist.init_process_group(process_group)
    try:
        return check(device, *arguments)
    finally:
        dist.destroy_process_group()


def rows_of_both(tensors, mask, is_causal, device):
    """Return the output and gradients of the rows of two ranks, with all keys on one device."""
    whole = [t.to(device).requires_grad_() for t in tensors]
    tokens, dtype = whole[0].size(-2), whole[0].dtype
    if mask is not None:
        mask = mask.to(device, dtype if mask.is_floating_point() else None)
    out = torch.empty(whole[0].shape, dtype=dtype, device=device)
    for rank in range(2):
        rows = cuts_of(tokens, rank=rank, size=2).of_whole(tokens)
        own = mask if mask is None or mask.size(-2) == 1 else rows.take(mask, -2)
        rules = Rules(rows, None, is_causal, grouped=whole[0].size(1) > whole[1].size(1))
        part = attend(Inputs(rows.take(whole[0], -2), *whole[1:], own), rules, "all-gather")
        part.backward(torch.ones_like(part))
        out[..., rows.index(device), :] = part.detach()
    return [out, *(t.grad for t in whole)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_two_ranks_on_one_device_by_fused_kernels_equal_one_cpu(name, dtype, bound):
    *inputs, expected = case_of(name, dtype, 37)
    rows_of_both(*inputs, GPU)  # a kernel of others is tried out once
    with noting_operators() as operators:
        found = rows_of_both(*inputs, GPU)
    for own, right in zip(found, expected, strict=True):
        assert float((own.cpu().double() - right).abs().max() / right.abs().max()) < bound
    assert len([name for name in operators.fused if name.endswith("_backward")]) == 1
    assert operators.others == set()


@needs_two  # gloo has no all-to-alls of a card's tensors
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_each_algorithm_by_fused_kernels_equals_one_cpu(dtype, bound):
    for found in run_ranks(on_each_rank, 2, worst_differences, *group_of_two(), dtype, timeout_s=110):
        assert len(found) == 17
        for case, (worst, fused, others) in found.items():
            assert worst < bound, case
            assert len([name for name in fused if name.endswith("_backward")]) == 1, (case, fused)
            assert len(fused) == 2, (case, fused)
            assert others == [], case


@needs_two
def test_the_peak_of_memory_grows_with_the_tokens_and_not_with_their_square():
    few, many = on_a_card((16_384, 65_536), (1024, 4096))
    for found in run_ranks(on_each_rank, 2, peaks, *group_of_two(), (few, many), timeout_s=110):
        for algorithm in ALGORITHMS:
            assert found[algorithm, many] < 4.2 * found[algorithm, few]
            # A quarter of what the scores of this rank's queries would need.
            assert found[algorithm, many] < 2 * many * many / 2 * 4 / 4


@pytest.mark.parametrize("algorithm", ["all-gather", "ring"])
@pytest.mark.sync_budget(1)
def test_the_host_waits_once_for_all_tiles_of_a_mask(algorithm):
    tokens = 3 * ROWS + 7
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=GPU).tril().triu(-ROWS)
    cut = cuts_of(tokens, rank=0, size=1).of_whole(tokens)
    if algorithm == "ring":
        blocks = list(ring_blocks(mask, QueryKeyCuts(cut, cut), 0))
    else:
        q = torch.zeros(1, 1, tokens, 1, device=GPU)
        blocks = list(score_blocks(Inputs(q, q, q, mask), Rules(cut, None)))
    assert len(blocks) > 3
    assert all(b.begin == max(0, b.first - ROWS) and b.end == b.last for b in blocks)
