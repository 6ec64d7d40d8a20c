"""``tp verify --resume``: what a resumed training has otherwise is named; a right one is certified."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tp_core.errors import ConfigError
from tp_verify._certificates import RankRecord, RecordedRun, certify, read_ranks
from tp_verify._resumed_runs import Kill, TrainingCommand

from tests.run_tp import run

# -- The comparison. Private: lines that runs would have to be made for. ---------------------------------


def short(*values):
    return [repr(values), list(values), "torch.float32 (2,)"]


def after(step):
    return {
        "step": step,
        "rows": [f"row {step % 4}", f"other {step % 4}"],
        "weights": {"0.weight": short(1.0 + step, 2.0), "0.bias": short(step / 8, 0.0)},
        "states": {"0.weight exp_avg": short(step / 4, 1.0)},
        "settings": {"lr of AdamW's group 0": [repr(0.1 / step), [0.1 / step], ""]} if step else {},
        "random": {"torch": f"state {step}", "random": "unseeded"},
    }


def trained(steps, start=0, **changes):
    """Return a run of one rank; `changes` has what a function makes of the numbers after a step."""
    rank = RankRecord(after(start), [after(start + n + 1) for n in range(steps)], [])
    rank = copy.deepcopy(rank)
    for kind, change in changes.items():
        for line in [rank.begin, *rank.steps]:
            line[kind] = change(line)
    return RecordedRun([rank])


def killed(steps, *saves):
    first = trained(steps).ranks[0]
    moments = [{"step": step, "number": 0, "what": "", "is_half": False} for step in saves]
    return RecordedRun([RankRecord(first.begin, first.steps, moments)])


WHOLE, KILLED = trained(12), killed(6, 5)


def said(resumed, whole=WHOLE, **more):
    certificate = certify("killed", whole, KILLED, resumed, **more)
    assert certificate.ok == (not certificate.findings)
    return certificate, [str(finding) for finding in certificate.findings]


def test_a_run_that_continues_is_certified_with_what_was_compared():
    certificate, findings = said(trained(7, 5))
    assert findings == []
    assert str(certificate) == (
        "killed, resumed after step 5: the same training\n"
        "  equal bit by bit, up to step 12: the weights, the optimizer's state, the optimizer's settings, "
        "the random numbers, the samples"
    )


def slower(line):
    return {"lr of AdamW's group 0": ["0.5", [0.5], ""]}


def drifted(line):
    """Return weights that part at step 8."""
    weights, step = after(line["step"])["weights"], line["step"]
    return weights if step < 8 else weights | {"0.weight": short(step, 2.0)}


def test_each_thing_that_was_lost_is_named():
    resumed = trained(7, 5)
    resumed.ranks[0].begin["states"] = {}
    assert said(resumed)[1] == ["the optimizer's state, as loaded: there is none: it was not loaded"]
    resumed = trained(7, 5)
    resumed.ranks[0].begin["weights"] = after(2)["weights"]
    assert said(resumed)[1] == ["the weights, as loaded: they are those of step 2"]
    drawn = trained(7, 5, random=lambda line: {"torch": "other", "random": "unseeded"})
    assert said(drawn)[1] == ["step 6: the random numbers: the generator of torch is in another state"]
    certificate, findings = said(trained(7, 5, rows=lambda line: after(line["step"] - 5)["rows"]))
    assert findings == ["step 6: the samples: they are those of step 1"]
    assert "the weights" in certificate.equal
    (finding,) = said(trained(7, 5, settings=slower))[1]
    assert finding.startswith("step 6: the optimizer's settings: lr of AdamW's group 0 is 0.5, and not 0.01")
    (finding,) = said(trained(7, 5, weights=drifted))[1]
    assert finding == (
        "step 8: the weights: they differ by 0.11 of their norm, most in 0.weight; "
        "by 0.076 of their norm after step 12"
    )


def test_a_run_that_begins_anew_ends_early_or_fails_is_not_certified():
    assert said(trained(12))[1] == [
        "the resumed run: it began anew with step 1, though it had saved after step 5"
    ]
    assert said(trained(9, 5))[1] == [
        "the number of steps: the run ends after 14, and after 12 without a kill"
    ]
    assert said(RecordedRun([], failed="it ended with status 1: no"))[1] == [
        "the resumed run: it ended with status 1: no"
    ]
    assert said(RecordedRun([]))[1] == ["the resumed run: it ended well, and made no step"]


def test_a_program_that_trains_otherwise_in_each_run_is_not_certified():
    other = trained(12, weights=lambda line: {"0.weight": short(7.0, 7.0)})
    certificate, (finding,) = said(trained(7, 5), whole=other)
    assert "rank 0 has other ones in a second run, before any kill" in finding
    assert certificate.not_covered == ["resuming: the program trains otherwise in each run"]


def test_what_cannot_be_seen_is_said():
    resumed = trained(7, 5, random=lambda line: {"torch": f"state {line['step']}", "random": "anything"})
    whole = trained(12, random=lambda line: {"torch": f"state {line['step']}", "random": "other"})
    certificate, findings = said(resumed, whole)
    assert findings == []
    assert certificate.not_covered == [
        "the generator of random: each run has another state, as nobody seeds it"
    ]
    with pytest.raises(ConfigError, match="rank 0 could not be recorded: ValueError: no"):
        read_ranks([[{"event": "broken", "rank": 0, "said": "ValueError: no"}]])


def nearly(line):
    return {"0.weight": short(1.0 + line["step"] * (1 + 1e-7), 2.0)}


def test_on_other_ranks_rounding_is_no_difference():
    two = RecordedRun(trained(12).ranks * 2)
    resumed = trained(7, 5, weights=nearly, rows=lambda line: 2 * line["rows"])
    resumed.ranks[0].begin["weights"] = after(5)["weights"]
    certificate = certify("killed", two, RecordedRun(KILLED.ranks * 2), resumed)
    assert certificate.ok, str(certificate)
    assert "resumed after step 5 on 1 rank" in certificate.name
    assert "random numbers: other ranks draw others" in certificate.not_covered


# -- The command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume"], "--resume needs the command after it"),
        (["--resume", "--", "true"], "write {folder} in the command"),
        (["--resume", "--ranks", "2", "--", "true", "{folder}"], "--ranks is for a command with {ranks}"),
        (["--resume", "--", "true", "{folder}", "{ranks}"], "say how many with --ranks"),
        (["--resume", "--kill-at", "x", "--", "true", "{folder}"], "--kill-at takes numbers from 1 on"),
        (["--resume", "--steps", "3", "--", "true", "{folder}"], "--steps is not for --resume"),
        (["--resume", "--", "not-there", "{folder}"], "the command cannot be started"),
        (["--resume", "--", "false", "{folder}"], "the command does not train: it ended with status 1"),
        (["--resume", "--", "true", "{folder}"], "no step of a torch optimizer was seen"),
        (["--kill-at", "3"], "--kill-at is for --resume"),
        (["--ranks", "2,1"], "more than one number is for --resume"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(words, expected, capsys):
    assert run(["verify", *words]) == 2
    assert expected in capsys.readouterr().err


# A program as others write it, with one fault by its variable: it acts when the program resumes.
PROGRAM = """
import os, sys
import torch
from torch import nn

fault, path = os.environ.get("FAULT", ""), os.path.join(sys.argv[1], "last.pt")
torch.manual_seed(0)
x = torch.randn(32, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done, older, order = 0, None, []
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["older" if fault == "older weights" else "model"])
    if fault != "no optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    if fault != "no random numbers":
        torch.set_rng_state(saved["random"])
    done, order = saved["step"], saved["order"]
    if fault == "sampler anew":
        order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
for step in range(done + 1, 13):
    if not order:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(step)).tolist()
    batch, order = x[order[:8]], order[8:]
    optimizer.zero_grad()
    (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    if step % 5 == 0:
        states = {"model": model.state_dict(), "older": older, "optimizer": optimizer.state_dict()}
        half = path if fault == "saved in place" else path + ".half"
        torch.save({"step": step, "random": torch.get_rng_state(), "order": order, **states}, half)
        os.replace(half, path)
    if step == 3:
        older = {name: tensor.clone() for name, tensor in model.state_dict().items()}
"""
FAULTS = {
    "": "",
    "no optimizer": "the optimizer's state, as loaded: there is none: it was not loaded",
    "no random numbers": "step 6: the random numbers: the generator of torch is in another state",
    "sampler anew": "step 6: the samples: they are",
    "older weights": "the weights, as loaded: they are those of step 3",
}


@pytest.mark.slow
@pytest.mark.takes(40)
def test_each_planted_fault_is_named_and_the_right_program_certified(tmp_path, monkeypatch):
    # Private: all of them have the undisturbed and the killed run in common, which are made once.
    (tmp_path / "train.py").write_text(PROGRAM)
    command = TrainingCommand([sys.executable, str(tmp_path / "train.py"), "{folder}"], tmp_path, 120)
    whole, _ = command.run("whole", tmp_path / "saved-whole", 1)
    assert (whole.failed, whole.steps, whole.ranks[0].saves()) == ("", 12, [5, 10])
    killed, has_ended = command.run("killed", tmp_path / "saved", 1, Kill(7, signal.SIGKILL))
    assert has_ended
    for number, (fault, expected) in enumerate(FAULTS.items()):
        monkeypatch.setenv("FAULT", fault)
        shutil.copytree(tmp_path / "saved", tmp_path / f"saved-{number}")
        resumed, _ = command.run(f"resumed-{number}", tmp_path / f"saved-{number}", 1)
        certificate = certify("killed", whole, killed, resumed)
        assert "resumed after step 5" in certificate.name
        assert str([*certificate.findings, ""][0]).startswith(expected), str(certificate)
        assert certificate.ok == (not fault), str(certificate)


# A wrapper that runs a whole step, a loss, and an embedding of places, which is no model of its own.
WRAPPED = """
import sys
import torch
from torch import nn

class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(3, 4)

    def forward(self, batch):
        tokens = batch["tokens"] if isinstance(batch, dict) else batch.tokens
        return self.tokens(tokens) + self.places(torch.arange(3))

class Stepping(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, step):
        return step(self.module)

class Batch:
    tokens = torch.zeros(2, 3, dtype=torch.long)

inner = Places()
model, loss = Stepping(nn.Sequential(inner)), nn.MSELoss()
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
batches = [lambda m: m({"tokens": torch.ones(4, 3, dtype=torch.long)}), lambda m: m(Batch())]
for step in batches:
    output = model(step)
    loss(output, torch.zeros_like(output)).backward()
    optimizer.step()
    open(sys.argv[1] + "/saved", "w").close()
"""


@pytest.mark.slow
def test_the_samples_of_a_wrapper_that_runs_a_step_are_those_of_its_model(tmp_path):
    # Private: how many rows were seen in each step.
    (tmp_path / "train.py").write_text(WRAPPED)
    command = TrainingCommand([sys.executable, str(tmp_path / "train.py"), "{folder}"], tmp_path, 120)
    whole, _ = command.run("whole", tmp_path / "saved", 1)
    assert whole.failed == ""
    assert [len(whole.rows(step)) for step in (1, 2)] == [4, 0]  # none where no model gets a tensor


@pytest.mark.slow
@pytest.mark.takes(50)
def test_the_command_certifies_and_names_a_save_that_was_written_in_place(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    texts = {}
    for option, fault in (("--sigterm", ""), ("--kill-in-save", "saved in place")):
        command = [sys.executable, "-m", "tp_core.cli", "verify", "--resume", "--json", "--kill-at", "6"]
        command += [option, "--", sys.executable, "train.py", "{folder}"]
        environ = {**os.environ, "FAULT": fault}
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500, check=False
        )
        facts = json.loads(done.stdout)
        assert done.returncode == (1 if fault else 0), facts["text"] + done.stderr
        texts[option] = facts["text"]
    assert texts["--sigterm"].startswith("SIGTERM after step 6, resumed after step 5: the same training")
    assert "SIGKILL after step 6, resumed after step 5: the same training" in texts["--kill-in-save"]
    half = "with half of last.pt: not the same training\n  the resumed run: it ended with status 1"
    assert half in texts["--kill-in-save"]


@pytest.mark.slow
def test_a_run_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    sleeps = "[sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True"
    program = f"import subprocess, sys, time\nsubprocess.Popen({sleeps})\ntime.sleep(99)\n"
    (tmp_path / "train.py").write_text(program)
    command = TrainingCommand([sys.executable, str(tmp_path / "train.py"), "{folder}"], tmp_path, 3)
    began = time.monotonic()
    hung, _ = command.run("whole", tmp_path / "saved", 1)
    assert hung.failed == "it had not ended after 3 s"
    assert time.monotonic() - began < 60
    mark = str(tmp_path / "whole")
    for process in psutil.process_iter():
        try:
            assert mark not in str(process.environ())
        except psutil.Error:
            continue
