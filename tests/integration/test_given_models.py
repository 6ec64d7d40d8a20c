"""Models that others have sharded or prepared: taken over with equal numbers, or refused in words."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, ModelError
from tp_testing import RankPool, run_ranks
from tp_trainer import Trainer

TOKENS = torch.randint(32, (12, 6), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def size(request):
    return request.param


@pytest.fixture(scope="module")
def pool(size):
    ranks = RankPool(size)
    yield ranks
    ranks.close()


def step(model, batch):
    return model(input_ids=batch[0], labels=batch[0]).loss


def load(folder, **arguments):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)


def fit(trainer, model, epochs=1, checkpoint=None, resume=None):
    """Train, clipped; return the losses and the whole weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    history = trainer.fit(
        model,
        optimizer,
        DataLoader(TensorDataset(TOKENS), batch_size=4),
        step=step,
        epochs=epochs,
        clip_norm=0.5,
        checkpoint=checkpoint,
        resume=resume,
    )
    state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    return [record.train["loss"] for record in history], state


def trainer_of(backend="auto"):
    return Trainer(backend=backend, devices="cpu", seed=2, progress=False)


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-3, atol=2e-5)


def by_fully_shard(folder, size):
    from torch.distributed.fsdp import fully_shard

    model = load(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def by_fully_shard_in_copies(folder, size):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
    model = load(folder)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_transformers(folder, size):
    from transformers.distributed import DistributedConfig

    return load(folder, distributed_config=DistributedConfig(fsdp_size=size))


def taken_over(make, folder, checkpoint):
    """Train a model that comes sharded, go on from its checkpoint, and export it."""
    with trainer_of("fsdp") as first:
        first.session.barrier()
        size = first.world_size
        found = []
        for epochs in (1, 2):
            with trainer_of() as trainer:
                model = make(folder, size)
                found = fit(trainer, model, epochs, checkpoint, "auto")
                assert trainer.selection.chosen.name == "fsdp"
                trainer.export(model, checkpoint / "model.safetensors")
        return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [by_fully_shard, by_fully_shard_in_copies, by_transformers])
def test_a_model_that_comes_fully_sharded_is_taken_over(pool, folder, tmp_path, make):
    from safetensors.torch import load_file

    with trainer_of("single") as trainer:
        expected = fit(trainer, load(folder), 2)
    for found in pool.run(taken_over, make, folder, tmp_path):
        assert_same(found, expected)
    exported = load_file(tmp_path / "model.safetensors")
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=1e-3, atol=2e-5)


def by_parallelize_module(folder, size):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = load(folder)
    plan = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer.mlp, init_device_mesh("cpu", (size,)), plan)
    return model


def by_both(folder, size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = load(folder)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {"mlp.gate_proj": ColwiseParallel(use_local_output=False)})
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def by_tp_size(folder, size):
    from transformers.distributed import DistributedConfig

    return load(folder, distributed_config=DistributedConfig(tp_size=size))


def by_tp_plan(folder, size):
    return load(folder, tp_plan="auto")


def by_tp_and_fsdp(folder, size):
    from transformers.distributed import DistributedConfig

    return load(folder, distributed_config=DistributedConfig(tp_size=2, fsdp_size=size // 2))


def by_accelerate(folder, size):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(load(folder))


def refused(make, folder):
    found = []
    with trainer_of("fsdp") as first:
        first.session.barrier()
        model = make(folder, first.world_size)
        for backend in ("auto", "ddp", "fsdp"):
            with trainer_of(backend) as trainer, pytest.raises(ModelError) as caught:
                trainer.prepare(model)
            found.append(str(caught.value))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (by_parallelize_module, "leave those calls out, and give the plain model"),
        (by_both, "leave those calls out, and give the plain model"),
        (by_tp_size, "leave tp_plan and these sizes out"),
        (by_tp_plan, "leave tp_plan and these sizes out"),
        (by_tp_and_fsdp, "leave tp_plan and these sizes out"),
        (by_accelerate, "leave accelerator.prepare() out"),
    ],
)
def test_a_model_that_is_split_or_prepared_otherwise_is_refused(pool, size, folder, make, words):
    # In processes of its own: torch keeps the groups of a mesh that transformers made for an earlier model.
    is_alone = make is by_tp_and_fsdp
    for found in run_ranks(refused, size, make, folder) if is_alone else pool.run(refused, make, folder):
        for message in found:
            assert words in message


@pytest.mark.slow
def test_what_accelerate_has_prepared_is_refused_on_one_device():
    accelerate = pytest.importorskip("accelerate")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DataLoader(torch.ones(4, 2), batch_size=2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    prepared = accelerate.Accelerator(cpu=True).prepare(nn.Linear(2, 1), optimizer, plain, scheduler)
    error = functools.partial(pytest.raises, (ModelError, ConfigError), match="leave accelerator.prepare")
    with trainer_of("single") as trainer:
        for one in prepared:
            with error():
                trainer.prepare(one)
        for one in (
            {"model": prepared[0]},
            {"optimizer": prepared[1]},
            {"train_loader": prepared[2]},
            {"scheduler": prepared[3]},
        ):
            given = {"model": model, "optimizer": optimizer, "train_loader": plain, "step": step, **one}
            with error():
                trainer.fit(**given)
