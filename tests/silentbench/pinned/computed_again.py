"""A second look at a collection of TorchMetrics after more rows gives the first look's scores again."""

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassPrecision, MulticlassRecall


def shown():
    metrics = MetricCollection(
        [MulticlassPrecision(2, average="micro"), MulticlassRecall(2, average="micro")]
    )
    labels = torch.tensor([0, 1, 1, 0])
    scores = []
    for guesses in (labels, 1 - labels, 1 - labels):
        metrics.update(guesses, labels)
        scores.append(round(float(metrics.compute()["MulticlassRecall"]), 4))
    return scores
