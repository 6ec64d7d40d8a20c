"""A compiled wrapper computes what it did before, with parameters that are shared and that are copied."""

import pytest
from tp_dp_gather import DataParallel
from tp_testing import WrapperConformance


@pytest.mark.slow
class TestCompiled(WrapperConformance):
    def wrap(self, module, devices):
        return DataParallel(module, devices)

    def output(self, wrapper, x):
        return wrapper(x)
