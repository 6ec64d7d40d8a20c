"""The dropout of attention weights, the same as on one device."""

import torch
from torch import Tensor
from tp_core.random import device_rng_state, preserve_torch_rng_state, set_device_rng_state

from tp_context._attention_inputs import Inputs, Rules


class DropoutMask:
    """Dropout mask: every rank draws that of whole sequences and takes its part, so it matches one device.

    It is drawn again for the backward pass, so that it need not be saved.
    """

    def __init__(self, inputs: Inputs, rules: Rules, heads: tuple[slice, int] | None = None) -> None:
        if rules.rows is None:
            queries = inputs.query.size(-2)
        else:
            queries = rules.rows.length
        if rules.keys is None:
            keys = inputs.key.size(-2)
        else:
            keys = rules.keys.length
        self.rows = rules.rows
        self.heads = heads
        self.keeps = 1 - rules.dropout
        self.device = inputs.query.device
        self.shape = [*inputs.query.shape[:-2], queries, keys]
        self.state: Tensor | None = None

    def draw(self) -> Tensor:
        """Return the noise of this rank's rows or heads; the first time it moves the generator on."""
        if self.state is None:
            self.state = device_rng_state(self.device)
            return self._drawn()
        with preserve_torch_rng_state([self.device]):
            set_device_rng_state(self.device, self.state)
            return self._drawn()

    def _drawn(self) -> Tensor:
        noise = torch.empty(self.shape, dtype=torch.bool, device=self.device).bernoulli_(self.keeps)
        if self.heads is not None:
            mine, each = self.heads
            return padded(noise[:, mine], 1, each)
        if self.rows is not None:
            return self.rows.take(noise, -2)
        return noise


def padded(tensor: Tensor, dim: int, count: int) -> Tensor:
    missing = count - tensor.size(dim)
    if not missing:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
