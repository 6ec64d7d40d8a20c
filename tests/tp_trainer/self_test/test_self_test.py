"""``tp test``: backends that train what one device trains, and those that do not."""

import json
import os

import psutil
import pytest
import torch
from tp_core.discovery import PluginRegistry
from tp_testing import fake_distribution
from tp_trainer import _self_test  # private: a backend of others that is wrong in one number

from tests.run_tp import run

DEADLINE_S = 800.0

# Each says that it fits one process, and that it has a device to itself or two.
STRANGERS = """
    import os, sys, time
    from tp_core.plugins import Backend, Session, Verdict, hookimpl

    class OneDevice(Backend):
        def assess(self, job):
            one = job.environment.world_size == 1 and len(job.devices) == 1
            return Verdict.fits(1, "one device") if one else Verdict.unfit("it takes one device")
        def open(self, job):
            return Session(job)

    class Right(OneDevice):
        name = "right"

    class Tripling(OneDevice):
        name = "tripling"
        def open(self, job):
            class Tripled(Session):
                def backward(self, loss, share=None):
                    super().backward(3 * loss, share)
            return Tripled(job)

    class Raising(OneDevice):
        name = "raising"
        def open(self, job):
            raise RuntimeError("the cable is not in")

    class Dying(OneDevice):
        name = "dying"
        def open(self, job):
            print("about to die", file=sys.stderr, flush=True)
            os._exit(7)

    class Hanging(OneDevice):
        name = "hanging"
        def open(self, job):
            time.sleep(10_000)

    class Picky(OneDevice):
        name = "picky"
        def assess(self, job):
            verdict = super().assess(job)
            return verdict if job.model is None else Verdict.unfit("it takes convolutions")

    class Elsewhere(OneDevice):
        name = "elsewhere"
        def assess(self, job):
            return Verdict.unfit("there is no such accelerator here")

    @hookimpl
    def tp_backends():
        return [Right(), Tripling(), Raising(), Dying(), Hanging(), Picky(), Elsewhere()]
"""


@pytest.fixture
def setups(tmp_path, monkeypatch):
    """The setups of strangers' backends, which the processes find, too; by name."""
    stranger = fake_distribution(
        tmp_path, "tp-strange", entry_points={"strange": "strange"}, modules={"strange": STRANGERS}
    )
    with stranger as place:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(place), os.getenv("PYTHONPATH")])))
        found = _self_test.find_setups(PluginRegistry(environ={}).backends(), ranks=2)
        yield {setup.backend: setup for setup in found if setup.origin == "tp-strange 1.0"}


def test_backends_are_tried_where_they_say_that_they_fit(setups):
    cpu = torch.device("cpu")
    assert (setups["right"].processes, setups["right"].devices) == (1, (cpu,))
    assert setups["elsewhere"].unfit == "there is no such accelerator here"
    ours = {s.backend: s for s in _self_test.find_setups(PluginRegistry(environ={}).backends(), ranks=3)}
    assert (ours["ddp"].processes, ours["ddp"].devices) == (3, (cpu, cpu, cpu))
    assert (ours["tuple"].processes, ours["tuple"].devices) == (1, (cpu, cpu))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        pytest.param("right", "equal", "", marks=pytest.mark.nightly),  # those of tp are, below
        ("tripling", "differs", "it trains other weights or losses than one device, by up to"),
        ("raising", "failed", "RuntimeError: the cable is not in"),
        ("dying", "failed", "it ended with status 7: about to die"),
        ("picky", "unfit", "it takes convolutions"),
        ("elsewhere", "unfit", "there is no such accelerator here"),
    ],
)
def test_what_is_wrong_with_a_strangers_backend_is_named(setups, name, outcome, reason):
    result = _self_test.run_setup(setups[name], timeout_s=DEADLINE_S)
    assert (result.outcome, result.ok) == (outcome, outcome in ("equal", "unfit")), result
    assert reason in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_backend_that_hangs_is_ended_at_the_deadline(setups, processes, tmp_path):
    hanging = _self_test.Setup("hanging", "tp-strange 1.0", processes, (torch.device("cpu"),) * processes)
    result = _self_test.run_setup(hanging, timeout_s=3.0)
    assert (result.outcome, result.reason) == ("hangs", "it had not ended after 3 s")
    left = psutil.process_iter(["environ"])  # every process of the setup finds the stranger by this
    assert not [p for p in left if str(tmp_path) in (p.info["environ"] or {}).get("PYTHONPATH", "")]


@pytest.mark.takes(60)
@pytest.mark.slow
def test_every_installed_backend_trains_what_one_device_trains(capsys):
    status = run(["test", "--json", "--timeout-s", str(DEADLINE_S)])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["ok"]) == (0, True), report
    equal = {(t["backend"], t["processes"], len(t["devices"])) for t in report["tests"]}
    for way in [("single", 1, 1), ("tuple", 1, 2), ("dp-gather", 1, 2), ("ddp", 2, 2), ("fsdp", 2, 2)]:
        assert way in equal
    assert ("shard", 2, 2) in equal
    assert all(t["outcome"] == "equal" and t["difference"] < 1e-8 for t in report["tests"])


def test_differences_of_weights_and_losses_count():
    one = _self_test.reference(torch.float64)
    assert one.difference(_self_test.reference(torch.float64)) == 0.0
    moved = _self_test.Numbers({n: t + (n == "0.bias") * 0.25 for n, t in one.weights.items()}, one.losses)
    assert one.difference(moved) == pytest.approx(0.25)
    assert one.difference(
        _self_test.Numbers(one.weights, [one.losses[0] + 0.5, *one.losses[1:]])
    ) == pytest.approx(0.5)
    nan = _self_test.Numbers(one.weights, [float("nan"), *one.losses[1:]])
    assert one.difference(nan) == one.difference(_self_test.Numbers({}, one.losses)) == float("inf")


def test_the_table_names_what_is_wrong_and_the_status_says_so(capsys, monkeypatch):
    outcomes = {"single": ("equal", "", 0.0), "ddp": ("hangs", "it had not ended after 3 s", None)}

    def pretend(setup, *, timeout_s):
        outcome, reason, difference = outcomes[setup.backend]
        return _self_test.Result(setup, outcome, reason, difference, 1.0)

    monkeypatch.setattr("tp_trainer._self_test.run_setup", pretend)
    assert run(["test", "--backend", "single", "--backend", "ddp"]) == 1
    out = capsys.readouterr().out
    assert "ddp, 2 processes (cpu): hangs: it had not ended after 3 s" in out
    assert "1 of 2 do not train what one device trains." in out
    assert run(["test", "--backend", "single"]) == 0
    assert run(["test", "--backend", "singel"]) == 2
    assert "did you mean 'single'" in capsys.readouterr().err
