from job import EPOCHS, info_nce, loader, make, report
from tp_trainer import Checkpoints, Trainer

with Trainer(seed=0) as trainer:

    def step(model, batch):
        a, b, scale = model(*batch)
        return info_nce(trainer.all_gather(a), trainer.all_gather(b), scale)

    model, optimizer = make()
    checkpoint = Checkpoints("run", every_steps=2)
    trainer.fit(model, optimizer, loader(), step=step, epochs=EPOCHS, checkpoint=checkpoint, resume="auto")
    if trainer.is_main:
        report(model)
