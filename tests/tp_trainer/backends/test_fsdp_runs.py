"""Whole runs on shards: resumed on other backends and numbers of ranks, averaged, compiled, refused."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import TpError
from tp_core.jobs import CompileOptions
from tp_testing import run_ranks
from tp_trainer import Checkpoints, FsdpOptions, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage, StochasticWeightAveraging

from tests.models import Block, BlockNet
from tests.reference_training import rows_and_sums, squared_error

pytestmark = pytest.mark.slow


def loader(samples=22, dtype=torch.float64):
    return DataLoader(rows_and_sums(samples, seed=3, dtype=dtype, curved=True), batch_size=4, shuffle=True)


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def fit(backend="fsdp", *, options=None, trainer=None, dtype=torch.float64, run=squared_error, **arguments):
    """Return the losses and the whole state after training."""
    model = BlockNet(dtype)
    kwargs = {"devices": "cpu", "seed": 2, "progress": False, "options": options, **(trainer or {})}
    with Trainer(backend=backend, **kwargs) as it:
        arguments = {"epochs": 2, "validation": loader(5, dtype), **arguments}
        history = it.fit(model, adam(model), loader(dtype=dtype), step=run, **arguments)
        state = {n: t.clone() for n, t in it.session.model_state(model).items()}
        return [(r.train["loss"], r.val["loss"]) for r in history], state


def assert_close(found, expected, *, rtol=1e-8, atol=1e-10):
    for record, wanted in zip(found[0], expected[0], strict=True):
        assert record == pytest.approx(wanted, rel=rtol)
    assert list(found[1]) == list(expected[1])
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=rtol, atol=atol)


# -- resumed elsewhere ------------------------------------------------------------------------------


def start(processes, run):
    return [run()] if processes == 1 else run_ranks(run, processes)


@pytest.mark.parametrize(
    "ways",
    [
        [(2, "fsdp"), (4, "fsdp"), (1, "single"), (2, "fsdp")],
        pytest.param(
            [(2, "fsdp"), (2, "ddp"), (3, "fsdp"), (3, "ddp"), (2, "fsdp")], marks=pytest.mark.nightly
        ),
    ],
)
def test_another_backend_or_number_of_ranks_goes_on_each_time(tmp_path, ways):
    expected = fit("single", epochs=len(ways))
    for epochs, (processes, backend) in enumerate(ways, 1):
        checkpoint = Checkpoints(tmp_path, every_epochs=1)
        run = functools.partial(fit, backend, epochs=epochs, checkpoint=checkpoint, resume="auto")
        for found in start(processes, run):
            assert len(found[0]) == epochs
    assert_close(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [FsdpOptions(replicas=2), FsdpOptions(reshard_after_forward=False)])
def test_as_many_ranks_go_on_bit_for_bit(tmp_path, options):
    whole = run_ranks(functools.partial(fit, options=options, epochs=3), 4)
    checkpointed = functools.partial(fit, options=options, checkpoint=tmp_path, resume="auto")
    run_ranks(functools.partial(checkpointed, epochs=1), 4)
    for found, expected in zip(run_ranks(functools.partial(checkpointed, epochs=3), 4), whole, strict=True):
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


# -- averages ---------------------------------------------------------------------------------------


def averaged(backend="fsdp", folder=None, epochs=3, swa=False):
    average = StochasticWeightAveraging(1) if swa else ExponentialMovingAverage(0.8)
    resumed = {} if folder is None else {"checkpoint": folder, "resume": "auto"}
    model = BlockNet()
    with Trainer(backend=backend, devices="cpu", seed=2, progress=False) as it:
        history = it.fit(
            model,
            adam(model),
            loader(),
            step=squared_error,
            epochs=epochs,
            validation=loader(5),
            callbacks=[average],
            **resumed,
        )
        with average.in_place_of(model):
            state = {n: t.clone() for n, t in it.session.model_state(model).items()}
    return [(r.train["loss"], r.val["loss"]) for r in history], state


def averaged_in_two_runs(folder, swa):
    averaged(folder=folder, epochs=1, swa=swa)
    return averaged(folder=folder, swa=swa)


@pytest.mark.parametrize("swa", [False, True])
def test_an_average_is_that_of_the_whole_model_resumed_too(two_ranks, tmp_path, swa):
    expected = averaged("single", swa=swa)
    whole = two_ranks.run(functools.partial(averaged, swa=swa))
    for found in [*whole, *two_ranks.run(averaged_in_two_runs, tmp_path, swa)]:
        assert_close(found, expected)


# -- compiled, in lower precision -------------------------------------------------------------------


def compiled(options):
    """Train with aot_eager, which tests the place of the compiler; inductor would take many seconds."""
    compiler = CompileOptions(backend="aot_eager")
    return fit(options=options, trainer={"compile": compiler}, clip_norm=0.5)


def test_several_units_are_compiled_each(two_ranks):
    run = functools.partial(compiled, FsdpOptions(units=Block))
    expected = fit("single", clip_norm=0.5)
    for found in two_ranks.run(run):
        assert_close(found, expected)


@pytest.mark.nightly
def test_copies_of_shards_are_compiled_too():
    run = functools.partial(compiled, FsdpOptions(units=Block, replicas=2))
    expected = fit("single", clip_norm=0.5)
    for found in run_ranks(run, 4):
        assert_close(found, expected)


def small_step(model, batch):
    """Return a loss that no scale makes too large for a gradient in fp16."""
    return squared_error(model, batch) / 100


@pytest.mark.parametrize("precision", ["fp16-mixed", "bf16-mixed"])
def test_lower_precision_over_several_units_leads_close_and_alike_on_all_ranks(two_ranks, precision):
    arguments = {"trainer": {"precision": precision}, "dtype": torch.float32, "run": small_step}
    expected = fit("single", **arguments)
    found = two_ranks.run(functools.partial(fit, options=FsdpOptions(units=Block), **arguments))
    for mine in found:
        assert_close(mine, expected, rtol=0.05, atol=0.03)
        assert all(torch.equal(mine[1][name], tensor) for name, tensor in found[0][1].items())


# -- refused ----------------------------------------------------------------------------------------


def refusal(make):
    """Return what a run is told, of which ``make`` makes the model and the optimizer."""
    with Trainer(devices="cpu", seed=2, progress=False, **make[2]) as it:
        it.session.barrier()
        model = make[0]()
        optimizer = make[1](model)
        with pytest.raises(TpError) as caught:
            it.fit(model, optimizer, loader(), step=squared_error)
    return type(caught.value).__name__, str(caught.value)


def of_another_model(model):
    return torch.optim.SGD([*model.parameters(), *BlockNet().parameters()], lr=0.1)


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_an_optimizer_with_a_parameter_of_another_model_is_refused(two_ranks, backend):
    for kind, message in two_ranks.run(refusal, (BlockNet, of_another_model, {"backend": backend})):
        assert kind == "ConfigError"
        assert "is not the model's" in message


def in_the_first_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(nn.Linear(3, 1).double(), device_id=torch.device("cpu"))


def with_an_inner_first_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = BlockNet()
    model.into = FullyShardedDataParallel(model.into, device_id=torch.device("cpu"))
    return model


@pytest.mark.parametrize("make", [in_the_first_fsdp, with_an_inner_first_fsdp])
@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_a_model_in_torchs_first_fsdp_is_refused(two_ranks, backend, make):
    for kind, message in two_ranks.run(refusal, (make, adam, {"backend": backend})):
        assert kind in {"ModelError", "SelectionError"}
        assert "FullyShardedDataParallel" in message


def sharded_alone():
    from torch.distributed.fsdp import fully_shard

    return fully_shard(BlockNet())


def test_a_model_that_is_fully_sharded_is_refused_by_ddp(two_ranks):
    for _, message in two_ranks.run(refusal, (sharded_alone, adam, {"backend": "ddp"})):
        assert "DTensor" in message


def test_one_process_refuses_what_several_have_sharded():
    def sharded():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return refusal((sharded_alone, adam, {"backend": "single"}))

    ((_, message),) = run_ranks(sharded, 1)
    assert "the plain model" in message


# -- models without a forward ------------------------------------------------------------------------


def fit_parts(backend):
    """Train a module that only holds others, which the step calls."""

    def step(model, batch):
        hidden = torch.tanh(model["body"](batch[0]))
        return (model["heads"][0](hidden) - batch[1]).square().mean()

    torch.manual_seed(1)
    heads = nn.ModuleList([nn.Linear(5, 1)])
    model = nn.ModuleDict({"body": nn.Linear(3, 5), "heads": heads}).double()
    with Trainer(backend=backend, devices="cpu", seed=2, progress=False) as trainer:
        trainer.fit(model, adam(model), loader(), step=step, epochs=2)
        return trainer.session.model_state(model)


def test_modules_that_hold_others_are_trained():
    expected = fit_parts("single")
    for found in run_ranks(functools.partial(fit_parts, "fsdp"), 2):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
