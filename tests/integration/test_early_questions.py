"""A split model is trained by the backend for it, whatever the trainer was asked before."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import SelectionError
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.reference_training import squared_error


def make_model(split):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1)).double()
    if split:
        import tp_shard as ts

        if not ts.distributed.is_initialized():
            ts.distributed.init_process_group()
        model[0] = ts.nn.ParallelLinear.convert_parallel_linear(model[0], 1)
        model[2] = ts.nn.ParallelLinear.convert_parallel_linear(model[2], 0)
    return model


def data():
    x = torch.linspace(-1, 1, 256, dtype=torch.float64).reshape(64, 4)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


def train(trainer, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = trainer.fit(model, optimizer, data(), step=squared_error, epochs=2)
    return trainer.selection.chosen.name, [record.train["loss"] for record in history]


ASK = {
    "nothing": lambda t: None,
    "device": lambda t: t.device,
    "rank": lambda t: (t.rank, t.local_rank, t.world_size, t.is_main),
    "autocast": lambda t: t.autocast().__enter__(),
    "selection": lambda t: str(t.selection),
}


def train_after_questions():
    results = {}
    for name, ask in ASK.items():
        with Trainer(seed=0, progress=False, devices="cpu") as trainer:
            ask(trainer)
            results[name] = train(trainer, make_model(split=True))
    return results


@pytest.mark.slow
def test_a_split_model_is_trained_the_same_whatever_was_asked_before():
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        _, expected = train(trainer, make_model(split=False))
    for results in run_ranks(train_after_questions, 2):
        for name, (backend, losses) in results.items():
            assert backend == "shard", name
            assert losses == pytest.approx(expected, rel=1e-12), name


def too_early():
    messages = []
    for ask in (lambda t: t.session, lambda t: t.prepare(data())):
        with Trainer(seed=0, progress=False, devices="cpu") as trainer:
            ask(trainer)
            with pytest.raises(SelectionError) as caught:
                train(trainer, make_model(split=True))
            messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_a_session_that_was_opened_too_early_is_an_error_when_the_split_model_comes():
    for messages in run_ranks(too_early, 2):
        for message in messages:
            assert "backend 'ddp' was chosen when" in message
            assert "before it" in message


def two_models():
    chosen = []
    for order in (1, -1):
        with Trainer(seed=0, progress=False, devices="cpu") as trainer:
            trainer.prepare(*[make_model(split=True), nn.Linear(2, 2)][::order])
            chosen.append(trainer.selection.chosen.name)
    return chosen


def test_a_split_model_decides_wherever_it_stands_among_others():
    assert run_ranks(two_models, 2) == [["shard", "shard"]] * 2
