"""What of a batch has a row for each sample: tensors, and what is declared; what is unclear is refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate
from tp_core.errors import ConfigError
from tp_trainer import Trainer

N = 8
"""Samples of a batch, features and classes."""


class Weighted(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(N, N) for _ in range(4)))


def collate(items):
    """Return a batch with values that are as long as it, and have no rows or are no tensors."""
    batch = default_collate(items)
    names = [f"row {int(y)}" for y in batch["y"]]
    return batch | {
        "weights": torch.arange(1.0, N + 1).double(),
        "names": names,
        "one": torch.ones(1, N).double(),
    }


def without(*keys):
    def collate_some(items):
        return {key: value for key, value in collate(items).items() if key not in keys}

    return collate_some


def sequence_first(items):
    return {"x": torch.stack([item["x"] for item in items], 1)}


def step(model, batch):
    weights = batch.get("weights", torch.ones(N).double())
    logits = model(batch["x"] * batch.get("one", 1.0))
    loss = nn.functional.cross_entropy(logits, batch["y"], weights)
    rows = len(batch["names"]) if "names" in batch else len(batch["x"])
    return {"loss": loss, "weight": weights[batch["y"]].sum(), "rows": float(rows == len(batch["x"]))}


def train(collate_fn, options, backend="pipeline", batch_size=N):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Weighted().double()
    x = torch.randn(2 * N, N, generator=torch.Generator().manual_seed(1)).double()
    samples = [{"x": each, "y": torch.tensor(i % N)} for i, each in enumerate(x)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = None if options is None else {backend: options}
    try:
        with Trainer(backend=backend, devices="cpu", seed=0, progress=False, options=options) as trainer:
            loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate_fn)
            record = trainer.fit(model, optimizer, loader, step=step, epochs=1)[-1]
            return record.train["loss"], record.train["rows"]
    except ConfigError as error:
        return str(error)


DECLARED = {"broadcast": ("weights", "one"), "samples": "batch.names"}
TWO = {"microbatches": 2}
CASES = {
    "declared": (collate, TWO | DECLARED),
    "a list": (without("weights", "one"), TWO),
    "one row": (without("weights", "names"), TWO),
    "other rows": (without("names", "one"), TWO, "pipeline", N // 2),
    "another dimension": (sequence_first, TWO, "pipeline", N // 2),
}


def train_all():
    return {name: train(*case) for name, case in CASES.items()}


@pytest.mark.slow
def test_values_of_a_batch_are_rows_by_rule_or_declared(pair):
    expected = train(collate, None, "single")
    for found in pair.run(train_all):
        assert found["declared"] == (pytest.approx(expected[0], rel=1e-12), 1.0)
        assert "'batch.names' is a list as long as the batch, which has 8 rows" in found["a list"]
        assert 'options={"pipeline": {"samples": ("batch.names",)}} splits it' in found["a list"]
        assert 'what each micro-batch needs whole is named: options={"pipeline"' in found["one row"]
        assert "got 4 and 8 ('batch.weights': shape (8,))" in found["other rows"]
        assert "batch's samples are not along its dim 0 (the last batch has 4)" in found["another dimension"]
