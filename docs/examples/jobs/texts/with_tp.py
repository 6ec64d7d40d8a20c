from job import EPOCHS, loaders, make, report
from sklearn.metrics import f1_score, roc_auc_score
from tp_trainer import Checkpoints, FunctionMetric, SchedulerOptions, Trainer, Validation


def step(model, batch):
    output = model(**batch)
    scores = output.logits.softmax(1)[:, 1]
    rows = {"f1": (batch["labels"], scores > 0.5), "auroc": (batch["labels"], scores)}
    return {"loss": output.loss, **rows}


with Trainer(seed=0, accumulate=2) as trainer:
    train_loader, val_loader = loaders()
    model, optimizer, warmup = make()
    history = trainer.fit(
        model,
        optimizer,
        train_loader,
        step=step,
        epochs=EPOCHS,
        validation=Validation(
            val_loader, metrics={"f1": FunctionMetric(f1_score), "auroc": FunctionMetric(roc_auc_score)}
        ),
        scheduler=SchedulerOptions(warmup, every="step"),
        clip_norm=0.5,
        checkpoint=Checkpoints("run", every_steps=2, best="val_f1", mode="max"),
        resume="auto",
    )
    if trainer.is_main:
        report(model, {f"val_{name}": value for name, value in history[-1].val.items()})
