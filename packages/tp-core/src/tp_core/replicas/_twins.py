"""A replica's modules: shallow twins of the real ones."""

import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tp_core.errors import ModelError
from tp_core.replicas._buffers import OwnBuffers
from tp_core.replicas._structure import Structure, is_scripted

__all__ = ["Twins"]


class Twins:
    """The modules of one replica.

    Each twin has the class and the attributes of its module, refreshed by `sync`, and its own
    children and buffers. It has the module's own parameters, or those that `give_parameters` was
    told last.

    Args:
        structure: The real modules.
        device: The replica's device.
        copies: Whether the replica has parameters of its own.
        compile_options: How to compile the root in place, or ``None``.

    Attributes:
        root: The twin of the structure's root.

    Raises:
        ModelError: A TorchScript module would have to be copied to another device.
    """

    def __init__(
        self,
        structure: Structure,
        device: torch.device,
        *,
        copies: bool,
        compile_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = device
        self._twin_of: dict[int, nn.Module] = {}
        self._own: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        for entry in structure.seen:
            module = entry.module
            if is_scripted(module):
                if copies:
                    raise ModelError(_no_script(module, device))
                self._twin_of[id(module)] = module
                continue
            twin = type(module).__new__(type(module))
            self._twin_of[id(module)] = twin
            own: dict[str, Any] = {"_modules": {}, "_buffers": {}}
            if copies:
                own["_parameters"] = {}
            self._own.append((module, twin, own))
        for module, _, own in self._own:
            self._fill(module, own)
        self.root = self._twin_of[id(structure.root)]
        self.buffers = OwnBuffers([(m, own["_buffers"]) for m, _, own in self._own], device)
        for module, twin, own in self._own:
            twin.__dict__.update(module.__dict__)
            twin.__dict__.update(own)
        for module, twin, own in reversed(self._own):  # children first: parents wrap their calls
            _rewire_compiled(module, twin, own)
        if compile_options is not None:
            # Its children may be twins that are compiled by themselves: it comes last.
            self.root.compile(**compile_options)
            root_own = next(own for _, twin, own in self._own if twin is self.root)
            root_own["_compiled_call_impl"] = self.root.__dict__["_compiled_call_impl"]

    def sync(self, *, force: bool = False, suspect: bool = False) -> None:
        """Take over the attributes and buffers that the real modules have now."""
        self.buffers.sync(force=force, suspect=suspect)
        for module, twin, own in self._own:
            attributes = twin.__dict__
            attributes.clear()
            attributes.update(module.__dict__)
            attributes.update(own)

    def has_parameters_of(self, handed: dict[int, Tensor]) -> bool:
        """Whether each parameter of the real modules is the one that was given for that name."""
        for module, _, own in self._own:
            mine = own["_parameters"]
            real = module._parameters
            if len(mine) != len(real):
                return False
            for name, parameter in real.items():
                if mine.get(name, self) is not (None if parameter is None else handed.get(id(parameter))):
                    return False
        return True

    def give_parameters(self, handed: dict[int, Tensor]) -> None:
        """Use these tensors, found by the ``id`` of the real parameter, as parameters."""
        for module, _, own in self._own:
            mine = own["_parameters"]
            mine.clear()
            for name, parameter in module._parameters.items():
                mine[name] = None if parameter is None else handed[id(parameter)]
            if isinstance(module, nn.RNNBase):
                _give_flat_weights(module, own)

    def flatten_rnn_weights(self, residents: dict[int, Tensor]) -> None:
        """Lay the resident weights of recurrent layers in one piece, as their kernels want it."""
        if self.device.type != "cuda":
            return
        self.give_parameters(residents)
        for module, twin, own in self._own:
            if isinstance(twin, nn.RNNBase):
                twin.__dict__.update({**module.__dict__, **own})
                twin.flatten_parameters()

    def _fill(self, module: nn.Module, own: dict[str, Any]) -> None:
        for name, child in module._modules.items():
            own["_modules"][name] = None if child is None else self._twin_of[id(child)]
        for name, value in module.__dict__.items():
            # An instance attribute that leads to a real module must lead to its twin.
            if isinstance(value, MethodType) and id(value.__self__) in self._twin_of:
                own[name] = MethodType(value.__func__, self._twin_of[id(value.__self__)])
            elif isinstance(value, nn.Module) and id(value) in self._twin_of:
                own[name] = self._twin_of[id(value)]


def _give_flat_weights(module: nn.RNNBase, own: dict[str, Any]) -> None:
    """Let a recurrent layer find its weights at once, or it gathers them anew on each forward."""
    mine = own["_parameters"]
    names = module._flat_weights_names
    if all(name in mine for name in names):
        weights = [mine[name] for name in names]
        own["_flat_weights"] = weights
        own["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]


def _rewire_compiled(module: nn.Module, twin: nn.Module, own: dict[str, Any]) -> None:
    """Let the twin of a compiled module run the twin of what was compiled."""
    if "dynamo_ctx" in module.__dict__ and "_orig_mod" in own["_modules"]:
        # torch.compile(module): its forward is a closure over the original.
        fresh = type(module)(own["_modules"]["_orig_mod"], module.__dict__["dynamo_ctx"])
        own["forward"] = fresh.__dict__["forward"]
    elif module.__dict__.get("_compiled_call_impl") is not None:
        # module.compile() by somebody else: the options are not kept, so the twin runs as it was written.
        own["_compiled_call_impl"] = None
    twin.__dict__.update(own)


def _no_script(module: nn.Module, device: torch.device) -> str:
    return (
        f"a TorchScript module ({type(module).__name__}) cannot be replicated on {device}: its "
        "parameters are out of Python's reach; give the module that was scripted, or torch.compile"
    )
