from job import BATCH, EPOCHS, STEPS, Rows, line_loss, make, report
from torch.utils.data import DataLoader
from tp_trainer import Checkpoints, Limits, Trainer

with Trainer(seed=0) as trainer:
    model, optimizer = make()
    trainer.fit(
        model,
        optimizer,
        DataLoader(Rows(), BATCH),
        step=line_loss,
        epochs=EPOCHS,
        limits=Limits(steps_per_epoch=STEPS),
        checkpoint=Checkpoints("run", every_steps=2),
        resume="auto",
    )
    if trainer.is_main:
        report(model)
