"""Files that are whole or not there."""

import os
import pickle
import signal

import pytest
import torch
from torch import nn
from tp_core.errors import StateError
from tp_core.state import load_state
from tp_testing import rank_outcomes
from tp_trainer import Trainer


class Holder(nn.Module):
    """Has a value in its state."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("x", torch.arange(3))
        self.value = value

    def get_extra_state(self):
        return self.value


def save(value, path):
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.save_model(Holder(value), path)


def test_what_was_saved_comes_back(tmp_path):
    path = tmp_path / "state.pt"
    save(2, path)
    state = load_state(path)
    assert state["x"].tolist() == [0, 1, 2]
    assert state["_extra_state"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_the_file_has_the_rights_that_the_user_gives_to_files(tmp_path):
    before = os.umask(0o027)
    try:
        save(1, tmp_path / "state.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "state.pt").stat().st_mode & 0o777 == 0o640


class Bomb:
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


def test_a_failure_while_writing_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "state.pt"
    save(1, path)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        save(Bomb(), path)
    assert load_state(path)["_extra_state"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def killed_while_saving(path):
    class Killing:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    save({"x": torch.zeros(1000), "y": Killing()}, path)


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.pt"
    save(1, path)
    (outcome,) = rank_outcomes(killed_while_saving, 1, path)
    assert outcome.exitcode == -9
    assert load_state(path)["_extra_state"] == 1


class Foreign:
    pass


def test_foreign_code_is_not_run(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"x": Foreign()}, path)
    with pytest.raises(StateError, match=r"state.pt cannot be read as saved state"):
        load_state(path)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "state.pt"
    save(torch.zeros(1000), path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(StateError, match=r"state.pt cannot be read"):
        load_state(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"x": 1})])
def test_a_file_of_another_kind_is_named(tmp_path, content):
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"state.pt cannot be read as saved state"):
        load_state(path)


def test_a_file_that_holds_no_dict_is_named(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(StateError, match="holds list, and a state is a dict"):
        load_state(tmp_path / "list.pt")


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "no.pt")


def save_unseeded(path):
    with Trainer() as trainer:
        model = nn.Linear(2, 1)
        prepared = trainer.prepare(model)
        trainer.save_model(prepared, path)
        with torch.no_grad():
            model.weight.zero_()
        trainer.load_model(prepared, path)
        return model.weight.tolist()


def test_ranks_save_once_and_all_of_them_load(two_ranks, tmp_path):
    path = tmp_path / "model.pt"
    first, second = two_ranks.run(save_unseeded, path)
    assert first == second
    model = nn.Linear(2, 1)
    with Trainer() as trainer:
        trainer.load_model(model, path)
    assert model.weight.tolist() == first


def save_nowhere(path):
    with Trainer() as trainer, pytest.raises(OSError, match="there is no folder") as caught:
        trainer.save_model(trainer.prepare(nn.Linear(2, 1)), path)
    return str(caught.value)


def test_every_rank_learns_that_rank_0_could_not_write(two_ranks, tmp_path):
    first, second = two_ranks.run(save_nowhere, tmp_path / "no-such-folder" / "model.pt")
    assert "no-such-folder" in first
    assert "rank 0 could not write" in second
