"""The calls that a module makes while it works, such as ``self.log`` and ``self.manual_backward``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core import tree_map

from tp_lightning._optimizers import parameters_of
from tp_lightning._run import ModuleRun


class ModuleCalls:
    """Answers the calls of a module, in the place of Lightning's own.

    Args:
        run: The module at work.
    """

    def __init__(self, run: ModuleRun) -> None:
        self._run = run

    @contextmanager
    def answered(self, model: Any, **others: Any) -> Iterator[None]:
        """Answer the calls of a module within the block; ``others`` by the functions that are given."""
        answers: dict[str, Any] = {
            "log": self.log,
            "log_dict": self.log_dict,
            "optimizers": self.optimizers,
            "lr_schedulers": self.lr_schedulers,
            "manual_backward": self.manual_backward,
            "clip_gradients": self.clip_gradients,
            "all_gather": self.all_gather,
            **others,
        }
        vars(model).update(answers)  # before the class's own, as its private parts are Lightning's
        try:
            yield
        finally:
            for name in answers:
                vars(model).pop(name, None)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,  # noqa: ARG002 - progress shows the loss
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,  # noqa: ARG002 - numbers have no graph
        sync_dist: bool = False,  # noqa: ARG002 - means are always those of all ranks
        sync_dist_group: Any = None,  # noqa: ARG002
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,  # noqa: ARG002
        rank_zero_only: bool = False,  # noqa: ARG002
    ) -> None:
        """Take a value that the module logs."""
        shown = self._run.results.add(
            name,
            value,
            on_step=on_step,
            on_epoch=on_epoch,
            reduction=getattr(reduce_fx, "__name__", reduce_fx),
            indexed=add_dataloader_idx,
            weight=batch_size,
        )
        if self._run.loop is not None and self._run.training and logger is not False and shown is not None:
            self._run.loop.log(**{name: shown})

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Take several of them."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:  # noqa: ARG002 - both are torch's
        """Return the optimizer, or a list of them."""
        optimizers = self._run.optimizers
        if len(optimizers) == 1:
            return optimizers[0]
        return optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of them, or nothing."""
        schedulers = [schedule.scheduler for schedule in self._run.schedules]
        if len(schedulers) == 1:
            return schedulers[0]
        return schedulers or None

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Add the gradients of a loss, averaged over ranks."""
        run = self._run
        run.hook("on_before_backward", loss)
        # The module runs past DDP, and any loss may leave out parameters of others. So gradients stay on the
        # ranks here, and are averaged below. What was averaged before is the same on all ranks, and stays.
        with run.own.no_sync(run.model):
            run.own.backward(loss, *args, **options)
        if run.session.data_size > 1:
            for parameter in (p for optimizer in run.optimizers for p in parameters_of(optimizer)):
                if parameter.grad is not None:
                    parameter.grad.copy_(run.session.reduce(parameter.grad, "mean"))
        run.hook("on_after_backward")

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters."""
        if gradient_clip_val is None:
            limit = self._run.gradients.clip
        else:
            limit = gradient_clip_val
        algorithm = gradient_clip_algorithm or self._run.gradients.algorithm
        if not limit:
            return
        parameters = parameters_of(optimizer)
        if str(getattr(algorithm, "value", algorithm)) == "value":
            nn.utils.clip_grad_value_(parameters, limit)
        elif self._run.prepared is not None and len(self._run.optimizers) == 1:
            self._run.session.clip_grad_norm(self._run.prepared, limit)
        else:
            nn.utils.clip_grad_norm_(parameters, limit)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:  # noqa: ARG002 - all ranks
        """Return tensors of all ranks in a new first dimension, (ranks, ...)."""
        if self._run.session.world_size == 1:
            return data

        def gathered(value: Any) -> Tensor:
            tensor = torch.as_tensor(value, device=self._run.own.device)[None]
            if sync_grads:
                return self._run.own.all_gather(tensor)
            return self._run.session.gather(tensor)

        return tree_map(gathered, data)
