"""A replica's own copies of the buffers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tp_core.replicas._coalesce import copy_coalesced
from tp_core.replicas._mirror import version_of

__all__ = ["OwnBuffers"]

UNTRACKED_NUMEL = 65_536
"""Kernels such as batch_norm write running statistics without moving version counters. A buffer of
a module in training mode up to this size is therefore copied each time; larger ones (masks, tables)
are trusted to tell."""


@dataclass(slots=True)
class _Copy:
    """One buffer of the real modules, and the replica's own copy of it."""

    source: Tensor
    own: Tensor
    slots: list[tuple[nn.Module, dict[str, Tensor | None], str]]
    seen: Any = None
    was_training: bool = True

    def versions(self) -> Any:
        return version_of(self.source), version_of(self.own)

    def is_stale(self, *, suspect: bool) -> bool:
        training = any(module.training for module, _, _ in self.slots)
        may_have_changed = suspect or training or self.was_training
        untracked = may_have_changed and self.source.numel() <= UNTRACKED_NUMEL
        self.was_training = training
        return untracked or self.seen != self.versions()


class OwnBuffers:
    """The buffers of one replica: copies, because its forward may write into them.

    What it writes is lost with the next forward, as in ``nn.DataParallel``: the statistics that
    live on are those of replica 0, which is the module itself.

    Args:
        pairs: The real modules, each with the dictionary in which the replica's buffers go.
        device: The replica's device.
    """

    def __init__(self, pairs: list[tuple[nn.Module, dict[str, Tensor | None]]], device: torch.device) -> None:
        self._pairs = pairs
        self._device = device
        self._copies: dict[int, _Copy] = {}

    def sync(self, *, force: bool = False, suspect: bool = False) -> None:
        """Make the replica's buffers equal to the module's, copying only what changed.

        Args:
            force: Copy all of them.
            suspect: The module ran by itself since: its small buffers may have changed untracked.
        """
        if not self._is_complete():
            self._read()
        stale = [c for c in self._copies.values() if force or c.is_stale(suspect=suspect)]
        if not stale:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            plain = [c for c in stale if not c.source.requires_grad]
            # New tensors and no copies in place: a graph of an earlier forward may hold the old.
            for copy in plain:
                copy.own = torch.empty_like(copy.source, device=self._device)
            copy_coalesced([c.own for c in plain], [c.source for c in plain])
        for copy in stale:
            if copy.source.requires_grad:
                copy.own = copy.source.to(self._device)
            copy.seen = copy.versions()
            for _, slots, name in copy.slots:
                slots[name] = copy.own

    def _is_complete(self) -> bool:
        """Whether every name still holds the tensor that it held when the slots were read."""
        copies = self._copies
        for module, own in self._pairs:
            source = module._buffers
            if len(source) != len(own):
                return False
            for name, tensor in source.items():
                if tensor is None:
                    if own.get(name, self) is not None:
                        return False
                    continue
                copy = copies.get(id(tensor))
                if copy is None or own.get(name) is not copy.own:
                    return False
        return True

    def _read(self) -> None:
        self._copies = {}
        for module, own in self._pairs:
            own.clear()
            for name, tensor in module._buffers.items():
                if tensor is None:
                    own[name] = None
                    continue
                # A tensor under two names is one buffer in the replica too.
                copy = self._copies.setdefault(id(tensor), _Copy(tensor, tensor, []))
                copy.slots.append((module, own, name))
