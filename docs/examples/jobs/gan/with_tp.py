from job import EPOCHS, disc_loss, gen_loss, loader, make, report
from tp_trainer import Checkpoints, Trainer

with Trainer(seed=0) as trainer:
    gen, disc, opt_g, opt_d = make()
    gen, disc, batches = trainer.prepare(gen, disc, loader())
    state = {"gen": gen, "disc": disc, "opt_g": opt_g, "opt_d": opt_d}
    checkpoint = Checkpoints("run", every_steps=2)
    with trainer.loop(batches, epochs=EPOCHS, state=state, checkpoint=checkpoint, resume="auto") as loop:
        for batch in loop:
            opt_d.zero_grad()
            loss_d = trainer.run(disc_loss, disc, gen, batch)
            trainer.backward(loss_d)
            opt_d.step()
            opt_g.zero_grad()
            loss_g = trainer.run(gen_loss, gen, disc, batch)
            trainer.backward(loss_g)
            opt_g.step()
            loop.log(loss_d=loss_d, loss_g=loss_g)
    if trainer.is_main:
        report(gen, disc)
