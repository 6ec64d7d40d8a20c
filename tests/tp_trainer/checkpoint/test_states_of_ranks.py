"""What of a user's state is each rank's own, and what only looks like an average of the weights."""

from functools import partial

import torch
from torch.utils.data import DataLoader
from tp_trainer import Callback, Trainer

from tests.reference_training import rows_and_sums, squared_error


def train(folder, *, epochs=1, resume=None, callbacks=()):
    """Return what this rank's list holds after training: its rank, and what it had before."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    state = {"buffer": []}
    loader = DataLoader(rows_and_sums(8, dtype=torch.float32), batch_size=4)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        if resume is None:
            state["buffer"].append(trainer.rank)
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader,
            step=squared_error,
            epochs=epochs,
            checkpoint=folder,
            resume=resume,
            state=state,
            callbacks=callbacks,
        )
    return state["buffer"]


def test_states_of_ranks_that_are_not_there_any_more_are_named(two_ranks, tmp_path, caplog):
    assert two_ranks.run(partial(train, tmp_path)) == [[0], [1]]
    assert train(tmp_path, epochs=2, resume="auto") == [0]
    said = "has a state of 'buffer' for each of 2 ranks, and this run has 1: rank r takes that of rank r % 2"
    assert said in caplog.text


class Averages(Callback):
    """Averages of a callback's own, which have the names of weights and are numbers."""

    def __init__(self):
        self.averages = {"weight": 0.0}

    def on_step_end(self, run):
        self.averages["weight"] += 1.0

    def state_dict(self):
        return {"averages": dict(self.averages)}

    def load_state_dict(self, state):
        self.averages = dict(state["averages"])


def test_a_callbacks_averages_may_be_numbers(tmp_path):
    train(tmp_path, callbacks=[first := Averages()])
    train(tmp_path, epochs=2, resume="auto", callbacks=[resumed := Averages()])
    assert (first.averages, resumed.averages) == ({"weight": 2.0}, {"weight": 4.0})
