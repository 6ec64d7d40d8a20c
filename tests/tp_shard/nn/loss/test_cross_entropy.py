"""Cross entropy over class shards equals torch's own, with every option, and says what it refuses."""

import functools

import pytest
import torch
import tp_shard as ts
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.tp_shard.on_each_rank import drawn, own

d = ts.distributed
parallel_cross_entropy = ts.nn.functional.parallel_cross_entropy
fused = ts.nn.functional.parallel_linear_cross_entropy


def close(a, b, **kw):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, equal_nan=True, **kw)


cases = st.tuples(
    st.integers(2, 19),  # classes: fewer than ranks too
    st.sampled_from([(), (0,), (5,), (3, 2), (2, 1, 3)]),
    st.booleans(),  # torch's order of dimensions
    st.sampled_from(["mean", "sum", "none"]),
    st.booleans(),  # weight
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([-100, 0, 1]),
    st.sampled_from([0.0, 0.05]),
    st.booleans(),  # in place
    st.booleans(),  # class 1 excluded by a logit of minus infinity
)


def losses_of_drawn_options_equal_torchs(count=60):
    for classes, shape, torch_order, reduction, weighted, eps, ignored, z, inplace, masked in drawn(
        cases, count
    ):
        torch.manual_seed(5)
        logits = torch.randn(*shape, classes, dtype=torch.float64) * 3
        target = torch.randint(0, classes, shape)
        if masked and eps == 0:
            logits[..., 1] = float("-inf")
            target[target == 1] = 0
        weight = torch.rand(classes, dtype=torch.float64) + 0.1 if weighted else None
        if torch_order and len(shape) > 1:
            logits, dim = logits.movedim(-1, 1).contiguous(), 1
        else:
            dim = -1
        full = logits.clone().requires_grad_()
        mine = own(logits, dim).clone().requires_grad_()
        rows = full if dim == 1 or len(shape) < 2 else full.movedim(-1, 1)
        options = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": eps}
        expected = F.cross_entropy(rows, target, weight, **options)
        lse = torch.logsumexp(full, dim if len(shape) else 0)
        terms = torch.where(target == ignored, 0, z * lse * lse)
        if reduction == "mean":
            counts = torch.ones(classes, dtype=torch.float64) if weight is None else weight
            expected = expected + terms.sum() / torch.where(target == ignored, 0, counts[target]).sum()
        else:
            expected = expected + (terms.sum() if reduction == "sum" else terms)
        loss = ts.nn.ParallelCrossEntropyLoss(
            weight,
            num_classes=classes,
            parallel=True,
            class_dim=dim,
            z_loss=z,
            inplace=inplace and dim == -1,
            **options,
        )
        # Not a leaf: what is overwritten is not what the user holds.
        got = loss(mine * 1, target)
        close(got, expected)
        upstream = torch.rand(expected.shape, dtype=torch.float64)
        (expected * upstream).sum().backward()
        (got * upstream).sum().backward()
        # Where every row is ignored, torch's own gradients are 0 and the loss is nan.
        close(mine.grad, own(torch.nan_to_num(full.grad) if bool(expected.isnan().all()) else full.grad, dim))


fused_cases = st.tuples(
    st.integers(2, 17),
    st.sampled_from([(), (0,), (7,), (3, 2)]),
    st.sampled_from(["mean", "sum", "none"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([-100, 1]),
    st.sampled_from([0.0, 0.05]),
    st.integers(1, 8),
)


def the_fused_head_and_loss_of_drawn_options_equal_the_two(count=30):
    for classes, shape, reduction, biased, weighted, eps, ignored, z, chunk in drawn(fused_cases, count):
        torch.manual_seed(6)
        make = {"dtype": torch.float64}
        x = torch.randn(*shape, 4, **make)
        w, b = torch.randn(classes, 4, **make), torch.randn(classes, **make)
        target = torch.randint(0, classes, shape)
        target.view(-1)[:1] = 0  # one that counts
        weight = torch.rand(classes, **make) + 0.1 if weighted else None
        options = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": eps, "z_loss": z}
        results = []
        for together in (False, True):
            tensors = [x.clone(), w.clone(), b.clone()] if not together else [x.clone(), own(w, 0), own(b, 0)]
            t = [v.detach().requires_grad_() for v in tensors]
            bias = t[2] if biased else None
            if together:
                loss = fused(
                    t[0],
                    t[1],
                    target,
                    bias,
                    class_weight=weight,
                    num_classes=classes,
                    chunk_rows=chunk,
                    **options,
                )
            else:
                logits = F.linear(t[0], t[1], bias)
                loss = parallel_cross_entropy(logits, target, weight, parallel=False, **options, class_dim=-1)
            (loss * torch.arange(1, loss.numel() + 1, **make).view(loss.shape)).sum().backward()
            results.append((loss.detach(), [v.grad for v in t[: 2 + biased]]))
        (expected, grads), (got, mine) = results
        close(got, expected)
        close(mine[0], grads[0])
        for a, g in zip(mine[1:], grads[1:], strict=True):
            close(a, own(g, 0))
    with torch.no_grad():
        close(
            fused(x, own(w, 0), target, own(b, 0), num_classes=classes),
            F.cross_entropy(F.linear(x, w, b), target)
            if x.dim() < 3
            else F.cross_entropy(F.linear(x, w, b).movedim(-1, 1), target),
        )


def frozen_parts_of_the_fused_head_get_no_gradient():
    x, w = torch.randn(6, 4), torch.randn(9, 4)
    target = torch.arange(6)
    for needs in [(True, False), (False, True)]:
        a = x.clone().requires_grad_(needs[0])
        b = own(w, 0).clone().requires_grad_(needs[1])
        fused(a, b, target, num_classes=9, chunk_rows=4).mul(3).backward()
        full = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        F.cross_entropy(F.linear(*full), target).mul(3).backward()
        assert (a.grad is None) != needs[0]
        if needs[0]:
            torch.testing.assert_close(a.grad, full[0].grad)
        else:
            torch.testing.assert_close(b.grad, own(full[1].grad, 0))


def in_place_takes_the_logits_and_tells_those_who_held_them():
    logits = torch.randn(4, 10, dtype=torch.float64)
    target = torch.randint(0, 10, (4,))
    for dtype in (torch.float64, torch.bfloat16):
        mine = own(logits).to(dtype).requires_grad_()
        held = torch.tanh(mine)  # tanh's backward reads its output
        loss = parallel_cross_entropy(held, target, num_classes=10, parallel=True, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    mine = own(logits).clone().requires_grad_()
    scores = mine * 1
    where = scores.data_ptr()
    grads = []
    scores.register_hook(grads.append)
    loss = parallel_cross_entropy(scores, target, num_classes=10, parallel=True, inplace=True)
    loss.backward(retain_graph=True)
    assert grads[0].data_ptr() == where
    with pytest.raises(
        RuntimeError, match=r"called twice on this loss, but inplace=True overwrote its logits"
    ):
        loss.backward()
    kept = parallel_cross_entropy(mine, target, num_classes=10, parallel=True)
    first = torch.autograd.grad(kept, mine, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(kept, mine)[0], first)
    torch.testing.assert_close(mine, own(logits).clone(), check_stride=False)
    x, w = torch.randn(4, 3), own(torch.randn(10, 3), 0).clone().requires_grad_()
    loss = fused(x, w, target, num_classes=10)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"called twice on this loss, but its gradients"):
        loss.backward()
    with pytest.raises(ValueError, match="inplace=True needs logits that are contiguous"):
        parallel_cross_entropy(
            torch.zeros(2, own(logits).size(1), 3), torch.zeros(2, 3).long(), num_classes=10,
            parallel=True, class_dim=1, inplace=True,
        )  # fmt: skip


def wrong_targets_end_all_ranks_with_the_same_error():
    mine = own(torch.randn(4, 10))
    good, bad = torch.tensor([1, 2, 3, 9]), torch.tensor([1, 2, 10, 9])
    rank, size = d.get_rank(), d.get_world_size()
    with pytest.raises(IndexError, match=r"target 10 on rank 0 is not one of 10 classes, 0 to 9"):
        parallel_cross_entropy(mine, bad, num_classes=10, parallel=True)
    with pytest.raises(IndexError, match=r"target -1 on rank 0 is not one of 10 classes"):
        parallel_cross_entropy(mine, good - 2, num_classes=10, parallel=True)
    with pytest.raises(IndexError, match="not one of 10 classes"):
        parallel_cross_entropy(torch.randn(4, 10), bad)
    if size > 1:
        with pytest.raises(ts.OutOfRangeError, match=f"target 10 on rank {size - 1} is not"):
            parallel_cross_entropy(mine, bad if rank == size - 1 else good, num_classes=10, parallel=True)
        with pytest.raises(RuntimeError, match="have different targets"):
            parallel_cross_entropy(mine, (good + rank) % 10, num_classes=10, parallel=True)
        with pytest.raises(RuntimeError, match="ranks count different numbers of classes"):
            parallel_cross_entropy(own(torch.randn(4, 9)), good - 1, parallel=True)
        with pytest.raises(RuntimeError, match="different"):
            fused(torch.randn(4, 3), own(torch.randn(10, 3), 0), (good + rank) % 10, num_classes=10)
    else:
        parallel_cross_entropy(mine, good, parallel=True)


def the_mark_the_number_of_classes_and_the_word_say_what_is_split():
    full = torch.randn(4, 10)
    mine, target = own(full), torch.tensor([1, 2, 3, 9])
    expected = F.cross_entropy(full, target)
    marked = mine.view_as(mine)
    ts.register_parallel_dim(marked, -1, size=10)
    for got in [
        parallel_cross_entropy(full, target),
        parallel_cross_entropy(full, target, num_classes=10),
        parallel_cross_entropy(mine, target, num_classes=10),
        parallel_cross_entropy(marked, target),
        parallel_cross_entropy(mine, target, num_classes=10, parallel=True),
        parallel_cross_entropy(d.gather(mine, -1), target),
    ]:
        torch.testing.assert_close(got, expected)
    if d.get_world_size() == 1:
        return
    # A mark that was lost makes the shard whole, and targets beyond it are errors: no silent loss.
    with pytest.raises(IndexError, match="is not one of"):
        parallel_cross_entropy(marked * 2, target)
    whole = full.clone()
    ts.register_parallel_dim(whole, -1, size=10)
    with pytest.raises(ValueError, match="whole logits are not split"):
        parallel_cross_entropy(whole, target)
    with pytest.raises(ValueError, match="expected 10"):
        parallel_cross_entropy(mine, target, num_classes=10, parallel=False)
    with pytest.raises(ValueError, match="neither 99 classes wide nor"):
        parallel_cross_entropy(mine, target, num_classes=99)
    with pytest.raises(ValueError, match="of one class"):
        parallel_cross_entropy(full[:, :1], target * 0, num_classes=1)
    wide = ts.nn.functional.parallel_linear(
        torch.randn(4, 3), own(torch.randn(10, 3), 0), None, -1, out_features=10
    )
    parallel_cross_entropy(wide, target)  # the layer's own mark carries the number


def what_cannot_be_is_refused():
    mine, target = own(torch.randn(2, 5, 12)), torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="Class probabilities are not supported"):
        parallel_cross_entropy(mine, torch.rand(2, 5))
    with pytest.raises(ValueError, match="do not fit logits of shape"):
        parallel_cross_entropy(mine, target[:1], num_classes=12, parallel=True)
    width = -(-12 // d.get_world_size())
    with pytest.raises(ValueError, match="may have their classes in dim 1 or last"):
        parallel_cross_entropy(
            torch.randn(2, width, width), torch.zeros(2, width).long(), num_classes=12, parallel=True
        )
    with pytest.raises(ValueError, match="class_dim is 1 or -1"):
        parallel_cross_entropy(mine, target, class_dim=0)
    with pytest.raises(ValueError, match="num_classes is a number"):
        parallel_cross_entropy(mine, target, num_classes=0)
    with pytest.raises(ValueError, match="a factor for each of 12 classes, got shape"):
        parallel_cross_entropy(mine, target, torch.ones(5), num_classes=12, parallel=True)
    with pytest.raises(ValueError, match="got a scalar"):
        parallel_cross_entropy(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(ValueError, match="logits are floating point"):
        parallel_cross_entropy(mine.long(), target, num_classes=12, parallel=True, class_dim=-1)
    with pytest.raises(ValueError, match="reduction is"):
        ts.nn.ParallelCrossEntropyLoss(reduction="median")
    with pytest.raises(ValueError, match="label_smoothing is between"):
        ts.nn.ParallelCrossEntropyLoss(label_smoothing=1.5)
    with pytest.raises(ValueError, match="z_loss is a factor"):
        ts.nn.ParallelCrossEntropyLoss(z_loss=-1.0)
    with pytest.raises(ValueError, match="a factor for each of 3 classes"):
        ts.nn.ParallelCrossEntropyLoss(torch.ones(2), num_classes=3)
    x, w = torch.randn(4, 3), own(torch.randn(12, 3), 0)
    with pytest.raises(ValueError, match="do not fit: got shapes"):
        fused(x, w[:, :2], torch.zeros(4).long())
    with pytest.raises(ValueError, match="without its last dimension"):
        fused(x, w, torch.zeros(3).long())
    with pytest.raises(ValueError, match="classes, got a weight of shape"):
        fused(x, w, torch.zeros(4).long(), num_classes=40)
    with pytest.raises(ValueError, match="chunk_rows is a number of rows"):
        fused(x, w, torch.zeros(4).long(), chunk_rows=0)


def no_more_than_a_chunk_of_logits_exists():
    """The largest tensor that any operation of the fused loss makes is a chunk's logits or a gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, torch.Tensor):
                    seen.append(t.untyped_storage().nbytes())
            return out

    classes = 300 * d.get_world_size()
    x, target = torch.randn(64, 4).requires_grad_(), torch.randint(0, classes, (64,))
    w = own(torch.randn(classes, 4), 0).clone().requires_grad_()
    for reduction in ("mean", "none"):
        seen.clear()
        with Watch():
            fused(x, w, target, reduction=reduction, num_classes=classes, chunk_rows=8).sum().backward()
        assert max(seen) <= 8 * 300 * 4


CHECKS = [
    losses_of_drawn_options_equal_torchs,
    the_fused_head_and_loss_of_drawn_options_equal_the_two,
    frozen_parts_of_the_fused_head_get_no_gradient,
    in_place_takes_the_logits_and_tells_those_who_held_them,
    wrong_targets_end_all_ranks_with_the_same_error,
    the_mark_the_number_of_classes_and_the_word_say_what_is_split,
    what_cannot_be_is_refused,
    no_more_than_a_chunk_of_logits_exists,
]


FIRST_SLOW = [*(pytest.param(check, marks=pytest.mark.slow) for check in CHECKS[:2]), *CHECKS[2:]]  # drawn


@pytest.mark.parametrize("check", FIRST_SLOW, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", FIRST_SLOW, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS[:2], ids=lambda c: c.__name__)
def test_many_drawn_options_on_ranks(on_ranks, check):
    on_ranks(2, functools.partial(check, 150))


def test_the_loss_is_a_module_with_torchs_buffer_and_words():
    loss = ts.nn.ParallelCrossEntropyLoss(torch.ones(3), num_classes=3, reduction="sum")
    assert list(loss.state_dict()) == list(nn.CrossEntropyLoss(torch.ones(3)).state_dict())
    assert "num_classes=3, reduction='sum'" in repr(loss)
