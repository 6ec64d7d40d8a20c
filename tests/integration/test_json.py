"""`--json` of every sub-command: one document on stdout and nothing else there, errors in one form."""

import itertools
import json
import re
from pathlib import Path

import pytest
from tp_trainer import Checkpoints, Trainer
from tp_trainer.loggers import JsonLinesLogger

from tests.run_tp import run
from tests.tp_commands import COMMANDS, options

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
THINGS = """
import torch
from torch import nn

print("of the module")

def build():
    print("of the builder")
    return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def with_batch():
    return {"model": build(), "batch": torch.zeros(2, 4, dtype=torch.long)}

def upper(text):
    print("of the runner")
    return text.upper()

def cases():
    return {
        "build": lambda: nn.Linear(2, 1),
        "batches": [torch.ones(4, 2)],
        "step": lambda model, batch: model(batch).square().mean(),
        "parallel": nn.parallel.DistributedDataParallel,
    }
"""
# Those that have none, and the reason that the page gives.
WITHOUT = {
    "explain": "(a page)",
    "launch": "its script's",
    "logs": "its script's",
    "train": "its function prints",
}
# How each of the others is called, where a run, a job and a few files are.
CALLS = {
    "convert": ["run", "out"],
    "data index": ["in.txt"],
    "data look": ["in.txt"],
    "data order": ["in.txt", "--batch", "2"],
    "doctor": ["--ranks", "0"],
    "estimate": ["things.py:build"],
    "jobs": [],
    "new-plugin": ["adapter", "acme-adapter"],
    "report": ["run"],
    "run": ["things.py:upper", "--input", "in.txt", "--output", "out.jsonl", "--devices", "1"],
    "shard verify": ["things.py:build"],
    "stop": ["last"],
    "verify": ["things.py:cases"],
}
# What is wrong with a call, its status, and the page that explains it.
MISTAKES = {
    "convert run out --mode mn": (2, "BadParameter", "did you mean 'min'?", None),
    "convert nowhere out": (1, "FileNotFoundError", "there is no checkpoint at nowhere", None),
    "data look nowhere.txt": (2, "ConfigError", "nowhere.txt does not exist", "errors#config-error"),
    "doctor --ranks 9999999": (2, "ConfigError", "9999999 processes", "errors#config-error"),
    "doctor --jsn": (2, "NoSuchOption", "--json", None),
    "docter": (2, "UsageError", "did you mean 'doctor'?", None),
    "estimate things.py:biuld": (2, "ConfigError", "did you mean 'build'?", "errors#config-error"),
    "jobs extra": (2, "UsageError", "extra", None),
    "new-plugin bakend acme": (2, "BadParameter", "did you mean 'backend'?", None),
    "report nowhere": (1, "FileNotFoundError", "nowhere has no log.jsonl", None),
    "run things:uper --input in.txt --output o.csv": (2, "ConfigError", "'upper'", "errors#config-error"),
    "shard verfy": (2, "UsageError", "Did you mean 'verify'?", None),
    "stop nobody": (2, "ConfigError", "there is no job 'nobody'", "errors#config-error"),
    "verify --dtyp float32": (2, "NoSuchOption", "--dtype", None),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, an ended job, and files."""
    import torch
    from tp_launch import LaunchRequest
    from tp_launch._jobs import JobStatus, create_job  # a job that nobody ran

    folder = tmp_path_factory.mktemp("place")
    (folder / "things.py").write_text(THINGS)
    (folder / "in.txt").write_text("a\nb\n")
    with pytest.MonkeyPatch.context() as patch, Trainer(seed=0, progress=False, devices="cpu") as trainer:
        patch.chdir(folder)
        patch.setenv("TP_STATE_DIR", str(folder / "state"))
        model = torch.nn.Linear(1, 1)
        data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            step=lambda model, batch: model(batch).mean(),
            epochs=1,
            checkpoint=Checkpoints("run"),
            log=JsonLinesLogger("run"),
        )
        job = create_job(LaunchRequest(script="things.py"))
        job.write_status(JobStatus(state="finished", pid=1, process="", started=0, ended=1, code=0))
    return folder


@pytest.fixture
def tp(place, capfd, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("TP_STATE_DIR", str(place / "state"))
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words):
        capfd.readouterr()
        status = run(words)
        return status, *capfd.readouterr()

    return call


def documented():
    """Return the keys of each document as the page has them."""
    table = PAGE.read_text().partition("\n## JSON\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `tp ([a-z -]+)` \| (.+) \|$", table, re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", keys) for name, keys in rows}


def test_every_command_has_it_or_there_is_a_reason():
    has = {name for name, command in COMMANDS.items() if "--json" in options(command)}
    assert has == set(CALLS) == set(documented())
    assert set(COMMANDS) - has == set(WITHOUT)
    text = " ".join(PAGE.read_text().split())
    for name, reason in WITHOUT.items():
        assert re.search(rf"`tp {name}`[^.]* {re.escape(reason)}", text)


def keys_of(value, named=("versions", "brings", "left_out", "compared")):
    """Yield the keys of a document, but those that are names of things."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield key
            if key not in named:
                yield from keys_of(below)
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(keys_of, value))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("report", "verify") else ())
        for name in sorted(CALLS)
    ],
)
def test_it_is_one_document_with_the_keys_of_the_page_and_a_status_as_without(name, tp):
    status, out, _ = tp(*name.split(), "--json", *CALLS[name])
    assert status == 0
    found = json.loads(out)
    keys = {tuple(each) for each in found} if isinstance(found, list) else {tuple(found)}
    assert keys == {tuple(documented()[name])}
    assert [key for key in keys_of(found) if not re.fullmatch(r"[a-z][a-z0-9_]*", key)] == []


@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_is_the_same_option_everywhere(name):
    (option,) = [p for p in COMMANDS[name].params if "--json" in p.opts]
    assert (option.opts, option.secondary_opts, option.help) == (["--json"], [], "Print JSON for machines.")


def test_a_mistake_is_tried_with_each():
    assert {name.split()[0] for name in CALLS} <= {words.split()[0] for words in MISTAKES}


@pytest.mark.parametrize("words", MISTAKES)
def test_what_goes_wrong_is_one_object_on_the_last_line_of_stderr(words, tp):
    expected, kind, said, page = MISTAKES[words]
    status, out, err = tp(*words.split(), "--json")
    assert (status, out) == (expected, "")
    (error,) = json.loads(err.splitlines()[-1]).values()
    assert list(error) == ["command", "type", "message", "page", "status"]
    assert (error["type"], error["page"], error["status"]) == (kind, page, expected)
    assert said in error["message"]
    assert error["command"] == (None if words == "docter" else words.split()[0])
    assert tp(*words.split())[0] == expected


def test_results_that_are_not_good_are_a_document_with_status_1(tp):
    status, out, _ = tp("estimate", "things.py:build", "--memory", "100", "--json")
    assert status == 1
    layouts = json.loads(out)["layouts"]
    assert layouts
    assert not any(layout["fits"] for layout in layouts)
    assert tp("estimate", "things.py:build", "--memory", "100")[0] == 1


def test_a_script_has_an_option_of_that_name_for_itself(tp):
    for words in ("launch thigns.py --json", "train thigns.py:build --json"):
        status, out, err = tp(*words.split())
        assert (status, out) == (2, "")
        assert err.startswith(f"tp {words.split()[0]}: ")


def test_two_things_are_not_printed_on_one_stdout(tp):
    status, out, err = tp("run", "things.py:upper", "--input", "in.txt", "--output", "-", "--json")
    assert (status, out) == (2, "")
    assert "--json prints its document where --output - has the results" in err
