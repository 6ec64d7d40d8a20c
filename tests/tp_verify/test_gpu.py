"""``tp verify`` without a program trains on the accelerators that are here, too."""

import pytest

from tests.accelerator import GPU
from tests.run_tp import run

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
def test_every_installed_backend_is_tried_on_the_accelerator(capfd):
    status = run(["verify"])
    printed = capfd.readouterr()
    assert status == 0, printed.out
    assert GPU in printed.out
