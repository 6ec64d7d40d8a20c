"""A DistributedDataParallel with a whole step as its forward, which checks that gradients are averaged."""

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tp_core.errors import ModelError, StepError

R = TypeVar("R")

_MOST_NAMES = 3  # in a message
_NOT_REDUCED = "Expected to have finished reduction in the prior iteration"  # of torch's reducer.cpp


class SteppingDataParallel(DistributedDataParallel):
    """A DistributedDataParallel for steps that call any method of the module, and not only its forward.

    DDP prepares for a backward pass in its own forward. So the step runs there, with the inner module:
    ``module.encode(x)`` works as well as ``module(x)``.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.training = module.training  # torch's wrapper starts in training mode, whatever the module's is
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self._trained = [(n, p, p.dtype) for n, p in module.named_parameters() if p.requires_grad]
        # Whether the next backward pass averages: one does for each forward pass; `None` before any.
        # A list, since nn.Module sets attributes slowly, and this is set in each step.
        self._is_ready: list[bool | None] = [None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, or the step, and prepare to average the gradients of one backward pass.

        Collective: DDP's broadcast of buffers in forward, its bucketed all-reduces in backward.
        """
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as error:
            if not str(error).startswith(_NOT_REDUCED):
                raise
            # With several passes in one step, check_reduced at the step's end comes too late.
            raise StepError(self._unused(str(error))) from error
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_ready[0] = True
        return output

    def seen_gradients(self) -> list[tuple[int, int]] | None:
        """Return gradients' ids and versions if a backward pass now would average nothing, else ``None``."""
        if self._is_ready[0] is not False or not self.require_backward_grad_sync:
            return None
        return [(id(g), g._version) for _, p, _ in self._trained if (g := p.grad) is not None]

    def note_backward(self) -> None:
        """Record the end of a backward pass: if it averaged, the next one averages nothing."""
        if not self._is_ready[0]:
            return
        # Private to torch: no public call shows whether every bucket was reduced. This one raises if not.
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:  # its gradients are still to come
            return
        self._is_ready[0] = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that is no method, for example ``config``.

        The same script then works with one process, where the model has no wrapper.
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

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse a part of the model by its number or name, as :meth:`__getattr__` one by its attribute."""
        msg = (
            f"the model's part [{key!r}] is not called from outside of a step where there are several ranks, "
            "since its gradients would not be averaged; call it in a step for trainer.run(), or, for what "
            f"needs no gradients, such as an optimizer's parameters, trainer.session.unwrap(model)[{key!r}]"
        )
        raise ModelError(msg)

    def run(self, body: Callable[..., R], *arguments: Any) -> R:
        """Return ``body(module, *arguments)``, run within this wrapper's forward.

        A compiled wrapper passes itself instead of the module: what was compiled is its call.

        Collective: those of :meth:`forward`.
        """
        if self._compiled_call_impl is not None:
            return body(self, *arguments)
        # Private to torch: the only call between DDP's work before and after a forward. It is set on the
        # object for this forward only, past nn.Module's slow __setattr__: a method of this class would run
        # in the wrapper's plain calls, too.
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
        """Check that the last backward pass, if there was one, has averaged every gradient.

        DDP averages a bucket once all its gradients are there. If one never comes, the others of its bucket
        stay different on each rank. torch reports that only in the next forward: after an optimizer step,
        or never after the last step. Parameters that were frozen when DDP was made it ignores for good.
        """
        for name, parameter, dtype in self._trained:
            if parameter.dtype is not dtype:
                msg = (
                    f"{name!r} of the model was {dtype} when it was prepared for several ranks, and is "
                    f"{parameter.dtype} now: its gradients are not averaged; convert the model before that"
                )
                raise StepError(msg)
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
        """Return the message for parameters without gradients, from their numbers in torch's message."""
        found = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        rank, unused = "this rank", "some"
        if found is not None:
            rank = f"rank {found[1]}"
            # The numbers are of those that were trained when torch made its buckets.
            missing = [self._trained[int(number)] for number in found[2].split()]
            frozen = [name for name, parameter, _ in missing if not parameter.requires_grad]
            if frozen:
                return (
                    f"{_listed(frozen)} of the model were trained when it was prepared for several ranks, "
                    "and are frozen now: the ranks wait for their gradients; freeze them before the "
                    "preparation, set the learning rate of their group to 0, or give the backend's option "
                    "find_unused_parameters=True"
                )
            unused = _listed([name for name, _, _ in missing])
        return (
            f"the loss on {rank} came without {unused} of the model's {len(self._trained)} parameters, and "
            "the ranks wait for the gradients of all of them; use each in every step, freeze what is never "
            "trained, or give the backend's option find_unused_parameters=True"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more
