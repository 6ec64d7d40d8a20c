"""The session of a rank that holds shards of its models."""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._contracts._batch import Share, StepOutput
from tp_core._contracts._job import CompileOptions
from tp_core.errors import ConfigError, StepError
from tp_core.fully_sharded._exchange import SHARDS_ALONE, refuse_direct
from tp_core.fully_sharded._optimizers import (
    WholeSteps,
    check_optimizer,
    explain_shard_errors,
    explain_step_errors,
    gathers_matrices,
    local_gradients,
    move_state,
)
from tp_core.fully_sharded._sharding import Sharding, sharded_modules
from tp_core.modules._compiler import is_torchs_own
from tp_core.modules._parameters import check_not_quantized, is_dtensor
from tp_core.modules._user_state import hooked_parameters
from tp_core.sessions._process_group_session import ProcessGroupSession
from tp_core.state import whole

_OTHER_TYPES = re.compile(r"same dtype|expected scalar type|should be the same|expected .* dtype", re.I)
"""torch's words for an operation on tensors of several types."""


class FullyShardedSession(ProcessGroupSession):
    """One rank of a job with parameters that are DTensors over the ranks that read different samples.

    A backend's own class sets ``sharding`` in its constructor, calls :meth:`shard_model` for each model
    that it prepares, and implements the norm of the whole gradient.

    Attributes:
        sharding: The object that shards models and runs steps on them.
    """

    evaluates_together = True  # evaluation gathers units, too: a rank without a batch would block the others
    sharding: Sharding

    # -- preparing ----------------------------------------------------------------------------

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shard a model, in place: the module stays the user's own.

        Collective: a broadcast of each parameter and buffer, an all-gather of parameters in no unit.
        """
        check_not_quantized(model, "fully_shard")
        # A hook of one rank alone would wait for the others in its collectives.
        self.check_agreement("parameters with gradient hooks", hooked_parameters(model))
        self.sharding.shard(model)
        self._reductions.know(model)
        if self._gradient_size > 1:
            for parameter in model.parameters():
                if is_dtensor(parameter) and parameter.requires_grad:
                    parameter.register_hook(refuse_direct)
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Replace the optimizer's parameters by their shards."""
        optimizer = super().prepare_optimizer(optimizer)
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                shard = self.sharding.shard_of(parameter)
                if shard is not None:
                    group["params"][index] = shard
                    move_state(optimizer, parameter, shard)
        if gathers_matrices(optimizer):
            WholeSteps(optimizer, whole=self.whole_of, cut=self.as_slice)
        check_optimizer(optimizer)  # after the replacement: it looks at shards
        explain_step_errors(optimizer)
        return optimizer

    def whole_of(self, parameter: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002 - for shards of shards
        """Return the whole of a value that is cut as its parameter is.

        Collective: an all-gather of a DTensor.
        """
        return whole(value)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer steps shards, and not the parameters that they replaced."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(self.sharding.shard_of(p) is not None for p in parameters):
            msg = (
                f"the {type(optimizer).__name__} was made before the model was prepared, and would train "
                "nothing: preparing put shards in the place of the parameters that it has; give it to "
                "trainer.prepare(model, optimizer) too, or make it from model.parameters() after that"
            )
            raise ConfigError(msg)
        check_optimizer(optimizer)

    def compile_model(self, model: nn.Module) -> None:
        """Compile each unit by itself, so that the all-gathers stay outside of the compiled code."""
        options = self.job.compile or CompileOptions()
        units = [module for module in sharded_modules(model) if module is not model]
        if options.blocks or not units:
            super().compile_model(model)
            return
        for module in units:
            self._compile(module, options)

    def _compile(self, module: nn.Module, options: CompileOptions) -> None:
        """Compile a module in place, without the hooks that gather its parameters."""
        if is_torchs_own(module):
            module.forward = torch.compile(module.forward, **options.arguments())
        else:  # torch compiles the forward pass apart, as hooks interrupt what it began
            super()._compile(module, options)

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step as the whole model's forward pass.

        Parameters in no unit are gathered during the whole step, so it may call any method of the module.

        Collective: in forward an all-gather for each unit. In backward an all-gather again where units were
        resharded, and a reduce-scatter of gradients, with replicas an all-reduce, too.
        """
        return self.run_several(step, [model], batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as the forward pass of each of the models.

        Collective: those of :meth:`run`, for each model.
        """
        # From the innermost model outwards. A function that calls itself would be in a cycle with the batch,
        # and batches would pile up in the device's memory until the garbage collector runs.
        call: Callable[[], StepOutput] = functools.partial(step, *models, batch)
        for model in reversed(models):
            call = functools.partial(self.sharding.run, model, call)
        try:
            return call()
        except torch.OutOfMemoryError as error:
            error.add_note(self.sharding.remedy)
            raise
        except RuntimeError as error:
            # By torch's words: it has no class for these errors.
            if "Expected out tensor to have dtype" in str(error):  # of an all-gather
                dtypes = {str(p.dtype) for model in models for p in model.parameters()}
                msg = (
                    "the model was converted to another type after it was prepared: its shards are "
                    f"{' and '.join(sorted(dtypes))}, and are gathered in the type that they had then; "
                    "convert it before, model.to(dtype), or give the trainer a precision"
                )
                raise StepError(msg) from error
            _check_shards_alone(error)
            lower = self.sharding.gathered_type
            if lower is not None and _OTHER_TYPES.search(str(error)):
                msg = (
                    "a part of the step computes in another type than its parameters are gathered in, "
                    f"{lower}: with autocast(enabled=False) or x.float(), say ({error}). The option "
                    "param_dtype=torch.float32 of the backend gathers them in float32, as other backends "
                    "have them, for twice the communication"
                )
                raise StepError(msg) from error
            if "not have been used in the graph" in str(error):
                msg = (
                    "the step asked torch.autograd.grad for gradients of fully sharded parameters, which are "
                    "in no graph: units compute with copies that are gathered; take the backend 'ddp'"
                )
                raise StepError(msg) from error
            raise

    def backward(self, loss: Tensor, share: Share | None = None, **graph: bool) -> None:
        """Add the gradients of the loss over the whole global batch to this rank's shards.

        Collective: those of the backward pass in :meth:`run`; inside :meth:`no_sync` all-gathers only.
        """
        try:
            self.sharding.run_backward(
                lambda: super(FullyShardedSession, self).backward(loss, share, **graph)
            )
        except torch.OutOfMemoryError as error:
            error.add_note(self.sharding.remedy)
            raise
        except RuntimeError as error:
            _check_shards_alone(error)
            raise

    def explain_error(self, error: Exception, models: Iterable[nn.Module]) -> None:
        """Raise an error that names the remedy for torch's own one of code that computes with shards."""
        explain_shard_errors(error, models)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without reducing them; each rank holds whole ones until then."""
        self.sharding.reduces(model, is_on=False)
        try:
            yield
        finally:
            self.sharding.reduces(model, is_on=True)

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Collective: those of ``grad_norm``.
        """
        norm = self.grad_norm(model, norm_type=norm_type)
        grads = local_gradients(model)
        if max_norm != float("inf") and grads:
            # On local tensors, through torch's private _foreach functions, one kernel for all: through
            # DTensors each gradient would cost tens of microseconds.
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        return norm

    @torch.no_grad()
    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        grads = local_gradients(model)
        if grads:
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)

    @torch.no_grad()
    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        grads = local_gradients(model)
        if grads:
            torch._foreach_mul_(grads, factor)

    # -- state --------------------------------------------------------------------------------

    def find_nonfinite(self, model: nn.Module) -> str | None:
        self.sharding.check_assignments(self.unwrap(model))
        return super().find_nonfinite(model)

    def close(self) -> None:
        """Leave the process group, if this session has joined it.

        Raises:
            StepError: The data of a parameter was replaced since the last step: `AssignmentWatch`.
        """
        was_open = not self.closed
        super().close()
        if was_open and sys.exc_info()[0] is None:  # it would hide the error that ends the run
            self.sharding.check_all_assignments()


def _check_shards_alone(error: RuntimeError) -> None:
    if "mixed torch.Tensor and DTensor" in str(error):
        raise StepError(SHARDS_ALONE) from error
