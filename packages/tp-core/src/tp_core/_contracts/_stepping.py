"""DistributedDataParallel whose forward may be a whole step with the user's own module."""

import re
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tp_core.errors import StepError

__all__ = ["ReductionWatch", "SteppingDataParallel"]

R = TypeVar("R")

_MOST_NAMES = 3  # in a message


class SteppingDataParallel(DistributedDataParallel):
    """Averages gradients of a step that calls the module as it likes: its forward, methods, attributes.

    DDP readies itself for a backward pass in its own forward. So that is where the step runs, with the
    module that is wrapped: ``module.encode(x)`` is as good as ``module(x)``.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]

    def __getattr__(self, name: str) -> Any:
        """Return a value of the module's own, such as ``config``: scripts read them with one process, too.

        Raises:
            AttributeError: There is none of the name, or it can be called: what is called past this wrapper
                would not have its gradients averaged.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                raise
        value = getattr(module, name)
        if callable(value):
            msg = (
                f"{name!r} of the model is not called from outside of a step where there are several ranks, "
                "since its gradients would not be averaged; call it in a step for trainer.run(), or, for "
                f"what needs no gradients, trainer.session.unwrap(model).{name}"
            )
            raise AttributeError(msg)
        return value

    def run(self, body: Callable[..., R], *arguments: Any) -> R:
        """Return ``body(module, *arguments)``, run within this wrapper's forward.

        A compiled wrapper is handed out itself: what was compiled is its call.
        """
        if self._compiled_call_impl is not None:
            return body(self, *arguments)
        # Private to torch, and the one place between what DDP does before and after a forward. It is put into
        # the object for this forward alone, past Module's own way of setting attributes, which is slow: a
        # method of this class would be on the way of the wrapper's plain calls, too.
        own = self.__dict__

        def run_body(*_: Any, **__: Any) -> R:
            del own["_run_ddp_forward"]  # the body may call the wrapper
            return body(self.module, *arguments)

        own["_run_ddp_forward"] = run_body
        try:
            output: R = self(None)  # with device_ids, DDP wants an argument to move
            return output
        finally:
            own.pop("_run_ddp_forward", None)

    def check_reduced(self) -> None:
        """Make sure that the last backward pass, if there was one, has averaged every gradient.

        DDP averages a bucket of gradients once all of them are there. One that never comes leaves those of
        its bucket as they are on each rank, which torch tells only in the next forward: after an optimizer
        step, or never, if that was the last one. What was frozen when it was made it never looks at again.

        Raises:
            StepError: A parameter took no part in the loss, or is trained only since the model was prepared.
        """
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            msg = (
                f"{_listed(thawed)} of the model were frozen when it was prepared for several ranks, and are "
                "trained now: their gradients are not averaged; prepare the model with all that is trained "
                "at any time, and keep the rest back as tp_trainer.callbacks.GradualUnfreezing does"
            )
            raise StepError(msg)
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise StepError(self._unused(str(error))) from error

    def _unused(self, message: str) -> str:
        """Return what to say of parameters without gradients, which torch's message counts."""
        trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
        found = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        rank, unused = "this rank", "some"
        if found is not None:
            rank = f"rank {found[1]}"
            unused = _listed([trained[int(i)] for i in found[2].split()])
        return (
            f"the loss on {rank} came without {unused} of the model's {len(trained)} parameters, and the "
            "ranks wait for the gradients of all of them; use each in every step, freeze what is never "
            "trained, or give the backend's option find_unused_parameters=True"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more


class ReductionWatch:
    """Makes sure, before any optimizer of this process steps, that gradients have been averaged."""

    def __init__(self) -> None:
        self._models: WeakSet[SteppingDataParallel] = WeakSet()
        self._handle: RemovableHandle | None = None

    def watch(self, model: SteppingDataParallel) -> None:
        """Look at the gradients of ``model``, too: `SteppingDataParallel.check_reduced`."""
        self._models.add(model)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Look at none any more."""
        if self._handle is not None:
            self._handle.remove()

    def _before_step(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for model in self._models:
                model.check_reduced()
