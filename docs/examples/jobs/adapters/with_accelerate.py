from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from job import ACCUMULATE, EPOCHS, RATE, WARMUP, loader, make, report, trained
from transformers import get_cosine_schedule_with_warmup


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


accelerator = Accelerator(step_scheduler_with_optimizer=False)
train_loader, model = loader(), make()
optimizer = torch.optim.AdamW(trained(model), lr=RATE, weight_decay=0.0)
steps = EPOCHS * -(-len(train_loader) // ACCUMULATE)
schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
train_loader, model, optimizer, schedule = accelerator.prepare(train_loader, model, optimizer, schedule)
progress = Progress(epoch=0, batch=0)
accelerator.register_for_checkpointing(progress)
if Path("run").exists():
    accelerator.load_state("run")
while progress["epoch"] < EPOCHS:
    model.train()
    batches = iter(accelerator.skip_first_batches(train_loader, progress["batch"]))
    while group := list(islice(batches, ACCUMULATE)):
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in group]
        of_all = accelerator.reduce(torch.stack(counts).sum(), "sum")
        optimizer.zero_grad()
        for batch, count in zip(group, counts, strict=True):
            loss = model(**batch).loss * count
            accelerator.backward(loss * accelerator.num_processes / of_all)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        progress["batch"] += len(group)
        if schedule.scheduler.last_epoch % 4 == 0:
            accelerator.save_state("run")
    progress.update(epoch=progress["epoch"] + 1, batch=0)
plain = accelerator.unwrap_model(model)
plain.save_pretrained("adapter", is_main_process=accelerator.is_main_process)
if accelerator.is_main_process:
    report(plain)
