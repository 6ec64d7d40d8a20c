"""Quantized weights are refused by name, where a plan would cut them."""

import pytest
import torch
import tp_shard as ts
from torch import Tensor, nn
from tp_core.errors import ModelError


class Packed(Tensor):
    """Integers with scales, in one tensor as torchao has them."""

    @staticmethod
    def __new__(cls, values, scales):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype)

    def __init__(self, values, scales):
        self.values, self.scales = values, scales

    def __tensor_flatten__(self):
        return ["values", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].values, args[0].scales)  # nn.Parameter asks for a detached one


def test_a_quantized_weight_is_refused_before_a_plan_is_searched():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    packed = Packed(torch.ones(8, 4, dtype=torch.int8), torch.ones(8, 1))
    model[0].weight = nn.Parameter(packed, requires_grad=False)
    words = r"'0.weight' is quantized \(Packed\), and tp_shard cannot cut its integers.*'single' or 'ddp'"
    with pytest.raises(ModelError, match=words):
        ts.plans.auto(model, torch.ones(2, 4), verbose=False)
