"""The session of the backend ``ddp``, on torch's ``DistributedDataParallel``."""

from contextlib import AbstractContextManager

from torch import nn
from tp_core import move_module
from tp_core.errors import ConfigError
from tp_core.plugins import Job
from tp_core.sessions import ProcessGroupSession, join_process_group

from tp_trainer._options import DdpOptions


class DdpSession(ProcessGroupSession):
    """One rank of a data-parallel job."""

    def __init__(self, job: Job, options: DdpOptions) -> None:
        self.options = options
        device = job.devices[0]
        if options.sync_batchnorm and device.type == "cpu":
            msg = "sync_batchnorm=True needs an accelerator: torch's SyncBatchNorm has no CPU form"
            raise ConfigError(msg)
        leave = join_process_group(
            job.environment,
            device=device,
            backend=options.process_group,
            timeout_s=options.timeout_s,
            bind_device=options.bind_device,
        )
        super().__init__(job, leave=leave)
        self._reductions.listen()  # now: a script that prepares its loader alone has no model to watch

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and wrap it in DDP; every rank starts with rank 0's weights.

        Raises:
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of the weights.
        """
        self.check_plain(model)
        self.check_same_parameters(model)
        model = move_module(model, self.device)
        options = self.options
        if options.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return self.average_gradients(
            model,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            bucket_cap_mb=options.bucket_cap_mb,
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's context in which gradients stay on the ranks."""
        if self.options.static_graph and model is not self.unwrap(model):
            msg = (
                "the option static_graph=True does not go with no_sync(): torch's reducer "
                "fails in it; leave static_graph out to accumulate gradients"
            )
            raise ConfigError(msg)
        return super().no_sync(model)
