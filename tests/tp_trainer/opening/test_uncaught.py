"""What an error in a step shows: the frames of the script, and no others, in one process and on ranks."""

import os
import subprocess
import sys

import pytest
import torch
from tp_core.errors import TpError
from tp_trainer import Trainer

SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :int(os.environ.get("WIDTH", "4"))])

def check(batch):
    if os.environ.get("RANK", "1") == "1":
        raise ValueError("bad data")

def step(model, batch):
    if "WIDTH" not in os.environ:
        check(batch)
    return model(batch[0]).mean()

if "OWN_HOOK" in os.environ:
    import traceback
    sys.excepthook = lambda kind, error, trace: print("frames", len(traceback.extract_tb(trace)))
net = Net(4, 1)
data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
Trainer(seed=0, progress=False).fit(net, torch.optim.SGD(net.parameters(), lr=0.1), data, step=step)
"""


def run(folder, *command, **variables):
    path = folder / "s.py"
    path.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *command, str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **variables},
    )


def frames(text):
    return [line for line in text.splitlines() if 'File "' in line]


def functions(text):
    return [line.rpartition(" in ")[2] for line in frames(text)]


@pytest.mark.slow
def test_an_error_in_a_step_shows_the_frames_of_the_script_alone(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1
    assert functions(done.stderr) == ["<module>", "step", "check"]
    assert done.stderr.count("ValueError: bad data") == 1
    assert "TP_TRACEBACK=full shows" in done.stderr
    whole = run(tmp_path, TP_TRACEBACK="full")
    assert len(frames(whole.stderr)) > 10
    assert "TP_TRACEBACK" not in whole.stderr


def test_a_wrong_argument_of_a_trainer_shows_the_line_of_the_script_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for arguments in ({"strategy": "ddp"}, {"seed": "1"}, {"backend": "dpp"}, {"devices": "gpu"}):
        with pytest.raises(TpError) as caught:
            Trainer(**arguments)
        sys.excepthook(caught.type, caught.value, caught.tb)
        shown = capsys.readouterr().err
        assert functions(shown) == ["test_a_wrong_argument_of_a_trainer_shows_the_line_of_the_script_alone"]


def test_a_call_that_does_not_fit_shows_what_to_write(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    trainer = Trainer(progress=False)
    model = torch.nn.Linear(1, 1)
    loop = trainer.loop([torch.ones(1, 1)], epochs=1)
    answers = {
        "trainer.backward(first + second)": lambda: trainer.backward(1, 2),
        "trainer.update(model, optimizer, clip_norm=1.0)": lambda: trainer.update(model),
        "trainer.run(step, model, batch)": lambda: trainer.run(abs, model=model),
        "with trainer.no_sync(model):": trainer.no_sync,
        "with trainer.autocast():": lambda: trainer.autocast("cuda"),
        "trainer.global_loss(loss)": trainer.global_loss,
        "loop.steps_per_epoch": lambda: len(loop),
        "for batch in loop: ...": lambda: next(loop),
    }
    for answer, call in answers.items():
        with pytest.raises(TypeError) as caught:
            call()
        sys.excepthook(caught.type, caught.value, caught.tb)
        assert answer in capsys.readouterr().err


def test_a_trainer_of_somebody_else_gets_no_answer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    Trainer(progress=False).device  # noqa: B018 - the hook is there from now on
    space = {}
    exec("class Trainer:\n    def run(self): pass\ndef call(): Trainer().run(1)", space)  # as minGPT's
    try:
        space["call"]()
    except TypeError as error:
        trace = error.__traceback__.tb_next
        sys.excepthook(TypeError, error, trace)
    text = capsys.readouterr().err
    assert "Trainer.run() takes 1 positional argument" in text
    assert "write trainer.run" not in text


@pytest.mark.slow
def test_an_error_of_torch_shows_the_last_of_its_frames(tmp_path):
    done = run(tmp_path, WIDTH="3")
    assert functions(done.stderr) == ["<module>", "step", "forward", "forward"]
    assert "linear.py" in frames(done.stderr)[-1]


@pytest.mark.slow
def test_a_hook_of_the_script_gets_all_frames(tmp_path):
    done = run(tmp_path, OWN_HOOK="1")
    assert done.stdout.startswith("frames ")
    assert int(done.stdout.split()[1]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run --nproc-per-node", "tp_core.cli launch -n"])
def test_ranks_show_the_error_once_and_a_line_for_those_that_died_of_it(tmp_path, launcher):
    done = run(tmp_path, "-m", *launcher.split(), "2", OMP_NUM_THREADS="1")
    assert done.returncode == 1
    of_ranks = "\n".join(line for line in done.stderr.splitlines() if line.startswith("[rank"))
    assert functions(of_ranks) == ["<module>", "step", "check"], done.stderr
    assert of_ranks.count("ValueError: bad data") == 1
    lost = [line for line in of_ranks.splitlines() if "lost another rank" in line]
    assert len(lost) <= 1  # the launcher may have ended rank 0 before
    if launcher.startswith("tp"):
        assert frames(done.stderr) == frames(of_ranks)
        assert len(done.stderr.splitlines()) < 30
