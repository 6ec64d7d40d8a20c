"""Random numbers of an optimizer's steps, the same on all ranks."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from tp_core.errors import ConfigError
from tp_core.modules._parameters import is_sharded
from tp_core.random import device_rng_state, preserve_torch_rng_state, seed_of, seed_torch
from tp_core.state._optimizers import hook_steps

_sharing: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def share_draws(
    optimizer: Optimizer, seed: int, device: torch.device, gather: Callable[[list[bytes]], list[list[bytes]]]
) -> None:
    """Have an optimizer draw the same random numbers on all ranks in its steps, from now on."""
    if optimizer not in _sharing:
        _sharing.add(optimizer)
        _CommonDraws(optimizer, seed, device, gather)


class _CommonDraws:
    """Draws the random numbers of an optimizer's steps, the same on all ranks.

    Ranks draw other dropouts, and so have generators in other states. What they hold in common would drift
    apart by what an optimizer draws, in its first step or in a later one: noise after a burn-in, a projection
    that is renewed at times. So every step begins at a state of its own, and the rank's comes back after it.

    Collective: where some of its parameters are split, and not all, one all-gather after the first step, the
    second, the fourth and so on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        seed: int,
        device: torch.device,
        gather: Callable[[list[bytes]], list[list[bytes]]],
    ) -> None:
        self._seed, self._device, self._gather = seed, device, gather
        self._restoring: ExitStack | None = None  # within a step: restores the rank's own state
        self._steps = 0
        hook_steps(optimizer, before=self._before, after=self._after)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Not with a closure: it draws the dropout of a forward pass.
        if any(callable(value) for value in (*args, *kwargs.values())):
            return
        if self._restoring is not None:  # the last step raised an error
            self._restoring.close()
        self._restoring = ExitStack()
        self._restoring.enter_context(preserve_torch_rng_state([self._device]))
        # By the step of the state, if it has one: a resumed run then draws what one without a break does.
        known = (s["step"] for s in optimizer.state.values() if isinstance(s, dict) and "step" in s)
        seed_torch(seed_of((self._seed, int(next(known, self._steps)))), [self._device])

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._restoring is None:
            return
        self._steps += 1
        places = dict.fromkeys([torch.device("cpu"), self._device])
        states = [device_rng_state(place) for place in places]
        self._restoring.close()
        self._restoring = None
        # Ranks with larger parts of split parameters may draw more numbers. An exchange in each step would be
        # dear.
        if self._steps & (self._steps - 1):
            return
        kinds = {is_sharded(p) for group in optimizer.param_groups for p in group["params"]}
        if len(kinds) == 2:
            everyones = self._gather([bytes(state.numpy()) for state in states])
            if any(theirs != everyones[0] for theirs in everyones):
                msg = (
                    f"{type(optimizer).__name__} draws random numbers, and here another number of them on "
                    "each rank, which has larger or smaller parts of split parameters: those that all ranks "
                    "hold would drift apart. Split parameters into equal parts, or take an optimizer that "
                    "draws none"
                )
                raise ConfigError(msg)
