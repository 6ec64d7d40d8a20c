"""What the trainer saved tp-shard's own functions load, and the other way round."""

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StateError
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.models import perceptron


def make_model(seed=0):
    model = perceptron(4, 9, 4, seed=seed)
    if torch.distributed.is_initialized():
        convert = ts.nn.ParallelLinear.convert_parallel_linear
        model[0], model[2] = convert(model[0], 1), convert(model[2], 0)
    return model


def make_optimizer(model, lr):
    return torch.optim.Adam(list(model.parameters())[::-1] if lr == 1 else model.parameters(), lr=lr)


def on_rank(check, *args):
    ts.distributed.init_process_group()
    return check(*args)


def start(check, processes, *args):
    """Run a check on ranks that hold a model together, or in this process alone."""
    return [check(*args)] if processes == 1 else run_ranks(on_rank, processes, check, *args)


def step(model, batch):
    return (model(batch[0]) - batch[0]).square().mean()


def train(folder):
    """Train, with a checkpoint by the trainer and one by tp-shard; return all that was saved, whole."""
    model = make_model()
    optimizer = make_optimizer(model, 0.02)
    loader = DataLoader(TensorDataset(torch.randn(8, 4, generator=torch.Generator()).double()), batch_size=4)
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        trainer.fit(model, optimizer, loader, step=step, checkpoint=folder / "run")
        ts.save_sharded(model, folder / "own", optimizer=optimizer)
        return whole(model, optimizer)


def whole(model, optimizer):
    state = ts.collect_state_dict(model, model.state_dict())
    names = {id(p): n for n, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    kept = ts.collect_optimizer_state_dict(model, optimizer)
    entries = {f"{order[i]}.{k}": v for i, entry in kept["state"].items() for k, v in entry.items()}
    return dict(state), entries, [group["lr"] for group in kept["param_groups"]]


def load(path):
    model = make_model(seed=1)
    optimizer = make_optimizer(model, 1)  # the other way round
    ts.load_sharded(model, path, optimizer=optimizer)
    return whole(model, optimizer)


def load_by_trainer(path):
    model = make_model(seed=2)
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        trainer.load_model(model, path)
        return trainer.session.model_state(model)


def load_all(paths):
    return [(load(path), load_by_trainer(path)) for path in paths]


def equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.nightly),
    ],
)
def test_each_reads_what_the_other_wrote_on_any_number_of_ranks(tmp_path, writers, readers):
    state, entries, rates = start(train, writers, tmp_path)[0]
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    for of_rank in start(load_all, readers, [checkpoint, tmp_path / "own"]):
        for (found, found_entries, found_rates), by_trainer in of_rank:
            equal(found, state)
            equal(found_entries, entries)
            assert found_rates == rates == [0.02]
            equal(by_trainer, state)


def compiled_on_ranks(folder):
    ts.distributed.init_process_group()
    model = torch.compile(make_model(), backend="eager")
    ts.save_sharded(model, folder / "own")
    ts.export(model, folder / "model.safetensors")
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        trainer.save_model(model, folder / "model.pt")
        trainer.load_model(model, folder / "model.pt")
        fresh = make_model(seed=1)
        trainer.load_model(fresh, folder / "model.pt")
        return trainer.session.model_state(fresh)


@pytest.mark.slow
def test_a_compiled_split_model_is_saved_under_plain_names(tmp_path):
    from safetensors.torch import load_file

    expected = make_model().state_dict()
    for found in run_ranks(compiled_on_ranks, 2, tmp_path):
        equal(dict(expected), found)
    equal(load_file(tmp_path / "model.safetensors"), dict(expected))
    equal(torch.load(tmp_path / "model.pt", weights_only=True), dict(expected))
    fresh = make_model(seed=3)
    ts.load_sharded(fresh, tmp_path / "own")
    equal(dict(fresh.state_dict()), dict(expected))


def test_a_damaged_folder_is_refused_by_a_trainer_too(tmp_path):
    model = nn.Linear(3, 2)
    ts.save_sharded(model, tmp_path)
    (data,) = tmp_path.glob("*.safetensors")
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 1
    data.write_bytes(changed)
    with Trainer(devices="cpu", progress=False) as trainer:
        with pytest.raises(StateError, match=r"damaged: __0_0\.safetensors is not what was written"):
            trainer.load_model(model, tmp_path)
        (tmp_path / "digests.json").unlink()
        with pytest.raises(StateError, match=r"has no digests\.json"):
            trainer.load_model(model, tmp_path)
