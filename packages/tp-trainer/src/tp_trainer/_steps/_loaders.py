"""State that a trainer keeps for its loaders: shares of batches, next epochs; and the gathering of rows."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from tp_core import tree_leaves, tree_map
from tp_core.data import PreparedLoader, Share, StepOutput
from tp_core.errors import StepError
from tp_core.plugins import Session

from tp_trainer._steps._optimizer_step import counts_as_nothing
from tp_trainer._steps._step import RunStep, Step

# -- Shares of batches, and the next epochs of loaders --------------------------------------------


T = TypeVar("T")

_NO_BATCH = object()
_MANY = 64  # notes are sorted into the dict in groups of this many


class BatchShares:
    """Records the shares of the batches that prepared loaders have yielded, by the batches' tensors.

    Without a batch, the share is the one of the loader under iteration. If several loaders are iterated, and
    their batches have different shares, it is ambiguous.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Each share, with whether the batch was for training.
        self._by_tensor: _OfLiving[tuple[Share, bool]] = _OfLiving()
        self._by_loss: _OfLiving[Share] = _OfLiving()
        self._knows_losses = False  # whether any was noted; a loop that does not use run() notes none
        # The batch that was yielded last, until its iteration continues or ends.
        self._latest: Any = _NO_BATCH
        self._latest_share: Share | None = None
        self._share_in_step: Share | None = None  # of the step that the trainer's own loop runs now
        self._met_stand_in = False  # whether a rank had a stand-in in the last iteration for training
        # The shares of the iterations under way, for training and for evaluation.
        self._training: dict[int, Share] = {}
        self._evaluating: dict[int, Share] = {}

    def watch(self, loader: PreparedLoader, *, training: bool) -> None:
        loader.watch = lambda batches: self._watched(batches, loader, training=training)

    def _watched(self, batches: Iterator[Any], loader: PreparedLoader, *, training: bool) -> Iterator[Any]:
        key = id(batches)
        under_way = self._training if training else self._evaluating
        size, latest, note = self._session.data_size, None, self._by_tensor.note_all
        self._met_stand_in = False
        try:
            for batch in batches:
                share = self._latest_share = loader.share
                if share is not None:
                    if share is not latest:
                        under_way[key] = latest = share
                        self._met_stand_in |= training and share.total < size
                        noted = share, training
                    if note(batch, noted):
                        self._latest = batch
                    else:
                        self._latest = _NO_BATCH
                yield batch
        finally:
            under_way.pop(key, None)
            self._latest = _NO_BATCH

    def note_loss(self, output: StepOutput, batch: Any) -> None:
        """Record the share of a step's loss, if a loader has yielded its batch."""
        loss = output if isinstance(output, Tensor) else _loss_in(output)
        if loss is None:
            return
        self._knows_losses = True
        if batch is self._latest and self._latest_share is not None:
            self._by_loss.note(loss, self._latest_share)
        elif len(shares := self._shares_in(batch)) == 1:
            self._by_loss.note(loss, shares[0])

    def of_batch(self, batch: Any) -> Share:
        shares = self._shares_in(batch)
        if len(shares) == 1:
            return shares[0]
        if not shares:
            msg = (
                f"batch={type(batch).__name__} has no tensor that a prepared loader has yielded, so which "
                "share of it is this rank's is not known; give the batch as the loader yielded it"
            )
        else:
            msg = _ambiguous(shares)
        raise StepError(msg)

    def of_loss(self, loss: Tensor) -> Share | None:
        """Return the share of a loss's batch; ``None`` if no loader has yielded one."""
        if self._knows_losses and (share := self._by_loss.get(loss)) is not None:
            return share
        under_way = self._training
        if len(under_way) == 1:
            for share in under_way.values():
                return share
        shares = _different(under_way.values())
        if not shares:  # the iteration has ended, and the loop may still hold its batches
            shares = _different(share for share, training in self._by_tensor.values() if training)
        if len(shares) > 1:
            raise StepError(_ambiguous(shares))
        if shares:
            return shares[0]
        return self._latest_share

    def _shares_in(self, batch: Any) -> list[Share]:
        noted = [self._by_tensor.get(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        return _different(share_of_tensor[0] for share_of_tensor in noted if share_of_tensor is not None)

    def in_steps(self, run: RunStep, batches: PreparedLoader) -> RunStep:
        """Return ``run`` with steps on the batch that ``batches`` yielded last."""

        def run_step(step: Step, model: nn.Module, batch: Any) -> StepOutput:
            outer, self._share_in_step = self._share_in_step, batches.share
            try:
                return run(step, model, batch)
            finally:
                self._share_in_step = outer

        return run_step

    def holds_nothing(self, batch: Any) -> bool:
        """Return whether this rank has a stand-in instead of samples of the batch.

        Without a batch it is the step's, or the current one of the loader under iteration, or all batches of
        the last loader.

        Raises:
            StepError: The batch is not known; or a rank gets no part of it at all.
        """
        of_step, evaluated = self._share_in_step, list(self._evaluating.values())
        if batch is not None:
            shares = [self.of_batch(batch)]
        elif of_step is not None:
            shares = [of_step]
            evaluated = [] if torch.is_grad_enabled() else [of_step]
        else:
            shares = evaluated or list(self._training.values())
        if not shares:
            if self._met_stand_in:
                msg = (
                    "a rank met a stand-in for a sample in the last loop over a loader, and which of these "
                    "rows are its is not known now; gather in the loop, batch by batch, or evaluate on a "
                    "loader from prepare(loader, training=False)"
                )
                raise StepError(msg)
            return False
        size = self._session.data_size
        few = [share for share in shares if share.total < size and share in evaluated]
        if few and not self._session.evaluates_together:
            msg = (
                f"the batch has {few[0].total} samples for {size} ranks, and a rank without a sample of it "
                "does not wait here; gather once, after the loop, or give prepare() a loader with a larger "
                "batch size"
            )
            raise StepError(msg)
        by_nothing = {share.samples == 0: share for share in shares}
        if len(by_nothing) > 1:
            raise StepError(_ambiguous(list(by_nothing.values())))
        return True in by_nothing


class _OfLiving(Generic[T]):
    """A mapping from living tensors to values, cheap to add to.

    Every tensor of every batch is noted, and few are looked up. So a note is only a weak reference without a
    callback. Notes are sorted into a dict at the next lookup. Dead ones are removed once about half are dead.
    """

    def __init__(self) -> None:
        self._new: list[tuple[weakref.ref[Tensor], T]] = []  # in the order in which they were noted
        self._entries: dict[int, tuple[weakref.ref[Tensor], T]] = {}  # by id, which a later tensor may reuse
        self._most = 2 * _MANY

    def note(self, tensor: Tensor, value: T) -> None:
        self._new.append((ref(tensor), value))
        if len(self._new) > _MANY:
            self._put_in_order()

    def note_all(self, batch: Any, value: T) -> bool:
        """Note a value for each tensor in a batch, and return whether it has any."""
        new = self._new
        before, kind = len(new), type(batch)
        if kind is tuple or kind is list:
            leaves = batch
        elif kind is dict:
            leaves = batch.values()
        else:
            leaves = (batch,)
        for leaf in leaves:
            if type(leaf) is Tensor:  # the usual case: a walk of the tree costs four times as much
                new.append((ref(leaf), value))
            else:
                new += [(ref(inner), value) for inner in tree_leaves(leaf) if isinstance(inner, Tensor)]
        after = len(new)
        if after > _MANY:
            self._put_in_order()
        return after > before

    def _put_in_order(self) -> None:
        entries = self._entries
        for noted in self._new:
            if (tensor := noted[0]()) is not None:
                entries[id(tensor)] = noted
        self._new.clear()
        if len(entries) > self._most:
            self._entries = {key: noted for key, noted in entries.items() if noted[0]() is not None}
            self._most = 2 * (len(self._entries) + _MANY)

    def get(self, tensor: Tensor) -> T | None:
        new = self._new
        if new:
            refers, value = new[-1]
            if refers() is tensor:  # often the newest note is looked up
                return value
            self._put_in_order()
        entry = self._entries.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        return None

    def values(self) -> list[T]:
        self._put_in_order()
        return [value for refers, value in self._entries.values() if refers() is not None]


def _loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor):
        return loss
    return None


def _different(shares: Iterable[Share]) -> list[Share]:
    """Return one share for each distinct weight of a loss."""
    return list({share.samples / share.total: share for share in shares}.values())


def _ambiguous(shares: list[Share]) -> str:
    listed = " and ".join(f"{share.samples} of {share.total}" for share in shares)
    return (
        f"it is not known which batch this is about: several were yielded, of which this rank has {listed} "
        "samples, and each weighs differently; say which with batch=..., once for each batch: "
        "trainer.backward(loss, batch=batch)"
    )


class Epochs:
    """Records the next epoch of each loader that a trainer has trained on, as long as the loader lives.

    A loader without weak references, such as a list, has the same order in all epochs. Streams live until
    :meth:`close`.
    """

    def __init__(self) -> None:
        self._next: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._streams: MutableMapping[Any, Any] = WeakIdKeyDictionary()

    def go_on(self, loader: Any, prepared: PreparedLoader) -> None:
        """Set a newly prepared loader to the epoch after the last one of ``loader``."""
        if prepared is not loader and _is_known_by_reference(loader) and loader in self._next:
            prepared.set_epoch(self._next[loader])
            if loader in self._streams:
                prepared.stream = self._streams[loader]

    def note(self, loader: Any, prepared: PreparedLoader) -> None:
        if prepared is not loader and _is_known_by_reference(loader):
            self._next[loader] = prepared.next_epoch
            if prepared.continues_stream and prepared.stream is not None:
                self._streams[loader] = prepared.stream

    def close(self) -> None:
        """Close the iterators of streams, which ends their workers."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def _is_known_by_reference(loader: Any) -> bool:
    return hasattr(type(loader), "__weakref__")


# -- Rows of a batch, gathered from all ranks -----------------------------------------------------


def gather_rows(session: Session, value: Any, *, is_nothing: bool) -> Any:
    """Return ``value`` with the rows of all data ranks in place of this rank's; tensors are (row, ...).

    With ``is_nothing`` this rank has a stand-in, and adds no rows.

    Raises:
        DisagreementError: The ranks' tensors differ in more than their first dimension.

    Collectives: an all-gather of the shapes, then `Session.gather` for each tensor.
    """
    leaves = list(tree_leaves(value))
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            msg = (
                "what is gathered must be tensors with a first dimension over samples, alone or in "
                f"dicts, lists and tuples; got {type(leaf).__name__}: {leaf!r:.80}"
            )
            if isinstance(leaf, Real):
                msg += "; for its mean over ranks write trainer.session.reduce(torch.tensor(value))"
            raise StepError(msg)
    if session.data_size > 1:
        # With different shapes a collective would hang, or copy bytes into tensors of another shape.
        shapes = [(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in leaves]
        session.check_agreement("what is gathered, as (shape behind the first dimension, type)", shapes)

    def gathered(leaf: Tensor) -> Tensor:
        if leaf.dim() == 0:
            rows = leaf.detach().reshape(1)
        else:
            rows = leaf.detach()
        own = rows[:0] if is_nothing else rows
        return session.gather(own)

    return tree_map(gathered, value)


def gather_with_gradients(session: Session, rows: Tensor, *, is_nothing: bool) -> Tensor:
    """Return the rows of all data ranks, (row, ...), in the order of the global batch.

    Gradients flow back to the rank of each row. With ``is_nothing`` this rank has a stand-in, and adds no
    rows.

    Raises:
        DisagreementError: The ranks' tensors differ in more than their first dimension.

    Collectives: an all-gather of the shapes and two of `Session.gather`; in the backward pass one all-reduce
    of the rows' gradients.
    """
    if not isinstance(rows, Tensor) or rows.dim() == 0:
        if isinstance(rows, Tensor):
            kind = "a scalar"
        else:
            kind = type(rows).__name__
        msg = f"all_gather() takes a tensor with a first dimension over samples, got {kind}"
        raise StepError(msg)
    if session.runs_step_in_parts:
        rows = session.gather_parts(rows)
    if session.data_size == 1:
        return rows
    shape = tuple(rows.shape[1:]), str(rows.dtype)
    session.check_agreement("what is gathered, as (shape behind the first dimension, type)", shape)
    gathered: Tensor = _GatherRows.apply(rows, session, is_nothing)  # type: ignore[no-untyped-call]  # as torch has it
    return gathered


class _GatherRows(torch.autograd.Function):
    """Forward: all-gather of rows. Backward: all-reduce (sum) of their gradients; a rank keeps its rows'."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, session: Session, is_nothing: bool) -> Tensor:
        own = rows[:0] if is_nothing else rows
        counts = session.gather(torch.tensor([len(own)], device=session.device)).tolist()
        first = sum(counts[: session.data_rank])
        ctx.session, ctx.is_nothing = session, is_nothing
        ctx.own, ctx.shape = slice(first, first + len(own)), rows.shape
        return session.gather(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_nothing or counts_as_nothing(ctx.session):
            # A loss over no sample may be NaN; the all-reduce would carry NaN to every rank.
            gradient = torch.zeros_like(gradient)
        total = ctx.session.reduce(gradient.contiguous(), "sum")[ctx.own]
        if not len(total):
            total = total.new_zeros(ctx.shape)
        return total, None, None
