"""DistributedDataParallel whose forward may be a whole step with the user's own module."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["SteppingDataParallel"]

R = TypeVar("R")


class SteppingDataParallel(DistributedDataParallel):
    """Averages gradients of a step that calls the module as it likes: its forward, methods, attributes.

    DDP readies itself for a backward pass in its own forward. So that is where the step runs, with the
    module that is wrapped: ``module.encode(x)`` is as good as ``module(x)``.
    """

    _body: Callable[[nn.Module], Any] | None = None

    def run(self, body: Callable[[nn.Module], R]) -> R:
        """Return ``body(module)``, run within this wrapper's forward.

        A compiled wrapper is handed out itself: what was compiled is its call.
        """
        if self._compiled_call_impl is not None:
            return body(self)
        self._body = body
        try:
            output: R = self(None)  # with device_ids, DDP wants an argument to move
            return output
        finally:
            self._body = None

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # Private to torch, and the one place between what DDP does before and after a forward.
        body, self._body = self._body, None
        if body is None:
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        return body(self.module)
