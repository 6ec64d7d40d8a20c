"""By hand: what may have an entry for each row is refused unless it is named; one value stays one."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from tp_core.errors import ConfigError
from tp_dp_gather import DataParallel, data_parallel, gather, scatter


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, extra=None):
        return self.function(x, extra)


def seen(extra, **options):
    """Return what each part got beside its rows of a batch of 4."""
    found = []
    net = DataParallel(Function(lambda x, e: (found.append(e), x)[1]), ["cpu", "cpu"], **options)
    net(torch.arange(4.0)[:, None], extra)
    return found


@pytest.mark.parametrize(
    "extra",
    [
        list("abcd"),
        tuple("abcd"),
        np.arange(4),
        [torch.ones(7, 2)] * 4,
        [{"k": 1}] * 4,
        {"deep": [1, 2, 3, 4]},
    ],
    ids=["list", "tuple", "array", "tensors", "dicts", "deep"],
)
def test_as_many_entries_as_rows_are_refused_unless_they_are_named(extra):
    with pytest.raises(ConfigError, match=r"argument 'extra': it is a .* of 4, and there are as many rows"):
        seen(extra)
    for name in ("extra", 1):
        assert all(part is extra for part in seen(extra, broadcast=[name]))


def test_other_lengths_and_values_of_several_rows_are_as_they_were():
    assert seen(["a", "b"]) == [["a", "b"]] * 2
    assert seen("abcd") == ["abcd"] * 2
    pair = torch.arange(2.0)[:, None], torch.arange(2.0)[:, None]
    net = DataParallel(Function(lambda x, e: x + e[0] + e[1]), ["cpu", "cpu"])
    assert net(torch.zeros(2, 1), pair).flatten().tolist() == [0, 2]


def test_functions_refuse_what_the_wrapper_refuses():
    with pytest.raises(ConfigError, match="as many rows"):
        scatter({"x": torch.ones(4), "names": list("abcd")}, ["cpu", "cpu"])
    found = data_parallel(
        Function(lambda x, e: x * len(e)), (torch.ones(4), list("abcd")), ["cpu"] * 2, broadcast="extra"
    )
    assert found.tolist() == [4.0] * 4


@pytest.mark.parametrize("lengths", [[3], [2, 5, 1], [4, 4, 2, 1]])
def test_a_packed_sequence_is_cut_by_sequences(lengths):
    rows = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in lengths]
    is_sorted = lengths == sorted(lengths, reverse=True)
    packed = pack_sequence(rows, enforce_sorted=is_sorted)
    rnn = nn.GRU(3, 2, dtype=torch.float64)
    expected = rnn(packed)[0]
    net = DataParallel(Function(lambda x, _: rnn(x)[0]), ["cpu"] * 2)
    found = net(packed)
    assert type(found) is type(packed)
    for a, b in zip(unpack_sequence(found), unpack_sequence(expected), strict=True):
        torch.testing.assert_close(a, b)
    pieces = scatter(packed, ["cpu"] * 2)
    torch.testing.assert_close(gather(pieces, "cpu").data, packed.data)


def test_functions_take_a_packed_sequence_as_one_argument():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    module = Function(lambda x, _: x)
    assert torch.equal(data_parallel(module, packed, ["cpu"] * 2).data, packed.data)
    net = DataParallel(module, ["cpu"] * 2)
    for output in net.parallel_apply([module, module], [packed, packed], None):
        assert type(output) is type(packed)


def test_packed_sequences_are_no_parts():
    net = DataParallel(Function(lambda x, _: x), ["cpu"] * 2, inputs_are_scattered=True)
    with pytest.raises(ConfigError, match="got a PackedSequence"):
        net(pack_sequence([torch.ones(2)]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_are_cut_and_joined_with_gradients(layout):
    rows = [torch.ones(n, 2, requires_grad=True) for n in (1, 4, 2)]
    nested = torch.nested.as_nested_tensor(rows, layout=layout)
    found = DataParallel(Function(lambda x, _: x * 2), ["cpu"] * 2)(nested)
    assert [len(row) for row in found.unbind()] == [1, 4, 2]
    sum(row.sum() for row in found.unbind()).backward()
    assert all(row.grad.eq(2).all() for row in rows)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor")
def test_sparse_tensors_are_cut_where_they_can_be():
    x = torch.eye(5)
    found = DataParallel(Function(lambda x, _: x), ["cpu"] * 2)(x.to_sparse())
    assert torch.equal(found.to_dense(), x)
    with pytest.raises(ConfigError, match=r"layout torch.sparse_csr cannot be cut into rows.*to_sparse_coo"):
        seen(x[:4].to_sparse_csr())


@dataclass
class Batch:
    x: torch.Tensor
    rows: int = field(init=False)

    def __post_init__(self):
        self.rows = len(self.x)


def test_a_dataclass_derives_its_fields_from_each_part():
    found = []
    DataParallel(Function(lambda b, _: found.append(b.rows)), ["cpu"] * 4)(Batch(torch.ones(10, 2)))
    assert sorted(found) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x, _: torch.ones(5, len(x), 3), "the rows are along dim 1: return them along dim 0"),
        (lambda x, _: torch.ones(len(x), int(x[0, 0]) + 1), "pad them to one length"),
        (lambda x, _: [x.sum()] * len(x), r"return one tensor, torch.stack"),
    ],
    ids=["time first", "padded", "scalars"],
)
def test_outputs_whose_rows_are_elsewhere_are_refused(output, message):
    with pytest.raises(ConfigError, match=message):
        DataParallel(Function(output), ["cpu", "cpu"])(torch.arange(4.0)[:, None])


def test_a_loss_and_a_score_stay_two_values():
    loss, score = DataParallel(Function(lambda x, _: (x.sum(), x.mean())), ["cpu", "cpu"])(torch.ones(4, 1))
    assert (loss.tolist(), score.tolist()) == ([2, 2], [1, 1])
