"""A model that its user has compiled is saved under plain names and loads both ways, on every backend."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks
from tp_trainer import ParallelTrainer, Trainer

from tests.cases import first_fast
from tests.models import perceptron
from tests.reference_training import squared_error

# torch's compiler silences this one itself, but not where several threads compile at once.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

compiled = functools.partial(torch.compile, backend="eager")


def plain_model(seed=0):
    return perceptron(2, 3, 1, seed=seed, dtype=torch.float32)


def in_place(model):
    model.compile(backend="eager")
    return model


def a_part(model):
    model[0] = compiled(model[0])
    return model


WAYS = {"torch.compile": compiled, "model.compile": in_place, "a part": a_part}
NAMES = ["0.bias", "0.weight", "2.bias", "2.weight"]


def loader():
    x = torch.linspace(-1, 1, 16).reshape(8, 2)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def train_save_and_load(way, folder, **kwargs):
    model = WAYS[way](plain_model())
    with Trainer(seed=0, progress=False, **kwargs) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer.fit(model, optimizer, loader(), step=squared_error, checkpoint=folder / "run")
        trainer.save_model(model, folder / "model.pt")
        trainer.export(model, folder / "model.safetensors")
        trained = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
        found = [sorted(torch.load(folder / "model.pt", weights_only=True))]
        found.append(sorted(load_file(folder / "model.safetensors")))
        same = []
        for fresh in (plain_model(1), WAYS[way](plain_model(2))):
            trainer.load_model(fresh, folder / "model.pt")
            trainer.load_model(fresh, max((folder / "run").glob("step-*")))
            loaded = trainer.session.model_state(fresh)
            same.append(all(torch.equal(t, loaded[n]) for n, t in trained.items()))
        return trainer.selection.chosen.name, [sorted(trained), *found], same


PLACES = {
    "single": {"devices": "cpu"},
    "tuple": {"devices": ["cpu", "cpu"], "backend": "tuple"},
    "dp-gather": {"devices": ["cpu", "cpu"], "backend": "dp-gather"},
}


@pytest.mark.parametrize("way", first_fast(WAYS, 3))
@pytest.mark.parametrize("backend", PLACES)
def test_names_are_plain_in_every_file(tmp_path, way, backend):
    name, names, same = train_save_and_load(way, tmp_path, **PLACES[backend])
    assert name == backend
    assert names == [NAMES] * 3
    assert same == [True, True]


@pytest.mark.slow
def test_names_are_plain_on_ranks(tmp_path):
    for name, names, same in run_ranks(
        functools.partial(train_save_and_load, "torch.compile", devices="cpu"), 2, tmp_path
    ):
        assert name == "ddp"
        assert names == [NAMES] * 3
        assert same == [True, True]


def test_a_file_with_the_names_of_a_compiled_model_is_loaded_too(tmp_path):
    torch.save(compiled(plain_model()).state_dict(), tmp_path / "model.pt")
    fresh = plain_model(1)
    with Trainer(devices="cpu") as trainer:
        trainer.load_model(fresh, tmp_path / "model.pt")
    assert torch.equal(fresh[2].weight, plain_model()[2].weight)


def test_the_smaller_face_saves_plain_names_too(tmp_path):
    trainer = ParallelTrainer(False, {"n_gpus": 1, "device": "cpu"})
    trainer.save_model({"epoch": 1}, trainer.model_parallel(compiled(plain_model())), tmp_path / "model.pt")
    assert sorted(torch.load(tmp_path / "model.pt", weights_only=True)["state_dict"]) == NAMES
