"""Plain values in JSON files, which users may change: a reader checks every field."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tp_core.errors import StateError
from tp_core.files import atomic_part, is_regular_file, retry_read

_END_OF_TIME = 253_402_300_800.0  # the year 10000, for which datetime raises


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values into a file; readers see the old or the new contents, and never half of them.

    Only this user may read it: it may have the arguments of a program.
    """
    with atomic_part(path, mode=0o600) as part:
        part.write_text(json.dumps(values, indent=1))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        OSError: It is there, and could not be read for some seconds.
        StateError: There is no such file, or something else in it.
    """
    if not retry_read(lambda: is_regular_file(path)):  # reading a pipe would block
        msg = f"{path} is not a file"
        raise StateError(msg)
    try:
        values = json.loads(retry_read(lambda: path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error
    if not isinstance(values, dict):
        msg = f"{path} must hold an object, got {type(values).__name__}"
        raise StateError(msg)
    return values


def check_fields(kind: type, values: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """Return the values for the fields of a dataclass, in their types; other values are ignored.

    Raises:
        StateError: A field has no value, or one of another type.
    """
    hints = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for field in fields(kind):
        if field.name not in values:
            if field.default is MISSING:
                msg = f"{what} has no {field.name}"
                raise StateError(msg)
            continue
        value = values[field.name]
        if not _fits(value, hints[field.name]):
            msg = f"{field.name} of {what} must be {_type_name(hints[field.name])}, got {value!r:.80}"
            raise StateError(msg)
        if isinstance(value, list):
            checked[field.name] = tuple(value)
        else:
            checked[field.name] = value
    return checked


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # it is a number
    if hint in (int, str, bool):
        return type(value) is hint  # isinstance(True, int) is true
    kind = NoneType if hint is None else hint
    return isinstance(value, kind)


def _type_name(hint: Any) -> str:
    if isinstance(hint, type):
        return hint.__name__
    return str(hint)


def check_time(what: str, value: float) -> None:
    """Make sure that a number is a time that datetime can show.

    Raises:
        StateError: It is not.
    """
    if not 0 <= value < _END_OF_TIME:
        msg = f"{what} must be in seconds since 1970, got {value!r:.80}"
        raise StateError(msg)
