"""A folder that is damaged at random: the run goes on to the same bits, and no good checkpoint is lost."""

import contextlib
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from tp_core.errors import StateError
from tp_trainer._checkpoint._folder import RunFolder, verify  # private: what a run takes to be whole

from tests.tp_trainer.small_run import leave, same, train

KEEP = 3
DONE = 7  # steps that the run had made: the last two of them after its first epoch


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "run"
    leave(folder, DONE, keep=KEEP, best="loss")
    return folder


@pytest.fixture(scope="module")
def expected():
    return train(None)


# -- ways to damage a file -------------------------------------------------------------------------


def flip(path, dice):
    data = bytearray(path.read_bytes())
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)


def cut(path, dice):
    os.truncate(path, dice.randrange(path.stat().st_size or 1))


def append(path, dice):
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randint(1, 5000)))


def zeros(path, dice):
    path.write_bytes(bytes(path.stat().st_size))


def noise(path, dice):
    path.write_bytes(dice.randbytes(path.stat().st_size))


def empty(path, dice):
    path.write_bytes(b"")


def delete(path, dice):
    path.unlink()


def dangling_link(path, dice):
    path.unlink()
    path.symlink_to("nowhere")


def loop(path, dice):
    path.unlink()
    path.symlink_to(path.name)


def pipe(path, dice):
    path.unlink()
    os.mkfifo(path)


def folder_instead(path, dice):
    path.unlink()
    path.mkdir()


def swap(path, dice):
    other = dice.choice(sorted(path.parent.parent.glob("step-*/*")))
    if other.is_file() and not other.samefile(path):
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)


def link_to_another(path, dice):
    other = dice.choice(sorted(path.parent.parent.glob("step-*/*")))
    if other.is_file() and not other.samefile(path):
        path.unlink()
        path.symlink_to(other)


FILE_DAMAGES = [
    flip,
    flip,
    cut,
    append,
    zeros,
    noise,
    empty,
    delete,
    dangling_link,
    loop,
    pipe,
    folder_instead,
    swap,
    link_to_another,
]


# -- ways to damage a whole checkpoint -------------------------------------------------------------


def copy(checkpoint, to):
    """Copy a checkpoint, but for pipes, whose copying would never end."""

    def pipes(folder, names):
        return [name for name in names if Path(folder, name).is_fifo()]

    shutil.copytree(checkpoint, to, symlinks=True, ignore=pipes)


def gone(path, dice):
    shutil.rmtree(path)


def a_file_instead(path, dice):
    shutil.rmtree(path)
    path.write_bytes(dice.randbytes(100))


def a_loop_instead(path, dice):
    shutil.rmtree(path)
    path.symlink_to(path.name)


def a_pipe_instead(path, dice):
    shutil.rmtree(path)
    os.mkfifo(path)


def a_copy_of_another(path, dice):
    other = dice.choice(sorted(p for p in path.parent.glob("step-*") if p.is_dir()))
    if other != path:
        shutil.rmtree(path)
        copy(other, path)


def a_copy_for_a_later_step(path, dice):
    later = path.with_name(f"step-{dice.randint(8, 30):010d}")
    if not later.exists():
        copy(path, later)


FOLDER_DAMAGES = [
    gone,
    a_file_instead,
    a_loop_instead,
    a_pipe_instead,
    a_copy_of_another,
    a_copy_for_a_later_step,
]


def damage(folder, dice):
    """Damage the folder in one to four ways, and return their names."""
    said = []
    for _ in range(dice.randint(1, 4)):
        checkpoints = sorted(path for path in folder.glob("step-*") if path.is_dir())
        if not checkpoints:
            break
        checkpoint = dice.choice(checkpoints)
        files = sorted(path for path in checkpoint.iterdir() if path.is_file())
        if dice.random() < 0.2 or not files:
            how, path = dice.choice(FOLDER_DAMAGES), checkpoint
        else:
            how, path = dice.choice(FILE_DAMAGES), dice.choice(files)
        said.append(f"{how.__name__} {path.relative_to(folder)}")
        how(path, dice)
    return said


# -- what must hold --------------------------------------------------------------------------------


def contents(checkpoint):
    return {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir()) if path.is_file()}


def is_as_written(checkpoint, original):
    written = original / checkpoint.name
    return checkpoint.is_dir() and written.is_dir() and contents(checkpoint) == contents(written)


def whole(folder):
    """Return the checkpoints that are what was written, as the code under test sees it."""
    found = set()
    for path in RunFolder(folder).committed():
        with contextlib.suppress(StateError):
            verify(path)
            found.add(int(path.name.removeprefix("step-")))
    return found


def check(original, folder, expected, caplog, seed):
    """Damage a copy of a folder, resume twice, and compare."""
    dice = random.Random(seed)
    shutil.copytree(original, folder)
    said = f"seed {seed}: {', '.join(damage(folder, dice))}"
    there = {int(p.name.removeprefix("step-")): p for p in RunFolder(folder).committed()}
    good = {step for step, path in there.items() if is_as_written(path, original)}
    assert whole(folder) == good, said
    settings = {"keep": KEEP, "best": dice.choice([None, "loss"]), "background": dice.random() < 0.3}
    for step in there.keys() - good:
        with pytest.raises(StateError, match=rf"{there[step]}\b"):
            train(folder, resume=there[step])
    caplog.clear()
    if there and not good:
        before = sorted(path.name for path in folder.iterdir())
        with pytest.raises(StateError, match="none is whole"):
            train(folder, **settings)
        assert sorted(path.name for path in folder.iterdir()) == before, said
        return
    leave(folder, 1, **settings)  # one step, and its checkpoint
    begins = max(good, default=0)
    newest = sorted(good | {begins + 1})[-KEEP:]
    assert whole(folder) >= {*newest}, said
    for step, path in there.items():
        if step > begins:
            assert str(path) in caplog.text, said
    assert same(train(folder, **settings), expected), said
    assert whole(folder) >= {8, 9, 10}, said


@pytest.mark.takes(15)
@pytest.mark.slow
def test_a_damaged_folder_costs_no_good_checkpoint(original, expected, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        for seed in range(12):
            check(original, tmp_path / str(seed), expected, caplog, seed)


@pytest.mark.takes(150)
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_a_folder_that_is_damaged_in_many_ways_costs_no_good_checkpoint(
    original, expected, tmp_path, caplog, part
):
    with caplog.at_level(logging.WARNING, logger="tp_trainer"):
        for number in range(150):
            folder = tmp_path / str(number)
            check(original, folder, expected, caplog, 1000 * (part + 1) + number)
            shutil.rmtree(folder)
