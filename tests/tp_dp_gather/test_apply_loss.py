"""The criterion in parts is the criterion of the whole, or says why it cannot be."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tp_core.errors import ConfigError
from tp_dp_gather import DataParallel

LABELS = torch.tensor([0, 2, 1, -100, 2, 2, 1])
CLASSES = torch.tensor([0, 2, 1, 0, 2, 2, 1])


class Named(nn.Module):
    """A criterion of one's own that tells how it reduces."""

    reduction = "sum"

    def forward(self, y, t):
        return (y - t).abs().sum()


class Masked(nn.Module):
    """One that does not tell, around one that does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.CrossEntropyLoss()

    def forward(self, y, t):
        return self.inner(y, t)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("criterion", "target"),
    [
        (nn.CrossEntropyLoss(), LABELS),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5]).double()), LABELS),
        (nn.CrossEntropyLoss(label_smoothing=0.1), LABELS),
        (nn.CrossEntropyLoss(reduction="sum"), LABELS),
        (nn.CrossEntropyLoss(reduction="none"), LABELS),
        (nn.CrossEntropyLoss(), torch.rand(7, 3).double()),
        (nn.MSELoss(), torch.rand(7, 3).double()),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()), torch.rand(7, 3).double()),
        (F.mse_loss, torch.rand(7, 3).double()),
        (F.cross_entropy, LABELS),
        (partial(F.cross_entropy, reduction="sum"), LABELS),
        (partial(F.cross_entropy, reduction="none"), LABELS),
        (partial(partial(F.cross_entropy, reduction="sum"), reduction="mean", ignore_index=2), CLASSES),
        (partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.5]).double()), LABELS),
        (partial(nn.CrossEntropyLoss(ignore_index=2)), CLASSES),
        (nn.KLDivLoss(reduction="batchmean"), torch.rand(7, 3).double()),
        (lambda y, t: (y - t).square().sum(1), torch.rand(7, 3).double()),
        (Named(), torch.rand(7, 3).double()),
    ],
    ids=[
        "ce",
        "weighted",
        "smoothed",
        "sum",
        "none",
        "probabilities",
        "mse",
        "bce",
        "function",
        "ce function",
        "partial sum",
        "partial none",
        "partials",
        "partial weighted",
        "partial module",
        "batchmean",
        "vector of a function",
        "reduction of one's own",
    ],
)
def test_the_criterion_in_parts_is_the_criterion_of_the_whole(criterion, target, count):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = torch.randn(7, 5).double()
    expected = criterion(model(x), target)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    net = DataParallel(model, ["cpu"] * count, gather_to_one_device=False)
    loss = net.apply_loss(criterion, net(x), target)
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients))


def test_a_part_in_which_every_label_is_ignored_counts_nothing():
    model = nn.Linear(5, 3)
    x, target = torch.randn(4, 5), torch.tensor([1, 2, -100, -100])
    net = DataParallel(model, ["cpu"] * 2, gather_to_one_device=False)
    loss = net.apply_loss(nn.CrossEntropyLoss(), net(x), target)
    torch.testing.assert_close(loss, F.cross_entropy(model(x), target))
    loss.backward()
    assert model.weight.grad.isfinite().all()


def test_targets_in_parts_and_a_named_reduction_are_taken():
    net = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False)
    x = torch.arange(3.0)
    targets = (torch.zeros(2), torch.zeros(1))
    loss = net.apply_loss(lambda y, t: (y - t).sum(), net(x), targets, reduction="sum")
    assert loss.item() == 3.0


@pytest.mark.parametrize(
    ("outputs", "targets", "options", "message"),
    [
        (torch.ones(3), torch.ones(3), {}, "outputs must be 1 to 2 parts, one per device, got Tensor"),
        ((torch.ones(1),) * 3, torch.ones(3), {}, "got 3 of them"),
        ((torch.ones(2),), torch.ones(3), {}, "targets have 3 rows along dim 0, and the outputs have 2"),
        ((torch.ones(2),), (1, 2), {}, "1 parts of the output and 2 of the targets"),
        (("a",), torch.ones(1), {}, "part 0 of the outputs has no rows along dim 0: str"),
        ((torch.ones(1),), torch.ones(1), {"reduction": "none"}, "reduction must be 'mean', 'sum' or None"),
    ],
)
def test_outputs_and_targets_that_do_not_go_together_are_refused(outputs, targets, options, message):
    net = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False)
    with pytest.raises(ConfigError, match=message):
        net.apply_loss(nn.MSELoss(), outputs, targets, **options)


@pytest.mark.parametrize(
    "criterion",
    [lambda y, t: (y - t).sum(), Masked(), partial(Masked()), partial(F.mse_loss, size_average=False)],
    ids=["function", "module", "partial", "old words"],
)
@pytest.mark.filterwarnings("ignore:size_average:UserWarning")
@pytest.mark.parametrize("count", [1, 2])
def test_a_reduction_that_cannot_be_told_is_asked_for(criterion, count):
    net = DataParallel(nn.Identity(), ["cpu"] * count, gather_to_one_device=False)
    with pytest.raises(ConfigError, match=r'is not known, .* pass reduction="mean" or reduction="sum"'):
        net.apply_loss(criterion, net(torch.rand(4, 2)), torch.rand(4, 2))


def test_a_function_that_takes_means_is_weighted_by_rows_when_it_is_said():
    net = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False)
    y = torch.rand(3, 2)
    loss = net.apply_loss(lambda a, b: (a - b).square().mean(), net(y), torch.zeros(3, 2), reduction="mean")
    torch.testing.assert_close(loss, y.square().mean())


@pytest.mark.parametrize(
    ("criterion", "reduction", "message"),
    [
        (nn.MSELoss(), "sum", "and MSELoss itself has reduction='mean'"),
        (
            partial(F.mse_loss, reduction="sum"),
            "mean",
            "mse_loss with .'reduction'. itself has",
        ),
        (
            lambda y, t: y - t,
            "mean",
            r"the criterion returned a loss of shape \(2, 2\)",
        ),
        (
            lambda y, t: ((y - t).sum(), {}),
            "sum",
            "must return a tensor, got a tuple; let it",
        ),
        (lambda y, t: 1.0, "sum", "must return a tensor, got a float"),
    ],
)
def test_a_criterion_that_does_other_than_it_says_is_refused(criterion, reduction, message):
    net = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False)
    with pytest.raises(ConfigError, match=message):
        net.apply_loss(criterion, net(torch.rand(4, 2)), torch.rand(4, 2), reduction=reduction)


def test_a_compiled_criterion_is_weighted_as_the_one_that_was_compiled():
    net = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False)
    y, target = torch.rand(4, 3), torch.tensor([0, 1, -100, 2])
    criterion = torch.compile(nn.CrossEntropyLoss(), backend="eager")
    loss = net.apply_loss(criterion, net(y), target)
    torch.testing.assert_close(loss, F.cross_entropy(y, target))
