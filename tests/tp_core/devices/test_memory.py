"""Nothing of a batch waits for the garbage collector: what is dropped is freed at once."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tp_core import recursive_to, tree_leaves, tree_map
from tp_core.errors import CycleError


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Leaf:
    """An object that can be watched."""

    def to(self, device: torch.device) -> "Leaf":
        return Leaf()


def fail(leaf: Any) -> Any:
    raise ZeroDivisionError


WALKS: dict[str, Callable[[Any], Any]] = {
    "recursive_to": lambda batch: recursive_to(batch, "meta"),
    "tree_map that changes all": lambda batch: tree_map(lambda leaf: Leaf(), batch),
    "tree_map that changes nothing": lambda batch: tree_map(lambda leaf: leaf, batch),
    "all of tree_leaves": lambda batch: list(tree_leaves(batch)),
    "the first of tree_leaves": lambda batch: next(tree_leaves(batch)),
}


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("nest", [lambda x: {"x": x}, lambda x: [(x, {"again": x}), "name"]])
def test_a_walk_keeps_neither_what_it_was_given_nor_what_it_made(walk: str, nest: Any) -> None:
    leaf = Leaf()
    batch = nest(leaf)
    result = WALKS[walk](batch)
    living = [weakref.ref(x) for x in (leaf, *tree_leaves(result)) if isinstance(x, Leaf)]
    del leaf, batch, result
    assert [ref() for ref in living] == [None] * len(living)


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_makes_no_reference_cycle(walk: str) -> None:
    WALKS[walk]({"x": [Leaf(), (Leaf(),)]})
    gc.collect()
    WALKS[walk]({"x": [Leaf(), (Leaf(),)]})
    assert gc.collect() == 0


def test_tensors_are_freed_on_both_devices() -> None:
    batch = {"x": torch.randn(3), "more": [torch.randn(2)]}
    moved = recursive_to(batch, "meta")
    living = [weakref.ref(t) for t in (*tree_leaves(batch), *tree_leaves(moved))]
    del batch, moved
    assert [ref() for ref in living] == [None] * 4


@pytest.mark.parametrize("error", [ZeroDivisionError, CycleError])
def test_an_error_keeps_the_batch_for_as_long_as_it_is_kept_itself(error: type[Exception]) -> None:
    leaf = Leaf()
    batch: list[Any] = [{"x": leaf}]
    if error is CycleError:
        batch.append(batch)
    living = weakref.ref(leaf)
    try:
        tree_map(fail if error is ZeroDivisionError else lambda x: x, batch)
    except error as caught:
        kept: Exception | None = caught
    batch.clear()
    del leaf, batch
    kept = None  # noqa: F841 - with it the traceback and its frames
    assert living() is None
