"""Values of a backend's options against the types of their fields."""

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin

from tp_core.errors import ConfigError

__all__ = ["check_above_zero", "check_option_types"]

_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}


def check_option_types(options: object) -> None:
    """Make sure that fields of plain types have values of these types; a whole number is a number, too.

    Fields of any other type, such as functions or what is only imported for typing, are left to who reads
    them.

    Args:
        options: An instance of a dataclass.

    Raises:
        ConfigError: A value is of another type, or none of those that a ``Literal`` lists.
    """
    for field in dataclasses.fields(options):  # type: ignore[arg-type]  # any dataclass
        kinds = _plain_types(field.type)
        value = getattr(options, field.name)
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            wanted = " or ".join(dict.fromkeys(_WORDS.get(kind) or repr(kind) for kind in kinds))
            msg = f"{type(options).__name__}({field.name}=...) must be {wanted}, got {value!r}"
            raise ConfigError(msg)


def check_above_zero(options: object, *names: str) -> None:
    """Make sure that these options are ``None`` or finite numbers above 0.

    Raises:
        ConfigError: One is not; the message names it.
    """
    for name in names:
        value = getattr(options, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < math.inf):
            msg = f"{type(options).__name__}({name}=...) must be a finite number above 0, got {value!r}"
            raise ConfigError(msg)


def _plain_types(annotation: Any) -> list[Any]:
    """Return the types, and the values of a ``Literal``, that are allowed; none where any is not plain."""
    if get_origin(annotation) in {Union, types.UnionType}:
        parts = [_plain_types(part) for part in get_args(annotation)]
        return [kind for part in parts for kind in part] if all(parts) else []
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [annotation] if isinstance(annotation, type) and annotation in _WORDS else []


def _is_of(value: object, kind: Any) -> bool:
    if not isinstance(kind, type):  # a value of a Literal
        return type(value) is type(kind) and value == kind
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
