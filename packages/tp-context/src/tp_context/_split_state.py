"""What holds while a model runs on slices of sequences, and what models ask of it: positions, and wholes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tp_core.arguments import explain_arguments
from tp_core.errors import StepError

from tp_context._slices import Cut, Cuts


class OuterCall(NamedTuple):
    """A call of ``nn.MultiheadAttention``, for the attention within it.

    Attributes:
        rows: The cut of the queries; ``None`` if all of them are here.
        mask: Which keys a query sees, in the meaning of ``scaled_dot_product_attention``.
        padding: Which keys any query sees, in the same meaning.
        is_causal: Whether a query sees earlier positions only.
    """

    rows: Cut | None
    mask: Tensor | None
    padding: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class SplitState:
    """What holds at present.

    Attributes:
        cuts: The cuts of the batch of the running step; ``None`` where sequences are whole.
        is_inner: Whether a function of tp-context is running: what it calls of torch is torch's own.
        outer_call: The call of ``nn.MultiheadAttention`` that is running.
        drops: Whether dropout drops: not in the check, as a slice draws other numbers than the whole.
        dropout_shapes: Where the check collects the shapes of what dropout gets; ``None`` outside of it.
        other_sizes: Where it collects the sizes of what might have been a slice, and was none.
    """

    cuts: Cuts | None = None
    is_inner: bool = False
    outer_call: OuterCall | None = None
    drops: bool = True
    dropout_shapes: list[torch.Size] | None = None
    other_sizes: set[int] | None = None


class SplitStates:
    """A stack of states, of which the last one holds.

    There is one for the process, not for the thread: autograd runs recomputed forwards in threads of its own.
    """

    def __init__(self) -> None:
        self._stack = [SplitState()]

    @property
    def current(self) -> SplitState:
        return self._stack[-1]

    def slice_of(self, tokens: int) -> Cut | None:
        """Return the cut of which this rank's slice has as many tokens; ``None`` for what is no slice.

        It is asked of keys, queries, labels and the like, whose dimension is known and whose meaning is not:
        latents, frames or a picture's patches are attended to as well. The check collects such sizes, and
        slices are cut to have none of them (`OtherSizes`).
        """
        state = self.current
        if state.cuts is None:
            cut = None
        else:
            cut = state.cuts.of_slice(tokens)
        if cut is None and state.other_sizes is not None:
            state.other_sizes.add(tokens)
        return cut

    @contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """Let a state hold that has some attributes changed."""
        self._stack.append(replace(self._stack[-1], **changes))
        try:
            yield
        finally:
            self._stack.pop()


split_states = SplitStates()


@explain_arguments("gather(slices)")
def gather(slices: Tensor, dim: int = 1) -> Tensor:
    """Return whole sequences from each rank's slices, in a step that the backend ``context`` runs.

    For what needs all positions and is not attention, such as a mean over the sequence. Elsewhere sequences
    are whole, and the tensor comes back as it is.

    Args:
        slices: A tensor with the slice along ``dim``, for example (batch, tokens, features).
        dim: The dimension of the sequence.

    Returns:
        The whole, equal on all ranks that share it. Gradients of all these ranks are added.

    Raises:
        StepError: The dimension has another length than the slices of the batch.

    Collectives: an all-gather in forward, a sum in backward, over the ranks of a sequence.
    Ranks hold: sharded -> replicated; gradient: partial -> sharded.

    Example:
        >>> gather(torch.ones(1, 3)).shape
        torch.Size([1, 3])
    """
    if not isinstance(slices, Tensor):
        msg = f"gather() takes a tensor, such as (batch, tokens, features), got {type(slices).__name__}"
        raise StepError(msg)
    cuts = split_states.current.cuts
    if cuts is None:
        return slices
    cut = cuts.of_slice(slices.size(dim))
    if cut is None:
        msg = (
            f"gather() got a tensor of shape {tuple(slices.shape)}; its dimension {dim} is no slice of the "
            f"batch's sequences: these have {sorted(cuts._by_tokens)} tokens here"
        )
        raise StepError(msg)
    return cut.gather(slices, dim)


@explain_arguments("positions(tokens.size(1))")
def positions(tokens: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the positions in the whole sequence of the tokens that this rank has.

    Use it in place of ``torch.arange(tokens)`` for position embeddings. Where sequences are whole it is the
    same.

    Args:
        tokens: The number of tokens that the model sees here.
        device: The device of the result.

    Returns:
        The positions, as a tensor of shape (tokens,).

    Example:
        >>> positions(3)
        tensor([0, 1, 2])
    """
    if isinstance(tokens, Tensor | float) or tokens < 0:
        got = repr(tokens)
        if isinstance(tokens, Tensor):
            got = f"a tensor of shape {tuple(tokens.shape)}"
        msg = f"positions() takes a number of tokens, got {got}; write positions(tokens.size(1))"
        raise StepError(msg)
    cut = split_states.slice_of(tokens)
    if cut is None:
        return torch.arange(tokens, device=device)
    return cut.index(torch.device("cpu") if device is None else torch.device(device))
