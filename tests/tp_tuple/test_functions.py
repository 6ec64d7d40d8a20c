"""recursive_cuda, Batch, Tuplewise, tuple_fn."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from tp_core.errors import ConfigError, TransferError
from tp_tuple import Batch, Tuplewise, cuda_attrs, cuda_fields, recursive_cuda, tuple_fn, tuplewise


class Graphs(Batch):
    def __init__(self, x, name):
        self.x = x
        self.name = name
        self.more = {"edges": [torch.zeros(2)]}


def test_recursive_cuda_moves_what_is_nested():
    moved = recursive_cuda({"a": [torch.zeros(1), (torch.ones(2), "s")], "b": 3}, "meta", non_blocking=True)
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["a"][1][1] == "s"
    assert moved["b"] == 3


def test_cuda_attrs_moves_the_object_itself():
    graphs = Graphs(torch.zeros(2), "g")
    assert cuda_attrs(graphs, "meta") is graphs
    assert graphs.x.device.type == graphs.more["edges"][0].device.type == "meta"
    assert cuda_fields is cuda_attrs


def test_cuda_attrs_moves_frozen_dataclasses():
    @dataclass(frozen=True)
    class Frozen:
        x: torch.Tensor

    assert cuda_attrs(Frozen(torch.zeros(1)), "meta").x.device.type == "meta"


def test_a_batch_moves_in_place_by_cuda_and_as_a_copy_by_to():
    graphs = Graphs(torch.zeros(2), "g")
    there = graphs.to("meta")
    assert (there.x.device.type, graphs.x.device.type) == ("meta", "cpu")
    assert type(there) is Graphs
    assert graphs.cuda("meta") is graphs
    assert graphs.x.device.type == "meta"


def test_a_batch_in_a_batch_moves_along():
    assert recursive_cuda([Graphs(torch.zeros(1), "g")], "meta")[0].x.device.type == "meta"


def test_a_batch_can_be_pinned():
    pinned = Graphs(torch.zeros(2), "g").pin_memory()
    assert pinned.name == "g"
    assert pinned.x.is_pinned() == torch.accelerator.is_available()


def test_tuplewise_indexes_and_looks_up():
    assert Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4]
    assert Tuplewise([{"a": 1}, {"a": 2}])["a"] == [1, 2]
    assert Tuplewise((torch.zeros(2), torch.zeros(3))).shape == [(2,), (3,)]


def test_tuplewise_counts_iterates_copies_and_shows():
    both = Tuplewise([1, 2])
    assert (len(both), list(both), repr(both)) == (2, [1, 2], "Tuplewise([1, 2])")
    assert list(copy.copy(both)) == [1, 2]
    assert isinstance(both, Tuplewise)
    with pytest.raises(AttributeError, match="nothing"):
        _ = both.nothing


def test_tuplewise_takes_lists_and_tuples_alone():
    with pytest.raises(ConfigError, match="Tuplewise takes a list or tuple, got str: 'ab'"):
        Tuplewise("ab")


@pytest.mark.parametrize("parallel", [False, True])
def test_tuple_fn_takes_and_returns_tuples(parallel):
    def foo(x, y, scale=1):
        return (x + y) * scale, x * y

    a, b = tuple_fn(foo, parallel=parallel)((1, 2), (3, 4), scale=(10, 100))
    assert (a, b) == ((40, 600), (3, 8))
    assert tuple_fn(lambda x: x + 1, parallel=parallel)([1, 2, 3]) == (2, 3, 4)


def test_tuple_fn_is_a_decorator_with_and_without_options():
    @tuple_fn
    def plain(x):
        "Its words."
        return x

    @tuple_fn(parallel=True)
    def at_once(x):
        return x

    assert plain((1, 2)) == at_once((1, 2)) == (1, 2)
    assert plain.__doc__ == "Its words."


def test_parallel_parts_run_at_once_with_the_callers_grad_mode():
    barrier = threading.Barrier(3, timeout=800)

    @tuple_fn(parallel=True)
    def meet(x):
        barrier.wait()
        return x, torch.is_grad_enabled()

    with torch.no_grad():
        assert meet((1, 2, 3)) == ((1, 2, 3), (False, False, False))


def test_tuple_fn_refuses_unequal_parts():
    with pytest.raises(ConfigError, match="argument 1 must have 2 parts like the arguments before it, got 3"):
        tuple_fn(lambda x, y: x)((1, 2), (1, 2, 3))
    with pytest.raises(ConfigError, match="argument 0 must have at least 1 parts"):
        tuple_fn(lambda x: x)(())
    with pytest.raises(ConfigError, match="same number of values"):
        tuple_fn(lambda x: (x,) * x)((1, 2))
    with pytest.raises(ConfigError, match=r"got \[2, None\]"):
        tuple_fn(lambda x: (1, 2) if x else 3)((1, 0))
    with pytest.raises(ConfigError, match="expected at least one argument"):
        tuple_fn(lambda: 1)()


def test_tuplewise_is_a_function_too():
    assert tuplewise([(0, 1), (2, 3)])[1] == [1, 3]


class Slotted(Batch):
    __slots__ = ("__private", "unset", "x")

    def __init__(self, x):
        self.x = x
        self.__private = {"edges": x}

    def devices(self):
        return self.x.device.type, self.__private["edges"].device.type


class SlottedChild(Slotted):
    __slots__ = "y"  # noqa: PLC0205 - Python allows one name alone

    def __init__(self, x):
        super().__init__(x)
        self.y = x
        self.z = x


@pytest.mark.parametrize("cls", [Slotted, SlottedChild])
def test_attributes_in_slots_move_too(cls):
    batch = cls(torch.zeros(2))
    there = batch.to("meta")
    assert (there.devices(), batch.devices()) == (("meta",) * 2, ("cpu",) * 2)
    assert batch.cuda("meta").devices() == ("meta",) * 2
    if cls is SlottedChild:
        assert (there.y.device.type, there.z.device.type) == ("meta", "meta")
    assert cls(torch.zeros(2)).pin_memory().devices() == ("cpu",) * 2


def test_an_object_without_attributes_is_refused():
    with pytest.raises(TransferError, match="cannot move the attributes of a list: it has none"):
        cuda_attrs([torch.zeros(1)], "meta")


class OnlyCuda:
    device = None

    def cuda(self, device=None, **options):
        self.device = (device, options)
        return self if options or device != torch.device("meta") else None


def test_an_object_with_cuda_alone_gets_the_device_whichever_it_is():
    one, two = recursive_cuda([OnlyCuda(), {"two": OnlyCuda()}], "cpu")
    assert one.device == (torch.device("cpu"), {})
    assert recursive_cuda(OnlyCuda(), "meta", non_blocking=True).device[1] == {"non_blocking": True}
    assert recursive_cuda(OnlyCuda(), "cpu", non_blocking=True).device[1] == {}  # the host waits
    assert two["two"].device[0] == torch.device("cpu")
    with pytest.raises(TransferError, match=r"OnlyCuda.cuda returned None"):
        recursive_cuda(OnlyCuda(), "meta")


def test_an_object_with_to_as_well_moves_by_that():
    class Both(OnlyCuda):
        def to(self, device):
            return "moved by to"

    assert recursive_cuda(Both(), "cpu") == "moved by to"
