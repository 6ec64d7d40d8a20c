"""A model that was trained is the user's own: its attributes, copies, pickle, and exported program."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.reference_training import rows_and_sums, squared_error


def attributes(model):
    return {name: {*vars(module)} for name, module in model.named_modules()}


def trained(*, by_hand=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows_and_sums(20, dtype=torch.float32), batch_size=4)
    with Trainer(seed=3, progress=False, devices="cpu") as trainer:
        if by_hand:
            prepared, optimizer, loader = trainer.prepare(model, optimizer, loader)
            for batch in loader:
                optimizer.zero_grad()
                trainer.backward(trainer.run(squared_error, prepared, batch))
                optimizer.step()
        else:
            trainer.fit(model, optimizer, loader, step=squared_error)
        return model, *stored_and_loaded(model)


def stored_and_loaded(model):
    """Return a model from a file as anybody reads it, and a copy."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        return torch.load(file, weights_only=True), copy.deepcopy(model)


@pytest.mark.parametrize("by_hand", [False, True], ids=["fit", "own loop"])
def test_nothing_hangs_on_a_model_that_one_process_has_trained(by_hand):
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model, loaded, copied = trained(by_hand=by_hand)
    for one in (model, loaded, copied):
        assert attributes(one) == attributes(plain)
    rows = torch.ones(2, 3)
    assert torch.equal(loaded(rows), model(rows))
    assert torch.equal(torch.export.export(model, (rows,)).module()(rows), model(rows))


def _load_as_anybody_does():
    model, loaded, copied = trained()
    rows = torch.ones(2, 3)
    return [torch.equal(one(rows), model(rows)) for one in (loaded, copied)]


@pytest.mark.slow
def test_a_whole_model_that_ranks_have_trained_is_read_with_its_own_classes_alone():
    assert run_ranks(_load_as_anybody_does, 2) == [[True, True]] * 2
