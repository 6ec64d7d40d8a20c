"""Conformance tests for authors of backends and callbacks, to be subclassed.

Needs ``pip install 'tp-trainer[testing]'``.
"""

import pytest

# Before the import of the modules: pytest rewrites assertions only then, to show values in failures.
pytest.register_assert_rewrite(
    "tp_trainer.testing._callback_conformance",
    "tp_trainer.testing._conformance",
)

from tp_trainer.testing._callback_conformance import CallbackConformance  # noqa: E402 - see above
from tp_trainer.testing._conformance import TrainingConformance  # noqa: E402 - see above

__all__ = ["CallbackConformance", "TrainingConformance"]
