from pathlib import Path

import torch
from accelerate import Accelerator
from job import EPOCHS, info_nce, loader, make, report
from torch.distributed.nn.functional import all_gather


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


def of_all(rows):
    """Gather with gradients, which accelerator.gather is without."""
    return rows if accelerator.num_processes == 1 else torch.cat(all_gather(rows))


accelerator = Accelerator()
batches, model, optimizer = accelerator.prepare(loader(), *make())
progress = Progress(epoch=0, batch=0, steps=0)
accelerator.register_for_checkpointing(progress)
if Path("run/last").exists():
    accelerator.load_state("run/last")
while progress["epoch"] < EPOCHS:
    for batch in accelerator.skip_first_batches(batches, progress["batch"]):
        a, b, scale = model(*batch)
        optimizer.zero_grad()
        accelerator.backward(info_nce(of_all(a), of_all(b), scale))
        optimizer.step()
        progress["batch"] += 1
        progress["steps"] += 1
        if progress["steps"] % 2 == 0:
            accelerator.save_state("run/last")
    progress.update(epoch=progress["epoch"] + 1, batch=0)
if accelerator.is_main_process:
    report(accelerator.unwrap_model(model))
