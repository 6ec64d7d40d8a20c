"""Ranks on this machine, started by a program itself: processes with a deadline, for proofs and tests.

What is sent to another process is pickled by value: functions of ``__main__`` and of tests arrive there, too.
"""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._launch._rank_pool import RankOutcome as RankOutcome
    from tp_core._launch._rank_pool import RankPool as RankPool
    from tp_core._launch._rank_pool import free_port as free_port
    from tp_core._launch._rank_pool import rank_outcomes as rank_outcomes
    from tp_core._launch._rank_pool import run_ranks as run_ranks
    from tp_core._pickles import dumps_by_value as dumps_by_value
    from tp_core._pickles import pickled_by_value as pickled_by_value
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._launch._rank_pool": [
                "RankOutcome",
                "RankPool",
                "free_port",
                "rank_outcomes",
                "run_ranks",
            ],
            "tp_core._pickles": ["dumps_by_value", "pickled_by_value"],  # workers take these alone
        },
    )
