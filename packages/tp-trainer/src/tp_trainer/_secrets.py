"""The masking of secrets in hyperparameters."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from tp_core.secrets import MASK, is_secret, mask_text


def mask_secrets(value: Any) -> Any:
    """Return values with ``***`` in place of those named as a token, key, secret or password.

    It looks into mappings, lists, dataclasses and namespaces; the last two become dicts. In texts, passwords
    of URLs and values of "token=..." are masked.
    """
    return _masked(value, "", is_within=False)


def _masked(value: Any, name: str, *, is_within: bool) -> Any:
    hidden = is_within or is_secret(name)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _masked(item, str(key), is_within=hidden) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_masked(item, name, is_within=hidden) for item in value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | complex):
        if is_secret(name, is_number=True):
            return MASK
        return value
    if hidden:
        if value:
            return MASK
        return value
    text = value if isinstance(value, str) else str(value)
    masked = mask_text(text)
    # loggers write other objects as text
    if masked == text:
        return value
    return masked
