"""The table of fused kernels: which one is chosen, how it is called, and what happens where none can do it.

There is no CUDA device here: stand-ins for its kernels check what those would not take. They are registered
as kernels of the CPU.
"""

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from tp_context import _fused_kernels  # private: no public name shows which kernel ran
from tp_context._algorithms import attend
from tp_context._attention_inputs import Inputs, Rules
from tp_context._fused_kernels import AttentionBlock, Wanted, attend_to_block, kernel_for, refusals
from tp_core.errors import StepError

from tests.launches import process_group
from tests.tp_context.cuts import activate, cuts_of
from tests.tp_context.test_algorithms import ALGORITHMS, check, outcome

BF16, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("wanted", "able"),
    [
        (Wanted("cpu", DOUBLE, 64, 64, torch.bool), ["flash"]),
        (Wanted("cpu", DOUBLE, 64, 32), []),
        (Wanted("cuda", BF16, 64, 64), ["flash", "efficient", "cuDNN"]),
        (Wanted("cuda", BF16, 256, 256), ["flash", "efficient"]),
        (Wanted("cuda", BF16, 64, 32), ["efficient", "cuDNN"]),
        (Wanted("cuda", BF16, 64, 64, torch.bool), ["efficient"]),
        (Wanted("cuda", BF16, 64, 64, BF16), ["efficient"]),
        (Wanted("cuda", BF16, 64, 64, FLOAT), []),
        (Wanted("cuda", FLOAT, 64, 64), ["efficient"]),
        (Wanted("cuda", DOUBLE, 64, 64), []),
        (Wanted("mps", FLOAT, 64, 64), []),
    ],
)
def test_the_table_says_which_kernels_can_do_an_attention(wanted, able):
    assert [name for name, reason in refusals(wanted).items() if not reason] == able


GUIDE = {
    "causal, or all keys": [(BF16, 64), (FLOAT, 64)],
    "the same, values of another size than keys": [(BF16, 32)],
    "a mask: padding, windows, documents, additive": [(BF16, 64, BF16)],
    "float64": [(DOUBLE, 64)],
}


def test_the_guide_names_the_kernels_of_the_table():
    def cell(device_type, calls):
        """Return the kernel of each type."""
        found = {}
        for dtype, *others in calls:
            table = refusals(Wanted(device_type, dtype, 64, *others))
            able = [name for name, reason in table.items() if not reason]
            kernel = able[0] if able else "tiles"
            found[kernel] = {BF16: "float16 and bfloat16", FLOAT: "float32"}.get(dtype)
        if len(found) == 1:
            return next(iter(found))
        return ", ".join(f"{kernel} in {types}" for kernel, types in found.items())

    text = (Path(__file__).parents[2] / "docs/context/attention.md").read_text()
    for what, calls in GUIDE.items():
        assert f"| {what} | {cell('cpu', calls)} | {cell('cuda', calls)} |" in text


def test_kernels_whose_gradients_differ_between_runs_are_left_out_where_that_is_forbidden():
    torch.use_deterministic_algorithms(True)
    try:
        found = refusals(Wanted("cuda", BF16, 64, 64))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name, reason in found.items() if "may differ between runs" in reason] == [
        "efficient",
        "cuDNN",
    ]


def test_torch_says_of_each_kernel_of_cuda_that_it_is_not_here():
    wanted = Wanted("cpu", BF16, 20, 20)
    kernels = [kernel for kernel in _fused_kernels.KERNELS if kernel.allows is not None]
    assert [kernel.name for kernel in kernels] == ["flash", "efficient", "cuDNN"]
    for kernel in kernels:
        try:
            is_allowed = _fused_kernels._is_allowed(kernel, wanted, torch.device("cpu"), needs_grad=True)
        except torch.AcceleratorError:  # a build of torch with CUDA asks a driver, which is not here, either
            is_allowed = False
        assert not is_allowed


def inputs(features=(8, 8), **options):
    query, key, value = (torch.randn(1, 2, 6, n) for n in (features[0], *features))
    return Inputs(query, key, value, **options)


def test_what_sdpa_kernel_leaves_out_is_not_called():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    assert kernel_for(inputs(), Rules(None, None)).name == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_for(inputs(), Rules(None, None)) is None
    with (
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        pytest.raises(StepError, match=r"flash: torch.nn.attention.sdpa_kernel leaves it out\); allow"),
    ):
        kernel_for(inputs(), Rules(None, None))


@pytest.mark.parametrize(
    ("given", "rules", "why"),
    [
        (inputs(), {"by_hand": True}, "as transformers does"),
        (inputs(), {"dropout": 0.1}, "dropout of weights"),
        (inputs(mask=torch.zeros(6, 6, requires_grad=True)), {}, "the gradient of a mask"),
        (inputs(features=(8, 0)), {}, "it is empty"),
        (inputs(features=(8, 4)), {}, "flash: values have other features than keys"),
    ],
)
def test_the_log_says_why_there_is_no_kernel(given, rules, why, caplog):
    _fused_kernels._say_why.cache_clear()
    with caplog.at_level(logging.INFO, "tp_context"):
        for _ in range(2):
            assert kernel_for(given, Rules(None, None, **rules)) is None
    (record,) = caplog.records
    assert why in record.getMessage()


@pytest.mark.parametrize("spread", ["inputs", "gradient"])
def test_features_that_lie_apart_in_memory_have_the_same_numbers(spread):
    """The CPU's kernel takes what lies between them for numbers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    made = torch.randn(3, 1, 2, 4, 12, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).mT
    parts = [t if spread == "inputs" else t.contiguous() for t in made]
    parts = [t.requires_grad_() for t in parts]
    grad = torch.ones(()).to(DOUBLE).expand(1, 2, 12, 4)
    if spread == "inputs":
        assert parts[0].stride(-1) == 12
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*parts, is_causal=True)
    found = attend(Inputs(*parts), Rules(None, None, is_causal=True), "all-gather")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, parts, grad), torch.autograd.grad(expected, parts, grad)
    )


# -- Scores in tiles -------------------------------------------------------------------------------


@pytest.mark.parametrize("height", [1, 300])
def test_a_mask_that_is_trained_gets_its_gradient_in_tiles(height):
    parts = torch.randn(3, 1, 2, 300, 4, dtype=DOUBLE).requires_grad_().unbind()
    mask = torch.randn(2, height, 300, dtype=DOUBLE).requires_grad_()
    found = attend(Inputs(*parts, mask), Rules(None, None), "all-gather")
    expected = F.scaled_dot_product_attention(*parts, mask)
    torch.testing.assert_close(found, expected)
    (own,), (right,) = (torch.autograd.grad(out.square().sum(), [mask]) for out in (found, expected))
    torch.testing.assert_close(own, right)


class Largest(TorchDispatchMode):
    """Notes the most numbers of a tensor."""

    numel = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                self.numel = max(self.numel, tensor.numel())
        return found


def largest_tensors(tokens, store):
    """Return the most numbers of a tensor, by algorithm, whether causal, and what sdpa_kernel allows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from tp_context import attention

    found = {}
    with process_group(store):
        for algorithm in ALGORITHMS:
            cuts = cuts_of(tokens, rank=dist.get_rank(), size=2, algorithm=algorithm)
            for is_causal in (True, False):
                for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
                    count = cuts.of_whole(tokens).tokens
                    parts = [torch.randn(1, 2, count, 4, requires_grad=True) for _ in range(3)]
                    with activate(cuts), sdpa_kernel(backend), Largest() as largest:
                        attention(*parts, is_causal=is_causal).sum().backward()
                    found[algorithm, is_causal, backend.name] = largest.numel
    return found


def test_the_scores_are_never_whole(two_ranks, tmp_path):
    tokens = 2048
    for found in two_ranks.run(largest_tensors, tokens, tmp_path / "store"):
        assert len(found) == 12
        for case, numel in found.items():
            # Both heads of 256 rows and all keys; a kernel has queries, keys and values.
            assert numel <= (2 * 256 * tokens if case[-1] == "MATH" else 3 * 2 * 4 * tokens), case


# -- Stand-ins for the kernels of CUDA -------------------------------------------------------------


def scored(query, key, is_causal, bias, scale):
    assert scale is not None
    assert query.size(1) % key.size(1) == 0
    key = key.repeat_interleave(query.size(1) // key.size(1), 1)
    scores = query @ key.mT * scale
    if is_causal:
        assert query.size(2) == key.size(2)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if bias is None else scores + bias


def spread(tensor, query):
    return tensor.repeat_interleave(query.size(1) // tensor.size(1), 1)


def forward(query, key, value, is_causal, bias, scale):
    """Return output and log-sum-exps; those of a row that sees nothing are NaN, as a kernel may have them."""
    CALLS["forward"] += 1
    for tensor in (query, key, value):
        assert tensor.size(-1) % 8 == 0
        assert tensor.stride(-1) == 1
    scores = scored(query, key, is_causal, bias, scale)
    return scores.softmax(-1) @ spread(value, query), scores.logsumexp(-1)


def backward(grad, query, key, value, out, sums, is_causal, bias, scale):
    CALLS["backward"] += 1
    assert grad.shape == out.shape
    assert sums.is_contiguous()
    weights = (scored(query, key, is_causal, bias, scale) - sums[..., None]).exp()
    slopes = weights * (grad @ spread(value, query).mT - (grad * out).sum(-1, keepdim=True)) * scale
    of_keys, of_values = slopes.mT @ query, weights.mT @ grad
    shared = query.size(1) // key.size(1)
    of_keys, of_values = (t.unflatten(1, (-1, shared)).sum(2) for t in (of_keys, of_values))
    return slopes @ spread(key, query), of_keys, of_values


NOTHING = torch.empty(0)
CALLS = Counter()


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, sums = forward(query, key, value, is_causal, None, scale)
    return out, sums, NOTHING, NOTHING, query.size(2), key.size(2), NOTHING, NOTHING, NOTHING


def flash_backward(grad, query, key, value, out, sums, cum_q, cum_k, most_q, most_k, *others, scale=None):
    assert (most_q, most_k, cum_q, cum_k) == (query.size(2), key.size(2), None, None)
    dropout_p, is_causal, seed, _ = others
    assert (dropout_p, seed.dtype) == (0.0, torch.uint64)
    return backward(grad, query, key, value, out, sums, is_causal, None, scale)


def check_bias(bias, query, key):
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.size(2))
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert all(step % 16 == 0 for step, n in zip(bias.stride()[:3], bias.shape, strict=False) if n > 1)
        assert bias.storage_offset() % 16 == 0


def efficient(query, key, value, bias, compute, dropout_p=0.0, is_causal=False, *, scale=None):
    assert compute
    assert query.size(1) == key.size(1)
    check_bias(bias, query, key)
    out, sums = forward(query, key, value, is_causal, bias, scale)
    return out, F.pad(sums, (0, -sums.size(-1) % 32), value=torch.inf), NOTHING, NOTHING


def efficient_backward(grad, query, key, value, bias, out, sums, seed, offset, *others, scale=None):
    assert others[:2] == (0.0, [True, True, True, False])
    is_causal = len(others) > 2 and others[2]
    check_bias(bias, query, key)
    count = query.size(2)
    assert sums.size(-1) == -(-count // 32) * 32
    assert bool((sums[..., count:] == torch.inf).all())
    grads = backward(grad, query, key, value, out, sums[..., :count].contiguous(), is_causal, bias, scale)
    return *grads, NOTHING


def cudnn(query, key, value, bias, compute, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    assert compute
    assert bias is None
    out, sums = forward(query, key, value, is_causal, None, scale)
    return out, sums[..., None], NOTHING, NOTHING, query.size(2), key.size(2), NOTHING, NOTHING, NOTHING


def cudnn_backward(grad, query, key, value, out, sums, seed, offset, bias, cum_q, cum_k, *others, scale=None):
    most_q, most_k, dropout_p, is_causal = others
    assert (most_q, most_k, dropout_p, bias) == (query.size(2), key.size(2), 0.0, None)
    assert sums.shape == (*query.shape[:3], 1)
    return backward(grad, query, key, value, out, sums[..., 0].contiguous(), is_causal, None, scale)


STAND_INS = {
    "flash": (flash, flash_backward),
    "efficient": (efficient, efficient_backward),
    "cuDNN": (cudnn, cudnn_backward),
}


@contextmanager
def only(name):
    """Have CUDA's kernel of a name, and no other, be the CPU's; it takes float64, to be exact."""
    (kernel,) = [k for k in _fused_kernels.KERNELS if (k.name, k.device) == (name, "CUDA")]
    kernel = replace(kernel, device="CPU", dtypes=(DOUBLE,), allows=lambda _: True)
    library = torch.library.Library("aten", "IMPL")
    for function, ending in zip(STAND_INS[name], ("", "_backward"), strict=True):
        library.impl(f"_scaled_dot_product_{name.lower()}_attention{ending}", function, "CPU")
    try:
        with patch.object(_fused_kernels, "KERNELS", (kernel,)):
            yield
    finally:
        library._destroy()  # private: torch's own way to take kernels back


CALLED = {
    "flash": ("bidirectional", "causal", "grouped", "one group"),
    "efficient": (
        "causal",
        "grouped",
        "groups that do not divide",
        "documents",
        "padding",
        "values of other sizes",
        "alibi",
        "many rows in a window",
    ),
    "cuDNN": ("bidirectional", "grouped", "values of other sizes"),
}


MASKS = {
    "whole": lambda: torch.randn(2, 1, 6, 32, dtype=DOUBLE),
    "some keys of longer rows": lambda: torch.randn(6, 37, dtype=DOUBLE)[None, None, :, :32],
    "keys from the middle": lambda: torch.randn(6, 64, dtype=DOUBLE)[None, None, :, 8:40],
    "from an odd place": lambda: torch.randn(200, dtype=DOUBLE)[8:].narrow(0, 0, 192).view(1, 1, 6, 32),
    "one row": lambda: torch.randn(32, dtype=DOUBLE).expand(1, 1, 6, 32),
    "one key": lambda: torch.randn(2, 1, 6, 1, dtype=DOUBLE).expand(2, 1, 6, 32),
    "columns": lambda: torch.randn(1, 1, 32, 6, dtype=DOUBLE).mT,
}


@pytest.mark.parametrize("name", MASKS)
def test_cudas_kernel_reads_a_mask_wherever_it_was_cut_from(name):
    torch.manual_seed(0)
    added = MASKS[name]()
    query, (key, value) = torch.randn(2, 3, 6, 8, dtype=DOUBLE), torch.randn(2, 2, 3, 32, 8, dtype=DOUBLE)
    with only("efficient"):
        block = AttentionBlock(query, key, value, added, False, None)
        found, _ = attend_to_block(_fused_kernels.KERNELS[0], block)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, added))


def by_stand_ins(store):
    """Return what each kernel comes to, by algorithm and case."""
    torch.set_num_threads(1)
    found = {}
    with process_group(store):
        for kernel, names in CALLED.items():
            with only(kernel):
                for name in names:
                    for algorithm in ALGORITHMS:
                        CALLS.clear()
                        found[algorithm, name, kernel] = outcome(algorithm, name)
                        is_refused = isinstance(found[algorithm, name, kernel], str)
                        assert is_refused or set(CALLS) == {"forward", "backward"}
    return found


def test_the_kernels_of_cuda_are_called_as_they_can_be_called(two_ranks, tmp_path):
    for found in two_ranks.run(by_stand_ins, tmp_path / "store"):
        for kernel in CALLED:
            check([{case[:2]: worst for case, worst in found.items() if case[2] == kernel}])
