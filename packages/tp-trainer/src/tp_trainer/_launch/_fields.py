"""Dataclasses from JSON that anybody may have changed: every field is looked at before it is believed."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tp_core.errors import StateError

__all__ = ["check_fields", "read_json_object"]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        StateError: The file does not exist, or holds something else.
    """
    if not path.is_file():  # reading a pipe would wait for whoever writes to it
        msg = f"{path} is not a file"
        raise StateError(msg)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error
    if not isinstance(values, dict):
        msg = f"{path} must hold an object, got {type(values).__name__}"
        raise StateError(msg)
    return values


def check_fields(kind: type, values: object, *, what: str) -> dict[str, Any]:
    """Return the values for the fields of a dataclass; others are left out.

    Args:
        kind: The dataclass.
        values: What JSON said.
        what: What to call it in messages.

    Raises:
        StateError: A value is missing or of another type than its field.
    """
    if not isinstance(values, Mapping):
        msg = f"{what} must be an object, got {type(values).__name__}"
        raise StateError(msg)
    hints = get_type_hints(kind)
    kept: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in values:
            value = values[field.name]
            if not _fits(value, hints[field.name]):
                msg = f"{field.name} of {what} must be {_name(hints[field.name])}, got {value!r:.80}"
                raise StateError(msg)
            kept[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is MISSING and field.default_factory is MISSING:
            msg = f"{what} has no {field.name}"
            raise StateError(msg)
    return kept


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(item, args[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # it is a number
    if hint in (int, str, bool):
        return type(value) is hint  # True is an int to Python
    return isinstance(value, NoneType if hint is None else hint)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
