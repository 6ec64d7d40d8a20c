"""Files and indexes that cannot be read now, and indexes that are damaged."""

import errno
import json
import os

import pytest
from tp_core.errors import LoaderError
from tp_core.files import _reads  # private: how long it tries
from tp_data import (
    BatchSize,
    Loader,
    Stream,
    _loader,  # private: a full /dev/shm cannot be had otherwise
)

LINES = b"aa\nbb\ncc\n"


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_DATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_bytes(LINES)
    return tmp_path / "a.txt"


def samples(path, **options):
    return [
        line for batch in Loader(Stream(str(path)), BatchSize(1, collate=list), **options) for line in batch
    ]


def index_of(path):
    (index,) = (path.parent / ".tp-data").glob("*.index")
    return index


def without(name):
    return lambda header: {key: value for key, value in header.items() if key != name}


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: [1],
        lambda _: None,
        lambda _: "text",
        without("stat"),
        without("version"),
        without("digest"),
        without("left_out"),
        lambda header: header | {"samples": "3"},
        lambda header: header | {"stat": [1]},
        lambda header: header | {"stat": None},
    ],
)
def test_an_index_with_a_damaged_header_is_made_again(path, damage):
    assert samples(path) == ["aa", "bb", "cc"]
    index = index_of(path)
    whole = index.read_bytes()
    header = json.dumps(damage(json.loads(whole[:1024]))).encode().ljust(1024)
    index.write_bytes(header + whole[1024:])
    assert samples(path) == ["aa", "bb", "cc"]
    assert index.read_bytes() == whole


def failing(patch, owner, name, within, *, times=10**9, number=errno.ESTALE):
    """Have a function fail so often for paths that end in a text; return what is left."""
    real, left = getattr(owner, name), [times]

    def call(path, *args, **options):
        if str(path).endswith(within) and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **options)

    patch.setattr(owner, name, call)
    return left


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_an_index_that_cannot_be_read_is_not_made_again(path, monkeypatch, number):
    samples(path)
    whole = index_of(path).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(_reads, "_RETRY_S", 0.0)
        failing(patch, type(path), "open", ".index", number=number)
        with pytest.raises(
            LoaderError, match=r"the index of .*a.txt cannot be read, and nothing was changed"
        ):
            Stream(str(path))
    assert index_of(path).read_bytes() == whole
    left = failing(monkeypatch, type(path), "open", ".index", times=2, number=number)
    assert samples(path) == ["aa", "bb", "cc"]
    assert left == [0]


@pytest.mark.parametrize("errors", ["raise", "skip"])
def test_a_file_that_cannot_be_read_loses_no_sample(path, monkeypatch, errors):
    left = failing(monkeypatch, os, "open", "a.txt", times=2, number=errno.EMFILE)
    assert samples(path, errors=errors) == ["aa", "bb", "cc"]
    assert left == [0]
    path.write_bytes(LINES + b"dd\n")
    monkeypatch.setattr(_reads, "_RETRY_S", 0.0)
    stream = Stream(str(path))
    failing(monkeypatch, os, "open", "a.txt", number=errno.EMFILE)
    with pytest.raises(LoaderError, match=r"a.txt cannot be read: .*Too many open files"):
        list(Loader(stream, BatchSize(1, collate=list), errors=errors))


def test_a_stale_handle_is_opened_again(path, monkeypatch):
    real, left = os.pread, [2]

    def pread(descriptor, *args):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, *args)

    stream = Stream(str(path))
    monkeypatch.setattr(os, "pread", pread)
    assert [stream.sample(i) for i in range(3)] == ["aa", "bb", "cc"]
    assert left == [0]


def test_a_full_shared_memory_is_named_with_what_to_do(monkeypatch):
    def full(*_, **__):
        msg = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"
        raise RuntimeError(msg)
        yield

    monkeypatch.setattr(_loader, "iterate_seeded", full)
    with pytest.raises(RuntimeError, match="unable to allocate") as caught:
        list(Loader(Stream(range(4)), 2, workers=1))
    assert "in /dev/shm, which is full: enlarge it" in caught.value.__notes__[0]
