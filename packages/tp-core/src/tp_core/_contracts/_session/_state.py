"""The state of a prepared model, with the names of the user's own module."""

from collections.abc import Mapping

from torch import Tensor, nn

from tp_core._tensors._slices import TensorSlice

__all__ = ["StateSession"]


class StateSession:
    """Reads and writes the whole model's state; here where each rank has all of it."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        return model

    def sync_buffers(self, model: nn.Module) -> None:
        """Give all data ranks the same buffers, before an evaluation or a save."""

    def as_slice(self, parameter: Tensor, value: Tensor | TensorSlice) -> Tensor | TensorSlice:  # noqa: ARG002 - contract
        """Return which part of a whole tensor ``value`` is, for a checkpoint.

        Args:
            parameter: A parameter or buffer of the model.
            value: A tensor of its shape: its own values, or a part of the optimizer's state. Where the
                parameter is a DTensor, what this rank holds of such a tensor.

        Returns:
            ``value`` itself where each rank has the whole, or a slice around it.
        """
        return value

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, on every rank.

        Collectives: where parameters are DTensors, those that put them together.
        """
        from tp_core.state import plain_state, whole

        return {n: whole(v) for n, v in plain_state(self.unwrap(model).state_dict()).items()}

    def state_parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state, with the user's own module's names, not put together yet.

        A tensor has its whole shape. Where it is a DTensor, or has a ``full_tensor()`` of its own as a tensor
        on the meta device may, every rank gives it to `tp_core.state.whole`, which puts it together. So a
        state is written of which no device could hold all.

        Collectives: those of :meth:`model_state`, where a backend has its own and not this one.
        """
        from tp_core.state import plain_state

        if type(self).model_state is not StateSession.model_state:
            return self.model_state(model)
        return plain_state(self.unwrap(model).state_dict())

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a state that :meth:`model_state` of any backend returned.

        Raises:
            RuntimeError: Names or shapes do not fit the model (torch's own error).
        """
        from tp_core.state import load_whole_state

        load_whole_state(self.unwrap(model), state)
