"""The gradients of a prepared model: made, limited, measured."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from tp_core._contracts._session._state import StateSession

__all__ = ["GradientSession"]


class GradientSession(StateSession):
    """Adds gradients to parameters and looks at them; here on one device."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Add the gradients of ``loss``, over all data ranks, to the parameters.

        The gradient is that of the loss over the whole global batch, however unevenly its samples
        lie on the ranks.

        Args:
            loss: This rank's loss: a scalar tensor.
            retain_graph: Whether a further backward pass through the same graph follows.
            create_graph: Whether gradients are to be differentiated in turn.

        Collectives: the backend's gradient reduction, unless inside :meth:`no_sync`.
        """
        loss.backward(retain_graph=retain_graph or create_graph, create_graph=create_graph)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        """Return a context in which gradients are added up locally and not reduced over ranks."""
        return nullcontext()

    def clip_grad_norm(self, model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``.

        Args:
            model: The prepared model.
            max_norm: The largest norm; with ``inf`` nothing is scaled.
            norm_type: As in :meth:`grad_norm`, which a backend overrides where gradients are split.

        Returns:
            The norm before scaling, a scalar tensor that is equal on all ranks.

        Collectives: those of :meth:`grad_norm`.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, section 3.2.
        """
        norm = self.grad_norm(model, norm_type=norm_type)
        if max_norm != math.inf:
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def grad_norm(self, model: nn.Module, *, norm_type: float = 2.0) -> Tensor:
        """Return the global norm of the gradients: a scalar tensor, equal on all ranks.

        Every element of the whole model's gradient counts once, whichever ranks hold it.

        Args:
            model: The prepared model.
            norm_type: Which norm; ``inf`` for the largest absolute value.

        Collectives: none where each rank has all of the gradient; else a backend says which.
        """
        grads = [g for p in model.parameters() if (g := p.grad) is not None and g.numel()]
        if not all(type(g) is Tensor and g.is_cpu for g in grads) or not grads:
            return nn.utils.get_total_norm(grads, norm_type)
        # What that one comes to on the CPU, at a third of its cost in a small model.
        vector_norm = torch.linalg.vector_norm
        with torch.no_grad():
            norm: Tensor = vector_norm(torch.stack([vector_norm(g, norm_type) for g in grads]), norm_type)
        return norm

    def clip_grad_value(self, model: nn.Module, limit: float) -> None:
        """Bring every element of the gradients between ``-limit`` and ``limit``."""
        nn.utils.clip_grad_value_(model.parameters(), limit)

    @torch.no_grad()
    def scale_gradients(self, model: nn.Module, factor: float) -> None:
        """Multiply the gradients: to take back the scale of a loss, or to weigh several batches."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @torch.no_grad()
    def find_nonfinite(self, model: nn.Module) -> str | None:
        """Return a parameter that is trained and holds NaN or infinity on this rank, or ``None``.

        Its name is that in the user's own module. It is a question to one rank: no collectives.
        """
        named = self.unwrap(model).named_parameters()
        trained = [(n, _local_part(p)) for n, p in named if p.requires_grad]
        held = [(n, p) for n, p in trained if p.numel()]
        if not held or torch.isfinite(nn.utils.get_total_norm([p for _, p in held], math.inf)):
            return None
        from tp_core.state import plain_name

        return next(plain_name(n) for n, p in held if not torch.isfinite(p).all())


def _local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor; another tensor as it is."""
    # Not by its class, whose import costs most of a second.
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
