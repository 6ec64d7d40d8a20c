"""Metrics of the whole set are those of one device, whatever computes them and however it is split."""

import importlib
import itertools
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StepError
from tp_testing import run_ranks
from tp_trainer import FunctionMetric, Trainer

SAMPLES = 83  # 5 batches of 16 and one of 3: uneven over 2 ranks, too few for 4

BACKENDS = [
    pytest.param({"backend": "single", "devices": "cpu"}, id="single"),
    pytest.param({"backend": "tuple", "devices": ["cpu"] * 3}, id="tuple"),
    pytest.param({"backend": "dp-gather", "devices": ["cpu"] * 2}, id="dp-gather"),
]


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator)
    y = (x.sum(1) + torch.randn(SAMPLES, generator=generator) > 0).long()
    return x, y


def network():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def loader(**options):
    return DataLoader(TensorDataset(*data()), batch_size=16, **options)


class Order:
    """Keeps what it is given, to be looked at."""

    def __init__(self):
        self.seen = []

    def update(self, x):
        self.seen.append(x)

    def compute(self):
        return len(self.seen)

    def reset(self):
        self.seen = []


def step(model, batch):
    x, y = batch
    logits = model(x)
    said, score = logits.argmax(1), logits.softmax(1)[:, 1]
    return {
        "loss": nn.functional.cross_entropy(logits, y),
        "accuracy": (said == y).float().mean(),
        "f1": (y, said),
        "auroc": {"y_true": y, "y_score": score},
        "rmse": (y, score),
        "confusion": (y, said),
        "order": x,
    }


def metrics():
    from sklearn.metrics import confusion_matrix, f1_score, mean_squared_error, roc_auc_score

    return {
        "f1": FunctionMetric(partial(f1_score, average="macro")),
        "auroc": FunctionMetric(roc_auc_score),
        "rmse": FunctionMetric(lambda y, p: mean_squared_error(y, p) ** 0.5),
        "confusion": FunctionMetric(lambda y, p: torch.from_numpy(confusion_matrix(y, p))),
        "order": Order(),
    }


def metrics_by_hand():
    """The same for ranks, which would need longer to import scikit-learn than for all else they do."""

    def counts(y, said):
        return np.array([[np.sum((y == a) & (said == b)) for b in (0, 1)] for a in (0, 1)])

    def f1(y, said):
        found = counts(y, said)
        return np.mean(2 * found.diagonal() / (found.sum(0) + found.sum(1)))

    return {
        "f1": FunctionMetric(f1),
        "auroc": FunctionMetric(
            lambda y_true, y_score: np.less.outer(*[y_score[y_true == n] for n in (0, 1)]).mean()
        ),
        "rmse": FunctionMetric(lambda y, p: np.mean((y - p) ** 2.0) ** 0.5),
        "confusion": FunctionMetric(lambda y, p: torch.from_numpy(counts(y, p))),
        "order": Order(),
    }


@cache
def expected():
    """The numbers of scikit-learn."""
    from sklearn.metrics import confusion_matrix, f1_score, mean_squared_error, roc_auc_score

    x, y = data()
    with torch.no_grad():
        logits = network()(x)
    said, score = logits.argmax(1), logits.softmax(1)[:, 1]
    return {
        "loss": nn.functional.cross_entropy(logits, y).item(),
        "accuracy": (said == y).double().mean().item(),
        "f1": f1_score(y, said, average="macro"),
        "auroc": roc_auc_score(y, score),
        "rmse": mean_squared_error(y, score) ** 0.5,
    }, torch.from_numpy(confusion_matrix(y, said))


def check(trainer, loader, right, given):
    found = trainer.evaluate(network(), loader, step=step, metrics=given)
    numbers, matrix = right
    assert torch.equal(found.pop("confusion"), matrix)
    assert found.pop("order") == len(given["order"].seen)
    assert found == pytest.approx(numbers, rel=1e-6)
    assert torch.equal(torch.cat(given["order"].seen), data()[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", BACKENDS)
def test_metrics_are_those_of_scikit_learn_on_the_whole_set(options):
    with Trainer(**options, seed=0, progress=False) as trainer:
        check(trainer, loader(), expected(), metrics())
        check(trainer, loader(), expected(), metrics_by_hand())


def on_a_rank(right, batch_size=16):
    with Trainer(backend="ddp", devices="cpu", seed=0, progress=False) as trainer:
        check(trainer, DataLoader(TensorDataset(*data()), batch_size=batch_size), right, metrics_by_hand())
        # A sampler of the user's own: ranks without a sample of a batch skip it.
        own = DataLoader(TensorDataset(*data()), batch_sampler=Batches())
        assert len(own) > 2 * 16  # more than are exchanged at a time
        check(trainer, own, right, metrics_by_hand())


class Batches:
    """Batches of 4 samples and of 1, which only the first rank meets."""

    def __init__(self):
        sizes = [4, 1] * 16 + [1] * 3
        ends = np.cumsum([0, *sizes])
        self.batches = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        assert ends[-1] == SAMPLES

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def test_metrics_over_ranks_are_those_of_one_device(two_ranks):
    two_ranks.run(on_a_rank, expected())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5, 80])
def test_metrics_over_ranks_are_those_of_one_device_for_other_batches(four, batch_size):
    four.run(on_a_rank, expected(), batch_size)


def with_own_loaders(right, count):
    """Ranks whose loaders have different numbers of batches."""
    with Trainer(backend="ddp", devices="cpu", seed=0, progress=False) as trainer:
        x, y = data()
        bounds = [0, 5, SAMPLES] if count == 2 else [0, 40, 40, SAMPLES]
        mine = slice(bounds[trainer.rank], bounds[trainer.rank + 1])
        own = DataLoader(TensorDataset(x[mine], y[mine]), batch_size=2)
        given = metrics_by_hand()
        found = trainer.evaluate(network(), own, step=step, metrics=given, shard=False)
        numbers, matrix = right
        assert torch.equal(found.pop("confusion"), matrix)
        assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=1e-6)


def test_ranks_that_end_early_wait_for_the_others(two_ranks):
    two_ranks.run(with_own_loaders, expected(), 2)


@pytest.mark.slow
def test_a_rank_without_any_batch_takes_part():
    run_ranks(with_own_loaders, 3, expected(), 3)


def torchmetrics_on_a_rank(right):
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, BinaryF1Score

    def step(model, batch):
        logits = model(batch[0])
        return {"binary": (logits.softmax(1)[:, 1], batch[1]), "confusion": (logits.argmax(1), batch[1])}

    confusion = BinaryConfusionMatrix()
    chosen = {"binary": MetricCollection([BinaryF1Score(), BinaryAUROC()]), "confusion": confusion}
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        found = trainer.evaluate(network(), loader(), step=step, metrics=chosen)
        numbers, matrix = right
        assert torch.equal(found["confusion"], matrix)
        assert torch.equal(confusion.compute(), matrix)
        of_ones = 2 * matrix[1, 1] / (matrix[1].sum() + matrix[:, 1].sum())
        assert found["binary/BinaryF1Score"] == pytest.approx(of_ones.item())
        assert found["binary/BinaryAUROC"] == pytest.approx(numbers["auroc"])
        assert "loss" not in found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_metrics_of_torchmetrics_are_fed_once(two_ranks):
    two_ranks.run(torchmetrics_on_a_rank, expected())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_metrics_of_torchmetrics_are_fed_once_on_one_device():
    pytest.importorskip("torchmetrics")
    torchmetrics_on_a_rank(expected())


@pytest.mark.needs("torcheval")
def test_metrics_of_torcheval_are_fed():
    classes = importlib.import_module("torcheval.metrics")
    with Trainer(backend="tuple", devices=["cpu"] * 2, seed=0, progress=False) as trainer:
        found = trainer.evaluate(
            network(),
            loader(),
            step=lambda model, batch: {"auroc": (model(batch[0]).softmax(1)[:, 1], batch[1])},
            metrics={"auroc": classes.BinaryAUROC()},
        )
    assert found == {"auroc": pytest.approx(expected()[0]["auroc"])}


class Count:
    """Counts the boxes of images, each of which is a dict, as mean average precision takes them."""

    def reset(self):
        self.images = []

    def update(self, predictions, targets):
        assert len(predictions) == len(targets)
        self.images += list(zip(predictions, targets, strict=True))

    def compute(self):
        return {"boxes": sum(len(p["boxes"]) for p, _ in self.images), "images": len(self.images)}


def detect(model, batch):
    (x, y) = batch
    boxes = [{"boxes": row.expand(int(n) + 1, 4), "name": str(int(n))} for row, n in zip(x, y, strict=True)]
    return {"count": (boxes, [{"first": row[0]} for row in x]), "parts": (model(x).sum(), len(x))}


@pytest.mark.parametrize("options", BACKENDS)
def test_arguments_may_be_lists_of_anything(options):
    count = Count()
    with Trainer(**options, seed=0, progress=False) as trainer:
        found = trainer.evaluate(network(), loader(), step=detect, metrics={"count": count})
    x, y = data()
    assert found["count/images"] == SAMPLES
    assert found["count/boxes"] == SAMPLES + y.sum()
    assert all(p["boxes"][0, 0] == x[i, 0] == t["first"] for i, (p, t) in enumerate(count.images))


class Total:
    def reset(self):
        self.total = self.tokens = 0

    def update(self, value, *, tokens):
        self.total, self.tokens = self.total + value, self.tokens + tokens

    def compute(self):
        return self.total / self.tokens


@pytest.mark.parametrize("options", BACKENDS)
def test_arguments_without_rows_are_fed_part_after_part(options):
    def step(model, batch):
        return {"mean": {"value": batch[0].double().sum(), "tokens": batch[0].numel()}}

    with Trainer(**options, seed=0, progress=False) as trainer:
        metric = Total()
        metric.update = lambda **arguments: Total.update(metric, **arguments)
        found = trainer.evaluate(network(), loader(), step=step, metrics={"mean": metric})
    assert found == {"mean": pytest.approx(data()[0].double().mean().item())}


def test_splits_by_cost_keep_the_order_of_the_data():
    from tp_tuple import TupleOptions

    options = [TupleOptions(cost=lambda sample: float(sample[0][0].abs()))]
    with Trainer(backend="tuple", devices=["cpu"] * 2, options=options, progress=False, seed=0) as trainer:
        check(trainer, loader(), expected(), metrics())


def test_an_evaluation_needs_no_loss_and_says_so_where_some_steps_have_one():
    def sometimes(model, batch):
        hit = (model(batch[0]).argmax(1) == batch[1]).float().mean()
        return {"hit": hit, "loss": hit} if len(batch[0]) < 16 else {"hit": hit}

    with Trainer(devices="cpu", progress=False, seed=0) as trainer:
        found = trainer.evaluate(network(), loader(drop_last=True), step=sometimes)
        assert list(found) == ["hit"]
        with pytest.raises(StepError, match="returned a 'loss' at validation step 6, and none before"):
            trainer.evaluate(network(), loader(), step=sometimes)


def test_several_loaders_are_told_apart_by_name():
    with Trainer(devices="cpu", progress=False, seed=0) as trainer:
        given = {"f1": metrics()["f1"]}
        loaders = {"all": loader(), "first": loader(drop_last=True)}
        found = trainer.evaluate(
            network(), loaders, step=lambda m, b: {"f1": step(m, b)["f1"]}, metrics=given
        )
    assert sorted(found) == ["all/f1", "first/f1"]
    assert found["all/f1"] == pytest.approx(expected()[0]["f1"])
    assert found["first/f1"] != found["all/f1"]


def test_an_evaluation_of_nothing_has_no_results():
    with Trainer(devices="cpu", progress=False, seed=0) as trainer:
        assert trainer.evaluate(network(), [], step=step, metrics=metrics()) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Order()], "metrics must be a dict of metrics by name, got list"),
        ({"f1": max}, r"the metric 'f1' must be an object with update.*FunctionMetric\(function\)"),
        ({"order": Order}, "the metric 'order' must be an object"),
        ({"loss": Order()}, "a metric's name must be a text other than 'loss' and 'weight', got 'loss'"),
        ({3: Order()}, "a metric's name must be a text"),
    ],
)
def test_what_is_not_a_metric_is_refused(given, message):
    with Trainer(devices="cpu", progress=False) as trainer, pytest.raises(ConfigError, match=message):
        trainer.evaluate(network(), loader(), step=step, metrics=given)


@pytest.mark.parametrize("name", ["", "a/b", 3])
def test_loaders_with_unusable_names_are_refused(name):
    with (
        Trainer(devices="cpu", progress=False) as trainer,
        pytest.raises(ConfigError, match="a dict of loaders by names without '/'"),
    ):
        trainer.evaluate(network(), {name: loader()}, step=step)


def test_a_metric_that_the_step_gives_nothing_is_named():
    with (
        Trainer(devices="cpu", progress=False) as trainer,
        pytest.raises(StepError, match=r"metrics \['more'\]"),
    ):
        trainer.evaluate(network(), loader(), step=step, metrics=metrics() | {"more": Order()})


def test_what_a_metric_raises_names_it():
    with (
        Trainer(devices="cpu", progress=False) as trainer,
        pytest.raises(StepError, match=r"update\(\) of the metric 'f1' raised TypeError"),
    ):
        trainer.evaluate(network(), loader(), step=step, metrics=metrics() | {"f1": Order()})


def test_a_function_metric_takes_a_function_and_a_known_kind_of_array():
    with pytest.raises(ConfigError, match="needs a function of all samples, got int: 3"):
        FunctionMetric(3)
    with pytest.raises(ConfigError, match="arrays='list' must be 'numpy' or 'torch'"):
        FunctionMetric(max, arrays="list")


def test_a_function_metric_gives_tensors_where_it_is_asked_to():
    rmse = FunctionMetric(lambda p, y: (p - y).square().mean().sqrt(), arrays="torch")
    rmse.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    rmse.update(torch.tensor([3.0]), torch.tensor([1.0]))
    assert rmse.compute() == torch.tensor(8 / 3).sqrt()
    half = FunctionMetric(np.mean)
    half.update(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert half.compute() == 1.5
