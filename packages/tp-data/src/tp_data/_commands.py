"""``tp data``: indexes, a look at samples, and which samples a step has."""

import glob
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, Any

import typer
from tp_core.builders import load_function
from tp_core.errors import ConfigError
from tp_core.output import output_console

from tp_data import Access, Loader, Shuffle, Stream

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

_MOST = 10_000  # samples that are measured
_BINS = 12
_BAR = 40
_SHOWN = 76  # characters of a sample

Files = Annotated[list[str], typer.Argument(help="Files, patterns or URLs; NAME=FILES for several sources.")]
Cache = Annotated[str, typer.Option(help="The folder of copies and indexes; beside the files by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.callback()
def _data() -> None:
    """Index data, look at its samples, find what a step has."""


@app.command("index")
def _index(files: Files, *, cache: Cache = "", as_json: AsJson = False) -> None:
    """Make the indexes of files, so that runs find them."""
    stream = _stream(files, cache)
    if as_json:
        print(json.dumps({"sources": _described_sources(stream)}))
        return
    for name, source in stream.sources.items():
        if source.left_out:
            left_out = f", {source.left_out} members left out"
        else:
            left_out = ""
        print(f"{name}: {len(source)} samples{left_out}, digest {source.digest}")


@app.command("look")
def _look(
    files: Files,
    *,
    field: Annotated[str, typer.Option(help="The field of a sample to measure.")] = "",
    samples: Annotated[int, typer.Option(help="How many samples to show.", min=0)] = 3,
    cache: Cache = "",
    as_json: AsJson = False,
) -> None:
    """Show how many samples there are, how long they are, and some of them.

    Texts, lists and bytes have a length; of a dict without --field, of its JSON. Of many samples ten
    thousand are looked at, chosen at random.
    """
    stream = _stream(files, cache, shuffle=True)
    shown = [stream.place(at).where for at in range(min(samples, len(stream)))]
    lengths = [_length(stream.sample(at), field) for at in range(min(len(stream), _MOST))]
    bins = _histogram(lengths)
    if as_json:
        numbers = {"least": min(lengths), "mean": sum(lengths) / len(lengths), "most": max(lengths)}
        document: dict[str, Any] = {
            "sources": _described_sources(stream),
            "looked_at": len(lengths),
            "lengths": numbers,
            "histogram": bins,
        }
        document["samples"] = [stream.sample(at) for at in range(len(shown))]
        print(json.dumps(document, default=repr))
        return
    for name, source in stream.sources.items():
        print(f"{name}: {len(source)} samples")
    mean = sum(lengths) / len(lengths)
    print(f"length of {len(lengths)}: {min(lengths)} to {max(lengths)}, mean {mean:.1f}")
    widest = max(count for _, _, count in bins)
    for least, most, count in bins:
        print(f"{least:>9} - {most:<9} {'#' * -(-count * _BAR // widest):<{_BAR}} {count}")
    for at, where in enumerate(shown):
        text = " ".join(repr(stream.sample(at)).split())
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN]} ..."
        print(f"{where}: {text}")


@app.command("order")
def _order(
    files: Annotated[
        list[str],
        typer.Argument(help="As of look; or train.py:make_loader, a function that returns the Loader."),
    ],
    *,
    step: Annotated[int, typer.Option(help="The step, from 1 on over all epochs, as logs count.", min=1)] = 1,
    ranks: Annotated[int, typer.Option(help="The number of ranks.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="The samples of a step on all ranks together.")] = 0,
    seed: Annotated[int, typer.Option(help="The seed of the stream.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="The stream is shuffled.")] = False,
    blocks: Annotated[int, typer.Option(help="As of Shuffle; 0 for none.")] = 0,
    buffer: Annotated[int, typer.Option(help="As of Shuffle; 0 for none.")] = 0,
    cache: Cache = "",
    as_json: AsJson = False,
) -> None:
    """Show which samples a step has on which rank: what made the loss jump?"""
    if len(files) == 1 and ":" in files[0] and "://" not in files[0]:
        if batch or seed or shuffle or blocks or buffer:
            msg = (
                f"{files[0]} makes the loader: --batch, --seed, --shuffle, --blocks and --buffer are its own"
            )
            raise ConfigError(msg)
        # What the script prints is no JSON.
        output = redirect_stdout(sys.stderr) if as_json else nullcontext()
        with output:
            loader = load_function(files[0], example="make_loader")()
        if not isinstance(loader, Loader):
            msg = f"{files[0]} must return a tp_data.Loader, got {type(loader).__name__}"
            raise ConfigError(msg)
    else:
        if batch < 1:
            msg = "give --batch, the samples of a step on all ranks together"
            raise ConfigError(msg)
        rule: Shuffle | bool = shuffle
        if buffer or blocks:
            rule = Shuffle(buffer=buffer or None, blocks=blocks or None)
        loader = Loader(_stream(files, cache, shuffle=rule, seed=seed), batch)
    epoch, first = _epoch_of(loader, step)
    parts = next(loader.steps(ranks, epoch=epoch, first=first), None)
    if parts is None:
        msg = f"epoch {epoch} has no step {first + 1}"
        raise ConfigError(msg)
    samples = []
    for rank, rows in enumerate(parts):
        for number, row in enumerate(rows):
            for piece in row.pieces:
                place = loader.stream.place(piece.position, epoch=epoch)
                described: dict[str, Any] = {
                    "rank": rank,
                    "row": number,
                    "position": piece.position,
                    "source": place.source,
                    "index": place.index,
                    "where": place.where,
                }
                samples.append(described)
    if as_json:
        print(json.dumps({"step": step, "epoch": epoch, "batch": first, "samples": samples}))
        return
    from rich.table import Table

    print(f"step {step}: batch {first + 1} of epoch {epoch + 1}")
    table = Table(*samples[0], box=None)
    for described in samples:
        table.add_row(*map(str, described.values()))
    output_console().print(table)


def _described_sources(stream: Stream) -> dict[str, dict[str, Any]]:
    """Return the number of samples and the digest of each source."""
    sources = {}
    for name, source in stream.sources.items():
        sources[name] = {"samples": len(source), "left_out": source.left_out, "digest": source.digest}
    return sources


def _epoch_of(loader: Loader, step: int) -> tuple[int, int]:
    """Return the epoch of a step, and the step's number in it, from 0."""
    try:
        return divmod(step - 1, len(loader))
    except TypeError:  # no length that is known: the steps of the first epoch
        return 0, step - 1


def _stream(files: Sequence[str], cache: str, **options: Any) -> Stream:
    """Return a stream of files, or of several sources that are written NAME=FILES.

    Raises:
        ConfigError: Some have a name and others none.
    """
    pairs = [path.partition("=") for path in files if not glob.glob(path)]  # noqa: PTH207 - year=2024/a.jsonl
    named = {name: value for name, _, value in pairs if value and name.isidentifier()}
    if named and len(named) != len(files):
        msg = f"give each source a name of its own, NAME=FILES, or none of them, got {' '.join(files)}"
        raise ConfigError(msg)
    return Stream(named or list(files), access=Access(cache=cache or None), **options)


def _length(sample: Any, field: str) -> int:
    if field:
        if not isinstance(sample, dict) or field not in sample:
            has = list(sample) if isinstance(sample, dict) else type(sample).__name__
            msg = f"a sample has no field {field!r}; it is {has}"
            raise ConfigError(msg)
        sample = sample[field]
    if isinstance(sample, str | bytes | list | tuple):
        return len(sample)
    return len(json.dumps(sample, default=repr))


def _histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (least, most, count) of bins of equal width."""
    least, most = min(lengths), max(lengths)
    width = -(-(most - least + 1) // _BINS)
    counts = [0] * (-(-(most - least + 1) // width))
    for length in lengths:
        counts[(length - least) // width] += 1
    return [(least + i * width, min(least + (i + 1) * width - 1, most), n) for i, n in enumerate(counts)]
