"""Loggers by name: where they come from, and what a wrong name is told."""

import importlib.util
import re
import sys
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError, PluginError
from tp_core.plugins import Logger, LoggerFactory
from tp_trainer import LogOptions, Trainer, loggers
from tp_trainer.loggers import CsvLogger, RunInfo, WandbLogger

PLUGINS = PluginRegistry(environ={})


class Listener(Logger):
    """Keeps the facts of a run."""

    name, info = "listener", None

    def open(self, info):
        self.info = info

    def log(self, numbers, *, step, epoch):
        pass

    def close(self, status):
        pass


def fit(log, plugins=PLUGINS, *, devices="cpu", **settings):
    """Train for a step with these loggers."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with Trainer(devices=devices, progress=False, plugins=plugins) as trainer:
        trainer.fit(
            model, optimizer, [torch.ones(1, 1)], step=lambda model, x: model(x).mean(), log=log, **settings
        )


def info(hyperparameters=None):
    """Return what a run gives to its loggers."""
    listener = Listener()
    fit(LogOptions(listener, hyperparameters=hyperparameters))
    return listener.info


def test_the_loggers_of_this_package_are_found_by_name():
    found = {c.item.name: c.item.extra for c in PLUGINS.loggers() if c.distribution == "tp-trainer"}
    assert found == {
        "csv": "",
        "jsonl": "",
        "mlflow": "tp-trainer[mlflow]",
        "tensorboard": "tp-trainer[tensorboard]",
        "wandb": "tp-trainer[wandb]",
    }


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(get_device_name=lambda i: f"Max {i}"), "Max 0, Max 1"),
        (SimpleNamespace(), "xpu, xpu"),
    ],
    ids=["named", "without names"],
)
def test_every_accelerator_is_named_whoever_made_it(monkeypatch, module, expected):
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert info().environment["gpus"] == expected


def test_names_and_loggers_are_taken_together(tmp_path):
    own = Listener()
    for number, (log, files) in enumerate([([own, "csv"], 1), ("csv", 1), (own, 0), (None, 0)]):
        fit(log, checkpoint=tmp_path / f"{number}")
        assert len([*tmp_path.glob(f"{number}/metrics.csv")]) == files
    assert own.info.folder == tmp_path / "2"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("tensorbord", r"did you mean 'tensorboard'\? \(pip install 'tp-trainer\[tensorboard\]'\)"),
        ("CSV", r"there is no logger 'CSV'; did you mean 'csv'\?"),
        ("xyz", "those there are: 'csv', 'jsonl', 'mlflow', 'tensorboard', 'wandb'"),
        (CsvLogger, r"as CsvLogger\(\); got"),
        ([3], r"takes names of loggers and loggers, as 'csv' or CsvLogger\('run'\); got 3"),
        (3, "got 3"),
    ],
)
def test_what_is_no_logger_is_told_what_may_have_been_meant(log, words):
    with pytest.raises(ConfigError, match=words):
        fit(log)


def test_one_logger_twice_is_refused():
    own = CsvLogger("somewhere")
    with pytest.raises(ConfigError, match="CsvLogger is in log= twice"):
        fit([own, own])


def test_a_blocked_plugin_is_named():
    blocked = PluginRegistry(environ={"TP_DISABLE_PLUGINS": "tp-trainer"})
    with pytest.raises(ConfigError, match="those there are: none"):
        fit("csv", blocked, devices=2)
    with pytest.raises(PluginError, match="blocked"):
        fit("tp-trainer", blocked, devices=2)


def test_a_factory_that_makes_something_else_is_refused():
    plugins = PluginRegistry(environ={})
    plugins.register(LoggerFactory("mine", "nothing", object))
    with pytest.raises(ConfigError, match="'mine' must make a Logger, got object"):
        fit("mine", plugins)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"needs the package {name}: pip install 'tp-trainer\[{name}\]'"):
        fit(name)


def test_what_is_exported_exists():
    assert all(hasattr(loggers, name) for name in loggers.__all__)


def test_the_facts_of_a_run_have_what_the_launcher_and_the_scheduler_said(monkeypatch):
    said = {"TP_BACKEND": "single", "SLURM_JOB_ID": "17", "PASSWORD": "no", "TP_MINE": "no"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = info()
    assert said.items() & found.environment.items() == {("TP_BACKEND", "single"), ("SLURM_JOB_ID", "17")}
    assert not {"PASSWORD", "TP_MINE"} & set(found.environment)
    assert found.environment["host"]
    assert found.versions["tp-trainer"]
    assert found.versions["torch"]


def test_secrets_are_masked_wherever_a_run_is_described(monkeypatch):
    words = [
        "train.py",
        "--token=a1",
        "--api-key",
        "a2",
        "HF_TOKEN=a3",
        "--db.password",
        "a4",
        "--secretKey=a5",
        "--apikey=a6",
        "--set=hf_token=a7,lr=1",
        "postgres://user:a8@host/db",
        "https://a9@github.com/x?access_token=a10&page=2",
        "--header=Authorization: Bearer a11",
        '--json={"token": "a12", "lr": 1}',
        "--api-keys",
        "a13",
        "a14",
        "--connect=host=x password='a15 a16' port=1",
    ]
    plain = [
        "--max_tokens=5",
        "--tokenizer",
        "bpe",
        "--key_dim=64",
        "--pad_token=<pad>",
        "--lr=0.1",
        "monkey=1",
        "--num_keys=3",
        "--image_key=jpg",
        "--keyboard=us",
        "--hotkey=x",
        "--url=http://host:80/x",
        "git@github.com:x/y.git",
    ]
    monkeypatch.setattr("sys.argv", [*words, *plain])
    command = info().environment["command"]
    assert not re.search(r"\ba\d", command), command
    assert "https://***@github.com/x?access_token=***&page=2" in command
    assert command.endswith(" ".join(plain))


def logged(hyperparameters):
    """Return the hyperparameters that a run gives to its loggers."""
    found = info(hyperparameters).hyperparameters
    return {name: found[name] for name in hyperparameters}


def test_secrets_in_hyperparameters_are_masked_however_deep_they_are():
    @dataclass
    class Hub:
        token: str = "a"
        port: int = 1

    values = {
        "wandb_api_key": "a",
        "db": [{"password": "b", "pin_password": 1234, "port": 1}],
        "hub": Hub(),
        "arguments": Namespace(api_token="c", tokenizer="bpe"),
        "secrets": {"first": "d"},
        "url": "s3://user:e@bucket",
        "text": "Hub(token='f')",
        "num_token": 3,
        "max_tokens": "8",
        "dtype": torch.float32,
    }
    assert logged(values) == {
        "wandb_api_key": "***",
        "db": [{"password": "***", "pin_password": "***", "port": 1}],
        "hub": {"token": "***", "port": 1},
        "arguments": {"api_token": "***", "tokenizer": "bpe"},
        "secrets": {"first": "***"},
        "url": "s3://user:***@bucket",
        "text": "Hub(token='***')",
        "num_token": 3,
        "max_tokens": "8",
        "dtype": torch.float32,
    }


SECRET = """token hf_token HF_TOKEN apiKey openai_api_key sshkey pwd key keys image_api_key label_studio_token
    aws_secret_access_key password client_secret_id api_tokens APIKey2 passphrase"""
PLAIN = """tokenizer max_tokens n_tokens monkey keyboard num_keys key_dim pad_token eos_token image_key
    sort_key secretary new_token hidden query_key_value hotkey tokens max_key"""


def test_a_name_says_what_is_a_secret():
    found = logged(dict.fromkeys([*SECRET.split(), *PLAIN.split()], "x"))
    assert [name for name in SECRET.split() if found[name] != "***"] == []
    assert [name for name in PLAIN.split() if found[name] != "x"] == []


def test_wandb_which_takes_the_arguments_by_itself_gets_them_without_secrets(monkeypatch, tmp_path):
    seen = []

    def init(**_):
        seen.append(sys.argv[:])
        return SimpleNamespace(id="1", config=SimpleNamespace(update=lambda *_, **__: None))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    monkeypatch.setattr("sys.argv", ["train.py", "--token=a"])
    WandbLogger(folder=tmp_path).open(RunInfo())
    assert seen == [["train.py", "--token=***"]]
    assert sys.argv == ["train.py", "--token=a"]


def test_hyperparameters_that_are_no_mapping_are_refused_with_what_to_give():
    with pytest.raises(ConfigError, match=r"must be a mapping, such as vars\(arguments\).*got Namespace"):
        LogOptions("csv", hyperparameters=Namespace(lr=1))
