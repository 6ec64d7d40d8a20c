"""Gradients of a mixed precision do not depend on which replica's thread was first."""

import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas, autocast_like_first
from tp_core.replicas._caller import autocasts  # private: types of devices that cannot be had here

WAIT_S = 20


def gradients(forward, *, force_copies, cache_enabled=True):
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=force_copies)
    parts = list(torch.randn(64, 16).split([40, 24]))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
        outputs = replicas.run(forward, list(enumerate(parts)))
        assert torch.is_autocast_cache_enabled() is cache_enabled
    torch.cat([y.float() for y in outputs]).square().mean().backward()
    return model.weight.grad


def one_after_the_other(first):
    """Return a forward whose second replica begins when the first is over."""
    is_over = threading.Event()

    def forward(replica, numbered):
        number, x = numbered
        if number != first:
            assert is_over.wait(WAIT_S)
        y = replica(x)
        is_over.set()
        return y

    return forward


@pytest.mark.parametrize("force_copies", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("first", [0, 1])
def test_no_replica_uses_the_lowered_weight_of_another(first, force_copies):
    alone = gradients(lambda r, p: r(p[1]), force_copies=force_copies, cache_enabled=False)
    found = gradients(one_after_the_other(first), force_copies=force_copies)
    torch.testing.assert_close(found, alone, rtol=0, atol=0)


def twice(end_between):
    """Return a forward in which replica 0 uses its weight before and after replica 1 leaves a context."""
    has_begun, is_over = threading.Event(), threading.Event()

    def forward(replica, numbered):
        number, x = numbered
        if number == 1:
            assert has_begun.wait(WAIT_S)
            if end_between:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    pass
            is_over.set()
            return replica(x)
        y = replica(x)
        has_begun.set()
        assert is_over.wait(WAIT_S)
        return replica(y)

    return forward


def test_the_lowered_weights_of_the_callers_replica_stay_until_its_end():
    expected = gradients(twice(False), force_copies=True)
    torch.testing.assert_close(gradients(twice(True), force_copies=True), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("entered", "expected"),
    [
        ({"cpu": torch.bfloat16}, {"cpu": torch.bfloat16, "cuda": torch.bfloat16}),
        ({"cpu": torch.bfloat16, "cuda": torch.float16}, {"cpu": torch.bfloat16, "cuda": torch.float16}),
        ({"cuda": torch.float16}, {"cuda": torch.float16}),
        ({}, {}),
    ],
    ids=["the first device's", "both", "the other's", "none"],
)
def test_devices_of_another_type_compute_in_the_precision_of_the_first(entered, expected):
    found = {}

    def thread(contexts):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(torch.device("cpu")))
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    found[kind] = torch.get_autocast_dtype(kind)

    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in entered}
    try:
        for kind, dtype in entered.items():
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        contexts = autocasts(("cpu", "cuda"))
        with autocast_like_first([torch.device("cpu"), torch.device("cuda")]):
            here = {k: torch.get_autocast_dtype(k) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)}
    finally:
        for kind, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
    other = threading.Thread(target=thread, args=(contexts,))
    other.start()
    other.join(800)
    assert found == here == expected
