"""Test tools for authors of plugins: conformance tests, fake distributions, and ranks with a deadline."""

import pytest

# Before the first import of these modules: pytest rewrites assertions at import, to show their values.
pytest.register_assert_rewrite(
    "tp_core.testing._adapter_conformance",
    "tp_core.testing._backend_checks",
    "tp_core.testing._backend_conformance",
    "tp_core.testing._command_conformance",
    "tp_core.testing._engine_conformance",
    "tp_core.testing._kit",
    "tp_core.testing._logger_conformance",
    "tp_core.testing._plugin_conformance",
    "tp_core.testing._wrapper_checks",
)

# ruff: noqa: E402
from tp_core._launch._ranks import RankOutcome, RankPool, free_port, rank_outcomes, run_ranks
from tp_core.testing._adapter_conformance import AdapterConformance
from tp_core.testing._backend_conformance import BackendConformance
from tp_core.testing._command_conformance import CommandConformance
from tp_core.testing._engine_conformance import EngineConformance
from tp_core.testing._kit import ConformanceKit, DeclaredLimits, make_job
from tp_core.testing._logger_conformance import LoggerConformance
from tp_core.testing._plugin_conformance import PluginConformance, fake_distribution
from tp_core.testing._wrapper_checks import GpuWrapperConformance, WrapperConformance

__all__ = [
    "AdapterConformance",
    "BackendConformance",
    "CommandConformance",
    "ConformanceKit",
    "DeclaredLimits",
    "EngineConformance",
    "GpuWrapperConformance",
    "LoggerConformance",
    "PluginConformance",
    "RankOutcome",
    "RankPool",
    "WrapperConformance",
    "fake_distribution",
    "free_port",
    "make_job",
    "rank_outcomes",
    "run_ranks",
]
