"""The spellings of easycore's runners: a program written for them changes its import lines alone.

from easycore.common.config import CfgNode                          from tp_runner.compat import CfgNode
from easycore.common.parallel import OrderedRunner, UnorderedRunner   from tp_runner.compat import ...
from easycore.torch.parallel import OrderedRunner, UnorderedRunner    from tp_runner.compat import ...
"""

import copy as copying
import copyreg
import importlib
import os
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from tp_core.errors import ConfigError

import tp_runner

__all__ = ["CfgNode", "OrderedRunner", "UnorderedRunner"]

R = TypeVar("R")
_FROZEN = "__frozen__"  # in the dictionary of the instance, where no key is


class CfgNode(tp_runner.CfgNode):
    """easycore's configuration: a dictionary with its keys as attributes, frozen if wanted, and in YAML.

    Text in the dictionary that it is made of becomes the Python literal that it spells. YAML needs PyYAML.
    Files have plain values, lists, tuples and dictionaries; tags of other Python objects are refused.

    Args:
        init_dict: The values; nested dictionaries become nodes.
        copy: Whether the values are copied.

    Raises:
        ConfigError: A key is no text.

    Example:
        >>> cfg = CfgNode({"model": {"widths": "(3, 4)"}})
        >>> cfg.merge(CfgNode({"model": {"depth": 2}}))
        >>> cfg.freeze()
        >>> cfg.dict()
        {'model': {'widths': (3, 4), 'depth': 2}}
    """

    def __init__(self, init_dict: Mapping[str, Any] | None = None, copy: bool = True) -> None:
        super().__init__()
        self.__dict__[_FROZEN] = False
        values = dict(init_dict or {})
        if copy:
            values = copying.deepcopy(values)
        for key, value in values.items():
            if not isinstance(key, str):
                msg = f"each key of a configuration must be text, got {key!r}"
                raise ConfigError(msg)
            self[key] = _decode(type(self), value)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_frozen():
            msg = (
                f"cannot set {name!r} to {value!r:.80}: this configuration is frozen; freeze(False) ends that"
            )
            raise AttributeError(msg, name=name, obj=self)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by __init__, which would read text as a literal again.
        return copyreg.__newobj__, (type(self),), vars(self), None, iter(self.items())  # type: ignore[attr-defined]  # typeshed lacks it

    def freeze(self, frozen: bool = True) -> None:
        """Let no attribute be set any more, in the nodes below too; or let them be set again."""
        self.__dict__[_FROZEN] = frozen
        for value in self.values():
            if isinstance(value, CfgNode):
                value.freeze(frozen)

    def is_frozen(self) -> bool:
        """Return whether no attribute may be set."""
        return bool(self.__dict__.get(_FROZEN))

    def copy(self) -> Self:
        """Return a deep copy."""
        return copying.deepcopy(self)

    def merge(self, cfg: "CfgNode") -> None:
        """Take over the values of another configuration; nodes of both are merged in turn.

        Raises:
            ConfigError: This one is frozen.
        """
        if self.is_frozen():
            msg = "cannot merge into a configuration that is frozen; freeze(False) ends that"
            raise ConfigError(msg)
        for key, value in cfg.copy().items():
            own = self.get(key)
            if isinstance(own, CfgNode) and isinstance(value, CfgNode):
                own.merge(value)
            else:
                self[key] = value

    def dict(self) -> dict[str, Any]:
        """Return the values as plain dictionaries."""
        return {key: value.dict() if isinstance(value, CfgNode) else value for key, value in self.items()}

    def save(self, save_path: str | os.PathLike[str], encoding: str = "utf-8") -> None:
        """Write the values to a YAML file."""
        Path(save_path).write_text(self.dump(self), encoding=encoding)

    @classmethod
    def open(cls, file: str | os.PathLike[str] | IO[str], encoding: str = "utf-8") -> Self:
        """Read a YAML file, by its path or open already."""
        if isinstance(file, str | os.PathLike):
            return cls.load(Path(file).read_text(encoding=encoding))
        return cls.load(file.read())

    @classmethod
    def load(cls, yaml_str: str) -> Self:
        """Read YAML.

        Raises:
            ConfigError: It names Python objects, or is no mapping.
        """
        yaml = _import_yaml()
        try:
            values = yaml.load(yaml_str, Loader=yaml.FullLoader)
        except yaml.constructor.ConstructorError as error:
            msg = f"a configuration has plain values, lists, tuples and dictionaries: {error}"
            raise ConfigError(msg) from error
        if not isinstance(values, Mapping | None):
            msg = f"a configuration must be a mapping, got {type(values).__name__}: {values!r:.80}"
            raise ConfigError(msg)
        return cls(values)

    @classmethod
    def dump(
        cls, cfg: "CfgNode", stream: IO[str] | None = None, encoding: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the YAML of a configuration, or write it to a stream; options are those of PyYAML."""
        return _import_yaml().dump(cfg.dict(), stream=stream, encoding=encoding, **kwargs)


def _decode(kind: type[CfgNode], value: Any) -> Any:
    if type(value) is dict:
        return kind(value, copy=False)
    if isinstance(value, str):
        try:
            return literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return value


def _import_yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        msg = "configurations in YAML need PyYAML; pip install 'tp-runner[yaml]'"
        raise ConfigError(msg) from error


class OrderedRunner(tp_runner.OrderedRunner[R]):
    """`tp_runner.OrderedRunner` with easycore's name for whether it runs."""

    @property
    def is_activate(self) -> bool:
        """Whether the workers run."""
        return self._pool is not None and not self._pool.closed


class UnorderedRunner(tp_runner.UnorderedRunner[R]):
    """`tp_runner.UnorderedRunner` with easycore's name for whether it runs."""

    @property
    def is_activate(self) -> bool:
        """Whether the workers run."""
        return self._pool is not None and not self._pool.closed
