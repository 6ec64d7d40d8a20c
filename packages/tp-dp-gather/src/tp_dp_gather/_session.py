"""The session of the backend ``dp-gather``."""

from torch import nn
from tp_core import Job, Session

from tp_dp_gather._backend import GatherOptions
from tp_dp_gather._data_parallel import DataParallel

__all__ = ["GatherSession"]


class GatherSession(Session):
    """Runs the step once per batch, with a model that splits its input and gathers its output.

    Args:
        job: What is to be done.
        options: The backend's options.
    """

    def __init__(self, job: Job, options: GatherOptions) -> None:
        super().__init__(job)
        self._options = options

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the first device and wrap it in `DataParallel`.

        Raises:
            ModelError: It is no module, or it is wrapped already.
        """
        options = self._options
        return DataParallel(
            super().prepare_model(model),
            list(self.job.devices),
            dim=options.dim,
            except_keywords=options.except_keywords,
        )

    def compile_model(self, model: nn.Module) -> None:
        """Compile the user's module and its replicas; scattering and gathering stay outside."""
        if isinstance(model, DataParallel):
            model.replicas.compile()
        else:
            super().compile_model(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        inner: nn.Module = model.module if isinstance(model, DataParallel) else model
        return inner
