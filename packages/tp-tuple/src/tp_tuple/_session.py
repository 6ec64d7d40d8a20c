"""The session of the backend ``tuple``."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from tp_core import (
    CollateAdapter,
    Job,
    Parts,
    PreparedLoader,
    Session,
    Share,
    StepOutput,
    recursive_pin,
    recursive_to,
)
from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import registry
from tp_core.replicas import Replicas

from tp_tuple._adapter import TupleCollateAdapter
from tp_tuple._backend import TupleOptions
from tp_tuple._collate import resolve_weights
from tp_tuple._combine import combine
from tp_tuple._speeds import Speeds
from tp_tuple._tuple_parallel import timed

__all__ = ["TupleSession"]


class TupleSession(Session):
    """Runs the step on every device at once and combines what it returns.

    Args:
        job: What is to be done.
        options: The backend's options.

    Raises:
        ConfigError: The weights make no sense, or no collate adapter has the name.
    """

    def __init__(self, job: Job, options: TupleOptions) -> None:
        super().__init__(job)
        self._weights = resolve_weights(options.weights, len(job.devices), job.devices)
        self._speeds = self._weights if isinstance(self._weights, Speeds) else None
        self._cost = options.cost
        self._force_copies = options.force_copies
        self._adapters = _adapters(options.adapter)
        self._replicas: dict[int, Replicas] = {}

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to the first device and make its replicas.

        Raises:
            ModelError: It is no module, or it is wrapped already.
        """
        prepared = super().prepare_model(model)
        self._replicas_of(prepared)
        return prepared

    def compile_model(self, model: nn.Module) -> None:
        """Compile the model in place, and each of its replicas."""
        self._replicas_of(model).compile()

    def prepare_loader(
        self, loader: Iterable[Any], *, training: bool = True, shard: bool = True
    ) -> PreparedLoader:
        """Return a loader of batches in parts, each part on its device.

        Args:
            loader: A ``DataLoader``, whose collate function is adapted, or an iterable of `Parts`.
            training: As in `Session.prepare_loader`.
            shard: Whether the order of the samples follows from the job's seed.

        Raises:
            LoaderError: The loader does not collate batches from lists of items.
        """
        if isinstance(loader, DataLoader) and loader.batch_sampler is None:
            msg = (
                "a DataLoader with batch_size=None makes no lists of items to split over "
                f"{len(self.job.devices)} devices; give it a batch size, or yield tp_core.Parts "
                "from an iterable of your own"
            )
            raise LoaderError(msg)
        return PreparedLoader(
            loader,
            seed=self.job.seed,
            rank=self.data_rank,
            size=self.data_size,
            training=training,
            shard=shard,
            move=self.move_batch,
            on_share=self.take_share,
            collate=self._adapt,
        )

    def move_batch(self, batch: Any) -> Any:
        """Move each part to its device."""
        parts = batch.parts if isinstance(batch, _Envelope) else batch
        if not isinstance(parts, Parts):
            msg = (
                "the backend 'tuple' needs batches in parts, one per device, and the loader yielded "
                f"{type(parts).__name__}; give a DataLoader with a batch size, or yield tp_core.Parts"
            )
            raise LoaderError(msg)
        samples = sum(parts.counts)
        self.take_share(Share(samples, samples))  # a batch in an envelope counts as one
        return self._placed(parts)

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run ``step(replica, part)`` on every device at once and combine the outputs.

        Losses are weighted by the samples of their parts (added, if the job's loss is a sum), so
        the gradient is that of one device on the whole batch.

        Raises:
            LoaderError: ``batch`` is not in parts.
            StepError: The outputs of the parts do not go together.
        """
        if not isinstance(batch, Parts):
            batch = self.move_batch(batch)
        replicas = self._replicas_of(model)
        speeds = self._speeds
        if speeds is not None and not speeds.is_settled:
            outputs = timed(replicas, step, batch, counts=batch.counts, speeds=speeds)
        else:
            outputs = replicas.run(step, batch)
        if len(outputs) == 1:
            only: StepOutput = outputs[0]
            return only
        combined: StepOutput = combine(outputs, batch, loss=self.job.loss, device=self.device)
        return combined

    def close(self) -> None:
        """Let go of the replicas and end their threads."""
        self._replicas.clear()
        super().close()

    # -- the machinery ----------------------------------------------------------------------------

    def _replicas_of(self, model: nn.Module) -> Replicas:
        replicas = self._replicas.get(id(model))
        if replicas is None or replicas.module is not model:
            replicas = Replicas(model, list(self.job.devices), force_copies=self._force_copies)
            self._replicas[id(model)] = replicas
        return replicas

    def _placed(self, parts: Parts) -> Parts:
        pairs = zip(parts, self.job.devices, strict=False)
        moved = [recursive_to(p, d, non_blocking=d.type != "cpu") for p, d in pairs]
        return Parts(moved, counts=parts.counts, order=parts.order)

    def _adapt(self, collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        return _Adapted(collate_fn, self._adapters, len(self.job.devices), self._weights, self._cost)


class _Envelope:
    """Parts on their way through the loader: torch pins any tuple as a plain list."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def pin_memory(self) -> "_Envelope":
        pinned = [recursive_pin(p) for p in self.parts]
        return _Envelope(Parts(pinned, counts=self.parts.counts, order=self.parts.order))


class _Adapted:
    """The collate function of a loader; it takes the adapter that fits the first samples best."""

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        adapters: Sequence[CollateAdapter],
        parts: int,
        weights: Sequence[float] | Speeds | None,
        cost: Callable[[Any], float] | None,
    ) -> None:
        self._collate_fn = collate_fn
        self._adapters = adapters
        self._parts = parts
        self._weights = weights
        self._cost = cost
        self._adapted: Callable[[list[Any]], Parts] | None = None

    def __call__(self, items: list[Any]) -> _Envelope:
        if self._adapted is None:
            self._adapted = self._choose(items[0]).adapt(
                self._collate_fn,
                parts=self._parts,
                weights=self._weights,
                cost=self._cost,
            )
        return _Envelope(self._adapted(items))

    def _choose(self, sample: Any) -> CollateAdapter:
        verdicts = [(a, a.assess(sample, self._parts)) for a in self._adapters]
        fits = [(v.score, a) for a, v in verdicts if v.score is not None]
        if not fits:
            reasons = "; ".join(f"{a.name}: {v.reason}" for a, v in verdicts)
            msg = f"no collate adapter fits samples of type {type(sample).__name__}: {reasons}"
            raise LoaderError(msg)
        return max(fits, key=lambda pair: pair[0])[1]


def _adapters(name: str) -> tuple[CollateAdapter, ...]:
    """Return the adapters to choose from: all that are installed, or the one of that name."""
    found = {c.item.name: c.item for c in registry.collate_adapters()}
    found.setdefault(TupleCollateAdapter.name, TupleCollateAdapter())
    if name == "auto":
        return tuple(found[n] for n in sorted(found))
    if name not in found:
        names = ", ".join(map(repr, sorted(found)))
        msg = f"no collate adapter {name!r} is installed; there are: {names}"
        raise ConfigError(msg)
    return (found[name],)
