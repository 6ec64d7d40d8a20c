"""Time per step of the trainer in one process: python -m tests.bench.trainer.one_process

Against a hand-written loop and the peers that are installed, on a tiny MLP, which leaves nothing
for the loop's own cost to hide behind. A second hand-written loop shows how far to trust the ratios.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

from tests.bench._results import Results
from tests.bench.trainer.loops import (
    accelerate_loop,
    fabric_loop,
    hand_written,
    is_installed,
    measure,
    note,
    tp_fit,
    tp_loop,
    tp_prepare,
)

STEPS = 300


def run(results: Results) -> None:
    """An MLP 16-16-1, batches of 8, SGD, one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(devices="cpu")
    batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(STEPS)]
    data = TensorDataset(torch.randn(8 * STEPS, 16), torch.randn(8 * STEPS, 1))
    sources = {
        "batches from a list": (batches, 40),
        "batches from a DataLoader": (DataLoader(data, batch_size=8, shuffle=True), 15),
    }
    for source, (loader, rounds) in sources.items():
        ways = {
            "hand-written": hand_written(loader),
            "hand-written, again": hand_written(loader),
            "tp prepare": tp_prepare(trainer, loader),
            "tp loop": tp_loop(trainer, loader, STEPS),
            "tp fit": tp_fit(trainer, loader, STEPS),
        }
        if is_installed("accelerate"):
            ways["accelerate"] = accelerate_loop(loader)
        if is_installed("lightning_fabric"):
            ways["fabric"] = fabric_loop(loader)
        note(results, source, measure(ways, rounds=rounds))


if __name__ == "__main__":
    with Results("trainer-one-process") as found:
        run(found)
