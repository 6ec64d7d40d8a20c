from pathlib import Path

from accelerate import Accelerator, DataLoaderConfiguration
from job import BATCH, EPOCHS, STEPS, Rows, line_loss, make, report
from torch.utils.data import DataLoader


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
batches, model, optimizer = accelerator.prepare(DataLoader(Rows(), BATCH), *make())
progress = Progress(steps=0)
accelerator.register_for_checkpointing(progress)
if Path("run/last").exists():
    accelerator.load_state("run/last")
rows = iter(batches)
while progress["steps"] < EPOCHS * STEPS:
    optimizer.zero_grad()
    accelerator.backward(line_loss(model, next(rows)))
    optimizer.step()
    progress["steps"] += 1
    if progress["steps"] % 2 == 0:
        accelerator.save_state("run/last")
if accelerator.is_main_process:
    report(accelerator.unwrap_model(model))
