"""Finding what inside an object cannot be pickled, and saying how to get there."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tp_runner._workers._failure import RESULT, Failure

__all__ = ["pack_what_can_be", "shortened", "why_not_picklable"]

_DEEPEST = 12
_MOST_CHILDREN = 1000


def why_not_picklable(obj: Any, name: str, error: BaseException) -> str:
    """Return a sentence on what inside ``obj`` cannot be pickled.

    Args:
        obj: The object that could not be pickled.
        name: What the path begins with, such as ``"item"``.
        error: What pickling it raised.
    """
    path, culprit = find_culprit(obj, name)
    cause = f"{type(error).__name__}: {error}"
    where = "" if path == name else f", because of {path} ({_type_name(culprit)})"
    return f"{name} of type {_type_name(obj)} cannot be pickled{where}: {cause}"


def find_culprit(obj: Any, name: str) -> tuple[str, Any]:
    """Return the path to the innermost part of ``obj`` that cannot be pickled, and that part."""
    seen = {id(obj)}
    path, culprit = name, obj
    for _ in range(_DEEPEST):
        for step, child in _children(culprit):
            if id(child) not in seen and not _can_be_pickled(child):
                seen.add(id(child))
                path, culprit = path + step, child
                break
        else:
            break
    return path, culprit


def pack_what_can_be(
    results: list[Any], packer: Callable[[Any], tuple[bytes, list[memoryview]]]
) -> tuple[bytes, list[memoryview], bool]:
    """Pack results; put a failure in the place of those that cannot be packed.

    Returns:
        The pickle, the large buffers, whether there are such failures.
    """
    with contextlib.suppress(Exception):  # each one is tried by itself below
        return *packer(results), False
    for place, result in enumerate(results):
        try:
            packer(result)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may do anything
            results[place] = Failure.of(error, RESULT)
            results[place].summary = why_not_picklable(result, "result", error)
    return *packer(results), True


def shortened(obj: Any, limit: int = 200) -> str:
    """Return the ``repr`` of an object, whatever it does, in at most ``limit`` characters."""
    try:
        text = repr(obj)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may do anything
        text = f"<{_type_name(obj)} whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _can_be_pickled(obj: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(obj)
    except Exception:  # noqa: BLE001 - a user's __reduce__ may do anything
        return False
    return True


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, staticmethod | classmethod):
        obj = obj.__func__
    if isinstance(obj, Mapping):
        parts = [(f"[{shortened(key, 40)}]", value) for key, value in obj.items()]
    elif isinstance(obj, list | tuple):
        parts = [(f"[{place}]", value) for place, value in enumerate(obj)]
    elif callable(obj) and getattr(obj, "__closure__", None):
        names = obj.__code__.co_freevars
        cells = [cell.cell_contents for cell in obj.__closure__]
        parts = [(f".<closure {name}>", value) for name, value in zip(names, cells, strict=True)]
    else:
        parts = []
    if not isinstance(obj, type):
        parts += [(f".{key}", value) for key, value in getattr(obj, "__dict__", {}).items()]
        for kind in type(obj).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if hasattr(obj, slot) and not slot.startswith("__"):
                    parts.append((f".{slot}", getattr(obj, slot)))
    else:
        parts += [(f".{key}", value) for key, value in vars(obj).items() if not key.startswith("__")]
    yield from parts[:_MOST_CHILDREN]


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
