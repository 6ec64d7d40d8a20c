"""Every installed sub-command of `tp`, called as people do who mistype: one line, and the right status."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.run_tp import run
from tests.tp_commands import COMMANDS, options

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(p for p in ROOT.glob("docs/**/*.md") if not {"_build", "examples"} & set(p.parts)),
]
TP = [sys.executable, "-m", "tp_core.cli"]

# How each command that takes arguments is called with something that is not there.
NOWHERE = {
    "convert": ["nowhere", "out"],
    "data index": ["nowhere.jsonl"],
    "data look": ["nowhere.jsonl"],
    "data order": ["nowhere.jsonl", "--batch", "8"],
    "doctor": ["--ranks", "0", "nowhere"],
    "estimate": ["nowhere.py:build"],
    "jobs": ["nowhere"],
    "launch": ["nowhere.py"],
    "logs": ["nowhere"],
    "verify": ["nowhere.py:build"],
    "explain": ["nothing"],
    "new-plugin": ["nothing", "nowhere"],
    "report": ["nowhere"],
    "run": ["nowhere:Runner", "--input", "nowhere.txt", "--output", "out.jsonl"],
    "shard verify": ["nowhere.py:build"],
    "stop": ["nowhere"],
    "train": ["nowhere.py"],
}
# Names with a typo, and what was meant.
THINGS = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def main(rate: float = 0.1):
    pass
"""
TYPOS = {
    "docter": "doctor",
    "shard verfy": "verify",
    "shard verify things.py:biuld": "build",
    "shard verify thing.py:build": "things.py",
    "estimate things.py:biuld": "build",
    "launch thigns.py": "things.py",
    "run things:biuld --input things.py --output o.jsonl": "build",
    "run things:build --input thing.py --output o.jsonl": "things.py",
    "train things.py:mian": "main",
    "train things.py:main --rat 1": "--rate",
}


every_command = pytest.mark.parametrize("name", sorted(COMMANDS))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")


def tp(capsys, *arguments):
    capsys.readouterr()
    status = run(list(arguments))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out, captured.err


@every_command
def test_help_is_on_stdout_without_colors_and_in_a_narrow_terminal(name, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    for columns in ("200", "30"):
        monkeypatch.setenv("COLUMNS", columns)
        status, out, err = tp(capsys, *name.split(), "--help")
        assert (status, err) == (0, "")
        assert f"tp {name}".replace(" ", "") in re.sub(r"\s", "", out)
        assert "\x1b" not in out


@every_command
def test_an_option_with_a_typo_is_named_and_the_right_one_offered(name, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    known = max((o for o in options(COMMANDS[name]) if o != "--help"), key=len)
    typo = known[:-2] + known[-1]
    status, out, err = tp(capsys, *name.split(), typo)
    assert (status, out) == (2, "")
    assert typo in err
    assert known in err


@every_command
def test_what_is_not_there_is_one_line_and_the_right_status(name, capsys, tmp_path):
    assert name in NOWHERE, "say here how it is called with something that is not there"
    before = sorted(tmp_path.rglob("*"))
    status, out, err = tp(capsys, *name.split(), *NOWHERE[name])
    assert status in (1, 2)
    assert out == ""
    assert "nowhere" in err or "nothing" in err
    parsed = "Usage:" in err  # the parser says it in a box
    assert parsed or err.startswith((f"tp {name.split()[0]}: ", "tp: ")), err
    assert parsed or len(err.strip().splitlines()) <= 2, err
    assert [path for path in sorted(tmp_path.rglob("*")) if "state" not in path.parts] == before


@pytest.mark.parametrize("name", [n for n in sorted(COMMANDS) if any(p.required for p in COMMANDS[n].params)])
def test_without_what_it_needs_a_command_says_what_is_missing(name, capsys):
    status, out, err = tp(capsys, *name.split())
    assert (status, out) == (2, "")
    assert "Missing" in err


@pytest.fixture
def closed_pipe():
    """Standard output whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    yield file
    with contextlib.suppress(BrokenPipeError):
        file.close()


@every_command
def test_a_reader_that_has_gone_ends_it_without_a_word(name, capsys, monkeypatch, closed_pipe):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", closed_pipe)
        assert run([*name.split(), "--help"]) == 141
    assert "Broken" not in capsys.readouterr().err


@every_command
def test_ctrl_c_ends_it_with_the_status_of_the_signal(name, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(COMMANDS[name]), "invoke", interrupted)
    needed = NOWHERE[name] if any(p.required for p in COMMANDS[name].params) else []
    if name == "new-plugin":
        needed = ["backend", "some-plugin"]  # what is there to choose from is looked at before
    status, out, _ = tp(capsys, *name.split(), *needed)
    assert (status, out) == (130, "")


@pytest.mark.parametrize("words", TYPOS)
def test_a_name_with_a_typo_is_answered_with_the_one_that_was_meant(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "things.py").write_text(THINGS)
    status, out, err = tp(capsys, *words.split())
    assert (status, out) == (2, "")
    assert f"did you mean '{TYPOS[words]}'?" in err.lower()


def shown_commands():
    """Yield each command line that a document shows, and the document: in blocks, and within sentences."""
    within = re.compile(r"`(tp [a-z][^`\n]*)`|^(?:\$ |    )(tp [a-z].*)$", re.MULTILINE)
    for path in DOCUMENTS:
        text = path.read_text()
        found = [a or b for a, b in within.findall(text)]
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += [line for line in block.splitlines() if line.startswith("tp ")]
        yield from ((path.name, line.removesuffix(" &")) for line in dict.fromkeys(found))


def test_the_commands_and_options_that_documents_show_exist():
    shown, wrong = list(shown_commands()), []
    for document, line in shown:
        words = shlex.split(line, comments=True)[1:]
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        if words[0].startswith("-") or name in {"data", "shard"}:  # of tp itself; the group alone
            continue
        if name not in COMMANDS:
            wrong.append(f"{document}: {line!r}: no such command")
            continue
        command = COMMANDS[name]
        known = {text: p for p in command.params for text in [*p.opts, *p.secondary_opts]}
        rest = iter(words[len(name.split()) :])
        for word in rest:
            if word == "--":
                break  # what follows is the script's
            option = word.partition("=")[0]
            if not word.startswith("-") or word == "-":
                if command.context_settings.get("allow_interspersed_args", True):
                    continue
                break  # what follows is the script's
            if option not in {*known, "--help"}:
                wrong.append(f"{document}: {line!r}: no such option {option}")
            elif "=" not in word and option != "--help" and not known[option].is_flag:
                next(rest, None)
    assert len(shown) > 50
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        pytest.param(["doctor", "--ranks", "0"], marks=pytest.mark.nightly),
        ["doctor", "--ranks", "0", "--json"],
    ],
)
def test_a_real_pipe_that_is_closed_ends_tp_as_a_shell_expects(arguments):
    read, write = os.pipe()
    os.close(read)  # before anything is written
    done = subprocess.run([*TP, *arguments], stdout=write, stderr=subprocess.PIPE, timeout=800, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


HANGS = """
import os, sys, time

def hang():
    open(f"{os.environ['RANKS']}/{os.getpid()}", "w").close()
    time.sleep(10**6)

if "forkserver" in str(sys.orig_argv):
    os.register_at_fork(after_in_child=hang)
"""


@pytest.mark.slow
def test_ctrl_c_while_ranks_meet_ends_them_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HANGS)  # ranks that never come to meet
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getenv("PYTHONPATH", "")]),
        "RANKS": str(ranks),
    }
    process = subprocess.Popen(
        [*TP, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True
    )
    deadline = time.monotonic() + 800
    while len(list(ranks.iterdir())) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline, "the ranks were not started in time"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=800)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert not [path.name for path in ranks.iterdir() if psutil.pid_exists(int(path.name))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["--help", *(pytest.param(w, marks=pytest.mark.nightly) for w in ("jobs --json", "doctor --ranks 0"))],
)
def test_without_standard_streams_it_ends_as_with_them(words, tmp_path):
    shell = f"{shlex.join(TP)} {words}"
    for closed in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["/bin/sh", "-c", f"{shell} {closed}"], capture_output=True, timeout=800, check=False
        )
        assert done.returncode == 0, done.stderr
        assert b"Error" not in done.stderr
        assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        *(pytest.param(w, marks=pytest.mark.nightly) for w in ("--version", "jobs --json")),
        "doctor --ranks 0",
    ],
)
def test_a_full_disk_behind_stdout_is_one_line(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*TP, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=800, check=False
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
