"""The steps of a custom training loop: forward, backward, update."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError
from tp_core.internal import is_dtensor
from tp_core.plugins import StepOutput, read_weight

from tp_trainer._checks._objects import check_optimizer
from tp_trainer._memory._running_out import tell_why
from tp_trainer._steps._optimizer_step import GradientRules, OptimizerStep, add_whole, total_weight
from tp_trainer._steps._step import autocast, in_precision, loss_of, tell_of_no_gradients
from tp_trainer._trainer._base import TrainerBase

__all__ = ["OwnSteps"]


class OwnSteps(TrainerBase):
    """Runs steps, their backward passes and optimizer steps, one at a time."""

    def run(self, step: Callable[..., StepOutput], *models_and_batch: Any) -> StepOutput:
        """Run ``step(model, batch)``, or ``step(first, second, ..., batch)``, in a custom loop.

        Under the trainer's precision, and on every device of this process at once, each with its part of
        the batch, where the backend has several.

        Args:
            step: Returns the loss, or a dict with "loss", and "weight" if it is not a mean over samples. It
                gets the models with their own methods and attributes.
            *models_and_batch: The prepared models, and the batch as a prepared loader yielded it, or a tuple
                of batches of several loaders where the backend does not run the step on parts.

        Returns:
            What the step returned, for the whole of this rank's batch, to be given to :meth:`backward`.

        Raises:
            ConfigError: There is no model, or no batch after the models.
        """
        *models, batch = models_and_batch or (None,)
        if not models or isinstance(batch, nn.Module):
            msg = "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)"
            raise ConfigError(msg)
        try:
            if len(models) == 1:
                if self._run is None:
                    self._run = self._run_step()
                output = self._run(step, self._prepare_model(models[0]), batch)
            else:
                run = in_precision(self.session.run_several, self._precision, self.device)
                output = run(step, list(map(self._prepare_model, models)), batch)
        except (RuntimeError, MemoryError) as error:
            self._tell_why(error)
            raise
        if self._shares is not None and torch.is_grad_enabled():
            self._shares.note_loss(output, batch)
        return output

    def backward(
        self,
        loss: StepOutput,
        *,
        weight: float | Tensor | None = None,
        total: float | None = None,
        batch: Any = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of ``loss`` over the global batch to the parameters.

        A loss is a mean over the samples of its batch, or over as many units as its weight says. How many
        samples each rank has of the batch is known if the loss is what :meth:`run` returned, and else that
        of the prepared loader which is being iterated. With "fp16-mixed" the loss is scaled, and
        :meth:`update` makes the step.

        Args:
            loss: This rank's loss, or what a step returned: a dict with "loss", and maybe "weight".
            weight: Over how many units the loss is a mean on this rank. One of 0 counts as nothing, and
                the loss may then be NaN.
            total: How many units there are on all ranks, and in all batches of the optimizer step, where
                that is known already.
            batch: Which batch the loss is of, where several loaders are iterated at once.
            retain_graph: Whether another loss goes back through the same graph after this one.
            create_graph: Whether the gradients are to be differentiated in turn.

        Raises:
            ConfigError: No model was prepared.
            StepError: The loss or its weight is none; or it can be of several batches that lie differently
                on the ranks.

        Collectives: those of `Session.backward`; before them an all-reduce of one number, if there is a
        weight and no total.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            weight = loss.get("weight") if weight is None and isinstance(loss, Mapping) else weight
            loss = loss_of(loss, training=True)
        session, shares = self._lazy.current, self._shares
        if session is None:
            msg = "backward() comes after the preparation: trainer.prepare(model, optimizer, loader)"
            raise ConfigError(msg)
        if shares is not None:
            share = shares.of_loss(loss) if batch is None else shares.of_batch(batch)
            if share is not session.share:
                session.take_share(share)
        scale = 1.0 if self._scaler is None else self._scaler.scale
        graph = {"retain_graph": True, "create_graph": create_graph} if retain_graph or create_graph else {}
        try:
            if weight is None:
                scaled = loss if scale == 1.0 else loss * scale
                if graph:
                    session.backward(scaled, **graph)
                else:
                    session.backward(scaled)
            else:
                share = session.share
                units = read_weight(weight) if share is None or share.samples else 0.0
                total = total_weight(session, units) if total is None else read_weight(total, name="total")
                add_whole(session, loss, units, total=total, scale=scale, **graph)
        except (RuntimeError, MemoryError) as error:
            self._tell_why(error)
            raise
        if not self._has_gone_back:
            self._has_gone_back = True
            parameters = [p for model in self._prepared for p in model.parameters()]
            if not any(map(is_dtensor, parameters)):  # they get gradients when those are reduced
                tell_of_no_gradients(parameters, whose="any prepared model")
        if self._step_events is not None:
            self._step_events.backward_end()

    def _tell_why(self, error: BaseException) -> None:
        tell_why(error, lambda: self.selection)

    def global_loss(
        self, loss: StepOutput, *, weight: float | Tensor | None = None, batch: Any = None
    ) -> Tensor:
        """Return the loss of the global batch, the same on every rank, without gradients.

        What the closure of an optimizer returns: LBFGS decides by it how many passes it makes, which has to
        be the same on all ranks.

        Args:
            loss: As for :meth:`backward`.
            weight: As for :meth:`backward`.
            batch: As for :meth:`backward`.

        Raises:
            StepError: As in :meth:`backward`.

        Collectives: one all-reduce of two numbers over the data ranks, if there are several.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            weight = loss.get("weight") if weight is None and isinstance(loss, Mapping) else weight
            loss = loss_of(loss, training=False)
        session, shares = self.session, self._shares
        session.check_in_step("global_loss()")
        share = None if shares is None else shares.of_loss(loss) if batch is None else shares.of_batch(batch)
        loss = loss.detach().reshape(())
        if session.data_size == 1:
            return loss
        samples = 1 if share is None else share.samples
        units = samples if weight is None or not samples else read_weight(weight)
        is_sum = session.job.loss == "sum"
        mine = loss.double() * (1 if is_sum else units) if units else loss.new_zeros((), dtype=torch.float64)
        sums = session.reduce(torch.stack([mine, torch.full_like(mine, units)]), "sum")
        return (sums[0] if is_sum else sums[0] / sums[1]).to(loss.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a custom loop computes the loss, by the trainer's precision."""
        context = autocast(self._precision, self.device)
        return nullcontext() if context is None else context()

    def update(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> bool:
        """Make an optimizer step in a custom loop: unscale, clip, check, step.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
            clip_norm: The largest global norm of the gradients, or ``None``.
            clip_value: The largest magnitude of an element of them, or ``None``.

        Returns:
            Whether the step was made; with "fp16-mixed" one whose gradients overflowed is left out,
            on all ranks.

        Raises:
            ConfigError: A limit is not above 0.
            NonFiniteLossError: The gradients are NaN or infinite.

        Collectives: those of the session's ``clip_grad_norm``, if gradients are clipped or looked at.
        """
        check_optimizer("update()", optimizer)
        prepared = self._prepare_model(model)
        rules = GradientRules(clip_norm=clip_norm, clip_value=clip_value)
        update = OptimizerStep(self.session, prepared, optimizer, rules, scaler=self._scaler)
        events = self._step_events
        if events is not None and events.has_step_event:
            update.tell(events.optimizer_step)
            events.is_sent = True
        self._may_step = True
        try:
            return update.finish()
        except (RuntimeError, MemoryError) as error:  # the optimizer's state is made in its first step
            self._tell_why(error)
            raise
        finally:
            self._may_step = False
            if events is not None:
                events.is_sent = False

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients are added up without being reduced over ranks.

        For all but the last batch of an optimizer step; nothing is exchanged by :meth:`backward` meanwhile.

        Args:
            model: The prepared model.

        Raises:
            ConfigError: The backend was told that the graph is static, and cannot do it then.
        """
        prepared = self._prepare_model(model)
        return self.session.no_sync(prepared)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most ``max_norm``; return the norm before.

        With "fp16-mixed" the gradients are still scaled here: clip by :meth:`update` there.

        Args:
            model: The prepared model.
            max_norm: The largest L2 norm of all gradients together; with ``inf`` nothing is scaled.

        Returns:
            The norm before scaling, a scalar tensor that is equal on all ranks.

        Collectives: those of `Session.clip_grad_norm`.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, section 3.2.
        """
        prepared = self._prepare_model(model)
        return self.session.clip_grad_norm(prepared, max_norm)
