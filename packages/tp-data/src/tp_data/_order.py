"""The global order: which sample of which source is at a position, without a list of them.

A shuffle is a keyed permutation that is computed for each number alone, a Feistel network over the next power
of two, applied again to what falls outside. So an order takes no memory, and a seek in it costs nothing::

    position -> phase of the mixture -> block -> (source, draw)     draw: how many of it came before
    draw     -> pass over the source -> window (buffer) -> block of samples (blocks) -> index
"""

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError

Numbers: TypeAlias = NDArray[np.uint64]
Places: TypeAlias = tuple[Numbers, Numbers]
"""The number of the source, and the index in it, at each of some positions."""

_ROUNDS = 6  # even: halves of different width are swapped in each; four are too few for small sizes
_UNIT = 1 << 20  # weights are whole parts of it: products with positions up to 2**43 fit into 64 bits
_LEAST_WEIGHT = 1e-5
_BLOCK = 256  # positions among which a mixture has its exact shares, where no weight is small
_KEPT_BLOCKS = 8
_AT_ONCE = 4096  # places that are computed together
_LEAST_PART = 16  # a process computes places ahead if it takes one in this many


@explain_init
@dataclass(frozen=True, slots=True)
class Shuffle:
    """How samples are shuffled; without numbers, all of an epoch.

    Attributes:
        buffer: Mixes samples within windows of this many, for sources that are read best in their order.
        blocks: Keeps this many neighbors together, and shuffles the blocks: one read serves several samples.
            With ``buffer``, the blocks are shuffled first, and then the samples within each window.

    Example:
        >>> Shuffle(blocks=1000, buffer=10_000)
        Shuffle(buffer=10000, blocks=1000)
    """

    buffer: int | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("buffer", "blocks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                msg = f"Shuffle({name}={value!r}): give a number of samples above 0, or None"
                raise ConfigError(msg)


def key_of(*parts: object) -> int:
    """Return a key of 64 bits that is a function of ``parts``, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _mixed(x: Numbers) -> Numbers:
    """Return well mixed bits of each number (the finalizer of SplitMix64, Steele et al. 2014)."""
    mixed = x >> np.uint64(30)
    mixed ^= x
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _numbers(values: object) -> Numbers:
    if isinstance(values, range):  # ten times as fast
        return np.arange(values.start, values.stop, values.step, dtype=np.uint64)
    return np.atleast_1d(np.asarray(values, dtype=np.uint64))


def permute(index: Numbers, size: Numbers, key: Numbers, *, inverse: bool = False) -> Numbers:
    """Return where each number below its size goes in the permutation of its key.

    Args:
        index: The numbers, (n).
        size: The size of each permutation, (n) or (1).
        key: The key of each permutation, (n) or (1).
        inverse: Return where each number came from.
    """
    bits = np.frexp((size - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)
    keys = [_mixed(key ^ np.uint64(n * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)) for n in range(_ROUNDS)]
    permuted = _feistel(index, bits, keys, inverse=inverse)
    outside = np.flatnonzero(permuted >= size)

    def some(values: Numbers) -> Numbers:
        if values.size == 1:
            return values
        return values[outside]

    while outside.size:  # half of the domain at most: a few times
        permuted[outside] = _feistel(permuted[outside], some(bits), list(map(some, keys)), inverse=inverse)
        outside = outside[permuted[outside] >= some(size)]
    return permuted


def _feistel(x: Numbers, bits: Numbers, keys: Sequence[Numbers], *, inverse: bool) -> Numbers:
    one = np.uint64(1)
    high = bits >> one
    low = bits - high
    low_mask, high_mask = (one << low) - one, (one << high) - one
    left, right = x >> low, x & low_mask
    for step in range(_ROUNDS):
        n = _ROUNDS - 1 - step if inverse else step
        mask = low_mask if n % 2 else high_mask
        if inverse:
            left, right = (right ^ _mixed(keys[n] + left)) & mask, left
        else:
            left, right = right, (left ^ _mixed(keys[n] + right)) & mask
    return (left << low) | right


def shuffled(index: Numbers, size: int, shuffle: Shuffle | None, key: int) -> Numbers:
    """Return the samples at places of a source of ``size`` samples, for one pass over it."""
    if shuffle is None:
        return index
    keys = _numbers(key)
    if shuffle.buffer is None and shuffle.blocks is None:
        return permute(index, _numbers(size), keys)
    if shuffle.buffer is not None:
        window = index // np.uint64(shuffle.buffer)
        first = window * np.uint64(shuffle.buffer)
        width = np.minimum(np.uint64(shuffle.buffer), np.uint64(size) - first)
        index = first + permute(index - first, width, _mixed(keys + window))
    if shuffle.blocks is None:
        return index
    width, keys = np.uint64(shuffle.blocks), _mixed(~keys)
    n_blocks, rest = -(-size // shuffle.blocks), size % shuffle.blocks
    count = _numbers(n_blocks)
    if not rest:
        return permute(index // width, count, keys) * width + index % width
    # The last block is shorter: what comes after it is moved by what it lacks.
    short = permute(_numbers(n_blocks - 1), count, keys, inverse=True)[0]
    lacking = np.where(index >= short * width + np.uint64(rest), width - np.uint64(rest), np.uint64(0))
    index = index + lacking
    return permute(index // width, count, keys) * width + index % width


# -- Mixtures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch of the order with one set of weights.

    Attributes:
        first: The first position.
        bounds: The sums of the weights up to each source, in parts of `_UNIT`.
        drawn: How many of each source came before.
        width: The positions in a block.
    """

    first: int
    bounds: tuple[int, ...]
    drawn: tuple[int, ...]
    width: int

    def counts(self, block: int) -> list[int]:
        """Return how many of each source the blocks before ``block`` have."""
        sums = [(block * self.width * bound + _UNIT // 2) // _UNIT for bound in self.bounds]
        return [b - a for a, b in zip([0, *sums], sums, strict=False)]


class Order:
    """The order of one epoch.

    Attributes:
        length: The number of samples in it; ``None`` where it does not end.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        epoch: int = 0,
        mixture: Mapping[int, Mapping[str, float]] | None = None,
        caps: Mapping[str, int] | None = None,
        repeat: bool = False,
        until: Literal["first", "all"] = "first",
    ) -> None:
        """Set the order; see `Stream` for what the arguments mean.

        Args:
            sizes: The number of samples of each source.
            shuffle: How samples are shuffled.
            seed: The seed.
            epoch: The epoch.
            mixture: The weights of the sources from a position on.
            caps: The most samples of a source.
            repeat: Whether sources begin again.
            until: Which source's end ends the epoch.
        """
        self._names, self._sizes = tuple(sizes), tuple(sizes.values())
        self._shuffle, self._seed, self._epoch, self._repeat = shuffle, seed, epoch, repeat
        self._phases: list[_Phase] = []
        self._arranged: OrderedDict[tuple[int, int], tuple[Numbers, Numbers]] = OrderedDict()
        self._asked = 0
        self._located: dict[int, Places] = {}
        self._starts = np.cumsum([0, *self._sizes]).astype(np.uint64)
        total = sum(self._sizes)
        if mixture is None:
            self.length = None if repeat else total
            return
        caps = caps or {}
        self._limits: list[float] = []
        for name, size in sizes.items():
            most = float("inf") if repeat else size
            self._limits.append(min(most, caps.get(name, most)))
        self.length = self._plan(mixture, until)

    def place(self, position: int) -> tuple[int, int]:
        """Return the number of the source, and the index in it, at a position.

        Raises:
            IndexError: The order ends before it.
        """
        if position < 0 or (self.length is not None and position >= self.length):
            msg = f"position {position} is not in an epoch of {self.length} samples"
            raise IndexError(msg)
        group, inside = divmod(position, _AT_ONCE)
        sources, indices = self._group(group)
        return int(sources[inside]), int(indices[inside])

    def places(self, positions: Sequence[int]) -> Places:
        """Return the places of positions near each other.

        Raises:
            IndexError: The order ends before one.
        """
        is_range = isinstance(positions, range)
        if is_range:
            least, most = positions[0], positions[-1]
        else:
            least, most = min(positions), max(positions)
        stride, self._asked = least - self._asked, least
        is_inside = least >= 0 and (self.length is None or most < self.length)
        group = least // _AT_ONCE
        if is_inside and group not in self._located and not 0 < stride <= _LEAST_PART * len(positions):
            return self.locate(positions)  # for one of many ranks and workers the others would be in vain
        if is_inside and is_range and group == most // _AT_ONCE:
            sources, indices = self._group(group)
            inside = slice(least % _AT_ONCE, most % _AT_ONCE + 1)
            return sources[inside], indices[inside]
        sources, indices = _numbers([self.place(position) for position in positions]).T
        return sources, indices

    def _group(self, group: int) -> Places:
        """Return many neighboring places, which cost little more to compute than one."""
        if group not in self._located:
            stop = (group + 1) * _AT_ONCE
            if self.length is not None:
                stop = min(stop, self.length)
            while len(self._located) >= _KEPT_BLOCKS:
                del self._located[next(iter(self._located))]
            self._located[group] = self.locate(range(group * _AT_ONCE, stop))
        return self._located[group]

    def locate(self, positions: Sequence[int]) -> Places:
        """Return the place of each position."""
        places = _numbers(positions)
        source = np.zeros(len(places), dtype=np.uint64)
        index = np.zeros(len(places), dtype=np.uint64)
        if not self._phases:
            total = int(self._starts[-1])
            for passed, at in groups(places // np.uint64(total)):
                # One key for all sources: they are shuffled as if they were one.
                key = key_of(self._seed, self._epoch, passed)
                index[at] = shuffled(places[at] % np.uint64(total), total, self._shuffle, key)
            if len(self._sizes) > 1:
                source = (np.searchsorted(self._starts, index, side="right") - 1).astype(np.uint64)
                index = index - self._starts[source]
        else:
            draw = np.zeros(len(places), dtype=np.uint64)
            starts = np.array([phase.first for phase in self._phases], dtype=np.uint64)
            for number, at in groups((np.searchsorted(starts, places, side="right") - 1).astype(np.uint64)):
                phase = self._phases[number]
                inside = places[at] - np.uint64(phase.first)
                for block, where in groups(inside // np.uint64(phase.width)):
                    sources, draws = self._arrange(number, block)
                    offset = inside[where] % np.uint64(phase.width)
                    source[at[where]], draw[at[where]] = sources[offset], draws[offset]
            for number, at in groups(source):
                size = self._sizes[number]
                for passed, where in groups(draw[at] // np.uint64(size)):
                    key = key_of(self._seed, self._epoch, passed, self._names[number])
                    inside = draw[at[where]] % np.uint64(size)
                    index[at[where]] = shuffled(inside, size, self._shuffle, key)
        return source, index

    def digest(self, position: int) -> str:
        """Return a digest of what the order up to a position follows from, but for the sources' content."""
        begun = self._phases[: max(1, bisect_right([phase.first for phase in self._phases], position - 1))]
        used: set[int] = set()
        # By name: a source that comes later may stand before one in use.
        shares = []
        for phase in begun:
            of_phase = {number: share for number, share in enumerate(_shares(phase)) if share}
            used.update(of_phase)
            shares.append((phase.first, [(self._names[number], share) for number, share in of_phase.items()]))
        numbers = used or range(len(self._names))
        sizes = [(self._names[number], self._sizes[number]) for number in numbers]
        return f"{key_of(self._seed, self._shuffle, self._repeat, sorted(sizes), shares):016x}"

    def in_use(self, position: int) -> list[str]:
        """Return the names of the sources of which samples may come before a position."""
        begun = [phase for phase in self._phases if phase.first < max(position, 1)]
        if not begun:
            return list(self._names)
        return [name for i, name in enumerate(self._names) if any(_shares(phase)[i] for phase in begun)]

    # -- the phases ---------------------------------------------------------------------------------

    def _plan(self, mixture: Mapping[int, Mapping[str, float]], until: str) -> int | None:
        """Make the phases: new weights begin one, and so does a source's end. Return the length."""
        coming = sorted(mixture.items())  # the weights in use, and those that follow
        first, drawn = 0, [0] * len(self._sizes)
        while True:
            while len(coming) > 1 and coming[1][0] <= first:
                coming.pop(0)
            wanted = [coming[0][1].get(name, 0.0) for name in self._names]
            live = [w if drawn[i] < self._limits[i] else 0.0 for i, w in enumerate(wanted)]
            stops = until == "first" and not self._repeat and live != wanted
            if stops or not any(live):
                if stops or len(coming) == 1:
                    return first
                coming.pop(0)  # its sources have ended: the next weights begin at once
                continue
            self._phases.append(_phase_of(first, live, drawn))
            number = len(self._phases) - 1
            ends = [
                self._end_of(number, i, int(limit))
                for i, limit in enumerate(self._limits)
                if live[i] and limit != float("inf")
            ]
            ends += [start for start, _ in coming[1:2]]
            if not ends:
                return None
            first = min(ends)
            drawn = self._drawn_at(number, first)

    def _arrange(self, number: int, block: int) -> tuple[Numbers, Numbers]:
        """Return the sources of the positions in a block, and which draw of its source each is."""
        if (number, block) in self._arranged:
            self._arranged.move_to_end((number, block))
            return self._arranged[number, block]
        phase = self._phases[number]
        before, after = phase.counts(block), phase.counts(block + 1)
        shares = [b - a for a, b in zip(before, after, strict=True)]
        listed = np.repeat(np.arange(len(shares), dtype=np.uint64), shares)
        key = key_of(self._seed, self._epoch, "mixture", phase.first, block)
        places = np.arange(phase.width, dtype=np.uint64)
        sources = listed[permute(places, _numbers(phase.width), _numbers(key))]
        draws = np.zeros(phase.width, dtype=np.uint64)
        for i, (had, share) in enumerate(zip(before, shares, strict=True)):
            draws[sources == i] = np.arange(share, dtype=np.uint64) + np.uint64(phase.drawn[i] + had)
        self._arranged[number, block] = sources, draws
        if len(self._arranged) > _KEPT_BLOCKS:
            self._arranged.popitem(last=False)
        return sources, draws

    def _end_of(self, number: int, source: int, limit: int) -> int:
        """Return the position behind the last draw of a source."""
        phase = self._phases[number]
        left = limit - phase.drawn[source]
        low, high = 0, 1
        while phase.counts(high)[source] < left:
            low, high = high, high * 2
        while high - low > 1:  # the block that has the last draw
            middle = (low + high) // 2
            if phase.counts(middle)[source] < left:
                low = middle
            else:
                high = middle
        sources, draws = self._arrange(number, low)
        at = np.flatnonzero((sources == source) & (draws == limit - 1))
        return phase.first + low * phase.width + int(at[0]) + 1

    def _drawn_at(self, number: int, position: int) -> list[int]:
        phase = self._phases[number]
        block, offset = divmod(position - phase.first, phase.width)
        counts = phase.counts(block)
        sources, _ = self._arrange(number, block)
        inside = np.bincount(sources[:offset].astype(np.int64), minlength=len(counts)).tolist()
        return [a + b + c for a, b, c in zip(phase.drawn, counts, inside, strict=True)]


def _shares(phase: _Phase) -> list[int]:
    return [b - a for a, b in zip((0, *phase.bounds), phase.bounds, strict=False)]


def _phase_of(first: int, weights: Sequence[float], drawn: Sequence[int]) -> _Phase:
    total = sum(weights)
    sums = np.cumsum(weights) / total
    bounds = tuple(round(float(value) * _UNIT) for value in sums)
    least = min(b - a for a, b, w in zip((0, *bounds), bounds, weights, strict=False) if w)
    # So wide that each source has a draw in each block: counts never fall from one block to the next.
    width = max(_BLOCK, -(-2 * _UNIT // least))
    return _Phase(first, bounds, tuple(drawn), width)


def groups(values: Numbers) -> list[tuple[int, NDArray[np.intp]]]:
    """Return the different values, and the places of each."""
    if values.size and (values[0] == values).all():
        return [(int(values[0]), np.arange(len(values)))]
    return [(int(value), np.flatnonzero(values == value)) for value in np.unique(values)]


def check_mixture(
    mixture: Mapping[str, float] | Mapping[int, Mapping[str, float]] | None,
    sizes: Mapping[str, int],
    temperature: float | None,
) -> dict[int, dict[str, float]] | None:
    """Return the weights of the sources from a position on, as parts of 1.

    Raises:
        ConfigError: Weights are negative, do not add up, or are of unknown sources.
    """
    if temperature is not None and not temperature > 0:
        msg = f"temperature={temperature!r}: 1 keeps the weights, above 1 they are more equal; give above 0"
        raise ConfigError(msg)
    if mixture is None and temperature is None:
        return None
    phases: dict[Any, Any] = dict(mixture or {})
    if mixture is None:
        phases = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    if not phases or not all(isinstance(key, int) for key in phases):
        phases = {0: phases}
    if 0 not in phases:
        msg = f"a mixture that changes needs weights from position 0 on, got {sorted(phases)}"
        raise ConfigError(msg)
    checked = {}
    for start, weights in phases.items():
        if not isinstance(weights, Mapping):
            msg = f"the weights of a mixture are a dict from source to weight, got {weights!r}"
            raise ConfigError(msg)
        if unknown := sorted(set(weights) - set(sizes)):
            msg = f"the mixture has weights of {unknown}, and the sources are {sorted(sizes)}"
            raise ConfigError(msg)
        if any(not isinstance(w, int | float) or not 0 <= w < float("inf") for w in weights.values()):
            msg = f"weights are numbers from 0 on, got {dict(weights)}"
            raise ConfigError(msg)
        total = sum(weights.values())
        if abs(total - 1) > 1e-6:
            msg = (
                f"the weights of a mixture must add up to 1, and {dict(weights)} to {total:g}; "
                "a source that is not named has none"
            )
            raise ConfigError(msg)
        raised = {n: w ** (1 / (temperature or 1)) for n, w in weights.items() if w}
        total = sum(raised.values())
        least = min(raised, key=lambda name: raised[name])
        if raised[least] < _LEAST_WEIGHT * total:
            msg = f"the weight of {least!r} is {raised[least] / total:g}; the least of a mixture is 1e-5"
            raise ConfigError(msg)
        checked[int(start)] = {name: weight / total for name, weight in raised.items()}
    return checked
