import math
from pathlib import Path

import torch
from accelerate import Accelerator
from job import EPOCHS, loaders, make, mixed_loss, report
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


accelerator = Accelerator()
train_loader, val_loader, model, optimizer, cycle = accelerator.prepare(*loaders(), *make())
average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
progress = Progress(epoch=0, batch=0, steps=0, best=math.inf, waited=0)
accelerator.register_for_checkpointing(progress, average)
if Path("run/last").exists():
    accelerator.load_state("run/last")
while progress["epoch"] < EPOCHS and progress["waited"] < 5:
    model.train()
    for batch in accelerator.skip_first_batches(train_loader, progress["batch"]):
        accelerator.backward(mixed_loss(model, batch))
        optimizer.step()
        cycle.step()
        optimizer.zero_grad()
        average.update_parameters(accelerator.unwrap_model(model))
        progress["batch"] += 1
        progress["steps"] += 1
        if progress["steps"] % 3 == 0:
            accelerator.save_state("run/last")
    average.eval()
    losses = []
    with torch.no_grad():
        for batch in val_loader:
            rows = torch.full((len(batch[0]),), mixed_loss(average, batch), device=accelerator.device)
            losses.append(accelerator.gather_for_metrics(rows))
    val_loss = torch.cat(losses).mean().item()
    progress.update(epoch=progress["epoch"] + 1, batch=0)
    progress["waited"] = 0 if val_loss < progress["best"] else progress["waited"] + 1
    if val_loss < progress["best"]:
        progress["best"] = val_loss
        accelerator.save_state("run/best")
if accelerator.is_main_process:
    report(average.module, progress["epoch"], val_loss)
