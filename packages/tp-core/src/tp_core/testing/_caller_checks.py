"""A backend's sessions keep to what the program around them has set, and leave it as it is."""

import gc
import random
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tp_core._launch._environment import LaunchEnvironment
from tp_core.testing._assess_checks import environment_now
from tp_core.testing._bodies import (
    State,
    assert_same,
    batch_loss,
    data,
    loss_of,
    open_session,
    prepared,
    whole,
)
from tp_core.testing._gradient_checks import GradientChecks
from tp_core.testing._ranks import run_ranks

__all__ = ["CallerChecks"]

# By mode: whether a step has gradients, whether it computes in lower precision, and what of.
MODES = {
    "plain": (True, False, torch.float32),
    "no_grad": (False, False, torch.float32),
    "autocast": (True, True, torch.bfloat16),
    "no_grad and autocast": (False, True, torch.bfloat16),
}
THREADS, ENDING_S = "the threads", 10.0
DRAWN = ("torch's generator", "Python's generator", "numpy's generator")


class CallerChecks(GradientChecks):
    """Modes, generators, settings of the process, and batches of any structure."""

    @pytest.mark.parametrize("mode", MODES)
    def test_a_step_runs_in_the_modes_of_its_caller(self, mode: str) -> None:
        for found in self.everywhere(_modes, mode):
            assert found == [MODES[mode]] * len(found), "(gradients, autocast, type of a product) in the step"

    def test_opening_and_preparing_draw_no_random_numbers(self) -> None:
        for changed in self.everywhere(_drawn):
            assert not changed, f"what the program draws next must not depend on it: {', '.join(changed)}"

    def test_a_session_leaves_the_process_as_it_found_it(self) -> None:
        # In new ranks: what one session has left is there before the next one.
        for changed in run_ranks(_left_behind, self.processes, self):
            assert not changed, f"after close() not as before: {', '.join(changed)}"

    def test_a_batch_of_any_structure_reaches_the_step_as_it_is(self) -> None:
        model, (x, y) = self.make_reference(), data(8).tensors
        loss_of(batch_loss()(model, (x, y))).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for gradients in self.everywhere(_gradients_of_nested_batches):
            assert_same(gradients, expected)


class _Nested(Dataset[Any]):
    """The samples of the other tests, as dicts with more in them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data(8)[index]
        return {"x": x, "targets": {"y": y, "halves": (y / 2, y / 4)}, "number": index}


# -- on every rank --------------------------------------------------------------------------------


def _modes(kit: CallerChecks, mode: str) -> list[tuple[bool, bool, torch.dtype]]:
    found = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        product = nn.functional.linear(x, x)
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), product.dtype))
        return loss_of(batch_loss()(model, batch))

    with prepared(kit, kit.make_model().float()) as (session, model):
        batch = whole(session, dtype=torch.float32)
        autocast: AbstractContextManager[Any] = nullcontext()
        if "autocast" in mode:
            autocast = torch.autocast(session.device.type, dtype=torch.bfloat16)
        with torch.set_grad_enabled("no_grad" not in mode), autocast:
            session.run(step, model, batch)
    return found


def _drawn(kit: CallerChecks) -> list[str]:
    model = kit.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # So that a generator which is seeded does not come back to where it was, nor to where another rank's is.
    for _ in range(1 + LaunchEnvironment.read().rank):
        torch.rand(1), random.random()  # noqa: S311
    before = environment_now()
    with open_session(kit, model=model) as session:
        session.prepare_model(model)
        session.prepare_optimizer(optimizer)
        session.prepare_loader(DataLoader(data(8), batch_size=4, shuffle=True))
        return _changed(before, environment_now(), DRAWN)


def _left_behind(kit: CallerChecks) -> list[str]:
    model = kit.make_model()  # one that is split may need the group before
    before = {**environment_now(), **_handlers()}
    _make_one_step(kit, model)
    del model
    names = [name for name in before if name not in DRAWN]
    deadline = time.monotonic() + ENDING_S
    while True:  # threads that were told to end may need a moment
        gc.collect()
        changed = _changed(before, {**environment_now(), **_handlers()}, names)
        if changed != [THREADS] or time.monotonic() > deadline:
            return changed
        time.sleep(0.01)


def _make_one_step(kit: CallerChecks, model: nn.Module) -> None:
    with prepared(kit, model) as (session, wrapped):
        session.backward(loss_of(session.run(batch_loss(), wrapped, whole(session))))


def _handlers() -> dict[str, Any]:
    return {f"the handler of {s.name}": signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], names: Any) -> list[str]:
    return [name for name in names if before[name] != after[name]]


def _gradients_of_nested_batches(kit: CallerChecks) -> State:
    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        y = batch["targets"]["y"]
        half, quarter = batch["targets"]["halves"]
        assert len(batch["number"]) == len(y)
        return nn.functional.mse_loss(model(batch["x"]), half + 2 * quarter)

    with prepared(kit) as (session, model):
        (batch,) = session.prepare_loader(DataLoader(_Nested(), batch_size=8))
        session.backward(loss_of(session.run(step, model, batch)))
        return kit.gradients(session, model)
