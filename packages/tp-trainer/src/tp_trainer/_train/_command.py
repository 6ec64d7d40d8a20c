"""``tp train``."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from tp_core.errors import ConfigError, TpError

from tp_trainer._launch._cli import LAUNCH_CONTEXT, launch
from tp_trainer._train._call import Call, parse_call

__all__ = ["train_app"]

_RANK = "tp_trainer._train._call"
_OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(launch).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("module", "nproc_per_node")
}
_DEFAULTS = {name: parameter.default for name, parameter in _OPTIONS.items()}


def _with_options_of_launch(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes ``**options`` the options of ``tp launch``, as typer reads them."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*own, *_OPTIONS.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may have it
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def train_app() -> typer.Typer:
    """Return ``tp train`` as a separate application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=LAUNCH_CONTEXT)(_train)
    return app


@_with_options_of_launch
def _train(
    context: typer.Context,
    function: Annotated[str, typer.Argument(help="script.py:main, or package.module:main.")],
    values: Annotated[
        list[str] | None, typer.Argument(help="Its values: --lr 0.1 --config run.yaml.")
    ] = None,
    *,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node",
            "-n",
            envvar="PET_NPROC_PER_NODE",
            help="Processes on this host; auto: one per device. Without options of launching: this one.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Run a typed function of a script with values from options and files.

    Its parameters are the options after its name: --optim.lr 0.1 sets a field of a dataclass, --config FILE
    reads values from YAML, --print-config prints them all, --help explains them. Options before its name are
    those of tp launch; a process that torchrun has started is a rank already, and takes none. Runs log the
    values as hyperparameters, and leave a config.yaml in their folders.
    """
    call = parse_call(function, values or ())  # before any process is started
    asked = {name for name, value in options.items() if value != _DEFAULTS[name]}
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # whose launcher may be set by PET_..., too
        _check_launched(context, {"nproc_per_node", *asked})
        _run_here(call)
        return
    if nproc_per_node is None and not asked:
        _run_here(call)
        return
    launch(
        _RANK,
        [function, *(values or ())],
        module=True,
        nproc_per_node=nproc_per_node or "auto",
        **options,
    )


def _check_launched(context: typer.Context, names: Iterable[str]) -> None:
    """Refuse options of launching in a rank.

    Raises:
        ConfigError: The words of the command line have some.
    """
    sources = {name: context.get_parameter_source(name) for name in sorted(names)}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        msg = (
            f"tp train was given {options} in rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which "
            "a launcher has started; leave that out, or start tp train without a launcher"
        )
        raise ConfigError(msg)


def _run_here(call: Call) -> None:
    try:
        call.run()
    except BrokenPipeError:
        raise
    except (TpError, OSError) as error:  # of the user's own program: where in it matters
        sys.excepthook(type(error), error, error.__traceback__)
        raise typer.Exit(1) from error
