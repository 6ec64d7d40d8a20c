"""A replica's own copies of the buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_core.replicas._coalesce import copy_coalesced
from tp_core.replicas._contents import Contents
from tp_core.replicas._originals import OriginalBuffers

__all__ = ["OwnBuffers"]


class OwnBuffers:
    """The buffers of one replica: copies, because its forward may write into them.

    What it writes is lost with the next forward, as in ``nn.DataParallel``: the statistics that are
    kept are those of replica 0, which is the module itself.

    Args:
        originals: The buffers of the real modules.
        rows: For each of those modules, the dictionary in which the replica's buffers go.
        device: The replica's device.
    """

    def __init__(
        self, originals: OriginalBuffers, rows: Sequence[dict[str, Tensor | None]], device: torch.device
    ) -> None:
        self._originals = originals
        self._rows = rows
        self._device = device
        self._layout = -1
        self._generations: list[int] = []
        self._own: list[Tensor] = []
        self._versions: list[Any] = []
        self._contents = Contents([])

    def sync(self, *, force: bool = False) -> None:
        """Make the replica's buffers equal to the module's, copying only what changed.

        Args:
            force: Copy all of them.
        """
        originals = self._originals
        if originals.layout == self._layout and not self._own:
            return
        wanted = originals.generations
        force = force or originals.layout != self._layout or not self._contents.is_same()
        versions = _versions_of(self._own)
        if not force and wanted == self._generations and versions == self._versions:
            return
        if force:
            stale = list(range(len(wanted)))
            self._own, self._versions = list(originals.tensors), [None] * len(wanted)
        else:
            now = zip(wanted, self._generations, versions, self._versions, strict=True)
            stale = [i for i, (a, b, c, d) in enumerate(now) if a != b or c != d]
        self._copy(stale)
        for i in stale:
            self._versions[i] = _versions_of([self._own[i]])[0]
        self._generations = wanted
        if force:
            self._layout = originals.layout
            for row, module in zip(self._rows, originals.modules, strict=True):
                row.clear()
                row.update(module._buffers)  # those that are None, and the order of the others
            self._contents = Contents(self._rows[number] for number in originals.holders)
        for i in stale:
            for number, name in originals.slots[i]:
                self._rows[number][name] = self._own[i]
        self._contents.read()

    def _copy(self, stale: list[int]) -> None:
        sources = self._originals.tensors
        plain = [i for i in stale if not sources[i].requires_grad]
        with torch.inference_mode(mode=False), torch.no_grad():
            # New tensors and no copies in place: a graph of an earlier forward may hold the old.
            for i in plain:
                self._own[i] = torch.empty_like(sources[i], device=self._device)
            copy_coalesced([[self._own[i] for i in plain]], [sources[i] for i in plain])
        for i in stale:
            if sources[i].requires_grad:
                self._own[i] = sources[i].to(self._device)


def _versions_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the version counters; of tensors made in inference mode, which have none, something new."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [object() if t.is_inference() else t._version for t in tensors]
