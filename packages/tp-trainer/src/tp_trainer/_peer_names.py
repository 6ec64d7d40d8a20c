"""Answers to names of other trainers: what to write here for an argument or attribute of theirs."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from tp_core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

# For each name an expression of tp; docs/migration-names.md has the same, and more of them.
ARGUMENTS = {
    "accelerator": 'Trainer(devices="cuda:0")',
    "accumulate_grad_batches": "Trainer(accumulate=4)",
    "amp": 'Trainer(precision="bf16-mixed")',
    "bf16": 'Trainer(precision="bf16-mixed")',
    "clip_grad_norm": "fit(clip_norm=1.0)",
    "cpu": 'Trainer(devices="cpu")',
    "datamodule": "fit(model, optimizer, loader, step=step, validation=loader)",
    "default_root_dir": 'fit(checkpoint="run")',
    "device": 'Trainer(devices="cuda:0")',
    "distributed_backend": 'Trainer(backend="ddp")',
    "enable_progress_bar": "Trainer(progress=False)",
    "eval_dataset": "fit(validation=loader)",
    "fp16": 'Trainer(precision="fp16-mixed")',
    "gradient_accumulation_steps": "Trainer(accumulate=4)",
    "gradient_checkpointing": 'Trainer(activation_checkpointing="auto")',
    "gradient_clip_val": "fit(clip_norm=1.0)",
    "grad_clip": "fit(clip_norm=1.0)",
    "gpus": "Trainer(devices=2)",
    "limit_train_batches": "fit(limits=Limits(steps_per_epoch=100))",
    "log_every_n_steps": 'fit(log=LogOptions("csv", every_steps=50))',
    "log_with": 'fit(log="tensorboard")',
    "logger": 'fit(log="tensorboard")',
    "loggers": 'fit(log=["csv", "tensorboard"])',
    "max_epochs": "fit(epochs=5)",
    "max_grad_norm": "fit(clip_norm=1.0)",
    "max_time": 'fit(limits=Limits(max_time="1h30m"))',
    "metrics": "fit(validation=Validation(loader, metrics=metrics))",
    "mixed_precision": 'Trainer(precision="bf16-mixed")',
    "model": "fit(model, optimizer, loader, step=step)",
    "num_epochs": "fit(epochs=5)",
    "num_nodes": "tp launch --nnodes 2",
    "num_train_epochs": "fit(epochs=5)",
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
    "steps_per_epoch": "fit(limits=Limits(steps_per_epoch=100))",
    "strategy": 'Trainer(backend="fsdp", options=FsdpOptions(replicas=2))',
    "sync_batchnorm": "Trainer(options=DdpOptions(sync_batchnorm=True))",
    "torch_compile": "Trainer(compile=True)",
    "train_dataloader": "fit(model, optimizer, loader, step=step)",
    "train_dataloaders": "fit(model, optimizer, loader, step=step)",
    "train_dataset": "fit(model, optimizer, loader, step=step)",
    "val_check_interval": "fit(validation=Validation(loader, every_steps=500))",
    "val_dataloaders": "fit(validation=loader)",
    "val_every_steps": "fit(validation=Validation(loader, every_steps=500))",
    "val_loader": "fit(validation=loader)",
    "val_step": "fit(validation=Validation(loader, step=step))",
    "world_size": "tp launch -n 2",
}

ATTRIBUTES = {
    "accumulate": "Trainer(accumulate=4)",
    "all_reduce": 'trainer.session.reduce(tensor, "mean")',
    "barrier": "trainer.session.barrier()",
    "clip_grad_norm_": "trainer.clip_grad_norm(model, 1.0)",
    "clip_gradients": "trainer.clip_grad_norm(model, 1.0)",
    "current_epoch": "loop.epoch",
    "gather": "trainer.session.gather(rows)",
    "global_rank": "trainer.rank",
    "global_step": "loop.step",
    "is_global_zero": "trainer.is_main",
    "is_local_main_process": "trainer.local_rank == 0",
    "is_main_process": "trainer.is_main",
    "load_state": 'fit(checkpoint="run", resume="auto")',
    "local_process_index": "trainer.local_rank",
    "log": 'fit(log="tensorboard")',
    "logger": 'fit(log="tensorboard")',
    "num_processes": "trainer.world_size",
    "print": "if trainer.is_main: print(loss)",
    "process_index": "trainer.rank",
    "reduce": 'trainer.session.reduce(tensor, "mean")',
    "save": 'trainer.export(model, "model.safetensors")',
    "save_checkpoint": 'fit(checkpoint="run")',
    "save_state": 'fit(checkpoint="run")',
    "setup": "trainer.prepare(model, optimizer, loader)",
    "strategy": "trainer.session",
    "test": "trainer.evaluate(model, loader, step=step)",
    "train": "fit(model, optimizer, loader, step=step)",
    "unwrap_model": "trainer.session.unwrap(model)",
    "validate": "trainer.evaluate(model, loader, step=step)",
    "wait_for_everyone": "trainer.session.barrier()",
}

# The methods that explain their arguments, by what a call of them looks like.
_methods: dict[str, inspect.Signature] = {}


def explain_fields(kind: type[R]) -> type[R]:
    """Have a class of settings answer arguments that it does not have; a decorator."""
    setattr(kind, "__init__", explain_arguments(f"{kind.__name__}(...)")(kind.__init__))  # noqa: B010 - typed
    return kind


def explain_arguments(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a method, which answers arguments that it does not have.

    Args:
        call: The call as the documents write it, such as "fit(model, optimizer, loader, step=step)".
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = _methods[call] = inspect.signature(method)

        @wraps(method)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise ConfigError(_answer(call, signature, kwargs, str(error))) from None
            return method(*args, **kwargs)

        return explained

    return decorate


def _answer(call: str, signature: inspect.Signature, given: dict[str, object], reason: str) -> str:
    name = next((name for name in given if name not in signature.parameters), None)
    if name is None:
        return f"{call.partition('(')[0]}(): {reason}; write {call}"
    here = call.partition("(")[0]
    if name in ARGUMENTS:
        return f"{here}() has no argument {name!r}; write {ARGUMENTS[name]}"
    others = [other for other, known in _methods.items() if name in known.parameters]
    others.sort(key=lambda other: other.endswith("(...)"))  # settings after methods
    if others:
        return f"{here}() has no argument {name!r}, which belongs to {others[0].partition('(')[0]}()"
    from difflib import get_close_matches  # for messages alone

    own = [name for name in signature.parameters if name != "self"]
    meant = next(iter(get_close_matches(name, [*own, *ARGUMENTS], n=1)), None)
    if meant in ARGUMENTS and meant not in own:
        return f"{here}() has no argument {name!r}; write {ARGUMENTS[meant]}"
    hint = f"did you mean {meant!r}?" if meant else f"its arguments are {', '.join(own)}"
    return f"{here}() has no argument {name!r}; {hint}"
