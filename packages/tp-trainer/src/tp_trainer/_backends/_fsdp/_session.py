"""The session of a rank whose parameters are shards: torch's ``fully_shard`` under the trainer's contract."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ModelError, StepError
from tp_core.plugins import Job, ProcessGroupSession, StepOutput

from tp_trainer._backends._fsdp._given import describe_given, sharded_modules
from tp_trainer._backends._fsdp._gradients import local_gradients, total_norm
from tp_trainer._backends._fsdp._optimizers import check_optimizer, move_state
from tp_trainer._backends._fsdp._options import FsdpOptions
from tp_trainer._backends._fsdp._sharding import Sharding

__all__ = ["FsdpSession"]


class FsdpSession(ProcessGroupSession):
    """One rank of a job whose parameters are DTensors.

    Args:
        job: What is to be done.
        options: The backend's options.
        leave: Leaves the process group when the session is closed.
    """

    evaluates_together = True  # units are gathered there, too
    takes_deferred_models = True  # unit by unit

    def __init__(self, job: Job, options: FsdpOptions, *, leave: Callable[[], None]) -> None:
        super().__init__(job, leave=leave)
        self.options = options
        self._sharding = Sharding(job, options)
        # Which shard has taken the place of a parameter, by its identity. Weakly: to hold the parameters
        # would be to hold their memory.
        self._shards: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    # -- preparing ----------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Give all ranks rank 0's weights, and shard them, in place: the module stays the user's own.

        A model that has been through ``fully_shard`` is taken over; what of it has not is sharded.

        Raises:
            ModelError: It is not a module, is wrapped, or is split in another way.
            DisagreementError: The ranks' parameters differ in name, shape or type.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of each parameter and
        buffer, an all-gather of what lies in no unit.
        """
        self._check(model)
        self.check_same_parameters(model)
        plain = dict(model.named_parameters(remove_duplicate=False))
        self._sharding.shard(model)
        for name, shard in model.named_parameters(remove_duplicate=False):
            if shard is not plain[name]:
                self._shards[id(plain[name])] = weakref.ref(plain[name]), shard
        return model

    def _check(self, model: nn.Module) -> None:
        if isinstance(model, nn.Module) and describe_given(model) is not None:
            mesh = self._sharding.take_over(model)
            if mesh.size() != self.world_size:
                msg = (
                    f"the model was sharded by fully_shard over {mesh.size()} ranks, and the job "
                    f"has {self.world_size}; give fully_shard a mesh of all ranks, or give the plain model, "
                    "which backend 'fsdp' shards"
                )
                raise ModelError(msg)
            return
        self.check_plain(model)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give the optimizer the shards in place of the parameters that it was made with.

        Raises:
            ConfigError: It computes with whole matrices, or shards its state itself.
        """
        check_optimizer(optimizer)
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replaced, shard = self._shards.get(id(parameter), (_nothing, parameter))
                if replaced() is not None:  # the same one: its identity is not another's while it lives
                    group["params"][index] = shard
                    move_state(optimizer, parameter, shard)
        return optimizer

    def compile_model(self, model: nn.Module) -> None:
        """Compile unit by unit: what gathers their parameters stays outside of what is compiled."""
        units = [module for module in sharded_modules(model) if module is not model]
        for module in units or [model]:
            module.compile()

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step as the whole model's forward pass.

        What lies in no unit is there for all of the step, so it may call any method of the module.

        Raises:
            StepError: The step computed with a parameter of a unit, outside of the unit's forward pass.
        """
        return self.run_several(step, [model], batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as the forward pass of each of the models.

        Raises:
            StepError: As in :meth:`run`.
        """

        def within(outer: Sequence[nn.Module]) -> StepOutput:
            if not outer:
                return step(*models, batch)
            return self._sharding.run(outer[0], lambda: within(outer[1:]))

        try:
            return within(models)
        except torch.OutOfMemoryError as error:
            error.add_note(self._remedies())
            raise
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            msg = (
                "the step computed with a parameter of a unit of backend 'fsdp' outside of the unit's "
                "forward pass, when this rank had its shard alone; call the module itself (which calls its "
                "forward), or leave it out of the option units: what is in none is there in all of the step"
            )
            raise StepError(msg) from error

    def backward(self, loss: Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Add the gradients of the loss over the whole global batch, to this rank's slices."""
        try:
            super().backward(loss, retain_graph=retain_graph, create_graph=create_graph)
        except torch.OutOfMemoryError as error:
            error.add_note(self._remedies())
            raise

    def _remedies(self) -> str:
        """Return what may help where memory was not enough."""
        options = self.options
        ways = [
            "more ranks" if options.replicas == 1 else "fewer replicas",
            *(["reshard_after_forward=True"] if not options.reshard_after_forward else []),
            *(["activation_checkpointing=True"] if not options.activation_checkpointing else []),
            *(["offload=True"] if not options.offload else []),
            "smaller units, or a smaller batch with accumulate=",
        ]
        return f"On backend 'fsdp' less memory is needed with: {'; '.join(ways)}."

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Add gradients up without reducing them; they are whole ones meanwhile."""
        self._sharding.reduces(model, is_on=False)
        try:
            yield
        finally:
            self._sharding.reduces(model, is_on=True)

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, of which each rank has a part.

        Collectives: one all-reduce of a number.
        """
        return total_norm(model, norm_type, device=self.device)

    @torch.no_grad()
    def clip_grad_norm(self, model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Collectives: those of :meth:`grad_norm`.
        """
        norm = self.grad_norm(model, norm_type=norm_type)
        grads = local_gradients(model)
        if max_norm != float("inf") and grads:
            # On what this rank holds: through DTensors each gradient would cost tens of microseconds.
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        return norm

    @torch.no_grad()
    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        """Bring every element of the gradients between ``-limit`` and ``limit``."""
        grads = local_gradients(model)
        if grads:
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)

    @torch.no_grad()
    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the gradients."""
        grads = local_gradients(model)
        if grads:
            torch._foreach_mul_(grads, factor)


def _nothing() -> None:
    """Return what a reference to something that is no longer there does."""
