"""The session of the backend ``tuple``."""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tp_core import to_device
from tp_core.data import Envelope, Parts, PreparedLoader, StepOutput, combine_outputs
from tp_core.errors import LoaderError, StepError
from tp_core.jobs import whole_model_arguments
from tp_core.plugins import Job, Session
from tp_core.replicas import Replicas, leave_to_others
from tp_core.sessions import PerModule

from tp_tuple._balance import Speeds, resolve_weights, run_timed
from tp_tuple._collate import AdaptedCollate, PlacedParts, find_adapters
from tp_tuple._options import TupleOptions

# -- All-gather among the parts of a step: each part gives rows and gets those of all, with gradients


# Each part runs in a thread of its own: the gather of its step, its number, and how often it has gathered.
_part = threading.local()


def current_part_gather() -> "PartGather | None":
    return getattr(_part, "gather", None)


class PartGather:
    """The all-gathers in one call of a step on several parts, as many as the step asks for.

    Args:
        count: The number of parts.
        order: The place in the batch of each row of the concatenated parts; ``None`` if they are in order.
        replicas: The replicas, which run the parts.
    """

    def __init__(self, count: int, order: Sequence[int] | None, replicas: Replicas) -> None:
        self._count = count
        self._replicas = replicas
        self._positions: list[int] | None = None
        if order is not None:
            self._positions = sorted(range(len(order)), key=order.__getitem__)
        # Guards the rows and the ended parts; each part's thread waits here for the rows of the others.
        self._changed = threading.Condition()
        self._gathered: list[dict[int, _Rows]] = []  # of each gather, the rows by the number of the part
        self._ended_parts: set[int] = set()
        self._error: BaseException | None = None

    def run(
        self,
        run_all: Callable[[Callable[[nn.Module, tuple[int, Any]], Any], list[tuple[int, Any]]], list[Any]],
        step: Callable[[nn.Module, Any], Any],
        parts: Sequence[Any],
    ) -> list[Any]:
        """Return ``run_all(step, parts)``; within it, each part can gather."""

        def run_part(replica: nn.Module, numbered: tuple[int, Any]) -> Any:
            number, part = numbered
            outer = current_part_gather()
            _part.gather = self
            _part.number = number
            _part.times = 0
            try:
                return step(replica, part)
            except _PartEndedError:  # it follows from the end of another part, which has the cause
                raise
            except BaseException as error:
                self._error = self._error or error
                raise
            finally:
                _part.gather = outer
                # A part that waits for this one, which has returned or failed, would do so for ever.
                with self._changed:
                    self._ended_parts.add(number)
                    self._changed.notify_all()

        try:
            return run_all(run_part, list(enumerate(parts)))
        except _PartEndedError:
            if self._error is not None:  # why the part ended that another one waited for
                raise self._error from None
            msg = (
                "all_gather() was called for some parts of the batch, and not for others: every part of a "
                "step has to call it as often, as all ranks do"
            )
            raise StepError(msg) from None

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all parts, in the order of the batch, on the device of ``rows``.

        Collectives: forward all-gathers the rows by copies between devices; backward copies each part's
        share of the gradient back, where autograd sums the shares.
        """
        if self._count > 1 and self._replicas.runs_in_turn:  # they cannot wait for each other
            msg = (
                "all_gather() cannot bring the parts of the batch together within a TorchFunctionMode, a "
                "TorchDispatchMode or hooks for saved tensors, nor with forward hooks of your own: they run "
                "one after the other then; leave these, or take another backend: "
                "Trainer(backend='dp-gather')"
            )
            raise StepError(msg)
        number, time = _part.number, _part.times
        _part.times += 1
        with self._changed:
            if len(self._gathered) == time:  # the first part here; none is two gathers ahead of another
                self._gathered.append({})
            rows_of_parts = self._gathered[time]
            rows_of_parts[number] = _Rows(rows, _record_event(rows))
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(rows_of_parts) == self._count or self._ended_parts - rows_of_parts.keys()
            )
            if len(rows_of_parts) < self._count:
                raise _PartEndedError
        in_order = [rows_of_parts[i] for i in range(self._count)]
        leave_to_others([part.tensor for i, part in enumerate(in_order) if i != number])
        shapes = {(tuple(part.tensor.shape[1:]), part.tensor.dtype) for part in in_order}
        if len(shapes) > 1:
            listed = " and ".join(sorted(f"(n, {', '.join(map(str, s))}) {d}" for s, d in shapes))
            msg = f"the parts of the batch gather rows that do not go together: {listed}"
            raise StepError(msg)
        whole = torch.cat([_copy_to(rows.device, part) for part in in_order])
        if self._positions is None or len(self._positions) != len(whole):
            return whole
        return whole[torch.tensor(self._positions, device=whole.device)]


class _Rows(NamedTuple):
    """The rows that one part gives.

    Attributes:
        tensor: The rows, on the part's device.
        ready: An event on an accelerator, after which they are computed; ``None`` on the CPU.
    """

    tensor: Tensor
    ready: Any


class _PartEndedError(Exception):
    """Error of a part that waits for one that has ended."""


def _record_event(rows: Tensor) -> Any:
    if rows.device.type == "cpu":
        return None
    # The host does not wait for the rows; the stream of each part that copies them does, see _copy_to.
    event = torch.Event(device=rows.device)
    event.record(torch.accelerator.current_stream(rows.device))
    return event


def _copy_to(device: torch.device, rows: _Rows) -> Tensor:
    """Return rows on a device, ordered after the work that computes them.

    A thread has current streams of its own: the copy is queued on those of this thread, the rows on those of
    the part that computes them. Without the event the copy could read memory that is not written yet.
    """
    if rows.ready is not None:
        for end in {rows.tensor.device, device}:
            if end.type != "cpu":
                torch.accelerator.current_stream(end).wait_event(rows.ready)
    return rows.tensor.to(device)


Step = Callable[[nn.Module, Any], StepOutput]


class TupleSession(Session):
    """Session that runs the step on every device at once and combines the outputs."""

    def __init__(self, job: Job, options: TupleOptions) -> None:
        super().__init__(job)
        self.runs_step_in_parts = len(job.devices) > 1
        self._weights = resolve_weights(options.weights, len(job.devices), job.devices)
        self._speeds = self._weights if isinstance(self._weights, Speeds) else None
        self._cost = options.cost
        self._force_copies = options.force_copies
        self._adapters = find_adapters(options.adapter)
        self._replicas: PerModule[Replicas] = PerModule()
        # Models that one step gets together are replicated as one, so that shared parameters stay shared.
        # By the first of them, and the identities of all.
        self._together: PerModule[dict[tuple[int, ...], nn.ModuleList]] = PerModule()
        self._gathers: list[PartGather] = []  # of the steps that run now on several parts

    def prepare_model(self, model: nn.Module) -> nn.Module:
        prepared = super().prepare_model(model)
        self._replicas_of(prepared)
        return prepared

    def compile_model(self, model: nn.Module) -> None:
        self._replicas_of(model).compile(**whole_model_arguments(self.job, "tuple"))

    def refresh(self, model: nn.Module) -> None:
        self._replicas_of(model).refresh()

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> PreparedLoader:
        """Return a loader of batches in parts, each part on its device.

        Args:
            loader: A ``DataLoader``, which gets an adapted collate function; an `ElasticLoader`, to which
                each device is a rank; or an iterable of `Parts`.
            training: As in `Session.prepare_loader`.
            shard: If ``True``, the order of the samples follows from the job's seed. If not, values that are
                no batch in parts, like the numbers of a ``range``, are yielded unchanged; `run` refuses them.
        """
        if isinstance(loader, DataLoader) and loader.batch_sampler is None:
            msg = (
                "a DataLoader with batch_size=None does not make lists of items to split over "
                f"{len(self.job.devices)} devices; give it a batch size, or yield tp_core.data.Parts "
                "from an iterable of your own"
            )
            raise LoaderError(msg)
        move = self.move_batch if shard else self._move_parts
        return PreparedLoader(
            loader,
            seed=self.job.seed,
            rank=self.data_rank,
            size=self.data_size,
            training=training,
            shard=shard,
            move=move,
            collate=partial(
                AdaptedCollate,
                adapters=self._adapters,
                parts=len(self.job.devices),
                weights=self._weights,
                cost=self._cost,
            ),
            parts=len(self.job.devices),
        )

    def _move_parts(self, batch: Any) -> Any:
        if isinstance(batch, Envelope | Parts):
            return self.move_batch(batch)
        return batch

    def move_batch(self, batch: Any) -> Any:
        parts = batch.batch if isinstance(batch, Envelope) else batch
        if not isinstance(parts, Parts):
            msg = (
                "the backend 'tuple' needs batches in parts, one per device, and the loader yielded "
                f"{type(parts).__name__}; give a DataLoader with a batch size, or yield tp_core.data.Parts"
            )
            raise LoaderError(msg)
        if len(parts[:]) > len(self.job.devices):
            msg = (
                f"the loader yielded {len(parts[:])} parts, and each of the {len(self.job.devices)} devices "
                "takes one at most; yield fewer parts, or give the Trainer more devices"
            )
            raise LoaderError(msg)
        pairs = zip(parts[:], self.job.devices, strict=False)  # few samples make fewer parts than devices
        moved = [to_device(part, device) for part, device in pairs]
        return PlacedParts(moved, counts=parts.counts, order=parts.order)

    def run(self, step: Step, model: nn.Module, batch: Any) -> StepOutput:
        """Run ``step(replica, part)`` on every device at once and combine the outputs.

        Losses are weighted by the samples of their parts (added, if the job's loss is a sum). So the
        gradient equals the gradient of one device on the whole batch.

        Collectives: forward copies changed parameters to the other devices, and gathers the losses on the
        first one; backward sums the replicas' gradients into the parameters there.
        """
        return self._run(step, self._replicas_of(model), batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        if len(models) == 1:
            return self.run(step, models[0], batch)
        modules = self._together.get(models[0])
        if modules is None:
            modules = self._together[models[0]] = {}
        together = modules.setdefault(tuple(map(id, models)), nn.ModuleList(models))
        return self._run(
            lambda replica, part: step(*cast("nn.ModuleList", replica), part),
            self._replicas_of(together),
            batch,
        )

    def _run(self, step: Step, replicas: Replicas, batch: Any) -> StepOutput:
        if not isinstance(batch, Parts):
            batch = self.move_batch(batch)
        parts = batch[:]
        gather = PartGather(len(parts), batch.order, replicas)
        if len(parts) > 1:
            self._gathers.append(gather)
        try:
            run_parts = partial(self._run_parts, replicas=replicas, counts=batch.counts)
            outputs = gather.run(run_parts, step, parts)
        finally:
            if len(parts) > 1:
                self._gathers.remove(gather)
        combined: StepOutput = (
            outputs[0]
            if len(outputs) == 1
            else combine_outputs(outputs, batch, loss=self.job.loss, device=self.device)
        )
        return combined

    def _run_parts(
        self, step: Step, parts: Sequence[Any], replicas: Replicas, counts: Sequence[int]
    ) -> list[Any]:
        speeds = self._speeds
        if speeds is not None and not speeds.is_settled:
            return run_timed(replicas, step, parts, counts=counts, speeds=speeds)
        return replicas.run(step, parts)

    def check_in_step(self, what: str, *, may_meet: bool = False) -> None:
        if self._gathers and not may_meet:
            msg = (
                f"{what} was called within the step, which 'tuple' runs on each device's part of the batch; "
                "call it on what trainer.run() returns, which is of the whole batch, give metrics= to fit() "
                "or evaluate(), or take Trainer(backend='dp-gather'): its steps see the whole batch"
            )
            raise StepError(msg)

    def gather_parts(self, rows: Tensor) -> Tensor:
        """Return the rows of all parts of the batch, with gradients, in a step that runs on each of them.

        Collectives: forward all-gathers the rows by copies between devices; backward copies each part's
        share of the gradient back, where autograd sums the shares.
        """
        gather = current_part_gather()
        if gather is None and self._gathers:
            msg = (
                "all_gather() was called in a thread that the step, or the model, has started: it is not "
                "known to which part of the batch it belongs; call it in the step's own thread"
            )
            raise StepError(msg)
        if gather is None:
            return super().gather_parts(rows)
        return gather.gather(rows)

    def close(self) -> None:
        self._replicas.clear()
        self._together.clear()
        super().close()

    def _replicas_of(self, model: nn.Module) -> Replicas:
        replicas = self._replicas.get(model)
        if replicas is None:
            replicas = Replicas(model, list(self.job.devices), force_copies=self._force_copies)
            self._replicas[model] = replicas
        return replicas
