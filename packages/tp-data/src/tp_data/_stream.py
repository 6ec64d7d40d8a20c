"""The stream: sources in one global order, and the sample at any position of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from tp_core.arguments import explain_init
from tp_core.errors import ConfigError, LoaderError, StateError
from tp_core.random import seed_everything, seed_of

from tp_data._files import Access, ChangedFileError
from tp_data._order import Order, Shuffle, check_mixture, groups
from tp_data._sources import Source, source_of

_MOST_SKIPPED = 1000  # one behind the other


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample of the global order comes from.

    Attributes:
        source: The name of the source.
        index: The number of the sample in it.
        where: The file and the offset, as messages have them.
    """

    source: str
    index: int
    where: str


@explain_init
class Stream:
    """Samples of one source or several, in one global order that follows from seed, epoch and sources alone.

    Ranks and workers have no part in the order: they take parts of it. Any position of it is found without
    those before.

    Example:
        >>> stream = Stream({"a": range(100), "b": range(100)}, mixture={"a": 0.7, "b": 0.3}, shuffle=True)
        >>> stream.place(0).source in ("a", "b")
        True
    """

    def __init__(
        self,
        sources: Any,
        *,
        shuffle: Shuffle | bool = False,
        seed: int = 0,
        mixture: Mapping[str, float] | Mapping[int, Mapping[str, float]] | None = None,
        temperature: float | None = None,
        caps: Mapping[str, int] | None = None,
        repeat: bool = False,
        until: Literal["first", "all"] = "first",
        transform: Callable[[Any], Any] | None = None,
        access: Access | None = None,
    ) -> None:
        """Set the sources and their order.

        Args:
            sources: A path, URL or pattern of files, a list of them, a sequence, or a `Source`; or a dict
                of these, by name.
            shuffle: How samples are shuffled; ``True`` shuffles all of an epoch.
            seed: Sets the order, with the epoch.
            mixture: The share of each source, by name; they add up to 1. ``{0: {...}, 50_000: {...}}`` has
                other shares from the 50,000th sample on. Without, the sources stand one behind the other,
                and are shuffled as one.
            temperature: Makes the shares of the mixture, or the sizes of the sources without one, more equal
                above 1: each is raised to ``1 / temperature``.
            caps: The most samples of a source, in an epoch, or at all with ``repeat``.
            repeat: Whether sources begin again at their end, in another order: the stream has no end then.
            until: Whether an epoch of a mixture ends with the ``"first"`` source that ends, or when ``"all"``
                have. Those that are left divide the shares of the others, and each sample comes once.
            transform: Is applied to each sample where it is loaded. Its random numbers, by ``random``,
                numpy or torch, follow from the seed, the epoch and the position.
            access: How remote files are read, and where copies and indexes are kept.

        Raises:
            ConfigError: A source is missing or empty, or the mixture does not fit the sources.
            LoaderError: A file cannot be read, or is not whole.
        """
        if isinstance(sources, Mapping):
            named = dict(sources)
        else:
            named = {"data": sources}
        if not named or not all(isinstance(name, str) for name in named):
            msg = f"a stream needs sources, by names that are texts, got {list(named)}"
            raise ConfigError(msg)
        self.sources: dict[str, Source] = {name: source_of(given, access) for name, given in named.items()}
        if transform is not None and not callable(transform):
            msg = (
                f"transform must be a function of a sample, got {type(transform).__name__}: {transform!r:.80}"
            )
            raise ConfigError(msg)
        if mixture is not None and not isinstance(mixture, Mapping):
            msg = (
                "mixture must be a dict of weights by the names of the sources, as {'a': 0.7, 'b': 0.3}, got "
                f"{mixture!r:.80}"
            )
            raise ConfigError(msg)
        self.seed, self.repeat, self._transform = seed, repeat, transform
        sizes = {name: len(source) for name, source in self.sources.items()}
        if until not in ("first", "all"):
            msg = f"until={until!r}: an epoch of a mixture ends with its 'first' source, or after 'all'"
            raise ConfigError(msg)
        if caps is not None and (mixture is None and temperature is None):
            msg = "caps are of sources of a mixture; give mixture= or temperature=, too"
            raise ConfigError(msg)
        for name, cap in (caps or {}).items():
            if name not in sizes or isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
                msg = (
                    f"caps={{{name!r}: {cap!r}}}: give a number of samples above 0 of one of {sorted(sizes)}"
                )
                raise ConfigError(msg)
        if isinstance(seed, bool) or not isinstance(seed, int):
            msg = f"seed must be a whole number, got {seed!r}"
            raise ConfigError(msg)
        if not isinstance(shuffle, bool | Shuffle):
            msg = f"shuffle={shuffle!r}: give True, False or Shuffle(...)"
            raise ConfigError(msg)
        rule = shuffle if isinstance(shuffle, Shuffle) else None
        if shuffle is True:
            rule = Shuffle()
        self._rules: dict[str, Any] = {
            "shuffle": rule,
            "mixture": check_mixture(mixture, sizes, temperature),
            "caps": caps,
            "repeat": repeat,
            "until": until,
        }
        self._sizes = sizes
        self._orders: dict[int, Order] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_orders": {}}

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        if epoch not in self._orders:
            self._orders = {epoch: Order(self._sizes, seed=self.seed, epoch=epoch, **self._rules)}
        return self._orders[epoch]

    def __len__(self) -> int:
        """Return the number of samples of an epoch.

        Raises:
            TypeError: The stream repeats its sources without an end.
        """
        length = self.order(0).length
        if length is None:
            msg = "a stream with repeat=True has no end, and so no length"
            raise TypeError(msg)
        return length

    def __getitem__(self, position: object) -> NoReturn:
        """Refuse to be read as a dataset, also by a loop: a `Loader` reads a stream."""
        msg = (
            f"a Stream is read in batches: write for batch in Loader(stream, 32), also in place of torch's "
            f"DataLoader; for one sample stream.sample({position!r})"
        )
        raise ConfigError(msg)

    def place(self, position: int, *, epoch: int = 0) -> Place:
        """Return where the sample at a position comes from.

        Raises:
            IndexError: The epoch ends before it.
        """
        number, index = self.order(epoch).place(position)
        name = list(self.sources)[number]
        return Place(name, index, self.sources[name].where(index))

    def sample(self, position: int, *, epoch: int = 0) -> Any:
        """Return the sample at a position, transformed.

        Raises:
            LoaderError: It cannot be loaded, or the transform raised an error.
        """
        return self.load([position], epoch)[position]

    def load(
        self,
        positions: Sequence[int],
        epoch: int,
        skip: Callable[[LoaderError], None] | None = None,
        *,
        seeds: bool = True,
    ) -> dict[int, Any]:
        """Return samples by their positions, in this order.

        Args:
            positions: The positions.
            epoch: The epoch.
            skip: Is called with the error of a sample that cannot be loaded; the next one of the order that
                can takes its place. ``None`` raises the error. A file that has changed is always an error.
            seeds: Whether random generators are seeded for each sample that may draw, and left so. Who
                switches it off looks whether something drew, and loads again then.

        Raises:
            LoaderError: A sample cannot be loaded.
        """
        order, sources, transform = self.order(epoch), list(self.sources.values()), self._transform
        seeded_epoch = None
        if seeds and self.draws:
            seeded_epoch = epoch
        loaded: dict[int, Any] = {}
        if seeded_epoch is None:
            with suppress(Exception):  # one by one, the sample at fault is found
                loaded = self._load_together(order, sources, positions)
            if transform is None and loaded:
                return loaded
        samples: dict[int, Any] = {}
        for position in positions:
            try:
                if loaded and transform is not None:
                    samples[position] = transform(loaded[position])
                else:
                    samples[position] = self._load(order, position, seeded_epoch)
            except Exception as error:
                failure = error
                if loaded:
                    failure = self._failure(error, order, position)
                if not isinstance(failure, LoaderError):
                    raise
                samples[position] = self._next_sample(order, position, seeded_epoch, failure, skip)
        return samples

    def _next_sample(
        self,
        order: Order,
        position: int,
        seeded_epoch: int | None,
        failure: LoaderError,
        skip: Callable[[LoaderError], None] | None,
    ) -> Any:
        """Return the sample to take in place of one that cannot be loaded, or raise its failure."""
        at = position
        while skip is not None and not isinstance(failure, ChangedFileError):
            skip(failure)
            at += 1
            if order.length is not None:
                at %= order.length
            if at in (position, position + _MOST_SKIPPED):  # the data is broken, not a sample of it
                break
            try:
                return self._load(order, at, seeded_epoch)
            except LoaderError as error:
                failure = error
        raise failure

    def _load_together(self, order: Order, sources: list[Source], positions: Sequence[int]) -> dict[int, Any]:
        """Return samples as their sources have them, those of a source read together."""
        numbers, indices = order.places(positions)
        if len(sources) == 1:
            return dict(zip(positions, sources[0].__getitems__(indices.tolist()), strict=True))
        samples: list[Any] = [None] * len(positions)
        for number, at in groups(numbers):
            of_source = sources[number].__getitems__(indices[at].tolist())
            for place, sample in zip(at.tolist(), of_source, strict=True):
                samples[place] = sample
        return dict(zip(positions, samples, strict=True))

    def _load(self, order: Order, position: int, seeded_epoch: int | None) -> Any:
        """Return the sample at a position, with its own random numbers where an epoch for them is told."""
        number, index = order.place(position)
        source = list(self.sources.values())[number]
        if seeded_epoch is not None and (self._transform is not None or source.draws):
            seed_everything(seed_of((self.seed, seeded_epoch, position)), devices=False)
        try:
            sample = source[index]
        except LoaderError:
            raise
        except Exception as error:
            msg = f"{source.where(index)}: it could not be loaded: {type(error).__name__}: {error}"
            raise LoaderError(msg) from error
        if self._transform is None:
            return sample
        try:
            return self._transform(sample)
        except Exception as error:
            raise self._failure(error, order, position) from error

    def _failure(self, error: Exception, order: Order, position: int) -> LoaderError:
        """Return the error of a transform that failed, with the sample's place."""
        number, index = order.place(position)
        where = list(self.sources.values())[number].where(index)
        failure = LoaderError(f"{where}: the transform raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    @property
    def draws(self) -> bool:
        """Whether loading a sample may draw random numbers."""
        return self._transform is not None or any(source.draws for source in self.sources.values())

    # -- states -------------------------------------------------------------------------------------

    def fingerprint(self, position: int, epoch: int) -> dict[str, Any]:
        """Return what the samples up to a position follow from: the order, and the sources in use."""
        order = self.order(epoch)
        return {
            "order": order.digest(position),
            "sources": {name: self.sources[name].digest for name in order.in_use(position)},
        }

    def check(self, state: Mapping[str, Any], position: int, epoch: int) -> None:
        """Check that a state is of these sources, in this order.

        Raises:
            StateError: It is of others.
        """
        own, theirs = self.fingerprint(position, epoch), state["sources"]
        for name in sorted({*own["sources"], *theirs}):
            if own["sources"].get(name) == theirs.get(name):
                continue
            if name not in self.sources:
                difference = f"a source {name!r} that this stream lacks"
            elif name not in theirs:
                difference = f"no source {name!r} before this position, and this stream has it there"
            else:
                difference = f"a source {name!r} with other samples (this one has {self._sizes[name]})"
            msg = (
                f"the state stands at position {position} of epoch {epoch} of a stream with "
                f"{difference}: what came before would be another order; give the sources of the run that "
                "saved it, or start over"
            )
            raise StateError(msg)
        if own["order"] != state["order"]:
            msg = (
                f"the state stands at position {position} of epoch {epoch} of another order of the same "
                "sources; give the stream the seed, shuffle, mixture, caps and repeat that it had"
            )
            raise StateError(msg)
