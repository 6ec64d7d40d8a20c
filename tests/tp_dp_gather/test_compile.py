"""A compiled wrapper computes what it did before, with parameters that are shared and that are copied."""

import pytest
from tp_core.testing import WrapperConformance
from tp_dp_gather import DataParallel

pytestmark = WrapperConformance.pytestmark


@pytest.mark.slow
class TestCompiled(WrapperConformance):
    def wrap(self, module, devices):
        return DataParallel(module, devices)

    def output(self, wrapper, x):
        return wrapper(x)


def test_one_that_is_compiled_in_place_is_right():
    TestCompiled().test_a_wrapper_that_is_compiled_in_place_is_right("aot_eager", force_copies=False)
