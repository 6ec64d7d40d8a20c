"""What a tree of modules looks like, and whether it still looks like that."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tp_core._job import is_sharded
from tp_core.errors import ModelError

__all__ = ["Structure"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One module as it was when the structure was read."""

    module: nn.Module
    cls: type[nn.Module]
    children: dict[str, nn.Module | None]
    attributes: int

    @classmethod
    def of(cls, module: nn.Module) -> "_Seen":
        children = {} if is_scripted(module) else dict(module._modules)
        return cls(module, type(module), children, len(module.__dict__))


class Structure:
    """The modules below a root, each once, in the order of ``root.modules()``.

    torch offers no look at a module's own children and parameters without a walk, so that their
    dictionaries (``_modules``, ``_parameters``, ``_buffers``) are read directly here and in the
    modules beside; torch's own ``replicate`` does the same.

    Args:
        root: The module to read.
        home: The device on which everything must be.

    Raises:
        ModelError: A parameter or buffer is not on ``home``, has no shape yet, or is one rank's
            shard of a larger one.
    """

    def __init__(self, root: nn.Module, home: torch.device) -> None:
        self.root = root
        self.home = home
        self.seen: list[_Seen] = []
        self._collect(root, set())
        self.check()

    def check(self) -> None:
        """Make sure that all parameters and buffers can be replicated."""
        for name, tensor in (*self.root.named_parameters(), *self.root.named_buffers()):
            _check(name, tensor, self.home)

    def _collect(self, module: nn.Module, ids: set[int]) -> None:
        if id(module) in ids:
            return
        ids.add(id(module))
        entry = _Seen.of(module)
        self.seen.append(entry)
        for child in entry.children.values():
            if child is not None:
                self._collect(child, ids)

    def is_current(self) -> bool:
        """Whether no module was replaced, added, or given other attributes since."""
        for entry in self.seen:
            module = entry.module
            if type(module) is not entry.cls or len(module.__dict__) != entry.attributes:
                return False
            # Modules compare by identity, so this is fast and cannot call user code.
            if not is_scripted(module) and module._modules != entry.children:
                return False
        return True


def is_scripted(module: nn.Module) -> bool:
    """Whether the module is TorchScript, whose insides are not Python's."""
    return isinstance(module, torch.jit.ScriptModule)


def _check(name: str, tensor: Any, home: torch.device) -> None:
    if is_lazy(tensor):
        msg = f"parameter {name!r} has no shape yet: run one forward of the lazy module before it is wrapped"
        raise ModelError(msg)
    if is_sharded(tensor):
        msg = (
            f"parameter {name!r} is one rank's shard of a larger one; replicas in one process need "
            "whole parameters"
        )
        raise ModelError(msg)
    if tensor.device != home:
        msg = (
            f"the module must be on its first device {home}, but {name!r} is on {tensor.device}; "
            f"call module.to({str(home)!r}) before"
        )
        raise ModelError(msg)
