"""The cache of replicas between calls, and the rules for its renewal."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tp_core.errors import ModelError
from tp_core.replicas._mirror import (
    OriginalBuffers,
    ParameterMirror,
    expose_to_autograd,
    refresh,
    same_objects,
    side_stream,
    versions_of,
)
from tp_core.replicas._replica_modules import ReplicaModules, Structure, is_scripted
from tp_core.tensors._slices import check_no_max_norm

ForceCopies = bool | Literal["flat"]


class ReplicaCache:
    """The modules of all replicas of one module, and the mirrors of its parameters.

    Args:
        module: The real module.
        devices: One device per replica.
        force_copies: Give every replica parameters of its own; as ``"flat"``, copied as between devices.

    Attributes:
        compile_options: The options of ``torch.compile`` for replicas that are made afterwards, or ``None``.
    """

    def __init__(
        self, module: nn.Module, devices: tuple[torch.device, ...], *, force_copies: ForceCopies
    ) -> None:
        self.compile_options: Mapping[str, Any] | None = None
        self._module = module
        self._devices = devices
        self._force_flat = force_copies == "flat"
        home = devices[0]
        # Replicas on one device share its mirror; those on the home device need none. But a step may disable
        # adapters, and peft (0.21) then changes `requires_grad` in the thread of one replica: others that
        # share the parameters would miss gradients. Only peft's layers have this attribute.
        shares = not force_copies and not any(hasattr(m, "adapter_layer_names") for m in module.modules())
        self._keys: list[Any] = [
            number if not shares else None if device == home else device
            for number, device in enumerate(devices)
        ]
        self._copies = any(key is not None for key in self._keys[1:])
        self._mirrors: dict[Any, ParameterMirror] = {}
        self._structure: Structure | None = None
        self._buffers = OriginalBuffers([])
        self._modules: dict[int, ReplicaModules] = {}
        self._parameters: list[Parameter] = []
        self._exposed: dict[Any, dict[int, Tensor]] = {}
        self._exposed_for: Any = None
        # Counters and no flags: fewer parts than devices leave replicas out of a call, and each compares
        # the counter with what it saw when it takes part again.
        self._refreshes = 0
        self._runs_alone = 0
        self._refreshed: dict[Any, int] = {}
        self._suspected = 0
        self._watches_optimizers = False
        self._positions: dict[int, int] = {}
        self._training = module.training
        self._backward = _Backward()

    @property
    def mirrors(self) -> tuple[ParameterMirror, ...]:
        """The mirrors that exist so far."""
        return tuple(self._mirrors.values())

    def refresh(self) -> None:
        """Copy everything at the next call."""
        self._refreshes += 1

    def note_run_alone(self) -> None:
        """Record that the module ran without the others, and may have changed buffers untracked."""
        self._runs_alone += 1

    def prepare(self, count: int, *, grad: bool) -> list[nn.Module]:
        """Return the first ``count`` replicas, equal to the module as it is now.

        Args:
            count: The number of replicas.
            grad: Whether gradients must reach the parameters.

        Collective: none. Forward copies changed parameters to each device; backward sums their gradients.
        """
        if self._may_have_changed_silently():
            self._refreshes += 1
        structure = self._structure
        if structure is None or not structure.is_current():
            structure = self._structure = Structure(self._module, self._devices[0])
            if self._copies:
                check_no_max_norm(self._module, "each device")
            plain = [o.module for o in structure.originals if not is_scripted(o.module)]
            self._buffers = OriginalBuffers(plain)
            self._modules.clear()
            self._exposed_for = None
        self._buffers.look(version=structure.version, suspect=self._suspected != self._runs_alone)
        self._suspected = self._runs_alone
        if self._copies and any(key is not None for key in self._keys[1:count]):
            self._prepare_parameters(structure, count, grad=grad)
        roots = [self._module]
        for number in range(1, count):
            modules = self._modules_of(number, structure)
            modules.sync(force=self._must_refresh(("buffers", number)))
            roots.append(modules.root)
        return roots

    def _must_refresh(self, who: Any) -> bool:
        """Return whether there was a `refresh` since the last call for ``who``."""
        due = self._refreshed.get(who, 0) != self._refreshes
        self._refreshed[who] = self._refreshes
        return due

    def _modules_of(self, number: int, structure: Structure) -> ReplicaModules:
        modules = self._modules.get(number)
        if modules is None:
            copies = self._keys[number] is not None
            modules = ReplicaModules(
                structure,
                self._buffers,
                self._devices[number],
                copies=copies,
                compile_options=self.compile_options,
            )
            self._modules[number] = modules
        return modules

    def _prepare_parameters(self, structure: Structure, count: int, *, grad: bool) -> None:
        """Update the mirrors and give their tensors to the modules.

        Raises:
            ModelError: A transform of torch.func is active; its wrapped copies are of no use after it.
        """
        # Private: torch has no public way to ask for an active transform of torch.func.
        if torch._C._are_functorch_transforms_active():
            msg = (
                "transforms of torch.func (grad, vmap, ...) do not follow a module to its copies on other "
                "devices: transform the module itself, or replicas on one device that share its memory"
            )
            raise ModelError(msg)
        keys = [k for k in dict.fromkeys(self._keys[1:count]) if k is not None]
        parameters = structure.parameters()
        if not same_objects(self._parameters, parameters):
            self._parameters, self._exposed_for = parameters, None
            self._positions = {id(p): i for i, p in enumerate(parameters)}
            for mirror in self._mirrors.values():
                mirror.follow(parameters)
        for key in keys:
            if key not in self._mirrors:
                self._add_mirror(key, structure)
        now = versions_of(parameters)
        forced = [self._must_refresh(key) for key in keys]
        replaced = refresh([self._mirrors[key] for key in keys], now, forced=forced)
        for key, is_replaced in zip(keys, replaced, strict=True):
            if is_replaced:
                self._exposed_for = None
                self._flatten(key, structure)
        self._give(keys, count, structure, grad=grad)

    def _add_mirror(self, key: Any, structure: Structure) -> None:
        mirror = self._mirrors[key] = ParameterMirror(
            self._devices[self._keys.index(key)], force_flat=self._force_flat
        )
        mirror.follow(self._parameters)
        self._flatten(key, structure)
        if not self._watches_optimizers:
            self._watches_optimizers = True
            _watch_optimizers(self)

    def _flatten(self, key: Any, structure: Structure) -> None:
        """Lay the weights of recurrent layers in one piece of memory again, after a mirror replaced them."""
        copies = dict(zip(map(id, self._parameters), self._mirrors[key].copies, strict=True))
        self._modules_of(self._keys.index(key), structure).flatten_rnn_weights(copies)

    def _give(self, keys: list[Any], count: int, structure: Structure, *, grad: bool) -> None:
        """Give the copies to the modules, unless they have them already."""
        trained = [p.requires_grad for p in self._parameters] if grad else []
        # Autograd runs backward on the stream of the forward: another stream needs another graph.
        wanted = keys, grad, trained, side_stream(self._devices[0])
        if self._exposed_for != wanted:
            mirrors = [self._mirrors[k] for k in keys]
            rows = expose_to_autograd(self._parameters, mirrors) if grad else [m.copies for m in mirrors]
            self._backward.watch(rows)
            ids = [id(p) for p in self._parameters]
            self._exposed = {k: dict(zip(ids, row, strict=True)) for k, row in zip(keys, rows, strict=True)}
            self._exposed_for = wanted
        for number in range(1, count):
            if self._keys[number] is not None:
                modules = self._modules_of(number, structure)
                exposed = self._exposed[self._keys[number]]
                if modules.given is not exposed:
                    modules.give_parameters(exposed)

    def note_step(self, optimizer: Optimizer) -> None:
        """Mark what an optimizer has updated for the next copy: version counters may be unchanged."""
        positions = self._positions
        # An optimizer skips its frozen parameters: to copy these would cost a transfer for nothing.
        stepped = [
            positions[id(p)]
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in positions and (p.requires_grad or p.grad is not None)
        ]
        if stepped:
            self._backward.has_passed = False
            for mirror in self._mirrors.values():
                mirror.suspect(stepped)

    def _may_have_changed_silently(self) -> bool:
        """Return whether the program may have written parameters through ``.data`` since the last call.

        Programs swap averaged weights in and out where the mode changes. A training loop without an
        optimizer calls ``zero_grad()`` once it has used the gradients.
        """
        training, self._training = self._training, self._module.training
        if training is not self._training:
            return True
        backward = self._backward
        if backward.has_passed and all(p.grad is None for p in self._parameters):
            backward.has_passed = False
            return True
        return False


class _Backward:
    """A flag that is set once gradients have passed through the exposed parameters."""

    __slots__ = ("__weakref__", "has_passed")

    def __init__(self) -> None:
        self.has_passed = False

    def watch(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Add hooks to the graph of these tensors."""
        reference = weakref.ref(self)  # a graph that outlives the replicas must not keep this alive

        def note(*_: Any) -> None:
            living = reference()
            if living is not None:
                living.has_passed = True

        for node in {t.grad_fn for row in rows for t in row if t.grad_fn is not None}:
            node.register_hook(note)


def _watch_optimizers(cache: ReplicaCache) -> None:
    """Report optimizer steps to ``cache`` for as long as it lives.

    Fused kernels, and steps that are written with ``.data``, leave version counters unchanged.
    """
    reference = weakref.ref(cache)  # torch's hook is global: it must not keep the module's copies alive

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's
        living = reference()
        if living is not None:
            living.note_step(optimizer)

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(cache, handle.remove)
