"""What users hang on parameters and optimizers counts on each backend as on one device, or is refused."""

import pytest
from tp_testing import UserStateConformance

from tests.installed import backend_class


class TestSingle(UserStateConformance):
    backend = backend_class("single")


@pytest.mark.slow
class TestDdp(UserStateConformance):
    backend = backend_class("ddp")
    processes = 2
    limits = {
        "test_it_is_carried_or_refused[nonlinear gradient hooks before]": (
            "a hook sees the gradient of this rank's share, before the mean over the ranks"
        )
    }


@pytest.mark.slow
class TestFsdp(UserStateConformance):
    backend = backend_class("fsdp")
    processes = 2
