"""Checks of arguments, before anything starts."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Real
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from tp_core.data import PreparedLoader, is_array
from tp_core.errors import ConfigError, ModelError, StepError
from tp_core.messages import did_you_mean
from tp_core.output import get_logger
from tp_core.tensors import check_initialized

from tp_trainer._checkpoint import Checkpoints

log = get_logger("tp_trainer")

# -- Options -------------------------------------------------------------------------------------


def check_positive(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        # 2.0, 1e3 and the integers of numpy are whole numbers, too.
        if isinstance(value, Real) and not isinstance(value, int):
            number = float(value)
        else:
            number = 0.0
        if number >= 1 and number.is_integer():
            hint = f"; write {int(number)}"
        else:
            hint = ""
        msg = f"{what} must be a whole number from 1, got {value!r}{hint}"
        raise ConfigError(msg)


def check_not_negative(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = f"{what} must be a whole number from 0, got {value!r}"
        raise ConfigError(msg)


def check_limit(what: str, value: object, kind: str = "a number greater than 0") -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):  # type: ignore[operator]  # it is a number
        msg = f"{what} must be None or {kind}, got {value!r}"
        raise ConfigError(msg)


def metrics_hint(name: str, known: Iterable[str]) -> str:
    """Return which metrics a run has, and what to do to have the one of a name."""
    known = list(known)
    if name.startswith("val_") and not any(metric.startswith("val_") for metric in known):
        hint = "; give fit(validation=loader)"
    else:
        hint = did_you_mean(name, known) or "; return it in the step's dict"
    return f"which are {', '.join(known) or 'none'}{hint}"


_STEPS_OF_LIGHTNING = ("training_step", "validation_step", "test_step")


def check_callable(what: str, value: object) -> None:
    wanted = f"{what} must be a function {what}(model, batch) that returns the loss"
    if not callable(value) or isinstance(value, nn.Module):
        msg = f"{wanted}, got {type(value).__name__}: {value!r}"
        raise ConfigError(msg)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some callables that are not written in Python have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(value, "__name__", type(value).__name__)
        msg = f"{wanted}, and {name}{signature} cannot be called with these two: {error}"
        raise ConfigError(msg) from None
    method = getattr(value, "__name__", "")
    if isinstance(getattr(value, "__self__", None), nn.Module) and method in _STEPS_OF_LIGHTNING:
        msg = (
            f"{wanted}, and {method} of a LightningModule gets a batch and its number; write {what}=lambda "
            f"model, batch: model.{method}(batch, 0), or give the module to tp_lightning.Trainer()"
        )
        raise ConfigError(msg)


_NEWEST = ("last", "latest", "newest")  # other trainers' names of "auto"
_OF_FILES = (".bin", ".ckpt", ".h5", ".keras", ".pt", ".pth", ".safetensors")


def as_checkpoints(
    checkpoint: Checkpoints | str | os.PathLike[str] | None, resume: object, *, validates: bool
) -> Checkpoints | None:
    """Return the settings of checkpoints; a folder alone means after every epoch."""
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpoints(checkpoint)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        msg = f"checkpoint must be a folder or Checkpoints(folder, ...), got {checkpoint!r}"
        raise ConfigError(msg)
    folder = None if checkpoint is None else Path(checkpoint.folder)
    if folder is not None and folder.suffix in _OF_FILES and not folder.is_dir():
        msg = (
            f"checkpoint={str(folder)!r} is the name of a file, and the checkpoints of a run are a folder; "
            f"write {str(folder.with_suffix(''))!r}, and trainer.export(model, ...) after the run for a file"
        )
        raise ConfigError(msg)
    if resume is not None and not isinstance(resume, str | os.PathLike):
        msg = f"resume must be 'auto' or the path of a checkpoint, got {resume!r}"
        raise ConfigError(msg)
    if resume is not None and resume != "auto" and checkpoint is not None:
        _check_resume(resume, checkpoint)
    if resume is not None and checkpoint is None:
        msg = f"resume={resume!r} needs to know where the checkpoints are: checkpoint=folder"
        raise ConfigError(msg)
    if checkpoint is not None and (checkpoint.best or "").startswith("val_") and not validates:
        msg = f"best={checkpoint.best!r} comes from a validation, and there is none: give validation="
        raise ConfigError(msg)
    return checkpoint


def _check_resume(resume: str | os.PathLike[str], checkpoint: Checkpoints) -> None:
    """Refuse what other trainers call a checkpoint: a word for one, the run's folder, a name in it."""
    folder, path = Path(checkpoint.folder), Path(resume)
    newest = f"the newest one in {folder} is resume='auto'"
    inside = folder / path
    if path.absolute() == folder.absolute():
        msg = f"resume={str(path)!r} is the folder of the run, and no checkpoint; {newest}"
    elif path.exists():
        return
    elif not path.is_absolute() and inside.exists():
        msg = f"resume={str(path)!r} is no path from here; write resume={str(inside)!r}"
    elif path.name == str(path) and path.name in _NEWEST:
        msg = f"resume={str(path)!r} is no checkpoint; {newest}"
    elif str(path) == "best":
        metric = checkpoint.best or "val_loss"
        msg = (
            f"resume='best' is no checkpoint; {newest}, and the best one's weights are loaded by "
            f"trainer.load_model(model, find_checkpoint({str(folder)!r}, best={metric!r}))"
        )
    else:
        return
    raise ConfigError(msg)


# -- Models, optimizers, loaders, schedulers -----------------------------------------------------

_SEVERAL = (list, tuple, set, frozenset, Mapping)


def check_model(method: str, model: object) -> None:
    if isinstance(model, nn.Module):
        check_initialized(model)
        check_not_distributed(model)
        return
    if isinstance(model, _SEVERAL):
        msg = (
            f"{method} takes one model, got {_described(model)}; put several into one module "
            "(torch.nn.ModuleList or ModuleDict), or prepare them in a loop of your own: "
            "trainer.prepare(first, second, ...)"
        )
    else:
        msg = f"{method} takes a model, a torch.nn.Module, got {_described(model)}"
    raise ConfigError(msg)


def recognize_fit(
    trainer: object = None,  # noqa: ARG001 - of the method
    model: object = None,
    optimizer: object = None,
    /,  # `optimizer=` may stand beside a second place, and is among the named ones then
    *others: object,  # noqa: ARG001 - any call comes here
    **named: object,
) -> str | None:
    """Return a sentence on a call of ``fit`` that lacks arguments, as other trainers' calls do."""
    has_own_steps = callable(getattr(model, "training_step", None))
    if has_own_steps and callable(getattr(model, "configure_optimizers", None)):
        return (
            f"fit() takes no {type(model).__name__} alone, whose steps and optimizers are its own: as a "
            "LightningModule it is for tp_lightning.Trainer().fit(module, loader) (pip install tp-lightning)"
        )
    if isinstance(model, nn.Module) and isinstance(optimizer, Iterable) and "train_loader" not in named:
        return (
            f"fit() takes an optimizer after the model, got {type(optimizer).__name__}; write "
            "fit(model, torch.optim.AdamW(model.parameters()), loader, step=step)"
        )
    return None


def recognize_prepare(trainer: object = None, *_: object, **named: object) -> str | None:  # noqa: ARG001
    """Return a sentence on a call of ``prepare`` that gives its objects by names."""
    if not any(isinstance(value, nn.Module | Optimizer | Iterable) for value in named.values()):
        return None
    return (
        f"prepare() takes its objects by place, got {', '.join(named)} by name; write model, optimizer, "
        "loader = trainer.prepare(model, optimizer, loader)"
    )


def recognize_log(loop: object = None, *numbers: object, **_: object) -> str | None:  # noqa: ARG001
    """Return a sentence on a call of ``loop.log`` that gives its numbers by place."""
    if not numbers:
        return None
    first = numbers[0]
    if isinstance(first, Mapping):
        return "loop.log() takes its numbers by name, got a dict; write loop.log(**numbers)"
    if isinstance(first, str) and first.isidentifier():
        name = first
    else:
        name = "loss"
    return f"loop.log() takes its numbers by name, got {_described(first)}; write loop.log({name}={name})"


def check_optimizer(method: str, optimizer: object) -> None:
    """Make sure that one optimizer was given, and that its step needs no closure."""
    if isinstance(optimizer, Optimizer):
        check_not_prepared(optimizer)
        _check_steps_alone(optimizer)
        return
    if isinstance(optimizer, _SEVERAL):
        msg = (
            f"{method} takes one optimizer, got {_described(optimizer)}; give one with several parameter "
            "groups, or step several in a loop of your own: trainer.prepare(model, first, second, loader)"
        )
    elif isinstance(optimizer, type):
        msg = f"optimizer must be made first: {optimizer.__name__}(model.parameters(), lr=...)"
    elif isinstance(optimizer, nn.Module):
        msg = f"{method} takes the model first, and then the optimizer, got {_described(optimizer)} for it"
    else:
        msg = (
            f"optimizer must be a torch.optim.Optimizer, got {_described(optimizer)}; write "
            "torch.optim.AdamW(model.parameters(), lr=1e-3)"
        )
    raise ConfigError(msg)


def check_gradients(method: str, parameters: Iterable[Tensor]) -> None:
    """Make sure that some parameter has a gradient."""
    if all(p.grad is None for p in parameters):
        msg = (
            f"{method} comes after the backward pass, and no parameter has a gradient yet; call "
            "trainer.backward(loss) before it"
        )
        raise StepError(msg)


def check_known(method: str, model: nn.Module, optimizer: object, step: object) -> None:
    """Make sure that model, optimizer and step fit together, before an estimate from them."""
    if step is not None:
        check_callable("step", step)
    if isinstance(optimizer, Optimizer):
        check_owner(optimizer, [model])
    elif optimizer is not None:
        check_optimizer(method, optimizer)


def _check_steps_alone(optimizer: Optimizer) -> None:
    if _needs_closure(type(optimizer).step):
        msg = (
            f"{type(optimizer).__name__}.step() needs a closure, which evaluates the loss several times, and "
            "fit() and update() give none; call optimizer.step(closure) in a loop of your own after "
            "trainer.prepare(model, optimizer, loader)"
        )
        raise ConfigError(msg)


@cache
def _needs_closure(step: Callable[..., object]) -> bool:
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )


def check_loader(what: str, loader: object) -> None:
    if isinstance(loader, tuple) and loader and all(hasattr(o, "shape") for o in loader):
        msg = (
            f"{what} must yield batches, got {_described(loader)}, of which each would be a batch; give "
            "DataLoader(TensorDataset(inputs, targets), batch_size=32), or a list of batches"
        )
    elif isinstance(loader, Mapping) or (
        isinstance(loader, list | tuple) and any(isinstance(o, DataLoader | PreparedLoader) for o in loader)
    ):
        if what == "validation":
            how = "give several by name: validation={'name': loader, ...}"
        else:
            how = "join the datasets (ConcatDataset), or zip prepared loaders in a loop of your own"
        msg = f"{what} must be one loader, got {_described(loader)}; {how}"
    elif isinstance(loader, Dataset) and not isinstance(loader, Iterable):
        msg = f"{what} must yield batches, got a dataset, {_described(loader)}; give DataLoader(dataset, ...)"
    elif (
        isinstance(loader, str | bytes | os.PathLike | Tensor | nn.Module)
        or is_array(loader)
        or not isinstance(loader, Iterable)
    ):
        msg = f"{what} must be a DataLoader or another iterable of batches, got {_described(loader)}"
    else:
        check_not_prepared(loader)
        return
    raise ConfigError(msg)


def check_not_distributed(model: nn.Module) -> None:
    """Make sure that no other library has given this rank a part of the model, or wrapped it.

    Shards of ``fully_shard`` alone pass: the backend ``fsdp`` takes them over.
    """
    check_not_prepared(model)
    for module in model.modules():
        # transformers sets this on the instance, and keeps the rest in the configuration.
        if not vars(module).get("_is_distributed_loading_by_transformers", False):
            continue
        distributed = getattr(module.config, "distributed_config", None)
        sizes = {name: getattr(distributed, name, None) or 1 for name in ("tp_size", "pp_size", "ep_size")}
        split = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        if split:
            msg = (
                f"transformers has split the {type(module).__name__} over ranks that read the same samples "
                f"(DistributedConfig with {', '.join(split)}), and here each rank would read its own; leave "
                "tp_plan and these sizes out (fsdp_size alone may stay), and split the plain model by "
                "ts.parallelize(model, ts.plans.from_hf(model)) for the backend 'shard'"
            )
            raise ModelError(msg)


def check_not_prepared(value: object) -> None:
    """Make sure that Accelerate has not prepared a model, an optimizer, a loader or a scheduler."""
    if getattr(value, "_is_accelerate_prepared", False):
        kind = type(value).__name__
        msg = (
            f"Accelerate has prepared the {kind}, which then splits batches, averages gradients or casts by "
            "itself, and a trainer would do so once more; leave accelerator.prepare() out, and give what it "
            "was given"
        )
        if isinstance(value, nn.Module):
            raise ModelError(msg)
        raise ConfigError(msg)


def check_preparable(value: object) -> None:
    """Make sure that ``value`` is one model, optimizer, loader or scheduler."""
    if isinstance(value, nn.Module):
        check_initialized(value)
        check_not_distributed(value)
    check_not_prepared(value)
    if isinstance(value, nn.Module | Optimizer | LRScheduler | ReduceLROnPlateau | PreparedLoader):
        return
    if isinstance(value, _SEVERAL):
        values = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) or any(
            isinstance(o, nn.Module | Optimizer | DataLoader) for o in values
        ):
            msg = f"prepare() takes its objects one by one, as in prepare(*objects), got {_described(value)}"
            raise ConfigError(msg)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | os.PathLike | Tensor):
        msg = f"prepare() takes models, optimizers, loaders and schedulers, got {_described(value)}"
        raise ConfigError(msg)


def check_owner(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Make sure that an optimizer has trained parameters of one of the models."""
    own_ids = {key for model in models for key in _parameters_of(model)}
    stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own_ids]
    if not stepped:
        msg = (
            "the optimizer has none of the model's parameters, so training would change nothing; "
            "make it from model.parameters()"
        )
        raise ConfigError(msg)
    if not any(p.requires_grad for p in stepped):
        msg = (
            f"the optimizer's {len(stepped)} parameters are all frozen, so training would change nothing; "
            "make it from those that are trained, [p for p in model.parameters() if p.requires_grad]"
        )
        raise ConfigError(msg)
    for model in models:
        _check_copies(model)


def _check_copies(model: nn.Module) -> None:
    """Make sure that the copies in peft's ``modules_to_save`` are tied where their originals are."""
    # By structure, so that peft need not be installed.
    wrappers = {
        path: m
        for path, m in model.named_modules()
        if {"original_module", "modules_to_save"} <= {*m._modules}
    }
    if not wrappers:
        return
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            places.setdefault(id(parameter), []).append(path)
    for path, wrapper in wrappers.items():
        copies = [
            dict(copy.named_parameters()) for copy in wrapper.get_submodule("modules_to_save").children()
        ]
        for name, parameter in wrapper.get_submodule("original_module").named_parameters():
            elsewhere = [place for place in places[id(parameter)] if not place.startswith(f"{path}.")]
            if elsewhere and any(len(places[id(copy[name])]) == 1 for copy in copies):
                msg = (
                    f"{path!r} is in modules_to_save, and shares {name!r} with {elsewhere[0]!r}: its "
                    "copy would be trained apart, and lost when the adapter is merged; give the adapter's "
                    "configuration ensure_weight_tying=True, or untie the two first"
                )
                raise ModelError(msg)


def check_not_shared(models: Sequence[nn.Module]) -> None:
    """Make sure that models share no parameter, since ranks average each model's gradients separately."""
    owners: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models, start=1):
        for name, parameter in model.named_parameters():
            first, its_name = owners.setdefault(id(parameter), (number, name))
            if first != number:
                msg = (
                    f"models {first} and {number} share a parameter ({its_name!r} and {name!r}), and on "
                    "several ranks each model's gradients are averaged on their own; put both into one "
                    "module, a shared trunk with its heads, and add the losses for one backward()"
                )
                raise ConfigError(msg)


def check_no_others(optimizer: Optimizer, model: nn.Module, why: str) -> None:
    own_ids = _parameters_of(model)
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own_ids:
                msg = (
                    f"the optimizer's parameter {position} of group {index}, of shape "
                    f"{tuple(parameter.shape)}, is not the model's: {why}; make what it belongs to a "
                    "submodule of the model"
                )
                raise ConfigError(msg)


def _parameters_of(model: nn.Module) -> set[int]:
    """Return the ids of the parameters as they are between two steps.

    After an evaluation a ``fully_shard`` module holds its unsharded parameters instead; ``state_dict()`` puts
    the sharded ones back.
    """
    model.state_dict(keep_vars=True)
    return {id(p) for p in model.parameters()}


def check_scheduler(scheduler: object) -> None:
    check_not_prepared(scheduler)
    if isinstance(scheduler, _SEVERAL):
        msg = (
            f"scheduler must be one scheduler, got {_described(scheduler)}; join several with "
            "SequentialLR or ChainedScheduler of torch.optim.lr_scheduler"
        )
        raise ConfigError(msg)
    if isinstance(scheduler, str):
        named = {
            "cosine": "CosineAnnealingLR(optimizer, T_max=epochs)",
            "plateau": "ReduceLROnPlateau(optimizer)",
            "step": "StepLR(optimizer, 30)",
        }
        example = named.get(scheduler, "LinearLR(optimizer)")
        msg = f"scheduler must be made first: torch.optim.lr_scheduler.{example}, got {scheduler!r}"
        raise ConfigError(msg)
    if isinstance(scheduler, type):
        msg = f"scheduler must be made first: {scheduler.__name__}(optimizer, ...)"
        raise ConfigError(msg)
    if isinstance(scheduler, Optimizer) or not callable(getattr(scheduler, "step", None)):
        msg = f"scheduler must have a method step(), got {_described(scheduler)}"
        if isinstance(scheduler, Optimizer):
            msg = f"scheduler must move a learning rate, got an optimizer, {type(scheduler).__name__}"
        raise ConfigError(msg)


def check_schedule(scheduler: object, every: str, optimizer: Optimizer, *, epochs: int | None) -> None:
    """Make sure that a scheduler belongs to this optimizer.

    A schedule over batches that is longer than the number of epochs gets only a warning if stepped per epoch:
    ``fit`` may be called many times with it.
    """
    moved = getattr(scheduler, "optimizer", None)
    if isinstance(moved, Optimizer):
        groups = {id(group) for group in optimizer.param_groups}
        if not any(id(group) in groups for group in moved.param_groups):
            msg = (
                f"the scheduler, {type(scheduler).__name__}, moves another optimizer, a "
                f"{type(moved).__name__}, than the one that is given; make it from this one"
            )
            raise ConfigError(msg)
    length = _batches_of(scheduler)
    if every == "epoch" and length is not None and length > (epochs or 0):
        log.warning(
            "%s goes over %d batches, and is moved once per epoch; to move it with every optimizer step give "
            "SchedulerOptions(scheduler, every='step')",
            type(scheduler).__name__,
            length,
        )


def _batches_of(scheduler: object) -> int | None:
    """Return the length of a schedule that torch documents to be stepped after every batch, else ``None``."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, CyclicLR):
        return int(scheduler.total_size)
    return None


def _described(value: object) -> str:
    if isinstance(value, _SEVERAL):
        values = value.values() if isinstance(value, Mapping) else value
        kinds = ", ".join(sorted({type(v).__name__ for v in values}))
        if value:
            return f"a {type(value).__name__} of {len(value)} ({kinds})"
        return f"an empty {type(value).__name__}"
    text = " ".join(repr(value).split())  # those of modules and tensors have several lines
    if len(text) > 100:
        text = text[:100] + "..."
    return f"{type(value).__name__}: {text}"
