"""For authors of plugins: conformance tests, fake distributions, and ranks with a deadline."""

import pytest

# Before the first import of a module with assertions, so that they explain themselves.
pytest.register_assert_rewrite(
    "tp_core.testing._adapter_conformance",
    "tp_core.testing._assess_checks",
    "tp_core.testing._bodies",
    "tp_core.testing._command_conformance",
    "tp_core.testing._engine_conformance",
    "tp_core.testing._gradient_checks",
    "tp_core.testing._loader_checks",
    "tp_core.testing._logger_conformance",
    "tp_core.testing._norm_checks",
    "tp_core.testing._plugin_conformance",
    "tp_core.testing._rank_checks",
    "tp_core.testing._session_checks",
    "tp_core.testing._state_checks",
    "tp_core.testing._wrapper_checks",
)

from tp_core.testing._adapter_conformance import AdapterConformance  # noqa: E402 - see above
from tp_core.testing._bodies import make_job  # noqa: E402
from tp_core.testing._command_conformance import CommandConformance  # noqa: E402
from tp_core.testing._conformance import BackendConformance  # noqa: E402
from tp_core.testing._distributions import fake_distribution  # noqa: E402
from tp_core.testing._engine_conformance import EngineConformance  # noqa: E402
from tp_core.testing._kit import ConformanceKit  # noqa: E402
from tp_core.testing._limits import DeclaredLimits  # noqa: E402
from tp_core.testing._logger_conformance import LoggerConformance  # noqa: E402
from tp_core.testing._plugin_conformance import PluginConformance  # noqa: E402
from tp_core.testing._ports import free_port  # noqa: E402
from tp_core.testing._rank_pool import RankPool  # noqa: E402
from tp_core.testing._ranks import RankOutcome, rank_outcomes, run_ranks  # noqa: E402
from tp_core.testing._wrapper_checks import GpuWrapperConformance, WrapperConformance  # noqa: E402

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
