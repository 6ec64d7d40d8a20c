"""A real notebook: the progress of a run, its history, and ranks from a function of a cell."""

import json

import pytest

from tests.notebooks import outputs_of

FIT = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_launch import launch
from tp_trainer import Trainer

def step(model, batch):
    return model(batch[0]).square().mean()

def train(epochs):
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    with Trainer(devices="cpu", seed=0) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return trainer.fit(model, optimizer, loader, step=step, epochs=epochs)

history = train(3)
"""
RANKS = """
found = launch(train, 2, 2)
found[0].to_dict()["loss"] == found[1].to_dict()["loss"], len(found[0])
"""
FAILURE = """
def fail():
    raise ValueError("rank %s is no good" % os.environ["RANK"])

launch(fail, 2)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of the cells, by what they are about."""
    pytest.importorskip("cloudpickle")
    cells = {"fit": FIT, "history": "history", "plot": "history.plot()", "ranks": RANKS, "failure": FAILURE}
    return outputs_of(cells, tmp_path_factory.mktemp("notebook"))


pytestmark = [
    pytest.mark.slow,
    # of jupyter's own packages
    pytest.mark.filterwarnings("default"),
]


def test_a_run_is_one_output_and_nothing_is_red(outputs):
    (shown,) = outputs["fit"]
    assert shown["output_type"] == "display_data"
    lines = shown["data"]["text/plain"].splitlines()
    assert [line.split()[:2] for line in lines] == [["epoch", f"{n}/3"] for n in (1, 2, 3)]
    assert "nan" not in json.dumps(shown)
    assert "<progress" not in shown["data"]["text/html"]  # the bar has gone


def test_a_history_shows_itself(outputs):
    (shown,) = outputs["history"]
    assert "<table>" in shown["data"]["text/html"]
    assert "<svg" in shown["data"]["text/html"]


def test_a_plot_is_a_picture(outputs):
    (shown,) = outputs["plot"]
    assert "image/png" in shown["data"]


def test_a_function_of_a_cell_runs_on_ranks_and_nothing_is_red(outputs):
    *lines, result = outputs["ranks"]
    assert result["data"]["text/plain"] == "(True, 2)"
    assert {line["name"] for line in lines} <= {"stdout"}
    assert "[rank0] epoch 2/2" in "".join(line["text"] for line in lines)


def test_the_error_of_a_rank_is_that_of_the_cell(outputs):
    error = outputs["failure"][-1]
    assert error["ename"] == "RankFailedError"
    assert "is no good" in error["evalue"]
