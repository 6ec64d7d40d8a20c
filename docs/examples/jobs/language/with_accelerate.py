import math
from pathlib import Path

import torch
from accelerate import Accelerator
from job import EPOCHS, loaders, make, report, token_loss


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


accelerator = Accelerator()
train_loader, val_loader, model, optimizer = accelerator.prepare(*loaders(), *make())
progress = Progress(epoch=0, batch=0, steps=0, best=math.inf)
accelerator.register_for_checkpointing(progress)
if Path("run/last").exists():
    accelerator.load_state("run/last")
while progress["epoch"] < EPOCHS:
    model.train()
    for batch in accelerator.skip_first_batches(train_loader, progress["batch"]):
        loss, n_tokens = token_loss(model, batch)
        of_all = accelerator.reduce(n_tokens, "sum")
        optimizer.zero_grad()
        accelerator.backward(loss * n_tokens * accelerator.num_processes / of_all)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        progress["batch"] += 1
        progress["steps"] += 1
        if progress["steps"] % 2 == 0:
            accelerator.save_state("run/last")
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    with torch.no_grad():
        for batch in val_loader:
            loss, n_tokens = token_loss(model, batch)
            sums += torch.stack([loss * n_tokens, n_tokens])
    total, n_tokens = accelerator.reduce(sums, "sum").tolist()
    progress.update(epoch=progress["epoch"] + 1, batch=0)
    if total / n_tokens < progress["best"]:
        progress["best"] = total / n_tokens
        accelerator.save_state("run/best")
if accelerator.is_main_process:
    report(accelerator.unwrap_model(model), total / n_tokens)
