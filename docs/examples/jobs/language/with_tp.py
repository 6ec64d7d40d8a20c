from job import EPOCHS, loaders, make, report, token_loss
from tp_trainer import Checkpoints, Trainer


def step(model, batch):
    loss, n_tokens = token_loss(model, batch)
    return {"loss": loss, "weight": n_tokens}


with Trainer(seed=0) as trainer:
    train_loader, val_loader = loaders()
    model, optimizer = make()
    history = trainer.fit(
        model,
        optimizer,
        train_loader,
        step=step,
        epochs=EPOCHS,
        validation=val_loader,
        clip_norm=0.5,
        checkpoint=Checkpoints("run", every_steps=2, best="val_loss"),
        resume="auto",
    )
    if trainer.is_main:
        report(model, history[-1].val["loss"])
