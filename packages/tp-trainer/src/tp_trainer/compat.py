"""The trainer with the interface and the names of torchhandy: a switch, a config, and a custom loop."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from tp_core import LaunchEnvironment, available_devices, device_of_rank, resolve_devices
from tp_core.device_types import uses_pinned_memory
from tp_core.discovery import select
from tp_core.errors import ConfigError
from tp_core.files import atomic_part
from tp_core.plugins import Job, Session, registry

from tp_trainer.hosting import open_session

__all__ = ["ParallelTrainer", "Parallel_Trainer"]

T = TypeVar("T")
_MISSING = object()


class ParallelTrainer:
    """Runs the same training code on one device, or on one process per device.

    Args:
        synch: ``False`` runs on ``config.device`` alone. ``True`` runs one process per device,
            started by ``tp launch``, ``torchrun`` or ``python -m torch.distributed.launch
            --use_env``.
        config: An object with attributes, or a dict. It needs ``n_gpus``, the number of
            processes when ``synch`` is true, and ``device``, the device when it is false.
            It may have ``seed`` (orders the data, 0 by default), ``sync_batchnorm`` and
            ``find_unused_parameters`` (both ``False`` by default).

    Raises:
        ConfigError: ``config`` lacks something, or ``n_gpus`` is not the number of processes.
        DeviceError: ``config.device`` is an index that does not exist.
        LaunchEnvironmentError: The launcher's variables are incomplete.

    Example:
        >>> trainer = ParallelTrainer(False, {"n_gpus": 2, "device": "cpu"})
        >>> trainer.get_device()
        device(type='cpu')
    """

    def __init__(self, synch: bool, config: object) -> None:
        self.synch = bool(synch)
        self._seed = int(_read(config, "seed", 0))
        n_gpus, wanted = _read(config, "n_gpus"), _read(config, "device")
        if not isinstance(n_gpus, int) or isinstance(n_gpus, bool) or n_gpus < 1:
            msg = f"config.n_gpus must be a whole number from 1, got {n_gpus!r}"
            raise ConfigError(msg)
        environment = LaunchEnvironment.read()
        launched = environment if self.synch else None
        device = _device_here(wanted, launched)
        options: dict[str, Any] = {}
        if self.synch:
            _check_launched(environment, n_gpus)
            for name in ("sync_batchnorm", "find_unused_parameters"):
                options[name] = bool(_read(config, name, False))
        else:
            # Without the switch each process trains alone, even if a launcher has started it.
            environment = LaunchEnvironment.read({})
        name = "ddp" if environment.is_distributed else "single"
        options_of_backend = {name: options} if name == "ddp" else {}
        job = Job(
            devices=(device,),
            environment=environment,
            explicit_devices=True,
            seed=self._seed,
            options=options_of_backend,
        )
        selection = select(job, registry.backends(), name=name)
        self.session: Session = open_session(selection, job, {"seed": self._seed})

    def get_device(self) -> torch.device:
        """Return the device of this process."""
        return self.session.device

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.get_device()

    def model_parallel(self, model: nn.Module) -> nn.Module:
        """Put the model on the device, in training mode, and wrap it in DDP if ``synch`` is true.

        Raises:
            ModelError: The model is wrapped already.
            DisagreementError: The ranks' models differ.

        Collectives: with ``synch`` as in `DdpSession.prepare_model`.
        """
        return self.session.prepare_model(model).train()

    def dataset_parallel(
        self, dataset: Dataset[Any], *, shuffle: bool = True
    ) -> DistributedSampler[Any] | None:
        """Return a sampler of this rank's share of ``dataset``, or ``None`` without ``synch``.

        Args:
            dataset: A dataset with length.
            shuffle: ``False`` keeps the order, as for validation.
        """
        if self.synch:
            return self._sampler(dataset, shuffle=shuffle)
        return None

    def get_loader(
        self,
        dataset: Dataset[Any],
        epoch: int,
        bsz: int,
        num_workers: int,
        train_sampler: Sampler[Any] | None = None,
    ) -> DataLoader[Any]:
        """Return the loader of one epoch.

        The order of the samples follows from the seed and the epoch in both modes; with ``synch``
        each rank has its share of that order.

        Args:
            dataset: A dataset with length.
            epoch: The epoch; each epoch has another order.
            bsz: The batch size of each process.
            num_workers: Worker processes of the loader.
            train_sampler: What :meth:`dataset_parallel` returned, or a custom sampler.
        """
        sampler = self._sampler(dataset) if train_sampler is None else train_sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return DataLoader(
            dataset,
            bsz,
            sampler=sampler,
            num_workers=num_workers,
            pin_memory=uses_pinned_memory(self.get_device().type),
        )

    def save_model(self, ckpt: Mapping[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write ``ckpt`` with the model's state under "state_dict", which a dict gets itself; rank 0 writes.

        It has the plain model's names in both modes. A crash during the write leaves the old file unchanged.
        """
        state = ckpt if isinstance(ckpt, dict) else dict(ckpt)
        state["state_dict"] = self.session.model_state(model)
        if self.session.is_main:
            with atomic_part(path) as part, part.open("wb") as file:
                torch.save(state, file)

    def write_log(self, log_file: IO[str] | str | os.PathLike[str], content: str) -> None:
        """Append a line to an open file, or to a file by its name; rank 0 writes."""
        if not self.session.is_main:
            return
        if isinstance(log_file, str | os.PathLike):
            with Path(log_file).open("a", encoding="utf-8") as file:
                file.write(f"{content}\n")
        else:
            log_file.write(f"{content}\n")
            log_file.flush()

    def call_func(self, func: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Call ``func`` on rank 0 and return its result; return ``None`` on the other ranks."""
        if self.session.is_main:
            return func(*args, **kwargs)
        return None

    def get_model(self, model: nn.Module) -> nn.Module:
        """Return the plain module of a model that :meth:`model_parallel` returned."""
        return self.session.unwrap(model)

    def _sampler(self, dataset: Dataset[Any], *, shuffle: bool = True) -> DistributedSampler[Any]:
        return DistributedSampler(
            dataset,
            num_replicas=self.session.data_size,
            rank=self.session.data_rank,
            shuffle=shuffle,
            seed=self._seed,
        )


def _read(config: object, name: str, default: object = _MISSING) -> Any:
    if isinstance(config, Mapping):
        value = config.get(name, default)
    else:
        value = getattr(config, name, default)
    if value is _MISSING:
        what = "key" if isinstance(config, Mapping) else "attribute"
        msg = (
            f"config lacks the {what} {name!r}; it needs n_gpus (how many processes when synch is "
            "true) and device (the device when synch is false)"
        )
        raise ConfigError(msg)
    return value


def _device_here(wanted: object, environment: LaunchEnvironment | None) -> torch.device:
    """Return the device of this process; the CPU, with a warning, for an accelerator that does not exist."""
    if isinstance(wanted, str | int | torch.device):
        device = torch.device(wanted)
    else:
        device = None
    if device is None:
        msg = f"config.device must be a device such as 'cuda' or 'cpu', got {wanted!r}"
        raise ConfigError(msg)
    devices = available_devices()
    if device.type != "cpu" and all(d.type != device.type for d in devices):
        warnings.warn(
            f"config.device is {str(wanted)!r}, and this machine has no {device.type}: the CPU is used",
            stacklevel=3,
        )
        return torch.device("cpu")
    if environment is None or not environment.is_distributed:
        return resolve_devices(device)[0]
    return device_of_rank(resolve_devices(device.type), environment, explicit=False)


def _check_launched(environment: LaunchEnvironment, n_gpus: int) -> None:
    if environment.launcher == "plain" and n_gpus > 1:
        msg = (
            f"synch is true and config.n_gpus is {n_gpus}, but this is one process that no "
            f"launcher started; start it with: tp launch -n {n_gpus} script.py (pip install tp-launch)"
        )
        raise ConfigError(msg)
    if n_gpus not in {environment.world_size, environment.local_world_size}:
        msg = (
            f"config.n_gpus is {n_gpus}, but {environment.world_size} processes were started, "
            f"{environment.local_world_size} on this host; set n_gpus to one of the two, or start "
            f"{n_gpus} processes"
        )
        raise ConfigError(msg)


Parallel_Trainer = ParallelTrainer
"""The name in torchhandy: only the import line of a program changes."""
