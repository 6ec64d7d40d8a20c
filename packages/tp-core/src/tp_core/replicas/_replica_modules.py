"""The modules of a replica: shallow copies of the real ones, with containers and buffers of their own."""

import copy
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from tp_core._first_party import is_users_hook
from tp_core._transfer import to_device
from tp_core._trees import tree_leaves
from tp_core.device_types import packs_recurrent_weights
from tp_core.errors import ModelError
from tp_core.modules._compiler import compile_in_place
from tp_core.modules._parameters import is_sharded
from tp_core.replicas._mirror import Contents, OriginalBuffers, OwnBuffers, same_objects

# -- Marks of a replica ---------------------------------------------------------------------------


R = TypeVar("R")


def marks_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that keep ``zero_grad`` on a replica of ``module`` from clearing gradients.

    ``_is_replica`` is torch's own mark, for classes with a ``zero_grad`` that calls ``nn.Module``'s. By
    itself torch warns there, and then clears the gradients of what the replica shares with the module.
    """
    marks: dict[str, Any] = {"_is_replica": True}
    if type(module).zero_grad is nn.Module.zero_grad:
        marks["zero_grad"] = _zero_grad
    return marks


def call_as_replica(module: nn.Module, function: Callable[..., R], *args: Any) -> R:
    """Return ``function(*args)``; during the call the module itself is marked as the first replica."""
    attributes = vars(module)
    marks = marks_of(module) if "zero_grad" not in attributes else {}
    attributes.update(marks)
    try:
        return function(*args)
    finally:
        for name in marks:
            attributes.pop(name, None)


def _zero_grad(set_to_none: bool = True) -> None:  # noqa: ARG001, FBT001, FBT002, RUF100 - torch's signature
    # The text begins like torch's own warning, so that filters written for that one still match.
    warnings.warn(
        "Calling .zero_grad() from a module created with nn.DataParallel() has no effect: inside of forward "
        "a replica's parameters collect no gradients of their own; call it on the wrapper, before forward, "
        "or use torch.autograd.grad",
        stacklevel=2,
    )


# -- The real modules -----------------------------------------------------------------------------


class Original:
    """One of the real modules."""

    __slots__ = ("_contents", "module", "version")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.version = 0
        self._contents = Contents([vars(module)])

    def look(self) -> None:
        if not self._contents.is_same():
            self._contents.read()
            self.version += 1


class Structure:
    """The modules below a root, each once, in the order of ``root.modules()``.

    torch has no public way to a module's own children and parameters without a walk. So their
    dictionaries (``_modules``, ``_parameters``, ``_buffers``) are read directly, here and in the other
    modules of this package. torch's own ``replicate`` does the same.

    Args:
        root: The module to read.
        home: The device on which everything must be.
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
        everywhere = nn.modules.module  # hooks of all modules: torch has no public way to ask for them
        self._hooks += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        self._parameters = list(root.parameters())
        self.check()

    def check(self) -> None:
        for name, tensor in (*self.root.named_parameters(), *self.root.named_buffers()):
            _check(name, tensor, self.home)

    def is_current(self) -> bool:
        """Return whether no module was replaced or added, or has another class since.

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
        return any(self._hooks)

    def has_users_hooks(self) -> bool:
        """Return whether a forward hook is the program's own, or of a library that is not known here."""
        return any(is_users_hook(hook) for hooks in self._hooks for hook in hooks.values())

    def _read_rows(self) -> list[dict[str, Any]]:
        """Return the dictionaries to compare by identity: a module may get a new one."""
        rows = ((vars(m), m._modules, m._parameters, m._buffers, *_hooks_of(m)) for m in self._plain)
        return list(chain.from_iterable(rows))

    def parameters(self) -> list[Parameter]:
        """Return all parameters, each once: the same list as long as they are the same."""
        if self._has_scripts or not self._slots.is_same():
            parameters = list(self.root.parameters())
            if not same_objects(parameters, self._parameters):
                self.check()
                self._parameters = parameters
            self._slots.read()
        return self._parameters


def _hooks_of(module: nn.Module) -> tuple[dict[Any, Any], dict[Any, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _collect(module: nn.Module, modules: list[nn.Module], ids: set[int]) -> None:
    """Append the module and those below it, each once, without the children of TorchScript modules."""
    if id(module) in ids:
        return
    ids.add(id(module))
    modules.append(module)
    if is_scripted(module):
        return
    for child in module._modules.values():
        if child is not None:
            _collect(child, modules, ids)


def is_scripted(module: nn.Module) -> bool:
    """Return whether the module is TorchScript: its parameters cannot be replaced from Python."""
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


# -- Containers of a replica ----------------------------------------------------------------------


_DICTS = {dict, OrderedDict, defaultdict}
_CONTAINERS = {list, set, deque, *_DICTS, torch.Generator}
_TORCHS_OWN = {
    *vars(nn.Module()),
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
    "_all_weights",
}


def is_container(name: str, value: Any) -> bool:
    """Return whether an attribute is a container of the module's author, and not one of torch's own.

    A random generator is one, of its state.
    """
    return type(value) in _CONTAINERS and name not in _TORCHS_OWN


class OwnContainers:
    """Lists, dicts and sets of one replica in place of the module's, with equal contents when a call begins.

    A forward may leave values there, as losses of its layers. In a shared container it would find those
    of the other parts too, in no order. One container in several modules is one in the replica, too. Of a
    random generator each replica draws the same numbers, as each rank does of its own.
    """

    def __init__(self, replica_of: Mapping[int, nn.Module], device: torch.device, home: torch.device) -> None:
        self._replica_of = replica_of
        self._device, self._home = device, home
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def own(self, real: Any) -> Any:
        """Return the replica's own container in place of the real one; `refill` has to follow."""
        pair = self._pairs.get(id(real))
        if pair is None:
            pair = self._pairs[id(real)] = real, self._copy(real)  # the real one is kept, and so its id
        return pair[1]

    def _copy(self, real: Any) -> Any:
        if isinstance(real, torch.Generator):
            if real.device == self._home:
                device = self._device
            else:
                device = real.device
            return torch.Generator(device)
        return copy.copy(real)

    def keep(self, real: Iterable[Any]) -> None:
        kept = set(map(id, real))
        self._pairs = {key: pair for key, pair in self._pairs.items() if key in kept}

    def refill(self) -> None:
        """Copy the present contents of the real containers into the replica's."""
        own_of = {key: own for key, (_, own) in self._pairs.items()}
        for real, own in self._pairs.values():
            self._fill(own, real, own_of)

    def _fill(self, own: Any, real: Any, own_of: dict[int, Any]) -> None:
        kind = type(real)
        if kind is torch.Generator:
            own.set_state(real.get_state())
            return
        values = real.values() if kind in _DICTS else real
        is_plain = not any(k in _CONTAINERS or issubclass(k, nn.Module) for k in set(map(type, values)))
        if kind is list:
            if is_plain:
                own[:] = real
            else:
                own[:] = [self._version(v, own_of) for v in real]
            return
        own.clear()
        if kind in _DICTS:
            own.update(real if is_plain else {k: self._version(v, own_of) for k, v in real.items()})
            return
        if is_plain:
            values = real
        else:
            values = [self._version(v, own_of) for v in real]
        if kind is deque:
            own.extend(values)
        else:
            own.update(values)

    def _version(self, value: Any, own_of: dict[int, Any]) -> Any:
        """Return the replica's counterpart of a value in a real container."""
        if isinstance(value, nn.Module):
            return self._replica_of.get(id(value), value)
        if type(value) not in _CONTAINERS:
            return value
        if id(value) not in own_of:
            own_of[id(value)] = own = self._copy(value)
            self._fill(own, value, own_of)
        return own_of[id(value)]


_STATES = (Tensor, tuple, list, dict)
"""The types of what a forward may set as a state."""


# -- Modules of a replica -------------------------------------------------------------------------


class _ReplicaModule:
    """One module of a replica.

    Attributes:
        original: The real module.
        module: Its copy in the replica.
        own: The attributes in which the copy differs.
        version: The version of the original when its attributes were copied.
        tensors: The attributes of the original that were moved, with their versions then.
        copied: The attributes that were tensors or containers when they were copied.
        states: The tensors, and containers of them, that forwards of this replica have set, with what the
            original had under the same name after the same call.
        containers: The attributes of the original of which the copy has its own.
    """

    __slots__ = (
        "_compiled",
        "containers",
        "copied",
        "module",
        "original",
        "own",
        "states",
        "tensors",
        "version",
    )

    def __init__(self, original: Original, *, copies: bool) -> None:
        real = original.module
        self.original = original
        self.module: nn.Module = type(real).__new__(type(real))
        self.own: dict[str, Any] = {"_modules": {}, "_buffers": {}, **marks_of(real)}
        if copies:
            self.own["_parameters"] = {}
        self.version = -1
        self.tensors: list[tuple[Tensor, int]] = []
        self.copied: dict[str, Any] = {}
        self.states: dict[str, tuple[Any, Any]] = {}
        self.containers: list[Any] = []
        self._compiled: Any = (None, None)

    def copy_attributes(
        self,
        replica_of: Mapping[int, nn.Module],
        containers: OwnContainers,
        device: torch.device,
        home: torch.device,
    ) -> None:
        real = vars(self.original.module)
        copied = {
            name: own for name, value in real.items() if (own := _own_version(value, replica_of)) is not None
        }
        self.containers = [value for name, value in real.items() if is_container(name, value)]
        if self.containers:
            copied |= {n: containers.own(v) for n, v in real.items() if is_container(n, v)}
        self.tensors = []
        if device != home:
            self._move_tensors(real, copied, device, home)
        # A state that the program has set since, or cleared, holds for all replicas.
        self.states = {n: (own, seen) for n, (own, seen) in self.states.items() if real.get(n) is seen}
        copied |= {name: own for name, (own, _) in self.states.items()}
        compiled = real.get("dynamo_ctx"), real.get("_compiled_call_impl")
        if not same_objects(compiled, self._compiled):
            self._compiled = compiled
            self._rewire_compiled()
        attributes = vars(self.module)
        attributes.clear()
        attributes.update(real)
        attributes.update(copied)
        attributes.update(self.own)
        self.copied = {n: v for n, v in attributes.items() if isinstance(v, _STATES) and n not in _TORCHS_OWN}
        self.version = self.original.version

    def note_states(self) -> None:
        """Note the tensors that the forward has set: a hidden state, say, that its next call begins with.

        Also a tuple, list or dict with tensors, as of a recurrent layer with two states.
        """
        real = vars(self.original.module)
        set_now = {
            name: value
            for name, value in vars(self.module).items()
            if isinstance(value, _STATES) and value is not self.copied.get(name) and name not in _TORCHS_OWN
        }
        set_now = {n: v for n, v in set_now.items() if any(isinstance(t, Tensor) for t in tree_leaves(v))}
        kept = {name: own for name, (own, _) in self.states.items()} | set_now
        self.states = {name: (own, real.get(name)) for name, own in kept.items()}

    def is_behind(self) -> bool:
        """Return whether the real module's attributes, or values of moved tensors, have changed."""
        if self.version != self.original.version:
            return True
        return any(t._version != version for t, version in self.tensors)

    def _move_tensors(
        self, real: Mapping[str, Any], copied: dict[str, Any], device: torch.device, home: torch.device
    ) -> None:
        """Move tensors that are plain attributes; those that a forward left there with their graph stay."""
        for name, value in real.items():
            if isinstance(value, Tensor) and value.device == home and not value.requires_grad:
                copied[name] = to_device(value, device)
                if not value.is_inference():
                    self.tensors.append((value, value._version))

    def _rewire_compiled(self) -> None:
        context, call = self._compiled
        inner = self.own["_modules"].get("_orig_mod")
        if context is not None and inner is not None:
            # After torch.compile(module), forward is a closure over the original: the copy would run that.
            fresh: Any = type(self.original.module)
            self.own["forward"] = vars(fresh(inner, context))["forward"]
        elif call is not None:
            # module.compile() keeps no options to compile the copy with: it runs uncompiled.
            self.own["_compiled_call_impl"] = None


class ReplicaModules:
    """The modules of one replica.

    Each has the class and the attributes of the real module, updated by `sync`, and children and buffers
    of its own. Its parameters are the real module's, or the last ones of `give_parameters`.
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
        self._containers = OwnContainers(self._replica_of, device, structure.home)
        for replica in reversed(self._replicas):  # children first: a compiled parent wraps its child's call
            self._copy_attributes(replica)
        self._containers.refill()
        if compile_options is not None:
            # Last, as children may be compiled, too.
            compile_in_place(self.root, **compile_options)
            root = next(t for t in self._replicas if t.module is self.root)
            root.own["_compiled_call_impl"] = vars(self.root)["_compiled_call_impl"]
        self._watch()

    def sync(self, *, force: bool = False) -> None:
        """Copy the attributes and buffers that the real modules have now."""
        self._buffers.sync(force=force)
        self._containers.refill()
        if not self._are_untouched():
            behind = self._replicas  # a forward or a hook changed some: all are copied again
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

    def note_states(self) -> None:
        """Note what forwards have set on the replica's modules, at the end of a call of all replicas.

        Each replica continues with the state of its own rows, as one device does with all rows.
        """
        looked_at = self._all if self._is_hooked else self._some
        if looked_at.is_same() and not any(replica.states for replica in self._replicas):
            return
        for replica in self._replicas:
            replica.note_states()

    def _copy_attributes(self, replica: _ReplicaModule) -> None:
        replica.copy_attributes(self._replica_of, self._containers, self.device, self._structure.home)

    def _watch(self) -> None:
        self._all = Contents(vars(t.module) for t in self._replicas)
        self._some = Contents(vars(t.module) for t in self._replicas if not _is_of_torch(t.module))
        self._moved = any(t.tensors for t in self._replicas)

    def _are_untouched(self) -> bool:
        """Return whether no forward has changed attributes of the replica's modules.

        Layers of torch do not change their own attributes, so they are skipped. Code that changes them
        from outside changes the real ones, too, and that is noticed. Hooks may change any attribute.
        """
        was_hooked, self._is_hooked = self._is_hooked, self._structure.is_hooked()
        if was_hooked or self._is_hooked:
            looked_at = self._all
        else:
            looked_at = self._some
        return looked_at.is_same()

    def give_parameters(self, exposed: dict[int, Tensor]) -> None:
        """Set the parameters to these tensors, by the ``id`` of the real parameter."""
        self.given = exposed
        for replica in self._replicas:
            real = replica.original.module
            own = replica.own["_parameters"]
            own.clear()
            for name, parameter in real._parameters.items():
                if parameter is None:
                    own[name] = None
                else:
                    own[name] = exposed[id(parameter)]
            if isinstance(real, nn.RNNBase):
                _give_flat_weights(real, replica.own)
                replica.version = -1
                self._version = -1

    def flatten_rnn_weights(self, copies: dict[int, Tensor]) -> None:
        """Put the weights of recurrent layers into one piece of memory, as their kernels expect."""
        has_recurrent = any(isinstance(replica.module, nn.RNNBase) for replica in self._replicas)
        if not has_recurrent or not packs_recurrent_weights(self.device):
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
    """Fill the list of weights of a recurrent layer; torch would rebuild it on each forward otherwise."""
    parameters = own["_parameters"]
    names = module._flat_weights_names
    if all(name in parameters for name in names):
        weights = [parameters[name] for name in names]
        own["_flat_weights"] = weights
        own["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]


def _no_script(module: nn.Module, device: torch.device) -> str:
    return (
        f"a TorchScript module ({type(module).__name__}) cannot be replicated on {device}: its "
        "parameters cannot be replaced from Python; give the module that was scripted, or torch.compile"
    )
