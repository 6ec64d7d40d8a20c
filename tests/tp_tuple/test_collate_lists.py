"""Lists of items are not taken for tuples of values, and mappings keep their types."""

from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import default_collate as torch_default_collate
from tp_core.data import Parts
from tp_core.errors import ConfigError
from tp_tuple import TupleParallel, default_collate, tp_collate


@pytest.mark.parametrize("length", [1, 2, 4, 5])
@pytest.mark.parametrize("make", [str, lambda i: str(i).encode()], ids=["str", "bytes"])
def test_text_stays_a_list_for_each_part(make, length):
    items = [make(i) for i in range(length)]
    parts = default_collate(2)(items)
    assert isinstance(parts, Parts)
    assert [x for part in parts for x in part] == items
    assert [len(part) for part in parts] == list(parts.counts)


def test_text_goes_through_a_loader_into_the_model():
    class Lengths(torch.nn.Module):
        def forward(self, texts):
            return torch.tensor([len(t) for t in texts])

    model = TupleParallel(Lengths(), ["cpu", "cpu"])
    (parts,) = DataLoader(["a", "bb", "ccc"], batch_size=3, collate_fn=default_collate(2))
    assert [p.tolist() for p in model(parts)] == [[1, 2], [3]]


def test_text_beside_other_fields_is_a_value_as_before():
    names, numbers = default_collate(2)([("a", 1), ("b", 2), ("c", 3)])
    assert [list(part) for part in names] == [["a", "b"], ["c"]]
    assert [part.tolist() for part in numbers] == [[1, 2], [3]]


@pytest.mark.parametrize("length", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "collate",
    [lambda items: items, tuple, lambda items: [{"x": x} for x in items], sorted],
    ids=["itself", "tuple", "new objects", "sorted"],
)
def test_a_list_with_an_entry_for_each_item_is_refused(collate, length):
    with pytest.raises(ConfigError, match=r"an entry for each item, .* put the list of items into a dict"):
        tp_collate(2)(collate)(list(range(length)))


def test_values_as_many_as_items_are_values():
    collate = tp_collate(2)(lambda items: (torch.tensor(items), -torch.tensor(items)))
    for _ in range(2):
        x, y = collate([1, 2, 3, 4])
        assert [part.tolist() for part in (*x, *y)] == [[1, 2], [3, 4], [-1, -2], [-3, -4]]


def test_the_second_look_leaves_random_numbers_alone_and_happens_once():
    calls = []

    def noisy(items):
        calls.append(len(items))
        return torch.rand(len(items)), torch.tensor(items)

    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    collate = tp_collate(2)(noisy)
    noise, _ = collate([1, 2, 3, 4])
    assert torch.equal(torch.cat(noise), expected)
    collate([1, 2, 3, 4])
    assert calls == [2, 2, 1, 2, 2]


def test_a_function_that_takes_one_number_of_items_alone_is_believed():
    def pairs(items):
        first, second = items
        return first, second

    assert tp_collate(2)(pairs)([1, 2, 3, 4]) == ((1, 3), (2, 4))


def test_a_batch_that_tells_more_by_its_lengths_needs_no_second_look():
    calls = []

    def values(items):
        calls.append(len(items))
        return sum(items), max(items)

    tp_collate(2)(values)([1, 2, 3])
    assert calls == [2, 1]


class Attributed(dict):
    """A dict with something beside its items."""

    note = None


def default_dict(**values):
    made = defaultdict(list)
    made.update(values)
    return made


@pytest.mark.parametrize("cls", [dict, OrderedDict, default_dict, UserDict, Attributed])
def test_mappings_keep_their_type_as_in_torchs_function(cls):
    items = [cls(x=float(i), y=i) for i in range(3)]
    batch, expected = default_collate(2)(items), torch_default_collate(items)
    assert type(batch) is type(expected) is type(items[0])
    assert [part.tolist() for part in batch["x"]] == [[0.0, 1.0], [2.0]]
    assert list(batch) == ["x", "y"]
    if cls is default_dict:
        assert batch.default_factory is list


def test_attributes_of_a_mapping_are_kept_and_the_items_stay_as_they_were():
    def collate(items):
        made = Attributed(n=torch.tensor(items))
        made.note = "kept"
        return made

    batch = tp_collate(2)(collate)([1, 2])
    assert batch.note == "kept"
    assert [part.tolist() for part in batch["n"]] == [[1], [2]]


def test_what_cannot_be_made_again_becomes_a_dict_as_in_torchs_function():
    batch = tp_collate(2)(lambda items: MappingProxyType({"n": torch.tensor(items)}))([1, 2, 3])
    assert [part.tolist() for part in batch["n"]] == [[1, 2], [3]]


class Table:
    """What looks like a data frame."""

    columns = ("a", "b")

    def __len__(self):
        return 3

    def __getitem__(self, key):
        return f"column {key}"


class Keyed:
    """What has a length and no rows by number."""

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return {"a": 1}[key]


@pytest.mark.parametrize("items", [Table(), Keyed(), {"a": [1, 2], "b": [3, 4]}, {3, 4}], ids=type)
def test_a_container_without_rows_by_number_asks_for_select(items):
    with pytest.raises(ConfigError, match=f"out of a {type(items).__name__}: pass select="):
        tp_collate(2)(lambda chunk: {"items": chunk})(items)


@pytest.mark.parametrize("cost", [lambda _: None, lambda _: "many", lambda _: [1, 2]])
def test_a_cost_that_is_no_number_is_refused(cost):
    with pytest.raises(ConfigError, match="must be a number, not below 0; for item 0 it is"):
        tp_collate(2, cost=cost)(torch.tensor)([1, 2])
