"""The command ``tp launch``, for typer. It imports torch and the launcher only when it runs."""

from functools import partial
from typing import Annotated

import typer
from tp_core.errors import ConfigError

from tp_launch._launch_plan import LaunchRequest, parse_rdzv_conf

_hosts_option = partial(typer.Option, rich_help_panel="Several hosts")


def launch_app() -> typer.Typer:
    """Return ``tp launch`` as a separate application."""
    app = typer.Typer(add_completion=False)
    # Parsing ends at the first positional argument: the rest, options included, belongs to the script.
    app.command(context_settings={"allow_interspersed_args": False})(launch)
    return app


# The environment variables are torchrun's: operators such as Kubeflow's set them in their containers.
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
    nnodes: Annotated[str, _hosts_option(envvar="PET_NNODES", help="Hosts of the job: 2, or 1:4.")] = "1",
    rdzv_endpoint: Annotated[
        str | None, _hosts_option(envvar="PET_RDZV_ENDPOINT", help="HOST:PORT where the hosts meet.")
    ] = None,
    rdzv_id: Annotated[
        str | None, _hosts_option(envvar="PET_RDZV_ID", help="The name of the job, the same on all hosts.")
    ] = None,
    rdzv_backend: Annotated[
        str | None,
        _hosts_option(envvar="PET_RDZV_BACKEND", help="How hosts meet: c10d (default) or static."),
    ] = None,
    rdzv_conf: Annotated[
        str, _hosts_option(envvar="PET_RDZV_CONF", help="More for the rendezvous: key=value,..")
    ] = "",
    node_rank: Annotated[
        int | None, _hosts_option(envvar="PET_NODE_RANK", help="Static: the number of this host.")
    ] = None,
    master_addr: Annotated[
        str | None, _hosts_option(envvar="PET_MASTER_ADDR", help="Static: the address of host 0.")
    ] = None,
    master_port: Annotated[
        int | None, _hosts_option(envvar="PET_MASTER_PORT", help="Static: the port on host 0.")
    ] = None,
    local_addr: Annotated[
        str | None, _hosts_option(envvar="PET_LOCAL_ADDR", help="The address of this host for the others.")
    ] = None,
    bind_addr: Annotated[str | None, _hosts_option(help="Listen at this address of this host alone.")] = None,
    host_timeout_s: Annotated[
        float, _hosts_option(help="Seconds after which a silent host counts as lost.")
    ] = 15.0,
) -> None:
    """Run a script on several processes, of this host and of others."""
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
        from tp_launch._jobs import start_job

        words = [*(["-m"] if module else []), script, *(args or ())]
        typer.echo(start_job(request, command=tuple(words)).id)
        return
    from tp_launch._local_run import execute
    from tp_launch._outcome import report

    outcome = execute(request)
    report(outcome)
    raise typer.Exit(outcome.status)
