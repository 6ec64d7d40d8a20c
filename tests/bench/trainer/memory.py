"""What a job needs of memory, predicted and measured: python -m tests.bench.trainer.memory [CASE ...]

Each case is trained for three steps by ranks of its own, one thread each. Measured is the most that was
resident in any of them beyond what was before the model was made; predicted is what the table of the
selection says. The allocator of the C library gives back what is freed at once: what it would keep for
later is its own affair, and differs with every machine. With cases named, the figures of the others stay.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tp_testing import run_ranks
from tp_trainer import FsdpOptions, Trainer

from tests.bench._results import Results

MIB = 2**20
STEPS = 3


def mlp() -> nn.Module:
    sizes = [2048, 8192, 8192, 1000]
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Bottleneck(nn.Module):
    """A block of ResNet-50: (batch, wide_in, height, width) -> (batch, 4 * narrow, ...)."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(wide, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, 4 * narrow, 1, bias=False),
            nn.BatchNorm2d(4 * narrow),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or wide != 4 * narrow:
            self.skip = nn.Sequential(
                nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False), nn.BatchNorm2d(4 * narrow)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.skip(x))


def resnet() -> nn.Module:
    """ResNet-50 of He et al., "Deep residual learning for image recognition", 2016."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    wide = 64
    for narrow, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(wide, narrow, stride if i == 0 else 1))
            wide = 4 * narrow
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig())


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM"))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        intermediate_size=2816,
        vocab_size=32000,
    )
    return LlamaForCausalLM(config)


def label_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def word_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch[0], labels=batch[1]).loss
    return loss


def texts(length: int, *, per_text: bool = False) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def make(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = (torch.arange(length) * 7 + i) % 30000
        return ids, torch.tensor(i % 2) if per_text else ids

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[[int], Any], int]] = {
    "MLP": (mlp, label_loss, lambda i: (torch.zeros(2048), i % 1000), 256),
    "ResNet-50": (resnet, label_loss, lambda i: (torch.zeros(3, 224, 224), i % 1000), 8),
    "BERT base": (bert, word_loss, texts(128, per_text=True), 8),
    "GPT-2": (gpt2, word_loss, texts(256), 2),
    "Llama 300M": (llama, word_loss, texts(256), 2),
}


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and on how many ranks; samples are those of each rank."""

    model: str
    optimizer: str
    precision: str
    backend: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.model}, {self.optimizer}, {self.precision}, {self.backend} {self.ranks}"


CASES = [
    Case("MLP", "AdamW", "fp32", "single", 1),
    Case("MLP", "SGD", "fp32", "ddp", 2),
    Case("MLP", "AdamW", "fp32", "fsdp", 2),
    Case("ResNet-50", "SGD", "fp32", "single", 1),
    Case("ResNet-50", "AdamW", "fp32", "ddp", 2),
    Case("BERT base", "AdamW", "fp32", "single", 1),
    Case("BERT base", "SGD", "fp32", "ddp", 2),
    Case("BERT base", "AdamW", "bf16-mixed", "fsdp", 2),
    Case("GPT-2", "AdamW", "fp32", "ddp", 2),
    Case("GPT-2", "AdamW", "bf16-mixed", "single", 1),
    Case("GPT-2", "AdamW", "fp32", "fsdp", 2),
    Case("GPT-2", "AdamW", "fp32", "fsdp", 4),
    Case("Llama 300M", "AdamW", "bf16-mixed", "single", 1),
    Case("Llama 300M", "SGD", "fp32", "ddp", 2),
    Case("Llama 300M", "AdamW", "fp32", "fsdp", 2),
    Case("Llama 300M", "AdamW", "bf16-mixed", "fsdp", 4),
    Case("MLP", "AdamW", "fp32", "shard", 2),
]


class Samples(Dataset[Any]):
    """As many as are asked for, made when they are."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        if i >= self._count:
            raise IndexError(i)
        return self._make(i)


def make_model(case: Case) -> nn.Module:
    """Return the model, split over the ranks for the backend that is for such models."""
    make, _, _, _ = MODELS[case.model]
    if case.backend != "shard":
        return make()
    if not ts.distributed.is_initialized():
        ts.distributed.init_process_group()
    return ts.parallelize(make(), {"0": ts.Column(), "2": ts.Row(), "4": ts.Vocab(gather_output=True)})


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-4)


def make_trainer(case: Case) -> Trainer:
    # The ways of fsdp as without knowledge of memory, so that the machine does not decide what is measured.
    options = FsdpOptions(reshard_after_forward=True, activation_checkpointing=False, offload=False)
    return Trainer(
        backend=case.backend, devices="cpu", precision=case.precision, options=options, progress=False, seed=0
    )


def loader_of(case: Case) -> DataLoader[Any]:
    _, _, sample, samples = MODELS[case.model]
    size = samples * case.ranks
    return DataLoader(Samples(sample, size * STEPS), batch_size=size)


def predict(case: Case) -> int:
    _, step, _, _ = MODELS[case.model]
    model = make_model(case)
    trainer = Trainer(
        devices="cpu",
        precision=case.precision,
        options=FsdpOptions(reshard_after_forward=True, activation_checkpointing=False, offload=False),
    )
    batch = next(iter(loader_of(case)))
    table = trainer.estimate(
        model, make_optimizer(case, model), batch, step, devices=case.ranks, memory="1TiB"
    )
    need = table.verdicts[case.backend].memory
    assert need is not None
    print(f"    {need}", flush=True)
    return need.total


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(case: Case) -> int:
    """Return the most that was resident in this rank beyond what was before the model was made."""
    torch.set_num_threads(1)
    _, step, _, _ = MODELS[case.model]
    with make_trainer(case) as trainer:
        small: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        if case.backend == "shard":
            ts.distributed.init_process_group()
            small = ts.parallelize(small, {"0": ts.Column(), "1": ts.Row()})
        tiny = DataLoader(
            Samples(lambda i: (torch.zeros(64), i % 64), 4 * case.ranks), batch_size=2 * case.ranks
        )
        trainer.fit(small, make_optimizer(case, small), tiny, step=label_loss)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        model = make_model(case)
        trainer.fit(model, make_optimizer(case, model), loader_of(case), step=step)
        return resident("VmHWM") - before


def main(wanted: list[str]) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**16)
    name = "trainer-memory"
    with Results(name, is_part=bool(wanted)) as results:
        for case in CASES:
            if wanted and not any(word in str(case) for word in wanted):
                continue
            ranks = case.ranks if case.backend == "shard" else 1  # it is estimated where it is split
            predicted = run_ranks(predict, ranks, case, timeout_s=1800)[0]
            measured = max(run_ranks(measure, case.ranks, case, timeout_s=1800))
            results.add(f"{case}: predicted", predicted / MIB, "MiB")
            results.add(f"{case}: measured", measured / MIB, "MiB")
            results.add(f"{case}: ratio", predicted / measured, "")


if __name__ == "__main__":
    main(sys.argv[1:])
