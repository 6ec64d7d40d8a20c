"""Metrics and predictions of a model that is split over ranks are those of the whole one."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks

from tests.models import perceptron

pytestmark = pytest.mark.slow


network = functools.partial(perceptron, 6, 8, 2)


def data():
    x = torch.randn(43, 6, generator=torch.Generator().manual_seed(0)).double()
    return TensorDataset(x, (x.sum(1) > 0).long())


def step(model, batch):
    return {"f1": (batch[1], model(batch[0]).argmax(1)), "sum": batch[1]}


class Sum:
    """Counts what comes twice."""

    def reset(self):
        self.total = self.samples = 0

    def update(self, rows):
        self.total, self.samples = self.total + int(rows.sum()), self.samples + len(rows)

    def compute(self):
        return {"total": self.total, "samples": self.samples}


def on_a_rank(group_size):
    import tp_shard as ts
    from sklearn.metrics import f1_score
    from tp_trainer import FunctionMetric, Trainer

    ts.distributed.init_process_group(group_size)
    convert = ts.nn.ParallelLinear.convert_parallel_linear
    model = network()
    model[0], model[2] = convert(model[0], 1), convert(model[2], 0)
    loader = DataLoader(data(), batch_size=2)
    with Trainer(seed=4, progress=False) as trainer:
        metrics = {"f1": FunctionMetric(f1_score), "sum": Sum()}
        found = trainer.evaluate(model, loader, step=step, metrics=metrics)
        classes = trainer.predict(model, loader, lambda m, b: m(b[0]).argmax(1)).collect()
        return trainer.selection.chosen.name, found, classes


@pytest.mark.parametrize(("processes", "group_size"), [(2, -1), (4, 2)])
def test_metrics_and_predictions_of_shards_are_those_of_the_whole(processes, group_size):
    from sklearn.metrics import f1_score

    x, y = data().tensors
    with torch.no_grad():
        expected = network()(x).argmax(1)
    for name, found, classes in run_ranks(on_a_rank, processes, group_size):
        assert name == "shard"
        assert found == {
            "f1": pytest.approx(f1_score(y, expected)),
            "sum/total": int(y.sum()),
            "sum/samples": len(y),
        }
        assert torch.equal(classes, expected)
