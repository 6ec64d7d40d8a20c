"""Weights as a file that other libraries read."""

import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_testing import run_ranks
from tp_trainer import Trainer


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a weight that does not lie in one piece."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.mixed = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("seen", torch.tensor(5))

    def forward(self, batch):
        return self.head(self.embedding(batch) @ self.mixed @ self.mixed.t())


def trained(**arguments):
    torch.manual_seed(0)
    model = Tied()
    trainer = Trainer(seed=0, progress=False, devices="cpu", **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.arange(7)), batch_size=4)
    step = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[0])  # noqa: E731
    trainer.fit(model, optimizer, data, step=step)
    return trainer, model


def test_the_file_is_loaded_without_tp(tmp_path):
    trainer, model = trained()
    path = tmp_path / "model.safetensors"
    trainer.export(model, path)
    fresh = Tied()
    assert str(fresh.load_state_dict(load_file(path))) == "<All keys matched successfully>"
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    assert fresh.head.weight is fresh.embedding.weight
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["torch"] == torch.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def export_on_a_rank(folder):
    trainer, model = trained()
    trainer.export(model, folder / "model.safetensors")
    with pytest.raises(OSError, match=r"rank 0 could not write|there is no folder"):
        trainer.export(model, folder / "missing" / "model.safetensors")
    return {name: tensor.tolist() for name, tensor in trainer.session.model_state(model).items()}


def test_ranks_write_one_file_and_learn_of_a_failure_together(tmp_path):
    first, second = run_ranks(export_on_a_rank, 2, tmp_path)
    assert first == second
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == first


def export_with_a_quota(path):
    trainer, model = trained()
    trainer.export(model, path)
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    with pytest.raises(OSError, match="File too large"):
        trainer.export(model, path)
    return path.read_bytes() == before


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path):
    assert run_ranks(export_with_a_quota, 1, tmp_path / "model.safetensors") == [True]
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_path_in_the_place_of_the_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="takes a model first, and then the path, got PosixPath"):
        Trainer(progress=False).export(tmp_path / "model.safetensors", nn.Linear(1, 1))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_a_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    trainer = Trainer(progress=False)
    model = trainer.prepare(nn.Sequential(WithExtraState(1, 1)))
    with pytest.raises(StateError, match=r"'0._extra_state', which is dict"):
        trainer.export(model, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_type_that_such_files_lack_is_refused_by_name(tmp_path):
    trainer = Trainer(progress=False)
    model = trainer.prepare(nn.Linear(1, 1, dtype=torch.complex128))
    with pytest.raises(
        StateError, match=r"no torch\.complex128, which 'weight' is; write it with save_model"
    ):
        trainer.export(model, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
