"""The example of a GPT: split over ranks it takes the steps that it takes in one piece, and learns."""

import runpy
from pathlib import Path

import pytest
import torch
from tp_testing import run_ranks

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "gpt.py"


def train(folder, name):
    main = runpy.run_path(str(EXAMPLE))["main"]
    return main(["--steps", "12", "--batch", "4", "--out", f"{folder}/{name}"])


@pytest.mark.slow
def test_a_gpt_learns_alike_on_one_rank_and_on_two(tmp_path):
    (alone,) = run_ranks(train, 1, str(tmp_path), "alone.pt")
    split = run_ranks(train, 2, str(tmp_path), "split.pt")
    assert split[0] == split[1]
    torch.testing.assert_close(torch.tensor(split[0]), torch.tensor(alone), rtol=1e-3, atol=1e-3)
    assert alone[-1] < alone[0] - 1
    states = [torch.load(tmp_path / name) for name in ("alone.pt", "split.pt")]
    assert [v.shape for v in states[0].values()] == [v.shape for v in states[1].values()]
    assert list(states[0]) == list(states[1])
