"""A backend's state is the whole model's, and comes back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tp_core._tensors._deferred import build_deferred, materialize
from tp_core.state import whole as whole_of
from tp_core.testing._bodies import (
    State,
    assert_same,
    batch_loss,
    data,
    loss_of,
    on_cpu,
    open_session,
    prepared,
)
from tp_core.testing._kit import PooledKit

__all__ = ["StateChecks"]

STEPS = 3


class StateChecks(PooledKit):
    """Parameters and buffers, with the names of the user's own module."""

    def test_model_state_has_the_plain_names_and_buffers_and_comes_back(self) -> None:
        expected = self.make_reference().state_dict()
        for state, restored in self.everywhere(_state_round_trip):
            assert_same(state, expected)
            assert_same(restored, expected)

    def test_a_state_of_one_device_is_loaded(self) -> None:
        expected = _of_one_device(self)
        for state in self.everywhere(_loaded):
            assert_same(state, expected)

    def test_the_parts_of_a_state_put_together_are_the_state(self) -> None:
        expected = self.make_reference().state_dict()
        for first, later in self.everywhere(_put_together):
            assert_same(first, expected)
            assert_same(later, _of_one_device(self))

    def test_buffers_that_steps_write_are_kept(self) -> None:
        for counts in self.everywhere(_counted_steps):
            assert counts == list(range(1, STEPS + 1)), "forward passes that the model's buffer has counted"

    @pytest.mark.parametrize("fault", ["missing", "surplus", "another shape"])
    def test_a_state_that_does_not_fit_is_refused(self, fault: str) -> None:
        for error in self.everywhere(_loaded_wrong, fault):
            assert error, f"a state with a tensor that is {fault} was loaded"

    def test_a_model_that_was_built_without_memory_has_the_values_of_one_device(self) -> None:
        expected = self.make_reference().state_dict()
        for state in self.everywhere(_built_without_memory):
            assert_same(state, expected)

    def test_weights_that_are_tied_stay_tied(self) -> None:
        for before, after in self.everywhere(_count_of_weights):
            assert before == after

    def test_buffers_are_those_of_the_first_data_rank_after_they_are_synced(self) -> None:
        found = self.everywhere(_synced_buffers)
        for buffers in found:
            assert_same(buffers, _buffers(self.make_reference()))


class _Counting(nn.Module):
    """A model that counts its forward passes in a buffer, where it is trained."""

    steps: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        output: Tensor = self.inner(x)
        return output


def _of_one_device(kit: StateChecks) -> State:
    return {n: t + 1 for n, t in kit.make_reference().state_dict().items()}


def _buffers(model: nn.Module) -> State:
    return on_cpu(dict(model.named_buffers()))


# -- on every rank --------------------------------------------------------------------------------


def _state_round_trip(kit: StateChecks) -> tuple[State, State]:
    with prepared(kit) as (session, model):
        state = on_cpu(session.model_state(model))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
        session.load_model_state(model, state)
        return state, on_cpu(session.model_state(model))


def _put_together(kit: StateChecks) -> tuple[State, State]:
    with prepared(kit) as (session, model):
        first = on_cpu({n: whole_of(part) for n, part in session.state_parts(model).items()})
        session.load_model_state(model, _of_one_device(kit))
        return first, on_cpu({n: whole_of(part) for n, part in session.state_parts(model).items()})


def _counted_steps(kit: StateChecks) -> list[int]:
    found = []
    with prepared(kit, _Counting(kit.make_model())) as (session, model):
        for batch in session.prepare_loader(DataLoader(data(4 * STEPS), batch_size=4)):
            session.backward(loss_of(session.run(batch_loss(), model, batch)))
            session.sync_buffers(model)
            found.append(int(session.model_state(model)["steps"]))
    return found


def _loaded(kit: StateChecks) -> State:
    with prepared(kit) as (session, model):
        session.load_model_state(model, _of_one_device(kit))
        return on_cpu(session.model_state(model))


def _loaded_wrong(kit: StateChecks, fault: str) -> str:
    with prepared(kit) as (session, model):
        state: dict[str, Any] = dict(kit.make_reference().state_dict())
        if fault == "missing":
            del state["0.bias"]
        elif fault == "surplus":
            state["0.other"] = torch.ones(1)
        else:
            state["0.bias"] = torch.ones(3, 3)
        try:
            session.load_model_state(model, state)
        except Exception as error:  # noqa: BLE001 - each backend has its own
            return repr(error)
        return ""


def _built_without_memory(kit: StateChecks) -> State:
    with open_session(kit, model=kit.make_model()) as session:
        model = build_deferred(kit.make_model, least_nbytes=1)
        if not session.takes_deferred_models:
            materialize(model)
        return on_cpu(session.model_state(session.prepare_model(model)))


def _count_of_weights(kit: StateChecks) -> tuple[int, int]:
    before = len(list(kit.make_model().parameters()))
    with prepared(kit) as (session, model):
        session.load_model_state(model, _of_one_device(kit))
        return before, len(list(session.unwrap(model).parameters()))


def _synced_buffers(kit: StateChecks) -> State:
    with prepared(kit) as (session, model):
        with torch.no_grad():
            for buffer in session.unwrap(model).buffers():
                buffer.add_(session.data_rank)
        session.sync_buffers(model)
        return _buffers(session.unwrap(model))
