"""For authors of backends and callbacks: what training on or with each must do, as tests to subclass.

Needs ``pip install 'tp-trainer[testing]'``.
"""

import pytest

# Before the first import of a module with assertions, so that they explain themselves.
pytest.register_assert_rewrite(
    "tp_trainer.testing._callback_conformance",
    "tp_trainer.testing._conformance",
    "tp_trainer.testing._weights",
)

from tp_trainer.testing._callback_conformance import CallbackConformance  # noqa: E402 - see above
from tp_trainer.testing._conformance import TrainingConformance  # noqa: E402 - see above

__all__ = ["CallbackConformance", "TrainingConformance"]
