"""The rows that all ranks have of a batch, to compute metrics from, or losses."""

from typing import Any

import torch
from torch import Tensor
from tp_core import tree_leaves, tree_map
from tp_core.errors import StepError
from tp_core.plugins import Session

from tp_trainer._steps._loaders import BatchShares
from tp_trainer._steps._weights import counts_as_nothing

__all__ = ["gather_rows", "gather_with_gradients", "has_nothing"]


def gather_rows(session: Session, value: Any, *, is_nothing: bool) -> Any:
    """Return ``value`` with the rows of all data ranks in place of this rank's.

    Args:
        session: Where the ranks meet.
        value: Tensors, (row, ...) each, alone or in containers.
        is_nothing: Whether this rank's rows are those of a stand-in, and left out.

    Raises:
        StepError: ``value`` holds something else than tensors.
        DisagreementError: The ranks' tensors differ in more than their first dimension.

    Collectives: an all-gather of the shapes, then `Session.gather` for each tensor.
    """
    leaves = list(tree_leaves(value))
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            msg = (
                "what is gathered must be tensors whose first dimension goes over samples, alone or in "
                f"dicts, lists and tuples; got {type(leaf).__name__}: {leaf!r:.80}"
            )
            raise StepError(msg)
    if session.data_size > 1:
        # Ranks that differed would wait for each other, or take one another's bytes for their own.
        shapes = [(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in leaves]
        session.check_agreement("what is gathered, as (shape behind the first dimension, type)", shapes)

    def gathered(leaf: Tensor) -> Tensor:
        rows = leaf.detach().reshape(1) if leaf.dim() == 0 else leaf.detach()
        return session.gather(rows[:0] if is_nothing else rows)

    return tree_map(gathered, value)


def has_nothing(session: Session, shares: BatchShares | None, batch: Any) -> bool:
    """Whether this rank has a stand-in in place of the samples of a batch, in a step or in a custom loop.

    Args:
        session: Where the ranks meet.
        shares: The shares of the batches of loaders that are iterated; ``None`` with one data rank.
        batch: Which batch; ``None`` for the one that is being computed.

    Raises:
        StepError: The batch is not known; or a rank without a sample of it does not take part.
    """
    if shares is not None and (batch is not None or shares.is_in_a_loop):
        return shares.holds_nothing(batch)
    share = session.share
    waits = session.evaluates_together or torch.is_grad_enabled()
    if share is not None and share.total < session.data_size and not waits:
        msg = (
            f"the batch has {share.total} samples for {session.data_size} ranks, and in evaluation a "
            "rank without a sample of it does not wait here; give a larger batch size"
        )
        raise StepError(msg)
    return share is not None and share.samples == 0


def gather_with_gradients(session: Session, rows: Tensor, *, is_nothing: bool) -> Tensor:
    """Return the rows of all data ranks, through which gradients flow back to the rank of each row.

    Args:
        session: Where the ranks meet.
        rows: This rank's, (row, ...).
        is_nothing: Whether they are those of a stand-in, and left out.

    Returns:
        The rows of all ranks, (rows of all ranks, ...), in the order of the global batch.

    Raises:
        StepError: ``rows`` is not a tensor with rows.
        DisagreementError: The ranks' tensors differ in more than their first dimension.

    Collectives: an all-gather of the shapes and two of `Session.gather`; in the backward pass one
    all-reduce of the rows' gradients.
    """
    if not isinstance(rows, Tensor) or rows.dim() == 0:
        what = "a scalar" if isinstance(rows, Tensor) else type(rows).__name__
        msg = f"all_gather() takes a tensor whose first dimension goes over samples, got {what}"
        raise StepError(msg)
    if session.runs_step_in_parts:
        rows = session.gather_parts(rows)
    if session.data_size == 1:
        return rows
    shape = tuple(rows.shape[1:]), str(rows.dtype)
    session.check_agreement("what is gathered, as (shape behind the first dimension, type)", shape)
    gathered: Tensor = _Gather.apply(rows, session, is_nothing)  # type: ignore[no-untyped-call]  # as torch has it
    return gathered


class _Gather(torch.autograd.Function):
    """Forward: all-gather of rows. Backward: all-reduce (sum) of their gradients; each keeps its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, session: Session, is_nothing: bool) -> Tensor:
        mine = rows[:0] if is_nothing else rows
        counts = session.gather(torch.tensor([len(mine)], device=session.device)).tolist()
        first = sum(counts[: session.data_rank])
        ctx.session, ctx.is_nothing = session, is_nothing
        ctx.own, ctx.shape = slice(first, first + len(mine)), rows.shape
        return session.gather(mine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_nothing or counts_as_nothing(ctx.session):
            gradient = torch.zeros_like(gradient)  # NaN of a loss over nothing must not reach other ranks
        total = ctx.session.reduce(gradient.contiguous(), "sum")[ctx.own]
        return (total if len(total) else total.new_zeros(ctx.shape)), None, None
