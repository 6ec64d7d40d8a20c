"""``tp move``: scripts in the styles of the peers' own examples, moved, and shown to train as before."""

import re
import subprocess
import sys
from importlib.resources import files

import pytest
import torch
from tp_core.errors import ConfigError
from tp_core.plugins import registry
from typer.main import get_command

from tests.tp_trainer.move.tried import TRAINS, TRIED, moved

pytestmark = pytest.mark.needs("libcst")

PLAIN = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())


def test(model, device, test_loader):
    with torch.no_grad():
        return sum(nn.functional.mse_loss(model(x.to(device)), y).item() for x, y in test_loader)


losses = []
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(24, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
train_loader = DataLoader(data, batch_size=4)
test_loader = DataLoader(data, batch_size=8)
model = nn.Linear(3, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    train(None, model, device, train_loader, optimizer, epoch)
    test(model, device, test_loader)
torch.save(model.state_dict(), "plain.pt")
"""

PARALLEL = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.gpu_id = int(os.environ["LOCAL_RANK"])
        self.model = model.to(self.gpu_id)
        self.train_data, self.optimizer = train_data, optimizer
        if os.path.exists("parallel.pt"):
            where = f"cuda:{self.gpu_id}"
            self.model.load_state_dict(torch.load("parallel.pt", map_location=where))
        self.model = DDP(self.model, device_ids=[self.gpu_id])

    def run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for x, y in self.train_data:
            self.optimizer.zero_grad()
            loss = (self.model(x.to(self.gpu_id)) - y.to(self.gpu_id)).square().mean()
            loss.backward()
            self.optimizer.step()

    def save(self):
        if self.gpu_id == 0:
            torch.save(self.model.module.state_dict(), "parallel.pt")


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_data = prepare_dataloader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    trainer = Trainer(model, train_data, optimizer)
    for epoch in range(2):
        trainer.run_epoch(epoch)
    trainer.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# A batch size of Accelerate is one process's, so two processes have other batches than one.
ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(64, 3)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
for epoch in range(2):
    for inputs, targets in data:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""
ACCELERATED = "from accelerate import Accelerator, DistributedType\n\naccelerator = Accelerator()\n"
LIGHTNING = "import lightning as L\n\ntrainer = L.Trainer(max_epochs=1)\n"
LIGHTNING_NAMES = "from lightning.pytorch import LightningModule, Trainer\n\nTrainer(max_epochs=1)\n"


def added(source):
    before = source.splitlines()
    return [line.strip() for line in moved(source).splitlines() if line and line not in before]


def test_a_plain_loop():
    assert added(PLAIN) == [
        "import tp_trainer",
        "tp = tp_trainer.Trainer()",
        "tp.backward(loss)",
        "tp.clip_grad_norm(model, 0.5)",
        "device = tp.device",
        "train_loader = tp.prepare(DataLoader(data, batch_size=4))",
        "model, optimizer = tp.prepare(model, optimizer)",
        'torch.save(tp.session.model_state(model), "plain.pt") if tp.is_main else None',
    ]


def test_a_loop_with_ddp():
    assert added(PARALLEL) == [
        "import tp_trainer",
        "tp = tp_trainer.Trainer()",
        "self.gpu_id = tp.local_rank",
        "self.model = model.to(tp.device)",
        "where = tp.device",
        'tp.session.load_model_state(self.model, torch.load("parallel.pt", map_location=where))',
        "loss = (self.model(x.to(tp.device)) - y.to(tp.device)).square().mean()",
        "tp.backward(loss)",
        'torch.save(tp.session.unwrap(self.model).state_dict(), "parallel.pt") if tp.is_main else None',
        "# tp: batch_size is now the batch size of all ranks together",
        "return tp.prepare(DataLoader(dataset, batch_size=batch_size, shuffle=True))",
        "model, optimizer = tp.prepare(model, optimizer)",
    ]
    assert "init_process_group(" not in moved(PARALLEL)


def test_a_distributed_sampler_with_a_name_goes():
    named = PARALLEL.replace(
        "    return DataLoader(dataset, batch_size=batch_size, shuffle=False, "
        "sampler=DistributedSampler(dataset))",
        "    own = DistributedSampler(dataset, shuffle=False) if dist.is_initialized() else None\n"
        "    return DataLoader(dataset, batch_size=batch_size, shuffle=own is None, sampler=own)",
    )
    assert added(named)[-4:-1] == [
        "own = None",
        "# tp: batch_size is now the batch size of all ranks together",
        "return tp.prepare(DataLoader(dataset, batch_size=batch_size, shuffle=False))",
    ]


def test_imports_of_accelerate_and_lightning():
    assert added(ACCELERATED) == [
        "from accelerate import DistributedType",
        "from tp_trainer.compat.accelerate import Accelerator",
    ]
    assert added(LIGHTNING) == [
        "from tp_trainer.compat import lightning as tp_lightning",
        "trainer = tp_lightning.Trainer(max_epochs=1)",
    ]
    assert added(LIGHTNING_NAMES) == [
        "from lightning.pytorch import LightningModule",
        "from tp_trainer.compat.lightning import Trainer",
    ]


def test_a_moved_loop_comes_to_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = {}, {}
    exec(compile(PLAIN, "before.py", "exec"), before)
    weights = torch.load("plain.pt")
    source = moved(PLAIN).replace("Trainer()", 'Trainer(devices="cpu", progress=False)')
    exec(compile(source, "after.py", "exec"), after)
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
    assert torch.allclose(torch.load("plain.pt")["weight"], weights["weight"])


def test_an_optimizer_that_the_model_makes_is_prepared():
    lines = added(
        PLAIN.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "model.configure_optimizers(0.1)")
    )
    assert "model, optimizer = tp.prepare(model, optimizer)" in lines
    assert not any("configure_optimizers" in line for line in lines)


def test_an_option_after_the_script_is_not_lost(tmp_path):
    (move,) = (c.item for c in registry.commands() if c.item.name == "move")
    words = [str(tmp_path / "script.py"), "--write", "new.py"]
    with pytest.raises(ConfigError, match=r"'--write' comes after .* options of tp move come first"):
        get_command(move.load())(words, standalone_mode=False)


def test_what_could_not_be_decided_is_a_comment():
    source = PLAIN.replace("test_loader = ", "other = DataLoader(data)\ntest_loader = ")
    assert "# tp: could not decide whether other is trained on; if so, tp.prepare(other)" in moved(source)


def test_a_name_that_the_script_has_is_left_to_it():
    assert "tp_.backward(loss)" in moved(PLAIN.replace("losses = []", "losses = tp = []"))


REFUSED = {
    "from accelerate.local_sgd import LocalSGD": "LocalSGD is not here",
    "from lightning.fabric import Fabric": "trainer.prepare and trainer.backward",
    "from lightning.pytorch.cli import LightningCLI": "LightningCLI makes its own Trainer",
    "import lightning as L\nL.LightningModule": "has no call of its Trainer",
    "import deepspeed": "Trainer\\(backend='fsdp'\\)",
    "import torch.distributed.rpc as rpc": "tp has no remote calls",
    "from transformers import Trainer\nTrainer(model)": "Hugging Face's Trainer, which builds loader",
    "import transformers\ntransformers.Trainer(model)": "Hugging Face's Trainer, which builds loader",
    "from transformers import Trainer\nclass Own(Trainer): ...\nOwn(model)": "Hugging Face's Trainer, which",
    "print(1)": "no call of backward",
    "loss.backward()": "no optimizer over model.parameters",
    "opt = SGD(self.parameters())\nloss.backward()": "layers train themselves",
    "scaler = torch.amp.GradScaler()\nopt = SGD(model.parameters())\nloss.backward()": "GradScaler",
    "opt = SGD(m.parameters())\nm.share_memory()\nloss.backward()": "Hogwild",
    "opt = SGD(m.parameters())\nRandomSampler(d, num_samples=int(1e10))\nloss.backward()": "draws 1e10",
    "def f(:": "is not Python: .* \\(line 1\\)",
}


@pytest.mark.parametrize("source", list(REFUSED))
def test_a_script_that_is_not_moved_is_answered(source):
    from tp_core.errors import ConfigError

    with pytest.raises(ConfigError, match=REFUSED[source]):
        moved(source)


def tp(*words, **options):
    command = [sys.executable, "-m", "tp_core.cli", "move", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("source", [pytest.param(PLAIN, marks=pytest.mark.nightly), PARALLEL])
def test_the_proof_shows_equal_losses(source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(source)
    done = tp("--prove", "--steps", "6", "--write", tmp_path / "new.py", script)
    assert done.returncode == 0, done.stderr
    assert "+import tp_trainer" in done.stdout
    assert "with tp: 6 of 6 equal to before" in " ".join(done.stdout.split())
    assert done.stdout.count("6 of 6 equal to before") == 2
    assert done.stdout.count("before, 2 ranks: batches twice as large") == (source is PARALLEL)
    assert (tmp_path / "new.py").read_text() == moved(source)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.slow
def test_the_proof_of_an_accelerate_script_compares_two_processes_with_two(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ACCELERATE)
    done = tp("--prove", "--steps", "4", script)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "with tp: 8 of 8 equal to before with tp, 2 ranks: 8 of 8 equal to before, 2 ranks" in said
    assert "+from tp_trainer.compat.accelerate import Accelerator" in done.stdout


@pytest.mark.slow
def test_a_script_that_is_missing_is_named(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = tp(tmp_path / "trian.py")
    assert done.returncode == 2
    assert "did you mean" in done.stderr


def test_the_outcomes_of_public_scripts_are_words_of_the_command():
    outcomes = [outcome for scripts in TRIED.values() for outcome in scripts.values()]
    assert outcomes.count(TRAINS) >= 14
    said = (files("tp_trainer") / "_move" / "_rewrite.py").read_text()
    for outcome in set(outcomes) - {TRAINS}:
        if outcome not in said:
            with pytest.raises(ConfigError, match=re.escape(outcome)):
                moved(f"import {outcome.removeprefix('it uses ')}")
