"""Replicas run at the same time, so each of their operations gets one thread."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread(one_thread_per_operation):
    return one_thread_per_operation
