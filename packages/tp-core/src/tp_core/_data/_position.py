"""Where a loader stands, told and found again: what a checkpoint keeps of it."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

from tp_core._data._batches import EpochBatches
from tp_core._data._streams import Stream
from tp_core._data._user_loaders import order_is_ours
from tp_core.errors import LoaderError

__all__ = ["LoaderPosition"]


class LoaderPosition:
    """The seed, the epoch and the batch that a loader is at."""

    loader: Iterable[Any]
    number: int
    stream: Stream | None
    goes_on: bool
    _has_begun: bool
    _seed: int
    _epoch: int
    _first: int
    _batches: EpochBatches | None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have an iteration go over all of a stream in this block; one that trains on it goes on after it."""
        stream, number = self.stream, self.number
        if stream is None or not self.goes_on:
            yield
            return
        self.stream = own = stream.anew()
        self.goes_on = False
        try:
            yield
        finally:
            own.close()
            self.stream, self.goes_on, self.number = stream, True, number

    def check_position(self) -> None:
        """Make sure that a run could go on from a checkpoint in the middle of these batches.

        Raises:
            LoaderError: Only workers would know where a stream stands.
        """
        if self.stream is not None and self.goes_on:
            self.stream.check_position()

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return where the loader stands, for :meth:`load_state_dict`.

        Args:
            batches: How many batches of the current epoch have been used; all that were yielded by default.
        """
        epoch = self._epoch - 1
        if batches is None:
            epoch, batches = (epoch, self.number + 1) if self._has_begun else (self._epoch, self._first)
        state: dict[str, Any] = {"seed": self._seed, "epoch": epoch, "batches": batches}
        if self._batches is not None:
            state["samples"] = sum(map(len, self._batches.order_of(epoch)[:batches]))
            state["dataset"] = self._n_samples()
            if not order_is_ours(self._batches.inner):
                state["order"] = self._batches.digest_of(epoch)
        elif self.stream is not None:
            state["stream"] = self.stream.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = False) -> int:
        """Make the next iteration go on from where a loader stood.

        Batches of a ``DataLoader`` over a dataset with length are skipped by their indices: no
        sample of them is read.

        Args:
            state: What :meth:`state_dict` returned.
            replay: Read the batches before it again and drop them, where the loader has no other
                way.

        Returns:
            How many batches of the epoch are done; another batch size makes another number.

        Raises:
            LoaderError: The loader can only be brought there by a replay; or the place is in the
                middle of one of its batches; or of an epoch over another number of samples.
        """
        had, has = state.get("dataset"), self._n_samples()
        if state.get("samples") and had != has:
            msg = (
                f"the dataset has {has} samples, and had {had} where it stood at sample {state['samples']} "
                "of an epoch: their order is another one now; give the same data, or go on from the end "
                "of an epoch"
            )
            raise LoaderError(msg)
        self._seed, self._epoch, self._has_begun = state["seed"], state["epoch"], False
        batches: int = state["batches"]
        if self._batches is not None:
            self._batches.seed = self._seed
            self._first = batches = self._batches.find(
                self._epoch, state.get("samples", 0), order=state.get("order")
            )
        elif self.stream is not None:
            stream = state.get("stream") or state
            self.stream.load_state_dict(
                stream,
                seed=self._seed,
                epoch=self._epoch,
                batches=batches,
                replay=replay,
                goes_on=self.goes_on,
            )
            self._first = batches
        return batches

    def _n_samples(self) -> int | None:
        dataset = getattr(self.loader, "dataset", None)
        return len(dataset) if isinstance(dataset, Sized) else None
