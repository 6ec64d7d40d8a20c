"""A backend's norms, limits and scales of gradients are those of the whole gradient."""

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tp_core._contracts._session import Session
from tp_core.testing._bodies import State, assert_same, batch_loss, data, loss_of, prepared, whole
from tp_core.testing._gradient_checks import GradientChecks

__all__ = ["NormChecks"]

ALONE_S = 60.0  # for a busy machine; it is waited for only where there is no answer
NORMS = [1.0, 2.0, math.inf]


class NormChecks(GradientChecks):
    """What happens to gradients between the backward pass and the optimizer."""

    @pytest.mark.parametrize("norm_type", NORMS)
    def test_clipping_uses_the_global_norm(self, norm_type: float) -> None:
        reference = _reference(self)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3, norm_type)
        for found, gradients in self.everywhere(_clipped, norm_type):
            torch.testing.assert_close(found, norm)
            assert_same(gradients, _gradients(reference), rtol=1e-7)

    @pytest.mark.parametrize("norm_type", NORMS)
    def test_the_global_norm_is_told_and_nothing_is_scaled(self, norm_type: float) -> None:
        expected = _gradients(_reference(self))
        norm = nn.utils.get_total_norm(list(expected.values()), norm_type)
        for found, clipped, gradients in self.everywhere(_norms, norm_type):
            torch.testing.assert_close(found, norm)
            torch.testing.assert_close(clipped, norm)
            assert_same(gradients, expected)

    def test_gradients_are_scaled(self) -> None:
        expected = {n: g * 0.5 for n, g in _gradients(_reference(self)).items()}
        for gradients in self.everywhere(_scaled):
            assert_same(gradients, expected)

    def test_gradients_are_limited_element_by_element(self) -> None:
        reference = _reference(self)
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        for gradients in self.everywhere(_limited):
            assert_same(gradients, _gradients(reference))

    def test_a_parameter_that_is_not_finite_is_named(self) -> None:
        names = {n for n, p in self.make_reference().named_parameters() if p.requires_grad}
        found = self.everywhere(_not_finite)
        assert [before for before, _ in found] == [None] * len(found)
        assert {after for _, after in found} & names, "no rank has named the parameter"

    def test_what_is_not_finite_is_found_by_one_rank_without_the_others(self) -> None:
        for is_answered in self.everywhere(_asked_alone):
            assert is_answered, "find_nonfinite() waits for other ranks, which may not ask"

    def test_ranks_whose_gradients_are_not_finite_agree_on_the_norm(self) -> None:
        for norm in self.everywhere(_norm_of_bad_gradients):
            assert not math.isfinite(norm)


def _reference(kit: NormChecks) -> nn.Module:
    model = kit.make_reference()
    loss_of(batch_loss()(model, data(8).tensors)).backward()
    return model


def _gradients(model: nn.Module) -> State:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# -- on every rank --------------------------------------------------------------------------------


def _run_backward(session: Session, model: nn.Module, factor: float = 1.0) -> None:
    loss = loss_of(session.run(batch_loss(), model, whole(session)))
    session.backward(loss if factor == 1.0 else loss * factor)


def _clipped(kit: NormChecks, norm_type: float) -> tuple[Tensor, State]:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        norm = session.clip_grad_norm(model, 1e-3, norm_type=norm_type)
        return norm.detach().cpu(), kit.gradients(session, model)


def _norms(kit: NormChecks, norm_type: float) -> tuple[Tensor, Tensor, State]:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        norm = session.grad_norm(model, norm_type=norm_type)
        unlimited = session.clip_grad_norm(model, math.inf, norm_type=norm_type)
        return norm.detach().cpu(), unlimited.detach().cpu(), kit.gradients(session, model)


def _scaled(kit: NormChecks) -> State:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        session.scale_gradients(model, 0.5)
        return kit.gradients(session, model)


def _limited(kit: NormChecks) -> State:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        session.clip_grad_value(model, 0.01)
        return kit.gradients(session, model)


def _not_finite(kit: NormChecks) -> tuple[Any, Any]:
    with prepared(kit) as (session, model):
        before = session.find_nonfinite(model)
        with torch.no_grad():
            last = [p for p in session.unwrap(model).parameters() if p.requires_grad][-1]
            last.mul_(math.nan)
        return before, session.find_nonfinite(model)


def _asked_alone(kit: NormChecks) -> bool:
    with prepared(kit) as (session, model):
        if session.rank != 0:
            return True
        answers = []
        thread = threading.Thread(target=lambda: answers.append(session.find_nonfinite(model)), daemon=True)
        thread.start()
        thread.join(ALONE_S)
        return bool(answers)


def _norm_of_bad_gradients(kit: NormChecks) -> float:
    with prepared(kit) as (session, model):
        # Only the first data rank's part is bad; what comes of it must be known everywhere.
        _run_backward(session, model, factor=math.nan if session.data_rank == 0 else 1.0)
        return session.grad_norm(model).item()
