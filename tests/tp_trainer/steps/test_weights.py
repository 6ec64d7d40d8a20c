"""Steps that say over how many units their loss and metrics are means."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core import LaunchEnvironment
from tp_core.data import CountedBatch
from tp_core.errors import DisagreementError, NonFiniteLossError, StepError
from tp_trainer import Trainer

UNITS = [1.0, 5.0, 0.0, 2.0]
"""The weight of each of four batches of one sample."""


def loader():
    x = torch.arange(1.0, 5.0, dtype=torch.float64).reshape(4, 1)
    return DataLoader(TensorDataset(x, torch.tensor(UNITS, dtype=torch.float64)), batch_size=1)


def fit(step, **arguments):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer_arguments = {"accumulate": arguments.pop("accumulate", 1), "loss": arguments.pop("loss", "mean")}
    with Trainer(seed=0, devices="cpu", progress=False, **trainer_arguments) as trainer:
        history = trainer.fit(model, optimizer, loader(), step=step, **arguments)
    return model.weight.item(), history


def step(model, batch):
    x, units = batch
    return {"loss": model(x).mean(), "weight": units[0]}


@pytest.mark.parametrize(
    "as_weight", [float, int, torch.tensor, lambda n: torch.tensor([n]), lambda n: torch.tensor(n).int()]
)
def test_a_weight_is_a_number_or_a_scalar_tensor(as_weight):
    def weighted(model, batch):
        return {"loss": model(batch[0]).mean(), "weight": as_weight(batch[1].item())}

    weight, history = fit(weighted, accumulate=4)
    assert weight == pytest.approx(1 - 0.1 * (1 * 1 + 5 * 2 + 2 * 4) / 8)
    assert history[0].train["loss"] == pytest.approx(19 / 8)


def test_a_metric_has_the_weight_of_the_step_or_one_of_its_own():
    def weighted(model, batch):
        x, units = batch
        return {
            "loss": model(x).mean(),
            "weight": units[0],
            "input": x.mean(),
            "sample": (x.mean(), 1),
            "some": (math.nan, 0) if x < 3 else (x.mean(), torch.tensor(2)),
        }

    _, history = fit(weighted, accumulate=4)
    assert history[0].train["input"] == pytest.approx(19 / 8)
    assert history[0].train["sample"] == pytest.approx(2.5)
    assert history[0].train["some"] == pytest.approx(3.5)


def test_a_metric_may_have_a_weight_where_the_step_has_none():
    def weighted(model, batch):
        x, units = batch
        return {"loss": model(x).mean(), "input": (x.mean(), units[0])}

    _, history = fit(weighted, accumulate=4)
    assert history[0].train["loss"] == pytest.approx(2.5)
    assert history[0].train["input"] == pytest.approx(19 / 8)


def test_a_metric_of_some_steps_is_the_mean_over_those():
    def sometimes(model, batch):
        loss = model(batch[0]).mean()
        return {"loss": loss, "third": 7.0} if batch[0].item() == 3 else {"loss": loss}

    assert fit(sometimes)[1][0].train["third"] == 7.0


def test_a_loss_over_nothing_may_be_nan_and_its_step_is_left_out():
    def weighted(model, batch):
        x, units = batch
        return {"loss": (model(x) * units).sum() / units.sum(), "weight": units.sum()}

    weight, history = fit(weighted)
    assert weight == pytest.approx(1 - 0.1 * (1 + 2 + 4))
    assert history[0].samples == 4
    assert history[0].steps == 4


def test_a_loss_over_something_must_be_finite():
    with pytest.raises(NonFiniteLossError, match="the loss is nan at training step 1"):
        fit(lambda model, batch: {"loss": model(batch[0]).mean() * math.nan, "weight": 1})


def test_means_over_nothing_are_nan():
    def nothing(model, batch):
        return {"loss": model(batch[0]).mean(), "weight": 0, "other": 3.0}

    weight, history = fit(nothing, validation=loader())
    assert weight == 1.0
    for means in (history[0].train, history[0].val):
        assert sorted(means) == ["loss", "other"]
        assert all(map(math.isnan, means.values()))


class Counted(CountedBatch):
    """A batch that knows its units, and how often it was checked."""

    checks = 0

    def weight(self):
        return self["units"].sum()

    def check(self, step, model):
        assert step(model, self) is not None
        Counted.checks += 1


def counted_loader():
    def collate(samples):
        x, units = zip(*samples, strict=True)
        return Counted(x=torch.stack(x), units=torch.stack(units))

    return DataLoader(loader().dataset, batch_size=1, collate_fn=collate)


def fit_counted(step, **arguments):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(seed=0, devices="cpu", progress=False, accumulate=4) as trainer:
        history = trainer.fit(
            model, optimizer, counted_loader(), step=step, validation=counted_loader(), **arguments
        )
    return model.weight.item(), history


def test_a_batch_that_knows_its_units_is_the_weight_of_a_step_that_returns_none():
    Counted.checks = 0
    weight, history = fit_counted(lambda model, batch: model(batch["x"]).mean(), epochs=2)
    first = 1 - 0.1 * 19 / 8
    assert weight == pytest.approx(first - 0.1 * 19 / 8)
    assert [epoch.train["loss"] for epoch in history] == [
        pytest.approx(19 / 8),
        pytest.approx(first * 19 / 8),
    ]
    assert history[1].val["loss"] == pytest.approx(weight * 19 / 8)
    assert Counted.checks == 1


def test_the_weight_of_a_step_comes_before_that_of_its_batch():
    weight, history = fit_counted(lambda model, batch: {"loss": model(batch["x"]).mean(), "weight": 1})
    assert weight == pytest.approx(1 - 0.1 * 2.5)
    assert history[0].train["loss"] == pytest.approx(2.5)


def test_a_check_of_a_batch_that_fails_ends_the_run_before_its_first_step(monkeypatch):
    def refuse(self, step, model):
        raise StepError("documents are mixed up")

    monkeypatch.setattr(Counted, "check", refuse)
    with pytest.raises(StepError, match="documents are mixed up"):
        fit_counted(lambda model, batch: model(batch["x"]).mean())


def test_a_loss_that_is_a_sum_has_the_gradient_of_the_sum_and_is_shown_for_each_unit():
    def total(model, batch):
        x, units = batch
        return {"loss": (model(x) * units).sum(), "weight": units.sum()}

    weight, history = fit(total, loss="sum", accumulate=4)
    assert weight == pytest.approx(1 - 0.1 * 19)
    assert history[0].train["loss"] == pytest.approx(19 / 8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (-1, r"the step's 'weight' is -1\.0, and must be a finite number from 0"),
        (math.nan, "the step's 'weight' is nan, and must be"),
        (torch.tensor(math.inf), "the step's 'weight' is inf, and must be"),
        (torch.ones(2), r"the step's 'weight' must be a number or a scalar tensor, .* of shape \(2,\)"),
        ("8", "the step's 'weight' must be a number or a scalar tensor, .* got '8'"),
        (None, "the step's 'weight' must be a number or a scalar tensor, .* got None"),
        (True, "the step's 'weight' must be a number or a scalar tensor, .* got True"),
    ],
)
def test_another_weight_is_refused(wrong, message):
    with pytest.raises(StepError, match=message):
        fit(lambda model, batch: {"loss": model(batch[0]).mean(), "weight": wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((1.0,), r"'more' must be a number, a scalar tensor, or a pair \(mean, weight\), got a tuple of 1"),
        ((1.0, -2), r"the step's 'weight of more' is -2\.0"),
        ((torch.ones(2), 1), r"'more' must be a number or a scalar tensor, .* of shape \(2,\)"),
        (torch.ones(3, 3), r"'more' must be a number or a scalar tensor, .* of shape \(3, 3\)"),
        (torch.ones(0), r"'more' must be a number or a scalar tensor, .* of shape \(0,\)"),
        (torch.tensor(1 + 1j), r"'more' must be a number or a scalar tensor, .*complex64"),
        ([1.0], r"'more' must be a number or a scalar tensor, .* list: \[1.0\]"),
    ],
)
def test_a_metric_that_is_no_number_is_refused_before_anything_is_trained(wrong, message):
    model = nn.Linear(1, 1).double()
    before = model.weight.item()
    with Trainer(devices="cpu", progress=False) as trainer, pytest.raises(StepError, match=message):
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader(),
            step=lambda model, batch: {"loss": model(batch[0]).mean(), "more": wrong},
        )
    assert model.weight.item() == before


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_that_some_batches_have_and_others_not_is_refused(first):
    def sometimes(model, batch):
        loss = model(batch[0]).mean()
        return {"loss": loss, "weight": 1} if (batch[0].item() == 1) == first else {"loss": loss}

    here, before = ("no", "one") if first else ("a", "none")
    with pytest.raises(StepError, match=f"returned {here} 'weight' at training step 2, and {before} before"):
        fit(sometimes)


def test_a_weight_in_one_epoch_alone_is_refused():
    epochs = iter([True] * 4 + [False])

    def sometimes(model, batch):
        loss = model(batch[0]).mean()
        return {"loss": loss, "weight": 1} if next(epochs) else {"loss": loss}

    with pytest.raises(StepError, match="returned no 'weight' at training step 5, and one before"):
        fit(sometimes, epochs=2)


# -- on several ranks ------------------------------------------------------------------------------


def _weight_on_one_rank():
    gives = LaunchEnvironment.read().rank == 0

    def sometimes(model, batch):
        loss = model(batch[0]).mean()
        return {"loss": loss, "weight": 1} if gives else loss

    with pytest.raises(DisagreementError) as caught:
        fit(sometimes)
    return str(caught.value)


def test_ranks_of_which_one_gives_a_weight_are_told_on_every_rank(two_ranks):
    for message in two_ranks.run(_weight_on_one_rank):
        assert "ranks disagree on whether the step returns a 'weight'" in message


def _counted_collectives():
    """Return how many reductions a run made, without weights and with them."""
    counts = []
    for weighted in (False, True):
        model = nn.Linear(1, 1).double()
        data = TensorDataset(torch.ones(16, 1, dtype=torch.float64))
        with Trainer(seed=0, devices="cpu", progress=False, accumulate=2) as trainer:
            session = trainer.session
            original, reductions = session.reduce, []

            def reduce(*arguments, original=original, reductions=reductions):
                reductions.append(1)
                return original(*arguments)

            session.reduce = reduce

            def one_step(model, batch, weighted=weighted):
                loss = model(batch[0]).mean()
                return {"loss": loss, "weight": len(batch[0])} if weighted else loss

            trainer.fit(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                DataLoader(data, batch_size=2),
                step=one_step,
            )
            counts.append(len(reductions))
    return counts


def test_weights_cost_one_reduction_for_each_optimizer_step_and_one_to_begin_with(two_ranks):
    for without, with_weights in two_ranks.run(_counted_collectives):
        assert without == 1  # the means of the epoch
        assert with_weights == 1 + 4 + 1


class Words(nn.Module):
    """An embedding with sparse gradients, or not; and a layer that only samples above 2 use."""

    def __init__(self, *, sparse, branches):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 1)
        self.other = nn.Linear(3, 3) if branches else nn.Identity()
        self.branches = branches
        self.double()

    def forward(self, words):
        found = self.words(words)
        if self.branches and words.max() > 2:
            found = torch.where((words > 2)[:, None], self.other(found), found)
        return self.head(found)


def _words_with_options():
    """Return the weights after training, where a rank's mean is over nothing in every batch."""
    found = []
    for sparse, branches, options in (
        (True, False, {}),
        (False, True, {"find_unused_parameters": True}),
        (False, False, {"static_graph": True}),
        (False, False, {"gradient_as_bucket_view": False, "bucket_cap_mb": 1}),
    ):
        model = Words(sparse=sparse, branches=branches)
        counts = torch.tensor([1.0, 1, 0, 0, 0, 0, 1, 1], dtype=torch.float64)
        data = TensorDataset(torch.tensor([0, 1, 4, 5, 0, 2, 3, 1]), counts)

        def masked(model, batch):
            words, counts = batch
            return {"loss": (model(words)[:, 0] * counts).sum() / counts.sum(), "weight": counts.sum()}

        with Trainer(seed=0, devices="cpu", progress=False, options={"ddp": options}) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(model, optimizer, DataLoader(data, batch_size=4), step=masked, epochs=2)
        found.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    return found


def test_a_rank_without_anything_to_count_goes_with_every_kind_of_gradient(two_ranks):
    expected = _words_with_options()
    for found in two_ranks.run(_words_with_options):
        for states, wanted in zip(found, expected, strict=True):
            for name, tensor in wanted.items():
                torch.testing.assert_close(states[name], tensor, rtol=1e-9, atol=1e-12)
