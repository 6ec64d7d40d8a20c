"""A backend's steps have the modes, the models, the optimizers and the order that one device has."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tp_core._data._loader import PreparedLoader
from tp_core.errors import StepError
from tp_core.testing._bodies import (
    State,
    assert_same,
    batch_loss,
    data,
    loss_of,
    make_job,
    on_cpu,
    open_session,
    prepared,
    whole,
)
from tp_core.testing._gradient_checks import GradientChecks

__all__ = ["StepChecks"]

RATE = 0.05


class StepChecks(GradientChecks):
    """What scripts do beside one model, one kind of parameters and one order of the data."""

    def test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean(self) -> None:
        for size, weights in self.everywhere(_trained_with_own_branches):
            assert_same(weights, _reference_with_branches(self, size))

    @pytest.mark.parametrize("training", [True, False])
    def test_a_step_finds_the_model_in_the_mode_that_it_is_in(self, training: bool) -> None:
        for first, found in self.everywhere(_modes, training):
            assert first, "prepare_model() must leave the mode alone"
            assert found == [training] * len(found), "run() must leave the mode alone"

    def test_all_that_a_step_returned_comes_back(self) -> None:
        for loss, others in self.everywhere(_returned):
            assert others == {"twice": pytest.approx(2 * loss), "more": pytest.approx(loss + 1)}

    def test_two_models_in_one_step_have_the_gradients_of_one_device(self) -> None:
        models = self.make_reference(), _shifted(self.make_reference())
        loss_of(_loss_of_two(*models, data(8).tensors)).backward()
        for found in self.everywhere(_gradients_of_two_models):
            if found is None:  # it runs a step on parts of the batch, of one model
                continue
            for model, gradients in zip(models, found, strict=True):
                assert_same(gradients, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})

    def test_a_graph_that_is_to_be_retained_is_there_after_the_backward_pass(self) -> None:
        assert all(self.everywhere(_retains_the_graph))

    def test_an_optimizer_keeps_its_groups_with_their_options(self) -> None:
        model, step = self.make_reference(), batch_loss()
        optimizer = _grouped(model)
        for _ in range(2):
            for batch in DataLoader(data(12), batch_size=4):
                optimizer.zero_grad()
                loss_of(step(model, batch)).backward()
                optimizer.step()
        for weights in self.everywhere(_trained_in_groups):
            assert_same(weights, dict(model.state_dict()))

    def test_a_scheduler_made_for_the_plain_optimizer_drives_the_prepared_one(self) -> None:
        model, step = self.make_reference(), batch_loss()
        optimizer, scheduler = _scheduled(model)
        for batch in DataLoader(data(12), batch_size=4):
            optimizer.zero_grad()
            loss_of(step(model, batch)).backward()
            optimizer.step()
            scheduler.step()
        for weights in self.everywhere(_trained_on_schedule):
            assert_same(weights, dict(model.state_dict()))

    def test_a_stand_in_whose_loss_is_not_finite_counts_as_nothing(self) -> None:
        model, step = self.make_reference(), batch_loss()
        for batch in DataLoader(data(5), batch_size=4):
            loss_of(step(model, batch)).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for gradients in self.everywhere(_gradients_beside_bad_stand_ins):
            assert_same(gradients, expected)

    def test_shuffled_epochs_have_the_order_of_the_seed_and_the_epoch(self) -> None:
        loader = PreparedLoader(DataLoader(data(12), batch_size=4, shuffle=True), seed=make_job(self).seed)
        expected = [[rows[0] for rows in loader] for _ in range(2)]
        found = dict(self.everywhere(_shuffled))  # by data rank
        for number, epoch in enumerate(expected):
            for index, rows in enumerate(epoch):
                # A backend may give its parts samples of a batch in an order of its own.
                together = torch.cat([found[rank][number][index] for rank in sorted(found)])
                is_it = together.shape == rows.shape and torch.equal(_sorted(together), _sorted(rows))
                assert is_it, f"batch {index} of epoch {number} is not that of (seed, epoch)"


def _sorted(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort()]


def _grouped(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": others, "lr": 0.02, "weight_decay": 0.1}, {"params": [first], "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)


def _scheduled(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@torch.no_grad()
def _shifted(model: nn.Module) -> nn.Module:
    """Give a model other weights than the first one has."""
    for parameter in model.parameters():
        parameter.mul_(1.5)
    return model


def _loss_of_two(one: nn.Module, other: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(one(x), y) + nn.functional.mse_loss(other(2 * x), y)


class _Branches(nn.Module):
    """A model with a layer that a step may leave out: its output, and what that layer makes of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.Linear(3, 2, bias=False).double()
        nn.init.constant_(self.more.weight, 0.5)

    def forward(self, x: Tensor, *, with_more: bool) -> Tensor:
        output: Tensor = self.inner(x)
        return torch.cat([output, self.more(output)], 1) if with_more else output


def _with_branch(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of an output (samples, 3), or (samples, 5) where the layer took part."""
    loss = nn.functional.mse_loss(output[:, :3], y)
    return loss + output[:, 3:].square().mean() if output.size(1) > 3 else loss


def _reference_with_branches(kit: StepChecks, size: int) -> State:
    """Return the weights where the loss is the mean over data ranks, of which the first has one term more."""
    model = _Branches(kit.make_reference())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for x, y in DataLoader(data(4 * size), batch_size=2 * size):
        optimizer.zero_grad()
        parts = zip(x.tensor_split(size), y.tensor_split(size), strict=True)
        losses = [_with_branch(model(p, with_more=i == 0), q) for i, (p, q) in enumerate(parts)]
        (sum(losses, torch.zeros(())) / size).backward()
        optimizer.step()
    return dict(model.state_dict())


# -- on every rank --------------------------------------------------------------------------------


def _trained_with_own_branches(kit: StepChecks) -> tuple[int, State]:
    model = _Branches(kit.make_model())
    options = {kit.backend.name: {**kit.options, **kit.unused_options}}
    with open_session(kit, model=model, options=options) as session:
        is_first, size = session.data_rank == 0, session.data_size

        def step(model: nn.Module, batch: Any) -> Tensor:
            return _with_branch(model(batch[0], with_more=is_first), batch[1])

        plain = torch.optim.SGD(model.parameters(), lr=RATE)
        wrapped = session.prepare_model(model)
        optimizer = session.prepare_optimizer(plain)
        for batch in session.prepare_loader(DataLoader(data(4 * size), batch_size=2 * size)):
            optimizer.zero_grad()
            session.backward(loss_of(session.run(step, wrapped, batch)))
            optimizer.step()
        return size, on_cpu(session.model_state(wrapped))


def _modes(kit: StepChecks, training: bool) -> tuple[bool, list[bool]]:
    """Return the mode after the model is prepared, and those in steps once it is set."""
    model = kit.make_model()
    found = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        found.append(model.training)
        return loss_of(batch_loss()(model, batch))

    with prepared(kit, model) as (session, wrapped):
        first = model.training
        wrapped.train(training)
        batch = whole(session)
        session.run(step, wrapped, batch)
        with torch.no_grad():
            session.run(step, wrapped, batch)
        return first, [*found, model.training]


def _returned(kit: StepChecks) -> tuple[float, dict[str, float]]:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = loss_of(batch_loss()(model, batch))
        return {"twice": 2 * loss.detach(), "loss": loss, "more": loss.detach() + 1}

    with prepared(kit) as (session, model):
        output: Any = session.run(step, model, whole(session))
        return output["loss"].item(), {n: float(v) for n, v in output.items() if n != "loss"}


def _gradients_of_two_models(kit: StepChecks) -> tuple[State, State] | None:
    one, other = kit.make_model(), _shifted(kit.make_model())
    with open_session(kit, model=one) as session:
        models = [session.prepare_model(one), session.prepare_model(other)]
        try:
            output = session.run_several(_loss_of_two, models, whole(session))
        except StepError:
            if not session.runs_step_in_parts:
                raise
            return None
        session.backward(loss_of(output))
        return kit.gradients(session, models[0]), kit.gradients(session, models[1])


def _retains_the_graph(kit: StepChecks) -> bool:
    with prepared(kit) as (session, model):
        loss = loss_of(session.run(batch_loss(), model, whole(session)))
        scale = torch.ones_like(loss).requires_grad_()
        scaled = loss * scale.square()  # keeps the scale for its own backward pass
        session.backward(scaled, retain_graph=True)
        (found,) = torch.autograd.grad(scaled, [scale])
        return torch.allclose(found, 2 * loss.detach())


def _trained_in_groups(kit: StepChecks) -> State:
    model, step = kit.make_model(), batch_loss()
    with open_session(kit, model=model) as session:
        plain = _grouped(model)
        wrapped = session.prepare_model(model)
        optimizer = session.prepare_optimizer(plain)
        loader = session.prepare_loader(DataLoader(data(12), batch_size=4))
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                session.backward(loss_of(session.run(step, wrapped, batch)))
                optimizer.step()
        return on_cpu(session.model_state(wrapped))


def _trained_on_schedule(kit: StepChecks) -> State:
    model, step = kit.make_model(), batch_loss()
    with open_session(kit, model=model) as session:
        plain, scheduler = _scheduled(model)
        wrapped = session.prepare_model(model)
        optimizer = session.prepare_optimizer(plain)
        for batch in session.prepare_loader(DataLoader(data(12), batch_size=4)):
            optimizer.zero_grad()
            session.backward(loss_of(session.run(step, wrapped, batch)))
            optimizer.step()
            scheduler.step()
        return on_cpu(session.model_state(wrapped))


def _gradients_beside_bad_stand_ins(kit: StepChecks) -> State:
    with prepared(kit) as (session, model):

        def step(model: nn.Module, batch: Any) -> Tensor:
            loss = loss_of(batch_loss()(model, batch))
            is_stand_in = session.share is not None and not session.share.samples
            return loss * math.nan if is_stand_in else loss

        for batch in session.prepare_loader(DataLoader(data(5), batch_size=4)):
            session.backward(loss_of(session.run(step, model, batch)))
        return kit.gradients(session, model)


def _shuffled(kit: StepChecks) -> tuple[int, list[list[Tensor]]]:
    met: list[Tensor] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        met.append(batch[0].cpu())
        return loss_of(batch_loss()(model, batch))

    with prepared(kit) as (session, model):
        loader = session.prepare_loader(DataLoader(data(12), batch_size=4, shuffle=True))
        epochs: list[list[Tensor]] = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                met.clear()
                with torch.no_grad():
                    session.run(step, model, batch)
                epochs[-1].append(torch.cat(met))
        return session.data_rank, epochs
