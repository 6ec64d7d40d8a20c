"""The modules below a root, and whether they are still what replicas were made of."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from tp_core._tensors._sharding import is_sharded
from tp_core.errors import ModelError
from tp_core.replicas._contents import Contents, same_objects

__all__ = ["Original", "Structure", "is_scripted"]


class Original:
    """One of the real modules.

    Args:
        module: The module.

    Attributes:
        module: The module.
        version: Grows when its attributes have changed.
    """

    __slots__ = ("_contents", "module", "version")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.version = 0
        self._contents = Contents([vars(module)])

    def look(self) -> None:
        """Note whether attributes have changed."""
        if not self._contents.is_same():
            self._contents.read()
            self.version += 1


class Structure:
    """The modules below a root, each once, in the order of ``root.modules()``.

    torch has no public way to a module's own children and parameters without a walk, so their
    dictionaries (``_modules``, ``_parameters``, ``_buffers``) are read directly, here and in the other
    modules of this package; torch's own ``replicate`` does the same.

    Args:
        root: The module to read.
        home: The device on which everything must be.

    Attributes:
        root: That module.
        home: That device.
        originals: The modules.
        version: Grows when attributes or buffers of any of them have been replaced.

    Raises:
        ModelError: A parameter or buffer is not on ``home``, has no shape yet, or is one rank's
            shard of a larger one.
    """

    def __init__(self, root: nn.Module, home: torch.device) -> None:
        self.root = root
        self.home = home
        self.version = 0
        modules: list[nn.Module] = []
        _collect(root, modules, set())
        self.originals = [Original(m) for m in modules]
        self._plain = [m for m in modules if not is_scripted(m)]
        self._has_scripts = len(self._plain) < len(modules)
        self._classes = list(map(type, self._plain))
        self._rows = self._read_rows()
        self._children = Contents(m._modules for m in self._plain)
        self._contents = Contents(d for m in self._plain for d in (vars(m), m._modules, m._buffers))
        self._slots = Contents(m._parameters for m in self._plain)
        self._hooks: list[Any] = [h for m in self._plain for h in _hooks_of(m)]
        everywhere = nn.modules.module
        self._hooks += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        self._parameters = list(root.parameters())
        self.check()

    def check(self) -> None:
        """Make sure that all parameters and buffers can be replicated."""
        for name, tensor in (*self.root.named_parameters(), *self.root.named_buffers()):
            _check(name, tensor, self.home)

    def is_current(self) -> bool:
        """Return whether no module was replaced, added, or given another class since.

        Other changes of attributes increase the versions.
        """
        if list(map(type, self._plain)) != self._classes:
            return False
        if not self._contents.is_same():
            if not (self._children.is_same() and same_objects(self._read_rows(), self._rows)):
                return False
            self._contents.read()
            self.version += 1
            for original in self.originals:
                original.look()
        return True

    def is_hooked(self) -> bool:
        """Return whether a hook runs before or after the forward of any module."""
        return any(self._hooks)

    def _read_rows(self) -> list[dict[str, Any]]:
        """Return the dictionaries that are compared."""
        rows = ((vars(m), m._modules, m._parameters, m._buffers, *_hooks_of(m)) for m in self._plain)
        return list(chain.from_iterable(rows))

    def parameters(self) -> list[Parameter]:
        """Return all parameters, each once: the same list as long as they are the same.

        Raises:
            ModelError: A parameter that was added or replaced cannot be replicated.
        """
        if self._has_scripts or not self._slots.is_same():
            found = list(self.root.parameters())
            if not same_objects(found, self._parameters):
                self.check()
                self._parameters = found
            self._slots.read()
        return self._parameters


def _hooks_of(module: nn.Module) -> tuple[dict[Any, Any], dict[Any, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _collect(module: nn.Module, found: list[nn.Module], ids: set[int]) -> None:
    """Append the module and those below it, each once, without the children of TorchScript modules."""
    if id(module) in ids:
        return
    ids.add(id(module))
    found.append(module)
    for child in () if is_scripted(module) else module._modules.values():
        if child is not None:
            _collect(child, found, ids)


def is_scripted(module: nn.Module) -> bool:
    """Return whether the module is TorchScript, whose parameters cannot be replaced from Python."""
    return isinstance(module, torch.jit.ScriptModule)


def _check(name: str, tensor: Tensor, home: torch.device) -> None:
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
