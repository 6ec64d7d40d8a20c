"""Prepared loaders: what a script of Accelerate knows of them, around tp's own."""

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from tp_core.data import PreparedLoader


class AcceleratedLoader:
    """A prepared loader: what a script of Accelerate knows of it, around tp's own.

    Args:
        active: The loaders under iteration, the innermost last; this one joins them.
        prepared: tp's loader.
        skip: How many batches iterations leave out.
    """

    def __init__(self, active: list[Any], prepared: PreparedLoader, *, skip: int = 0) -> None:
        self._active = active
        self.prepared = prepared
        self._skip = skip

    def __len__(self) -> int:
        return len(self.prepared) - self._skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "prepared":
            raise AttributeError(name)
        return getattr(self.prepared, name)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was yielded last is the last one."""
        try:
            return self.prepared.number + 1 >= len(self.prepared)
        except (TypeError, ValueError):  # a stream, of which nobody knows the length
            return not self.prepared.has_more()

    @property
    def holds_nothing(self) -> bool:
        """Whether this process has no sample of the batch that was yielded last."""
        return self.prepared.share is not None and self.prepared.share.samples == 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.prepared.set_epoch(epoch)

    def load(self, state: Mapping[str, Any], *, within: bool) -> None:
        """Restore a position: within the epoch, or the epoch alone, for ``skip_first_batches``."""
        if within:
            self.prepared.load_state_dict(state)
            return
        is_over = state["batches"] >= len(self.prepared)
        begin = {"seed": state["seed"], "epoch": state["epoch"] + is_over, "batches": 0, "samples": 0}
        self.prepared.load_state_dict({**state, **begin})

    def __iter__(self) -> Iterator[Any]:
        active, drop = self._active, self._skip
        size = getattr(self.prepared, "batch_size", None)
        if drop and size is not None and self.prepared.stream is None:
            at = {"batches": drop, "samples": drop * size, "epoch": self.prepared.next_epoch}
            self.prepared.load_state_dict({**self.prepared.state_dict(batches=0), **at, "order": None})
            drop = 0
        active.append(self)
        try:
            for batch in self.prepared:
                if drop:
                    drop -= 1
                    continue
                yield batch
        finally:
            active.remove(self)


class _JoinedBatches:
    """Makes the batches of all processes together."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number = inner, number
        self.sampler = getattr(inner, "sampler", None)

    def __len__(self) -> int:
        return math.ceil(len(self.inner) / self.number)

    def __iter__(self) -> Iterator[list[Any]]:
        joined: list[Any] = []
        for count, batch in enumerate(self.inner, start=1):
            joined += batch
            if count % self.number == 0:
                yield joined
                joined = []
        if joined:
            yield joined


def batches_of_all_processes(loader: DataLoader[Any], number: int) -> DataLoader[Any]:
    """Return a loader with batches of ``number`` processes together; the loader's options stay."""
    own = loader.batch_sampler
    if number == 1 or own is None:
        return loader
    larger: Any = _JoinedBatches(own, number)
    if type(own) is BatchSampler:
        larger = BatchSampler(own.sampler, own.batch_size * number, own.drop_last)
    copied = copy.copy(loader)
    # Past __setattr__: DataLoader refuses to assign these once it is initialized.
    copied.__dict__["batch_sampler"] = larger
    if loader.batch_size is not None:
        copied.__dict__["batch_size"] = loader.batch_size * number
    return copied
