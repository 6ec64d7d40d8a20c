"""Accelerate's arguments in tp's terms; what is not here is refused, with what to write instead."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from tp_core import available_devices
from tp_core.errors import ConfigError
from tp_trainer import DdpOptions

# What is not here, and what to write instead.
ELSEWHERE = {
    "context_parallel_rank": 'Trainer(backend="context")',
    "data_parallel_shard_rank": 'Trainer(backend="fsdp")',
    "deepspeed_plugin": 'Trainer(backend="fsdp")',
    "deepspeed_ulysses_dl_adapter": 'Trainer(backend="context")',
    "dynamo_backend": "Trainer(compile=True)",
    "dynamo_plugin": "Trainer(compile=True)",
    "fp8_backend": 'Trainer(precision="bf16-mixed")',
    "fsdp_plugin": 'Trainer(backend="fsdp", options=FsdpOptions(...))',
    "lomo_backward": "trainer.backward(loss)",
    "maybe_context_parallel": 'Trainer(backend="context")',
    "megatron_lm_plugin": 'Trainer(backend="shard")',
    "parallelism_config": 'Trainer(backend="fsdp"), "shard", "context" or "pipeline"',
    "pipeline_parallel_rank": 'Trainer(backend="pipeline")',
    "profile": 'fit(callbacks=[Profiler("profile")])',
    "register_load_state_pre_hook": "fit(state={...})",
    "register_save_state_pre_hook": "fit(state={...})",
    "tensor_parallel_rank": 'Trainer(backend="shard")',
    "torch_device_mesh": 'Trainer(backend="fsdp")',
    "torch_tp_plugin": 'Trainer(backend="shard")',
    "trigger_sync_in_backward": "trainer.no_sync(model)",
    "unscale_gradients": "trainer.update(model, optimizer)",
    "verify_device_map": "tp_shard.shard(model)",
}


# Names of Accelerate that are not here, and what to write instead.
NAMES = {
    "DistributedDataParallelKwargs": "from accelerate import DistributedDataParallelKwargs",
    "init_empty_weights": "trainer.build(lambda: Model(config))",
    "load_checkpoint_and_dispatch": "trainer.load_model(model, path)",
    "notebook_launcher": "from tp_launch import launch, and launch(function, 2)",
    "utils": "from tp_accelerate import set_seed, or Accelerate's own: from accelerate import utils",
}


def refuse_argument(name: str, known: Iterable[str]) -> NoReturn:
    """Raise the error for an argument of Accelerate, or of nobody, that is not here."""
    if name in ELSEWHERE:
        hint = f"; with tp, write {ELSEWHERE[name]}"
    else:
        meant = closest_name(name, known)
        if meant:
            hint = f"; did you mean {meant!r}? It has: "
        else:
            hint = "; it has: "
        hint += ", ".join(known)
    msg = f"this Accelerator has no argument {name!r}{hint}"
    raise ConfigError(msg)


def check_steps(steps: object) -> None:
    """Check the number of batches of an optimizer step."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        msg = f"gradient_accumulation_steps must be a whole number from 1, got {steps!r:.80}"
        raise ConfigError(msg)


def check_prepared(values: Sequence[object]) -> None:
    """Check that there is something to prepare, and no class or text in it; other objects may be anything."""
    wanted = "prepare() takes models, optimizers, loaders and schedulers"
    if not values:
        msg = f"{wanted}, got nothing"
        raise ConfigError(msg)
    for value in values:
        if isinstance(value, type):
            msg = f"{wanted}, got the class {value.__name__}; make an object of it: {value.__name__}(...)"
            raise ConfigError(msg)
        if isinstance(value, str):
            msg = f"{wanted}, got the text {value!r:.80}"
            raise ConfigError(msg)


def closest_name(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``given``, if one is."""
    return next(iter(difflib.get_close_matches(given, list(known), 1)), None)


def runs_in_bfloat16(mixed_precision: str) -> bool:
    """Return whether forward runs in bfloat16."""
    value = str(getattr(mixed_precision, "value", mixed_precision))
    if value == "fp16":
        msg = (
            "mixed_precision='fp16' is not here: 'bf16' is; scaled losses are in "
            "Trainer(precision='fp16-mixed'), with trainer.update(model, optimizer)"
        )
        raise ConfigError(msg)
    if value not in ("no", "bf16"):
        msg = f"mixed_precision={value!r} is not here: 'bf16' is, and 'no'"
        raise ConfigError(msg)
    return value == "bf16"


def ddp_options(handlers: Iterable[Any]) -> DdpOptions:
    """Return the options of ``ddp`` that a ``DistributedDataParallelKwargs`` asks for."""
    options: dict[str, Any] = {}
    for handler in handlers:
        kind = type(handler).__name__
        if kind != "DistributedDataParallelKwargs":
            msg = f"kwargs_handlers has a {kind}, which is not here; DdpOptions(...) has what tp's ddp takes"
            raise ConfigError(msg)
        for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
            options[name] = getattr(handler, name)
    return DdpOptions(**options)


def first_device(backend: str) -> Any:
    """Return the device of this process: the launcher's choice, or the first one that there is."""
    if backend == "ddp":
        return "auto"
    return available_devices()[0]
