"""A backend's gradients and weights are those of one device that sees the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tp_core._contracts._session import Session
from tp_core._steps._outputs import LossReduction
from tp_core.testing._bodies import (
    State,
    assert_same,
    batch_loss,
    data,
    loss_of,
    on_cpu,
    open_session,
    prepared,
    whole,
)
from tp_core.testing._kit import PooledKit

__all__ = ["GradientChecks"]


class GradientChecks(PooledKit):
    """The proof is equality, in double precision."""

    @staticmethod
    def gradients(session: Session, model: nn.Module) -> State:
        """Return the whole gradients of a prepared model on the CPU, by the reference's names.

        A backend that splits parameters in a way of its own overrides it.
        """
        named = session.unwrap(model).named_parameters()
        return on_cpu({n: _whole(p.grad) for n, p in named if p.grad is not None})

    def test_loss_and_gradients_are_those_of_one_device(self) -> None:
        expected = _reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(_train_gradients, 8, 8, "mean"):
            assert_same(gradients, expected)

    def test_gradients_in_single_precision_are_those_of_one_device(self) -> None:
        model = self.make_reference().float()
        loss_of(batch_loss()(model, data(8, torch.float32).tensors)).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for gradients in self.everywhere(_single_precision):
            assert_same(gradients, expected, rtol=1e-4, atol=1e-6)

    def test_parameters_of_several_types_have_the_gradients_of_one_device(self) -> None:
        model = _of_several_types(self.make_reference())
        loss_of(batch_loss()(model, data(8).tensors)).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert len({grad.dtype for grad in expected.values()}) == 2
        for gradients in self.everywhere(_several_types):
            assert_same(gradients, expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize(("samples", "batch_size"), [(11, 4), (7, 3), (9, 8)])
    def test_uneven_batches_weigh_by_their_samples(self, samples: int, batch_size: int) -> None:
        expected = _reference_gradients(self, samples=samples, batch_size=batch_size)
        for gradients in self.everywhere(_train_gradients, samples, batch_size, "mean"):
            assert_same(gradients, expected)

    def test_a_last_batch_of_one_sample_neither_hangs_nor_biases(self) -> None:
        expected = _reference_gradients(self, samples=5, batch_size=4)
        for gradients in self.everywhere(_train_gradients, 5, 4, "mean"):
            assert_same(gradients, expected)

    def test_a_loss_that_is_a_sum_gives_the_gradient_of_the_sum(self) -> None:
        expected = _reference_gradients(self, samples=7, batch_size=4, loss="sum")
        for gradients in self.everywhere(_train_gradients, 7, 4, "sum"):
            assert_same(gradients, expected)

    def test_a_step_that_returns_a_dict_has_the_gradient_of_its_loss(self) -> None:
        expected = _reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(_dict_gradients):
            assert_same(gradients, expected)

    def test_accumulation_inside_no_sync_gives_the_gradient_of_the_whole(self) -> None:
        expected = _reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(_accumulated_gradients):
            assert_same(gradients, expected)

    def test_inside_no_sync_nothing_is_reduced_over_ranks(self) -> None:
        reduced = _reference_gradients(self, samples=8, batch_size=8)
        for data_size, held in self.everywhere(_held_gradients):
            are_reduced = sorted(held) == sorted(reduced) and all(
                held[n].shape == g.shape and torch.allclose(held[n], g, rtol=1e-9) for n, g in reduced.items()
            )
            assert data_size == 1 or not are_reduced

    def test_no_sync_ends_when_its_body_raises(self) -> None:
        expected = _reference_gradients(self, samples=8, batch_size=8)
        for gradients in self.everywhere(_gradients_after_an_exception):
            assert_same(gradients, expected)

    def test_parameters_that_no_step_uses_stay_as_they_are(self) -> None:
        expected = _reference_with_unused(self)
        for weights in self.everywhere(_trained_with_unused):
            assert_same(weights, expected)

    def test_optimizer_steps_lead_to_the_weights_of_one_device(self) -> None:
        expected = _reference_weights(self)
        for weights in self.everywhere(_trained_weights):
            assert_same(weights, expected)

    def test_the_users_own_module_and_its_optimizer_are_what_is_trained(self) -> None:
        for is_own, are_its_parameters in self.everywhere(_who_is_trained):
            assert is_own, "unwrap() must return the module that prepare_model() was given"
            assert are_its_parameters, "prepare_optimizer() must return one over the prepared parameters"

    def test_ranks_that_start_with_different_weights_end_with_those_of_rank_0(self) -> None:
        expected = self.make_reference().state_dict()
        for state in self.everywhere(_start_from_different_weights):
            assert_same(state, expected)


# -- on one device --------------------------------------------------------------------------------


def _reference_gradients(
    kit: PooledKit, *, samples: int, batch_size: int, loss: LossReduction = "mean"
) -> State:
    """Return the sum over the epoch's batches of one device's gradients."""
    model, step = kit.make_reference(), batch_loss(loss)
    for batch in DataLoader(data(samples), batch_size=batch_size):
        loss_of(step(model, batch)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _reference_weights(kit: PooledKit) -> State:
    model, step = kit.make_reference(), batch_loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(3):
        for batch in DataLoader(data(11), batch_size=4):
            optimizer.zero_grad()
            loss_of(step(model, batch)).backward()
            optimizer.step()
    return dict(model.state_dict())


def _reference_with_unused(kit: PooledKit) -> State:
    model, step = _WithUnused(kit.make_reference()), batch_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in DataLoader(data(12), batch_size=4):
        optimizer.zero_grad()
        loss_of(step(model, batch)).backward()
        optimizer.step()
    return dict(model.state_dict())


class _WithUnused(nn.Module):
    """A model with a layer that its forward leaves out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unused = nn.Linear(2, 2, bias=False).double()
        nn.init.ones_(self.unused.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


def _of_several_types(model: nn.Module) -> nn.Module:
    """Give the model one parameter, of a single element, in single precision."""
    tail: Any = model.get_submodule("3")
    tail.scale = nn.Parameter(tail.scale.detach().float())
    return model


# -- on every rank --------------------------------------------------------------------------------


def _whole(grad: Tensor) -> Tensor:
    full: Any = getattr(grad, "full_tensor", None)
    return grad if full is None else full()


def _train_gradients(kit: GradientChecks, samples: int, batch_size: int, loss: LossReduction) -> State:
    step = batch_loss(loss)
    with prepared(kit, loss=loss) as (session, model):
        for batch in session.prepare_loader(DataLoader(data(samples), batch_size=batch_size)):
            session.backward(loss_of(session.run(step, model, batch)))
        return kit.gradients(session, model)


def _single_precision(kit: GradientChecks) -> State:
    with prepared(kit, kit.make_model().float()) as (session, model):
        batch = whole(session, dtype=torch.float32)
        session.backward(loss_of(session.run(batch_loss(), model, batch)))
        return kit.gradients(session, model)


def _several_types(kit: GradientChecks) -> State:
    with prepared(kit, _of_several_types(kit.make_model())) as (session, model):
        session.backward(loss_of(session.run(batch_loss(), model, whole(session))))
        return kit.gradients(session, model)


def _dict_gradients(kit: GradientChecks) -> State:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = loss_of(batch_loss()(model, batch))
        return {"loss": loss, "half": loss.detach() / 2}

    with prepared(kit) as (session, model):
        session.backward(loss_of(session.run(step, model, whole(session))))
        return kit.gradients(session, model)


def _accumulated_gradients(kit: GradientChecks) -> State:
    step = batch_loss()
    with prepared(kit) as (session, model):
        first, second = session.prepare_loader(DataLoader(data(8), batch_size=4))
        with session.no_sync(model):
            session.backward(loss_of(session.run(step, model, first)) / 2)
        session.backward(loss_of(session.run(step, model, second)) / 2)
        return kit.gradients(session, model)


def _held_gradients(kit: GradientChecks) -> tuple[int, State]:
    """Return what a rank can see of its gradients before they are reduced."""
    with prepared(kit) as (session, model):
        batch = whole(session)
        with session.no_sync(model):
            session.backward(loss_of(session.run(batch_loss(), model, batch)))
        named = session.unwrap(model).named_parameters()
        held = {n: p.grad for n, p in named if p.grad is not None}
        plain = {n: g for n, g in held.items() if not hasattr(g, "full_tensor")}
        seen = on_cpu(plain)
        session.backward(loss_of(session.run(batch_loss(), model, batch)))
        return session.data_size, seen


def _gradients_after_an_exception(kit: GradientChecks) -> State:
    with prepared(kit) as (session, model):
        batch = whole(session)
        error = LookupError("out of no_sync")
        with pytest.raises(LookupError, match="out of no_sync"), session.no_sync(model):
            raise error
        session.backward(loss_of(session.run(batch_loss(), model, batch)))
        return kit.gradients(session, model)


def _trained_with_unused(kit: GradientChecks) -> State:
    model, step = _WithUnused(kit.make_model()), batch_loss()
    options = {kit.backend.name: {**kit.options, **kit.unused_options}}
    with open_session(kit, model=model, options=options) as session:
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = session.prepare_model(model)
        optimizer = session.prepare_optimizer(plain)
        for batch in session.prepare_loader(DataLoader(data(12), batch_size=4)):
            optimizer.zero_grad()
            session.backward(loss_of(session.run(step, wrapped, batch)))
            optimizer.step()
        return on_cpu(session.model_state(wrapped))


def _trained_weights(kit: GradientChecks) -> State:
    model, step = kit.make_model(), batch_loss()
    with open_session(kit, model=model) as session:
        plain = torch.optim.Adam(model.parameters(), lr=0.05)
        model = session.prepare_model(model)
        optimizer = session.prepare_optimizer(plain)
        loader = session.prepare_loader(DataLoader(data(11), batch_size=4))
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                session.backward(loss_of(session.run(step, model, batch)))
                optimizer.step()
        return on_cpu(session.model_state(model))


def _who_is_trained(kit: GradientChecks) -> tuple[bool, bool]:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        own = session.unwrap(session.prepare_model(model))
        optimizer = session.prepare_optimizer(plain)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return own is model, trained == {id(p) for p in own.parameters()}


def _start_from_different_weights(kit: GradientChecks) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(session.data_rank)
        prepared_model = session.prepare_model(model)
        return on_cpu(session.model_state(prepared_model))
