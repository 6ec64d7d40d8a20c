"""The contract of a session: how a running job prepares objects and runs steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._contracts._job import Job
from tp_core._data._batches import Share
from tp_core._data._loader import PreparedLoader
from tp_core._devices._transfer import move_module, recursive_to
from tp_core._tensors._slices import (
    TensorSlice,
    check_initialized,
    check_no_first_fsdp,
    is_dtensor,
    is_sharded,
)
from tp_core.errors import DisagreementError, ModelError, StepError

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "min", "max"]
"""How the tensors of several ranks become one, element by element."""

StepOutput = Tensor | Mapping[str, Any]
"""What a step returns: the loss, a scalar tensor, or a dict of values by name with it as "loss"."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class Session:
    """A job that runs. Every method has a correct default for one device in one process.

    A backend overrides only what differs. A session is a context manager; leaving it closes it.

    *Rank and world size* count processes. *Data rank and data size* tell which share of the data
    is this process's: the ranks of one tensor-parallel group read the same samples.

    Args:
        job: What is to be done.
        device: Where this process computes; the job's first device by default.

    Attributes:
        job: What is to be done.
        device: Where this process computes.
        share: How many samples of the current global batch this process has, as the prepared
            loader reported last; ``None`` before the first batch and where it is not known.
        runs_step_in_parts: Whether :meth:`run` calls the step on several parts of the batch, which do
            not see each other.
        evaluates_together: Whether ranks exchange something in a step without gradients, such as parts of
            parameters. Then all data ranks have to evaluate as many batches: loaders that are prepared for
            evaluation give a rank that has none a stand-in, whose share has no samples.
        takes_deferred_models: Whether :meth:`prepare_model` takes a model that was built without memory
            (`tp_core.plugins.build_deferred`), and gives its parameters and buffers theirs, or a rank's part.
    """

    runs_step_in_parts: bool = False
    evaluates_together: bool = False
    takes_deferred_models: bool = False

    def __init__(self, job: Job, *, device: torch.device | None = None) -> None:
        self.job = job
        self.device = job.devices[0] if device is None else device
        self.share: Share | None = None
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the session started; calling it again does nothing."""
        self.closed = True

    # -- which rank this is -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return 1

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host, from 0."""
        return 0

    @property
    def data_rank(self) -> int:
        """Which share of the data is this process's, from 0."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Into how many shares the data is split."""
        return self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""
        return self.rank == 0

    # -- preparing ----------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the device and wrap it in what the backend needs.

        Raises:
            ModelError: ``model`` is not a module, or it is wrapped already.
        """
        self.check_plain(model)
        return move_module(model, self.device)

    @staticmethod
    def check_plain(model: object, *, may_be_split: bool = False) -> None:
        """Make sure that ``model`` is a module that is not wrapped, with whole parameters.

        Args:
            model: What is to be prepared.
            may_be_split: Whether parameters may be marked as shards; DTensors never pass.

        Raises:
            ModelError: ``model`` is not a module, is wrapped, or has a parameter that is a shard or lazy.
        """
        if not isinstance(model, nn.Module):
            msg = f"the model must be a torch.nn.Module, got {type(model).__name__}: {model!r}"
            raise ModelError(msg)
        if isinstance(model, _WRAPPERS):
            msg = (
                f"the model is already wrapped in {type(model).__name__}; give the plain module "
                "(model.module): the selected backend wraps it"
            )
            raise ModelError(msg)
        check_no_first_fsdp(model)
        check_initialized(model)
        for name, parameter in model.named_parameters():
            if is_dtensor(parameter):
                msg = (
                    f"the model's {name!r} is a DTensor (of fully_shard or distribute_tensor), which this "
                    "backend cannot train: give the plain model to a backend that shards it, or train it "
                    "in a loop without the trainer"
                )
                raise ModelError(msg)
            if is_sharded(parameter) and not may_be_split:
                msg = (
                    f"the model's {name!r} is one rank's shard of a larger parameter, which this backend "
                    "would take for the whole; the backend 'shard' trains it: pip install tp-shard"
                )
                raise ModelError(msg)

    def compile_model(self, model: nn.Module) -> None:
        """Compile a prepared model in place, where the backend gains most from it.

        In place, because names in the state and the identity of the module then stay.
        """
        model.compile()

    def refresh(self, model: nn.Module) -> None:
        """Copy a prepared model again, where the backend keeps copies of it.

        For changes that cannot be noticed: writes through ``parameter.data`` without an optimizer's step.
        Without copies there is nothing to do.
        """

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer over the prepared model's parameters."""
        return optimizer

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Make sure that an optimizer, prepared or not, can step what it has; by default any can.

        Raises:
            ConfigError: It has parameters that the backend has replaced, or is of a kind that it cannot use.
        """

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> PreparedLoader:
        """Return a loader of this process's share of every batch, on its device.

        The batch size of ``loader`` is that of the whole job: each data rank gets its share of
        every batch, so that the same script takes the same steps on any number of devices.

        Args:
            loader: A ``DataLoader``; where the data is not split, any iterable of batches.
            training: Whether every rank must take the steps of one device, with a stand-in sample
                where it has none. In evaluation each sample is met once: a last batch with fewer
                samples than ranks is joined to the one before it; see ``evaluates_together``.
            shard: Whether to split the batches over the data ranks. With ``False`` the loader
                already gives each rank its own samples.

        Raises:
            LoaderError: The loader cannot be split over the data ranks.
        """
        return PreparedLoader(
            loader,
            seed=self.job.seed,
            rank=self.data_rank,
            size=self.data_size,
            training=training,
            shard=shard,
            move=self.move_batch if self.device.type != "cpu" else None,
            on_share=self.take_share,
            agree=self.check_agreement if self.data_size > 1 else None,
            any_rank=self._any_rank
            if self.evaluates_together and not training and self.data_size > 1
            else None,
        )

    def _any_rank(self, mine: bool) -> bool:
        """Return whether something holds on any data rank.

        Collectives: one all-reduce of a number.
        """
        return bool(self.reduce(torch.tensor(float(mine), device=self.device), "max"))

    def move_batch(self, batch: Any) -> Any:
        """Move a batch to where the step will run."""
        return recursive_to(batch, self.device, non_blocking=True)

    def take_share(self, share: Share | None) -> None:
        """Take the share of the batch whose loss :meth:`backward` gets next; it is then :attr:`share`.

        A prepared loader calls it before it yields a batch (``on_share=``), and a loop whose batches do not
        come in the order of their losses calls it before each :meth:`backward`. A backend that weighs losses
        by samples computes the weight here, and not once for each loss.
        """
        self.share = share

    # -- the step -----------------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run ``step(model, batch)`` on every device of this process and return one output.

        A backend that runs it on several parts of the batch combines their outputs: each part counts as
        much as the "weight" that it returned (`read_weight`), else as many as it has samples; a metric
        may be a pair ``(mean, weight)`` (`split_weight`). Weights of ranks are not its concern.
        """
        return step(model, batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as :meth:`run` does with one model.

        Raises:
            StepError: The backend runs the step on parts of the batch, and knows how for one model alone.
        """
        if len(models) == 1:
            return self.run(step, models[0], batch)
        if self.runs_step_in_parts:
            msg = (
                f"{type(self).__name__} runs the step on each device's part of the batch, of one model; put "
                "the models into one (torch.nn.ModuleDict), or take another backend"
            )
            raise StepError(msg)
        return step(*models, batch)

    def gather_parts(self, rows: Tensor) -> Tensor:  # noqa: ARG002 - for those that can
        """Return the rows of all parts of the batch, with gradients, in a step that runs on each of them.

        For backends whose ``runs_step_in_parts``: those that cannot bring the parts together leave it.

        Args:
            rows: Of the part at hand, (samples, ...).

        Returns:
            The rows of all parts in the order of the batch, on the device of ``rows``.

        Raises:
            StepError: No such step is under way, or the backend does not bring its parts together.
        """
        msg = (
            f"{type(self).__name__} runs the step on each device's part of the batch, and here the parts do "
            "not see each other's rows; call all_gather() in a step that fit() or trainer.run() runs, or "
            "take Trainer(backend='dp-gather'), whose steps see the whole batch"
        )
        raise StepError(msg)

    def check_in_step(self, what: str, *, may_meet: bool = False) -> None:
        """Make sure that the caller sees the whole batch, and not what one device has of it.

        Args:
            what: What is called, for the message.
            may_meet: Whether a step that runs on parts may call it, as they meet in `gather_parts`.

        Raises:
            StepError: The backend runs the model's forward, or the step, on parts, and one is under way, in
                whatever thread.
        """

    # -- gradients ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Add the gradients of ``loss``, over all data ranks, to the parameters.

        The gradient is that of the loss over the whole global batch, however unevenly its samples
        lie on the ranks: the loss counts as much as the samples of :attr:`share`, which :meth:`take_share`
        was given last.

        Args:
            loss: This rank's loss: a scalar tensor.
            retain_graph: Whether a further backward pass through the same graph follows.
            create_graph: Whether gradients are to be differentiated in turn.

        Collectives: the backend's gradient reduction, unless inside :meth:`no_sync`.
        """
        loss.backward(retain_graph=retain_graph or create_graph, create_graph=create_graph)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        """Return a context in which gradients are added up locally and not reduced over ranks."""
        return nullcontext()

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the global norm of the gradients: a scalar tensor, equal on all ranks.

        Every element of the whole model's gradient counts once, whichever ranks hold it.

        Args:
            model: The prepared model.
            norm_type: Which norm; ``inf`` for the largest absolute value.

        Collectives: none where each rank has all of the gradient; else a backend says which.
        """
        grads = [g for p in model.parameters() if (g := p.grad) is not None and g.numel()]
        if not all(type(g) is Tensor and g.is_cpu for g in grads) or not grads:
            return nn.utils.get_total_norm(grads, norm_type)
        # What that one comes to on the CPU, at a third of its cost in a small model.
        vector_norm = torch.linalg.vector_norm
        with torch.no_grad():
            norm: Tensor = vector_norm(torch.stack([vector_norm(g, norm_type) for g in grads]), norm_type)
        return norm

    def clip_grad_norm(self, model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Args:
            model: The prepared model.
            max_norm: The largest norm; with ``inf`` nothing is scaled.
            norm_type: As in :meth:`grad_norm`, which a backend overrides where gradients are split.

        Returns:
            The norm before scaling, a scalar tensor that is equal on all ranks.

        Collectives: those of :meth:`grad_norm`.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, section 3.2.
        """
        norm = self.grad_norm(model, norm_type=norm_type)
        if max_norm != math.inf:
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        """Bring every element of the gradients between ``-limit`` and ``limit``."""
        nn.utils.clip_grad_value_(model.parameters(), limit)

    @torch.no_grad()
    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the gradients: to take back the scale of a loss, or to weigh several batches."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @torch.no_grad()
    def find_nonfinite(self, model: nn.Module) -> str | None:
        """Return a parameter that is trained and holds NaN or infinity on this rank, or ``None``.

        Its name is that in the user's own module. It is a question to one rank: no collectives.
        """
        named = self.unwrap(model).named_parameters()
        trained = [(n, _local_part(p)) for n, p in named if p.requires_grad]
        held = [(n, p) for n, p in trained if p.numel()]
        if not held or torch.isfinite(nn.utils.get_total_norm([p for _, p in held], math.inf)):
            return None
        from tp_core.state import plain_name

        return next(plain_name(n) for n, p in held if not torch.isfinite(p).all())

    # -- between ranks ------------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:  # noqa: ARG002 - contract
        """Return ``value`` reduced over the data ranks, on all of them; the argument is kept.

        Args:
            value: A tensor, of one shape and type on all data ranks.
            op: How its elements are reduced: "sum", "mean", "min" or "max".

        Collectives: one all-reduce over the data ranks.
        """
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Return the data ranks' tensors concatenated along dim 0; their lengths may differ.

        Args:
            value: This rank's rows, (rows, ...); all but the first dimension is equal on all data ranks.

        Returns:
            The rows of all data ranks in their order, (rows of all, ...), on each of them.

        Collectives: all-gathers over the data ranks.
        """
        return value

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's object, in the order of the ranks.

        Collectives: one all-gather of pickled objects over all ranks.
        """
        return [value]

    def broadcast(self, value: T, *, src: int = 0) -> T:  # noqa: ARG002 - contract
        """Return the object of rank ``src``, on all ranks.

        Collectives: one broadcast of a pickled object over all ranks.
        """
        return value

    def barrier(self) -> None:
        """Wait until every rank is here.

        Collectives: one barrier over all ranks.
        """

    def check_agreement(
        self, what: str, value: object, *, remedy: str = "start every rank with the same script and arguments"
    ) -> None:
        """Make sure that all ranks have the same ``value``.

        Args:
            what: The words for it in the message.
            value: Something small that pickles and compares.
            remedy: What to do where ranks disagree.

        Raises:
            DisagreementError: On every rank, if they differ.

        Collectives: those of :meth:`gather_objects`.
        """
        questions, values = zip(*self.gather_objects((what, value)), strict=True)
        other = _first_other(questions)
        if other is not None:
            msg = (
                f"ranks are at different places: rank 0 compares {questions[0]}, rank {other} compares "
                f"{questions[other]}. Every rank must make the same calls in the same order"
            )
            raise DisagreementError(msg)
        other = _first_other(values)
        if other is not None:
            msg = (
                f"ranks disagree on {what}: rank 0 has {values[0]!r}, rank {other} has "
                f"{values[other]!r}; {remedy}"
            )
            raise DisagreementError(msg)

    # -- state, with the names of the user's own module ---------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        return model

    def sync_buffers(self, model: nn.Module) -> None:
        """Give all data ranks the same buffers, before an evaluation or a save."""

    def as_slice(self, parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:  # noqa: ARG002 - contract
        """Return which part of a whole tensor ``value`` is, for a checkpoint.

        Args:
            parameter: A parameter or buffer of the model.
            value: A tensor of its shape: its own values, or a part of the optimizer's state. Where the
                parameter is a DTensor, what this rank holds of such a tensor.

        Returns:
            ``value`` itself where each rank has the whole, or a slice around it.
        """
        return value

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, on every rank.

        Collectives: where parameters are DTensors, those that put them together.
        """
        from tp_core.state import plain_state, whole

        return {n: whole(v) for n, v in plain_state(self.unwrap(model).state_dict()).items()}

    def state_parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, not put together yet.

        A tensor has its whole shape. Where it is a DTensor, or has a ``full_tensor()`` of its own as a tensor
        on the meta device may, every rank gives it to `tp_core.state.whole`, which puts it together. So a
        state is written of which no device could hold all.

        Collectives: those of :meth:`model_state`, where a backend has its own and not this one.
        """
        from tp_core.state import plain_state

        if type(self).model_state is not Session.model_state:
            return self.model_state(model)
        return plain_state(self.unwrap(model).state_dict())

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state that :meth:`model_state` of any backend returned.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        from tp_core.state import load_whole_state

        load_whole_state(self.unwrap(model), state)


def _first_other(values: Sequence[object]) -> int | None:
    """Return the first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor; another tensor as it is."""
    # Not by its class, whose import costs most of a second.
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
