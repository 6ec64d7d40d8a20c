"""The contract of a session: how a running job prepares objects and runs steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tp_core._contracts._batch import Share, StepOutput
from tp_core._contracts._job import CompileOptions, Job
from tp_core._transfer import move_module, to_device
from tp_core.errors import ConfigError, DisagreementError, ModelError, StepError
from tp_core.modules._blocks import repeated_blocks
from tp_core.modules._compiler import compile_in_place
from tp_core.modules._parameters import (
    TensorSlice,
    check_initialized,
    check_no_first_fsdp,
    is_dtensor,
    is_sharded,
    plain_name,
    plain_state,
    whole,
    with_own_names,
)

if TYPE_CHECKING:
    from tp_core.data import LoadedBatches, PreparedLoader

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "min", "max"]
"""The element-wise reduction of several ranks' tensors."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def check_reduce(value: object, op: str) -> None:
    if not isinstance(value, Tensor):
        msg = f"reduce() takes a tensor, got {type(value).__name__}: {value!r}; write torch.tensor(value)"
        raise ConfigError(msg)
    if op not in get_args(ReduceOp):
        msg = f"reduce() takes 'sum', 'mean', 'min' or 'max', got {op!r}"
        raise ConfigError(msg)


class Session:
    """A running job. Every method has a correct default for one device in one process.

    A backend overrides only what differs. A session is a context manager; leaving it closes it.

    *Rank and world size* count processes. *Data rank and data size* number the shares of the data:
    the ranks of one tensor-parallel group read the same samples.

    Args:
        job: The job.
        device: The device of this process; the job's first device by default.

    Attributes:
        job: The job. The trainer takes its model away once the session is open: other models may follow.
        device: The device of this process.
        runs_step_in_parts: Whether :meth:`run` calls the step on several parts of the batch, which do
            not see each other.
        evaluates_together: Whether ranks exchange something in a step without gradients, for example
            parts of parameters. Then all data ranks must evaluate the same number of batches: loaders that
            are prepared for evaluation give a rank without one a stand-in, with a share of 0 samples.
        takes_deferred_models: Whether :meth:`prepare_model` takes a model that was built without memory
            (`tp_core.tensors.build_deferred`), and allocates its parameters and buffers, or a rank's part.
        cuts_models: Whether the first :meth:`run` with a model leaves a part of it on each rank. A wrapper
            that needs the whole model has it only before.
        loaded: Records of the loaders' last batches, for a session that cuts them by their rows; ``None`` for
            none. With them loaders count the samples that each batch is collated from.
    """

    runs_step_in_parts: bool = False
    evaluates_together: bool = False
    takes_deferred_models: bool = False
    cuts_models: bool = False
    loaded: "LoadedBatches | None" = None

    def __init__(self, job: Job, *, device: torch.device | None = None) -> None:
        self.job = job
        self.device = job.devices[0] if device is None else device
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what the session started; calling it again does nothing."""
        self.closed = True

    # -- ranks --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""
        return 0

    @property
    def world_size(self) -> int:
        """The number of processes that run the job."""
        return 1

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host, from 0."""
        return 0

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the data, from 0."""
        return self.rank

    @property
    def data_size(self) -> int:
        """The number of shares that the data is split into."""
        return self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and prints to the terminal."""
        return self.rank == 0

    # -- preparing ----------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the device and wrap it as the backend needs.

        Raises:
            ModelError: ``model`` is not a module, or it is wrapped already.
        """
        self.check_plain(model)
        return move_module(model, self.device)

    @staticmethod
    def check_plain(model: object, *, may_be_split: bool = False) -> None:
        """Check that ``model`` is a module without a wrapper, with whole parameters.

        Args:
            model: The model to prepare.
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
        """Compile a prepared model in place, as the job's options say.

        In place, so that names in the state and the identity of the module stay.

        Raises:
            ModelError: Its repeated blocks are to be compiled, and it has none.
            ConfigError: They are, and the backend compiles whole models alone.
        """
        options = self.job.compile or CompileOptions()
        plain = self.unwrap(model)
        modules: Iterable[nn.Module] = [plain]
        if options.blocks:
            modules = repeated_blocks(plain).values()
        for module in modules:
            self._compile(module, options)

    def _compile(self, module: nn.Module, options: CompileOptions) -> None:
        compile_in_place(module, **options.arguments())

    def refresh(self, model: nn.Module) -> None:
        """Update a backend's copies of a prepared model; without copies, do nothing.

        For changes that a backend cannot notice. Copies by `tp_core.replicas` notice all.
        """

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer over the prepared model's parameters."""
        return optimizer

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer, prepared or not, can step its parameters; by default any can.

        Raises:
            ConfigError: It has parameters that the backend has replaced, or is of a kind that it cannot use.
        """

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> "PreparedLoader":
        """Return a loader of this process's share of every batch, on its device.

        The batch size of ``loader`` is the whole job's: each data rank gets its share of every batch.
        So the same script takes the same steps on any number of devices.

        Args:
            loader: A ``DataLoader``; where the data is not split, any iterable of batches.
            training: Whether every rank must take the steps of one device, with a stand-in sample
                where it has none. In evaluation each sample occurs once: a last batch with fewer
                samples than ranks is joined to the one before it; see ``evaluates_together``.
            shard: Whether to split the batches over the data ranks. With ``False`` the loader
                already gives each rank its own samples.

        Raises:
            LoaderError: The loader cannot be split over the data ranks.

        Collective: with several data ranks, those of :meth:`check_agreement` and :meth:`gather_objects`.
        """
        # The loader's floor is above this one. An import here keeps the contract light, and a session that
        # overrides nothing can feed a model.
        from tp_core.data import CountingCollate, PreparedLoader, iterates_itself

        # A loader class with its own __iter__ may look into its batches, which must not be envelopes then.
        is_counted = (
            self.loaded is not None
            and isinstance(loader, DataLoader)
            and loader.batch_sampler is not None
            and not iterates_itself(loader)
        )
        collate, move = None, None
        if is_counted:
            collate = CountingCollate
        if is_counted or self.device.type != "cpu":
            move = self.move_batch
        shares_data = self.data_size > 1
        together = shares_data and self.evaluates_together and not training
        agree = self.check_agreement if shares_data else None
        any_rank = self._any_rank if together else None
        gather = self._gather_from_data_ranks if shares_data else None
        return PreparedLoader(
            loader,
            seed=self.job.seed,
            rank=self.data_rank,
            size=self.data_size,
            training=training,
            shard=shard,
            move=move,
            agree=agree,
            any_rank=any_rank,
            gather=gather,
            collate=collate,
        )

    def _gather_from_data_ranks(self, value: T) -> list[T]:
        """Return the object of each data rank.

        Collective: that of :meth:`gather_objects`.
        """
        everyones = dict(self.gather_objects((self.data_rank, value), where="what each data rank has"))
        return [everyones[rank] for rank in range(self.data_size)]

    def _any_rank(self, holds: bool) -> bool:
        """Return whether something holds on any data rank.

        Collective: one all-reduce of a number.
        """
        return bool(self.reduce(torch.tensor(float(holds), device=self.device), "max"))

    def move_batch(self, batch: Any) -> Any:
        """Move a batch to the device of the step."""
        from tp_core.data import Envelope  # as in `prepare_loader`

        if self.loaded is None or not isinstance(batch, Envelope):
            return to_device(batch, self.device)
        moved = to_device(batch.batch, self.device)
        self.loaded.add(moved, batch.samples)
        return moved

    # -- the step -----------------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run ``step(model, batch)`` on every device of this process and return one output.

        A backend that runs the step on several parts of the batch combines their outputs. Each part counts
        by the "weight" that it returned (`read_weight`), else by its number of samples. A metric may be a
        pair ``(mean, weight)`` (`split_weight`). This method does not weigh ranks.
        """
        return step(model, batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` as :meth:`run` does with one model.

        Raises:
            StepError: The backend runs the step on parts of the batch, and supports that for one model.
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

        Only backends with ``runs_step_in_parts`` override it, where they can gather the parts.

        Args:
            rows: The rows of the present part, (samples, ...).

        Returns:
            The rows of all parts in the order of the batch, on the device of ``rows``.

        Raises:
            StepError: No such step runs, or the backend cannot gather its parts.
        """
        msg = (
            f"{type(self).__name__} runs the step on each device's part of the batch, and here the parts do "
            "not see each other's rows; call all_gather() in a step that fit() or trainer.run() runs, or "
            "take Trainer(backend='dp-gather'): its steps see the whole batch"
        )
        raise StepError(msg)

    def check_in_step(self, what: str, *, may_meet: bool = False) -> None:
        """Check that the caller sees the whole batch, and not one device's part.

        Args:
            what: The name of the caller's function, for the message.
            may_meet: Whether a step on parts may call that function, as it uses `gather_parts`.

        Raises:
            StepError: The backend runs the model's forward, or the step, on parts at present, in any thread.
        """

    def explain_error(self, error: Exception, models: Iterable[nn.Module]) -> None:
        """Raise an error that names the remedy in place of one of torch's own, which has ended a run.

        For a backend that holds parameters in parts, with which the code between two steps may compute as
        torch cannot. By default it raises none.

        Args:
            error: The error: a RuntimeError, an AssertionError or an IndexError.
            models: The user's own modules of the run.
        """

    # -- gradients ----------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        share: Share | None = None,  # noqa: ARG002 - for those with several data ranks
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of ``loss``, over all data ranks, to the parameters.

        The result is the gradient of the loss over the whole global batch, however unevenly the ranks
        share its samples.

        Args:
            loss: This rank's loss: a scalar tensor.
            share: The samples of this rank, and of all, in the batch of the loss: `PreparedLoader.share` when
                the loader yielded it. ``None`` gives the losses of all data ranks the same weight.
            retain_graph: Whether a further backward pass through the same graph follows.
            create_graph: Whether to build a graph of the gradients, to differentiate them.

        Collective: the backend's gradient reduction, unless inside :meth:`no_sync`.
        """
        loss.backward(retain_graph=retain_graph or create_graph, create_graph=create_graph)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        """Return a context in which gradients accumulate locally and are not reduced over ranks."""
        return nullcontext()

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the global norm of the gradients: a scalar tensor, equal on all ranks.

        Every element of the whole model's gradient counts once, whichever ranks hold it.

        Args:
            model: The prepared model.
            norm_type: The order of the norm; ``inf`` for the largest absolute value.

        Collective: none where each rank has all of the gradient; a backend with shards states its own.
        """
        grads = [g for p in model.parameters() if (g := p.grad) is not None and g.numel()]
        if not all(type(g) is Tensor and g.is_cpu for g in grads) or not grads:
            return nn.utils.get_total_norm(grads, norm_type)
        # The same value as get_total_norm's on the CPU, at a third of its cost in a small model.
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

        Collective: those of :meth:`grad_norm`.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, section 3.2.
        """
        norm = self.grad_norm(model, norm_type=norm_type)
        if max_norm != math.inf:
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        """Clamp every element of the gradients between ``-limit`` and ``limit``."""
        nn.utils.clip_grad_value_(model.parameters(), limit)

    @torch.no_grad()
    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the gradients, to undo the scale of a loss or to weigh several batches."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @torch.no_grad()
    def find_nonfinite(self, model: nn.Module) -> str | None:
        """Return the name of a trained parameter that holds NaN or infinity on this rank, or ``None``.

        The name is the one in the user's own module. Collective: none, as one rank alone may call it.
        """
        named = self.unwrap(model).named_parameters()
        trained = [(n, _local_part(p)) for n, p in named if p.requires_grad]
        nonempty = [(n, p) for n, p in trained if p.numel()]
        if not nonempty or torch.isfinite(nn.utils.get_total_norm([p for _, p in nonempty], math.inf)):
            return None
        return next(plain_name(n) for n, p in nonempty if not torch.isfinite(p).all())

    # -- between ranks ------------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return ``value`` reduced over the data ranks, on all of them; the argument is kept.

        Args:
            value: A tensor, of one shape and type on all data ranks.
            op: The reduction of its elements: "sum", "mean", "min" or "max"; a mean of integers is floating.

        Raises:
            ConfigError: ``value`` is no tensor, or ``op`` none of the four.

        Collective: one all-reduce over the data ranks.
        """
        check_reduce(value, op)
        if op == "mean":
            return value / 1
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Return the data ranks' tensors concatenated along dim 0; their lengths may differ.

        Args:
            value: This rank's rows, (rows, ...); all but the first dimension is equal on all data ranks.

        Returns:
            The rows of all data ranks in their order, (rows of all, ...), on each of them.

        Collective: all-gathers over the data ranks.
        """
        return value

    def gather_objects(self, value: T, *, where: str | None = None) -> list[T]:  # noqa: ARG002 - contract
        """Return every rank's object, in the order of the ranks.

        Args:
            value: This rank's object, which can be pickled.
            where: What is exchanged, in words. Ranks that exchange different things, since they make
                different calls, raise a `DisagreementError` with them; ``None`` is not compared.

        Collective: one all-gather of pickled objects over all ranks.
        """
        return [value]

    def broadcast(self, value: T, *, src: int = 0, where: str | None = None) -> T:  # noqa: ARG002 - contract
        """Return the object of rank ``src``, on all ranks.

        Args:
            value: The object, which matters on rank ``src``.
            src: The rank.
            where: As for :meth:`gather_objects`.

        Collective: one broadcast of a pickled object over all ranks.
        """
        return value

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Collective: one barrier over all ranks.
        """

    def check_agreement(
        self, what: str, value: object, *, remedy: str = "start every rank with the same script and arguments"
    ) -> None:
        """Check that all ranks have the same ``value``.

        Args:
            what: The words for it in the message.
            value: Something small that can be pickled and compared.
            remedy: The advice where ranks disagree.

        Raises:
            DisagreementError: On every rank, if the values differ.

        Collective: those of :meth:`gather_objects`.
        """
        # With the question, so that ranks at different calls do not compare unrelated values.
        questions, values = zip(*self.gather_objects((what, value), where="an agreement"), strict=True)
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
        """Give all data ranks the same buffers, before an evaluation or a save.

        Collective: none here; a backend with copies of buffers broadcasts them.
        """

    def states_following(
        self,
        states: Callable[[], AbstractContextManager[Mapping[Tensor, dict[str, Any]]]],  # noqa: ARG002 - contract
    ) -> AbstractContextManager[None]:
        """Return a context in which a state of parameters follows them, as that of prepared optimizers does.

        Where `cuts_models` is set, the first :meth:`run` leaves parts of parameters on each rank. The tensors
        of the state that have a parameter's shape are then cut, and sent to other ranks, as it is.

        Args:
            states: Returns a context with the state of parameters by name, as optimizers have it. What is in
                the dicts at the end of the context is the new state.
        """
        return nullcontext()

    def as_slice(self, parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:  # noqa: ARG002 - contract
        """Return ``value`` with its place in the whole tensor, for a checkpoint.

        Args:
            parameter: A parameter or buffer of the model.
            value: A tensor of its shape: its own values, or a part of the optimizer's state. Where the
                parameter is a DTensor, this rank's local part of such a tensor.

        Returns:
            ``value`` itself where each rank has the whole, or a slice around it.
        """
        return value

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, on every rank.

        Collective: where parameters are DTensors, one all-gather for each.
        """
        return {n: whole(v) for n, v in plain_state(self.unwrap(model).state_dict()).items()}

    def state_parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, not gathered yet.

        A tensor has its whole shape. Where it is a DTensor, or has a ``full_tensor()`` of its own, every
        rank passes it to `tp_core.state.whole`, which gathers it. So a state can be written that no device
        could hold as a whole.

        Collective: none here; those of :meth:`model_state` where a backend overrides that method only.
        """
        if type(self).model_state is not Session.model_state:
            return self.model_state(model)
        return plain_state(self.unwrap(model).state_dict())

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state of :meth:`model_state`, of any backend.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        plain = self.unwrap(model)
        plain.load_state_dict(with_own_names(plain, state))


def _first_other(values: Sequence[object]) -> int | None:
    """Return the first rank with another value than rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor; another tensor as it is."""
    # By its method and not by its class: importing that costs most of a second.
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    return to_local()
