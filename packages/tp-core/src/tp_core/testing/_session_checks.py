"""A backend's sessions open, fail, close and follow each other as they should."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported
from torch.utils.data import DataLoader

from tp_core._launch._environment import LaunchEnvironment
from tp_core._launch._join import join_process_group
from tp_core.errors import ConfigError, ModelError
from tp_core.testing._bodies import (
    State,
    assert_same,
    batch_loss,
    data,
    loss_of,
    make_job,
    open_session,
    prepared,
    whole,
)
from tp_core.testing._gradient_checks import GradientChecks
from tp_core.testing._ranks import run_ranks

__all__ = ["SessionChecks"]

_BEHIND_S = 1.0
_MEETING_S = 120.0  # for ranks that wait for each other where nobody comes


class SessionChecks(GradientChecks):
    """Errors, and beginnings and ends."""

    def test_a_step_that_raises_is_raised_in_the_caller(self) -> None:
        for message in self.everywhere(_raising_step):
            assert "the step's own words" in message

    def test_a_wrapped_model_is_refused(self) -> None:
        for message in self.everywhere(_wrapped_model):
            assert "already wrapped" in message

    def test_an_unknown_option_is_refused(self) -> None:
        for message, is_joined in self.everywhere(_unknown_option):
            assert "no option 'no_such_option'" in message
            assert not is_joined, "the options must be looked at before anything is started"

    def test_closing_twice_does_nothing(self) -> None:
        assert all(self.everywhere(_closed_twice))

    def test_closing_leaves_the_process_group_as_it_was_found(self) -> None:
        for before, after in self.everywhere(_groups):
            assert before == after

    def test_a_process_group_of_the_programs_own_is_used_and_left_as_it_is(self) -> None:
        for is_the_same, total, size in self.everywhere(_within_a_group):
            assert is_the_same, "a group that the program has joined is the program's to leave"
            assert total == size

    def test_a_second_session_in_one_process_works_as_the_first(self) -> None:
        model = self.make_reference()
        loss_of(batch_loss()(model, data(8).tensors)).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for gradients in [*self.everywhere(_two_sessions), *self._launched(_two_sessions)]:
            for found in gradients:
                assert_same(found, expected)

    def _launched(self, body: Callable[..., Any]) -> list[Any]:
        """Run ``body(self)`` on ranks as under a launcher, which serves their store for longer than a group.

        Where rank 0 serves it, it goes with the group, and what one session has left there hurts no other.
        """
        if self.processes == 1:
            return []
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        return run_ranks(body, self.processes, self, timeout_s=_MEETING_S, environ=environ)


# -- on every rank --------------------------------------------------------------------------------


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _raising_step(kit: SessionChecks) -> str:
    def step(_model: nn.Module, _batch: Any) -> Tensor:
        msg = "the step's own words"
        raise ValueError(msg)

    with prepared(kit) as (session, model):
        batch = next(iter(session.prepare_loader(DataLoader(data(4), batch_size=4))))
        with pytest.raises(Exception, match="the step's own words") as caught:
            session.run(step, model, batch)
        return str(caught.value)


def _wrapped_model(kit: SessionChecks) -> str:
    with open_session(kit) as session, pytest.raises(ModelError) as caught:
        session.prepare_model(nn.DataParallel(kit.make_model()))
    return str(caught.value)


def _unknown_option(kit: SessionChecks) -> tuple[str, bool]:
    options = {kit.backend.name: {**kit.options, "no_such_option": 1}}
    was_joined = _is_joined()
    with pytest.raises(ConfigError) as caught:
        kit.backend().open(make_job(kit, options=options)).close()
    return str(caught.value), _is_joined() and not was_joined


def _closed_twice(kit: SessionChecks) -> bool:
    session = open_session(kit, model=kit.make_model())
    session.close()
    session.close()
    return True


def _groups(kit: SessionChecks) -> tuple[bool, bool]:
    model = kit.make_model()  # one that is split may need the group before
    before = _is_joined()
    with open_session(kit, model=model) as session:
        session.reduce(torch.ones(1, device=session.device))
    return before, _is_joined()


def _within_a_group(kit: SessionChecks) -> tuple[bool, float, int]:
    job = make_job(kit)
    if job.environment.world_size == 1:  # no group to join
        with open_session(kit, model=kit.make_model()) as session:
            return True, session.reduce(torch.ones(1, device=session.device)).item(), session.data_size
    leave = join_process_group(job.environment, device=job.devices[0])
    try:
        before = dist.group.WORLD
        with open_session(kit, model=kit.make_model()) as session:
            total = session.reduce(torch.ones(1, device=session.device)).item()
            size = session.data_size
        return _is_joined() and dist.group.WORLD is before, total, size
    finally:
        leave()


def _two_sessions(kit: SessionChecks) -> list[State]:
    found: list[State] = []
    for _ in range(2):
        # Ranks never come at once: one that is ahead must not take what another one has left for new.
        if found and LaunchEnvironment.read().rank == 0:
            time.sleep(_BEHIND_S)
        with prepared(kit) as (session, model):
            session.backward(loss_of(session.run(batch_loss(), model, whole(session))))
            found.append(kit.gradients(session, model))
    return found
