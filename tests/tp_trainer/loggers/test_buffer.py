"""Numbers on their way to the loggers: kept on the device, read together, in order; loggers that break."""

import logging
from types import SimpleNamespace

import pytest
import torch
from tp_core.errors import ConfigError
from tp_core.plugins import Logger
from tp_trainer._running._log import RunLog  # private: which numbers wait is not to be seen

from tests.accelerator import GPU, KIND


def log_of(*loggers):
    """Return the log of a run of one rank."""
    session = SimpleNamespace(is_main=True, world_size=1, broadcast=lambda value, **_: value)
    return RunLog(session, loggers)


def opened(*loggers):
    found = log_of(*loggers)
    found.open(resumed=False, step=0, epoch=1)
    return found


class Listed(Logger):
    name = "listed"

    def __init__(self):
        self.calls, self.state = [], {}

    def open(self, info):
        self.calls.append("open")

    def log(self, numbers, *, step, epoch):
        self.calls.append((step, epoch, dict(numbers)))

    def event(self, kind, facts, *, step, epoch):
        self.calls.append(kind)

    def close(self, status):
        self.calls.append(status)

    def state_dict(self):
        return {"calls": len(self.calls)}

    def load_state_dict(self, state):
        self.state = state


class Broken(Listed):
    name = "broken"

    def __init__(self, at):
        super().__init__()
        self.at = at

    def open(self, info):
        if self.at == "open":
            raise OSError("no room")

    def log(self, numbers, *, step, epoch):
        if step == self.at:
            raise OSError("no room")
        super().log(numbers, step=step, epoch=epoch)


def test_numbers_of_one_step_are_one_row_and_come_in_order():
    logger = Listed()
    buffer = log_of(logger)
    buffer.add({"loss": torch.tensor([1.5])}, step=1, epoch=1)
    buffer.add({"norm": 2, "loss": 1.0}, step=1, epoch=1)
    buffer.add({"loss": torch.tensor(0.1, dtype=torch.float64, requires_grad=True)}, step=2, epoch=2)
    assert logger.calls == []
    buffer.flush()
    buffer.flush()
    assert logger.calls == [(1, 1, {"loss": 1.0, "norm": 2.0}), (2, 2, {"loss": 0.1})]


def test_a_logger_that_changes_its_numbers_leaves_the_next_ones_as_they_were():
    class Taking(Listed):
        def log(self, numbers, *, step, epoch):
            numbers.clear()

    logger = Listed()
    buffer = opened(Taking(), logger)
    buffer.add({"loss": 1.0}, step=1, epoch=1)
    buffer.flush()
    assert logger.calls == ["open", (1, 1, {"loss": 1.0})]


def test_a_number_is_that_of_the_moment_it_was_added_at():
    logger = Listed()
    buffer = opened(logger)
    total = torch.zeros(())
    for step in (1, 2):
        total += 1
        buffer.add({"total": total}, step=step, epoch=1)
    buffer.close("finished")
    assert logger.calls == ["open", (1, 1, {"total": 1.0}), (2, 1, {"total": 2.0}), "finished"]


def test_events_states_and_the_end_come_after_the_numbers_before_them():
    logger = Listed()
    buffer = opened(logger)
    buffer.add({"loss": 1.0}, step=1, epoch=1)
    buffer.event("checkpoint", {}, step=1, epoch=1)
    buffer.add({"loss": 2.0}, step=2, epoch=1)
    assert buffer.state_dict() == {"loggers": [{"name": "listed", "state": {"calls": 4}}]}
    buffer.add({"loss": 3.0}, step=3, epoch=1)
    buffer.close("interrupted")
    rows = [(1, 1, {"loss": 1.0}), (2, 1, {"loss": 2.0}), (3, 1, {"loss": 3.0})]
    assert logger.calls == ["open", rows[0], "checkpoint", rows[1], rows[2], "interrupted"]


def test_states_go_to_the_loggers_of_their_name_in_order():
    class Other(Listed):
        name = "other"

    saved = opened(Listed(), Other(), Listed())
    saved.event("one", {}, step=1, epoch=1)
    state = saved.state_dict()
    state["loggers"][0]["state"] = {"calls": "first"}
    loggers = [Other(), Listed(), Listed(), Listed()]
    log_of(*loggers).load_state_dict(state)
    assert [logger.state for logger in loggers] == [{"calls": 2}, {"calls": "first"}, {"calls": 2}, {}]


def test_a_logger_that_breaks_is_named_and_left_out_and_the_others_go_on(caplog):
    good, bad = Listed(), Broken(at=2)
    buffer = opened(bad, good)
    buffer.load_state_dict({"loggers": [{"name": "broken", "state": {"calls": 7}}]})
    with caplog.at_level(logging.ERROR, logger="tp_trainer"):
        for step in (1, 2, 3):
            buffer.add({"loss": 1.0}, step=step, epoch=1)
            buffer.flush()
    assert "the logger 'broken' failed and gets no more of this run" in caplog.text
    assert "no room" in caplog.text
    assert [row[0] for row in good.calls[1:]] == [1, 2, 3]
    assert bad.calls[1:] == ["failed"]  # it is closed, once
    assert buffer.state_dict()["loggers"][0]["state"] == {"calls": 7}


def test_a_logger_that_cannot_be_opened_ends_the_run_and_closes_the_others():
    good = Listed()
    with pytest.raises(OSError, match="no room"):
        opened(good, Broken(at="open"))
    assert good.calls == ["open", "failed"]


def test_without_loggers_nothing_is_kept_or_looked_at():
    buffer = log_of()
    buffer.add({"loss": object()}, step=1, epoch=1)
    assert not buffer.is_on
    assert not buffer._rows


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.ones(3), r"'m' is a tensor of shape \(3,\)"), ("1", "'m' is '1'"), (None, "'m' is None")],
)
def test_what_is_no_number_is_refused_by_name(value, words):
    with pytest.raises(ConfigError, match=words):
        log_of(Listed()).add({"m": value}, step=1, epoch=1)


@pytest.mark.gpu
@pytest.mark.sync_budget(2)  # before and after
def test_adding_numbers_of_a_gpu_does_not_wait_for_it():
    logger = Listed()
    buffer = log_of(logger)
    values = torch.arange(4.0, device=GPU)
    torch.accelerator.synchronize()
    if KIND == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            buffer.add({"a": values[step], "b": values[step + 1]}, step=step, epoch=1)
    finally:
        if KIND == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    buffer.flush()
    assert logger.calls == [(s, 1, {"a": float(s), "b": s + 1.0}) for s in range(3)]
