"""What every backend must do, as tests that its author subclasses."""

from tp_core.testing._assess_checks import AssessChecks
from tp_core.testing._caller_checks import CallerChecks
from tp_core.testing._exchange_checks import ExchangeChecks
from tp_core.testing._loader_checks import LoaderChecks
from tp_core.testing._norm_checks import NormChecks
from tp_core.testing._rank_checks import RankChecks
from tp_core.testing._script_checks import ScriptChecks
from tp_core.testing._session_checks import SessionChecks
from tp_core.testing._state_checks import StateChecks
from tp_core.testing._step_checks import StepChecks

__all__ = ["BackendConformance"]


class BackendConformance(
    AssessChecks,
    CallerChecks,
    ExchangeChecks,
    LoaderChecks,
    NormChecks,
    RankChecks,
    ScriptChecks,
    SessionChecks,
    StateChecks,
    StepChecks,
):
    """What every backend must do. A subclass of this, in a test module, names the backend.

    The proof is equality: losses, gradients and weights are those of one device that sees the whole
    batch, in double precision, of a model with tied, frozen and tiny parameters and buffers. Ranks
    exchange what they promise, states are whole, assessing changes nothing, and sessions follow
    each other in one process. The tests of a class share their ranks.

    Example:
        >>> class TestMine(BackendConformance):
        ...     backend = MyBackend
    """
