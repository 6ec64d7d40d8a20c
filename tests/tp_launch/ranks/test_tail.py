"""Lines of a file that grows are shown whole, once, and with their rank."""

import io
import os
import re

import pytest
from tp_launch._rank_logs import LogTail  # private: a file that grows in the midst of a line


class _Shown(io.StringIO):
    pass


@pytest.fixture
def shown():
    return _Shown()


def _after(path, shown, *writes: bytes, drop: str = "") -> str:
    tail = LogTail()
    tail.start()
    tail.follow(path, prefix="> ", out=shown, drop=drop)
    with path.open("ab", buffering=0) as file:
        for data in writes:
            file.write(data)
    tail.stop()
    return shown.getvalue()


def test_pieces_of_a_line_are_put_together(tmp_path, shown):
    pieces = [b"a", b" ", b"b", b"\n", b"\xc3", b"\xa4\n"]
    assert _after(tmp_path / "log", shown, *pieces) == "> a b\n> ä\n"


def test_the_rest_without_a_line_end_is_shown_at_the_end(tmp_path, shown):
    assert _after(tmp_path / "log", shown, b"a\nb") == "> a\n> b\n"


def test_states_of_a_progress_bar_are_lines(tmp_path, shown):
    assert _after(tmp_path / "log", shown, b"10%\r20%\r\nend\r") == "> 10%\n> 20%\n> end\n"


def test_a_mark_that_says_the_same_as_the_prefix_is_dropped(tmp_path, shown):
    assert _after(tmp_path / "log", shown, b"[rank0]: x\ny\n", drop="[rank0]: ") == "> x\n> y\n"


def test_an_incomplete_line_is_shown_after_a_second_and_not_repeated(tmp_path, shown, until):
    tail = LogTail()
    tail.start()
    with (tmp_path / "log").open("wb", buffering=0) as file:
        tail.follow(tmp_path / "log", prefix="> ", out=shown)
        file.write(b"loading ...")
        until(lambda: shown.getvalue() == "> loading ...\n")
        file.write(b"\ndone\n")
    tail.stop()
    assert shown.getvalue() == "> loading ...\n> done\n"


def test_what_was_written_last_is_shown_last(tmp_path, shown):
    tail = LogTail()  # which does not run yet, as between two of its looks
    for name, time_s in (("out", 2), ("err", 1), ("later", 3)):
        (tmp_path / name).write_text(f"{name}\n")
        os.utime(tmp_path / name, (time_s, time_s))
        tail.follow(tmp_path / name, prefix="", out=shown)
    tail.start()
    tail.stop()
    assert shown.getvalue() == "err\nout\nlater\n"


def test_a_file_that_never_appears_is_no_error(tmp_path, shown):
    tail = LogTail()
    tail.start()
    tail.follow(tmp_path / "none", prefix="", out=shown)
    tail.stop()
    assert shown.getvalue() == ""


class _Terminal(io.StringIO):
    def isatty(self):
        return True

    def columns(self):
        return 80

    def screen(self):
        """Return the lines that a reader sees, the last one too."""
        lines = [""]
        for piece in re.split(r"(\n|\r|\x1b\[K)", self.getvalue()):
            if piece == "\n":
                lines.append("")
            elif piece == "\r":
                lines[-1] = ""  # what follows clears the rest
            elif piece != "\x1b[K":
                lines[-1] += piece
        return lines


def test_a_progress_bar_on_a_terminal_is_one_line_until_the_next_line(tmp_path, until):
    shown = _Terminal()
    tail = LogTail()
    tail.start()
    with (tmp_path / "log").open("wb", buffering=0) as file:
        tail.follow(tmp_path / "log", prefix="> ", out=shown)
        for state in ("10%", "20%", "long " * 30):
            file.write(f"{state}\r".encode())
            until(lambda state=state: shown.screen() == [f"> {state}"[:79]])
        file.write(b"epoch 1\n\r1%\r2%")  # as tqdm has it, before the state
        until(lambda: shown.screen() == ["> epoch 1", "> 1%"])
        file.write(b"\r3%\rdone\r\n")
        until(lambda: shown.screen() == ["> epoch 1", "> done", ""])
        file.write(b"4%\r")
        until(lambda: shown.screen()[-1] == "> 4%")
    tail.stop()
    assert shown.screen() == ["> epoch 1", "> done", "> 4%", ""]
