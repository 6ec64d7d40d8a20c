"""Stages whose tensors are split over ranks train as one device does, and are saved as on every backend."""

import pickle
import warnings
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader
from tp_core.errors import TpError
from tp_core.testing import RankPool, run_ranks
from tp_trainer import Checkpoints, Trainer

from tests.integration import pipeline_families as families

ts = pytest.importorskip("tp_shard")
SPLIT = {"ranks": 2, "weights": "shard"}


@pytest.fixture(scope="module")
def four():
    with RankPool(4) as ranks:
        yield ranks


def train(name, options=None, **arguments):
    """Train on uneven tokens for two epochs; return losses, weights, and the elements of this rank."""
    pickle.dumps(torch.zeros(1))  # torch's table of types must be made before they have other names
    if options is None:
        with families.families.all_in_float64():
            return _train(name, "single", {}, **arguments)
    ts.distributed.init_process_group(2)
    try:
        with families.families.all_in_float64():
            return _train(name, "pipeline", {"pipeline": SPLIT | options}, **arguments)
    finally:
        ts.distributed.destroy_process_group()


def _train(name, backend, options, accumulate=1, step=families.step, **arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = families.make_model(name, torch.float64)
    rows = families.rows_of(name, torch.float64)[:13]
    if backend == "pipeline":
        batch = {key: torch.stack([row[key] for row in rows[:2]]) for key in rows[0]}
        model = ts.parallelize(model, ts.plans.auto(model, batch, verbose=False))
    model.kind = families.sort_of(name)
    with Trainer(
        backend=backend, devices="cpu", progress=False, seed=0, accumulate=accumulate, options=options
    ) as trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        history = trainer.fit(
            model,
            optimizer,
            DataLoader(rows, batch_size=8),
            step=step,
            validation=DataLoader(rows[:5], batch_size=4),
            epochs=2,
            clip_norm=0.5,
            **arguments,
        )
        state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
        kept = sum(v.numel() for one in optimizer.state.values() for v in one.values() if v.dim())
        losses = [loss for record in history for loss in (record.train["loss"], record.val["loss"])]
    return losses, state, kept


def assert_same(found, expected, tolerance=1e-12):
    assert families.families.difference(found[:2], expected[:2]) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "accumulate"),
    [("llama", {"microbatches": 3}, 1), ("gpt2", {"schedule": "ZBVZeroBubble", "microbatches": 4}, 2)],
)
def test_stages_of_split_tensors_equal_one_device(four, name, options, accumulate):
    expected = train(name, accumulate=accumulate)
    for found in four.run(partial(train, name, options, accumulate=accumulate)):
        assert_same(found, expected)
        assert found[2] < 0.4 * expected[2]  # of two stages of two ranks each, and what is tied
