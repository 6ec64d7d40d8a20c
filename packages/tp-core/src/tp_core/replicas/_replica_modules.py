"""The modules of a replica: shallow copies of the real ones."""

import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tp_core.errors import ModelError
from tp_core.replicas._buffers import OwnBuffers
from tp_core.replicas._contents import Contents, same_objects
from tp_core.replicas._marks import marks_of
from tp_core.replicas._originals import OriginalBuffers
from tp_core.replicas._own_containers import OwnContainers, is_container
from tp_core.replicas._structure import Original, Structure, is_scripted

__all__ = ["ReplicaModules"]


class _ReplicaModule:
    """One module of a replica.

    Attributes:
        original: The real module.
        module: Its copy in the replica.
        own: The attributes in which the copy differs.
        version: The version of the original when its attributes were copied.
        tensors: The attributes of the original that were moved, with their versions then.
        containers: The attributes of the original of which the copy has its own.
    """

    __slots__ = ("_compiled", "containers", "module", "original", "own", "tensors", "version")

    def __init__(self, original: Original, *, copies: bool) -> None:
        real = original.module
        self.original = original
        self.module: nn.Module = type(real).__new__(type(real))
        self.own: dict[str, Any] = {"_modules": {}, "_buffers": {}, **marks_of(real)}
        if copies:
            self.own["_parameters"] = {}
        self.version = -1
        self.tensors: list[tuple[Tensor, int]] = []
        self.containers: list[Any] = []
        self._compiled: Any = (None, None)

    def copy_attributes(
        self,
        replica_of: Mapping[int, nn.Module],
        containers: OwnContainers,
        device: torch.device,
        home: torch.device,
    ) -> None:
        """Copy the attributes of the real module.

        Args:
            replica_of: The copies of all modules, by the ``id`` of the real ones.
            containers: The replica's own lists, dicts and sets.
            device: The replica's device.
            home: The real module's device.
        """
        real = vars(self.original.module)
        found = {
            name: own for name, value in real.items() if (own := _own_version(value, replica_of)) is not None
        }
        self.containers = [value for name, value in real.items() if is_container(name, value)]
        if self.containers:
            found |= {n: containers.own(v) for n, v in real.items() if is_container(n, v)}
        self.tensors = []
        if device != home:
            self._move_tensors(real, found, device, home)
        compiled = real.get("dynamo_ctx"), real.get("_compiled_call_impl")
        if not same_objects(compiled, self._compiled):
            self._compiled = compiled
            self._rewire_compiled()
        attributes = vars(self.module)
        attributes.clear()
        attributes.update(real)
        attributes.update(found)
        attributes.update(self.own)
        self.version = self.original.version

    def is_behind(self) -> bool:
        """Return whether the real module has other attributes now, or other values in moved tensors."""
        if self.version != self.original.version:
            return True
        return any(t._version != version for t, version in self.tensors)

    def _move_tensors(
        self, real: Mapping[str, Any], found: dict[str, Any], device: torch.device, home: torch.device
    ) -> None:
        """Move tensors that are plain attributes, unless a forward left them there with their graph."""
        for name, value in real.items():
            if isinstance(value, Tensor) and value.device == home and not value.requires_grad:
                found[name] = value.to(device, non_blocking=device.type != "cpu")
                if not value.is_inference():
                    self.tensors.append((value, value._version))

    def _rewire_compiled(self) -> None:
        """Let the copy of a compiled module run the copy of what was compiled."""
        context, call = self._compiled
        inner = self.own["_modules"].get("_orig_mod")
        if context is not None and inner is not None:
            # torch.compile(module): its forward is a closure over the original.
            fresh: Any = type(self.original.module)
            self.own["forward"] = vars(fresh(inner, context))["forward"]
        elif call is not None:
            # module.compile() keeps no options: the copy runs uncompiled.
            self.own["_compiled_call_impl"] = None


class ReplicaModules:
    """The modules of one replica.

    Each has the class and the attributes of the real module, refreshed by `sync`, and its own
    children and buffers. Its parameters are those of the real module, or those that `give_parameters`
    got last.

    Args:
        structure: The real modules.
        buffers: Their buffers.
        device: The replica's device.
        copies: Whether the replica has parameters of its own.
        compile_options: How to compile the root in place, or ``None``.

    Attributes:
        root: The copy of the structure's root.
        given: The parameters that `give_parameters` got last.

    Raises:
        ModelError: A TorchScript module would have to be copied to another device.
    """

    def __init__(
        self,
        structure: Structure,
        buffers: OriginalBuffers,
        device: torch.device,
        *,
        copies: bool,
        compile_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = device
        self.given: object = None
        self._structure = structure
        self._version = -1
        self._is_hooked = False
        self._replica_of: dict[int, nn.Module] = {}
        self._replicas: list[_ReplicaModule] = []
        for original in structure.originals:
            module = original.module
            if is_scripted(module):
                if copies:
                    raise ModelError(_no_script(module, device))
                self._replica_of[id(module)] = module
                continue
            replica = _ReplicaModule(original, copies=copies)
            self._replica_of[id(module)] = replica.module
            self._replicas.append(replica)
        for replica in self._replicas:
            children = replica.original.module._modules.items()
            replica.own["_modules"].update(
                {n: None if c is None else self._replica_of[id(c)] for n, c in children}
            )
        self.root = self._replica_of[id(structure.root)]
        self._buffers = OwnBuffers(buffers, [t.own["_buffers"] for t in self._replicas], device)
        self._containers = OwnContainers(self._replica_of)
        for replica in reversed(self._replicas):  # children first: parents wrap their calls
            self._copy_attributes(replica)
        self._containers.refill()
        if compile_options is not None:
            # Its children may be compiled, too: it comes last.
            self.root.compile(**compile_options)
            root = next(t for t in self._replicas if t.module is self.root)
            root.own["_compiled_call_impl"] = vars(self.root)["_compiled_call_impl"]
        self._watch()

    def sync(self, *, force: bool = False) -> None:
        """Copy the attributes and buffers that the real modules have now."""
        self._buffers.sync(force=force)
        self._containers.refill()
        if not self._are_untouched():
            behind = self._replicas  # some were changed from outside: all are copied from the real ones
        elif self._version != self._structure.version or self._moved:
            behind = [t for t in self._replicas if t.is_behind()]
        else:
            return
        for replica in behind:
            self._copy_attributes(replica)
        if behind:
            self._containers.keep(value for replica in self._replicas for value in replica.containers)
            self._containers.refill()
            self._watch()
        self._version = self._structure.version

    def _copy_attributes(self, replica: _ReplicaModule) -> None:
        replica.copy_attributes(self._replica_of, self._containers, self.device, self._structure.home)

    def _watch(self) -> None:
        """Remember the attributes of the replica's modules."""
        self._all = Contents(vars(t.module) for t in self._replicas)
        self._some = Contents(vars(t.module) for t in self._replicas if not _is_of_torch(t.module))
        self._moved = any(t.tensors for t in self._replicas)

    def _are_untouched(self) -> bool:
        """Return whether no forward has changed attributes of the replica's modules.

        The layers of torch do not change their own; code that changes them from outside changes the real
        ones, too, which is noticed. Hooks may change any.
        """
        was_hooked, self._is_hooked = self._is_hooked, self._structure.is_hooked()
        looked_at = self._all if was_hooked or self._is_hooked else self._some
        return looked_at.is_same()

    def give_parameters(self, exposed: dict[int, Tensor]) -> None:
        """Use these tensors, found by the ``id`` of the real parameter, as parameters."""
        self.given = exposed
        for replica in self._replicas:
            real = replica.original.module
            mine = replica.own["_parameters"]
            mine.clear()
            for name, parameter in real._parameters.items():
                mine[name] = None if parameter is None else exposed[id(parameter)]
            if isinstance(real, nn.RNNBase):
                _give_flat_weights(real, replica.own)
                replica.version = -1
                self._version = -1

    def flatten_rnn_weights(self, copies: dict[int, Tensor]) -> None:
        """Put the weights of recurrent layers into one piece of memory, as their kernels expect."""
        if self.device.type != "cuda" or not any(isinstance(t.module, nn.RNNBase) for t in self._replicas):
            return
        self.give_parameters(copies)
        for replica in self._replicas:
            if isinstance(replica.module, nn.RNNBase):
                self._copy_attributes(replica)
                replica.module.flatten_parameters()
        self.given = None
        self._watch()


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)


def _own_version(value: Any, replica_of: Mapping[int, nn.Module]) -> Any:
    """Return what replaces an attribute that refers to a real module; ``None`` for other attributes."""
    if isinstance(value, MethodType) and id(value.__self__) in replica_of:
        return MethodType(value.__func__, replica_of[id(value.__self__)])
    if isinstance(value, nn.Module):
        return replica_of.get(id(value))
    return None


def _give_flat_weights(module: nn.RNNBase, own: dict[str, Any]) -> None:
    """Fill the list of weights of a recurrent layer, which would be made anew on each forward."""
    mine = own["_parameters"]
    names = module._flat_weights_names
    if all(name in mine for name in names):
        weights = [mine[name] for name in names]
        own["_flat_weights"] = weights
        own["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]


def _no_script(module: nn.Module, device: torch.device) -> str:
    return (
        f"a TorchScript module ({type(module).__name__}) cannot be replicated on {device}: its "
        "parameters cannot be replaced from Python; give the module that was scripted, or torch.compile"
    )
