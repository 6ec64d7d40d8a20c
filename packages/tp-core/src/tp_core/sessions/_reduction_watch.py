"""A check before each optimizer step that gradients have been averaged over the ranks."""

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tp_core.errors import StepError
from tp_core.output import get_logger
from tp_core.sessions._stepping_data_parallel import SteppingDataParallel
from tp_core.state._optimizers import is_inner_step

log = get_logger("tp_core")

_MOST_SHAPES = _MOST_NAMED = 3  # in a message

_IN_PARTS = (
    "a backward pass came again to a parameter whose gradient is not averaged over the ranks yet: the pass "
    "before left out others of the model, as with losses of several heads, or a reentrant checkpoint uses it "
    "several times; add the losses and go back once, trainer.backward(first + second), or give the backend's "
    "option find_unused_parameters=True; checkpoints take use_reentrant=False"
)


class ReductionWatch:
    """A check before each optimizer step of this process that gradients have been averaged.

    Args:
        check: A function that raises for an optimizer that the session cannot step; called when it first
            steps with its parameters.
        ranks: The number of ranks that average gradients; with one there is nothing to average.
    """

    def __init__(self, check: Callable[[Optimizer], None], *, ranks: int) -> None:
        self._check, self._ranks = check, ranks
        self._models: list[ref[SteppingDataParallel]] = []
        # The ids of parameters with averaged gradients, while their modules live: later objects may have
        # the same ids. Weak references to parameters would keep torch from converting them in place.
        self._parameter_ids: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        self._steps = self._passes = 0
        # Of each prepared optimizer the passes at its last step, by its id for as long as it lives: this is
        # read in every step.
        self._passes_at_step: dict[int, int] = {}
        self._warns_of_passes = True
        # The parameter lists of each optimizer that passed the check, by the optimizer's id.
        self._fine: dict[int, tuple[ref[Optimizer], list[tuple[int, int]]]] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, model: SteppingDataParallel) -> None:
        """Check the gradients of ``model`` before steps, too: `SteppingDataParallel.check_reduced`."""
        self._models = [*(model_ref for model_ref in self._models if model_ref() is not None), ref(model)]
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Record that the gradients of the present parameters of ``model`` are averaged."""
        if isinstance(model, SteppingDataParallel):
            plain = model.module
        else:
            plain = model
        self._parameter_ids.setdefault(plain, set()).update(map(id, model.parameters()))
        self.listen()

    def listen(self) -> None:
        """Check optimizers before they step, from now on; torch's hook is global to the process."""
        _open.add(self)
        if self._handle is not None:
            return
        reference = ref(self)  # torch's hook must not keep the session alive, which may never be closed

        def before_step(optimizer: Optimizer, *_: object) -> None:
            watch = reference()
            if watch is not None:
                watch._before_step(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)
        finalize(self, self._handle.remove)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._passes_at_step:
            self._passes_at_step[id(optimizer)] = 0
            finalize(optimizer, self._passes_at_step.pop, id(optimizer), None)

    def close(self) -> None:
        _open.discard(self)
        if self._handle is not None:
            self._handle.remove()

    def run_backward(self, run: Callable[[], None], loss: Tensor) -> None:
        """Run a backward pass from a loss, and have all gradients that it adds averaged.

        Collective: DDP's all-reduces in ``run``; those of `SteppingDataParallel.begin_backward`.
        """
        # Loops and no generators: this runs in every step.
        models: list[SteppingDataParallel] = []
        for reference in self._models:
            model = reference()
            if model is not None:
                models.append(model)
        for model in models:
            model.begin_backward(loss, is_alone=len(models) == 1)
        try:
            run()
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):  # torch has no class for it
                raise
            raise StepError(_IN_PARTS) from error
        for model in models:
            model.end_backward()
        self._passes += 1

    def _before_step(self, optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        for reference in self._models:
            model = reference()
            if model is not None:
                model.check_reduced()
        self._steps += 1
        if not self._steps & (self._steps - 1):  # 1, 2, 4, 8, ...: callbacks put on hooks, too
            self._warn_of_hooks()
        passes = self._passes_at_step.get(id(optimizer))
        if passes is not None and self._models:
            if passes == self._passes and self._warns_of_passes and self._ranks > 1:
                self._warn_of_other_passes(optimizer)
            self._passes_at_step[id(optimizer)] = self._passes
        lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        optimizer_ref, fine = self._fine.get(id(optimizer), (None, None))
        is_fine = optimizer_ref is not None and optimizer_ref() is optimizer and fine == lists
        if is_fine or is_inner_step(optimizer):  # the parameters may be others there
            return
        self._check(optimizer)
        if self._ranks == 1 or self._check_known(optimizer):
            self._fine[id(optimizer)] = ref(optimizer), lists

    def _warn_of_other_passes(self, optimizer: Optimizer) -> None:
        """Warn, once, of a step whose gradients come from no backward pass of the session."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None and bool(p.grad.norm()) for p in parameters):
            self._warns_of_passes = False
            log.warning(
                "there was no trainer.backward() before this step of %s: on several ranks loss.backward() "
                "gives each rank's share of a batch the same weight, whatever its number of rows, and "
                "torch.autograd.grad() averages nothing, so that ranks drift apart; write "
                "trainer.backward(loss). Gradients that the program itself makes equal on all ranks are "
                "right",
                type(optimizer).__name__,
            )

    def _warn_of_hooks(self) -> None:
        """Warn of hooks that see a rank's own gradients, once for each parameter."""
        for reference in self._models:
            model = reference()
            if model is None or model.process_group.rank():  # all ranks have the same
                continue
            names = model.take_new_hooks()
            if not names:
                continue
            more = ", ..." * (len(names) > _MOST_NAMED)
            log.warning(
                "the hooks on the gradients of %s see this rank's share of a batch, before the mean over the "
                "ranks: what is linear, a mask or a factor, is right; a clamp, a norm or noise is of the "
                "share alone. Change gradients in a callback's on_optimizer_step, which sees the mean, or "
                "take backend 'fsdp', whose hooks see it",
                ", ".join(map(repr, names[:_MOST_NAMED])) + more,
            )

    def _check_known(self, optimizer: Optimizer) -> bool:
        """Check that an optimizer which steps parameters of prepared models steps no others.

        Returns:
            Whether that holds as long as its parameters are the same: others may get gradients later.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in parameters if not any(watch._knows(p) for watch in _open)]
        if not foreign:
            return True
        is_prepared = any(id(optimizer) in watch._passes_at_step for watch in _open)
        if len(foreign) == len(parameters) and not is_prepared:
            if self is not min(_open, key=id):
                return True  # one watch warns for all
            log.warning(
                "on several ranks an optimizer, %s, was not prepared, and steps parameters of no prepared "
                "model: their gradients are this rank's own; trainer.prepare(model, optimizer) if ranks "
                "train them together",
                type(optimizer).__name__,
            )
            return True
        shapes: list[tuple[int, ...]] = [tuple(p.shape) for p in foreign if _has_gradient(p)]
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
        return any(id(parameter) in ids for ids in self._parameter_ids.values())


_open: WeakSet[ReductionWatch] = WeakSet()
"""All active watches: a program may have several sessions, and each knows its own models only."""


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None
