"""The commands ``tp launch``, ``tp jobs``, ``tp logs`` and ``tp stop``, written for typer."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from tp_core.errors import ConfigError

from tp_trainer._launch._request import LaunchRequest, parse_rdzv_conf

__all__ = [
    "LAUNCH_CONTEXT",
    "jobs",
    "jobs_app",
    "launch",
    "launch_app",
    "logs",
    "logs_app",
    "stop",
    "stop_app",
]

# Parsing ends at the first positional argument: what follows is the script's, options included.
LAUNCH_CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}

# The variables are torchrun's own, which operators such as Kubeflow's set in the containers that they start.
_MANY = "Several hosts"
_REF = "The id of the job, the start of it, its name, or 'last'."


def launch(
    script: Annotated[str, typer.Argument(help="The program, or with -m the module.")],
    args: Annotated[list[str] | None, typer.Argument(help="Passed to the program as they are.")] = None,
    *,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            "--nproc-per-node",
            "-n",
            envvar="PET_NPROC_PER_NODE",
            help="Processes on this host; auto: one per device.",
        ),
    ] = "auto",
    module: Annotated[bool, typer.Option("--module", "-m", help="Run a module, as python -m does.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background and print the id of the job.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="A name for the detached job.")] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            envvar="PET_MAX_RESTARTS", help="How often to start all processes again after a failure."
        ),
    ] = 0,
    log_dir: Annotated[
        str | None, typer.Option(help="Keep the logs of the processes in this directory.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="Seconds that processes may take to end when asked to.")
    ] = 30.0,
    monitor_interval: Annotated[
        float, typer.Option(help="Seconds between two looks at the processes.")
    ] = 0.1,
    nnodes: Annotated[
        str,
        typer.Option(envvar="PET_NNODES", help="Hosts of the job: 2, or 1:4.", rich_help_panel=_MANY),
    ] = "1",
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="PET_RDZV_ENDPOINT", help="HOST:PORT where the hosts meet.", rich_help_panel=_MANY
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(
            envvar="PET_RDZV_ID", help="The name of the job, the same on all hosts.", rich_help_panel=_MANY
        ),
    ] = None,
    rdzv_backend: Annotated[
        str | None,
        typer.Option(
            envvar="PET_RDZV_BACKEND", help="How hosts meet: c10d (default) or static.", rich_help_panel=_MANY
        ),
    ] = None,
    rdzv_conf: Annotated[
        str,
        typer.Option(
            envvar="PET_RDZV_CONF", help="More for the rendezvous: key=value,..", rich_help_panel=_MANY
        ),
    ] = "",
    node_rank: Annotated[
        int | None,
        typer.Option(envvar="PET_NODE_RANK", help="Static: the number of this host.", rich_help_panel=_MANY),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(envvar="PET_MASTER_ADDR", help="Static: the address of host 0.", rich_help_panel=_MANY),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(envvar="PET_MASTER_PORT", help="Static: the port on host 0.", rich_help_panel=_MANY),
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option(
            envvar="PET_LOCAL_ADDR",
            help="The address of this host for the others.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    bind_addr: Annotated[
        str | None,
        typer.Option(help="Listen at this address of this host alone.", rich_help_panel=_MANY),
    ] = None,
    host_timeout_s: Annotated[
        float,
        typer.Option(help="Seconds after which a silent host counts as lost.", rich_help_panel=_MANY),
    ] = 15.0,
) -> None:
    """Run a script on several processes, of this host and of others."""

    def body() -> int:
        if name is not None and not detach:
            msg = f"--name is for a job in the background, and this one is not: add --detach; got {name!r}"
            raise ConfigError(msg)
        request = LaunchRequest(
            script=script,
            args=tuple(args or ()),
            module=module,
            nproc_per_node=nproc_per_node,
            nnodes=nnodes,
            node_rank=node_rank,
            rdzv_backend=rdzv_backend,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            rdzv_conf=parse_rdzv_conf(rdzv_conf),
            master_addr=master_addr,
            master_port=master_port,
            max_restarts=max_restarts,
            monitor_interval_s=monitor_interval,
            log_dir=log_dir,
            local_addr=local_addr,
            bind_addr=bind_addr,
            grace_s=grace_s,
            host_timeout_s=host_timeout_s,
            name=name,
        )
        if detach:
            from tp_trainer._launch._jobs._detach import detach as start

            shown = [*(["-m"] if module else []), script, *(args or ())]
            typer.echo(start(request, command=tuple(shown)).id)
            return 0
        from tp_trainer._launch._ranks._outcome import report
        from tp_trainer._launch._run import execute

        outcome = execute(request)
        report(outcome)
        return outcome.status

    _exit_with(body)


def jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget the jobs that have ended, and their logs.")
    ] = False,
) -> None:
    """List the detached jobs."""

    def body() -> int:
        from tp_trainer._launch._jobs._show import print_jobs
        from tp_trainer._launch._jobs._store import damaged_jobs, is_running, list_jobs, remove_job

        for line in damaged_jobs():
            typer.echo(f"tp jobs: left out: {line}", err=True)
        if clear:
            # Nobody knows whether a damaged one has ended.
            known = [job for job in list_jobs() if job.status().state != "damaged"]
            ended = [job for job in known if not is_running(job)]
            for job in ended:
                remove_job(job)
            typer.echo(f"removed {len(ended)} ended jobs", err=True)
        found = list_jobs()
        if as_json:
            typer.echo(json.dumps([job.to_dict() for job in found], indent=2))
        elif found:
            print_jobs(found)
        else:
            typer.echo("no jobs; tp launch --detach starts one", err=True)
        return 0

    _exit_with(body)


def logs(
    job: Annotated[str, typer.Argument(help=_REF)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
) -> None:
    """Print what a detached job has written."""

    def body() -> int:
        from tp_trainer._launch._jobs._show import log_chunks
        from tp_trainer._launch._jobs._store import find_job

        for chunk in log_chunks(find_job(job), follow=follow, lines=lines):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        return 0

    _exit_with(body)


def stop(
    job: Annotated[str, typer.Argument(help=_REF)],
    grace_s: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Seconds before all of its processes are killed; as launched if not given."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """End a detached job and all of its processes."""

    def body() -> int:
        from tp_trainer._launch._jobs._detach import stop as end
        from tp_trainer._launch._jobs._store import find_job, is_running

        found = find_job(job)
        was_running = is_running(found)
        status = end(found, grace_s=grace_s)
        if as_json:
            typer.echo(json.dumps({**found.to_dict(), "was_running": was_running}, indent=2))
            return 0
        said = f"{status.state} ({status.reason})" if status.reason else status.state
        typer.echo(f"{found.id} {'' if was_running else 'was not running: '}{said}")
        return 0

    _exit_with(body)


def launch_app() -> typer.Typer:
    """Return ``launch`` as an application of its own."""
    return _app(launch, context_settings=LAUNCH_CONTEXT)


def jobs_app() -> typer.Typer:
    """Return ``jobs`` as an application of its own."""
    return _app(jobs)


def logs_app() -> typer.Typer:
    """Return ``logs`` as an application of its own."""
    return _app(logs)


def stop_app() -> typer.Typer:
    """Return ``stop`` as an application of its own."""
    return _app(stop)


def _app(command: Callable[..., None], **settings: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command(**settings)(command)
    return app


def _exit_with(body: Callable[[], int]) -> None:
    """Run the body of a command and leave with its status; ``tp`` says what goes wrong."""
    try:
        status = body()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        status = 141
        sys.stderr.close()  # or the interpreter complains when it flushes at exit
    raise typer.Exit(status)
