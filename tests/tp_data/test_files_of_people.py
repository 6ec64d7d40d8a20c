"""Files as people have them: samples are what a plain reader has, or the index says why they cannot be."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile

import pytest
from tp_core.errors import ConfigError, LoaderError
from tp_data import BatchSize, JsonLines, Loader, Parquet, Stream, TarShards, TextLines

ROWS = [{"id": i, "text": "é\u2028\x85" * (i % 4)} for i in range(9)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
DATA = LINES.encode()
BOM = b"\xef\xbb\xbf"


def tar(*members, **options):
    """Return an archive of ``(name, content)``; content that is a text is where a link leads."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as out:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = (
                    tarfile.LNKTYPE if name.startswith("hard") else tarfile.SYMTYPE,
                    content,
                )
            else:
                info.size = len(content)
            out.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return made.getvalue()


def zstd(data, **options):
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(**options)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return writer.compress(data) + writer.flush()


def damaged(data):
    """Return bytes of which some in the middle are others."""
    half = len(data) // 2
    return data[:half] + bytes(255 - byte for byte in data[half : half + 8]) + data[half + 8 :]


def noise(count):
    draw = random.Random(0)
    return "".join(json.dumps({"n": draw.random()}) + "\n" for _ in range(count)).encode()


A, B = ("a.txt", b"1"), ("b.txt", b"2")
TWO = [{"__key__": "a", "txt": "1"}, {"__key__": "b", "txt": "2"}]

RIGHT = {
    "lines of JSON": ("a.jsonl", DATA, ROWS),
    "with CR and LF": ("a.jsonl", DATA.replace(b"\n", b"\r\n"), ROWS),
    "without a last end of line": ("a.ndjson", DATA[:-1], ROWS),
    "with a BOM": ("a.jsonl", BOM + DATA, ROWS),
    "with a BOM and a blank line": ("a.jsonl", BOM + b"\r\n" + DATA, ROWS),
    "a line of blanks at the end": ("a.jsonl", DATA + b"  \r\n", ROWS),
    "lines of blanks everywhere": ("a.jsonl", DATA.replace(b"\n", b"\n \t \n" + b" " * 100 + b"\n\n"), ROWS),
    "indented lines": ("a.jsonl", b"  " + DATA.replace(b"\n", b"\n\t"), ROWS),
    "two with BOMs, joined": ("a.jsonl", (BOM + DATA) * 2, ROWS * 2),
    "a line of 9 MB": (
        "a.jsonl",
        DATA + json.dumps("x" * 9_000_000).encode() + b"\n" + DATA,
        [*ROWS, "x" * 9_000_000, *ROWS],
    ),
    "an array in each line": ("a.jsonl", b"[1, 2]\n[3]\n", [[1, 2], [3]]),
    "one array of messages as lines": ("a.jsonl", b'[{"role": "user"}]\n', [[{"role": "user"}]]),
    "a document in one line": ("a.json", b'{"id": 1}', [{"id": 1}]),
    "a long number": (
        "a.jsonl",
        b'{"id": 123456789012345678901234567890}\n',
        [{"id": 123456789012345678901234567890}],
    ),
    "gzip of several members": ("a.jsonl.gz", gzip.compress(DATA) + gzip.compress(DATA), ROWS * 2),
    "gzip, padded": ("a.jsonl.gz", gzip.compress(DATA) + bytes(512), ROWS),
    "bzip2 of several streams": ("a.jsonl.bz2", bz2.compress(DATA) + bz2.compress(DATA), ROWS * 2),
    "xz of several streams": ("a.jsonl.xz", lzma.compress(DATA) + lzma.compress(DATA), ROWS * 2),
    "zstd --long=31": ("a.jsonl.zst", lambda: zstd(DATA, window_log=31, enable_ldm=True), ROWS),
    "zstd of several frames": ("a.jsonl.zst", lambda: zstd(DATA) + zstd(DATA), ROWS * 2),
    "text": ("a.txt", b"one\n\ntwo", ["one", "", "two"]),
    "text with CR and LF": ("a.txt", b"one\r\n\r\ntwo\r\n", ["one", "", "two"]),
    "text with a BOM": ("a.txt", BOM + b"one\n\ntwo\n", ["one", "", "two"]),
    "text with a BOM and an empty line": ("a.txt", BOM + b"\none\n", ["", "one"]),
    "a tar": ("a.tar", tar(A, B), TWO),
    "a tar in gzip": ("a.tar.gz", gzip.compress(tar(A, B)), TWO),
    "a tar of macOS": ("a.tar", tar(("._a.txt", b"mac"), A, ("._b.txt", b"mac"), B), TWO),
    "a tar with .DS_Store in a folder": (
        "a.tar",
        tar(("x", None), ("x/.DS_Store", b"mac"), ("x/._a.txt", b"mac"), ("x/a.txt", b"1")),
        [{"__key__": "x/a", "txt": "1"}],
    ),
    "a tar with a README": ("a.tar", tar(("README", b"r"), A, ("LICENSE", b"r"), B), TWO),
    "a tar with a folder of its own": ("a.tar", tar(("__index__/a.json", b"{}"), A, B), TWO),
    "a tar of the folder .": ("a.tar", tar((".", None), ("./a.txt", b"1")), [{"__key__": "./a", "txt": "1"}]),
    "a tar that ends with a folder": ("a.tar", tar(A, B, ("empty", None)), TWO),
    "a tar that ends with a link without a dot": ("a.tar", tar(A, B, ("latest", "b.txt")), TWO),
    "a tar with long names": (
        "a.tar",
        tar(("x" * 300 + ".txt", b"1"), format=tarfile.PAX_FORMAT),
        [{"__key__": "x" * 300, "txt": "1"}],
    ),
    "a tar of texts with BOMs": (
        "a.tar",
        tar(("a.txt", BOM + b"1"), ("a.json", BOM + b"[]")),
        [{"__key__": "a", "txt": "1", "json": []}],
    ),
}

REFUSED = {
    "UTF-16": ("a.jsonl", LINES.encode("utf-16"), "it is UTF-16 or UTF-32.* iconv -f UTF-16 -t UTF-8"),
    "UTF-16 without a mark": ("a.jsonl", LINES.encode("utf-16-be"), "it is UTF-16 or UTF-32"),
    "UTF-32": ("a.jsonl", LINES.encode("utf-32"), "it is UTF-16 or UTF-32"),
    "text in UTF-16": ("a.txt", "one\ntwo\n".encode("utf-16"), "it is UTF-16 or UTF-32"),
    "an array over lines": (
        "a.json",
        json.dumps(ROWS, indent=1).encode(),
        "its first line ends within a value.* jq -c '.\\[\\]'",
    ),
    "an array, a row in each line": (
        "a.json",
        b'[{"id": 1},\n{"id": 2}]',
        "its first line ends within a value",
    ),
    "an array in one line": (
        "a.json",
        json.dumps(ROWS).encode(),
        "it is one array; write one value in each line: jq -c '.\\[\\]'",
    ),
    "an array in gzip": ("a.json.gz", gzip.compress(json.dumps(ROWS).encode()), "it is one array"),
    "a document over lines": (
        "a.json",
        json.dumps(ROWS[3], indent=2).encode(),
        "one document over several lines",
    ),
    "lines of old Macs": ("a.jsonl", DATA.replace(b"\n", b"\r"), r"its lines end in '\\r' alone"),
    "text of old Macs": ("a.txt", b"one\rtwo\r", r"its lines end in '\\r' alone"),
    "nothing": ("a.jsonl", b"", "the source has no sample"),
    "blanks alone": ("a.jsonl", b" \r\n\t\n", "the source has no sample"),
    "a BOM alone": ("a.txt", BOM, "the source has no sample"),
    "gzip by name alone": ("a.jsonl.gz", DATA, "cannot be decompressed: .*Not a gzipped file"),
    "gzip, cut off": (
        "a.jsonl.gz",
        gzip.compress(DATA)[:-9],
        "cannot be decompressed: EOFError.* is it whole",
    ),
    "gzip, damaged": ("a.jsonl.gz", damaged(gzip.compress(noise(2000))), "cannot be decompressed"),
    "bzip2, damaged": ("a.jsonl.bz2", damaged(bz2.compress(noise(2000))), "cannot be decompressed"),
    "xz, damaged": ("a.jsonl.xz", damaged(lzma.compress(noise(2000))), "cannot be decompressed"),
    "zstd, cut off": ("a.jsonl.zst", lambda: zstd(DATA)[:-9], "cannot be decompressed: EOFError"),
    "a name twice": (
        "a.tar",
        tar(A, ("a.txt", b"2")),
        r"byte 1024: 'a.txt' is the second 'txt' of its sample",
    ),
    "a name twice, in capitals": (
        "a.tar",
        tar(A, ("a.TXT", b"2")),
        r"'a.TXT' is the second 'txt' of its sample",
    ),
    "a name again at the end": (
        "a.tar",
        tar(A, B, ("a.txt", b"2")),
        r"'a.txt' is the second 'txt' of its sample",
    ),
    "members that stand apart": (
        "a.tar",
        tar(A, B, ("a.cls", b"2")),
        "'a.cls' does not stand beside .* tar --sort=name",
    ),
    "a hard link": (
        "a.tar",
        tar(A, ("hard.txt", "a.txt")),
        "'hard.txt' is a link to 'a.txt'.* --hard-dereference",
    ),
    "a symbolic link": (
        "a.tar",
        tar(A, ("soft.txt", "a.txt")),
        "'soft.txt' is a link to 'a.txt'.* tar --dereference",
    ),
    "tars, joined": ("a.tar", tar(A) + tar(B), "goes on behind its end, byte 1024, .* tar --concatenate"),
    "a tar, cut off": ("a.tar", tar(A, B)[:1024], "no whole tar: it ends at byte 1024"),
    "a tar, damaged": ("a.tar", damaged(tar(*[(f"{i}.txt", b"1") for i in range(9)])), "no whole tar"),
    "no tar": ("a.tar", DATA, "no whole tar"),
    "a tar without samples": ("a.tar", tar(("README", b"r")), "the source has no sample"),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_DATA_CACHE", str(tmp_path / "cache"))


def write(folder, name, data):
    path = folder / name
    path.write_bytes(data() if callable(data) else data)
    return str(path)


def samples(source, **options):
    loader = Loader(Stream(source, **options), BatchSize(4, collate=list))
    return [sample for batch in loader for sample in batch]


@pytest.mark.parametrize("kind", RIGHT)
def test_samples_are_those_of_a_plain_reader(kind, tmp_path):
    name, data, expected = RIGHT[kind]
    path = write(tmp_path, name, data)
    assert samples(path) == expected
    shuffled = samples(path, shuffle=True)
    assert sorted(map(repr, shuffled)) == sorted(map(repr, expected))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_by_the_index(kind, tmp_path):
    name, data, message = REFUSED[kind]
    with pytest.raises((ConfigError, LoaderError), match=message):
        Stream(write(tmp_path, name, data))


def test_members_that_are_left_out_are_counted_and_said(tmp_path, caplog):
    path = write(tmp_path, "a.tar", tar(("README", b"r"), ("._a.txt", b"mac"), A, ("x", None)))
    assert TarShards(path).left_out == TarShards(path).left_out == 2
    assert "2 members are in no sample, such as 'README'" in caplog.text


# -- Parquet ---------------------------------------------------------------------------------------


def parquet(rows, path, **options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


@pytest.mark.needs("pyarrow")
def test_rows_of_parquet_are_those_of_a_plain_reader(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"id": i, "kind": "ab"[i % 2], "tokens": list(range(i)), "more": {"x": i}} for i in range(9)]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(1, "kind", table["kind"].dictionary_encode())
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as out:
        for part in (table[:4], table[:0], table[4:]):
            out.write_table(part)
    assert samples(str(tmp_path / "a.parquet")) == rows


@pytest.mark.needs("pyarrow")
def test_a_column_that_rows_would_lack_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["id", "id", "x"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet has several columns 'id', and a row has one of a name"):
        Parquet(tmp_path / "a.parquet")
    assert Parquet(tmp_path / "a.parquet", columns=["x"])[0] == {"x": 3}
    path = parquet(ROWS, tmp_path / "year=2024" / "month=5" / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"lies in the folder 'year=2024', .* give columns=\['id', 'text'\]"
    ):
        Parquet(path)
    assert samples(Parquet(path, columns=["id", "text"])) == ROWS
    rows = [{"year": 2024, "month": 5}]
    assert samples(str(parquet(rows, tmp_path / "year=2024" / "month=5" / "b.parquet"))) == rows


@pytest.mark.needs("pyarrow")
def test_files_of_parquet_that_were_joined_are_refused(tmp_path):
    first = parquet(ROWS[:3], tmp_path / "a.parquet").read_bytes()
    second = parquet(ROWS[3:], tmp_path / "b.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(first + second)
    with pytest.raises(LoaderError, match=f"is several Parquet files, joined at byte {len(first)}: all rows"):
        Parquet(tmp_path / "c.parquet")


# -- Files that change under an open loader --------------------------------------------------------


def rewritten(path, data, times=None):
    """Write a file anew, in place; ``times`` are set back, as ``cp -p`` and rsync do."""
    import os

    path.write_bytes(data)
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


KINDS = {
    "text": (TextLines, "a.txt", b"aa\nbbbb\ncc\n", b"aaaa\nbb\ncc\n"),
    "lines of JSON": (JsonLines, "a.jsonl", b'"aa"\n"bbbb"\n"c"\n', b'"aaaa"\n"bb"\n"c"\n'),
    "tar": (TarShards, "a.tar", tar(A, B, ("c.txt", b"3")), tar(("a.txt", b"9"), B, ("c.txt", b"3"))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps_times", [True, False])
def test_a_file_that_is_rewritten_under_a_loader_is_noticed(kind, keeps_times, tmp_path):
    make, name, before, after = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(before)
    errors = "skip" if keeps_times else "raise"
    batches = iter(Loader(Stream(make(path)), BatchSize(1, collate=list), errors=errors))
    next(batches)
    rewritten(path, after, path.stat() if keeps_times else None)
    with pytest.raises(
        LoaderError, match=f"{name} has changed since its index was made: it has as many bytes"
    ):
        next(batches)
    assert len(samples(make(path))) == 3, "the index is made anew"
    assert samples(make(path))[0] != samples(make(write(tmp_path, f"b{path.suffix}", before)))[0]


@pytest.mark.needs("pyarrow")
@pytest.mark.parametrize("keeps_times", [True, False])
def test_a_parquet_file_that_is_rewritten_under_a_loader_is_noticed(keeps_times, tmp_path):
    path = parquet([{"id": i} for i in range(9)], tmp_path / "a.parquet", row_group_size=3)
    batches = iter(Loader(Stream(str(path)), 1))
    next(batches)
    other = parquet([{"id": 9 - i} for i in range(9)], tmp_path / "b.parquet", row_group_size=3).read_bytes()
    rewritten(path, other, path.stat() if keeps_times else None)
    with pytest.raises(LoaderError, match=r"a.parquet has changed since its index was made"):
        next(batches)


def test_a_file_whose_permissions_or_names_change_is_read_on(tmp_path):
    import os

    path = tmp_path / "a.txt"
    path.write_bytes(b"aa\nbb\ncc\n")
    batches = iter(Loader(Stream(str(path)), BatchSize(1, collate=list)))
    next(batches)
    path.chmod(0o600)
    os.link(path, tmp_path / "b.txt")
    assert list(batches) == [["bb"], ["cc"]]


# -- Copies ----------------------------------------------------------------------------------------


def test_a_copy_leaves_space_on_the_disk(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt.gz", gzip.compress(bytes(40_000_000)))

    class Usage:
        total, free = 100 << 30, (5 << 30) + 20_000_000

    def usage(folder):
        copied = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*") if file.is_file())
        Usage.free = (5 << 30) + 20_000_000 - copied
        return Usage

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(
        LoaderError, match=r"a.txt.gz has 16,777,216 bytes, is not complete, and leaves .* of the disk"
    ):
        Stream(path)
    assert not list((tmp_path / "cache").glob("*.txt")), "nothing of it is left"
