"""The resident copies of a module's parameters on one device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tp_core.replicas._coalesce import copy_coalesced, move_coalesced

__all__ = ["Mirror", "hand_out", "version_of"]


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return what changes when ``tensor`` does: its version counter, and where its data lies.

    Tensors made in inference mode have no counter; they count as changed each time.
    """
    if tensor.is_inference():
        return (id(object()), -1)
    return (tensor._version, tensor.data_ptr())


class Mirror:
    """The resident copies of parameters on one device.

    Args:
        device: Where the copies are. It may be the parameters' own device.

    Attributes:
        device: Where the copies are.
        parameters: What is copied.
        residents: The copies, in the same order.
        copied: How many tensors were copied so far, for tests and benchmarks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parameters: list[Parameter] = []
        self.residents: list[Tensor] = []
        self.copied = 0
        self._seen: list[Any] = []
        self._glance: Any = None

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Say which parameters to copy; copies of those that stay are kept."""
        known = {
            id(p): (r, seen) for p, r, seen in zip(self.parameters, self.residents, self._seen, strict=True)
        }
        self.parameters = list(parameters)
        pairs = [known.get(id(p)) or (self._empty_like(p), None) for p in parameters]
        self.residents = [resident for resident, _ in pairs]
        self._seen = [seen for _, seen in pairs]
        self._glance = None

    def refresh(self, *, force: bool = False) -> bool:
        """Copy the parameters that changed since the last time, or whose copies did.

        Returns:
            Whether a resident is another tensor now, because its parameter has another form.
        """
        if not force and self._glance is not None and self._look() == self._glance:
            return False
        stale = [i for i, seen in enumerate(self._seen) if force or seen != self._versions(i)]
        replaced = False
        for i in stale:
            if not _same_form(self.residents[i], self.parameters[i]):
                self.residents[i] = self._empty_like(self.parameters[i])
                replaced = True
        with torch.inference_mode(mode=False):
            copy_coalesced([self.residents[i] for i in stale], [self.parameters[i] for i in stale])
        for i in stale:
            self._seen[i] = self._versions(i)
        self.copied += len(stale)
        self._glance = self._look()
        return replaced

    def _look(self) -> Any:
        """Return all versions in a form that is quick to make and to compare."""
        try:
            return (
                [p._version for p in self.parameters],
                [r._version for r in self.residents],
                [p.data_ptr() for p in self.parameters],
            )
        except RuntimeError:  # a tensor that was made in inference mode
            return object()

    def _versions(self, i: int) -> Any:
        return version_of(self.parameters[i]), version_of(self.residents[i])

    def _empty_like(self, parameter: Parameter) -> Tensor:
        # In inference mode it would become a tensor that autograd refuses for ever.
        with torch.inference_mode(mode=False):
            return torch.empty_like(parameter.detach(), device=self.device)


def _same_form(resident: Tensor, parameter: Parameter) -> bool:
    return resident.shape == parameter.shape and resident.dtype == parameter.dtype


def hand_out(parameters: Sequence[Parameter], mirrors: Sequence[Mirror]) -> list[list[Tensor]]:
    """Return for each mirror its residents, tied by autograd to the parameters.

    They share storage and version counters with the residents, so that a later refresh reaches
    them, and a graph that was recorded before it notices.
    """
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    residents = [list(m.residents) for m in mirrors]
    if not trained:
        return residents
    flat = _HandOut.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        [[r[i] for i in trained] for r in residents], *[parameters[i] for i in trained]
    )
    for row, start in zip(residents, range(0, len(flat), len(trained)), strict=True):
        for i, tensor in zip(trained, flat[start : start + len(trained)], strict=True):
            row[i] = tensor
    return residents


class _HandOut(torch.autograd.Function):
    """Forward: the residents. Backward: the sum of their gradients, on the parameters' device."""

    @staticmethod
    def forward(ctx: Any, residents: list[list[Tensor]], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = parameters[0].device
        ctx.width = len(parameters)
        return tuple(tensor.detach() for row in residents for tensor in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        total: list[Tensor | None] = [None] * ctx.width
        for start in range(0, len(gradients), ctx.width):
            given = [(i, g) for i, g in enumerate(gradients[start : start + ctx.width]) if g is not None]
            _add(total, [i for i, _ in given], move_coalesced([g for _, g in given], ctx.home))
        return (None, *total)


def _add(total: list[Tensor | None], positions: list[int], gradients: list[Tensor]) -> None:
    """Add the gradients to the total at their positions; those of one kernel's kind together."""
    dense, old, new = [], [], []
    for i, gradient in zip(positions, gradients, strict=True):
        held = total[i]
        if held is None:
            total[i] = gradient
        elif held.layout is torch.strided and gradient.layout is torch.strided:
            dense.append(i)
            old.append(held)
            new.append(gradient)
        else:
            total[i] = held + gradient
    if dense:
        # Not in place: a gradient may belong to somebody else, and double backward records this.
        for i, added in zip(dense, torch._foreach_add(old, new), strict=True):
            total[i] = added
