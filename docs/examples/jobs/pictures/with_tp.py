from job import EPOCHS, loaders, make, mixed_loss, report
from tp_trainer import Checkpoints, SchedulerOptions, Trainer
from tp_trainer.callbacks import EarlyStopping, ExponentialMovingAverage

average = ExponentialMovingAverage(0.5)
with Trainer(seed=0) as trainer:
    train_loader, val_loader = loaders()
    model, optimizer, cycle = make()
    history = trainer.fit(
        model,
        optimizer,
        train_loader,
        step=mixed_loss,
        epochs=EPOCHS,
        validation=val_loader,
        scheduler=SchedulerOptions(cycle, every="step"),
        callbacks=[average, EarlyStopping("val_loss", patience=5)],
        checkpoint=Checkpoints("run", every_steps=3, best="val_loss"),
        resume="auto",
    )
    with average.in_place_of(model):
        if trainer.is_main:
            report(model, len(history), history[-1].val["loss"])
