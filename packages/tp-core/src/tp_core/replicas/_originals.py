"""The buffers of the real modules, and which of them have changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from tp_core.replicas._contents import Contents
from tp_core.replicas._mirror import version_of

__all__ = ["OriginalBuffers"]

SMALL_NUMEL = 65_536
"""Up to so many elements, a needless copy is preferred to a stale one."""

_COUNTS = (_BatchNorm.forward, SyncBatchNorm.forward)


@dataclass(slots=True)
class _Buffer:
    """One buffer.

    Attributes:
        tensor: The buffer itself.
        owners: The modules that have it.
        generation: A number that differs after each change.
        seen: Its version when it was last checked.
        was_training: Whether an owner was in training mode then.
        follows: Whether it may change silently while a module is in training mode.
        is_unsure: Whether it may do so in evaluation, too.
        counter: The layer's counter of batches, where that reveals changes.
    """

    tensor: Tensor
    owners: list[nn.Module]
    generation: int = 0
    seen: Any = None
    was_training: bool = True
    follows: bool = False
    is_unsure: bool = False
    counter: Tensor | None = None

    def look(self, *, suspect: bool) -> bool:
        """Return whether it has changed, or may have, since the last time."""
        seen = version_of(self.tensor), None if self.counter is None else version_of(self.counter)
        training = any(m.training for m in self.owners)
        silent = self.follows and (suspect or training or self.was_training)
        changed = silent or self.is_unsure or seen != self.seen
        self.seen, self.was_training = seen, training
        return changed


class OriginalBuffers:
    """The buffers of the real modules.

    Version counters reveal most changes, but kernels such as ``batch_norm``, and writes through ``.data``,
    leave them as they were. So a buffer that may be learned counts as changed on each call in
    training mode: any that is saved with the state, and any small one. Large tables that are not saved
    are taken as unchanged where their counters are. In evaluation small ones that are saved count as
    changed, too, except those of BatchNorm, which counts its batches.

    Args:
        modules: The modules that have the buffers.

    Attributes:
        modules: Those modules.
        tensors: The buffers, each once.
        slots: For each, where it stands: the number of a module, and a name.
        holders: The numbers of the modules that have any.
        generations: For each, a number that differs after a change.
        layout: A number that differs if there are other buffers, or other names.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._contents = Contents(m._buffers for m in modules)
        self._version = -1
        self._clock = 0
        self._read()

    def look(self, *, version: int, suspect: bool) -> None:
        """Note what has changed.

        Args:
            version: The structure's version: as long as it is the same, so are the buffers.
            suspect: The module ran without replicas since: buffers may have changed silently.
        """
        if version != self._version:
            self._version = version
            if not self._contents.is_same():
                self._contents.read()
                self._read()
        if not self._buffers:
            return
        self._clock += 1
        for buffer in self._buffers:
            if buffer.look(suspect=suspect):
                buffer.generation = self._clock
        self.generations = [b.generation for b in self._buffers]

    def _read(self) -> None:
        self._clock += 1
        self.layout = self._clock
        found: dict[int, _Buffer] = {}
        slots: dict[int, list[tuple[int, str]]] = {}
        for number, module in enumerate(self.modules):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    # A tensor under two names is one buffer.
                    buffer = found.setdefault(id(tensor), _Buffer(tensor, []))
                    buffer.owners.append(module)
                    slots.setdefault(id(tensor), []).append((number, name))
                    _judge(buffer, module, name)
        self._buffers = list(found.values())
        self.tensors = [b.tensor for b in self._buffers]
        self.slots = list(slots.values())
        self.holders = sorted({number for row in self.slots for number, _ in row})
        self.generations = [0] * len(self._buffers)


def _judge(buffer: _Buffer, module: nn.Module, name: str) -> None:
    """Set which changes of a buffer its version counter does not reveal."""
    tensor = buffer.tensor
    is_small = tensor.numel() <= SMALL_NUMEL
    is_saved = name not in module._non_persistent_buffers_set
    is_learned = is_saved and tensor.is_floating_point()
    counter = None
    if isinstance(module, _BatchNorm) and type(module).forward in _COUNTS and "forward" not in vars(module):
        counter = module.num_batches_tracked
    buffer.follows |= is_small or is_learned
    buffer.is_unsure |= (is_learned and is_small and counter is None) or tensor.requires_grad
    if counter is not None and counter is not tensor:
        buffer.counter = counter
