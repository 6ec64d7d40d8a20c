"""Ranks on this machine, started by a program itself: processes with a deadline, for proofs and tests.

What is sent to another process is pickled by value: functions of ``__main__`` and of tests arrive there, too.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._launch._ranks import RankOutcome as RankOutcome
    from tp_core._launch._ranks import RankPool as RankPool
    from tp_core._launch._ranks import dumps_by_value as dumps_by_value
    from tp_core._launch._ranks import free_port as free_port
    from tp_core._launch._ranks import pickled_by_value as pickled_by_value
    from tp_core._launch._ranks import rank_outcomes as rank_outcomes
    from tp_core._launch._ranks import run_ranks as run_ranks
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._launch._ranks": [
                "RankOutcome",
                "RankPool",
                "dumps_by_value",
                "free_port",
                "pickled_by_value",
                "rank_outcomes",
                "run_ranks",
            ],
        },
    )
