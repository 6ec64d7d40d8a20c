"""Stages whose tensors are split over ranks train as one device does, and are saved as on every backend."""

import os
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_core.errors import TpError
from tp_core.plugins import Job, registry
from tp_testing import rank_outcomes, run_ranks
from tp_trainer import Checkpoints, Trainer
from tp_trainer._memory import measure_footprint  # private: a trainer's, with its own reserve

from tests.integration import pipeline_families as families

ts = pytest.importorskip("tp_shard")
SPLIT = {"ranks": 2, "weights": "shard"}


def train(name, options=None, **arguments):
    """Train on uneven tokens for two epochs; return losses, weights, and the elements of this rank."""
    if options is None:
        with families.families.all_in_float64():
            return _train(name, "single", {}, **arguments)
    ts.distributed.init_process_group(2)
    try:
        with families.families.all_in_float64():
            return _train(name, "pipeline", {"pipeline": SPLIT | options}, **arguments)
    finally:
        ts.distributed.destroy_process_group()


def _train(name, backend, options, accumulate=1, sequence=False, **arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = families.make_model(name, torch.float64)
    rows = families.rows_of(name, torch.float64)[:13]
    if backend == "pipeline":
        batch = {key: torch.stack([row[key] for row in rows[:2]]) for key in rows[0]}
        model = ts.parallelize(model, ts.plans.auto(model, batch, sequence=sequence, verbose=False))
    model.kind = families.sort_of(name)
    with Trainer(
        backend=backend, devices="cpu", progress=False, seed=0, accumulate=accumulate, options=options
    ) as trainer:
        # Not Adam: it divides the biases of GPT-2's keys, which have no gradient but rounding, by their size.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return families.fit(trainer, model, optimizer, rows, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "accumulate", "sequence"),
    [
        ("llama", {"microbatches": 3}, 1, True),  # between split layers, a rank has a part of the sequence
        ("gpt2", {"schedule": "ZBVZeroBubble", "microbatches": 4}, 2, False),
    ],
)
def test_stages_of_split_tensors_equal_one_device(four, name, options, accumulate, sequence):
    expected = train(name, accumulate=accumulate)
    for found in four.run(partial(train, name, options, accumulate=accumulate, sequence=sequence)):
        families.assert_same(found, expected)
        assert found[2] < 0.4 * expected[2]  # of two stages of two ranks each, and what is tied


@pytest.mark.slow
def test_a_run_of_split_stages_is_resumed_on_one_device_and_back(four, tmp_path):
    def begun(options, folder):
        train("llama", options, checkpoint=Checkpoints(folder, every_steps=1), max_steps=2)

    def ended(options, folder):
        return train("llama", options, checkpoint=Checkpoints(folder, every_steps=1), resume="auto")

    expected = train("llama")[1]
    four.run(begun, {}, str(tmp_path / "there"))
    begun(None, str(tmp_path / "back"))
    for found in [ended(None, str(tmp_path / "there")), *four.run(ended, {}, str(tmp_path / "back"))]:
        torch.testing.assert_close(found[1], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("gpt2", {"schedule": "Interleaved1F1B"})])
def test_eight_ranks_divide_samples_stages_and_tensors(name, options):
    expected = train(name)
    for found in run_ranks(partial(train, name, {"microbatches": 2} | options), 8, timeout_s=280):
        families.assert_same(found, expected)


def refused(options, groups, **more):
    """Return what is said of options, and how many steps began."""
    torch.set_num_threads(1)
    began = []
    compile_model = more.pop("compile", False)
    ts.distributed.init_process_group(groups)
    try:
        layers = [torch.nn.Linear(4, 4) for _ in range(4)]
        plan = {"1": ts.Column(), "2": ts.Row()} if groups > 1 or groups == -1 else {"1": ts.Column()}
        model = ts.parallelize(torch.nn.Sequential(*layers), plan)
        settings = {"devices": "cpu", "progress": False, "compile": compile_model}
        with Trainer(backend="pipeline", options={"pipeline": SPLIT | options} | more, **settings) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(torch.ones(8, 4), batch_size=8)
            trainer.fit(model, optimizer, loader, step=lambda m, b: began.append(0) or m(b).mean())
    except TpError as error:
        return str(error), len(began)
    finally:
        ts.distributed.destroy_process_group()
    return "nothing", len(began)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "groups", "more", "message"),
    [
        ({"data": "fsdp"}, 2, {}, "shares whole weights over data ranks, and weights='shard' splits them"),
        ({"ranks": -1}, -1, {}, "splits tensors over all 4 ranks"),
        ({"cuts": ["1", "2"]}, 2, {}, "names 2 modules .* need 1"),
        (
            {},
            2,
            {"shard": {"data": "fsdp"}},
            "is to shard them over data ranks",
        ),
        ({"ranks": 3}, 2, {}, "are not a multiple of it"),
        ({}, 2, {"compile": True}, "compile= does not go with weights='shard'"),
    ],
)
def test_what_split_stages_do_not_go_with_is_refused_on_all_ranks(four, options, groups, more, message):
    for text, steps in four.run(partial(refused, options, groups, **more)):
        with pytest.raises(TpError, match=message):
            raise TpError(text)
        assert steps == 0


def test_ranks_that_split_tensors_keep_the_samples_of_their_group():
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
    batch = torch.zeros(64, 32)
    footprint = measure_footprint(model, torch.optim.SGD(model.parameters()), batch, lambda m, b: m(b).sum())
    (backend,) = (c.item for c in registry.backends() if c.item.name == "pipeline")
    needs = []
    for weights, ranks in (("whole", 4), ("shard", 8)):  # two copies of the model each
        job = Job(
            devices=(torch.device("cpu"),),
            environment=LaunchEnvironment(world_size=ranks, local_world_size=ranks),
            model=model,
            options={"pipeline": {"ranks": 2, "weights": weights}, "shard": {"group_size": 2}},
            footprint=footprint,
        )
        needs.append(backend.estimate_memory(job))
    whole, split = needs
    assert split.weights == whole.weights  # the model has this rank's part of its tensors
    weight = model[0].weight.nbytes  # the gradient that is made beside the sum of the micro-batches before
    assert split.activations - weight == pytest.approx(2 * (whole.activations - weight), rel=0.01)


def trained_apart():
    """Return what is said where the ranks of a stage change the gradient of a whole layer by themselves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ts.distributed.init_process_group(2)
    try:
        layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        model = ts.parallelize(torch.nn.Sequential(*layers), {"0": ts.Column(), "2": ts.Row()})
        rank = torch.distributed.get_rank()
        model[3].weight.register_hook(lambda grad: grad * (1 + rank))
        options = {"pipeline": SPLIT | {"cuts": ["3"]}}
        with Trainer(backend="pipeline", devices="cpu", progress=False, options=options) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(torch.randn(8, 4), batch_size=8)
            trainer.fit(model, optimizer, loader, step=lambda m, b: m(b).square().mean())
    except TpError as error:
        return str(error)
    finally:
        ts.distributed.destroy_process_group()
    return "nothing"


@pytest.mark.slow
def test_gradients_that_differ_in_a_stage_are_an_error_on_all_ranks(four):
    for text in four.run(trained_apart):
        assert "of a copy have different gradients of 3.weight" in text, text


class FaultError(LookupError):
    pass


def fails_alone(folder):
    """Let one rank of the first stage fail in its second run, where the other one waits for its part."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, calls = int(os.environ["RANK"]), []
    ts.distributed.init_process_group(2)
    kinds = {str(i): ts.Row() if i % 2 else ts.Column() for i in range(4)}
    model = ts.parallelize(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in kinds)), kinds)

    def fault(*_):
        calls.append(0)
        if rank == 1 and len(calls) == 4:  # one on stand-ins, two in the first batch
            Path(folder, "began").write_text(str(time.time()))
            raise FaultError("the sample is bad")

    model[1].register_forward_pre_hook(fault)
    loader = DataLoader(torch.ones(8, 4), batch_size=4)
    options = {"pipeline": SPLIT | {"microbatches": 2}}
    with Trainer(backend="pipeline", devices="cpu", progress=False, options=options) as trainer:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(model, optimizer, loader, step=lambda m, b: m(b).mean())
        finally:
            Path(folder, str(rank)).write_text(str(time.time()))


@pytest.mark.slow
def test_a_rank_that_fails_alone_in_a_split_stage_ends_all_with_its_cause(tmp_path):
    outcomes = rank_outcomes(fails_alone, 4, str(tmp_path), timeout_s=120)
    began = float((tmp_path / "began").read_text())
    assert "FaultError: the sample is bad" in outcomes[1].error
    assert "rank 1 has failed in its stages: FaultError: the sample is bad" in outcomes[0].error
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, str(outcome)
        assert float((tmp_path / str(rank)).read_text()) - began < 15
