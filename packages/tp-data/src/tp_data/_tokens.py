"""Batches by their cost in tokens: `TokenBudget` groups samples of like length, `Packed` fills rows.

Both plan a window of samples at a time, from positions and numbers of tokens alone::

    the order       | window of samples | next window ...
    plan            batch, batch, batch, batch + a rest      the rest goes into the next window, first
    state_dict()    the window, the rest before it, how many of its batches are done

So the batches follow from the order, whatever the number of ranks. A state has what is held back, less than a
batch: it is about a kilobyte, or two where hundreds of samples fit into one. To resume, the numbers of tokens
of one window are looked up again.
"""

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, Literal, NamedTuple

from torch import Tensor
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError, LoaderError

from tp_data._batches import Batcher, Item, Piece, SampleRow, UnfitSampleError
from tp_data._packed_rows import Arguments, RowForm, TokenBatch, pad_samples

Last = Literal["spread", "drop", "pad"]

_WINDOW = 1024  # samples that are planned together
_WINDOW_BATCHES = 48  # and at least as many batches: the longest of fewer ones differ too much in length


class _SamplePart(NamedTuple):
    """A sample in a plan, or a piece of it; ``whole`` says which."""

    position: int
    start: int
    stop: int
    whole: bool = True

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class _Windowed(Batcher):
    """A batcher that plans the batches of a window of samples, and holds back what makes no whole batch.

    Args:
        window: The number of samples that are looked at together.
        least: The number of tokens that are looked at together, at least.
    """

    def __init__(self, window: int, least: int) -> None:
        self.window, self._least = window, least
        self.start(None, lambda _: [])

    def start(self, state: Mapping[str, Any] | None, take: Callable[[Sequence[int]], list[Item]]) -> None:
        """Begin an epoch, or continue one."""
        self._ready: deque[list[SampleRow]] = deque()
        self._taken: list[Item] = []  # the samples of the window
        self._before: list[_SamplePart] = []  # what the window began with
        self._rest: list[_SamplePart] = []  # what the next one begins with
        self._windows = self._done = 0
        self._has_ended = False
        if state is None:
            return
        self._windows = state["windows"]
        whole = list(accumulate(part for part in state["rest"] if isinstance(part, int)))
        items = iter(take(whole))
        for part in state["rest"]:
            if isinstance(part, int):
                item = next(items)
                self._rest.append(_SamplePart(item.position, 0, item.cost))
            else:
                position, start, stop = part
                self._rest.append(_SamplePart(position, start, stop, whole=False))
        self._has_ended = state["ended"]
        if state["done"] is not None:
            taken = [p for first, n in state["taken"] for p in range(first, first + n)]
            window = take(taken) if taken else []
            self._plan_window(window)
            for _ in range(state["done"]):
                self._ready.popleft()
            self._done = state["done"]

    def next_batch(self, items: Iterator[Item]) -> list[SampleRow] | None:
        """Return the rows of the next global batch; ``None`` at the end of the epoch."""
        while not self._ready:
            if self._has_ended:
                return None
            taken = self._pull(items)
            self._has_ended = not taken
            self._plan_window(taken)
        self._done += 1
        return self._ready.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the window and what was held back before it, by positions.

        Those of whole samples are differences from one to the next, which have fewer digits.
        """
        if self._ready:  # in the middle of a window
            windows, parts, taken, done = self._windows - 1, self._before, _runs(self._taken), self._done
        else:  # the next window begins, with the rest of this one
            windows, parts, taken, done = self._windows, self._rest, [], None
        rest: list[Any] = []
        last = 0
        for part in parts:
            if part.whole:
                rest.append(part.position - last)
                last = part.position
            else:
                rest.append([part.position, part.start, part.stop])
        return {"windows": windows, "rest": rest, "taken": taken, "done": done, "ended": self._has_ended}

    def _pull(self, items: Iterator[Item]) -> list[Item]:
        """Return the samples of the next window; none at the end of the epoch."""
        taken = list(islice(items, self.window))
        tokens = sum(i.cost for i in taken) + sum(p.tokens for p in self._rest)
        while tokens < self._least and (item := next(items, None)) is not None:
            taken.append(item)
            tokens += item.cost
        return taken

    def _plan_window(self, taken: list[Item]) -> None:
        self._taken, self._before, self._done = taken, self._rest, 0
        parts = [part for item in taken if item.cost for part in self._parts_of(item)]
        batches, self._rest = self._plan(self._before, parts, has_ended=not taken)
        self._windows += 1
        self._ready.extend(batches)

    def _parts_of(self, item: Item) -> list[_SamplePart]:
        """Return a sample as the parts that are planned.

        Raises:
            LoaderError: The sample is too long.
        """
        raise NotImplementedError

    def _plan(
        self, rest: list[_SamplePart], new: list[_SamplePart], *, has_ended: bool
    ) -> tuple[list[list[SampleRow]], list[_SamplePart]]:
        """Return the batches of a window, and what is held back; nothing is, at the end of the epoch."""
        raise NotImplementedError


@explain_init
class TokenBudget(_Windowed):
    """Batches by their number of tokens, padding included, of samples with about the same length.

    A window of samples is sorted by length and cut into batches of at most this many tokens, which come in a
    mixed order. A sample is a dict with its tokens as ``"input_ids"``, or another one with a number of them.
    Samples without a token are left out.

    Each rank gets a part of each batch, longest samples first to the rank that has least to do. A batch of
    a multiple of 12 samples can be shared evenly by 1, 2, 3, 4, 6 and 12 ranks, so it has no others where so
    many fit.

    Args:
        tokens: The most tokens of a batch, on all ranks together: its longest sample times the number of
            them.
        length: The field with the entries to count, or a function of a sample that returns the number.
        window: The number of samples that are sorted together: a larger one has less padding. By default
            1024, and more where these make fewer than 48 batches.
        buckets: Lengths to pad to, so that batches have few different shapes; ``None`` for the longest of
            each.
        multiple: Batches have a multiple of this many samples where as many fit.
        speeds: The relative speed of each rank, where devices differ: each gets tokens accordingly.
        last: What becomes of samples that are left at the end: ``"spread"`` makes a smaller batch of them,
            ``"drop"`` leaves them out, unless no other sample would fit into their batch.
        padding: The token to pad with.
        causal: Whether a label is predicted from the tokens before it, so that the first one never counts.
        collate: Makes a batch of a list of samples; by default their fields are padded, with -100 for labels.

    Raises:
        ConfigError: An argument has a value that makes no sense.

    Example:
        >>> samples = [{"input_ids": list(range(n))} for n in (2, 7, 3, 8)]
        >>> batcher = TokenBudget(16, multiple=1)
        >>> items = iter([Item(i, batcher.cost(s)) for i, s in enumerate(samples)])
        >>> sorted([row.pieces[0].position for row in batcher.next_batch(items)] for _ in range(2))
        [[0, 2], [3, 1]]
    """

    def __init__(
        self,
        tokens: int,
        *,
        length: str | Callable[[Any], int] = "input_ids",
        window: int | None = None,
        buckets: Sequence[int] | None = None,
        multiple: int = 12,
        speeds: Sequence[float] | None = None,
        last: Literal["spread", "drop"] = "spread",
        padding: int = 0,
        causal: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.tokens = _check_number("tokens", tokens)
        self.cost = partial(count_tokens, length=length)
        self.buckets = sorted(_check_number("buckets", b) for b in buckets or ())
        self.multiple = _check_number("multiple", multiple)
        if speeds is not None and not all(speed > 0 for speed in speeds):
            msg = f"speeds={list(speeds)}: give a number above 0 for each rank, such as its tokens per second"
            raise ConfigError(msg)
        if speeds is None:
            self.speeds = None
        else:
            self.speeds = [float(speed) for speed in speeds]
        _check_choice("last", last, ("spread", "drop"))
        self.last = last
        self._padding, self._causal, self._collate = padding, causal, collate
        if window is None:
            super().__init__(_WINDOW, least=_WINDOW_BATCHES * tokens)
        else:
            super().__init__(_check_number("window", window), least=2 * tokens)

    def _parts_of(self, item: Item) -> list[_SamplePart]:
        if self.buckets and item.cost > self.buckets[-1]:
            msg = (
                f"the sample at position {item.position} has {item.cost} tokens, and the longest of "
                f"TokenBudget's buckets {self.buckets[-1]}; give a longer one, or shorten the samples"
            )
            raise UnfitSampleError(item.position, msg)
        if self._padded(item.cost) > self.tokens:
            msg = (
                f"the sample at position {item.position} has {item.cost} tokens, more than the budget of "
                f"{self.tokens} for a whole batch; raise TokenBudget(tokens=...), or shorten the samples"
            )
            raise UnfitSampleError(item.position, msg)
        return [_SamplePart(item.position, 0, item.cost)]

    def _padded(self, tokens: int) -> int:
        """Return the length that a sample is padded to."""
        if not self.buckets:
            return tokens
        return self.buckets[bisect_left(self.buckets, tokens)]

    def _plan(
        self, rest: list[_SamplePart], new: list[_SamplePart], *, has_ended: bool
    ) -> tuple[list[list[SampleRow]], list[_SamplePart]]:
        # Each window is sorted the other way round: what one leaves at its end comes first in the next.
        pool = sorted(rest + new, key=lambda p: (-p.tokens, p.position), reverse=bool(self._windows % 2))
        batches: list[list[_SamplePart]] = []
        at = 0
        while at < len(pool):
            longest = count = 0
            while at + count < len(pool):
                longest = max(longest, self._padded(pool[at + count].tokens))
                if longest * (count + 1) > self.tokens:
                    break
                count += 1
            has_space = longest * (count + 1) <= self.tokens
            if at + count == len(pool):
                if not has_ended or (self.last == "drop" and has_space):
                    break
            elif count > self.multiple:
                count -= count % self.multiple
            batches.append(pool[at : at + count])
            at += count
        random.Random(min((p.position for p in pool), default=0)).shuffle(batches)  # noqa: S311 - an order
        rows = [[SampleRow((Piece(p.position, 0, p.tokens),)) for p in batch] for batch in batches]
        rest = [] if has_ended else sorted(pool[at:])
        return rows, rest

    def split(self, rows: Sequence[SampleRow], ranks: int) -> list[list[SampleRow]]:
        """Return the part of each rank of a global batch: about the same number of tokens, with padding.

        Raises:
            ConfigError: There are speeds of another number of ranks.
        """
        if self.speeds is not None and len(self.speeds) != ranks:
            msg = f"TokenBudget has the speeds of {len(self.speeds)} ranks, and there are {ranks}"
            raise ConfigError(msg)
        sizes = [self._padded(tokens_in(row)) for row in rows]
        return [[rows[i] for i in part] for part in share_out(sizes, ranks, speeds=self.speeds)]

    def collate(self, rows: Sequence[SampleRow], samples: Mapping[int, Any]) -> Any:
        """Return the padded batch of a rank's samples."""
        chosen = [samples[row.pieces[0].position] for row in rows]
        tokens = sum(tokens_in(row) for row in rows)
        if self._collate is not None:
            fields = self._collate(chosen)
            if not isinstance(fields, Mapping):
                return fields
        else:
            longest = max(self._padded(tokens_in(row)) for row in rows)
            fields = pad_samples(chosen, longest, padding=self._padding)
        batch = TokenBatch(fields, causal=self._causal, tokens=tokens)
        batch.ignore([i for i, row in enumerate(rows) if not row.weight])
        return batch

    def measure(self, batch: Any) -> dict[str, float]:
        """Return the numbers of tokens, of tokens with padding, and of labels that count."""
        if isinstance(batch, TokenBatch):
            return batch.measure()
        return {}


@explain_init
class Packed(_Windowed):
    """Rows of a fixed length, filled with documents that do not see each other.

    A sample is a dict with its tokens as ``"input_ids"``, and other fields of as many entries, such as
    ``"labels"``; or a sequence of tokens. Without labels, the tokens are the labels. In a row the positions
    of each document begin at 0, and no label is predicted from another document. `check_packing` finds out
    whether a model keeps documents apart. Samples without a token are left out.

    ``how="concat"`` puts one document behind the other and cuts where a row is full. ``how="best-fit"`` cuts
    only documents that are longer than a row: longest first, each goes into the row with the least space that
    it fits in.

    Args:
        length: The tokens of a row.
        rows: The rows of a batch, on all ranks together.
        how: How documents are put into rows.
        long: What becomes of documents that are longer than a row: ``"split"`` into pieces, ``"truncate"``,
            or ``"refuse"``.
        last: What becomes of what is left at the end: ``"spread"`` makes a smaller batch, ``"drop"`` leaves
            it out, ``"pad"`` adds rows of padding.
        window: The number of samples that are packed together, by best fit: more leave less space unused.
        arguments: The form in which the model gets the documents: see `RowForm`.
        causal: Whether the model predicts each token from those before it. ``False`` is for models such as
            BERT: labels belong to their own token, and each token sees its whole document.
        padding: The token that fills up rows.
        check: Whether `Trainer.fit` calls `check_packing` before its first step. Switch it off for a loss
            that is no mean or sum over labels, once the model alone has passed.

    Raises:
        ConfigError: An argument has a value that makes no sense.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling", 2024, section 3.

    Example:
        >>> batcher = Packed(8, rows=1)
        >>> items = iter([Item(0, 3), Item(1, 6), Item(2, 5), Item(3, 2)])
        >>> [[(p.position, p.stop) for p in row.pieces] for row in batcher.next_batch(items)]
        [[(1, 6), (3, 2)]]
    """

    def __init__(
        self,
        length: int,
        rows: int = 8,
        *,
        how: Literal["best-fit", "concat"] = "best-fit",
        long: Literal["split", "truncate", "refuse"] = "split",
        last: Last = "spread",
        window: int = 1024,
        arguments: Arguments = "mask",
        causal: bool = True,
        padding: int = 0,
        check: bool = True,
    ) -> None:
        self.row_length, self.rows = _check_number("length", length), _check_number("rows", rows)
        _check_choice("how", how, ("best-fit", "concat"))
        _check_choice("long", long, ("split", "truncate", "refuse"))
        _check_choice("last", last, ("spread", "drop", "pad"))
        self.how, self.long, self.last = how, long, last
        self.form = RowForm(arguments, causal, padding, check)
        self.cost = partial(count_tokens, length="input_ids")
        window, batch = _check_number("window", window), rows * length
        if how == "best-fit":
            super().__init__(window, least=2 * batch)
        else:
            super().__init__(0, least=batch)

    def _parts_of(self, item: Item) -> list[_SamplePart]:
        length, tokens = self.row_length, item.cost
        if tokens <= length or (self.how == "concat" and self.long == "split"):
            return [_SamplePart(item.position, 0, tokens)]
        if self.long == "refuse":
            msg = (
                f"the sample at position {item.position} has {tokens} tokens, and a row {length}; take "
                "Packed(long='split') or 'truncate', or longer rows"
            )
            raise UnfitSampleError(item.position, msg)
        stops = range(length, tokens + length, length) if self.long == "split" else [length]
        return [_SamplePart(item.position, s - length, min(s, tokens), whole=False) for s in stops]

    def _plan(
        self, rest: list[_SamplePart], new: list[_SamplePart], *, has_ended: bool
    ) -> tuple[list[list[SampleRow]], list[_SamplePart]]:
        if self.how == "concat":
            rows = concatenate(rest + new, self.row_length)
            full = len(rows) - (bool(rows) and sum(p.tokens for p in rows[-1]) < self.row_length)
            count = full - full % self.rows
        else:
            rows = best_fit(rest + new, self.row_length)
            # What was held back once comes now, and the emptiest rows are held back.
            carried = set(rest)
            rows.sort(key=lambda row: (carried.isdisjoint(row), -sum(p.tokens for p in row), row[0]))
            count = max(len(rows) - 1, 0) // self.rows * self.rows
        if has_ended:
            count = len(rows)
            if self.last == "drop":
                count -= count % self.rows
        chosen, left = rows[:count], [part for row in rows[count:] for part in row]
        if self.how == "best-fit":
            random.Random(min((p.position for p in rest + new), default=0)).shuffle(chosen)  # noqa: S311 - an order
        made = [SampleRow(tuple(Piece(p.position, p.start, p.stop) for p in row)) for row in chosen]
        batches = [made[i : i + self.rows] for i in range(0, count, self.rows)]
        if batches and self.last == "pad":
            batches[-1] += [SampleRow((), weight=0.0)] * (self.rows - len(batches[-1]))
        if has_ended:
            left = []
        return batches, left

    def split(self, rows: Sequence[SampleRow], ranks: int) -> list[list[SampleRow]]:
        """Return the part of each rank: as many rows, with about as many pairs of tokens in documents."""
        pairs = [sum(((p.stop or 0) - p.start) ** 2 for p in row.pieces) for row in rows]
        least, more = divmod(len(rows), ranks)
        parts = share_out(pairs, ranks, most=[least + (r < more) for r in range(ranks)])
        return [[rows[i] for i in part] for part in parts]

    def count(self, rows: Sequence[SampleRow]) -> int:
        """Return the number of documents in rows."""
        return sum(len(row.pieces) for row in rows if row.weight)

    def collate(self, rows: Sequence[SampleRow], samples: Mapping[int, Any]) -> TokenBatch:
        """Return the batch of a rank's rows."""
        documents = [[(samples[p.position], p.start, p.stop) for p in row.pieces] for row in rows]
        batch = self.form.make(documents, self.row_length)
        batch.ignore([i for i, row in enumerate(rows) if not row.weight])
        return batch

    def measure(self, batch: Any) -> dict[str, float]:
        """Return the numbers of tokens, of tokens with padding, and of labels that count."""
        if isinstance(batch, TokenBatch):
            return batch.measure()
        return {}


# -- Numbers of tokens -----------------------------------------------------------------------------


def count_tokens(sample: Any, *, length: str | Callable[[Any], int] = "input_ids") -> int:
    """Return the number of tokens of a sample: a sequence of them, or a dict with one.

    Args:
        sample: The sample.
        length: The field of a dict, or a function of the sample.

    Raises:
        LoaderError: The sample has no such field, or it has no length.
    """
    if callable(length):
        return int(length(sample))
    tokens = sample
    if isinstance(sample, Mapping):
        if length not in sample:
            names = sorted(map(str, sample))
            msg = (
                f"a sample has no field {length!r} to count tokens in, but {names}; tokenize the "
                "samples first, or name the field: TokenBudget(length=...)"
            )
            raise LoaderError(msg)
        tokens = sample[length]
    is_scalar = isinstance(tokens, Tensor) and not tokens.dim()
    if isinstance(tokens, str) or is_scalar or not hasattr(tokens, "__len__"):
        msg = (
            f"a sample must be tokens, or a dict with them as {length!r}, to be counted; got "
            f"{type(tokens).__name__}: {tokens!r:.60}; tokenize the samples first"
        )
        raise LoaderError(msg)
    return len(tokens)


def tokens_in(row: SampleRow) -> int:
    """Return the number of tokens of a row; its pieces have ends."""
    return sum((p.stop or 0) - p.start for p in row.pieces)


def _runs(items: Iterable[Item]) -> list[list[int]]:
    """Return positions as runs: [first, number]."""
    runs: list[list[int]] = []
    for item in items:
        if runs and item.position == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([item.position, 1])
    return runs


def _check_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{name}={value!r}: give a whole number above 0"
        raise ConfigError(msg)
    return value


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        msg = f"{name}={value!r}: take one of {', '.join(map(repr, choices))}"
        raise ConfigError(msg)


# -- Into rows, and over ranks ---------------------------------------------------------------------


def concatenate(parts: Iterable[_SamplePart], length: int) -> list[list[_SamplePart]]:
    """Return rows of exactly ``length`` tokens, the last one shorter: in order, cut where a row is full."""
    rows: list[list[_SamplePart]] = []
    space = 0
    for part in parts:
        while part.tokens:
            if not space:
                rows.append([])
                space = length
            cut = min(part.start + space, part.stop)
            if cut == part.stop:
                rows[-1].append(part)
            else:
                rows[-1].append(part._replace(stop=cut, whole=False))
            space -= cut - part.start
            part = part._replace(start=cut, whole=False)  # noqa: PLW2901 - what is left of it
    return rows


def best_fit(parts: Iterable[_SamplePart], length: int) -> list[list[_SamplePart]]:
    """Return rows of at most ``length`` tokens: longest first, each into the fullest row with space."""
    rows: list[list[_SamplePart]] = []
    spaces: list[tuple[int, int]] = []  # of rows that are not full, with their numbers, in ascending order
    for part in sorted(parts, key=lambda p: (-p.tokens, p)):
        at = bisect_left(spaces, (part.tokens, -1))
        if at < len(spaces):
            space, number = spaces.pop(at)
        else:
            space, number = length, len(rows)
            rows.append([])
        rows[number].append(part)
        if space > part.tokens:
            insort(spaces, (space - part.tokens, number))
    return rows


def share_out(
    costs: Sequence[int],
    ranks: int,
    *,
    speeds: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the numbers of each rank's rows: costliest first, each to the rank that would end first.

    Without ``most``, rows of a rank cost as much as its costliest one, to which they are padded.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks

    def load_with(rank: int, row: int) -> int:
        """Return the load of a rank that gets a row, too."""
        is_padded = most is None and parts[rank]
        longest = parts[rank][0] if is_padded else row
        return loads[rank] + costs[longest]

    def end_with(rank: int, row: int) -> float:
        load = load_with(rank, row)
        if speeds is None:
            return load
        return load / speeds[rank]

    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        open_ranks = [rank for rank in range(ranks) if most is None or len(parts[rank]) < most[rank]]
        rank = min(open_ranks, key=lambda rank: (end_with(rank, row), len(parts[rank]), rank))
        loads[rank] = load_with(rank, row)
        parts[rank].append(row)
    return [sorted(part) for part in parts]
