"""A backend takes optimizers and models as scripts make them."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tp_core.testing._bodies import State, assert_same, batch_loss, data, loss_of, on_cpu, open_session
from tp_core.testing._gradient_checks import GradientChecks

__all__ = ["ScriptChecks"]

RATES = 0.05, 0.02


class ScriptChecks(GradientChecks):
    """Optimizers that are made later, several of them, and models that are not trained."""

    def test_an_optimizer_made_after_the_model_was_prepared_steps_it(self) -> None:
        self._check_weights(late=True, several=False)

    def test_several_optimizers_step_their_parts_of_a_model(self) -> None:
        self._check_weights(late=False, several=True)

    def _check_weights(self, *, late: bool, several: bool) -> None:
        model, step = self.make_reference(), batch_loss()
        optimizers = _optimizers(model, several=several)
        for batch in DataLoader(data(12), batch_size=4):
            model.zero_grad()
            loss_of(step(model, batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
        for weights in self.everywhere(_trained, late, several):
            assert_same(weights, dict(model.state_dict()))

    def test_a_model_without_gradients_is_evaluated_as_it_is(self) -> None:
        with torch.no_grad():
            expected = self.make_reference()(data(8).tensors[0])
        for state, outputs in self.everywhere(_evaluated_frozen):
            assert_same(state, self.make_reference().state_dict())
            torch.testing.assert_close(_sorted(outputs), _sorted(expected), rtol=1e-9, atol=1e-11)


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    return rows[rows[:, 0].argsort()]  # a backend may give its parts samples in an order of its own


def _optimizers(model: nn.Module, *, several: bool) -> list[torch.optim.Optimizer]:
    """Return one over all parameters, or one over the first and one over all others."""
    first, *others = model.parameters()
    parts = [[first], others] if several else [[first, *others]]
    return [torch.optim.SGD(part, lr=rate, momentum=0.9) for part, rate in zip(parts, RATES, strict=False)]


# -- on every rank --------------------------------------------------------------------------------


def _trained(kit: ScriptChecks, late: bool, several: bool) -> State:
    model, step = kit.make_model(), batch_loss()
    with open_session(kit, model=model) as session:
        plain = [] if late else _optimizers(model, several=several)
        wrapped = session.prepare_model(model)
        if late:
            plain = _optimizers(session.unwrap(wrapped), several=several)
        optimizers = [session.prepare_optimizer(optimizer) for optimizer in plain]
        for batch in session.prepare_loader(DataLoader(data(12), batch_size=4)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            session.backward(loss_of(session.run(step, wrapped, batch)))
            for optimizer in optimizers:
                optimizer.step()
        return on_cpu(session.model_state(wrapped))


def _evaluated_frozen(kit: ScriptChecks) -> tuple[State, torch.Tensor]:
    model = kit.make_model().requires_grad_(requires_grad=False)
    outputs = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs.append(model(batch[0]).cpu())
        return loss_of(batch_loss()(model, batch))

    with open_session(kit, model=model) as session, torch.no_grad():
        wrapped = session.prepare_model(model)
        loader = session.prepare_loader(DataLoader(data(8), batch_size=8), training=False)
        for batch in loader:
            session.run(step, wrapped, batch)
        rows = session.gather(torch.cat(outputs).to(session.device)).cpu()
        return on_cpu(session.model_state(wrapped)), rows
