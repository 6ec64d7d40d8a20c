"""Batches of every shape move to a device."""

from collections import UserDict, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from tp_core import recursive_pin, recursive_to, tree_leaves
from tp_core.errors import CycleError, DeviceError, TransferError

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - the untyped kind has to work as well
META = torch.device("meta")


@dataclass(frozen=True)
class Batch:
    x: Any
    y: Any


class Recorder:
    """Notes how its methods were called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


class Full(Recorder):
    def to(self, device: Any, *, non_blocking: bool = False) -> "Full":
        self.calls.append((device, non_blocking))
        return self


class DeviceOnly(Recorder):
    def to(self, device: Any) -> "DeviceOnly":
        self.calls.append(device)
        return self


class KeywordOnly(Recorder):
    def to(self, *, device: Any, non_blocking: bool = False) -> "KeywordOnly":
        self.calls.append((device, non_blocking))
        return self


class Anything(Recorder):
    def to(self, *args: Any, **kwargs: Any) -> "Anything":
        self.calls.append((args, kwargs))
        return self


class CudaOnly(Recorder):
    def cuda(self, device: Any = None) -> "CudaOnly":
        self.calls.append(("cuda", device))
        return self


class CudaAndCpu(CudaOnly):
    def cuda(self, non_blocking: bool = False) -> "CudaAndCpu":
        self.calls.append(("cuda", non_blocking))
        return self

    def cpu(self, memory_format: Any = None) -> "CudaAndCpu":
        self.calls.append(("cpu", memory_format))
        return self


tensors = st.builds(torch.zeros, st.integers(0, 3))
batches = st.recursive(
    tensors | st.text(max_size=2) | st.none() | st.integers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(UserDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(MappingProxyType),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.tuples(inner, inner).map(lambda pair: Batch(*pair)),
    ),
    max_leaves=10,
)


@given(batches)
def test_every_tensor_moves_and_all_else_stays(batch: Any) -> None:
    moved = list(tree_leaves(recursive_to(batch, META)))
    original = list(tree_leaves(batch))
    assert len(moved) == len(original)
    for new, old in zip(moved, original, strict=True):
        if isinstance(old, Tensor):
            assert (new.device, new.shape) == (META, old.shape)
        else:
            assert new is old


@given(batches)
def test_a_batch_that_is_there_already_is_returned_itself(batch: Any) -> None:
    assert recursive_to(batch, "cpu") is batch
    assert recursive_to(batch, torch.device("cpu", 0), non_blocking=True) is batch


def test_a_shared_tensor_moves_once() -> None:
    t = torch.zeros(2)
    batch: Any = [t, (t, t.clone())]
    a, (b, c) = recursive_to(batch, META)
    assert a is b
    assert b is not c


def test_gradients_flow_through_the_move_of_a_parameter() -> None:
    moved = recursive_to({"w": nn.Parameter(torch.ones(2, dtype=torch.float32))}, META)
    assert moved["w"].grad_fn is not None


def test_a_module_moves_in_place() -> None:
    class Quiet(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            super().to(*args, **kwargs)

    for model in (nn.Linear(2, 2), Quiet(2, 2)):
        assert recursive_to([model], META)[0] is model
        assert model.weight.device == META


def test_a_packed_sequence_is_moved_by_its_own_method() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = recursive_to({"p": packed}, META)["p"]
    assert type(moved) is type(packed)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"  # torch wants it there


def test_a_mapping_with_its_own_method_is_left_to_it() -> None:
    class Encoding(UserDict[str, Any]):
        def to(self, device: Any) -> "Encoding":
            return Encoding({"moved": device})

    assert recursive_to([Encoding(a=1)], META)[0].data == {"moved": META}


def test_storage_takes_its_device_by_keyword_alone() -> None:
    batch = [torch.zeros(2).untyped_storage()]
    assert recursive_to(batch, "cpu") is batch


def test_a_method_gets_the_arguments_that_it_accepts() -> None:
    batch = [Full(), DeviceOnly(), KeywordOnly(), Anything()]
    assert recursive_to(batch, META, non_blocking=True) is batch
    assert [item.calls for item in batch] == [
        [(META, True)],
        [META],
        [(META, True)],
        [((META,), {"non_blocking": True})],
    ]


def test_copies_to_the_host_are_waited_for() -> None:
    batch = Full()
    recursive_to([batch], "cpu", non_blocking=True)
    assert batch.calls == [(torch.device("cpu"), False)]


def test_a_type_error_from_inside_a_method_comes_through_and_the_method_ran_once() -> None:
    class Broken(Recorder):
        def to(self, device: Any, non_blocking: bool = False) -> None:
            self.calls.append(device)
            raise TypeError("from inside")

    batch = Broken()
    with pytest.raises(TypeError, match="from inside"):
        recursive_to(batch, META)
    assert len(batch.calls) == 1


def test_a_method_that_returns_nothing_is_an_error_that_says_what_to_return() -> None:
    class Forgetful:
        def to(self, device: Any) -> None: ...

    with pytest.raises(TransferError, match=r"Forgetful\.to returned None; let it return .*self"):
        recursive_to([Forgetful()], "cpu")


def test_classes_and_fields_named_to_are_left_untouched() -> None:
    @dataclass
    class Letter:
        to: Any
        text: str = ""

    letter = Letter(to=torch.zeros(1))
    assert recursive_to([Full, nn.Linear, Tensor], META) == [Full, nn.Linear, Tensor]
    assert recursive_to(letter, META).to.device == META


def test_an_object_with_cuda_alone_stays_when_the_device_is_the_cpu() -> None:
    item = CudaOnly()
    assert recursive_to(item, "cpu") is item
    assert item.calls == []


def test_an_object_with_cuda_alone_gets_the_device() -> None:
    item = CudaOnly()
    assert recursive_to([item], "cuda:1")[0] is item
    assert item.calls == [("cuda", torch.device("cuda:1"))]


def test_an_object_with_cpu_is_called_without_a_device() -> None:
    item = CudaAndCpu()
    recursive_to(item, "cpu")
    assert item.calls == [("cpu", None)]


def test_a_cuda_method_without_device_runs_under_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[int] = []

    @contextmanager
    def device_index(index: int) -> Any:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    item = CudaAndCpu()
    recursive_to(item, "cuda:1", non_blocking=True)
    assert entered == [1]
    recursive_to(item, "cuda")
    assert entered == [1]
    assert item.calls == [("cuda", True), ("cuda", False)]


def test_an_object_without_a_method_for_the_device_type_is_an_error() -> None:
    with pytest.raises(TransferError, match=r"CudaOnly to xpu:0: it has \.cuda .* nor \.xpu; give"):
        recursive_to([CudaOnly()], "xpu:0")


def test_a_tensor_subclass_keeps_its_type() -> None:
    class Labelled(Tensor):
        pass

    item = torch.zeros(2).as_subclass(Labelled)
    assert type(recursive_to([item], META)[0]) is Labelled
    assert recursive_to(item, "cpu") is item


def test_a_container_that_contains_itself_is_an_error() -> None:
    batch: list[Any] = [torch.zeros(1)]
    batch.append(batch)
    with pytest.raises(CycleError, match=r"obj \(a list\) contains itself, as obj\[1\]"):
        recursive_to(batch, META)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", r"device='gpu' names no device; this process sees .*; write 'cpu'"),
        (True, "device=True is of type bool"),
        (None, "device=None is of type NoneType"),
        (["cpu"], "device=.'cpu'. is of type list"),
    ],
)
def test_what_is_no_device_is_an_error_that_says_so(device: Any, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        recursive_to([], device)


# -- page-locked memory ---------------------------------------------------------------------------


class FakeTensor(Tensor):
    """A tensor that can be pinned without an accelerator."""

    pinned = False

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned

    def pin_memory(self, device: Any = None) -> Any:
        new: Any = self.clone()
        new.pinned = True
        return new


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)


def without_accelerator(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)


@pytest.mark.parametrize("found", [None, torch.device("mps")])
def test_nothing_is_pinned_where_that_has_no_use(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    without_accelerator(monkeypatch, found)
    batch = [torch.zeros(1), Pinnable()]
    assert recursive_pin(batch) is batch


@pytest.mark.usefixtures("accelerator")
def test_tensors_on_the_cpu_and_what_can_pin_itself_are_pinned() -> None:
    t, elsewhere = torch.zeros(2).as_subclass(FakeTensor), torch.zeros(2, device=META)
    result: Any = recursive_pin({"a": (t, t), "b": Pinnable(), "c": "text", "d": elsewhere})
    assert result["a"][0] is result["a"][1]
    assert result["a"][0].pinned
    assert (result["b"], result["c"], result["d"]) == ("pinned", "text", elsewhere)


@pytest.mark.usefixtures("accelerator")
def test_what_is_pinned_already_is_returned_itself() -> None:
    t = torch.zeros(2).as_subclass(FakeTensor)
    t.pinned = True
    batch = {"a": [t]}
    assert recursive_pin(batch) is batch


@pytest.mark.usefixtures("accelerator")
def test_a_pin_memory_that_returns_nothing_is_an_error() -> None:
    class Forgetful:
        def pin_memory(self) -> None: ...

    with pytest.raises(TransferError, match=r"Forgetful\.pin_memory returned None; let it return"):
        recursive_pin([Forgetful()])
