"""Damaged checkpoints: each is named and moved aside, and none costs a good one."""

import json
import logging
import os
import shutil

import pytest
from tp_core.errors import StateError
from tp_trainer._checkpoint import _folder  # what is wrong with a checkpoint is said by a private check

from tests.cases import first_fast
from tests.tp_trainer.small_run import leave, names, same, train


@pytest.fixture
def log(caplog):
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        yield caplog


@pytest.fixture(scope="module")
def nine_steps(tmp_path_factory):
    """The folder of a run that was killed after nine steps."""
    folder = tmp_path_factory.mktemp("nine") / "run"
    leave(folder, 9, keep=4, best="loss")
    return folder


@pytest.fixture(scope="module")
def undisturbed():
    """The weights of a run that nothing happened to."""
    return train(None)


def cut_off(checkpoint):
    os.truncate(checkpoint / "tensors.pt", 100)


def damage_all(folder):
    for path in folder.glob("step-*"):
        cut_off(path)


def good(folder):
    """Return the steps of the checkpoints that are whole."""
    found = []
    for path in _folder.RunFolder(folder).committed():
        _folder.verify(path)
        found.append(int(path.name.removeprefix("step-")))
    return sorted(found)


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "asynchronous"), first_fast([(1, True), (2, False), (3, True)]))
def test_what_was_just_written_is_kept_where_all_older_ones_are_damaged(tmp_path, keep, asynchronous):
    def damage(n):
        if n == 1:
            damage_all(tmp_path)

    leave(tmp_path, 6, keep=keep)
    leave(tmp_path, 2, keep=keep, background=asynchronous, before=damage)
    assert good(tmp_path) == [7, 8][-keep:]
    assert same(train(tmp_path, keep=keep), train(None))


def test_one_that_is_damaged_while_the_run_goes_on_does_not_push_out_a_good_one(tmp_path, log):
    def damage(n):
        if n == 9:
            cut_off(tmp_path / "step-0000000008")

    train(tmp_path, keep=2, every_epochs=None, before=damage)
    assert good(tmp_path) == [9, 10]
    assert f"checkpoint {tmp_path / 'step-0000000008'} is damaged: tensors.pt has 100 bytes of" in log.text


def test_a_good_one_is_kept_as_long_as_a_damaged_one_is_newer(tmp_path):
    leave(tmp_path, 6, keep=3, every_steps=2)  # 2, 4, 6 and, at the end of the epoch, 5
    assert good(tmp_path) == [4, 5, 6]
    cut_off(tmp_path / "step-0000000005")
    leave(tmp_path, 2, keep=2, every_steps=2, every_epochs=None)
    assert good(tmp_path) == [6, 8]
    assert names(tmp_path)[0] == "step-0000000006"  # 5 was older than what is kept: it is gone


def test_the_best_is_a_whole_one(tmp_path):
    leave(tmp_path, 8, keep=9, best="loss", every_steps=2)
    scores = {
        path.name: _folder.read_manifest(path).metrics for path in _folder.RunFolder(tmp_path).committed()
    }
    best = min((name for name in scores if scores[name]), key=lambda name: scores[name]["loss"])
    data = bytearray((tmp_path / best / "tensors.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / best / "tensors.pt").write_bytes(data)
    train(tmp_path, keep=1, best="loss", every_steps=2)
    assert f"{best}.damaged" in names(tmp_path) or best == "step-0000000008"
    assert 10 in good(tmp_path)


def test_checkpoints_that_were_seen_whole_are_not_read_again(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(_folder, "verify", lambda path: read.append(path.name))
    train(tmp_path, keep=3)
    assert read == []


# -- one unreadable manifest -----------------------------------------------------------------------


def without(key):
    def damage(path):
        values = json.loads(path.read_text())
        del values[key]
        path.write_text(json.dumps(values, indent=1))

    damage.__name__ = f"without_{key}"
    return damage


def replaced_by(text):
    def damage(path):
        path.write_text(text)

    damage.__name__ = f"replaced_by_{text[:12]}"
    return damage


def half(path):
    path.write_text(path.read_text()[:50])


def removed(path):
    path.unlink()


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def not_text(path):
    path.write_bytes(b"\xff" * 300)


def other_metric(path):
    path.write_text(path.read_text().replace('"loss"', '"lost"'))


KEYS = ("blake2b", "format", "step", "epoch", "metrics", "files", "backend")
MANIFESTS = [
    half,
    removed,
    a_folder,
    a_pipe,
    not_text,
    other_metric,
    *(without(key) for key in KEYS),
    *(replaced_by(text) for text in ("", "[]", "{}", "null", "3", '{"files": []}', "[" * 5000)),
]


@pytest.mark.parametrize(
    ("damage", "asynchronous"),
    first_fast([(half, True), (without("metrics"), True), *((damage, False) for damage in MANIFESTS)], 4),
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_an_old_manifest_that_cannot_be_read_does_not_end_a_run(
    nine_steps, undisturbed, tmp_path, log, damage, asynchronous
):
    settings = {"keep": 4, "best": "loss", "background": asynchronous}
    shutil.copytree(nine_steps, tmp_path / "run")
    oldest = tmp_path / "run" / "step-0000000006"
    damage(oldest / "manifest.json")
    assert same(train(tmp_path / "run", **settings), undisturbed)
    assert str(oldest) in log.text
    assert good(tmp_path / "run")[-4:] == [7, 8, 9, 10]


@pytest.mark.parametrize("damage", first_fast(MANIFESTS, 4), ids=lambda damage: damage.__name__)
def test_a_damaged_manifest_is_named_and_the_checkpoint_before_is_used(
    nine_steps, undisturbed, tmp_path, log, damage
):
    folder = tmp_path / "run"
    shutil.copytree(nine_steps, folder)
    damage(folder / "step-0000000009" / "manifest.json")
    with pytest.raises(StateError, match=r"step-0000000009.*manifest\.json"):
        _folder.verify(folder / "step-0000000009")
    assert same(train(folder), undisturbed)
    assert f"the run resumes from {folder / 'step-0000000008'}" in log.text


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    train(tmp_path, keep=1, epochs=1)
    (checkpoint,) = tmp_path.iterdir()
    manifest = checkpoint / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        manifest.write_bytes(data)
        with pytest.raises(StateError, match=r"manifest\.json is not what was written"):
            _folder.verify(checkpoint)
    manifest.write_bytes(whole)
    assert _folder.read_manifest(checkpoint).step == 5


def signed(path, change):
    """Change the values of a manifest and give it the digest that it then has."""
    values = json.loads(path.read_text())
    change(values)
    values["blake2b"] = "0" * 32
    text = json.dumps(values, indent=1).encode()
    path.write_bytes(text.replace(b"0" * 32, _folder.digest_of([text]).encode(), 1))


@pytest.mark.parametrize(
    "change",
    [lambda v: v.pop("files"), lambda v: v.update(files=[1]), lambda v: v.update(files={"x": {"size": 1}})],
)
def test_a_manifest_of_another_shape_is_an_error_even_with_its_digest(tmp_path, change):
    train(tmp_path, keep=1, epochs=1)
    (checkpoint,) = tmp_path.iterdir()
    signed(checkpoint / "manifest.json", change)
    with pytest.raises(StateError, match=r"manifest\.json is not a manifest"):
        _folder.verify(checkpoint)


def test_a_checkpoint_of_another_format_is_refused_and_stays_where_it_is(tmp_path):
    train(tmp_path, keep=1, epochs=1)
    (checkpoint,) = tmp_path.iterdir()
    signed(checkpoint / "manifest.json", lambda values: values.update(format=99))
    with pytest.raises(StateError, match="has format 99, and this tp-trainer reads 3: use the version"):
        train(tmp_path)
    assert names(tmp_path) == ["step-0000000005"]


# -- what the log says -----------------------------------------------------------------------------


def test_damaged_ones_are_moved_aside_and_stay(tmp_path, log):
    leave(tmp_path, 4, keep=3)
    for step in (3, 4):
        cut_off(tmp_path / f"step-{step:010d}")
    train(tmp_path, keep=1)
    assert names(tmp_path) == [
        f"step-{n:010d}{end}" for n, end in ((3, ".damaged"), (4, ".damaged"), (10, ""))
    ]
    assert f"does not count any more and is now {tmp_path / 'step-0000000004.damaged'}" in log.text


def test_a_second_damaged_one_of_a_step_gets_a_number(tmp_path):
    leave(tmp_path, 5)
    for _ in range(2):
        cut_off(tmp_path / "step-0000000005")
        leave(tmp_path, 1)
    assert {"step-0000000005.damaged", "step-0000000005.damaged-2"} <= {*names(tmp_path)}


def test_checkpoints_that_changed_their_names_are_damaged(tmp_path):
    leave(tmp_path, 4)
    older, newer = tmp_path / "step-0000000003", tmp_path / "step-0000000004"
    older.rename(tmp_path / "x")
    newer.rename(older)
    (tmp_path / "x").rename(newer)
    with pytest.raises(StateError, match=r"step-0000000004 is damaged: its manifest.json is from step 3"):
        train(tmp_path, resume=newer)
    assert same(train(tmp_path), train(None))


def test_a_copy_with_a_name_of_its_own_is_a_checkpoint(tmp_path):
    leave(tmp_path / "run", 4)
    (tmp_path / "run" / "step-0000000004").rename(tmp_path / "keep-this")
    assert same(train(tmp_path / "new", resume=tmp_path / "keep-this"), train(None))


# -- things that are not folders -------------------------------------------------------------------


def dangling(path):
    path.symlink_to("nowhere")


def loop(path):
    path.symlink_to(path.name)


def file(path):
    path.write_text("in the way")


def empty_folder(path):
    path.mkdir()


def full_folder(path):
    path.mkdir()
    (path / "notes").write_text("mine")


IN_THE_WAY = [dangling, loop, file, os.mkfifo, empty_folder, full_folder]


@pytest.mark.parametrize(
    ("step", "make"),
    first_fast([((4, 9)[n % 2], make) for n, make in enumerate(IN_THE_WAY)], 2),
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_is_in_the_place_of_a_checkpoint_is_moved_aside(tmp_path, log, make, step):
    leave(tmp_path, 6)
    name = f"step-{step:010d}"
    if step == 4:
        (tmp_path / name).rename(tmp_path / "gone")
    make(tmp_path / name)
    assert same(train(tmp_path, keep=9), train(None))
    assert f"{name}.damaged" in names(tmp_path)
    assert f"{tmp_path / name}" in log.text


@pytest.mark.parametrize("make", first_fast(IN_THE_WAY, 2), ids=lambda make: make.__name__)
def test_what_comes_into_the_place_of_a_checkpoint_is_moved_aside(tmp_path, make):
    def put(n):
        if n == 3:
            make(tmp_path / "step-0000000006")

    assert same(train(tmp_path, before=put), train(None))
    assert {"step-0000000006.damaged", "step-0000000010"} <= {*names(tmp_path)}


@pytest.mark.parametrize("make", first_fast(IN_THE_WAY, 2), ids=lambda make: make.__name__)
def test_what_a_killed_run_may_have_left_is_deleted(tmp_path, make):
    tmp_path = tmp_path / "run"
    tmp_path.mkdir()
    for name in (".step-0000000003.tmp", ".step-0000000077.tmp", ".step-0000000002.old"):
        make(tmp_path / name)
    train(tmp_path, keep=1)
    assert names(tmp_path) == ["step-0000000010"]
