"""The command ``tp launch``, for typer: its options are the fields of a `LaunchRequest`.

torch and the launcher are imported when it runs.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer
from tp_core.errors import ConfigError
from tp_core.output import print_to_stderr
from typer.core import TyperCommand

from tp_launch._launch_plan import LaunchRequest, parse_rdzv_conf

_hosts_option = partial(typer.Option, rich_help_panel="Several hosts")

# The environment variables are torchrun's: operators such as Kubeflow's set them in their containers.
_OPTIONS = {
    "nproc_per_node": typer.Option(
        "--nproc-per-node",
        "-n",
        envvar="PET_NPROC_PER_NODE",
        help="Processes on this host; auto: one per device.",
    ),
    "module": typer.Option("--module", "-m", help="Run a module, as python -m does."),
    "max_restarts": typer.Option(
        envvar="PET_MAX_RESTARTS", help="How often to start all processes again after a failure."
    ),
    "log_dir": typer.Option(help="Keep the logs of the processes in this directory."),
    "grace_s": typer.Option(help="Seconds that processes may take to end when asked to."),
    "monitor_interval_s": typer.Option(
        "--monitor-interval", help="Seconds between two looks at the processes."
    ),
    "name": typer.Option(help="A name for the detached job."),
    "nnodes": _hosts_option(envvar="PET_NNODES", help="Hosts of the job: 2, or 1:4."),
    "rdzv_endpoint": _hosts_option(envvar="PET_RDZV_ENDPOINT", help="HOST:PORT where the hosts meet."),
    "rdzv_id": _hosts_option(envvar="PET_RDZV_ID", help="The name of the job, the same on all hosts."),
    "rdzv_backend": _hosts_option(
        envvar="PET_RDZV_BACKEND", help="How hosts meet: c10d (default) or static."
    ),
    "rdzv_conf": _hosts_option(envvar="PET_RDZV_CONF", help="More for the rendezvous: key=value,.."),
    "node_rank": _hosts_option(envvar="PET_NODE_RANK", help="Static: the number of this host."),
    "master_addr": _hosts_option(envvar="PET_MASTER_ADDR", help="Static: the address of host 0."),
    "master_port": _hosts_option(envvar="PET_MASTER_PORT", help="Static: the port on host 0."),
    "local_addr": _hosts_option(envvar="PET_LOCAL_ADDR", help="The address of this host for the others."),
    "bind_addr": _hosts_option(help="Listen at this address of this host alone."),
    "host_timeout_s": _hosts_option(help="Seconds after which a silent host counts as lost."),
}
_TEXT_DEFAULTS = {"nproc_per_node": "auto", "rdzv_conf": ""}
"""Options that typer takes as text, as their fields are of no type that it knows."""


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Declare an option of a command for each field; typer reads its signature and its annotations."""
    types = get_type_hints(LaunchRequest)
    defaults = {field.name: field.default for field in fields(LaunchRequest)} | _TEXT_DEFAULTS
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for name, option in _OPTIONS.items():
        kind = str if name in _TEXT_DEFAULTS else types[name]
        annotation = Annotated[kind, option]  # type: ignore[valid-type]  # known at run time alone
        parameters.append(inspect.Parameter(name, keyword, default=defaults[name], annotation=annotation))
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    positional = [p for p in own if p.kind is not keyword]
    parameters = [*positional, *parameters, *own[len(positional) :]]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@_with_options
def launch(
    script: Annotated[str, typer.Argument(help="The program, or with -m the module.")],
    args: Annotated[list[str] | None, typer.Argument(help="Passed to the program as they are.")] = None,
    *,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background and print the id of the job.")
    ] = False,
    **options: Any,
) -> None:
    """Run a script on several processes, of this host and of others."""
    name = options.get("name")
    if name is not None and not detach:
        msg = f"--name is for a job in the background, and this one is not: add --detach; got {name!r}"
        raise ConfigError(msg)
    own = {"-n", "--nproc-per-node"}.intersection(args or ())
    if own and options["nproc_per_node"] == _TEXT_DEFAULTS["nproc_per_node"]:
        # No error: a script may have such an option, too.
        print_to_stderr(
            f"tp launch: {own.pop()} comes after the script, which gets it; for the number of processes "
            f"write tp launch -n 2 {script}"
        )
    rdzv_conf = parse_rdzv_conf(options.pop("rdzv_conf"))
    request = LaunchRequest(script=script, args=tuple(args or ()), rdzv_conf=rdzv_conf, **options)
    if detach:
        from tp_launch._supervisor import start_job

        typer.echo(start_job(request).id)
        return
    from tp_launch._local_run import execute
    from tp_launch._outcome import report

    outcome = execute(request)
    report(outcome)
    raise typer.Exit(outcome.status)


class _LaunchCommand(TyperCommand):
    """A command that says, at an unknown option, where a script's own options stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: newer typers have a click of their own.
            if type(error).__name__ == "NoSuchOption":
                error.message += "; a script's own options follow it"  # type: ignore[attr-defined]  # it has one
            raise


def launch_app() -> typer.Typer:
    """Return ``tp launch`` as a separate application."""
    app = typer.Typer(add_completion=False)
    # Parsing ends at the first positional argument: the rest, options included, belongs to the script.
    app.command(cls=_LaunchCommand, context_settings={"allow_interspersed_args": False})(launch)
    return app
