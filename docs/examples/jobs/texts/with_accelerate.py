from pathlib import Path

import torch
from accelerate import Accelerator
from job import BATCH, EPOCHS, loaders, make, report
from sklearn.metrics import f1_score, roc_auc_score


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


accelerator = Accelerator(gradient_accumulation_steps=2)
train_loader, val_loader, model, optimizer, warmup = accelerator.prepare(*loaders(), *make())
progress = Progress(epoch=0, batch=0, steps=0, best=-1.0)
accelerator.register_for_checkpointing(progress)
if Path("run/last").exists():
    accelerator.load_state("run/last")
while progress["epoch"] < EPOCHS:
    model.train()
    for batch in accelerator.skip_first_batches(train_loader, progress["batch"]):
        first = (progress["batch"] - progress["batch"] % 2) * BATCH
        rows = min(first + 2 * BATCH, len(train_loader.dataset)) - first  # of this optimizer step
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss * 2 * len(batch["labels"]) / rows)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
        progress["batch"] += 1
        if accelerator.sync_gradients:
            progress["steps"] += 1
            if progress["steps"] % 2 == 0:
                accelerator.save_state("run/last")
    model.eval()
    found = []
    with torch.no_grad():
        for batch in val_loader:
            found.append(accelerator.gather_for_metrics((model(**batch).logits, batch["labels"])))
    logits, labels = (torch.cat(rows).cpu() for rows in zip(*found, strict=True))
    scores = logits.softmax(1)[:, 1]
    metrics = {
        "val_loss": torch.nn.functional.cross_entropy(logits, labels).item(),
        "val_f1": f1_score(labels, scores > 0.5),
        "val_auroc": roc_auc_score(labels, scores),
    }
    progress.update(epoch=progress["epoch"] + 1, batch=0)
    if metrics["val_f1"] > progress["best"]:
        progress["best"] = metrics["val_f1"]
        accelerator.save_state("run/best")
if accelerator.is_main_process:
    report(accelerator.unwrap_model(model), metrics)
