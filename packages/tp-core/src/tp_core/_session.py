"""The contract of a session: how a running job steps, reduces and keeps its state."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._batches import Share
from tp_core._job import Job
from tp_core._loader import PreparedLoader
from tp_core._tensor_slices import TensorSlice
from tp_core._transfer import recursive_to
from tp_core.errors import DisagreementError, ModelError

__all__ = ["ReduceOp", "Session", "StepOutput"]

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "min", "max"]
StepOutput = Tensor | Mapping[str, Any]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class Session:
    """A job that runs. Every method has a correct default for one device in one process.

    A backend overrides only what differs. A session is a context manager; leaving it closes it.

    *Rank and world size* count processes. *Data rank and data size* say which share of the data
    is this process's: the ranks of one tensor-parallel group read the same samples.

    Args:
        job: What is to be done.
        device: Where this process computes; the job's first device by default.

    Attributes:
        job: What is to be done.
        device: Where this process computes.
        share: How many samples of the current global batch this process has, as the prepared
            loader told last; ``None`` before the first batch and where it is not known.
    """

    def __init__(self, job: Job, *, device: torch.device | None = None) -> None:
        self.job = job
        self.device = job.devices[0] if device is None else device
        self.share: Share | None = None
        self.closed = False

    # -- who am I -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return 0

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return 1

    @property
    def local_rank(self) -> int:
        """This process among those of its host, from 0."""
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

    # -- preparing ----------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the device and wrap it in what the backend needs.

        Raises:
            ModelError: It is no module, or it is wrapped already.
        """
        self.check_plain(model)
        return model.to(self.device)

    def compile_model(self, model: nn.Module) -> None:
        """Compile a prepared model in place, where the backend gains most from it.

        In place, because names in the state and the identity of the module then stay.
        """
        model.compile()

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer over the prepared model's parameters."""
        return optimizer

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> PreparedLoader:
        """Return a loader of this process's share of every batch, on its device.

        The batch size of ``loader`` is that of the whole job: each data rank gets its share of
        every batch, so that the same script takes the same steps on any number of devices.

        Args:
            loader: A ``DataLoader``; where the data is not split, any iterable of batches.
            training: Whether every rank must take the same number of steps. In evaluation a rank
                that has no sample of a batch skips it.
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
        )

    def move_batch(self, batch: Any) -> Any:
        """Move a batch to where the step will run."""
        return recursive_to(batch, self.device, non_blocking=True)

    def take_share(self, share: Share | None) -> None:
        """Note the share of the batch that the loader is about to yield."""
        self.share = share

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run ``step(model, batch)`` on every device of this process and return one output."""
        return step(model, batch)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, over all data ranks, to the parameters.

        The gradient is that of the loss over the whole global batch, however unevenly its samples
        lie on the ranks.

        Collectives: the backend's gradient reduction, unless inside :meth:`no_sync`.
        """
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        """Return a context in which gradients are added up locally and not reduced over ranks."""
        return nullcontext()

    def clip_grad_norm(self, model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Returns:
            The norm before scaling: a scalar tensor, equal on all ranks.
        """
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    # -- between ranks ------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:  # noqa: ARG002 - contract
        """Return ``value`` reduced over the data ranks, on all of them; the argument is kept.

        Collectives: one all-reduce over the data ranks.
        """
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Return the data ranks' tensors concatenated along dim 0; their lengths may differ.

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

    def check_agreement(self, what: str, value: object) -> None:
        """Make sure that all ranks have the same ``value``.

        Args:
            what: The words for it in the message.
            value: Something small that pickles and compares.

        Raises:
            DisagreementError: On every rank, if they differ.

        Collectives: those of :meth:`gather_objects`.
        """
        values = self.gather_objects(value)
        other = next((r for r, v in enumerate(values) if v != values[0]), None)
        if other is not None:
            msg = (
                f"ranks disagree on {what}: rank 0 has {values[0]!r}, rank {other} has "
                f"{values[other]!r}; start every rank with the same script and arguments"
            )
            raise DisagreementError(msg)

    # -- state --------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        return model

    def sync_buffers(self, model: nn.Module) -> None:
        """Give all data ranks the same buffers, before an evaluation or a save."""

    def as_slice(self, parameter: Tensor, value: Tensor) -> Tensor | TensorSlice:  # noqa: ARG002 - contract
        """Say which part of a whole ``value`` is, for a checkpoint.

        Args:
            parameter: A parameter or buffer of the model.
            value: A tensor of its shape: its own values, or a part of the optimizer's state.

        Returns:
            ``value`` itself where each rank has the whole, or a slice around it.
        """
        return value

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, on every rank."""
        return dict(self.unwrap(model).state_dict())

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state that :meth:`model_state` returned, whichever backend's it was.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        self.unwrap(model).load_state_dict(state)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Release what the session started; calling it again does nothing."""
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def check_plain(model: object) -> None:
        """Make sure that ``model`` is a module which nobody has wrapped.

        Raises:
            ModelError: It is something else.
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
