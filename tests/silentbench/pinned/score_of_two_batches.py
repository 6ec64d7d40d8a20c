"""TorchMetrics' mean IoU adds up the scores of batches: two perfect ones have a score of 2."""

import torch
import torch.nn.functional as F
from torchmetrics.segmentation import MeanIoU


def shown():
    metric = MeanIoU(num_classes=2)
    rows = F.one_hot(torch.tensor([[[0, 1], [1, 0]]])).movedim(-1, 1)  # (batch, class, height, width)
    for _ in range(2):
        metric.update(rows, rows)
    return round(float(metric.compute()), 3)
