"""Starting the processes of a job: ``tp launch``, and ``tp jobs``, ``tp logs``, ``tp stop``.

The processes themselves are started by torch's elastic launcher, as ``torchrun`` does. What is
added around it: checks before anything starts, whole lines from every rank, a short account of the
rank that failed first, and jobs that outlive the terminal. Nothing here imports torch before a job
is started, and the command line only when a command is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["jobs_app", "launch_app", "logs_app", "stop_app"]


def launch_app() -> "typer.Typer":
    """Return ``tp launch`` as an application of its own."""
    from tp_trainer._launch import _cli

    return _cli.launch_app()


def jobs_app() -> "typer.Typer":
    """Return ``tp jobs`` as an application of its own."""
    from tp_trainer._launch import _cli

    return _cli.jobs_app()


def logs_app() -> "typer.Typer":
    """Return ``tp logs`` as an application of its own."""
    from tp_trainer._launch import _cli

    return _cli.logs_app()


def stop_app() -> "typer.Typer":
    """Return ``tp stop`` as an application of its own."""
    from tp_trainer._launch import _cli

    return _cli.stop_app()
