"""``tp train``: a typed function, run with values from options and files."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from tp_core.plugins import registry
from tp_trainer.loggers import read_run

from tests.run_tp import run

SCRIPT = '''
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tp_core.errors import ConfigError
from tp_trainer import Checkpoints, GradientRules, Limits, Trainer


@dataclass(frozen=True)
class Optim:
    """How it is trained.

    Attributes:
        lr: The size of a step.
        betas: Two decays.
    """

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


def main(width: int, optim: Optim = Optim(), *, out: Path = Path("out.json"), name: str | None = "n"):
    """Write down what it was given.

    Args:
        width: The width of the model.
        optim: The optimizer.
        out: The file to write.
        name: A name for people.
    """
    text = json.dumps([width, type(optim).__name__, optim.lr, optim.betas, type(out).__name__, name])
    out.write_text(text)


def train(folder: Path, lr: float = 0.1, steps: int = 3, log: list[str] | None = None, resume: str = 'auto'):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        return trainer.fit(
            model, optimizer, data, step=lambda model, batch: model(batch).square().mean(),
            max_steps=steps, checkpoint=folder, log=log, resume=resume,
        )


def with_objects(
    limits: Limits = Limits(max_steps=9),
    rules: GradientRules | None = None,
    save: Checkpoints = Checkpoints("a"),
):
    print(limits, rules, save, sep="\\n")


@dataclass(slots=True)
class Slotted:
    lr: float = 0.1


def slotted(optim: Slotted = Slotted()): ...


def fails(kind: str = "tp"):
    raise ConfigError("not so") if kind == "tp" else KeyError("width")


def first(width: int, /, **more: int):
    print("first", width, more)


def untyped(width): ...


def taken(config: int = 2): ...
'''


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "values_script.py").write_text(SCRIPT)
    yield
    sys.modules.pop("values_script", None)


def tp_train(function, *words):
    return run(["train", f"values_script.py:{function}", *words])


def test_options_become_the_arguments_that_the_types_say(tmp_path):
    assert tp_train("main", "--width", "3", "--optim.lr", "1e-3", "--optim.betas", "[1, 2]") == 0
    assert json.loads((tmp_path / "out.json").read_text()) == [
        3, "Optim", 0.001, [1.0, 2.0], type(tmp_path).__name__, "n",
    ]  # fmt: skip


def test_values_of_a_file_yield_to_later_options(tmp_path):
    (tmp_path / "run.yaml").write_text("width: 7\nname: a\noptim:\n  lr: 3\n")
    assert tp_train("main", "--config", "run.yaml", "--optim.lr", "9") == 0
    width, _, lr, *_, name = json.loads((tmp_path / "out.json").read_text())
    assert (width, lr, name) == (7, 9.0, "a")


def test_objects_of_fit_are_groups_of_options(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("limits:\n  max_time: 1h30m\nsave:\n  folder: run\n  keep: 2\n")
    assert (
        tp_train("with_objects", "--config", "run.yaml", "--limits.epochs", "3", "--rules.clip_norm", "1")
        == 0
    )
    limits, rules, save = capsys.readouterr().out.splitlines()
    assert limits.startswith("Limits(epochs=3, max_steps=9, max_time='1h30m', steps_per_epoch=None")
    assert rules.startswith("GradientRules(clip_norm=1.0, clip_value=None, nonfinite='raise'")
    assert save.startswith("Checkpoints(folder='run', every_steps=None")
    assert "keep=2" in save
    assert tp_train("with_objects", "--limits.max_time", "soon") == 2
    assert "max_time must be a number of seconds above 0" in capsys.readouterr().err


def test_a_module_of_this_folder_is_found(tmp_path):
    assert run(["train", "values_script:main", "--width", "3"]) == 0
    assert (tmp_path / "out.json").exists()


def test_all_values_are_printed_and_can_be_read_again(tmp_path, capsys):
    assert tp_train("main", "--width", "3", "--name", "null", "--print-config") == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == {
        "width": 3, "optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "out": "out.json", "name": None,
    }  # fmt: skip
    assert not (tmp_path / "out.json").exists()
    (tmp_path / "run.yaml").write_text(text)
    assert tp_train("main", "--config", "run.yaml", "--print-config") == 0
    assert capsys.readouterr().out == text


def test_help_of_the_function_comes_from_its_docstring(capsys):
    assert tp_train("main", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for said in ("Write down what it was given.", "The width of the model. (required", "The size of a step."):
        assert said in out


def test_parameters_without_a_keyword_are_passed_by_position(capsys):
    assert tp_train("first", "--width", "3") == 0
    assert capsys.readouterr().out == "first 3 {}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["values_script.py"], "a function is written file.py:main"),
        (["nowhere.py:main"], "there is no file 'nowhere.py'"),
        (["nowhere:main"], "there is no module 'nowhere'"),
        (["values_script.py:mian"], "has no function 'mian'"),
        (["values_script.py:__name__"], "'__name__' in values_script.py is a str, and no function"),
        (["values_script.py:main"], "required: width"),
        (["values_script.py:main", "--widht", "3"], "unrecognized arguments: --widht 3"),
        (["values_script.py:main", "--width", "x"], "--width: expected int, got x; "),
        (["values_script.py:main", "--width", "3", "--config", "no.yaml"], "File does not exist"),
        (
            ["values_script.py:main", "--config", "typo.yaml"],
            "'widht' is not accepted; did you mean 'width'?",
        ),
        (["values_script.py:main", "--config", "broken.yaml"], "Problems parsing config"),
        (["values_script.py:untyped"], "cannot be options"),
        (["values_script.py:taken"], "cannot be options"),
        (["values_script.py:slotted"], "'optim' of values_script.py:slotted has a dataclass with slots"),
        (["-n", "2", "values_script.py:main", "--width", "x"], "--width: expected int, got x; "),
    ],
)
def test_what_cannot_be_run_is_one_sentence(tmp_path, capsys, words, said):
    (tmp_path / "typo.yaml").write_text("width: 7\nwidht: 7\n")
    (tmp_path / "broken.yaml").write_text("width: [\n")
    assert run(["train", *words]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("tp ")
    assert said in line
    assert captured.out == ""


CHOICES = """
import enum
from typing import Literal

class Size(enum.Enum):
    SMALL = 1
    LARGE = 2

def main(
    kind: Literal["sgd", "adam"] = "sgd", size: Size = Size.SMALL, betas: tuple[float, float] = (1, 2)
): ...
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "adm"], "--kind: expected one of sgd, adam, got adm; did you mean 'adam'?"),
        (["--size", "LARG"], "--size: expected one of SMALL, LARGE, got LARG; did you mean 'LARGE'?"),
        (
            ["--betas", "1", "2"],
            "--betas: expected tuple, got 1; lists are written [1,2] and dicts {a: 1}, in",
        ),
        (["--print_config"], "unrecognized arguments: --print_config; did you mean '--print-config'?"),
    ],
)
def test_a_value_that_was_meant_is_offered(tmp_path, capsys, words, said):
    script = tmp_path / "choices.py"
    script.write_text(CHOICES)
    assert run(["train", f"{script}:main", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_jsonargparse_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert tp_train("main", "--width", "3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("jsonargparse, which is not installed: pip install 'tp-trainer[train]'")


def test_without_tp_launch_a_function_runs_in_this_process_alone(tmp_path, monkeypatch, capsys):
    others = [c for c in registry.commands() if c.item.name != "launch"]
    monkeypatch.setattr(registry, "commands", lambda: others)
    assert tp_train("main", "--width", "3") == 0
    assert (tmp_path / "out.json").exists()
    assert run(["train", "-n", "2", "values_script.py:main", "--width", "3"]) == 2
    assert "the command tp launch, which is not installed: pip install tp-launch" in capsys.readouterr().err


def test_errors_of_the_function_keep_their_place(capsys):
    assert tp_train("fails") == 1
    err = capsys.readouterr().err
    assert "in fails" in err
    assert "ConfigError: not so" in err
    with pytest.raises(KeyError, match="width"):
        tp_train("fails", "--kind", "other")


def test_a_run_logs_its_values_and_can_be_run_again(tmp_path):
    assert tp_train("train", "--folder", "run", "--lr", "0.5", "--log", '["jsonl"]') == 0
    chosen = read_run(tmp_path / "run").info["hyperparameters"]
    assert (chosen["folder"], chosen["steps"], chosen["lr"]) == ("run", 3, 0.5)
    (tmp_path / "again.yaml").write_text((tmp_path / "run" / "config.yaml").read_text())
    assert tp_train("train", "--config", "again.yaml", "--folder", "second") == 0
    first, second = (yaml.safe_load((tmp_path / n / "config.yaml").read_text()) for n in ("run", "second"))
    assert second == first | {"folder": "second"}
    assert first == {"folder": "run", "lr": 0.5, "steps": 3, "log": ["jsonl"], "resume": "auto"}


def test_other_values_in_the_folder_are_kept_aside(tmp_path):
    for lr, steps in (("0.5", "2"), ("0.5", "2"), ("0.25", "4")):
        words = ["--folder", "run", "--lr", lr, "--steps", steps]
        assert tp_train("train", *words) == 0
    values = [
        yaml.safe_load((tmp_path / "run" / n).read_text())["lr"] for n in ("config.yaml", "config-1.yaml")
    ]
    assert values == [0.25, 0.5]
    assert not (tmp_path / "run" / "config-2.yaml").exists()


def test_a_run_goes_on_without_the_command(tmp_path):
    assert tp_train("train", "--folder", "run") == 0
    train = sys.modules["values_script"].train
    assert train(tmp_path / "run", steps=5)[-1].epoch == 2


def test_a_rank_of_a_launcher_takes_part_and_launches_nothing(tmp_path, monkeypatch, capsys):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PET_NPROC_PER_NODE": "7", "PET_NNODES": "3"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert tp_train("main", "--width", "3") == 0
    assert (tmp_path / "out.json").exists()
    assert run(["train", "-n", "2", "values_script.py:main", "--width", "3"]) == 2
    assert "was given --nproc-per-node in rank 0 of 1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_ranks_of_torchrun_train_together(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "tp_core.cli", "train"]
    (tmp_path / "run.yaml").write_text("folder: run\nlog: [jsonl]\n")
    words = ["values_script.py:train", "--config", "run.yaml", "--steps", "2"]
    environ = {**os.environ, "PET_NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}  # for torchrun alone
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").info["hyperparameters"]["world_size"] == 2
