"""Stages whose weights data ranks share train as one device does, and are saved as on every backend."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Trainer, checkpoint_activations
from tp_trainer.callbacks import ExponentialMovingAverage

from tests.integration import pipeline_families as families
from tests.models import Block

SHARED = {"ranks": 2, "data": "fsdp"}


def train(name, backend, options=None, **arguments):
    """Train on uneven tokens for two epochs; return losses, weights, and the elements of this rank."""
    with families.families.all_in_float64():
        return _train(name, backend, options, **arguments)


def _train(name, backend, options, accumulate=1, **arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = families.make_model(name, torch.float64)
    model.kind = families.sort_of(name)
    given = {} if options is None else {"options": {backend: options}}
    rows = families.rows_of(name, torch.float64)[:13]  # the last batch has 3 rows for one rank, 2 for another
    with Trainer(
        backend=backend, devices="cpu", progress=False, seed=0, accumulate=accumulate, **given
    ) as trainer:
        # With its usual eps AdamW makes updates of the rounding of gradients that are all but zero.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        return families.fit(trainer, model, optimizer, rows, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "accumulate"),
    [("gpt2", {"microbatches": 3}, 1), ("llama", {"schedule": "Interleaved1F1B", "microbatches": 4}, 2)],
)
def test_shared_weights_equal_those_of_one_device(four, name, options, accumulate):
    expected = train(name, "single", accumulate=accumulate)
    found = four.run(partial(train, name, "pipeline", SHARED | options, accumulate=accumulate))
    for one in found:
        families.assert_same(one, expected)
        assert one[2] < 0.4 * expected[2]  # of two stages with two data ranks each, and what is tied


@pytest.mark.slow
def test_a_run_with_shared_weights_is_resumed_on_one_device_and_back(four, tmp_path):
    def begun(backend, folder, options=None):
        return train("llama", backend, options, checkpoint=Checkpoints(folder, every_steps=1), max_steps=2)

    def ended(backend, folder, options=None):
        return train("llama", backend, options, checkpoint=Checkpoints(folder, every_steps=1), resume="auto")

    expected = train("llama", "single")[1]
    four.run(begun, "pipeline", str(tmp_path / "there"), SHARED)
    begun("single", str(tmp_path / "back"))
    resumed = [ended("single", str(tmp_path / "there"))]
    resumed += four.run(ended, "pipeline", str(tmp_path / "back"), SHARED)
    for found in resumed:
        torch.testing.assert_close(found[1], expected, rtol=1e-9, atol=1e-10)


def train_layers(case, data=None):
    """Train four layers in one way, in stages if ``data`` is given; return losses and weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(6, 10) for _ in range(4)))
    if "recomputed" in case:
        checkpoint_activations(model, Block)
    if "adapters" in case:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
        model = get_peft_model(model, adapters)
    arguments = {"precision": f"{case[:4]}-mixed"} if case.startswith(("bf16", "fp16")) else {}
    if case == "compiled":
        arguments["compile"] = "blocks"
    if data is not None:
        schedule = "ZBVZeroBubble" if "zero bubble" in case else "1F1B"
        options = {"pipeline": {"ranks": 2, "data": data, "schedule": schedule}}
        arguments |= {"backend": "pipeline", "options": options}
    rows = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(*rows), batch_size=8)
    with Trainer(devices="cpu", progress=False, seed=0, **arguments) as trainer:
        history = trainer.fit(
            model,
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01),
            loader,
            step=lambda m, b: F.mse_loss(m(b[0]), b[1]),
            validation=loader,
            epochs=2,
            clip_norm=0.5,
            callbacks=[ExponentialMovingAverage(0.5)] if "averaged" in case else [],
        )
        state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    return [loss for record in history for loss in (record.train["loss"], record.val["loss"])], state


def train_in_both_ways(cases):
    """Return the outcomes of each case, of data ranks with whole weights and with rows of them."""
    return [[train_layers(case, data) for data in ("ddp", "fsdp")] for case in cases]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(["bf16 averaged", "fp16 adapters", "recomputed zero bubble"], marks=pytest.mark.slow),
        pytest.param(["compiled"], marks=pytest.mark.nightly),
    ],
    ids=["eager", "compiled"],
)
def test_rows_of_weights_train_as_whole_ones_in_each_way(four, cases):
    for case, (whole, of_rows) in zip(cases, four.run(train_in_both_ways, cases)[0], strict=True):
        torch.testing.assert_close(of_rows, whole, rtol=1e-6, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        if case != "compiled":  # which takes long
            # Half precision rounds the gradients of micro-batches.
            tolerance = 1e-3 if "16" in case else 1e-6
            torch.testing.assert_close(whole, train_layers(case), rtol=tolerance, atol=tolerance)


class Bounded(nn.Linear):
    """Bounds its weight in forward, which each rank does with all of its rows."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.data.clamp_(-0.1, 0.1)
        return x + super().forward(x)


def train_bounded(backend, options=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Bounded(6, 6) for _ in range(4))).double()
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = None if options is None else {backend: options}
    with Trainer(backend=backend, devices="cpu", progress=False, seed=0, options=options) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = partial(_error_of_sum, limit=1.0)
        trainer.fit(model, optimizer, DataLoader(TensorDataset(x), batch_size=8), step=step, epochs=2)
        return trainer.session.model_state(model)


def _error_of_sum(model, batch, *, limit):
    return (model(batch[0]).sum(1) - limit).square().mean()


@pytest.mark.slow
def test_rows_that_forward_writes_through_data_are_kept(four):
    expected = train_bounded("single")
    for found in four.run(train_bounded, "pipeline", SHARED | {"microbatches": 1}):
        torch.testing.assert_close(found, expected)


class Sorted(nn.Module):
    """A layer with an expert for each kind of row, after which rows of kind 0 take a branch."""

    def __init__(self):
        super().__init__()
        self.layer = Block(6, 10)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, kinds):
        x = self.layer(x)
        for kind, expert in enumerate(self.experts):
            rows = (kinds == kind).nonzero()[:, 0]
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]))
        return x


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Sorted() for _ in range(4))
        self.branches = nn.ModuleList(Block(6, 10) for _ in range(2))

    def forward(self, x, kinds):
        for number, layer in enumerate(self.layers):
            x = layer(x, kinds)
            if number % 2 and bool((kinds == 0).any()):
                x = torch.where((kinds == 0)[:, None], self.branches[number // 2](x), x)
        return x


def train_branched(is_evaluated=False, **arguments):
    """Train on rows of which each data rank has another kind; return losses, weights and the last norm."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Branched().double()
    rows = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kinds = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).repeat(3)
    loader = DataLoader(TensorDataset(*rows, kinds), batch_size=8)

    def step(model, batch):
        return F.mse_loss(model(batch[0], batch[2]), batch[1])

    with Trainer(devices="cpu", progress=False, seed=0, **arguments) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        if is_evaluated:  # of one row, so that one data rank has none of it
            one = DataLoader(TensorDataset(*rows[:, :1], kinds[:1]), batch_size=1)
            losses.append(trainer.evaluate(model, one, step=step)["loss"])
        history = trainer.fit(model, optimizer, loader, step=step, epochs=2, clip_norm=0.5)
        losses += [record.train["loss"] for record in history]
        return losses, {n: t.clone() for n, t in trainer.session.model_state(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
@pytest.mark.parametrize("is_evaluated", [False, True], ids=["", "evaluated"])
def test_data_ranks_that_use_other_weights_train_as_one_device(four, data, is_evaluated):
    expected = train_branched(is_evaluated, backend="single")
    options = {"pipeline": {"ranks": 2, "data": data, "microbatches": 2, "timeout_s": 20}}
    run = partial(train_branched, is_evaluated, backend="pipeline", options=options)
    for found in four.run(run):
        families.assert_same(found, expected)
