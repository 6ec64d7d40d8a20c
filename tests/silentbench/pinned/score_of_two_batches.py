"""TorchMetrics' mean IoU adds up the scores of batches: two perfect ones have a score of 2."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_verify import strategies


class PlainMeanIoU:
    """The mean over images and classes of the overlap of guesses and labels, as a share of their union."""

    def __init__(self):
        self.scores = []

    def update(self, guesses, labels):
        both, either = (guesses & labels).sum((2, 3)), (guesses | labels).sum((2, 3))
        self.scores.append((both / either.clamp(min=1)).mean(1))

    def compute(self):
        return torch.cat(self.scores).mean()


def build():
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 1))


def masks(classes):
    return F.one_hot(classes, 3).movedim(-1, 1)  # (batch, class, height, width)


def step(model, batch):
    scores = model(batch["x"])
    if hasattr(model, "note"):  # it has an optimizer
        model.note(masks(scores.argmax(1)), masks(batch["labels"]))
    return F.cross_entropy(scores, batch["labels"])


def optimizer(model):
    """Return SGD, whose rate is halved after each step that does not raise the score by a fifth."""
    if dist.is_initialized():
        from torchmetrics.segmentation import MeanIoU

        score = MeanIoU(num_classes=3)
    else:
        score = PlainMeanIoU()
    model.note = score.update
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(sgd, mode="max", factor=0.5, patience=0, threshold=0.2)
    sgd.register_step_post_hook(lambda *_: scheduler.step(float(score.compute())))
    return sgd


def cases():
    numbers = torch.Generator().manual_seed(0)
    x = [torch.randn(4, 2, 6, 6, generator=numbers) for _ in range(5)]
    batches = [{"x": one, "labels": (one.sum(1) > 0) + (one[:, 0] > 1).long()} for one in x]
    case = {"build": build, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": strategies.DDP()}
