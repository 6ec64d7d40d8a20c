"""Accelerate's ``Accelerator`` on tp's sessions: of a script that uses it, the import line changes.

::

    Accelerator()     a Trainer with the backend "single", or "ddp" under a launcher
        prepare()     model and optimizer: as Trainer.prepare; loaders: _loaders; schedulers: _schedulers
        backward()    Trainer.backward, of a loss divided by the batches of an optimizer step
        step()        of optimizer and scheduler: nothing, unless the batch ends an optimizer step

A batch size counts for one process, as Accelerate has it, unless ``split_batches`` is true. Of a last batch
that is not full each sample counts once, where Accelerate repeats samples to fill it.
"""

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment, tree_leaves, tree_map
from tp_core.arguments import explain_arguments, explain_init
from tp_core.errors import ConfigError, StateError
from tp_core.output import get_logger
from tp_core.random import capture_rng_state, restore_rng_state
from tp_core.state import load_state
from tp_trainer import Trainer

from tp_accelerate._arguments import (
    ELSEWHERE,
    check_prepared,
    check_steps,
    ddp_options,
    first_device,
    refuse_argument,
    runs_in_bfloat16,
)
from tp_accelerate._loaders import AcceleratedLoader, batches_of_all_processes
from tp_accelerate._schedulers import AcceleratedScheduler
from tp_accelerate._states import STATE_FILE, StateFolders, require_folder, write
from tp_accelerate._trackers import Trackers

log = get_logger("tp_accelerate")


@explain_init
class Accelerator:
    """Runs the training loop of an Accelerate script on one device, or on one process per device.

    Args:
        split_batches: Whether the loaders' batch sizes count for all processes together.
        mixed_precision: "no" or "bf16".
        gradient_accumulation_steps: The number of batches in an optimizer step.
        cpu: Whether to train on the CPU where there is an accelerator.
        dataloader_config: An object with ``split_batches`` and ``use_stateful_dataloader``.
        log_with: Names of tp's loggers, trackers of Accelerate, or both.
        project_dir: The folder of loggers and states.
        project_config: An object with ``project_dir``, ``automatic_checkpoint_naming``, ``total_limit`` and
            ``iteration``.
        gradient_accumulation_plugin: An object with ``num_steps`` and ``sync_with_dataloader``.
        step_scheduler_with_optimizer: Whether schedulers step when the optimizer does, once for each process
            unless batches are split.
        kwargs_handlers: A ``DistributedDataParallelKwargs``, or nothing.
        **others: Arguments of Accelerate that are not here; what they are called in tp is in the error.

    Raises:
        ConfigError: An argument has a wrong value, or is not here.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> accelerator.is_main_process
        True
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        *,
        dataloader_config: Any = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[Any] | None = None,
        rng_types: Any = None,  # noqa: ARG002 - the order of the data is a function of seed and epoch here
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value is not None:
                parameters = [p for p in inspect.signature(Accelerator).parameters if p != "others"]
                refuse_argument(name, parameters)
        if not device_placement:
            msg = "device_placement=False is not here: write your own loop with trainer.session"
            raise ConfigError(msg)
        check_steps(gradient_accumulation_steps)
        config = dataloader_config
        if getattr(config, "dispatch_batches", None):
            msg = (
                "dispatch_batches=True is not here: tp splits a dataset with length by its indices, and an "
                "iterable one by its method shard(index, count)"
            )
            raise ConfigError(msg)
        plugin = gradient_accumulation_plugin
        self.gradient_accumulation_steps = int(getattr(plugin, "num_steps", gradient_accumulation_steps))
        self._syncs_with_loader = bool(getattr(plugin, "sync_with_dataloader", True))
        self.split_batches = bool(getattr(config, "split_batches", split_batches))
        self._is_stateful = bool(getattr(config, "use_stateful_dataloader", False))
        self.mixed_precision = mixed_precision or "no"
        self.project_dir = project_dir or getattr(project_config, "project_dir", None)
        self.logging_dir = getattr(project_config, "logging_dir", None) or self.project_dir
        self.save_iteration = int(getattr(project_config, "iteration", 0))
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        if LaunchEnvironment.read().is_distributed:
            name = "ddp"
        else:
            name = "single"
        of_ddp = ddp_options(kwargs_handlers or ())
        options = of_ddp if name == "ddp" else None
        devices = "cpu" if cpu else first_device(name)
        self._trainer = Trainer(
            backend=name,
            devices=devices,
            precision="bf16-mixed" if runs_in_bfloat16(self.mixed_precision) else "fp32",
            options=options,
            progress=False,
        )
        self._session = self._trainer.session
        self._trackers = Trackers(log_with, self.logging_dir, is_main=self._session.is_main)
        self._state_folders = StateFolders(project_config, self.project_dir)
        # What was prepared or registered, in the order of the calls.
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._loaders: list[AcceleratedLoader] = []
        self._objects: list[Any] = []
        self._active: list[AcceleratedLoader] = []  # those under iteration, the innermost last
        # Where an optimizer step is: whether this batch ends it, and the number of the batch.
        self.sync_gradients = True
        self.step = 0
        self._flag = False

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            if name in ELSEWHERE:
                msg = f"this Accelerator has no {name!r}; with tp, write {ELSEWHERE[name]}"
                raise AttributeError(msg, name=name, obj=self)
            return object.__getattribute__(self, name)  # raises the error that led here

    # -- ranks --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._session.device

    @property
    def num_processes(self) -> int:
        """The number of processes of the job."""
        return self._session.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return self._session.rank

    data_parallel_rank = process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host, from 0."""
        return self._session.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0."""
        return self._session.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process is the first one of its host."""
        return self._session.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the last rank."""
        return self._session.rank == self._session.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._session.world_size > 1

    @property
    def distributed_type(self) -> str:
        """Return "NO"; with several processes "MULTI_GPU" or "MULTI_CPU"."""
        if not self.use_distributed:
            return "NO"
        if self.device.type == "cpu":
            return "MULTI_CPU"
        return "MULTI_GPU"

    multi_device = use_distributed
    should_save_model = True
    non_blocking = True
    even_batches = False
    dispatch_batches = False
    use_seedable_sampler = True
    is_fsdp2 = False
    is_composable_parallelism_enabled = False
    optimizer_step_was_skipped = False

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether :meth:`load_state` puts the loaders where they stood."""
        return self._is_stateful

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        self._session.barrier()

    def print(self, *args: Any, **options: Any) -> None:
        """Print on the first process of each host."""
        if self.is_local_main_process:
            print(*args, **options)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Return a function that calls ``function`` on rank 0 alone."""
        return self._on(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Return a function that calls ``function`` on the first process of each host alone."""
        return self._on(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Return a function that calls ``function`` on the last process alone."""
        return self._on(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
        """Return a function that calls ``function`` on one process alone."""
        return self._on(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Any:
        """Return a function that calls ``function`` on one process of each host alone."""
        return self._on(lambda: self.local_process_index == local_process_index, function)

    def _on(self, is_here: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
        if function is None:
            return functools.partial(self._on, is_here)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if is_here():
                return function(*args, **options)
            return None

        return call

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the others."""
        with self._first(is_first=self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of each host before the others."""
        with self._first(is_first=self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, *, is_first: bool) -> Iterator[None]:
        if not is_first:
            self._session.barrier()
        yield
        if is_first:
            self._session.barrier()

    @explain_arguments("split_between_processes(inputs)")
    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's share of a list, a tensor, or a dict of them.

        Args:
            inputs: Values for all processes.
            apply_padding: Whether to repeat the last value where a process has fewer.
        """
        if isinstance(inputs, Mapping):
            values = list(inputs.values())
        else:
            values = [inputs]
        length = len(values[0])
        size, extra = divmod(length, self.num_processes)  # the first ones get one more
        begin = self.process_index * size + min(self.process_index, extra)
        indices = list(range(begin, begin + size + (self.process_index < extra)))
        if apply_padding and length:
            most = -(-length // self.num_processes)
            indices += [length - 1] * (most - len(indices))

        def picked(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[indices]
            items = [value[i] for i in indices]
            if isinstance(value, tuple):
                return tuple(items)
            return items

        if isinstance(inputs, Mapping):
            yield {k: picked(v) for k, v in inputs.items()}
        else:
            yield picked(inputs)

    # -- preparing ----------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:  # noqa: ARG002 - all are placed
        """Return models, optimizers, loaders and schedulers for this process; others as they are.

        Args:
            *objects: The objects, in any order.
            device_placement: Without effect: all that is prepared is placed.
        """
        check_prepared(objects)
        # The order of the data follows from set_seed(), which a script may have called after it made this.
        seed = self._session.broadcast(torch.initial_seed(), where="a seed")
        self._session.job = replace(self._session.job, seed=seed)
        # Models first: optimizers are checked against them.
        models = [o for o in objects if isinstance(o, nn.Module) and o not in self._models]
        for model in models:
            if self.mixed_precision == "bf16":
                _in_autocast(model, self._trainer)
        trained = [o for o in objects if isinstance(o, nn.Module | Optimizer)]
        prepared = {}
        if trained:
            done = self._trainer.prepare(*trained)
            # of one object the object itself comes back
            if len(trained) > 1:
                several = done
            else:
                several = (done,)
            prepared = dict(zip(map(id, trained), several, strict=True))
        self._models += [prepared[id(model)] for model in models]
        for value in trained:
            if isinstance(value, Optimizer) and value not in self._optimizers:
                self._optimizers.append(prepared[id(value)])
                self._guard_step(prepared[id(value)])
        results = tuple(prepared[id(o)] if id(o) in prepared else self._prepared(o) for o in objects)
        if len(results) == 1:
            return results[0]
        return results

    def _prepared(self, value: Any) -> Any:
        if isinstance(value, LRScheduler | ReduceLROnPlateau):
            scheduler = AcceleratedScheduler(
                value,
                ends_step=(lambda: self.sync_gradients) if self.step_scheduler_with_optimizer else None,
                times=1 if self.split_batches else self.num_processes,
            )
            self._schedulers.append(scheduler)
            return scheduler
        if isinstance(value, DataLoader):
            if self.split_batches:
                world = 1
            else:
                world = self._session.data_size
            loader = AcceleratedLoader(
                self._active, self._trainer.prepare(batches_of_all_processes(value, world))
            )
            self._loaders.append(loader)
            return loader
        return value

    def prepare_model(self, model: nn.Module, **_: Any) -> Any:
        """Return the prepared model."""
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Optimizer, **_: Any) -> Any:
        """Return the prepared optimizer."""
        return self.prepare(optimizer)

    def prepare_data_loader(self, data_loader: DataLoader[Any], **_: Any) -> Any:
        """Return the prepared loader."""
        return self.prepare(data_loader)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the prepared scheduler."""
        return self.prepare(scheduler)

    def _guard_step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step, and clear gradients, in the last batch of an optimizer step alone."""
        for name in ("step", "zero_grad"):
            own = getattr(optimizer, name)

            @functools.wraps(own)  # with the mark that a scheduler has left on it
            def guarded(_: Optimizer, *args: Any, _own: Any = own, **options: Any) -> Any:
                if self.sync_gradients:
                    return _own(*args, **options)
                return None

            # A bound method: torch's schedulers look into the one that they wrap.
            setattr(optimizer, name, types.MethodType(guarded, optimizer))

    @explain_arguments("unwrap_model(model)")
    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, **_: Any) -> nn.Module:
        """Return the plain module of a prepared model."""
        plain = self._session.unwrap(model)
        if not keep_fp32_wrapper:
            vars(plain).pop("forward", None)
        return plain

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared; return a ``None`` for each argument."""
        for prepared in (self._models, self._optimizers, self._schedulers, self._loaders, self._objects):
            prepared.clear()
        self.step = 0
        return [None] * len(objects)

    clear = free_memory

    # -- training -----------------------------------------------------------------------------------

    def autocast(self, **_: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of ``mixed_precision``."""
        return self._trainer.autocast()

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients accumulate without a reduction over processes."""
        return self._trainer.no_sync(model)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run a batch of an optimizer step; the last one reduces the gradients."""
        if self._syncs_with_loader and self._active and self._active[-1].end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        with contextlib.ExitStack() as stack:
            unsynced = () if self.sync_gradients else models
            for model in unsynced:
                stack.enter_context(self.no_sync(model))
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: Any = None) -> Iterator[None]:  # noqa: ARG002
        """Run the block: all processes take the same steps anyway."""
        yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add the gradients of a loss, divided by the number of batches in an optimizer step.

        Raises:
            ConfigError: Nothing was prepared: on several processes each would train for itself.
        """
        if not self._models and not self._optimizers:
            msg = (
                "backward() comes before prepare(), and so no gradient would reach other processes; write "
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            )
            raise ConfigError(msg)
        self._trainer.backward(loss / self.gradient_accumulation_steps, **options)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients to a norm of at most ``max_norm``; return the norm before."""
        if isinstance(parameters, nn.Module):
            msg = "clip_grad_norm_() got a model; write clip_grad_norm_(model.parameters(), 1.0)"
            raise ConfigError(msg)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every element of the gradients between ``-clip_value`` and ``clip_value``."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    def set_trigger(self) -> None:
        """Raise a flag on this process, for :meth:`check_trigger`."""
        self._flag = True

    def check_trigger(self) -> bool:
        """Return whether any process has raised the flag, and lower it."""
        flag = torch.tensor(float(self._flag), device=self.device)
        raised = bool(self._session.reduce(flag, "max"))
        self._flag = False
        return raised

    # -- values of all processes --------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return tensors, alone or in containers, with the rows of all processes."""
        for leaf in tree_leaves(tensor):
            if not isinstance(leaf, Tensor):
                msg = (
                    f"gather() takes tensors, alone or in containers, got {type(leaf).__name__}: "
                    f"{leaf!r:.60}; for others write gather_for_metrics(objects, use_gather_object=True)"
                )
                raise ConfigError(msg)
        return tree_map(lambda t: self._session.gather(t.reshape(1) if t.dim() == 0 else t.detach()), tensor)

    @explain_arguments("gather_for_metrics((predictions, targets))")
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all processes, each sample once; of other objects a list of all."""
        tensors = all(isinstance(leaf, Tensor) for leaf in tree_leaves(input_data))
        if tensors and not use_gather_object:
            return self._trainer.gather_for_metrics(input_data)
        is_nothing = bool(self._active) and self._active[-1].holds_nothing
        own = [] if is_nothing else list(input_data)
        gathered = self._session.gather_objects(own, where="objects for metrics")
        return [value for values in gathered for value in values]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return tensors reduced over the processes: "sum", "mean" or "none", times ``scale``."""
        if reduction not in ("sum", "mean"):
            return tree_map(lambda t: t * scale, tensor)
        return tree_map(lambda t: self._session.reduce(t, reduction) * scale, tensor)  # type: ignore[arg-type]  # checked

    @explain_arguments("pad_across_processes(tensor, dim=1)")
    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return tensors padded along ``dim`` to the size of the process that has most."""

        def padded(value: Tensor) -> Tensor:
            if dim >= value.dim():
                return value
            sizes = torch.tensor(value.shape[dim], device=self.device)
            missing = int(self._session.reduce(sizes, "max")) - value.shape[dim]
            shape = list(value.shape)
            shape[dim] = missing
            padding = value.new_full(shape, pad_index)
            if pad_first:
                parts = [padding, value]
            else:
                parts = [value, padding]
            return torch.cat(parts, dim)

        return tree_map(padded, tensor)

    # -- loaders ------------------------------------------------------------------------------------

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> AcceleratedLoader:
        """Return a prepared loader that begins after ``num_batches`` batches.

        Raises:
            ConfigError: The loader was not prepared.
        """
        if not isinstance(dataloader, AcceleratedLoader):
            kind = type(dataloader).__name__
            msg = f"skip_first_batches() takes a loader that prepare() returned, got {kind}"
            raise ConfigError(msg)
        return AcceleratedLoader(self._active, dataloader.prepared, skip=num_batches)

    # -- files --------------------------------------------------------------------------------------

    @explain_arguments("save(obj, path)")
    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object by ``torch.save`` on rank 0; a crash leaves the old file unchanged."""
        if safe_serialization:
            msg = "save(safe_serialization=True) is not here; with tp, write trainer.export(model, path)"
            raise ConfigError(msg)
        if self.is_main_process:
            write(obj, Path(f))

    @explain_arguments("get_state_dict(model)")
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:  # noqa: ARG002 - always plain
        """Return the state of a prepared model, with the plain module's names."""
        return self._session.model_state(model)

    @explain_arguments("save_model(model, folder)")
    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights into a folder, as safetensors files that load without tp."""
        if not safe_serialization:
            msg = "save_model(safe_serialization=False) is not here; write accelerator.save(model, path)"
            raise ConfigError(msg)
        folder = Path(save_directory)
        if self.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        self._session.barrier()
        self._trainer.export(model, folder / "model.safetensors", max_file_nbytes=_nbytes(max_shard_size))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore further objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            ConfigError: An object has neither.
        """
        for value in objects:
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                msg = (
                    "register_for_checkpointing() takes objects with state_dict and load_state_dict, got "
                    f"{type(value).__name__}"
                )
                raise ConfigError(msg)
            self._objects.append(value)

    @explain_arguments("save_state(folder)")
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **_: Any) -> str:  # noqa: ARG002
        """Write all that was prepared or registered into one file of a folder; a crash leaves the old one.

        Args:
            output_dir: The folder; with automatic names of the project's, the next one of them.
            safe_serialization: Without effect: the file is tp's own.

        Returns:
            The folder.

        Collectives: those of the models' states, a gather of random states, a barrier.
        """
        if self._state_folders.is_automatic:
            folder = self._state_folders.next(self.save_iteration, deletes=self.is_main_process)
        else:
            folder = require_folder(output_dir, "save_state(output_dir)")
        common = {
            "models": [self._session.model_state(model) for model in self._models],
            "optimizers": [stateful.state_dict() for stateful in self._optimizers],
            "schedulers": [stateful.state_dict() for stateful in self._schedulers],
            "loaders": [stateful.prepared.state_dict() for stateful in self._loaders],
            "objects": [stateful.state_dict() for stateful in self._objects],
            "generators": self._session.gather_objects(
                capture_rng_state([self.device]), where="states of generators"
            ),
            "step": self.step,
        }
        if self.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            write(common, folder / STATE_FILE)
        self._session.barrier()
        self.save_iteration += 1
        return str(folder)

    def load_state(self, input_dir: Any = None, **_: Any) -> None:
        """Restore what :meth:`save_state` wrote.

        Args:
            input_dir: The folder; without it the newest one of the project's automatic names.

        Raises:
            StateError: There is no such state, or it is of other objects.
        """
        if input_dir is None and self._state_folders.is_automatic:
            input_dir = self._state_folders.newest()
        path = require_folder(input_dir, "load_state(input_dir)") / STATE_FILE
        if not path.is_file():
            msg = (
                f"there is no state in {path.parent}: it has no {path.name}. What Accelerate saved "
                "loads there; its model.safetensors loads here by trainer.load_model(model, path)"
            )
            raise StateError(msg)
        state = load_state(path)
        by_kind: dict[str, list[Any]] = {
            "models": self._models,
            "optimizers": self._optimizers,
            "schedulers": self._schedulers,
            "loaders": self._loaders,
            "objects": self._objects,
        }
        for name, objects in by_kind.items():
            if len(state[name]) != len(objects):
                msg = (
                    f"{path} has the state of {len(state[name])} {name}, and {len(objects)} were prepared or "
                    "registered; prepare all of them, in the same order, before load_state()"
                )
                raise StateError(msg)
        for model, saved in zip(self._models, state["models"], strict=True):
            self._session.load_model_state(model, saved)
        for name in ("optimizers", "schedulers", "objects"):
            for stateful, saved in zip(by_kind[name], state[name], strict=True):
                stateful.load_state_dict(saved)
        for loader, saved in zip(self._loaders, state["loaders"], strict=True):
            loader.load(saved, within=self._is_stateful)
        kept = state["generators"]
        if len(kept) != self.num_processes:
            lost = f"{len(kept)} processes, and this run has {self.num_processes}"
        elif restore_rng_state(kept[self.process_index], [self.device]):
            lost = f"another type of device than {self.device.type}"
        else:
            lost = ""
        if lost and self.is_main_process:
            log.warning("%s was saved on %s: its random numbers are not continued", path, lost)
        self.step = state["step"]

    # -- trackers -----------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Any = None,  # noqa: ARG002 - of Accelerate's own trackers
    ) -> None:
        """Open the loggers of ``log_with`` on rank 0.

        Args:
            project_name: The folder of their files, in the project's.
            config: Hyperparameters.
            init_kwargs: Without effect.

        Raises:
            ConfigError: tp has no logger of that name.
        """
        self._trackers.open(project_name, config or {})

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:  # noqa: ARG002
        """Pass numbers to the trackers; on rank 0."""
        self._trackers.log(values, step)

    @explain_arguments("get_tracker(name)")
    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # noqa: ARG002
        """Return the tracker of a name, on rank 0; elsewhere, or if there is none, one that does nothing.

        Raises:
            ConfigError: There is no such tracker.
        """
        return self._trackers.find(name)

    def end_training(self) -> None:
        """Close the trackers and the session."""
        self._trackers.close()
        self._trainer.close()


def _in_autocast(model: nn.Module, trainer: Trainer) -> None:
    """Run the forward of a model under autocast, with outputs in float32."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **options: Any) -> Any:
        with trainer.autocast():
            output = own(*args, **options)
        return tree_map(
            lambda t: t.float() if isinstance(t, Tensor) and t.dtype is torch.bfloat16 else t, output
        )

    model.forward = forward  # as Accelerate does


def _nbytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B", size.upper().replace("IB", "B"))
    if match is None:
        msg = f"max_shard_size must be a number of bytes, or text such as '5GB', got {size!r}"
        raise ConfigError(msg)
    thousands = " KMGT".index(match[2] or " ")
    return int(match[1]) * int(1000**thousands)
