"""A compiled wrapper computes what it did before, with parameters that are shared and that are copied."""

import shutil

import pytest
import torch
from torch import nn
from tp_testing import WrapperConformance
from tp_tuple import TupleParallel


@pytest.mark.slow
class TestCompiled(WrapperConformance):
    def wrap(self, module, devices):
        return TupleParallel(module, devices)

    def output(self, wrapper, x):
        return torch.cat(wrapper(tuple(x.tensor_split(2))))

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
    @pytest.mark.parametrize("force_copies", [True, pytest.param(False, marks=pytest.mark.nightly)])
    def test_machine_code_is_right(self, force_copies):
        torch.compiler.reset()
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        wrapper = self.wrapped(module, force_copies)
        wrapper.compile()
        self.check(torch.compile(wrapper), module)
