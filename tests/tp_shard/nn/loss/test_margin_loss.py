"""The loss with margins equals a dense one on one process, for every margin, with and without a sample."""

import itertools
import math

import pytest
import torch
import tp_shard as ts
from torch.nn import functional as F
from tp_shard._groups._group import ALONE  # private: the group of a rank alone, beside the ranks' own

from tests.tp_shard.on_each_rank import own

d = ts.distributed
margin_loss = ts.nn.functional.parallel_margin_cross_entropy
sample_classes = ts.nn.functional.sample_classes

MARGINS = [  # m1, m2, m3, scale
    (1.0, 0.5, 0.0, 64.0),  # ArcFace
    (1.0, 0.0, 0.4, 64.0),  # CosFace
    (1.35, 0.0, 0.0, 32.0),  # SphereFace with a scale
    (4.0, 0.0, 0.0, 8.0),  # SphereFace's own: angles go beyond pi
    (1.0, 1.9, 0.0, 16.0),  # angles that an addition brings beyond pi
    (0.9, 0.4, 0.15, 30.0),  # all of them
    (1.0, 0.0, 0.0, 10.0),  # none
]


def dense(x, w, target, margins, *, classes=None, monotonic=True, **options):
    """Return the loss as one would write it down, of some of the classes."""
    m1, m2, m3, scale = margins
    cosine = F.linear(F.normalize(x, dim=-1), F.normalize(w, dim=-1))
    angle = m1 * cosine.clamp(-1, 1).acos() + m2
    with_margin = angle.cos()
    if monotonic:
        turns = (angle.detach() / math.pi).floor()
        with_margin = torch.where(turns % 2 == 0, 1, -1) * with_margin - 2 * turns
    safe = torch.where((target >= 0) & (target < w.size(0)), target, 0)
    is_target = F.one_hot(safe, w.size(0)).bool()
    logits = scale * torch.where(is_target, with_margin - m3, cosine)
    if classes is not None:
        logits = logits[:, classes]
        where = torch.full((w.size(0),), -100)
        where[classes] = torch.arange(classes.numel())
        target = torch.where(target == options.get("ignore_index", -100), -100, where[safe])
        options["ignore_index"] = -100
    return F.cross_entropy(logits, target, **options)


def drawn(rows, features, classes, dtype=torch.float64):
    torch.manual_seed(3)
    return (
        torch.randn(rows, features, dtype=dtype) * 3,
        torch.randn(classes, features, dtype=dtype) * 0.2,
        torch.randint(0, classes, (rows,)),
    )


def compare(x, w, target, margins, *, sampled=None, classes=None, tolerance=1e-9, **options):
    """Compare the loss and both gradients with those of the dense loss."""
    full = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    mine = [x.clone().requires_grad_(), own(w, 0).clone().requires_grad_()]
    kept = {k: v for k, v in options.items() if k not in ("chunk_rows", "sparse")}
    expected = dense(*full, target, margins, classes=classes, **kept)
    m1, m2, m3, scale = margins
    got = margin_loss(
        *mine, target, m1=m1, m2=m2, m3=m3, scale=scale, num_classes=w.size(0), sampled=sampled, **options
    )
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(got, expected, **close)
    upstream = torch.linspace(0.5, 2, got.numel(), dtype=got.dtype).view(got.shape)
    (got * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(mine[0].grad, full[0].grad, **close)
    grad = mine[1].grad
    torch.testing.assert_close(grad.to_dense() if grad.is_sparse else grad, own(full[1].grad, 0), **close)


def every_margin_and_reduction_equals_the_dense_loss():
    settings = [("mean", 0.0, 11, None), ("sum", 0.1, 6, 3), ("none", 0.1, 3, 2)]
    for margins, (reduction, smoothing, classes, chunk) in itertools.product(MARGINS, settings):
        x, w, target = drawn(7, 5, classes)
        target[2] = -100
        compare(x, w, target, margins, reduction=reduction, label_smoothing=smoothing, chunk_rows=chunk)


def float32_equals_the_dense_loss_to_a_millionth():
    x, w, target = drawn(16, 32, 101, torch.float32)
    for margins in MARGINS:
        compare(x, w, target, margins, tolerance=2e-6)


def without_monotonic_the_cosine_rises_again():
    x, w, target = drawn(9, 4, 7)
    compare(x, w, target, (4.0, 0.0, 0.0, 8.0), monotonic=False)
    compare(x, w, target, (1.0, 1.9, 0.0, 8.0), monotonic=False)


def a_feature_on_or_opposite_of_its_center_has_finite_gradients():
    w = torch.eye(3)
    for sign in (1.0, -1.0):
        x = (sign * w).requires_grad_()
        centers = own(w, 0).clone().requires_grad_()
        margin_loss(x, centers, torch.arange(3), m1=1.2, num_classes=3).backward()
        assert x.grad.isfinite().all()
        assert centers.grad.isfinite().all()


def a_sample_equals_the_dense_loss_of_its_classes_and_the_targets():
    for reduction, smoothing, sparse, classes in itertools.product(
        ["mean", "none"], [0.0, 0.2], [False, True], [29, 3]
    ):
        x, w, target = drawn(8, 5, classes)
        target[1] = -100
        sampled = sample_classes(classes, 0.3, seed=5)
        # What all ranks have, and the targets, as one process would be given it.
        start = sum(s.size(0) for s in ts.slice(w, d.get_world_size(), 0)[: d.get_rank()])
        everyones = torch.zeros(classes)
        everyones[sampled + start] = 1
        everyones = d.reduce(everyones)
        everyones[target[target >= 0]] = 1
        compare(
            x, w, target, MARGINS[0], sampled=sampled, classes=everyones.nonzero().squeeze(1),
            reduction=reduction, label_smoothing=smoothing, sparse=sparse, chunk_rows=3,
        )  # fmt: skip


def a_sample_does_not_depend_on_the_number_of_ranks():
    classes = 200_003
    mine = sample_classes(classes, 0.1, seed=9)
    whole = sample_classes(classes, 0.1, seed=9, group=ALONE)
    start, stop = own(torch.arange(classes), 0)[[0, -1]].tolist()
    assert torch.equal(mine + start, whole[(whole >= start) & (whole <= stop)])
    assert abs(whole.numel() / classes - 0.1) < 0.005
    assert not torch.equal(whole, sample_classes(classes, 0.1, seed=10, group=ALONE))


def autocast_multiplies_in_bfloat16_and_does_the_rest_in_float32():
    x, w, target = drawn(16, 32, 101, torch.float32)
    for margins, is_sampled in itertools.product(MARGINS[:2], [False, True]):
        full = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        mine = [x.clone().requires_grad_(), own(w, 0).clone().requires_grad_()]
        m1, m2, m3, scale = margins
        every = torch.arange(own(w, 0).size(0)) if is_sampled else None
        with torch.autocast("cpu", torch.bfloat16):
            cosine = F.linear(F.normalize(full[0]), F.normalize(full[1]))
            got = margin_loss(*mine, target, m1=m1, m2=m2, m3=m3, scale=scale, num_classes=101, sampled=every)
        at = F.one_hot(target, 101).bool()
        cosine = cosine.float()
        new = (cosine.clamp(-1, 1).acos() * m1 + m2).cos() - m3
        expected = F.cross_entropy(scale * torch.where(at, new, cosine), target)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        got.backward()
        expected.backward()
        torch.testing.assert_close(mine[0].grad, full[0].grad, rtol=5e-2, atol=2e-3)
        torch.testing.assert_close(mine[1].grad, own(full[1].grad, 0), rtol=5e-2, atol=2e-2)


def half_centers_are_trained_in_their_own_type():
    x, w, target = drawn(16, 32, 101, torch.float32)
    mine = [x.bfloat16().requires_grad_(), own(w, 0).bfloat16().requires_grad_()]
    loss = margin_loss(*mine, target, num_classes=101)
    loss.backward()
    assert loss.dtype == mine[0].grad.dtype == mine[1].grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.float(), dense(x, w, target, MARGINS[0]), rtol=2e-2, atol=1e-1)


def centers_alone_or_features_alone_get_gradients():
    x, w, target = drawn(6, 4, 9)
    for needs in [(True, False), (False, True)]:
        a, b = x.clone().requires_grad_(needs[0]), own(w, 0).clone().requires_grad_(needs[1])
        margin_loss(a, b, target, num_classes=9, chunk_rows=4).backward()
        assert ((a.grad is not None), (b.grad is not None)) == needs


def no_more_than_a_chunk_of_logits_and_no_copy_of_the_centers_exists():
    from torch.utils._python_dispatch import TorchDispatchMode

    made = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out.is_sparse:
                made[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
            return out

    classes, features = 3000 * d.get_world_size(), 64
    x, target = torch.randn(64, features).requires_grad_(), torch.randint(0, classes, (64,))
    w = own(torch.randn(classes, features), 0).clone().requires_grad_()
    with Watch():
        margin_loss(x, w, target, num_classes=classes, chunk_rows=8).backward()
    assert made.pop(w.grad.data_ptr()) == w.nbytes
    made.pop(w.data_ptr(), None)
    assert max(made.values()) < w.nbytes, "which all logits together would have too"
    made.clear()
    w.grad = None
    sampled = sample_classes(classes, 0.1, seed=1)
    with Watch():
        margin_loss(x, w, target, num_classes=classes, chunk_rows=8, sampled=sampled, sparse=True).backward()
    made.pop(w.data_ptr(), None)
    assert max(made.values()) <= (sampled.numel() + 64) * features * 4


def the_layer_trains_like_the_whole_one_and_a_resumed_one_goes_on_with_its_samples():
    classes, features = 53, 6
    x, _, target = drawn(12, features, classes, torch.float32)

    def losses(group, rate, saved=None, steps=4):
        torch.manual_seed(1)
        head = ts.nn.MarginCrossEntropy(features, classes, scale=8.0, sample_rate=rate, seed=4, group=group)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9)
        torch.manual_seed(2)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = head(x, target)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        head.eval()
        return [*found, head(x, target).item()]

    for rate in (1.0, 0.3):
        split, whole = losses(None, rate), losses(ALONE, rate)
        assert split == pytest.approx(whole, rel=1e-5)
        assert split[-1] < split[0]
    torch.manual_seed(2)
    head = ts.nn.MarginCrossEntropy(features, classes, sample_rate=0.3)
    state = torch.get_rng_state()
    first = head.draw_sample()
    assert not torch.equal(first, head.draw_sample())
    torch.set_rng_state(state)
    assert torch.equal(first, head.draw_sample())
    head.seed = 1
    torch.set_rng_state(state)
    assert not torch.equal(first, head.draw_sample())


def what_cannot_be_is_refused():
    x, w, target = drawn(4, 3, 12, torch.float32)
    mine = own(w, 0)

    def refused(message, *args, **kwargs):
        with pytest.raises(ValueError, match=message):
            margin_loss(*(args or (x, mine, target)), num_classes=12, **kwargs)

    refused("m1 is a finite factor above 0, got 0", m1=0)
    refused("scale is a finite factor above 0, got -1", scale=-1)
    refused("m2 is an angle in radians, from 0 to pi, got 4", m2=4)
    refused("m3 is subtracted from a cosine and is 0 or more, got nan", m3=math.nan)
    refused("label_smoothing is between", label_smoothing=2)
    refused("reduction is", reduction="median")
    refused("chunk_rows is a number of rows", chunk_rows=0)
    refused("sparse=True is for the gradient of sampled centers", sparse=True)
    refused("sampled are classes of this rank, as a vector of integers", sampled=torch.ones(3))
    refused(r"sampled are indices into this rank's \d+ classes", sampled=torch.tensor([0, 12]))
    refused("do not fit: got shapes", x[:, :2], mine, target)
    refused("targets have the input's shape", x, mine, target[:2])
    refused("features are torch.float32 and class centers torch.float64", x, mine.double(), target)
    refused("targets are classes, as integers", x, mine, target.float())
    refused("floating point numbers, got torch.int64", x.long(), mine, target)
    if d.get_world_size() > 1:
        refused("classes, got a weight of shape", x, w, target)
    with pytest.raises(ts.OutOfRangeError, match="target 12 on rank 0 is not one of 12 classes"):
        margin_loss(x, mine, target * 0 + 12, num_classes=12, sampled=torch.tensor([0]))
    with pytest.raises(ValueError, match="sample_rate is the share of classes that take part"):
        sample_classes(12, 0.0, seed=1)
    for message, options in [
        ("in_features is a number, 1 or more, got 0", {"in_features": 0}),
        ("num_classes is a number, 1 or more, got True", {"num_classes": True}),
        ("sample_rate is the share of classes", {"sample_rate": 1.5}),
        ("give a sample_rate below 1", {"sparse": True}),
        ("m2 is an angle", {"m2": -0.5}),
    ]:
        with pytest.raises(ValueError, match=message):
            ts.nn.MarginCrossEntropy(**({"in_features": 3, "num_classes": 12} | options))


CHECKS = [
    every_margin_and_reduction_equals_the_dense_loss,
    float32_equals_the_dense_loss_to_a_millionth,
    without_monotonic_the_cosine_rises_again,
    a_feature_on_or_opposite_of_its_center_has_finite_gradients,
    a_sample_equals_the_dense_loss_of_its_classes_and_the_targets,
    a_sample_does_not_depend_on_the_number_of_ranks,
    autocast_multiplies_in_bfloat16_and_does_the_rest_in_float32,
    half_centers_are_trained_in_their_own_type,
    centers_alone_or_features_alone_get_gradients,
    no_more_than_a_chunk_of_logits_and_no_copy_of_the_centers_exists,
    the_layer_trains_like_the_whole_one_and_a_resumed_one_goes_on_with_its_samples,
    what_cannot_be_is_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize(
    "world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)
