"""Nested containers are walked, rebuilt, and kept where nothing changed."""

import os
from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core import containers, tree_leaves, tree_map
from tp_core._trees import PerType
from tp_core.errors import CycleError, TransferError

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - the untyped kind has to work as well


class Checked(NamedTuple):
    x: int
    y: int = 0


class Grumpy(Checked):
    def __new__(cls, total: int) -> Self:
        return tuple.__new__(cls, (total, 0))


@dataclass
class Sample:
    a: Any
    b: Any = 0


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = field(default=5, init=False)


@dataclass(slots=True)
class Slotted:
    a: Any
    unset: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    a: Any
    b: Any = 0


class ModelOutputLike(OrderedDict[str, Any]):
    """A mapping that keeps its items as attributes too, as the outputs of transformers do."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, f.name)) is not None:
                super().__setitem__(f.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        make, _, *rest = tuple(super().__reduce__())
        return make, tuple(getattr(self, f.name) for f in fields(self)), *rest  # type: ignore[arg-type]


@dataclass
class Output(ModelOutputLike):
    loss: Any = None
    logits: Any = None


class AttributeDict(dict[str, Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Store(MutableMapping[str, Any]):
    """A mapping whose plain copy would share the storage."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Unmakeable(Store):
    def __init__(self) -> None:
        super().__init__({"a": 1})


class Tagged(list[Any]):
    tag: str = "none"


class TaggedTuple(tuple[Any, ...]):
    tag: str = "none"


def bump(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value


nested = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(UserDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(MappingProxyType),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(lambda pair: FrozenSlotted(*pair)),
        inner.map(Frozen),
    ),
    max_leaves=12,
)


@given(nested)
def test_a_container_in_which_nothing_changed_is_the_very_same_object(obj: Any) -> None:
    assert tree_map(lambda value: value, obj) is obj


@given(nested)
def test_each_leaf_is_mapped_and_the_structure_stays(obj: Any) -> None:
    mapped = tree_map(Leaf, obj)
    assert [leaf.value for leaf in tree_leaves(mapped)] == list(tree_leaves(obj))
    assert tree_map(lambda leaf: leaf.value, mapped) == obj


@given(nested)
def test_the_original_is_left_as_it_was(obj: Any) -> None:
    before = list(tree_leaves(obj))
    tree_map(Leaf, obj)
    assert list(tree_leaves(obj)) == before


class Leaf:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_named_tuples_keep_their_type_whatever_their_constructor_takes() -> None:
    assert tree_map(bump, Point(1, [2])) == Point(2, [3])
    result = tree_map(bump, Grumpy(1))
    assert type(result) is Grumpy
    assert result == (2, 1)


def test_result_tuples_of_torch_keep_their_type() -> None:
    result = tree_map(lambda t: t + 1, torch.ones(2, 3).max(dim=0))
    assert type(result) is torch.return_types.max
    assert result.values.tolist() == [2, 2, 2]


def test_hidden_fields_of_a_struct_sequence_are_kept() -> None:
    stat = os.stat_result(range(10), {"st_atime_ns": 77})
    assert tree_map(bump, stat).st_atime_ns == 77


def test_subclasses_keep_their_attributes() -> None:
    tagged, tagged_tuple = Tagged([1]), TaggedTuple((1,))
    tagged.tag = tagged_tuple.tag = "mine"
    for obj in (tagged, tagged_tuple):
        result = tree_map(bump, obj)
        assert type(result) is type(obj)
        assert list(result) == [2]
        assert result.tag == "mine"


@pytest.mark.parametrize("cls", [dict, OrderedDict, UserDict, MappingProxyType, ChainMap, Store])
def test_mappings_keep_their_type_and_order(cls: Any) -> None:
    obj = cls({"b": 1, "a": [2]})
    result = tree_map(bump, obj)
    assert type(result) is cls
    assert list(result) == list(obj)
    assert dict(result) == {"b": 2, "a": [3]}
    assert dict(obj) == {"b": 1, "a": [2]}


def test_a_defaultdict_keeps_its_factory() -> None:
    assert tree_map(bump, defaultdict(list, a=1))["new"] == []


def test_a_mapping_that_cannot_be_made_from_a_dict_is_an_error_that_says_so() -> None:
    obj = Unmakeable()
    assert tree_map(lambda value: value, obj) is obj
    with pytest.raises(TransferError, match=r"cannot make a new Unmakeable: .*give the class a"):
        tree_map(bump, obj)


def test_a_model_output_keeps_items_and_attributes_together() -> None:
    result = tree_map(bump, Output(loss=1, logits=[2]))
    assert type(result) is Output
    assert (result["loss"], result.loss, result["logits"], result.logits) == (2, 2, [3], [3])


def test_a_dict_that_is_its_own_attributes_stays_one() -> None:
    obj: Any = AttributeDict(a=1)
    result = tree_map(bump, obj)
    assert result["a"] == result.a == 2
    assert obj.a == 1


@pytest.mark.parametrize("cls", [Sample, Frozen, Slotted, FrozenSlotted])
def test_dataclasses_of_every_kind_are_rebuilt(cls: Any) -> None:
    result = tree_map(bump, cls([1]))
    assert type(result) is cls
    assert result.a == [2]


def test_fields_that_init_does_not_take_are_mapped_too() -> None:
    assert tree_map(bump, Frozen(1)).b == 6


def test_a_field_that_was_never_set_stays_unset() -> None:
    assert not hasattr(tree_map(bump, Slotted(1)), "unset")


def test_what_a_dataclass_computed_from_its_old_values_is_forgotten() -> None:
    @dataclass
    class Doubling:
        a: int

        @cached_property
        def double(self) -> int:
            return 2 * self.a

    obj = Doubling(1)
    assert obj.double == 2
    assert tree_map(bump, obj).double == 4
    assert tree_map(bump, Doubling(4)).double == 10


def test_sets_shapes_and_classes_are_leaves() -> None:
    obj = [{1}, torch.Size([2]), Sample, range(2)]
    assert list(tree_leaves(obj)) == obj


def test_keys_are_not_visited() -> None:
    assert tree_map(bump, {1: 1}) == {1: 2}


def test_an_object_that_occurs_twice_occurs_once_in_the_result() -> None:
    shared, leaf = [1], Leaf(0)
    result = tree_map(Leaf, {"a": shared, "b": (shared, leaf, leaf)})
    assert result["a"] is result["b"][0]
    assert result["b"][1] is result["b"][2]


def test_a_changed_leaf_is_asked_for_once() -> None:
    asked = []
    leaf = Leaf(0)
    tree_map(lambda v: asked.append(v) or Leaf(v), [leaf, [leaf], leaf])  # type: ignore[func-returns-value]
    assert asked == [leaf]


def test_values_that_a_mapping_makes_anew_are_not_mixed_up() -> None:
    class Fresh(Store):
        def __getitem__(self, key: str) -> Any:
            return [self.items_[key]]

    obj = [Fresh({str(i): i for i in range(20)}) for _ in range(3)]
    assert list(tree_leaves(tree_map(lambda v: v, obj))) == list(range(20)) * 3
    assert [v[0] for v in tree_map(bump, Fresh({"a": 1, "b": 5})).items_.values()] == [2, 6]


def test_a_container_that_contains_itself_is_an_error_that_names_the_place() -> None:
    inner: list[Any] = [1]
    obj = {"a": Sample((0, inner))}
    inner.append({"back": inner})
    expected = r"obj\['a'\]\.a\[1\] \(a list\) contains itself, as obj\['a'\]\.a\[1\]\[1\]\['back'\]"
    with pytest.raises(CycleError, match=expected):
        tree_map(bump, obj)
    with pytest.raises(CycleError, match=expected):
        list(tree_leaves(obj))


def test_the_place_of_a_cycle_is_found_behind_shared_containers() -> None:
    shared = [1]
    loop: dict[str, Any] = {}
    loop["p"] = Point(shared, loop)
    with pytest.raises(CycleError, match=r"obj\[1\] \(a dict\) contains itself, as .*\['p'\]\.y"):
        tree_map(bump, [shared, loop])


def test_a_table_can_make_any_type_a_leaf() -> None:
    table = containers(stop=lambda cls: cls is Point)
    assert list(tree_leaves([Point(1, 2), (3,)], table=table)) == [Point(1, 2), 3]


def test_a_type_is_decided_on_once() -> None:
    asked: list[type] = []
    table = PerType(asked.append)
    assert table[int] is table[int] is None
    assert asked == [int]


def test_types_made_on_the_fly_do_not_pile_up() -> None:
    table = PerType(lambda cls: None)
    for i in range(5000):
        table[type(f"T{i}", (), {})]
    assert len(table) < 4200
