"""Copies of a module's parameters that stay on one device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tp_core.replicas._coalesce import copy_coalesced, move_in_buckets

__all__ = [
    "ParameterMirror",
    "expose_to_autograd",
    "on_stream",
    "refresh",
    "side_stream",
    "version_of",
    "versions_of",
]


def versions_of(tensors: Sequence[Tensor]) -> Any:
    """Return the versions of all tensors in a form that is quick to make and to compare.

    Where one of them has no counter, the result compares unequal to every other.
    """
    try:
        return [t._version for t in tensors], [t.data_ptr() for t in tensors]
    except RuntimeError:  # a tensor that was made in inference mode
        return object()


def version_of(tensor: Tensor) -> Any:
    """Return what changes when ``tensor`` does: its version counter and the address of its data.

    Tensors made in inference mode have no counter; they count as changed each time.
    """
    if tensor.is_inference():
        return object()  # itself, not its id: the next one may have the same
    return (tensor._version, tensor.data_ptr())


class ParameterMirror:
    """Copies of parameters that stay on one device.

    Args:
        device: Where the copies are; it may be the parameters' own device.
        force_flat: Transfer copies and gradients as between two devices, whatever they are.

    Attributes:
        device: Where the copies are.
        parameters: The parameters that are copied.
        copies: The copies, in the same order.
        copied: How many tensors were copied so far, for tests and benchmarks.
    """

    def __init__(self, device: torch.device, *, force_flat: bool = False) -> None:
        self.device = device
        self.force_flat = force_flat
        self.parameters: list[Parameter] = []
        self.copies: list[Tensor] = []
        self.copied = 0
        self._seen: list[Any] = []
        self._suspected: set[int] = set()
        self._unchanged: Any = None

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Set the parameters to copy; copies of those that were there before are kept."""
        known = {
            id(p): (r, seen) for p, r, seen in zip(self.parameters, self.copies, self._seen, strict=True)
        }
        self.parameters = list(parameters)
        pairs = [known.get(id(p)) or (self._empty_like(p), None) for p in parameters]
        self.copies = [copy for copy, _ in pairs]
        self._seen = [seen for _, seen in pairs]
        self._suspected.clear()
        self._unchanged = None

    def suspect(self, positions: Iterable[int]) -> None:
        """Copy the parameters at these positions next time, whatever their versions are."""
        self._suspected.update(positions)

    def take_stale(self, now: Any, *, force: bool = False) -> tuple[list[int], bool]:
        """Find which parameters changed since the last time, or their copies; `copy` must follow.

        Args:
            now: `versions_of` of the parameters, which all mirrors share.
            force: Take all of them for changed.

        Returns:
            Their positions, and whether a copy is another tensor now, because its parameter has another
            shape or dtype.
        """
        suspected = self._suspected
        if not force and not suspected and (now, self._copy_versions()) == self._unchanged:
            return [], False
        stale = [
            i for i, seen in enumerate(self._seen) if force or i in suspected or seen != self._versions(i)
        ]
        suspected.clear()
        replaced = False
        for i in stale:
            if not _same_form(self.copies[i], self.parameters[i]):
                self.copies[i] = self._empty_like(self.parameters[i])
                replaced = True
        return stale, replaced

    def note_copied(self, now: Any, stale: Sequence[int]) -> None:
        """Note that these copies are equal to their parameters."""
        for i in stale:
            self._seen[i] = self._versions(i)
        self.copied += len(stale)
        self._unchanged = now, self._copy_versions()

    def _copy_versions(self) -> list[int]:
        return [r._version for r in self.copies]  # they are never made in inference mode

    def _versions(self, i: int) -> Any:
        return version_of(self.parameters[i]), version_of(self.copies[i])

    def _empty_like(self, parameter: Parameter) -> Tensor:
        # Autograd refuses tensors that were made in inference mode.
        with torch.inference_mode(mode=False):
            return torch.empty_like(parameter.detach(), device=self.device)


def refresh(mirrors: Sequence[ParameterMirror], now: Any, *, forced: Sequence[bool]) -> list[bool]:
    """Copy what changed into all mirrors of the same parameters, together where it is the same.

    Args:
        mirrors: The mirrors.
        now: `versions_of` of the parameters.
        forced: For each mirror, whether to copy everything.

    Returns:
        For each mirror, whether a copy is another tensor now.
    """
    found = [mirror.take_stale(now, force=force) for mirror, force in zip(mirrors, forced, strict=True)]
    groups: dict[tuple[int, ...], list[ParameterMirror]] = {}
    for mirror, (stale, _) in zip(mirrors, found, strict=True):
        if stale:
            groups.setdefault(tuple(stale), []).append(mirror)
    for positions, group in groups.items():
        first = group[0]
        with torch.inference_mode(mode=False):
            copy_coalesced(
                [[mirror.copies[i] for i in positions] for mirror in group],
                [first.parameters[i] for i in positions],
                force_flat=first.force_flat,
            )
        for mirror in group:
            mirror.note_copied(now, positions)
    return [replaced for _, replaced in found]


def _same_form(copy: Tensor, parameter: Parameter) -> bool:
    return copy.shape == parameter.shape and copy.dtype == parameter.dtype


def expose_to_autograd(
    parameters: Sequence[Parameter], mirrors: Sequence[ParameterMirror]
) -> list[list[Tensor]]:
    """Return for each mirror its copies, tied by autograd to the parameters.

    They share storage and version counters with the copies, so that a later refresh reaches
    them, and a graph that was recorded before it notices.
    """
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    copies = [list(m.copies) for m in mirrors]
    if not trained:
        return copies
    flat = _ExposeToAutograd.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        [[r[i] for i in trained] for r in copies],
        any(m.force_flat for m in mirrors),
        *[parameters[i] for i in trained],
    )
    for row, start in zip(copies, range(0, len(flat), len(trained)), strict=True):
        for i, tensor in zip(trained, flat[start : start + len(trained)], strict=True):
            row[i] = tensor
    return copies


class _ExposeToAutograd(torch.autograd.Function):
    """Forward: the copies. Backward: the sum of their gradients, on the parameters' device."""

    @staticmethod
    def forward(
        ctx: Any, copies: list[list[Tensor]], force_flat: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.force_flat = force_flat
        ctx.set_materialize_grads(False)
        ctx.home = parameters[0].device
        ctx.stream = side_stream(ctx.home)
        ctx.width = len(parameters)
        return tuple(tensor.detach() for row in copies for tensor in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        total = _Sum(ctx.width)
        with on_stream(ctx.stream):
            for start in range(0, len(gradients), ctx.width):
                given = [(i, g) for i, g in enumerate(gradients[start : start + ctx.width]) if g is not None]
                total.add(given, ctx.home, force_flat=ctx.force_flat)
        return (None, None, *total.values)


class _Sum:
    """A sum of gradients, parameter by parameter, that holds one transfer more than itself.

    Args:
        width: How many parameters there are.

    Attributes:
        values: The sums; ``None`` where there was no gradient.
    """

    def __init__(self, width: int) -> None:
        self.values: list[Tensor | None] = [None] * width
        self._own: set[int] = set()  # positions whose value is not shared

    def add(self, given: Sequence[tuple[int, Tensor]], home: torch.device, *, force_flat: bool) -> None:
        """Add a replica's gradients, which are pairs of a position and a tensor."""
        moved = set()
        for bucket, arrived in move_in_buckets([g for _, g in given], home, force_flat=force_flat):
            moved.update(bucket)
            are_new = all(tensor is not given[k][1] for k, tensor in zip(bucket, arrived, strict=True))
            self._add([given[k][0] for k in bucket], arrived, are_new=are_new)
        near = [pair for k, pair in enumerate(given) if k not in moved]
        self._add([i for i, _ in near], [g for _, g in near], are_new=False)

    def _add(self, positions: list[int], gradients: list[Tensor], *, are_new: bool) -> None:
        in_place: list[tuple[int, Tensor, Tensor]] = []
        anew: list[tuple[int, Tensor, Tensor]] = []
        for i, gradient in zip(positions, gradients, strict=True):
            held = self.values[i]
            if held is None:
                self.values[i] = gradient
                if are_new:
                    self._own.add(i)
            elif held.layout is not torch.strided or gradient.layout is not torch.strided:
                self.values[i] = held + gradient
            elif i in self._own and not torch.is_grad_enabled():  # double backward records the sum
                in_place.append((i, held, gradient))
            else:
                anew.append((i, held, gradient))
        # One kernel for all of a kind.
        if in_place:
            torch._foreach_add_([held for _, held, _ in in_place], [g for _, _, g in in_place])
        if anew:
            sums = torch._foreach_add([held for _, held, _ in anew], [g for _, _, g in anew])
            for (i, _, _), added in zip(anew, sums, strict=True):
                self.values[i] = added
                self._own.add(i)


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream on a device, if it is not the one that all threads have."""
    if device.type == "cpu":
        return None
    stream = torch.accelerator.current_stream(device)
    return None if stream.stream_id == 0 else stream


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work on a stream; what is done afterwards on this thread's own one waits for that.

    For backward: autograd lets later nodes wait for the stream of the node's own device alone.
    """
    if stream is None:
        yield
        return
    own = torch.accelerator.current_stream()
    with stream:
        yield
    own.wait_stream(stream)
