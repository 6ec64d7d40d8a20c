"""Compare the memory that is predicted for training adapters with what is allocated.

    python -m tests.adapter_memory

Measured are the bytes that torch's allocator for the CPU has given out, at their highest during two steps, in
the rank that has most.
"""

import sys
from itertools import accumulate
from typing import Any

import torch
import tp_shard as ts
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from tp_testing import run_ranks
from tp_trainer import FsdpOptions, Trainer

from tests import adapters

LLAMA = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 2000}
GPT2 = {"n_embd": 512, "n_layer": 8, "vocab_size": 2000, "loss_type": "ForCausalLM"}
SIZES = {"llama": LLAMA, "bert": LLAMA, "gpt2": GPT2}
PLAN = {
    "**.q_proj": ts.Column(heads=4, kv_heads=2),
    "**.k_proj": ts.Column(heads=4, kv_heads=2, holds="kv"),
    "**.v_proj": ts.Column(heads=4, kv_heads=2, holds="kv"),
    "**.o_proj": ts.Row(heads=4, kv_heads=2),
    "**.gate_proj": ts.Column(),
    "**.up_proj": ts.Column(),
    "**.down_proj": ts.Row(),
}
RUNS = [
    ("llama", "lora", "single", 1, "fp32"),
    ("gpt2", "dora", "ddp", 2, "fp32"),
    ("bert", "ia3", "single", 1, "bf16-mixed"),
    ("llama", "saved", "fsdp", 2, "fp32"),
    ("gpt2", "dora", "fsdp", 2, "bf16-mixed"),
    ("llama", "lora", "shard", 2, "fp32"),
]
EACH, LENGTH, STEPS = 2, 32, 2
MARK = 12_347
"""The bytes of a tensor that shows where the first step begins: what came before is not of it."""


def batches(family: str, ranks: int) -> "DataLoader[Any]":
    rows = [
        {"input_ids": (torch.arange(LENGTH) * 7 + i) % 2000, "labels": torch.arange(LENGTH) % 2000}
        for i in range(EACH * ranks * STEPS)
    ]
    if family == "bert":
        rows = [row | {"labels": torch.tensor(0)} for row in rows]
    return DataLoader(rows, batch_size=EACH * ranks)  # type: ignore[arg-type]  # a list will do


def step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def make(family: str, kind: str, backend: str) -> nn.Module:
    base = adapters.plain(family, **SIZES[family])
    model: nn.Module = adapters.adapted(family, kind, base=base)
    return ts.parallelize(model, PLAN) if backend == "shard" else model


def arguments_of(precision: Any) -> dict[str, Any]:
    # As without knowledge of memory, so that the machine does not decide what is measured.
    options = FsdpOptions(reshard_after_forward=True, activation_checkpointing=False, offload=False)
    return {"devices": "cpu", "precision": precision, "progress": False, "seed": 0, "options": options}


def predicted(family: str, kind: str, backend: str, ranks: int, precision: Any) -> int:
    """Return what the table says of a rank."""
    if backend == "shard":
        ts.distributed.init_process_group()
    model = make(family, kind, backend)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = next(iter(batches(family, ranks)))
    trainer = Trainer(**arguments_of(precision))
    table = trainer.estimate(model, optimizer, batch, step, devices=ranks, memory="1TiB")
    need = table.verdicts[backend].memory
    assert need is not None, table
    return need.total


def allocated(family: str, kind: str, backend: str, ranks: int, precision: Any) -> int:
    """Return the most that this rank has allocated, in a process that has allocated nothing before."""
    torch.set_num_threads(1)
    if backend == "shard":
        ts.distributed.init_process_group()
    has_begun = False

    def watched(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal has_begun
        # Before, where little memory is free, steps may be estimated with tensors without memory.
        if not has_begun and type(batch["input_ids"]) is torch.Tensor:
            torch.empty(MARK, dtype=torch.uint8)
            has_begun = True
        return step(model, batch)

    with Trainer(backend=backend, **arguments_of(precision)) as trainer:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            model = make(family, kind, backend)
            trainer.fit(model, torch.optim.AdamW(model.parameters()), batches(family, ranks), step=watched)
        # Private to torch: its public tables leave out what no operator has allocated, such as buckets.
        results = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
        found = sorted((e.start_ns(), e.nbytes()) for e in results if e.name() == "[memory]")
        sizes = [nbytes for _, nbytes in found]
        return max(list(accumulate(sizes))[sizes.index(MARK) :])


def main() -> int:
    worst = 0.0
    for run in RUNS:
        ranks = run[3]
        said = run_ranks(predicted, ranks if run[2] == "shard" else 1, *run)[0]
        found = max(run_ranks(allocated, ranks, *run))
        worst = max(worst, abs(said / found - 1))
        print(f"{run}: predicted {said:,} allocated {found:,} ratio {said / found:.3f}", flush=True)
    return int(worst > 0.1)


if __name__ == "__main__":
    from tests import adapter_memory  # so that ranks import it by its name

    sys.exit(adapter_memory.main())
