"""The example of a GAN: two models, interrupted and resumed as one run."""

import importlib.util
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "gan.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("gan_example", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_goes_on_where_it_was(example, tmp_path, monkeypatch, capsys):
    def run(epochs, folder):
        monkeypatch.setattr(sys, "argv", ["gan.py", "--epochs", str(epochs), "--folder", str(folder)])
        example.main()
        return capsys.readouterr().out

    whole = run(3, tmp_path / "whole")
    assert whole.startswith("24 steps, loss of the discriminator ")
    run(1, tmp_path / "parts")
    assert run(3, tmp_path / "parts") == whole
