"""Everything that the replicas keep between calls, and when it is renewed."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tp_core.replicas._mirror import Mirror, hand_out
from tp_core.replicas._structure import Structure
from tp_core.replicas._twins import Twins

__all__ = ["Residents"]


class Residents:
    """The twins and mirrors of one module.

    Args:
        module: The real module.
        devices: One device per replica.
        force_copies: Give every replica parameters of its own.

    Attributes:
        compile_options: How the modules of replicas are compiled, or ``None``; heeded by those that are
            made from then on.
    """

    def __init__(self, module: nn.Module, devices: tuple[torch.device, ...], *, force_copies: bool) -> None:
        self.compile_options: Mapping[str, Any] | None = None
        self._module = module
        self._devices = devices
        home = devices[0]
        # Replicas on one device share its mirror; those on the home device need none.
        self._keys: list[Any] = [
            number if force_copies else (None if device == home else device)
            for number, device in enumerate(devices)
        ]
        self._mirrors: dict[Any, Mirror] = {}
        self._structure: Structure | None = None
        self._twins: dict[int, Twins] = {}
        self._parameters: list[Parameter] = []
        self._handed: dict[Any, dict[int, Tensor]] = {}
        self._handed_for: Any = None
        # Counted, since each replica and each mirror learns of it when it takes part next.
        self._refreshes = 0
        self._solos = 0
        self._refreshed: dict[Any, int] = {}
        self._suspected: dict[int, int] = {}
        self._watches_optimizers = False

    @property
    def mirrors(self) -> tuple[Mirror, ...]:
        """The mirrors that exist so far."""
        return tuple(self._mirrors.values())

    def refresh(self) -> None:
        """Copy everything at the next call."""
        self._refreshes += 1

    def note_run_alone(self) -> None:
        """Note that the module ran without the others, and may have changed buffers untracked."""
        self._solos += 1

    def prepare(self, count: int, *, grad: bool) -> list[nn.Module]:
        """Return the first ``count`` replicas, equal to the module as it is now.

        Args:
            count: How many take part.
            grad: Whether gradients are to reach the parameters.
        """
        structure = self._structure
        if structure is None or not structure.is_current():
            structure = self._structure = Structure(self._module, self._devices[0])
            self._twins.clear()
            self._handed_for = None
        if any(key is not None for key in self._keys[1:count]):
            self._prepare_parameters(structure, count, grad=grad)
        roots = [self._module]
        for number in range(1, count):
            twins = self._twins_of(number, structure)
            twins.sync(
                force=self._must_refresh(("buffers", number)),
                suspect=self._suspected.get(number) != self._solos,
            )
            self._suspected[number] = self._solos
            roots.append(twins.root)
        return roots

    def _must_refresh(self, who: Any) -> bool:
        """Whether there was a `refresh` since this was asked for ``who``."""
        due = self._refreshed.get(who, 0) != self._refreshes
        self._refreshed[who] = self._refreshes
        return due

    def _twins_of(self, number: int, structure: Structure) -> Twins:
        twins = self._twins.get(number)
        if twins is None:
            copies = self._keys[number] is not None
            twins = Twins(
                structure, self._devices[number], copies=copies, compile_options=self.compile_options
            )
            self._twins[number] = twins
        return twins

    def _prepare_parameters(self, structure: Structure, count: int, *, grad: bool) -> None:
        """Bring the mirrors up to date and give their tensors to the twins."""
        keys = [k for k in dict.fromkeys(self._keys[1:count]) if k is not None]
        parameters = list(structure.root.parameters())
        known = self._parameters
        if len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=True)):
            structure.check()
            self._parameters, self._handed_for = parameters, None
            for mirror in self._mirrors.values():
                mirror.follow(parameters)
        for number, key in enumerate(self._keys[:count]):
            if number and key is not None and key not in self._mirrors:
                self._add_mirror(number, key, structure)
        for key in keys:
            if self._mirrors[key].refresh(force=self._must_refresh(key)):
                self._handed_for = None
        self._give(keys, count, structure, grad=grad)

    def _add_mirror(self, number: int, key: Any, structure: Structure) -> None:
        mirror = self._mirrors[key] = Mirror(self._devices[number])
        mirror.follow(self._parameters)
        residents = dict(zip(map(id, self._parameters), mirror.residents, strict=True))
        self._twins_of(number, structure).flatten_rnn_weights(residents)
        if not self._watches_optimizers:
            self._watches_optimizers = True
            _watch_fused_optimizers(self)

    def _give(self, keys: list[Any], count: int, structure: Structure, *, grad: bool) -> None:
        """Hand the residents out, or let the twins keep those that they have."""
        wanted = (tuple(keys), tuple(grad and p.requires_grad for p in self._parameters))
        if self._handed_for != wanted:
            mirrors = [self._mirrors[k] for k in keys]
            rows = hand_out(self._parameters, mirrors) if grad else [m.residents for m in mirrors]
            ids = [id(p) for p in self._parameters]
            self._handed = {k: dict(zip(ids, row, strict=True)) for k, row in zip(keys, rows, strict=True)}
            self._handed_for = wanted
        for number in range(1, count):
            if self._keys[number] is not None:
                twins = self._twins_of(number, structure)
                handed = self._handed[self._keys[number]]
                if not twins.has_parameters_of(handed):
                    twins.give_parameters(handed)

    def note_step(self, optimizer: Optimizer) -> None:
        """Copy everything after a step that moves no version counters."""
        if not any(group.get("fused") for group in optimizer.param_groups):
            return
        mine = set(map(id, self._parameters))
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._refreshes += 1


def _watch_fused_optimizers(residents: Residents) -> None:
    """Tell ``residents`` of optimizer steps, for as long as they live.

    The fused kernels write parameters and leave their version counters as they were.
    """
    reference = weakref.ref(residents)

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's
        living = reference()
        if living is not None:
            living.note_step(optimizer)

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(residents, handle.remove)
