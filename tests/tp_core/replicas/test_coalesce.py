"""Many tensors in few transfers: values, layouts, and who may be written."""

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas

# private: transfers between devices that cannot be had here
from tp_core.replicas._mirror import BUCKET_NBYTES, _Sum, copy_coalesced, move_in_buckets

CPU = torch.device("cpu")


def tensors():
    torch.manual_seed(0)
    return [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(6, 6)[::2, ::3],
        torch.randn(1, 4, 1, 5).to(memory_format=torch.channels_last),
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(2, 3).half(),
    ]


def test_what_travels_in_flat_pieces_keeps_its_layout():
    given = tensors()
    moved = {}
    for bucket, arrived in move_in_buckets(given, CPU, force_flat=True):
        moved.update(zip(bucket, arrived, strict=True))
    assert sorted(moved) == list(range(len(given)))
    for before, after in ((given[i], moved[i]) for i in moved):
        assert torch.equal(before, after)
        if before.untyped_storage().nbytes() == before.nbytes:  # no gaps
            assert strides_that_matter(after) == strides_that_matter(before)


def strides_that_matter(tensor):
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("force_flat", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_one_flat_piece_serves_all_rows(rows, force_flat):
    sources = [*tensors(), torch.randn(BUCKET_NBYTES // 4 + 1)]
    targets = [[torch.zeros_like(s) for s in sources] for _ in range(rows)]
    copy_coalesced(targets, sources, force_flat=force_flat)
    for row in targets:
        assert all(torch.equal(a, b) for a, b in zip(row, sources, strict=True))
    copy_coalesced([], [])


@pytest.mark.parametrize("force_flat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_sum_never_writes_what_it_was_given(force_flat):
    large = torch.ones(BUCKET_NBYTES // 4 + 1)
    sparse = torch.eye(3).to_sparse()
    rows = [[torch.full((2, 2), float(i)), large * i, sparse * i] for i in range(1, 5)]
    before = [[g.clone() for g in row] for row in rows]
    total = _Sum(4)
    with torch.no_grad():
        for row in rows:
            total.add(list(zip([0, 2, 3], row, strict=True)), CPU, force_flat=force_flat)
    assert total.values[1] is None
    assert torch.equal(total.values[0], torch.full((2, 2), 10.0))
    assert total.values[2].unique().tolist() == [10.0]
    assert torch.equal(total.values[3].to_dense(), 10 * torch.eye(3))
    for row, old in zip(rows, before, strict=True):
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(row, old, strict=True))


def test_later_gradients_are_added_in_place():
    total = _Sum(1)
    places = []
    with torch.no_grad():
        for _ in range(4):
            total.add([(0, torch.ones(8))], CPU, force_flat=False)
            places.append(total.values[0].data_ptr())
    assert places[1] == places[2] == places[3]


@pytest.mark.parametrize("force_copies", [True, "flat"])
def test_second_derivatives_go_through_the_sum(force_copies):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    model.to(memory_format=torch.channels_last)
    x = torch.randn(7, 2, 4, 4, dtype=torch.double)
    replicas = Replicas(model, ["cpu"] * 4, force_copies=force_copies)

    def second(output):
        parameters = list(model.parameters())
        first = torch.autograd.grad(output.square().sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    outputs = replicas.run(lambda replica, part: replica(part), x.tensor_split(4))
    torch.testing.assert_close(second(torch.cat(outputs)), second(model(x)))


def test_replicas_that_changed_alike_are_copied_together_and_others_alone():
    model = nn.Linear(3, 2)
    replicas = Replicas(model, ["cpu"] * 4, force_copies="flat")
    parts = list(torch.ones(4, 1, 3))

    def outputs(count):
        return replicas.run(lambda replica, part: replica(part), parts[:count])

    outputs(2)
    with torch.no_grad():
        model.weight.add_(1)
    expected = model(parts[0])
    assert all(torch.equal(y, expected) for y in outputs(4))
    assert [mirror.copied for mirror in replicas._cache.mirrors] == [3, 2, 2]
