"""``trainer.verify`` where it starts nothing; tests/tp_verify has a script that verifies itself."""

import sys

import pytest
from tp_core.errors import ConfigError
from tp_core.plugins import registry
from tp_trainer import Trainer


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A file as the running program: a worker of pytest is none."""
    path = tmp_path / "train.py"
    path.write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)


def test_within_a_run_of_tp_verify_it_returns_at_once(monkeypatch):
    monkeypatch.setenv("TP_VERIFY", "{}")
    verified = Trainer().verify()
    assert verified
    assert (str(verified), verified.reports) == ("", ())


def test_it_refuses_one_of_several_processes(monkeypatch):
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="run the script as one process, not as 2"):
        Trainer().verify()


def test_it_refuses_a_program_without_a_file(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match="this program is none: put it into a file"):
        Trainer().verify()


def test_it_says_that_the_command_is_missing(script, monkeypatch):
    monkeypatch.setattr(registry, "commands", tuple)
    with pytest.raises(ConfigError, match="pip install tp-verify"):
        Trainer().verify()


def test_it_passes_on_why_the_command_could_not_begin(script):
    with pytest.raises(ConfigError, match="Invalid value for '--steps'"):
        Trainer().verify(steps=1)
