"""Small runs that stop in the middle of an epoch, and the numbers that they end with when they go on.

`python -m tests.surface.runs [kind ...]` writes the folder of each run to `before/`, as it is when the run
stops, and the numbers beside it. Run it only for a new kind: what is there is older than what reads it.
"""

import io
import json
import re
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Limits, LogOptions, SchedulerOptions, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage
from tp_trainer.loggers import CsvLogger, JsonLinesLogger

__all__ = ["BEFORE", "RANKS", "STOP", "go_on", "here", "load_whole", "train"]

BEFORE = Path(__file__).with_name("before")
RANKS = {"single": 1, "rich": 1, "stream": 1, "ddp": 2, "fsdp": 2, "shard": 2}
STOP = 3  # of five steps in each of two epochs


class Stream(IterableDataset):
    """Data without a length, which knows where it stands."""

    def __init__(self, items):
        self.items, self.at = items, 0

    def __iter__(self):
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make_model(kind):
    torch.manual_seed(1)
    if kind != "shard":
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    import tp_shard as ts

    if not ts.distributed.is_initialized():
        ts.distributed.init_process_group()
    return nn.Sequential(ts.nn.ParallelLinear(3, 4, dim=1), nn.Tanh(), ts.nn.ParallelLinear(4, 1, dim=0))


def train(folder, kind, max_steps=None):
    """Train in `folder`, from the newest checkpoint there; return weights, averages, counts and history."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    if kind == "stream":
        loader = DataLoader(Stream(data), batch_size=4)
    model, rich = make_model(kind), kind == "rich"
    average, counts = ExponentialMovingAverage(0.9), {"seen": [0], "name": "a run"}

    def step(model, batch):
        counts["seen"][0] += model.training
        return {"loss": (model(batch[0]) - batch[1]).square().mean(), "largest": batch[0].max()}

    make = torch.optim.Adam if rich else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.05, **({} if rich else {"momentum": 0.9}))
    settings = {"precision": "fp16-mixed"} if rich else {}
    backend = kind if RANKS[kind] > 1 else "single"
    with Trainer(backend=backend, seed=3, progress=False, devices="cpu", **settings) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            loader,
            step=step,
            epochs=2,
            validation=DataLoader(data, batch_size=4),
            limits=Limits(steps_per_epoch=5),
            scheduler=SchedulerOptions(StepLR(optimizer, 2), every="step") if rich else None,
            callbacks=[average] if rich else [],
            state=counts if rich else None,
            clip_norm=1.0,
            max_steps=max_steps,
            checkpoint=Checkpoints(folder, every_steps=STOP, every_epochs=None, keep=1),
            resume="auto",
            log=LogOptions([JsonLinesLogger(folder), CsvLogger(folder)], every_steps=2),
        )
        weights = {name: t.tolist() for name, t in trainer.session.model_state(model).items()}
        if max_steps:
            trainer.export(model, folder / "model.safetensors")
            if kind == "shard":
                import tp_shard as ts

                ts.save_sharded(model, folder / "sharded", optimizer=optimizer)
    kept = {name: t.tolist() for name, t in average.averages.items()} if rich else {}
    plain = json.loads(json.dumps([record.to_dict() | {"seconds": 0} for record in history]))
    return {"weights": weights, "averages": kept, "counts": counts["seen"] if rich else [], "history": plain}


def load_whole(kind, path):
    """Return the weights that `load_model` reads from a file or folder, on this process alone."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh() if kind == "shard" else nn.Dropout(0.2), nn.Linear(4, 1))
    with Trainer(backend="single", progress=False, devices="cpu") as trainer:
        trainer.load_model(model, path)
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def go_on(kind, folder, max_steps=None):
    """Train on the ranks of a kind, and return what rank 0 returns; one rank alone is this process."""
    return (
        train(folder, kind, max_steps)
        if RANKS[kind] == 1
        else run_ranks(train, RANKS[kind], folder, kind, max_steps)[0]
    )


def here():
    """Return what the last bits of a sum depend on."""
    info = Path("/proc/cpuinfo")
    vendors = re.findall(r"vendor_id\s*: (\w+)", info.read_text() if info.exists() else "")
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "vendor": vendors[0] if vendors else "",  # MKL has other kernels for each
        "python": sys.version[:4],
    }


def _forget_machine(folder):
    """Take out of a run's folder where it lay, and on which machine."""
    for lock in folder.glob(".*.lock"):
        lock.unlink()
    log = folder / "log.jsonl"
    first, *others = log.read_text().splitlines()
    values = json.loads(first) | {"folder": "run"}
    values["environment"] |= {"host": "host", "platform": "Linux", "command": "train.py", "folder": "."}
    log.write_text("\n".join([json.dumps(values), *others]) + "\n")


def _pack(folder, path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=9) as packed:

        def plain(member):
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            return member

        packed.add(folder, "run", filter=plain)
    path.write_bytes(data.getvalue())


def main():
    BEFORE.mkdir(exist_ok=True)
    for kind in sys.argv[1:] or RANKS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            stopped = go_on(kind, folder, STOP)
            _forget_machine(folder)
            _pack(folder, BEFORE / f"{kind}.tar.xz")
            ended = go_on(kind, folder)
            found = {"made": here(), "stopped": stopped, "ended": ended}
            (BEFORE / f"{kind}.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
