"""By hand: what may have an entry for each row is refused unless it is named; one value stays one."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

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
    found = {}  # by the first row: parts run side by side

    def take(x, extra):
        found[x[0].item()] = extra
        return x

    net = DataParallel(Function(take), ["cpu", "cpu"], **options)
    net(torch.arange(4.0)[:, None], extra)
    return [found[row] for row in sorted(found)]


AS_LONG = {
    "list": list("abcd"),
    "tuple": tuple("abcd"),
    "tensors": [torch.ones(7, 2)] * 4,
    "scalars": [torch.tensor(1.0)] * 4,
    "dicts": [{"k": 1}] * 4,
    "records": [{"x": torch.ones(4, 2)}] * 4,
    "ragged": [torch.ones(n, 2) for n in (4, 4, 4, 1)],
}


@pytest.mark.parametrize("extra", AS_LONG.values(), ids=AS_LONG)
def test_what_is_as_long_as_the_batch_is_split_or_whole_or_refused(extra):
    with pytest.raises(
        ConfigError,
        match=r"'extra' is a (list|tuple) as long as the batch, which has 4 rows.*"
        r'samples=\("extra",\) splits it, and broadcast=\("extra",\) gives all of it to each device',
    ):
        seen(extra)
    for name in ("extra", 1):
        assert all(part is extra for part in seen(extra, broadcast=[name]))
        first, second = seen(extra, samples=[name])
        assert type(first) is type(second) is type(extra)
        assert all(a is b for a, b in zip((*first, *second), extra, strict=True))


def test_a_path_or_a_key_at_any_depth_names_a_value():
    extra = {"a": {"names": list("abcd")}, "b": {"names": [1, 2, 3, 4]}}
    with pytest.raises(ConfigError, match=r'\'extra.a.names\' is a list.*samples=\("extra.a.names",\)'):
        seen(extra)
    with pytest.raises(ConfigError, match=r"'extra.b.names' is a list"):
        seen(extra, samples="a.names")
    both = [{"a": {"names": list("ab")}, "b": {"names": [1, 2]}}, extra["b"]]
    assert seen(extra, samples="names")[0] == both[0]
    assert seen(extra, samples="extra")[0] == both[0]
    assert seen(extra, samples="extra.a", broadcast="b")[0] == {"a": both[0]["a"], "b": extra["b"]}


def test_a_list_of_values_is_searched_though_it_is_as_long_as_the_batch():
    values = [torch.arange(4.0), list("abcd"), None, torch.tensor(0.5)]
    with pytest.raises(ConfigError, match=r"'extra.1' is a list as long as the batch"):
        seen(values)
    first, _ = seen(values, samples="extra.1")
    assert first == [pytest.approx(torch.arange(2.0)), ["a", "b"], None, 0.5]
    first, _ = seen([{"x": torch.arange(4.0)}, {"y": torch.ones(4)}, 1, 2])
    assert first[0]["x"].tolist() == [0, 1]


def test_a_name_within_a_list_of_dicts_makes_it_one_of_values():
    levels = [{"x": torch.arange(4.0) * k} for k in range(4)]
    assert [level["x"].tolist() for level in seen(levels, samples="x")[0]] == [[0, k] for k in range(4)]


@pytest.mark.parametrize(
    "extra",
    [range(4), deque("abcd"), {1, 2, 3, 4}, dict.fromkeys("abcd"), bytearray(4)],
    ids=lambda extra: type(extra).__name__,
)
def test_what_cannot_be_cut_is_refused_and_can_be_broadcast(extra):
    kind = type(extra).__name__
    with pytest.raises(ConfigError, match=f"'extra' is a {kind} as long as the batch"):
        seen(extra)
    assert all(part is extra for part in seen(extra, broadcast="extra"))
    if kind != "dict":
        with pytest.raises(ConfigError, match=f"a {kind} cannot be cut; make it a list"):
            seen(extra, samples="extra")


@pytest.mark.parametrize(
    "extra",
    ["abcd", b"abcd", torch.Size([4, 1, 1, 1]), nn.Sequential(*[nn.Identity()] * 4), list("abc"), {"k": 4}],
    ids=lambda extra: type(extra).__name__,
)
def test_one_value_and_what_has_another_length_is_in_every_part(extra):
    assert all(part is extra for part in seen(extra))


def test_an_object_around_a_tensor_with_rows_is_refused():
    with pytest.raises(ConfigError, match="'extra' is a SimpleNamespace"):
        seen(SimpleNamespace(x=torch.ones(4, 2)))


def test_arrays_are_cut_by_rows_like_tensors():
    first, second = seen(np.arange(4))
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])
    assert all(part == 3 for part in seen(np.array(3)))


@pytest.mark.parametrize(("extra", "got"), [(torch.ones(7, 2), 7), (np.ones(7), 7), (torch.ones(2), 2)])
def test_other_rows_than_the_batch_has_are_refused_unless_they_are_broadcast(extra, got):
    with pytest.raises(
        ConfigError,
        match=rf"same number of rows along dim 0, got 4 and {got} \('extra': .*broadcast=\(\"extra\",\)",
    ):
        seen(extra)
    assert all(part is extra for part in seen(extra, broadcast="extra"))


def test_a_tensor_without_the_dimension_of_the_rows_is_refused():
    net = DataParallel(Function(lambda x, e: x + e), ["cpu", "cpu"], dim=1)
    with pytest.raises(ConfigError, match="along dim 1, got 4 and none"):
        net(torch.ones(3, 4), torch.ones(4))
    assert net(torch.ones(3, 4), torch.tensor(1.0)).sum() == 24


def test_samples_must_be_as_many_as_there_are_rows():
    with pytest.raises(ConfigError, match=r"what samples= names.* got 4 and 3 \('extra': a list of 3\)"):
        seen(list("abc"), samples="extra")


def test_a_list_of_samples_is_split_without_any_other_rows():
    net = DataParallel(Function(lambda x, _: torch.stack([row.sum() for row in x])), ["cpu"] * 2, samples="x")
    assert net([torch.ones(n) for n in (1, 5, 2)]).tolist() == [1, 5, 2]
    assert net([{"x": torch.tensor(1.0)}["x"]]).tolist() == [1]


def test_a_list_of_dicts_alone_is_refused_and_lists_of_tensors_are_cut_as_in_torch():
    images = [{"image": torch.ones(3, 2)} for _ in range(4)]
    with pytest.raises(ConfigError, match="'x' is a list, and no tensors are outside of it"):
        DataParallel(Function(lambda x, _: x), ["cpu"] * 2)(images)
    with pytest.raises(ConfigError, match=r'got 3 and 4 .*so is a list with .*: samples=\("x",\)'):
        DataParallel(Function(lambda x, _: x), ["cpu"] * 2)([torch.ones(3), torch.ones(4)])
    pair = DataParallel(Function(lambda x, _: x), ["cpu"] * 2)([torch.ones(2, 1), torch.ones(2, 1)])
    assert [part.shape for part in pair] == [(2, 1)] * 2


def test_one_name_cannot_stand_for_both():
    with pytest.raises(ConfigError, match=r"samples and broadcast both name 'extra'"):
        seen(None, samples=["extra"], broadcast=["extra"])


def test_other_lengths_and_values_of_several_rows_are_as_they_were():
    assert seen(["a", "b"]) == [["a", "b"]] * 2
    assert seen("abcd") == ["abcd"] * 2
    pair = torch.arange(2.0)[:, None], torch.arange(2.0)[:, None]
    net = DataParallel(Function(lambda x, e: x + e[0] + e[1]), ["cpu", "cpu"])
    assert net(torch.zeros(2, 1), pair).flatten().tolist() == [0, 2]


def test_functions_refuse_what_the_wrapper_refuses():
    inputs = {"x": torch.ones(4), "names": list("abcd")}
    with pytest.raises(ConfigError, match=r'samples=\("inputs.names",\) splits it'):
        scatter(inputs, ["cpu", "cpu"])
    pieces = scatter(inputs, ["cpu", "cpu"], samples="names")
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"]]
    assert scatter(inputs, ["cpu", "cpu"], broadcast="inputs.names")[1]["names"] is inputs["names"]
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
