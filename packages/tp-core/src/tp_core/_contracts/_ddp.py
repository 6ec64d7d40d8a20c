"""A DistributedDataParallel with a whole step as its forward, and checks that gradients are averaged."""

import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tp_core.errors import StepError
from tp_core.state._optimizers import is_inner_step

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

        Raises:
            StepError: A parameter took no part in the loss of the last backward pass.

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

        Raises:
            AttributeError: There is none of the name, or it is callable: the gradients of a call past this
                wrapper would not be averaged.
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


log = logging.getLogger("tp_core")

_MOST_SHAPES = 3  # in a message

_TWICE = (
    "a second backward pass came to a parameter within one step of several ranks, which average each "
    "gradient once; add the losses and go back once, trainer.backward(first + second), or run the step for "
    "each of them"
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
        self._known: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        self._prepared: WeakSet[Optimizer] = WeakSet()
        # The parameter lists of each optimizer that passed the check, by the optimizer's id.
        self._fine: dict[int, tuple[ref[Optimizer], list[tuple[int, int]]]] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, model: SteppingDataParallel) -> None:
        """Check the gradients of ``model`` before steps, too: `SteppingDataParallel.check_reduced`."""
        self._models = [*(known for known in self._models if known() is not None), ref(model)]
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Record that the gradients of the present parameters of ``model`` are averaged."""
        plain = model.module if isinstance(model, SteppingDataParallel) else model
        self._known.setdefault(plain, set()).update(map(id, model.parameters()))
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
        """Record that ``optimizer`` must step averaged gradients only."""
        self._prepared.add(optimizer)

    def close(self) -> None:
        """Stop the checks."""
        _open.discard(self)
        if self._handle is not None:
            self._handle.remove()

    def go_back(self, run: Callable[[], None]) -> None:
        """Run a backward pass, and check that it averages all gradients that it adds.

        Raises:
            StepError: It reached a parameter with a gradient that was averaged since the forward pass.

        Collective: DDP's all-reduces in ``run``; none of its own.
        """
        # Loops and no generators: this runs in every step.
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
            # torch reports nothing where all buckets were averaged, and each rank adds its own gradients.
            if model.seen_gradients() != before:
                raise StepError(_TWICE)
        for reference in self._models:
            model = reference()
            if model is not None:
                model.note_backward()

    def _before_step(self, optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        for reference in self._models:
            model = reference()
            if model is not None:
                model.check_reduced()
        lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        known, fine = self._fine.get(id(optimizer), (None, None))
        is_fine = known is not None and known() is optimizer and fine == lists
        if is_fine or is_inner_step(optimizer):  # the parameters may be others there
            return
        self._check(optimizer)
        if self._ranks == 1 or self._check_known(optimizer):
            self._fine[id(optimizer)] = ref(optimizer), lists

    def _check_known(self, optimizer: Optimizer) -> bool:
        """Check that an optimizer which steps parameters of prepared models steps no others.

        Returns:
            Whether that holds as long as its parameters are the same: others may get gradients later.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p for p in parameters if not any(watch._knows(p) for watch in _open)]
        if not others:
            return True
        if len(others) == len(parameters) and not any(optimizer in watch._prepared for watch in _open):
            if self is not min(_open, key=id):
                return True  # one watch warns for all
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
"""All active watches: a program may have several sessions, and each knows its own models only."""


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None
