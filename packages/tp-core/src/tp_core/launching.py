"""What a launcher and the ranks that it starts tell each other, for launchers and for trainers."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._launch._cores import available_cores as available_cores
    from tp_core._launch._environment import ON_TERMINAL as ON_TERMINAL
    from tp_core._launch._environment import check_process_count as check_process_count
    from tp_core._launch._rank_exit import EXIT_REPORT as EXIT_REPORT
    from tp_core._launch._rank_exit import LOST_RANK as LOST_RANK
    from tp_core._launch._rank_exit import ExitReport as ExitReport
    from tp_core._launch._rank_exit import discard_closed_terminal as discard_closed_terminal
    from tp_core._launch._rank_exit import read_exit_report as read_exit_report
    from tp_core._launch._rank_exit import tells_of_lost_rank as tells_of_lost_rank
    from tp_core._launch._rank_exit import write_exit_report as write_exit_report
    from tp_core.sessions._process_group import EXITED_KEY as EXITED_KEY
    from tp_core.sessions._process_group import has_exited as has_exited
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._launch._cores": ["available_cores"],
            "tp_core._launch._environment": ["ON_TERMINAL", "check_process_count"],
            "tp_core.sessions._process_group": ["EXITED_KEY", "has_exited"],
            "tp_core._launch._rank_exit": [
                "EXIT_REPORT",
                "LOST_RANK",
                "ExitReport",
                "discard_closed_terminal",
                "read_exit_report",
                "tells_of_lost_rank",
                "write_exit_report",
            ],
        },
    )
