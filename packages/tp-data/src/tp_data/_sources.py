"""Sources: samples by number, from files, tables, archives, sequences and iterators."""

import copy
import hashlib
import io
import itertools
import json
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError, LoaderError
from tp_core.messages import check_installed
from tp_core.output import get_logger
from tp_core.random import preserve_rng_state, seed_everything

from tp_data._files import Access, IndexedFile, find_files, index_files
from tp_data._order import key_of
from tp_data._scans import tar_key

FilePaths: TypeAlias = str | PathLike[str] | Iterable[str | PathLike[str]]

# Not in its documents, nor its types: a third of the time of json.loads on short lines.
_read_json: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_ROW_GROUPS = 4  # that a process holds in memory
_PROOF = 3  # samples behind a noted state that are compared
_MOST_READING = 16  # iterators of a source that a process holds, and more of many shards

log = get_logger("tp_data")


class Source:
    """Samples by number. A subclass has a length, samples, places for messages, and a digest.

    Attributes:
        draws: Whether loading a sample may draw random numbers; they then follow from the sample's position.
        makes_samples: Whether a sample is a new object each time, so that a transform may change it in place
            and leave the source as it is.
        left_out: How many members of archives are in no sample.
    """

    draws = False
    makes_samples = False
    left_out = 0

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            LoaderError: It cannot be read; the message has its file and offset.
        """
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; a subclass overrides it where reading them together costs less.

        Where it raises, samples are read one by one, and that names the one at fault.
        """
        return [self[index] for index in indices]

    def where(self, index: int) -> str:
        """Return the place of a sample, for messages."""
        return f"sample {index} of {type(self).__name__}"

    @property
    def digest(self) -> str:
        """A text that changes with the samples, so that a state is not resumed on others."""
        return f"{len(self)}"


class _FileSource(Source):
    """Samples that lie one behind the other in files."""

    kind = ""
    makes_samples = True

    def __init__(self, files: FilePaths, *, access: Access | None = None) -> None:
        """Find the files, and make the indexes that are missing.

        Args:
            files: Paths, URLs or patterns, one or several.
            access: How remote files are read, and where copies and indexes are kept.

        Raises:
            ConfigError: There is no such file, or no sample in any.
            LoaderError: A file cannot be read, or is not whole.
        """
        access = access or Access()
        self._files = index_files(find_files(files, access), self.kind, access)
        self._ends = list(accumulate(map(len, self._files)))
        self.left_out = sum(file.left_out for file in self._files)
        if not self._ends[-1]:
            raise ConfigError(_is_empty([file.url for file in self._files]))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        file, at = self._find(index)
        return self._decode(file.read(at), file, at)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; neighbors in a file are read together."""
        ends, files, decode = self._ends, self._files, self._decode
        groups: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number = bisect_right(ends, index)
            start = ends[number - 1] if number else 0
            groups.setdefault(number, []).append((index - start, place))
        samples: list[Any] = [None] * len(indices)
        for number, wanted in groups.items():
            file = files[number]
            for (at, place), data in zip(wanted, file.read_several([at for at, _ in wanted]), strict=True):
                samples[place] = decode(data, file, at)
        return samples

    def _find(self, index: int) -> tuple[IndexedFile, int]:
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        return self._files[number], index - start

    def _decode(self, data: bytes, file: IndexedFile, index: int) -> Any:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Return the file of a sample, and its place in it."""
        file, at = self._find(index)
        return file.where(at)

    @property
    def digest(self) -> str:
        """A digest of the content of all files, in their order."""
        return f"{key_of([file.digest for file in self._files], len(self)):016x}"


def _is_empty(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return f"the source has no sample: {shown}; give files with samples, or leave the source out"


@explain_init
class JsonLines(_FileSource):
    """One JSON value in each line of files, such as ``data/*.jsonl`` or ``https://host/a.jsonl.gz``."""

    kind = "json"

    def _decode(self, data: bytes, file: IndexedFile, index: int) -> Any:
        try:
            text = data.decode()
            try:
                value, end = _read_json(text, 0)
                if text[end:] == "\n" or end == len(text) or text[end:].isspace():
                    return value
            except (StopIteration, ValueError):  # blanks before it, or no JSON: the whole reader knows
                pass
            return json.loads(text.removeprefix("\ufeff"))  # the mark of a file that was joined
        except ValueError as error:
            start = file.span(index)[0] + getattr(error, "start", getattr(error, "pos", 0))
            msg = f"{file.url}, sample {index}, byte {start}: no JSON ({error}): {data[:60]!r}"
            raise LoaderError(msg) from None


@explain_init
class TextLines(_FileSource):
    """One line of text files as each sample, without its end."""

    kind = "lines"

    def _decode(self, data: bytes, file: IndexedFile, index: int) -> str:
        try:
            return data.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            start = file.span(index)[0] + error.start
            msg = f"{file.url}, sample {index}, byte {start}: no UTF-8 ({error.reason})"
            raise LoaderError(msg) from None


@explain_init
class TarShards(_FileSource):
    """Tar archives as WebDataset writes them: members with names that begin alike are one sample.

    A sample is a dict: ``"__key__"``, and for each member its extension. Members ``json``, ``txt`` and
    ``cls`` are decoded, and others stay bytes, for the stream's ``transform``. Members without an extension,
    with a name that begins with a dot, and in folders such as ``__meta__`` are left out, with a warning.
    """

    kind = "tar"

    def _decode(self, data: bytes, file: IndexedFile, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for member in tar:
                    key, extension = tar_key(member.name)
                    if not extension or not member.isfile():
                        continue
                    content = data[member.offset_data : member.offset_data + member.size]
                    if member.issparse():  # its holes are not in the archive
                        content = tar.extractfile(member).read()  # type: ignore[union-attr]
                    sample["__key__"] = key
                    sample[extension] = _decode_member(extension.rpartition(".")[2], content)
        except (tarfile.TarError, ValueError) as error:
            raise LoaderError(f"{file.where(index)}: a broken sample ({error})") from None  # noqa: EM102
        return sample


def _decode_member(extension: str, content: bytes) -> Any:
    if extension in {"json"}:
        return json.loads(content)
    if extension in {"txt", "text"}:
        return content.decode("utf-8-sig")
    if extension in {"cls", "cls2", "index", "inx", "id"}:
        return int(content)
    return content


@explain_init
class Parquet(Source):
    """Rows of Parquet files as dicts.

    A row is read with its row group, and a process holds a few of them: shuffle with ``Shuffle(blocks=...)``,
    about as many rows as a group has.
    """

    makes_samples = True

    def __init__(
        self, files: FilePaths, *, columns: Sequence[str] | None = None, access: Access | None = None
    ) -> None:
        """Read the files' numbers of rows.

        Args:
            files: Paths, URLs or patterns, one or several.
            columns: The columns of a sample; all by default.
            access: How remote files are read, and where copies are kept.

        Raises:
            ConfigError: pyarrow is not installed; or there is no such file, column or row; or rows would lack
                a column: two have one name, or a folder such as ``year=2024`` has it.
            LoaderError: A file cannot be read, or is not whole.
        """
        check_installed("pyarrow", by="Parquet", extra="tp-data[parquet]")
        access = access or Access()
        self._columns = None if columns is None else list(columns)
        self._files = index_files(find_files(files, access), "parquet", access)
        self._groups: list[tuple[int, int]] = []
        counts = []
        for number, file in enumerate(self._files):
            with _parquet_file(file) as opened:
                _check_columns(opened.schema_arrow.names, self._columns, file.url)
                groups = range(opened.metadata.num_row_groups)
                self._groups += [(number, group) for group in groups]
                counts += [opened.metadata.row_group(group).num_rows for group in groups]
        self._ends = list(accumulate(counts)) or [0]
        if not self._ends[-1]:
            raise ConfigError(_is_empty([file.url for file in self._files]))
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": OrderedDict()}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows; those of a row group are taken together."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number = bisect_right(self._ends, index)
            start = self._ends[number - 1] if number else 0
            wanted.setdefault(number, []).append((index - start, place))
        result: list[Any] = [None] * len(indices)
        for number, rows in wanted.items():
            self._files[self._groups[number][0]].check()  # its group may be one in memory
            taken = self._group(number, indices[rows[0][1]]).take([at for at, _ in rows])
            for (_, place), row in zip(rows, taken.to_pylist(), strict=True):
                result[place] = row
        return result

    def _group(self, number: int, index: int) -> Any:
        """Return a row group, of which ``index`` is a sample."""
        if number not in self._tables:
            file, group = self._groups[number]
            try:
                with _parquet_file(self._files[file]) as opened:
                    table = opened.read_row_group(group, columns=self._columns).combine_chunks()
            except (OSError, ValueError) as error:  # pyarrow's own are of these
                self._files[file].check()
                if isinstance(error, OSError) and error.errno is not None:  # the system's, not the format's
                    raise self._files[file].unreadable(error) from error
                raise LoaderError(f"{self.where(index)}: {error}") from error  # noqa: EM102
            self._files[file].check()
            self._tables[number] = table
            if len(self._tables) > _ROW_GROUPS:
                self._tables.popitem(last=False)
        return self._tables[number]

    def where(self, index: int) -> str:
        """Return the file and the row group of a sample."""
        number = bisect_right(self._ends, index)
        file, group = self._groups[number]
        start = self._ends[number - 1] if number else 0
        return f"{self._files[file].url}, row group {group}, row {index - start} of it"

    @property
    def digest(self) -> str:
        """A digest of the files, in their order, and of the columns."""
        return f"{key_of([file.digest for file in self._files], len(self), self._columns):016x}"


def _check_columns(names: Sequence[str], columns: Sequence[str] | None, url: str) -> None:
    """Check that a row as a dict has all columns that were asked for.

    Raises:
        ConfigError: It would lack one.
    """
    if unknown := sorted(set(columns or ()) - set(names)):
        msg = f"{url} has no columns {unknown}; it has {names}"
        raise ConfigError(msg)
    if twice := sorted(name for name in set(columns or names) if names.count(name) > 1):
        msg = f"{url} has several columns {twice[0]!r}, and a row has one of a name; give other columns=[...]"
        raise ConfigError(msg)
    for folder in Path(url).parts[:-1]:
        name, is_column, _ = folder.partition("=")
        if columns is None and is_column and name not in names:
            msg = (
                f"{url} lies in the folder {folder!r}, which makes a column {name!r} for other readers, and "
                f"rows would lack it; give columns={list(names)} for rows without"
            )
            raise ConfigError(msg)


def _parquet_file(file: IndexedFile) -> Any:
    """Open a Parquet file.

    Raises:
        LoaderError: It is not whole, or gone.
    """
    from pyarrow.parquet import ParquetFile

    file.check()
    try:
        return ParquetFile(file.path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's, not the format's
            raise file.unreadable(error) from error
        msg = f"{file.url} is no whole Parquet file ({file.path.stat().st_size} bytes): {error}"
        raise LoaderError(msg) from error


@explain_init
class Iterables(Source):
    """Iterators, one for each shard, such as readers of a format that tp-data does not know.

    They are read once to count their samples. Where an iterable has ``state_dict`` and ``load_state_dict``,
    as those of Hugging Face have, its states are noted on the way, so that a later read begins near its
    sample. A state that does not lead to the samples behind it, such as one of a shuffle buffer, is not used:
    then, and without states, a read begins at the beginning of its shard. Keep shards small, and the order
    within them.

    A library's ``shard`` need not divide what the library iterates over: give Hugging Face's datasets as they
    are, and not their shards.

    Example:
        >>> source = Iterables(lambda shard: range(shard * 10, shard * 10 + 3), shards=2)
        >>> len(source), source[4]
        (6, 11)
    """

    draws = True

    def __init__(
        self, factory: Callable[[int], Iterable[Any]], shards: int, *, every: int = 1000, name: str = ""
    ) -> None:
        """Count the samples of each shard.

        Args:
            factory: Returns the samples of a shard, the same ones each time, of which there is an end.
            shards: The number of shards.
            every: The samples between two noted states.
            name: The name in messages; the factory's by default.

        Raises:
            ConfigError: There is no shard, or no sample.
        """
        if not callable(factory):
            msg = (
                "Iterables(factory, shards) takes a function that returns the samples of a shard, got "
                f"{type(factory).__name__}; write Iterables(lambda shard: ..., shards)"
            )
            raise ConfigError(msg)
        self._factory, self._every = factory, every
        self._name = name or getattr(factory, "__name__", type(factory).__name__)
        self._states: list[list[Any]] = []  # of each shard, None for what does not lead to its samples
        counts, digests = [], []
        for shard in range(shards):
            states, count, digest = self._read_shard(shard)
            self._states.append(states)
            counts.append(count)
            digests.append(digest)
        self._ends = list(accumulate(counts)) or [0]
        if not self._ends[-1]:
            raise ConfigError(_is_empty([f"{self._name}, {shards} shards"]))
        self._digest = f"{key_of(self._ends, digests):016x}"
        # Of stretches between noted states, the next sample and the iterator; the one used last at the end.
        self._reading: OrderedDict[tuple[int, int], tuple[int, Iterator[Any]]] = OrderedDict()

    def _read_shard(self, shard: int) -> tuple[list[Any], int, list[str]]:
        """Return the noted states of a shard, the number of its samples, and digests of some of them."""
        iterable = self._factory(shard)
        states, count = [_state_of(iterable)], 0
        digests: list[str] = []
        with preserve_rng_state(()):
            iterator = iter(iterable)
            while True:
                # Samples with random parts have the same ones here and behind a state.
                seed_everything(count, devices=False)
                proof = [
                    _sample_digest(sample) for sample in itertools.islice(iterator, min(_PROOF, self._every))
                ]
                if count and states[-1] is not None and not self._leads_to(shard, states[-1], count, proof):
                    states[-1] = None
                digests += proof
                rest = sum(1 for _ in itertools.islice(iterator, self._every - len(proof)))
                count += len(proof) + rest
                if len(proof) + rest < self._every:
                    break
                states.append(_state_of(iterable))
        if states[0] is not None and None in states:
            log.warning(
                "%s, shard %d: its states do not lead back to its samples, as those of a shuffle buffer do "
                "not; reads begin at the beginning of the shard, so leave the order to Stream(shuffle=...)",
                self._name,
                shard,
            )
        return states, count, digests

    def _leads_to(self, shard: int, state: Any, count: int, proof: list[str]) -> bool:
        """Return whether the samples behind a state are those that came first."""
        again = self._factory(shard)
        again.load_state_dict(state)  # type: ignore[attr-defined]
        with preserve_rng_state(()):
            seed_everything(count, devices=False)
            return proof == [_sample_digest(sample) for sample in itertools.islice(iter(again), len(proof))]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reading": OrderedDict()}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        shard = bisect_right(self._ends, index)
        at = index
        if shard:
            at -= self._ends[shard - 1]
        with _outside_workers():
            start, iterator = self._iterator_before(shard, at)
            for sample in itertools.islice(iterator, at - start, None):
                self._reading[shard, (at + 1) // self._every] = at + 1, iterator
                if len(self._reading) > max(_MOST_READING, len(self._states)):
                    self._reading.popitem(last=False)
                return sample
        msg = f"{self.where(index)}: the shard ended before it, and had more when it was counted"
        raise LoaderError(msg)

    def _iterator_before(self, shard: int, at: int) -> tuple[int, Iterator[Any]]:
        """Return an iterator that has not passed a sample of a shard, and what it yields next."""
        states = self._states[shard]
        noted = at // self._every
        while noted and states[noted] is None:
            noted -= 1
        for stretch in range(at // self._every, noted - 1, -1):
            start, iterator = self._reading.get((shard, stretch), (at + 1, iter(())))
            if start <= at:
                del self._reading[shard, stretch]
                return start, iterator
        iterable: Any = self._factory(shard)
        if noted:
            iterable.load_state_dict(states[noted])
        return noted * self._every, iter(iterable)

    def where(self, index: int) -> str:
        """Return the shard of a sample, and its place in it."""
        shard = bisect_right(self._ends, index)
        start = self._ends[shard - 1] if shard else 0
        return f"{self._name}, shard {shard}, sample {index - start}"

    @property
    def digest(self) -> str:
        """A digest of the numbers of samples, and of the first of each stretch between noted states."""
        return self._digest


@contextmanager
def _outside_workers() -> Iterator[None]:
    """Hide from iterators in a worker that it is one: they would leave samples to the others.

    Hugging Face's iterable datasets and WebDataset look. The name is private: torch has no other way.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _state_of(iterable: Any) -> Any:
    has = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
    if has:
        return iterable.state_dict()
    return None


def _sample_digest(sample: Any) -> str:
    """Return a digest of the content of a sample, the same in each process; of unknown types the name."""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        if isinstance(value, Mapping):
            for key, entry in value.items():
                add(key)
                add(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                add(entry)
        elif isinstance(value, str | int | float | complex | bytes | None):
            digest.update(repr(value).encode())
        elif isinstance(value, torch.Tensor):
            digest.update(repr(value.tolist()).encode())
        elif hasattr(value, "tobytes"):  # arrays of numpy, and images
            digest.update(value.tobytes())

    add(sample)
    return digest.hexdigest()


class _SequenceSource(Source):
    """A sequence of the user's: a list, a map-style dataset."""

    def __init__(self, items: Any) -> None:
        self._items = items
        # Whoever wrote another class, or a function that makes the format, may have drawn in it.
        package = type(items).__module__.split(".")[0]
        is_plain = type(items) in (list, tuple, range) or package == "streaming"
        is_table = package == "datasets" and items.format["type"] != "custom"
        self.draws = not (is_plain or is_table)
        self.makes_samples = is_table or type(items) is range or package == "streaming"
        self._arrow = _ArrowRows.of(items) if is_table else None
        if not len(items):
            raise ConfigError(_is_empty([f"a {type(items).__name__} of length 0"]))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; torch's own loader calls the method of this name, too."""
        if self._arrow is not None:
            return self._arrow.take(indices)
        together = getattr(self._items, "__getitems__", None)
        if together is None:
            return [self._items[index] for index in indices]
        return list(together(indices))

    def where(self, index: int) -> str:
        """Return the type of the sequence, and the index."""
        return f"{type(self._items).__name__}, sample {index}"

    @property
    def digest(self) -> str:
        """A digest of the type and the length; Hugging Face's datasets know one of their content."""
        kind, fingerprint = type(self._items).__name__, getattr(self._items, "_fingerprint", "")
        return f"{key_of(kind, len(self), fingerprint):016x}"


class _ArrowRows:
    """The rows of a dataset of Hugging Face, which are its samples, as Arrow makes them.

    The dataset's own batches of dicts take twice the time.

    Args:
        dataset: The dataset, with Arrow tables as batches.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._batches: list[Any] = []  # of the table on the disk, once they are asked for
        self._begins = [0]  # the rows with which these begin, and the end of the last one

    @classmethod
    def of(cls, dataset: Any) -> "_ArrowRows | None":
        """Return the rows; ``None`` where the dataset makes something else of them."""
        from datasets.features.features import require_decoding

        form = dataset.format
        if form["type"] is not None or any(map(require_decoding, dataset.features.values())):
            return None  # tensors, or images and sounds that it decodes
        if form["output_all_columns"]:
            columns = None
        else:
            columns = form["columns"]
        return cls(dataset.with_format("arrow", columns))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": []}

    def take(self, indices: Sequence[int]) -> list[Any]:
        """Return several rows."""
        if self._dataset._indices is None:  # private: rows are those of the table, in its order
            table = self._gathered(indices)
        else:
            table = self._dataset[indices]
        rows: list[Any] = table.combine_chunks().to_pylist()  # of chunks it is slow
        return rows

    def _gathered(self, indices: Sequence[int]) -> Any:
        """Return a table of rows. The table's own method would join all batches first."""
        from pyarrow import Table

        if not self._batches:
            table, columns = self._dataset.data.table, self._dataset.format["columns"]
            table = table.select([name for name in table.column_names if name in columns])
            self._batches = table.to_batches()
            self._begins = [0, *accumulate(map(len, self._batches))]
        rows = []
        for index in indices:
            number = bisect_right(self._begins, index) - 1
            rows.append(self._batches[number].slice(index - self._begins[number], 1))
        return Table.from_batches(rows)


def _whole(dataset: Any, _shard: int) -> Any:
    """Return an iterable dataset as a copy: a state that is loaded into one must not move another."""
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        msg = (
            f"a {type(dataset).__name__} that cannot be copied ({type(error).__name__}: {error}) has one "
            "state for all readers; give Iterables(factory, shards), with a factory that makes it"
        )
        raise ConfigError(msg) from error


_SUFFIXES: Mapping[str, Callable[[Any, Access | None], Source]] = {
    ".jsonl": lambda files, access: JsonLines(files, access=access),
    ".ndjson": lambda files, access: JsonLines(files, access=access),
    ".json": lambda files, access: JsonLines(files, access=access),
    ".txt": lambda files, access: TextLines(files, access=access),
    ".parquet": lambda files, access: Parquet(files, access=access),
    ".tar": lambda files, access: TarShards(files, access=access),
}


def source_of(data: Any, access: Access | None = None) -> Source:
    """Return a source of what was given: a source, a path, URL or pattern, or a sequence.

    Raises:
        ConfigError: Nothing of it can be a source.
    """
    if isinstance(data, Source):
        return data
    paths = [data] if isinstance(data, str | PathLike) else data
    if (
        isinstance(paths, list | tuple)
        and paths
        and all(isinstance(p, PathLike) or _is_path(p) for p in paths)
    ):
        kinds = {_suffix(str(path)) for path in paths}
        if len(kinds) != 1 or not kinds <= set(_SUFFIXES):
            msg = (
                f"the files of a source have one suffix of {', '.join(_SUFFIXES)}, and .gz, .bz2, .xz or "
                f".zst behind it, got {sorted(kinds)}; or name the class: JsonLines(files), ..."
            )
            raise ConfigError(msg)
        return _SUFFIXES[kinds.pop()](paths, access)
    kind = type(data)
    if kind.__module__.split(".")[0] == "streaming" and kind.__name__ != "LocalDataset":
        msg = (
            f"{kind.__name__} orders and splits its samples itself; give what reads them alone: "
            "streaming.LocalDataset(local=folder)"
        )
        raise ConfigError(msg)
    if kind.__module__ in ("tp_data._stream", "tp_data._loader"):  # both have an index, which refuses
        msg = f"a source has samples, and a {kind.__name__} is made of sources; give them in a dict, by name"
        raise ConfigError(msg)
    if (
        isinstance(data, Sized)
        and hasattr(data, "__getitem__")
        and not isinstance(data, Mapping | str | bytes)
    ):
        return _SequenceSource(data)
    if hasattr(data, "__iter__") and hasattr(data, "num_shards") and hasattr(data, "shard"):
        # Hugging Face's iterable dataset. Its shards need not be parts of its iteration: skip(), take() and
        # batched map() count in each shard, and interleave_datasets() ends in each.
        if getattr(data, "_distributed", None) is not None:
            msg = (
                "split_dataset_by_node() leaves each rank its part of a dataset, and a Loader divides the "
                "batches itself; give the whole dataset"
            )
            raise ConfigError(msg)
        return Iterables(partial(_whole, data), 1, name=kind.__name__)
    if isinstance(data, str) and Path(data).is_dir():
        msg = f"{data!r} is a folder; give a pattern of its files: {str(Path(data, '*.jsonl'))!r}"
        raise ConfigError(msg)
    if isinstance(data, str):
        msg = (
            f"a source is a path, URL or pattern of files that end in {', '.join(_SUFFIXES)}, with .gz, "
            f".bz2, .xz or .zst behind it or not, got {data!r}; read others with their own library, and give "
            "their rows as a list"
        )
        raise ConfigError(msg)
    if isinstance(data, DataLoader):
        msg = "a source has samples, and a DataLoader makes batches of them; give its dataset: loader.dataset"
        raise ConfigError(msg)
    msg = (
        "a source is a path, URL or pattern of files, a sequence, or one of tp_data's classes, got "
        f"{kind.__name__}; for iterators give Iterables(factory, shards)"
    )
    raise ConfigError(msg)


def _suffix(path: str) -> str:
    if "://" in path:
        path = path.partition("?")[0]
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".xz", ".zst"}:
        suffixes.pop()
    if suffixes:
        return suffixes[-1]
    return ""


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and ("://" in value or _suffix(value) in _SUFFIXES)
