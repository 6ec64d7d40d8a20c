"""DistributedDataParallel whose forward may be a whole step with the user's own module."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.nn.parallel import DistributedDataParallel

__all__ = ["SteppingDataParallel"]

R = TypeVar("R")


class SteppingDataParallel(DistributedDataParallel):
    """Averages gradients of a step that calls the module as it likes: its forward, methods, attributes.

    DDP readies itself for a backward pass in its own forward. So that is where the step runs, with the
    module that is wrapped: ``module.encode(x)`` is as good as ``module(x)``.
    """

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
