"""`tp train`: run a typed function of a script with values from options and files."""

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tp_core.builders import load_function
from tp_core.errors import ConfigError, TpError
from tp_core.messages import did_you_mean
from tp_core.plugins import registry
from typer.core import TyperCommand

from tp_trainer.loggers import using_config

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


# -- The call of a function, from a command line --------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and the arguments of its call.

    Attributes:
        arguments: Its arguments by name, in the types of its parameters.
        values: The same arguments as plain values, by their options' names.
        text: The same as YAML, which ``--config`` reads.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    values: Mapping[str, Any]
    text: str

    def run(self) -> None:
        """Call the function; its exceptions pass unchanged."""
        named = dict(self.arguments)
        parameters = inspect.signature(self.function).parameters.values()
        first = [named.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
        with using_config(self.values, self.text):
            self.function(*first, **named)


def parse_call(target: str, words: Sequence[str]) -> FunctionCall:
    """Return the call of ``script.py:main`` or ``package.module:main`` with ``--lr 0.1 --config FILE``."""
    try:
        import jsonargparse  # noqa: F401 - asked for before the script is imported
    except ModuleNotFoundError as error:
        msg = f"values are read by {error.name}, which is not installed: pip install 'tp-trainer[train]'"
        raise ConfigError(msg) from error
    function = load_function(target, example="main")
    parser = _parser_of(target, function)
    try:
        parsed = parser.parse_args(list(words))
    except UnicodeDecodeError as error:
        msg = f"{target}: a file of values is not text in UTF-8: {error}"
        raise ConfigError(msg) from error
    except argparse.ArgumentError as error:
        message = _in_our_words(_in_one_line(error)) + _suggestion(parser, str(error))
        if "did you mean" not in message:
            message += f"; tp train {target} --help lists what it takes"
        msg = f"{target}: {message}"
        raise ConfigError(msg) from error
    parsed.pop("config")
    plain = json.loads(parser.dump(parsed, format="json", skip_unset=False))
    text = parser.dump(parsed, skip_unset=False)
    return FunctionCall(function, dict(vars(parser.instantiate(parsed))), dict(_flat(plain)), text)


def _parser_of(target: str, function: Callable[..., Any]) -> "ArgumentParser":
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=f"tp train {target}",
        description=(inspect.getdoc(function) or "").partition("\n\n")[0],
        print_config="--print-config",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file with values; later options win.")
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(parameter.default) and not hasattr(parameter.default, "__dict__"):
            msg = (
                f"the parameter {name!r} of {target} has a dataclass with slots as its default: jsonargparse "
                "cannot read its values; make the class without slots=True"
            )
            raise ConfigError(msg)
    try:
        parser.add_function_arguments(function, as_group=False)
    except (ValueError, argparse.ArgumentError) as error:
        msg = f"the parameters of {target} cannot be options: {_in_one_line(error)}"
        raise ConfigError(msg) from error
    return parser


def _suggestion(parser: "ArgumentParser", message: str) -> str:
    names = set(parser.get_defaults().keys())  # which also has the names within groups
    in_file = re.search(r"Option '([\w.]+)' is not accepted", message)
    if in_file is not None:
        return did_you_mean(in_file[1], names)
    unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
    if unknown is None:
        return ""
    options = {f"--{name}" for name in names}
    return did_you_mean(unknown[1], options | {"--help", "--print-config"})


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _in_our_words(text: str) -> str:
    """Return a message of jsonargparse in the words of options and types, with a suggestion."""
    text = re.sub(r'^Parser key "([\w.]+)": ?', r"--\1: ", text)
    text = re.sub(r"<class '(?:builtins\.)?([\w.]+)'>", r"\1", text)
    text = re.sub(r"Expected (?:an? )?(.+?)\. Got value: (.+)", r"expected \1, got \2", text)
    if match := re.fullmatch(r"Unexpected config: ?(.*)", text):
        return f"--config has to name a file of YAML with a value for each name, got {match[1] or 'nothing'}"
    if match := re.search(r"(typing\.Literal\[(.+)\]|member of <enum '\w+'>: \{(.+)\}), got (.+)", text):
        choices = [choice.strip(" '\"") for choice in (match[2] or match[3]).split(",")]
        return text.replace(match[1], f"one of {', '.join(choices)}") + did_you_mean(match[4], choices)
    if re.search(r"expected (?:list|tuple|set|dict)", text):
        text += "; lists are written [1,2] and dicts {a: 1}, in quotes"
    return text


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


# -- ``tp train`` ---------------------------------------------------------------------------------


def _find_launch() -> Callable[..., None] | None:
    """Return the function of ``tp launch``, which tp-launch brings; None if that is not installed."""
    for contribution in registry.commands():
        if contribution.item.name == "launch":
            callback: Callable[..., None] = contribution.item.load().registered_commands[0].callback
            return callback
    return None


def _launch_options() -> dict[str, inspect.Parameter]:
    """Return the options of ``tp launch`` that are for ranks of a function."""
    launch = _find_launch()
    if launch is None:
        return {}
    parameters = inspect.signature(launch).parameters.values()
    options = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: p for name, p in options.items() if name not in ("module", "nproc_per_node")}


class _TrainCommand(TyperCommand):
    """A command that says, at an unknown option, where the values of the function stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: newer typers have a click of their own.
            if type(error).__name__ == "NoSuchOption":
                error.message += "; the options of a function follow it"  # type: ignore[attr-defined]  # it has one
            raise


def train_app() -> typer.Typer:
    """Return ``tp train`` as a separate application, with the options of ``tp launch``."""
    own = [p for p in inspect.signature(_train).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*own, *_launch_options().values()]

    @wraps(_train)
    def command(**options: Any) -> None:
        _train(**options)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # Parsing ends at the function: the rest, options included, belongs to it.
    app.command(cls=_TrainCommand, context_settings={"allow_interspersed_args": False})(command)
    return app


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
    defaults = _launch_options()
    launch_options = {name for name, value in options.items() if value != defaults[name].default}
    # In a rank: PET_... variables may still be set, so only options on the command line are refused.
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_launched(context, {"nproc_per_node", *launch_options})
        _run_here(call)
        return
    if nproc_per_node is None and not launch_options:
        _run_here(call)
        return
    launch = _find_launch()
    if launch is None:
        msg = "tp train starts ranks by the command tp launch, which is not installed: pip install tp-launch"
        raise ConfigError(msg)
    launch(
        __name__,  # this module, as a process that calls the function
        [function, *(values or ())],
        module=True,
        nproc_per_node=nproc_per_node or "auto",
        **options,
    )


def _check_launched(context: typer.Context, names: Iterable[str]) -> None:
    """Refuse launch options in a rank."""
    sources = {name: context.get_parameter_source(name) for name in sorted(names)}
    named = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if named:
        spellings = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        options = ", ".join(spellings[name] for name in named)
        msg = (
            f"tp train was given {options} in rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, which "
            "a launcher has started; leave that out, or start tp train without a launcher"
        )
        raise ConfigError(msg)


def _run_here(call: FunctionCall) -> None:
    try:
        call.run()
    except BrokenPipeError:
        raise
    except (TpError, OSError) as error:  # of the user's program: show the traceback, and not only the message
        sys.excepthook(type(error), error, error.__traceback__)
        raise typer.Exit(1) from error


# -- A process that calls the function: ``python -m tp_trainer._train script.py:main --lr 0.1``


if __name__ == "__main__":
    parse_call(sys.argv[1], sys.argv[2:]).run()
