"""Test tools for authors of plugins: conformance kits, real ranks with a deadline, fake distributions.

A kit is a class of tests: subclass it in a test module, name what is to be tested, and pytest runs it.
"""

import sys
from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

# Before the first import of these modules: pytest rewrites assertions at import, to show their values. The
# command ``tp`` imports this package to find its plugin, and needs no pytest.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        "tp_testing._adapter_conformance",
        "tp_testing._backend_checks",
        "tp_testing._backend_conformance",
        "tp_testing._callback_conformance",
        "tp_testing._command_conformance",
        "tp_testing._engine_conformance",
        "tp_testing._kit",
        "tp_testing._logger_conformance",
        "tp_testing._plugin_conformance",
        "tp_testing._training_conformance",
        "tp_testing._user_state_conformance",
        "tp_testing._wrapper_checks",
    )

if TYPE_CHECKING:
    from tp_core.ranks import RankOutcome as RankOutcome
    from tp_core.ranks import RankPool as RankPool
    from tp_core.ranks import free_port as free_port
    from tp_core.ranks import rank_outcomes as rank_outcomes
    from tp_core.ranks import run_ranks as run_ranks

    from tp_testing._adapter_conformance import AdapterConformance as AdapterConformance
    from tp_testing._backend_conformance import BackendConformance as BackendConformance
    from tp_testing._callback_conformance import CallbackConformance as CallbackConformance
    from tp_testing._command_conformance import CommandConformance as CommandConformance
    from tp_testing._engine_conformance import EngineConformance as EngineConformance
    from tp_testing._kit import ConformanceKit as ConformanceKit
    from tp_testing._kit import DeclaredLimits as DeclaredLimits
    from tp_testing._kit import make_job as make_job
    from tp_testing._logger_conformance import LoggerConformance as LoggerConformance
    from tp_testing._plugin_conformance import PluginConformance as PluginConformance
    from tp_testing._plugin_conformance import fake_distribution as fake_distribution
    from tp_testing._training_conformance import TrainingConformance as TrainingConformance
    from tp_testing._user_state_conformance import UserStateConformance as UserStateConformance
    from tp_testing._wrapper_checks import GpuWrapperConformance as GpuWrapperConformance
    from tp_testing._wrapper_checks import WrapperConformance as WrapperConformance

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.ranks": ["RankOutcome", "RankPool", "free_port", "rank_outcomes", "run_ranks"],
            "tp_testing._adapter_conformance": ["AdapterConformance"],
            "tp_testing._backend_conformance": ["BackendConformance"],
            "tp_testing._callback_conformance": ["CallbackConformance"],
            "tp_testing._command_conformance": ["CommandConformance"],
            "tp_testing._engine_conformance": ["EngineConformance"],
            "tp_testing._kit": ["ConformanceKit", "DeclaredLimits", "make_job"],
            "tp_testing._logger_conformance": ["LoggerConformance"],
            "tp_testing._plugin_conformance": ["PluginConformance", "fake_distribution"],
            "tp_testing._training_conformance": ["TrainingConformance"],
            "tp_testing._user_state_conformance": ["UserStateConformance"],
            "tp_testing._wrapper_checks": ["GpuWrapperConformance", "WrapperConformance"],
        },
    )
