"""A DistributedDataParallel with a whole step as its forward, which checks that gradients are averaged."""

import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tp_core.errors import ModelError, StepError
from tp_core.modules._user_state import has_users_hooks

R = TypeVar("R")

_MOST_NAMES = 3  # in a message
_STATIC = (
    "a backward pass came to a parameter with no forward pass of the model since the last one, and with the "
    "option static_graph=True the ranks average the first alone; leave static_graph out"
)
_NOT_REDUCED = "Expected to have finished reduction in the prior iteration"  # of torch's reducer.cpp


class SteppingDataParallel(DistributedDataParallel):
    """A DistributedDataParallel for steps that call any method of the module, and not only its forward.

    DDP prepares for a backward pass in its own forward. So the step runs there, with the inner module:
    ``module.encode(x)`` works as well as ``module(x)``.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.training = module.training  # torch's wrapper starts in training mode, whatever the module's is
        self._own_modules = len(self._modules)
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self._trained = [(n, p, p.dtype) for n, p in module.named_parameters() if p.requires_grad]
        self._hooked: set[str] = set()
        # The forward passes since the last backward pass, and the gradients before one that a static graph
        # does not average. Lists, since nn.Module sets attributes slowly, and these are set in each step.
        self._forwards = [0]
        self._before_static: list[list[tuple[int, int]] | None] = [None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, or the step, and prepare to average the gradients of one backward pass.

        Collective: DDP's broadcast of buffers in forward, its bucketed all-reduces in backward. The broadcast
        is in the first forward pass before a backward pass alone: it writes buffers in place, which the graph
        of an earlier one may need.
        """
        if self._forwards[0]:
            self.require_forward_param_sync = False
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as error:
            if not str(error).startswith(_NOT_REDUCED):
                raise
            # With several passes in one step, check_reduced at the step's end comes too late.
            raise StepError(self._unused(str(error))) from error
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self._forwards[0] += 1
        return output

    def begin_backward(self, loss: Tensor, *, is_alone: bool) -> None:
        """Prepare to average the gradients of a backward pass, whichever forward passes it goes through.

        A forward pass does so for one. This is for the others: of several losses, through graphs that other
        backward passes have been between, or through the module itself.

        Args:
            loss: Where the pass begins.
            is_alone: Whether the process has no other model that averages gradients.

        Collective: once, after the first backward pass, a broadcast of the order of its gradients.
        """
        if (is_alone and self._forwards[0] == 1) or not self.require_backward_grad_sync:
            return
        if self.static_graph:
            if self._forwards[0] == 0:
                self._before_static[0] = self._gradients()
            return
        try:
            # Private to torch, and what its forward does. It raises while some gradients of the last pass are
            # to come still: this pass may bring them.
            if self.reducer._rebuild_buckets():
                self._has_rebuilt_buckets = True
        except RuntimeError:
            return
        searched = [loss] if self.find_unused_parameters else []
        self.reducer.prepare_for_backward(searched)

    def end_backward(self) -> None:
        """Record the end of a backward pass.

        Raises:
            StepError: The pass has added gradients that a static graph does not average.
        """
        self._forwards[0] = 0
        before = self._before_static[0]
        if before is None:
            return
        self._before_static[0] = None
        if self._gradients() != before:
            raise StepError(_STATIC)

    def _gradients(self) -> list[tuple[int, int]]:
        """Return the gradients' ids and versions, which show whether any has changed."""
        return [(id(g), g._version) for _, p, _ in self._trained if (g := p.grad) is not None]

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

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        """Refuse a new part of the model: its gradients would not be averaged."""
        raise ModelError(_replaced(f"[{key!r}]", value))

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

    def take_new_hooks(self) -> list[str]:
        """Return the parameters whose gradients hooks of the user's see, but those of an earlier call."""
        new = []
        for name, parameter, _ in self._trained:
            if name not in self._hooked and has_users_hooks(parameter):
                new.append(name)
        self._hooked.update(new)
        return new

    def check_reduced(self) -> None:
        """Check that the last backward pass, if there was one, has averaged every gradient.

        DDP averages a bucket once all its gradients are there. If one never comes, the others of its bucket
        stay different on each rank. torch reports that only in the next forward: after an optimizer step,
        or never after the last step. Parameters that were frozen when DDP was made it ignores for good.
        """
        if len(self._modules) != self._own_modules:
            name, value = list(self._modules.items())[-1]
            raise ModelError(_replaced(f".{name}", value))
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
        match = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        rank, unused = "this rank", "some"
        if match is not None:
            rank = f"rank {match[1]}"
            # The numbers are of those that were trained when torch made its buckets.
            missing = [self._trained[int(number)] for number in match[2].split()]
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


def _replaced(part: str, value: object) -> str:
    return (
        f"the part {part} of the model was set to a {type(value).__name__} after it was prepared for several "
        f"ranks, which use the part of before; set it first: model{part} = ..., and then "
        "trainer.prepare(model, optimizer, loader)"
    )


def _listed(names: list[str]) -> str:
    if len(names) > _MOST_NAMES:
        more = f" and {len(names) - _MOST_NAMES} more"
    else:
        more = ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more
