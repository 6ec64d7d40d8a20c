"""Prepared loaders: one rank's share of every batch, moved to its device, with a position to resume from."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tp_core._contracts._batch import Share
from tp_core.data._rank_batches import Ranks, n_samples, rank_batches
from tp_core.data._streams import Stream
from tp_core.errors import LoaderError


class PreparedLoader:
    """An iterable over one data rank's share of every batch of a loader, moved to its device.

    Each new iteration is the next epoch, unless :meth:`set_epoch` chose another. The user's loader keeps
    all its options and is not changed.

    Attributes:
        loader: The user's loader.
        watch: A wrapper of every iteration, to observe what is yielded; ``None`` costs nothing.
        number: The number of the last batch of the epoch, from 0, among those of all data ranks. In
            evaluation a rank skips a batch of which it has no sample.
        share: The samples of that batch that this rank has, and all ranks have, for `Session.backward`;
            ``None`` before the first.
        continues_stream: Whether an iteration over a stream continues where the one before ended, instead of
            from the beginning. Its consumer ends it, or the stream's end if it began with the stream.
    """

    continues_stream = False
    watch: Callable[[Iterator[Any]], Iterator[Any]] | None = None
    number = -1
    share: Share | None = None

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        training: bool = True,
        shard: bool = True,
        move: Callable[[Any], Any] | None = None,
        agree: Callable[..., None] | None = None,
        any_rank: Callable[[bool], bool] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        collate: Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]] | None = None,
        parts: int | None = None,
    ) -> None:
        """Prepare ``loader``.

        Args:
            loader: A ``DataLoader``, or with one data rank any iterable of batches.
            seed: Orders the samples, together with the epoch.
            rank: The data rank.
            size: The number of data ranks.
            training: Whether a rank without samples of a batch gets a stand-in. In evaluation small
                batches are joined, or skipped by ranks that have no sample of them.
            shard: Whether batches are split over the data ranks.
            move: Moves a batch to the device; ``None`` leaves it where it is.
            agree: ``agree(what, value, remedy=...)`` raises unless all ranks have the same value.
            any_rank: ``any_rank(mine)`` returns whether it holds on any rank. Given where ranks must take the
                same steps in evaluation, too: a rank without samples then gets a stand-in.
            gather: ``gather(value)`` returns the value of each data rank. With it ranks that have samples of
                their own know of each other how many are in each batch.
            collate: Turns the collate function of a ``DataLoader`` into the one to use; batches of
                other loaders stay as they are.
            parts: The number of devices that a batch in `Parts` is for; an `ElasticLoader` makes as many.

        Raises:
            LoaderError: The loader cannot be iterated, or not be split over the ranks.

        Collective: with ``agree`` and ``gather``, their all-gathers of objects; none without.
        """
        if not isinstance(loader, Iterable):
            msg = f"a loader must be iterable, got {type(loader).__name__}: {loader!r}"
            raise LoaderError(msg)
        self.loader = loader
        self._seed, self._move = seed, move
        # The epoch of the next iteration, its first batch, and whether the one before it has begun.
        self._epoch, self._first = 0, 0
        self._has_begun = False
        ranks = Ranks(
            rank, size, shard=shard, training=training, agree=agree, any_rank=any_rank, gather=gather
        )
        self._batches = rank_batches(loader, ranks, seed=seed, collate=collate, parts=parts)

    @property
    def stream(self) -> Stream | None:
        """The loader's own batches, where tp cannot choose them."""
        return self._batches.stream

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._batches.stream = stream

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def measured(self) -> dict[str, float]:
        """Return the sums that an elastic loader has of this rank's batches; none of another loader."""
        return self._batches.measured()

    def __len__(self) -> int:
        """Return the number of batches of the next epoch.

        Raises:
            LoaderError: The user's loader has no length.
        """
        return self._batches.length(self._epoch)

    def has_more(self) -> bool:
        """Return whether there is a batch after the last one that was yielded, whatever the length said.

        Call it during the iteration. A stream keeps that batch for the next epoch; another loader drops it.
        """
        return self._batches.has_more(self.number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not there yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        first, self._first = self._first, 0
        self._has_begun = True
        batches = self._batches.iterate(self, epoch, first=first, move=self._move)
        if self.watch is None:
            return batches
        return self.watch(batches)

    # -- positions for checkpoints ------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make iterations in this block cover the whole stream; training then continues where it was."""
        stream, number, share = self.stream, self.number, self.share
        if stream is None or not self.continues_stream:
            yield
            return
        self.stream = own = stream.again()
        self.continues_stream = False
        try:
            yield
        finally:
            own.close()
            self.stream, self.continues_stream, self.number, self.share = stream, True, number, share

    def check_position(self) -> None:
        """Check that a run could continue from a checkpoint in the middle of these batches.

        Raises:
            LoaderError: Only workers know the position in a stream.
        """
        if self.stream is not None and self.continues_stream:
            self.stream.check_position()

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return the loader's position, for :meth:`load_state_dict`.

        Args:
            batches: The batches of the current epoch that were used; all that were yielded by default.
        """
        epoch = self._epoch - 1
        if batches is None:
            epoch, batches = (epoch, self.number + 1) if self._has_begun else (self._epoch, self._first)
        position = self._batches.state_dict(epoch, batches)
        return {"seed": self._seed, "epoch": epoch, "batches": batches, **position}

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = False) -> int:
        """Make the next iteration continue from a saved position.

        Batches of a ``DataLoader`` over a dataset with length are skipped by their indices: no
        sample of them is read.

        Args:
            state: The result of :meth:`state_dict`.
            replay: Read the batches before it again and drop them, where the loader has no other
                way.

        Returns:
            The number of batches of the epoch that are done; it differs with another batch size.

        Raises:
            LoaderError: The loader can only get there by a replay; or the position is in the middle
                of one of its batches; or of an epoch over another number of samples.
        """
        had, has = state.get("dataset"), n_samples(self.loader)
        if state.get("samples") and had != has:
            msg = (
                f"the dataset has {has} samples, and had {had} where it stood at sample {state['samples']} "
                "of an epoch: their order is another one now; give the same data, or resume from the end "
                "of an epoch"
            )
            raise LoaderError(msg)
        self._seed, self._epoch, self._has_begun = state["seed"], state["epoch"], False
        self._first = self._batches.load_state_dict(
            state, seed=self._seed, replay=replay, continues_stream=self.continues_stream
        )
        return self._first
