"""Objects made ready for the backend: for custom training loops."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core.errors import ConfigError

from tp_trainer._checks._objects import (
    check_known,
    check_model,
    check_not_shared,
    check_owner,
    check_preparable,
)
from tp_trainer._checks._values import check_positive
from tp_trainer._steps._step import Step
from tp_trainer._trainer._base import TrainerBase

if TYPE_CHECKING:
    from tp_trainer._memory._table import MemoryTable

__all__ = ["Preparing"]

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")


class Preparing(TrainerBase):
    """Prepares models, optimizers, loaders and schedulers."""

    @overload
    def prepare(self, one: T1, /, *, shard: bool = ..., training: bool = ...) -> T1: ...

    @overload
    def prepare(self, one: T1, two: T2, /, *, shard: bool = ..., training: bool = ...) -> tuple[T1, T2]: ...

    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, /, *, shard: bool = ..., training: bool = ...
    ) -> tuple[T1, T2, T3]: ...

    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, four: T4, /, *, shard: bool = ..., training: bool = ...
    ) -> tuple[T1, T2, T3, T4]: ...

    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, four: T4, five: T5, /, *, shard: bool = ..., training: bool = ...
    ) -> tuple[T1, T2, T3, T4, T5]: ...

    @overload
    def prepare(self, *objects: Any, shard: bool = ..., training: bool = ...) -> Any: ...

    def prepare(self, *objects: Any, shard: bool = True, training: bool = True) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the backend.

        Args:
            *objects: What to prepare, in any order.
            shard: Whether loaders are split over the data ranks; ``False`` for loaders that
                give each rank its own samples already.
            training: Whether loaders are to train on: every rank then takes the same steps, with a
                stand-in sample where it has none of a batch. With ``False`` each sample is met once, by
                one rank, and no loss is weighed by it.

        Returns:
            The prepared objects in the same order; the object itself if it is one.

        Raises:
            ModelError: A model is wrapped already.
            LoaderError: A loader cannot be split over the ranks.
            ConfigError: An object is none of these, or an optimizer has another model's
                parameters.
            SelectionError: No backend fits, or that of the running session does not fit a model.

        Example:
            >>> model, optimizer, loader = trainer.prepare(model, optimizer, loader)
            ... for batch in loader:
            ...     optimizer.zero_grad()
            ...     trainer.backward(trainer.run(step, model, batch))
            ...     optimizer.step()  # doctest: +SKIP
        """
        from tp_trainer._memory._work import Work

        for value in objects:
            check_preparable(value)
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer)]
        work = Work(optimizers[0] if len(optimizers) == 1 and len(models) == 1 else None)
        self._open(*models, by="prepare()", work=work)
        if self.session.data_size > 1:
            check_not_shared(models)
        for optimizer in objects:
            if isinstance(optimizer, Optimizer) and models:
                check_owner(optimizer, models)
        # A backend may give a model other parameters, which its optimizer then has to take over.
        in_order = sorted(range(len(objects)), key=lambda i: not isinstance(objects[i], nn.Module))
        done = {i: self._prepare(objects[i], shard=shard, training=training) for i in in_order}
        prepared = tuple(done[i] for i in range(len(objects)))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, value: Any, *, shard: bool, training: bool) -> Any:
        if isinstance(value, nn.Module):
            return self._prepare_model(value)
        if isinstance(value, Optimizer):
            if self._scaler is not None:
                value.register_step_pre_hook(self._refuse_scaled)
            return self.session.prepare_optimizer(value)
        if isinstance(value, LRScheduler | ReduceLROnPlateau):
            return value
        return self._loader(value, shard=shard, training=training, watched=True)

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a model that ``make`` builds, prepared, without ever holding all of it where no rank has to.

        Its initial values are those that ``make()`` would draw on one device, element by element. A backend
        that splits parameters gives each rank its slices alone.

        Args:
            make: Builds the model on the CPU, ``lambda: Model(config)``; called once, on every rank.

        Returns:
            The model, for :meth:`fit`, for optimizers, for :meth:`load_model`.

        Raises:
            ConfigError: ``make`` returned no module.
            SelectionError: No backend fits the model.

        Example:
            >>> model = trainer.build(lambda: nn.Linear(4, 1))
            >>> optimizer = torch.optim.AdamW(model.parameters())
        """
        from tp_core.plugins import build_deferred, materialize

        def build() -> nn.Module:
            made = make()
            check_model("build()", made)
            return made.to(torch.bfloat16) if self._precision == "bf16-true" else made

        model = build_deferred(build)
        if not self._open(model, by="build()").takes_deferred_models:
            materialize(model)
        self._prepare_model(model)
        return model

    def estimate(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        batch: Any = None,
        step: Step | None = None,
        *,
        devices: int | None = None,
        memory: int | str | None = None,
    ) -> "MemoryTable":
        """Return what training would need on each device, under every installed backend; nothing is started.

        One step is run on tensors without memory. The model may be on the meta device, and the devices
        need not be there.

        Args:
            model: The plain model.
            optimizer: Its optimizer; without it, one that keeps two values for each parameter is assumed.
            batch: A batch of the whole job, as the loader yields it.
            step: As for :meth:`fit`. Without batch and step activations are not known.
            devices: How many devices there would be; as many as the trainer has by default.
            memory: What each of them has free: bytes, or text such as "80GiB"; by default what this trainer's
                device has now.

        Returns:
            The verdicts with their numbers; print it to see a table.

        Raises:
            ConfigError: An argument has a wrong value.

        Example:
            >>> print(trainer.estimate(model, optimizer, batch, step, devices=8, memory="80GiB"))
        """
        from tp_trainer._memory._work import Work, estimate_job

        check_model("estimate()", model)
        check_known("estimate()", model, optimizer, step)
        if devices is not None:
            check_positive("devices", devices)
        work = Work(optimizer, None, step)
        plugins = self._lazy.plugins
        return estimate_job(
            self._lazy.job, work, model, batch, plugins.backends(), devices=devices, memory=memory
        )

    def _refuse_scaled(self, *_: object) -> None:
        if not self._may_step:
            msg = (
                "with precision='fp16-mixed' the gradients are scaled, and the optimizer must not take "
                "them as they are; call trainer.update(model, optimizer) instead of optimizer.step()"
            )
            raise ConfigError(msg)
