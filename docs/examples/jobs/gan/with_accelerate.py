from pathlib import Path

from accelerate import Accelerator
from job import EPOCHS, disc_loss, gen_loss, loader, make, report


class Progress(dict):  # what else a resumed run must know
    state_dict, load_state_dict = dict.copy, dict.update


accelerator = Accelerator()
batches, gen, disc, opt_g, opt_d = accelerator.prepare(loader(), *make())
progress = Progress(epoch=0, batch=0, steps=0)
accelerator.register_for_checkpointing(progress)
if Path("run/last").exists():
    accelerator.load_state("run/last")
while progress["epoch"] < EPOCHS:
    losses = []
    for batch in accelerator.skip_first_batches(batches, progress["batch"]):
        opt_d.zero_grad()
        loss_d = disc_loss(disc, gen, batch)
        accelerator.backward(loss_d)
        opt_d.step()
        opt_g.zero_grad()
        loss_g = gen_loss(gen, disc, batch)
        accelerator.backward(loss_g)
        opt_g.step()
        losses.append([accelerator.reduce(loss.detach(), "mean").item() for loss in (loss_d, loss_g)])
        progress["batch"] += 1
        progress["steps"] += 1
        if progress["steps"] % 2 == 0:
            accelerator.save_state("run/last")
    accelerator.print(progress["epoch"], [sum(column) / len(losses) for column in zip(*losses, strict=True)])
    progress.update(epoch=progress["epoch"] + 1, batch=0)
if accelerator.is_main_process:
    report(accelerator.unwrap_model(gen), accelerator.unwrap_model(disc))
