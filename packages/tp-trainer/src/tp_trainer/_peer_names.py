"""Answers to names of other trainers: what to write here for an argument or attribute of theirs."""

from typing import TypeVar

from tp_core.arguments import explain_init

R = TypeVar("R")

# For each name an expression of tp; docs/migration-names.md has the same, and more of them.
ARGUMENTS = {
    "accelerator": 'Trainer(devices="cuda:0")',
    "accumulate_grad_batches": "Trainer(accumulate=4)",
    "amp": 'Trainer(precision="bf16-mixed")',
    "bf16": 'Trainer(precision="bf16-mixed")',
    "batch_size": "DataLoader(dataset, batch_size=32)",
    "clip_grad_norm": "fit(clip_norm=1.0)",
    "cpu": 'Trainer(devices="cpu")',
    "criterion": "fit(step=step), and in the step: return criterion(model(inputs), targets)",
    "data": "fit(model, optimizer, loader, step=step)",
    "datamodule": "fit(model, optimizer, loader, step=step, validation=loader)",
    "default_root_dir": 'fit(checkpoint="run")',
    "device": 'Trainer(devices="cuda:0")',
    "distributed_backend": 'Trainer(backend="ddp")',
    "early_stopping": 'fit(callbacks=[EarlyStopping("val_loss")])',
    "enable_progress_bar": "Trainer(progress=False)",
    "eval_dataset": "fit(validation=loader)",
    "fp16": 'Trainer(precision="fp16-mixed")',
    "gradient_accumulation_steps": "Trainer(accumulate=4)",
    "gradient_checkpointing": 'Trainer(activation_checkpointing="auto")',
    "gradient_clip_val": "fit(clip_norm=1.0)",
    "grad_clip": "fit(clip_norm=1.0)",
    "gpus": "Trainer(devices=2)",
    "interval": 'SchedulerOptions(scheduler, every="step")',
    "learning_rate": "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "limit_train_batches": "fit(limits=Limits(steps_per_epoch=100))",
    "log_every_n_steps": 'fit(log=LogOptions("csv", every_steps=50))',
    "log_with": 'fit(log="tensorboard")',
    "logger": 'fit(log="tensorboard")',
    "loggers": 'fit(log=["csv", "tensorboard"])',
    "loss_fn": "fit(step=step), and in the step: return loss_fn(model(inputs), targets)",
    "lr": "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "max_epochs": "fit(epochs=5)",
    "max_grad_norm": "fit(clip_norm=1.0)",
    "max_time": 'fit(limits=Limits(max_time="1h30m"))',
    "metrics": "fit(validation=Validation(loader, metrics=metrics))",
    "mixed_precision": 'Trainer(precision="bf16-mixed")',
    "model": "fit(model, optimizer, loader, step=step)",
    "monitor": 'EarlyStopping("val_loss")',
    "num_epochs": "fit(epochs=5)",
    "num_nodes": "tp launch --nnodes 2 (pip install tp-launch)",
    "num_train_epochs": "fit(epochs=5)",
    "num_workers": "DataLoader(dataset, num_workers=4)",
    "output_dir": 'fit(checkpoint="run")',
    "profiler": 'fit(callbacks=[Profiler("profile")])',
    "project_dir": 'fit(checkpoint="run")',
    "report_to": 'fit(log="wandb")',
    "resume_from_checkpoint": 'fit(checkpoint="run", resume="auto")',
    "ckpt_path": 'fit(checkpoint="run", resume="auto")',
    "save_dir": 'fit(checkpoint="run")',
    "save_steps": 'fit(checkpoint=Checkpoints("run", every_steps=500))',
    "save_to": 'fit(checkpoint="run")',
    "scheduler_every": 'fit(scheduler=SchedulerOptions(scheduler, every="step"))',
    "shuffle": "DataLoader(dataset, shuffle=True)",
    "steps": "fit(max_steps=1000)",
    "steps_per_epoch": "fit(limits=Limits(steps_per_epoch=100))",
    "strategy": 'Trainer(backend="fsdp", options=FsdpOptions(replicas=2))',
    "sync_batchnorm": "Trainer(options=DdpOptions(sync_batchnorm=True))",
    "test_loader": "trainer.evaluate(model, loader, step=step)",
    "torch_compile": "Trainer(compile=True)",
    "train_dataloader": "fit(model, optimizer, loader, step=step)",
    "train_dataloaders": "fit(model, optimizer, loader, step=step)",
    "train_dataset": "fit(model, optimizer, loader, step=step)",
    "val_check_interval": "fit(validation=Validation(loader, every_steps=500))",
    "val_dataloaders": "fit(validation=loader)",
    "val_every_steps": "fit(validation=Validation(loader, every_steps=500))",
    "val_loader": "fit(validation=loader)",
    "validation_split": "torch.utils.data.random_split(dataset, [0.9, 0.1]), and fit(validation=loader)",
    "val_step": "fit(validation=Validation(loader, step=step))",
    "verbose": "Trainer(progress=False)",
    "world_size": "tp launch -n 2 (pip install tp-launch)",
}

# Where a loop of one's own has another answer than `fit`.
LOOP_ARGUMENTS = {
    **ARGUMENTS,
    "clip_norm": "trainer.update(model, optimizer, clip_norm=1.0) in the loop",
    "model": 'loop(loader, state={"model": model})',
    "optimizer": 'loop(loader, state={"optimizer": optimizer})',
    "scheduler": 'loop(loader, state={"scheduler": scheduler}), and scheduler.step() in the loop',
}

_LEAVE_OUT = "leave it out"
_SEVERAL = "tp launch -n 2 script.py trains on two (pip install tp-launch)"
_DEVICES = f"leave it out, as the devices that are there are taken, and {_SEVERAL}"
_DDP = f"leave it out: {_SEVERAL}"
# By `repr`, as 1 and True are equal: what a value means here, where the name's own answer would mislead.
BY_VALUE = {
    "accelerator": {
        "'auto'": _DEVICES,
        "'cpu'": 'write Trainer(devices="cpu")',
        "'cuda'": _DEVICES,
        "'gpu'": _DEVICES,
    },
    "enable_progress_bar": {"True": _LEAVE_OUT},
    "mixed_precision": {"'fp16'": 'write Trainer(precision="fp16-mixed")', "'no'": _LEAVE_OUT},
    "strategy": {
        "'auto'": _DDP,
        "'ddp'": _DDP,
        "'ddp_find_unused_parameters_true'": "write Trainer(options=DdpOptions(find_unused_parameters=True))",
        "'ddp_spawn'": _DDP,
        "'deepspeed'": 'write Trainer(backend="fsdp")',
        "'fsdp'": 'write Trainer(backend="fsdp")',
    },
    **{
        name: {"False": _LEAVE_OUT}
        for name in (
            "amp",
            "bf16",
            "cpu",
            "fp16",
            "gradient_checkpointing",
            "logger",
            "sync_batchnorm",
            "torch_compile",
        )
    },
}

ATTRIBUTES = {
    "accumulate": "Trainer(accumulate=4)",
    "all_reduce": 'trainer.session.reduce(tensor, "mean")',
    "barrier": "trainer.session.barrier()",
    "callback_metrics": "history[-1].metrics",
    "clip_grad_norm_": "trainer.clip_grad_norm(model, 1.0)",
    "clip_gradients": "trainer.clip_grad_norm(model, 1.0)",
    "compile": "Trainer(compile=True)",
    "current_epoch": "loop.epoch",
    "free_memory": "trainer.close()",
    "gather": "trainer.session.gather(rows)",
    "global_rank": "trainer.rank",
    "global_step": "loop.step",
    "history": "history = trainer.fit(model, optimizer, loader, step=step)",
    "init_trackers": 'fit(log="tensorboard")',
    "is_global_zero": "trainer.is_main",
    "is_last_process": "trainer.rank == trainer.world_size - 1",
    "is_local_main_process": "trainer.local_rank == 0",
    "is_main_process": "trainer.is_main",
    "launch": "tp launch -n 2 script.py (pip install tp-launch)",
    "load": 'trainer.load_model(model, "model.safetensors")',
    "load_state": 'fit(checkpoint="run", resume="auto")',
    "local_process_index": "trainer.local_rank",
    "log": 'fit(log="tensorboard")',
    "log_dict": "loop.log(**numbers) in trainer.loop",
    "logger": 'fit(log="tensorboard")',
    "main_process_first": "download() if trainer.local_rank == 0 else None; trainer.session.barrier()",
    "model": "model, the one that you gave to fit(), which it trains in place",
    "num_processes": "trainer.world_size",
    "on_main_process": "if trainer.is_main: print(loss)",
    "optimizer": "optimizer, the one that you gave to fit()",
    "print": "if trainer.is_main: print(loss)",
    "process_index": "trainer.rank",
    "reduce": 'trainer.session.reduce(tensor, "mean")',
    "register_for_checkpointing": 'fit(state={"sampler": sampler})',
    "save": 'trainer.export(model, "model.safetensors")',
    "save_checkpoint": 'fit(checkpoint="run")',
    "save_state": 'fit(checkpoint="run")',
    "setup": "trainer.prepare(model, optimizer, loader)",
    "skip_first_batches": 'fit(checkpoint="run", resume="auto")',
    "split_between_processes": "items[trainer.rank :: trainer.world_size]",
    "strategy": "trainer.session",
    "sync_gradients": "loop.ends_step",
    "test": "trainer.evaluate(model, loader, step=step)",
    "to": 'Trainer(devices="cuda:0")',
    "train": "fit(model, optimizer, loader, step=step)",
    "tune": "tp_trainer.tuning.largest_batch_size(trainer, model, optimizer, loader, step=step)",
    "unwrap_model": "trainer.session.unwrap(model)",
    "validate": "trainer.evaluate(model, loader, step=step)",
    "wait_for_everyone": "trainer.session.barrier()",
}

# Of what `trainer.loop` returns, and callbacks get.
LOOP_ATTRIBUTES = {
    "callback_metrics": "loop.metrics",
    "current_epoch": "loop.epoch",
    "global_rank": "loop.rank",
    "global_step": "loop.step",
    "is_global_zero": "loop.is_main",
    "log_dict": "loop.log(**numbers)",
    "logged_metrics": "loop.metrics",
    "max_epochs": "loop.epochs",
    "max_steps": "fit(max_steps=1000)",
    "num_training_batches": "loop.steps_per_epoch",
    "should_stop": 'loop.stop("a reason")',
    "train_dataloader": "loop.loader",
}


# Where a name means something else in the settings of that class.
_OF_SETTINGS = {
    "Checkpoints": {
        "dirpath": 'Checkpoints("run")',
        "every_n_epochs": 'Checkpoints("run", every_epochs=5)',
        "every_n_train_steps": 'Checkpoints("run", every_steps=500)',
        "filepath": 'Checkpoints("run")',
        "monitor": 'Checkpoints("run", best="val_loss")',
        "save_best": 'Checkpoints("run", best="val_loss")',
        "save_last": 'Checkpoints("run"), which always keeps the newest',
        "save_best_only": 'Checkpoints("run", best="val_loss")',
        "save_top_k": 'Checkpoints("run", keep=3)',
        "save_weights_only": 'trainer.export(model, "model.safetensors") after the run',
    },
    "CsvLogger": {"path": 'CsvLogger("run", filename="metrics.csv")', "save_dir": 'CsvLogger("run")'},
    "TensorBoardLogger": dict.fromkeys(("log_dir", "logdir", "save_dir"), 'TensorBoardLogger("run")'),
    "EarlyStopping": {
        "restore_best_weights": (
            'fit(checkpoint=Checkpoints("run", best="val_loss")), and after it trainer.load_model(model, '
            'find_checkpoint("run", best="val_loss"))'
        ),
    },
}


# For classes and functions of other trainers, which are looked for in this package.
NAMES = {
    "Accelerator": "Trainer() of tp_trainer, or Accelerator() of tp_accelerate (pip install tp-accelerate)",
    "CSVLogger": "CsvLogger() of tp_trainer.loggers",
    "DDPStrategy": "DdpOptions() of tp_trainer",
    "DataModule": "fit(model, optimizer, loader, step=step, validation=loader)",
    "FSDPStrategy": "FsdpOptions() of tp_trainer",
    "Fabric": "Trainer() of tp_trainer",
    "GradScaler": "Trainer(precision='fp16-mixed')",
    "GradientAccumulationScheduler": "Trainer(accumulate=4)",
    "LightningDataModule": "fit(model, optimizer, loader, step=step, validation=loader)",
    "LightningModule": "LightningModule of tp_lightning (pip install tp-lightning)",
    "ModelCheckpoint": 'fit(checkpoint=Checkpoints("run", best="val_loss"))',
    "RichProgressBar": "Trainer(progress=True)",
    "TQDMProgressBar": "Trainer(progress=True)",
    "Timer": 'fit(limits=Limits(max_time="1h30m"))',
    "TrainingArguments": "Trainer(), and fit() with its arguments",
    "TrainerCallback": "Callback of tp_trainer",
    "evaluate": "trainer.evaluate(model, loader, step=step)",
    "fit": "Trainer().fit(model, optimizer, loader, step=step)",
    "seed_everything": "Trainer(seed=0)",
    "set_seed": "Trainer(seed=0)",
}


def explain_fields(kind: type[R]) -> type[R]:
    """Have a class of settings answer arguments that it does not have, and those of peers; a decorator."""
    return explain_init(kind, instead={**ARGUMENTS, **_OF_SETTINGS.get(kind.__name__, {})})
