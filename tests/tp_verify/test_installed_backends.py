"""``tp verify`` without a program: backends that train what one device trains, and those that do not."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from tp_core.discovery import PluginRegistry
from tp_testing import fake_distribution
from tp_verify._installed_backends import find_trials  # private: the devices are this host's
from tp_verify._small_training import MAX_NORM, STEPS, train_by_hand

from tests.run_tp import run

# Each says that it fits one process with one device.
STRANGERS = """
    import os, sys
    from tp_core.plugins import Backend, Session, Verdict, hookimpl

    class OneDevice(Backend):
        def assess(self, job):
            one = job.environment.world_size == 1 and len(job.devices) == 1
            return Verdict.fits(1, "one device") if one else Verdict.unfit("it takes one device")
        def open(self, job):
            return Session(job)

    class Right(OneDevice):
        name = "right"

    class Doubling(OneDevice):
        name = "doubling"
        factor = 2.0
        def open(self, job):
            class Scaled(Session):
                def backward(own, loss, share=None):
                    Session.backward(own, self.factor * loss, share)
            return Scaled(job)

    class Nudging(Doubling):
        name = "nudging"
        factor = 1.0 + 1e-6

    class Raising(OneDevice):
        name = "raising"
        def open(self, job):
            raise RuntimeError("the cable is not in")

    class Dying(OneDevice):
        name = "dying"
        def open(self, job):
            os._exit(7)

    class Picky(OneDevice):
        name = "picky"
        def assess(self, job):
            verdict = super().assess(job)
            return verdict if job.model is None else Verdict.unfit("it takes convolutions")

    class Elsewhere(OneDevice):
        name = "elsewhere"
        def assess(self, job):
            return Verdict.unfit("there is no such accelerator here")

    class Broken(OneDevice):
        name = "broken"
        def assess(self, job):
            raise RuntimeError("cannot look")

    @hookimpl
    def tp_backends():
        return [Right(), Doubling(), Nudging(), Raising(), Dying(), Picky(), Elsewhere(), Broken()]
"""
RESULTS = {
    "right": "equal",
    "doubling": "step 1: the weight of ",  # by what its epsilon leaves of Adam's scaling
    "nudging": "step ",  # far below what a training in float32 could show
    "raising": "the run: RuntimeError: the cable is not in",
    "dying": "the run: rank 0 ended with status 7",
    "picky": "not tried: it refused: ",
    "elsewhere": "not tried: there is no such accelerator here",
    "broken": "not tried: its assessment raised RuntimeError: cannot look",
}
OTHERS = "tp-tuple,tp-dp-gather,tp-shard,tp-context,tp-pipeline"
CPU = torch.device("cpu")


@pytest.fixture
def strangers(tmp_path):
    stranger = fake_distribution(
        tmp_path, "tp-strange", entry_points={"strange": "strange"}, modules={"strange": STRANGERS}
    )
    with stranger as place:
        yield place


def tp_verify(*arguments, **environ):
    command = [sys.executable, "-m", "tp_core.cli", "verify", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=800, check=False
    )


def test_backends_are_tried_where_they_say_that_they_fit(strangers):
    trials = list(find_trials(PluginRegistry(environ={}).backends(), ranks=3))
    found = {(t.backend, t.ranks, t.devices) for t in trials if not t.unfit}
    expected = {("right", 1, (CPU,)), ("ddp", 3, (CPU,) * 3), ("tuple", 1, (CPU, CPU)), ("single", 1, (CPU,))}
    assert expected <= found
    (elsewhere,) = [t for t in trials if t.backend == "elsewhere"]
    assert (elsewhere.origin, elsewhere.unfit) == ("tp-strange 1.0", "there is no such accelerator here")


@pytest.mark.slow
@pytest.mark.takes(30)
def test_what_is_wrong_with_a_backend_of_others_is_named(strangers):
    paths = os.pathsep.join(filter(None, [str(strangers), os.getenv("PYTHONPATH")]))
    done = tp_verify(TP_DISABLE_PLUGINS=OTHERS, PYTHONPATH=paths)
    assert done.returncode == 1, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["backend", "from", "layout", "seconds", "result"]
    at = head.index("result")
    found = {line.split()[0]: line[at:] for line in lines if " tp-strange 1.0 " in line}
    assert found.keys() == RESULTS.keys()
    assert {name: said for name, said in found.items() if not said.startswith(RESULTS[name])} == {}
    assert "convolutions" in found["picky"]


@pytest.mark.slow
@pytest.mark.takes(60)
def test_every_installed_backend_trains_what_one_device_trains():
    done = tp_verify("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), report["text"]
    tried = {(r["backend"], r["ranks"]): r for r in report["reports"] if r["compared"]}
    assert {name for name, _ in tried} >= {"single", "tuple", "dp-gather", "ddp", "fsdp", "shard", "context"}
    assert tried["ddp", 2]["layout"] == "2 processes (cpu)"
    assert tried["ddp", 2]["origin"].startswith("tp-trainer ")
    # By hand on one device: of the six weights and their momentum, and of the losses of two epochs.
    assert tried["single", 1]["compared"] == {"weights": 6, "states": 6, "metrics": 4}


def test_some_steps_are_clipped_and_some_are_not(monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(float(clip(*args))))
    train_by_hand()
    below = [norm for norm in norms if norm < MAX_NORM]
    assert 3 <= len(below) <= STEPS - 3


def test_without_the_trainer_it_says_what_to_install(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "tp_trainer" else found(n))
    assert run(["verify"]) == 2
    assert "pip install 'tp-trainer'" in capsys.readouterr().err
