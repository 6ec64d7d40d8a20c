import torch
from job import ACCUMULATE, EPOCHS, RATE, WARMUP, loader, make, report, trained
from tp_trainer import Checkpoints, SchedulerOptions, Trainer
from transformers import get_cosine_schedule_with_warmup


def step(model, batch):
    return {"loss": model(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


with Trainer(seed=0, accumulate=ACCUMULATE) as trainer:
    train_loader, model = loader(), make()
    optimizer = torch.optim.AdamW(trained(model), lr=RATE, weight_decay=0.0)
    steps = EPOCHS * -(-len(train_loader) // ACCUMULATE)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    trainer.fit(
        model,
        optimizer,
        train_loader,
        step=step,
        epochs=EPOCHS,
        scheduler=SchedulerOptions(schedule, every="step"),
        clip_norm=0.5,
        checkpoint=Checkpoints("run", every_steps=4, weights="trainable"),
        resume="auto",
    )
    trainer.export(model, "adapter", adapter=True)
    if trainer.is_main:
        report(model)
