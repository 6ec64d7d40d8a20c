"""The contract of a session: how a running job prepares objects and runs steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._contracts._job import Job
from tp_core._contracts._session._gradients import GradientSession
from tp_core._contracts._session._ranks import RankSession
from tp_core._data._batches import Share
from tp_core._data._loader import PreparedLoader
from tp_core._devices._transfer import move_module, recursive_to
from tp_core._tensors._sharding import check_initialized, check_no_first_fsdp, is_dtensor, is_sharded
from tp_core.errors import ModelError, StepError

__all__ = ["Session", "StepOutput"]

StepOutput = Tensor | Mapping[str, Any]
"""What a step returns: the loss, a scalar tensor, or a dict of values by name with it as "loss"."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class Session(RankSession, GradientSession):
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

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the device and wrap it in what the backend needs.

        Raises:
            ModelError: ``model`` is not a module, or it is wrapped already.
        """
        self.check_plain(model)
        return move_module(model, self.device)

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
        """Note the share of the batch that the loader is about to yield."""
        self.share = share

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run ``step(model, batch)`` on every device of this process and return one output.

        A backend that runs it on several parts of the batch combines their outputs: each part counts as
        much as the "weight" that it returned (`read_weight`), else as many as it has samples; a metric
        may be a pair ``(mean, weight)`` (`split_weight`). Weights of ranks are not its concern.
        """
        return step(model, batch)

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

    def close(self) -> None:
        """Release what the session started; calling it again does nothing."""
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
