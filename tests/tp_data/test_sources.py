"""Sources: samples of files by number, their indexes, and what is said of files that are broken."""

import bz2
import gzip
import http.server
import io
import json
import lzma
import os
import pickle
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.utils.data import get_worker_info
from tp_core.errors import ConfigError, LoaderError, StateError
from tp_data import Access, BatchSize, Iterables, JsonLines, Loader, Parquet, Stream, TarShards, TextLines

ROWS = [{"id": i, "text": "é" * i} for i in range(7)]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_tar(path, samples, *, long=False):
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for extension, content in members.items():
                name = f"{'x' * 120 if long else 'train'}/{key}.{extension}"
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_DATA_CACHE", str(tmp_path / "cache"))


def test_lines_of_json_are_samples_over_all_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines(ROWS[:3]) + b"\r\n\n")
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[3:]).rstrip(b"\n"))  # without an end of the last line
    (tmp_path / "c.jsonl").write_bytes(b"")
    source = JsonLines(str(tmp_path / "*.jsonl"))
    assert [source[i] for i in range(len(source))] == ROWS
    assert source.where(4) == f"{tmp_path}/b.jsonl, sample 1, byte {len(lines(ROWS[3:4]))}"
    assert [pickle.loads(pickle.dumps(source))[i] for i in (6, 0)] == [ROWS[6], ROWS[0]]
    assert sorted(p.name for p in (tmp_path / ".tp-data").glob("*.index")) == [
        f"{n}.jsonl.json.index" for n in "abc"
    ]


def test_samples_are_read_together_in_any_order(tmp_path):
    for name, count in (("a", 200), ("b", 30)):
        rows = [{"name": name, "i": i, "text": "x" * (i % 7 * 900)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_bytes(lines(rows))
    source = JsonLines(str(tmp_path / "*.jsonl"))
    for indices in ([5, 229, 6, 7, 199, 200, 5, 8, 90], list(range(230)), [0]):
        assert source.__getitems__(indices) == [source[i] for i in indices]
    broken = (tmp_path / "b.jsonl").read_bytes().replace(b'"i": 3,', b'"i": ,')
    (tmp_path / "b.jsonl").write_bytes(broken)
    stream = Stream(str(tmp_path / "*.jsonl"))
    with pytest.raises(LoaderError, match=r"b.jsonl, sample 3, byte \d+: no JSON"):
        next(iter(Loader(stream, 230)))
    batch = next(iter(Loader(stream, BatchSize(230, collate=list), errors="skip")))
    assert [row["i"] for row in batch[200:206]] == [0, 1, 2, 4, 4, 5]


def test_lines_of_text_keep_the_empty_ones(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\n\nthréé\r\nend".encode())
    source = TextLines(tmp_path / "a.txt")
    assert [source[i] for i in range(len(source))] == ["one", "", "thréé", "end"]


@pytest.mark.parametrize("long", [False, True])
def test_members_of_a_tar_whose_names_begin_alike_are_a_sample(tmp_path, long):
    samples = {f"{i:04}": {"json": b'{"n": 1}', "cls": b"3", "seg.png": bytes([i]) * 600} for i in range(3)}
    write_tar(tmp_path / "a.tar", samples, long=long)
    source = TarShards(tmp_path / "a.tar")
    folder = "x" * 120 if long else "train"
    assert source[2] == {"__key__": f"{folder}/0002", "json": {"n": 1}, "cls": 3, "seg.png": bytes([2]) * 600}
    assert len(source) == 3


@pytest.mark.needs("pyarrow")
def test_rows_of_parquet_are_samples(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, part in {"a": ROWS[:4], "b": ROWS[4:]}.items():
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet", row_group_size=2)
    source = Parquet(str(tmp_path / "*.parquet"))
    assert [source[i] for i in (6, 0, 3, 5, 1, 2, 4)] == [ROWS[i] for i in (6, 0, 3, 5, 1, 2, 4)]
    assert Parquet(str(tmp_path / "a.parquet"), columns=["id"])[3] == {"id": 3}
    assert source.where(5) == f"{tmp_path}/b.parquet, row group 0, row 1 of it"
    with pytest.raises(ConfigError, match=r"has no columns \['none'\]; it has \['id', 'text'\]"):
        Parquet(str(tmp_path / "a.parquet"), columns=["none"])
    half = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(half[: len(half) // 2])
    with pytest.raises(LoaderError, match=r"b.parquet is no whole Parquet file \(\d+ bytes\)"):
        Parquet(str(tmp_path / "*.parquet"))


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files_are_read_through_a_copy(tmp_path, suffix, compress):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(lines(ROWS)))
    stream = Stream(str(path))
    assert [stream.sample(i) for i in range(7)] == ROWS
    assert stream.place(3).where.startswith(f"{path}, sample 3, byte ")
    copies = [p for p in (tmp_path / "cache").iterdir() if p.suffix == ".jsonl"]
    assert len(copies) == 1
    copies[0].unlink()
    assert Stream(str(path)).sample(2) == ROWS[2], "a copy that is gone is made anew"
    path.write_bytes(compress(lines(ROWS))[:-20])
    with pytest.raises(LoaderError, match=f"a.jsonl{suffix} cannot be decompressed: .*; is it whole"):
        Stream(str(path))


@pytest.mark.needs("zstandard")
def test_files_with_zst_are_read_in_any_number_of_frames(tmp_path):
    import zstandard

    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(lines(part)) for part in (ROWS[:3], ROWS[3:])))
    stream = Stream(str(path))
    assert [stream.sample(i) for i in range(7)] == ROWS
    path.write_bytes(zstandard.compress(lines(ROWS * 50))[:-20])
    with pytest.raises(LoaderError, match=r"a.jsonl.zst cannot be decompressed: .*; is it whole"):
        Stream(str(path))


def test_hugging_faces_datasets_are_sequences_and_iterables():
    datasets = pytest.importorskip("datasets")
    mapped = datasets.Dataset.from_list(ROWS)
    assert [Stream(mapped).sample(i) for i in range(7)] == ROWS
    chosen = mapped.select([6, 2, 4])
    for formed in (
        chosen,
        chosen.with_format(None, ["id"]),
        chosen.with_format(None, ["id"], output_all_columns=True),
        chosen.with_format("numpy"),
    ):
        samples = Stream(formed).sources["data"].__getitems__([2, 0, 1])
        assert samples == [formed[2], formed[0], formed[1]]
    streamed = mapped.to_iterable_dataset(num_shards=2)
    source = Stream(streamed).sources["data"]
    assert [source[i] for i in (0, 1, 2, 5, 4, 6, 3)] == [ROWS[i] for i in (0, 1, 2, 5, 4, 6, 3)]


def of_this_worker(shard):
    info = get_worker_info()
    count, number = (1, 0) if info is None else (info.num_workers, info.id)
    return (10 * shard + i for i in range(5) if i % count == number)


def test_iterators_that_leave_samples_to_other_workers_leave_none():
    loader = Loader(Stream(Iterables(of_this_worker, 2)), BatchSize(3, collate=list), workers=2)
    assert list(loader) == [[0, 1, 2], [3, 4, 10], [11, 12, 13], [14]]


class Counting:
    """An iterable that counts how many samples were read."""

    read = 0

    def __init__(self, shard):
        self.shard, self.next = shard, 0

    def state_dict(self):
        return self.next

    def load_state_dict(self, state):
        self.next = state

    def __iter__(self):
        while self.next < 100:
            Counting.read += 1
            self.next += 1
            yield self.shard * 100 + self.next - 1


def test_iterables_begin_at_the_nearest_state():
    source = Iterables(Counting, 2, every=10)
    Counting.read = 0
    assert [source[i] for i in (95, 195, 196, 42)] == [95, 195, 196, 42]
    assert Counting.read == 6 + 6 + 1 + 3
    plain = Iterables(lambda shard: (shard * 10 + i for i in range(5)), 2)
    assert [plain[i] for i in (4, 9, 1, 2)] == [4, 14, 1, 2]
    assert plain.where(9) == "<lambda>, shard 1, sample 4"


# -- URLs -----------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    """A server of files; `fail` is how many requests it breaks off."""
    (tmp_path / "served").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        fail = 0

        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "served"))

        def do_GET(self):
            if Handler.fail > 0:
                Handler.fail -= 1
                self.send_error(503)
                return
            super().do_GET()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield tmp_path / "served", f"http://127.0.0.1:{running.server_port}", Handler
        running.shutdown()


@pytest.mark.needs("aiohttp")
def test_a_server_is_asked_again_and_named_when_it_is_dead(server, caplog):
    folder, url, handler = server
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
    handler.fail = 1
    stream = Stream(f"{url}/a.jsonl.gz", access=Access(rest_s=0.01))
    assert [stream.sample(i) for i in range(7)] == ROWS
    assert "attempt 1 of 4" in caplog.text
    handler.fail = 10**6
    (folder / "b.jsonl").write_bytes(lines(ROWS))
    with pytest.raises(LoaderError, match=r"b.jsonl.* could not be read in 2 attempts; the last one: .*503"):
        Stream(f"{url}/b.jsonl", access=Access(attempts=2, rest_s=0.01))
    handler.fail = 0
    with pytest.raises(LoaderError, match=r"none.jsonl cannot be read"):
        Stream(f"{url}/none.jsonl")


def test_files_in_memory_and_by_file_urls(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/tp/a.jsonl", lines(ROWS[:4]))
    memory.pipe("/tp/b.jsonl", lines(ROWS[4:]))
    stream = Stream("memory://tp/*.jsonl")
    assert [stream.sample(i) for i in range(7)] == ROWS
    memory.pipe("/tp/b.jsonl", lines(ROWS[:1] * 2))
    assert Stream("memory://tp/*.jsonl").sample(5) == ROWS[0], "a file that has changed is copied anew"
    (tmp_path / "c.txt").write_text("one\ntwo\n")
    assert Stream(f"file://{tmp_path}/c.txt").sample(1) == "two"


def test_a_source_that_never_answers_ends_after_its_time():
    slow = Access(timeout_s=0.05, attempts=2, rest_s=0.01)
    with pytest.raises(LoaderError, match=r"x could not be read in 2 attempts; .* no answer within 0.05 s"):
        slow.attempt("x", lambda: threading.Event().wait(5))


# -- Changes and faults ---------------------------------------------------------------------------


def test_an_index_is_made_once_and_anew_when_the_file_changes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS))
    first = Stream(str(path))
    index = tmp_path / ".tp-data" / "a.jsonl.json.index"
    made = index.stat().st_mtime_ns
    Stream(str(path))
    assert index.stat().st_mtime_ns == made
    loader = Loader(first, 2)
    next(iter(loader))
    path.write_bytes(lines(ROWS[::-1]))
    os.utime(path, ns=(1, 1))
    changed = Stream(str(path))
    assert changed.sample(0) == ROWS[6]
    with pytest.raises(StateError, match="a source 'data' with other samples"):
        Loader(changed, 2).load_state_dict(loader.state_dict())
    index.write_bytes(index.read_bytes()[:-3])
    assert Stream(str(path)).sample(6) == ROWS[0], "a broken index is made anew"


def test_runs_that_begin_at_once_make_one_index(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS * 100))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: JsonLines(path), range(4)))
    assert [len(source) for source in found] == [700] * 4
    assert [source[699] for source in found] == [ROWS[6]] * 4


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(ROWS))
    source = JsonLines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:2]))
    with pytest.raises(LoaderError, match=r"a.jsonl has changed since its index was made: it had \d+ bytes"):
        source[0]
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(LoaderError, match=r"b.jsonl is gone since its index was made \(No such file"):
        source[7]
    again = JsonLines(tmp_path / "a.jsonl")
    assert again[1] == ROWS[1]
    os.truncate(tmp_path / "a.jsonl", 5)  # while it is open
    with pytest.raises(LoaderError, match=r"a.jsonl ends in sample 1, byte 22: it was cut off"):
        again[1]


def test_broken_samples_are_named_with_file_and_offset(tmp_path):
    good = lines(ROWS[:2])
    (tmp_path / "a.jsonl").write_bytes(good + b'{"id": 3, "te": }\n')
    with pytest.raises(
        LoaderError, match=rf"a.jsonl, sample 2, byte {len(good) + 16}: no JSON \(Expecting value"
    ):
        JsonLines(tmp_path / "a.jsonl")[2]
    (tmp_path / "a.txt").write_bytes(b"one\nt\xffo\n")
    with pytest.raises(LoaderError, match=r"a.txt, sample 1, byte 5: no UTF-8"):
        TextLines(tmp_path / "a.txt")[1]
    write_tar(tmp_path / "a.tar", {"0": {"json": b"{}"}, "1": {"json": b"{"}})
    with pytest.raises(LoaderError, match=r"a.tar, sample 1, byte 1024: a broken sample"):
        TarShards(tmp_path / "a.tar")[1]


@pytest.mark.parametrize("left", [10_240 - 512, 2500, 1536, 700, 100])
def test_a_tar_that_is_cut_off_is_refused(tmp_path, left):
    write_tar(tmp_path / "a.tar", {str(i): {"bin": b"x" * 600} for i in range(3)})
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:left])
    if left > 3 * 1536 + 512:
        assert len(TarShards(tmp_path / "a.tar")) == 3
    else:
        with pytest.raises(LoaderError, match=r"a.tar is no whole tar"):
            TarShards(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none.jsonl", r"none.jsonl does not exist"),
        ("*.none.jsonl", r"no file matches '\*.none.jsonl'"),
        ("a.csv", "a source is a path, URL or pattern"),
        (["a.jsonl", "b.txt"], r"one suffix of .*, got \['.jsonl', '.txt'\]"),
        ([], "a list of length 0"),
        ({}, "a stream needs sources"),
        ({"a": []}, "a list of length 0"),
        (5, "a source is a path, URL or pattern of files, a sequence, or one of tp_data's classes, got int"),
        (iter([1]), "for iterators give Iterables"),
        ("empty.jsonl", "the source has no sample: empty.jsonl"),
        (["empty.jsonl", "empty.jsonl"], "empty.jsonl is in the list of files twice"),
        ("folder.jsonl", r"folder.jsonl is a folder; give a pattern, such as folder.jsonl/\*"),
    ],
)
def test_what_is_no_source_is_refused(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=message):
        Stream(given)


def test_access_needs_an_attempt():
    with pytest.raises(ConfigError, match="a file needs an attempt"):
        Access(attempts=0)
