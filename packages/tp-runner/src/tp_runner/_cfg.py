"""Configurations with attribute access, one copy for each worker and one for the consumer."""

import copy
import dataclasses
import sys
import types
from collections.abc import Mapping
from typing import Any

from tp_core.errors import ConfigError


class CfgNode(dict[str, Any]):
    """A dictionary with its keys as attributes too; nested mappings become nodes.

    Raises:
        AttributeError: An attribute is read that is not a key; the message names those that are.

    Example:
        >>> cfg = CfgNode({"model": {"width": 3}})
        >>> cfg.exponent = 2
        >>> cfg.model.width, cfg["exponent"]
        (3, 2)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for key, value in dict(*args, **kwargs).items():
            self[key] = _to_node(value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(str, self)) or "none"
            msg = f"no {name!r} in this configuration; there are: {known}"
            raise AttributeError(msg, name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            msg = f"no {name!r} in this configuration"
            raise AttributeError(msg, name=name, obj=self) from None

    def __repr__(self) -> str:
        return f"CfgNode({dict(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CfgNode, (dict(self),)


def _to_node(value: Any) -> Any:
    return CfgNode(value) if type(value) in {dict, types.MappingProxyType} else value


def copy_cfg(cfg: Any) -> Any:
    """Return a copy of a configuration that has attributes and takes new ones.

    An object that takes new attributes is copied as it is; a mapping, a frozen or slotted
    dataclass and a named tuple become a :class:`CfgNode`.

    Raises:
        ConfigError: ``cfg`` is not a configuration.
    """
    if cfg is None:
        return CfgNode()
    if isinstance(cfg, CfgNode):
        return _deep_copy(cfg)
    if isinstance(cfg, Mapping):
        return CfgNode(_deep_copy(dict(cfg)))
    if _is_namespace(cfg):
        return _deep_copy(cfg)
    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        frozen = type(cfg).__dataclass_params__.frozen  # type: ignore[attr-defined]  # it has them
        if hasattr(cfg, "__dict__") and not frozen:
            return _deep_copy(cfg)
        fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        return CfgNode(_deep_copy(fields))
    if hasattr(cfg, "_asdict"):
        return CfgNode(_deep_copy(cfg._asdict()))
    if hasattr(cfg, "__dict__") and not isinstance(cfg, type) and not callable(cfg):
        return _deep_copy(cfg)
    msg = (
        f"cfg must be a mapping, a namespace, a dataclass or None, got {type(cfg).__name__}: "
        f"{cfg!r}; wrap it: cfg={{'value': ...}}"
    )
    raise ConfigError(msg)


def _is_namespace(value: Any) -> bool:
    argparse = sys.modules.get("argparse")  # a Namespace exists only where it was imported
    return isinstance(value, types.SimpleNamespace) or (
        argparse is not None and isinstance(value, argparse.Namespace)
    )


def _deep_copy(value: Any) -> Any:
    """Copy a value deeply, except objects that processes can only inherit: multiprocessing's locks, say."""
    try:
        return copy.deepcopy(value)
    except RuntimeError:  # what such objects raise; it may be a part of the value alone
        if isinstance(value, dict):
            mapping = CfgNode() if isinstance(value, CfgNode) else copy.copy(value)
            mapping.update({key: _deep_copy(part) for key, part in value.items()})
            return mapping
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(_deep_copy(part) for part in value)
        if _is_namespace(value) or dataclasses.is_dataclass(value):
            new = copy.copy(value)
            for name, part in vars(value).items():
                object.__setattr__(new, name, _deep_copy(part))
            return new
        return value
