"""Whether ranks step with gradients that have been averaged: asked before anything parts them."""

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tp_core._contracts._stepping import SteppingDataParallel
from tp_core.errors import StepError

__all__ = ["ReductionWatch"]

log = logging.getLogger("tp_core")

_MOST_SHAPES = 3  # in a message

_TWICE = (
    "a second backward pass came to a parameter within one step of several ranks, which average each "
    "gradient once; add the losses and go back once, trainer.backward(first + second), or run the step for "
    "each of them"
)


class ReductionWatch:
    """Makes sure, before any optimizer of this process steps, that gradients have been averaged.

    Args:
        check: Raises where the session does not let an optimizer step; called when it steps for the first
            time with its parameters.
        ranks: How many average gradients with each other; one has none to average.
    """

    def __init__(self, check: Callable[[Optimizer], None], *, ranks: int) -> None:
        self._check, self._ranks = check, ranks
        self._models: list[ref[SteppingDataParallel]] = []
        # The identities of the parameters whose gradients are averaged, as long as their modules live: others
        # may have them later. Weak references to parameters would keep them from being converted.
        self._known: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        self._prepared: WeakSet[Optimizer] = WeakSet()
        # What an optimizer stepped when it was last looked at, by its identity.
        self._fine: dict[int, tuple[ref[Optimizer], list[tuple[int, int]]]] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, model: SteppingDataParallel) -> None:
        """Look at the gradients of ``model``, too: `SteppingDataParallel.check_reduced`."""
        self._models = [*(known for known in self._models if known() is not None), ref(model)]
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Note that gradients of the parameters that ``model`` has now are averaged."""
        plain = model.module if isinstance(model, SteppingDataParallel) else model
        self._known.setdefault(plain, set()).update(map(id, model.parameters()))
        self.listen()

    def listen(self) -> None:
        """Look at optimizers before they step, from now on."""
        _open.add(self)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note that all that ``optimizer`` steps has to be averaged."""
        self._prepared.add(optimizer)

    def close(self) -> None:
        """Look at none any more."""
        _open.discard(self)
        if self._handle is not None:
            self._handle.remove()

    def go_back(self, run: Callable[[], None]) -> None:
        """Run a backward pass, which has to average all gradients that it adds.

        Raises:
            StepError: It came to a parameter whose gradient has been averaged since the forward pass.
        """
        # Loops, and no generators: this is on the way of every step.
        done: list[tuple[SteppingDataParallel, list[tuple[int, int]]]] = []
        for reference in self._models:
            model = reference()
            before = None if model is None else model.seen_gradients()
            if model is not None and before is not None:
                done.append((model, before))
        try:
            run()
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):  # torch has no class for it
                raise
            raise StepError(_TWICE) from error
        for model, before in done:
            # Where all of them have been averaged torch says nothing, and each rank adds its own.
            if model.seen_gradients() != before:
                raise StepError(_TWICE)
        for reference in self._models:
            model = reference()
            if model is not None:
                model.note_backward()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        for reference in self._models:
            model = reference()
            if model is not None:
                model.check_reduced()
        lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        known, fine = self._fine.get(id(optimizer), (None, None))
        is_fine = known is not None and known() is optimizer and fine == lists
        if is_fine:
            return
        self._check(optimizer)
        if self._ranks == 1 or self._check_known(optimizer):
            self._fine[id(optimizer)] = ref(optimizer), lists

    def _check_known(self, optimizer: Optimizer) -> bool:
        """Make sure that an optimizer steps parameters of prepared models alone, if it steps any.

        Returns:
            Whether that holds as long as its parameters are the same: others may get gradients later.

        Raises:
            StepError: A parameter with a gradient is of none, and would part the ranks.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p for p in parameters if not any(watch._knows(p) for watch in _open)]
        if not others:
            return True
        if len(others) == len(parameters) and not any(optimizer in watch._prepared for watch in _open):
            if self is not min(_open, key=id):
                return True  # another one tells
            log.warning(
                "on several ranks an optimizer, %s, was not prepared, and steps parameters of no prepared "
                "model: their gradients are this rank's own; trainer.prepare(model, optimizer) if ranks "
                "train them together",
                type(optimizer).__name__,
            )
            return True
        shapes: list[tuple[int, ...]] = [tuple(p.shape) for p in others if _has_gradient(p)]
        if shapes:
            listed = ", ".join(map(str, shapes[:_MOST_SHAPES])) + ", ..." * (len(shapes) > _MOST_SHAPES)
            msg = (
                f"the optimizer has {len(shapes)} parameter(s) that no prepared model has (shape {listed}), "
                "so on several ranks their gradients are not averaged; make what they belong to a submodule "
                "of the model before trainer.prepare(model, ...)"
            )
            raise StepError(msg)
        return False

    def _knows(self, parameter: Tensor) -> bool:
        return any(id(parameter) in known for known in self._known.values())


_open: WeakSet[ReductionWatch] = WeakSet()
"""All that listen: a program may have several sessions, which know nothing of each other's models."""


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None
