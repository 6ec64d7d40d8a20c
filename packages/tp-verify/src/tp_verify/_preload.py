"""The script's imports, made once in the fork server of its runs: each run would make them again.

The fork server imports this module, as it imports the modules of tp that its parent has.
"""

import ast
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.machinery import PathFinder
from pathlib import Path

from tp_verify._recorder import watch_dropout

_VARIABLE = "TP_VERIFY_IMPORTS"


@contextmanager
def preloading(script: Path) -> Iterator[None]:
    """Have a fork server that starts meanwhile make the imports of a script."""
    os.environ[_VARIABLE] = json.dumps(leading_imports(script))
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def leading_imports(script: Path) -> list[str]:
    """Return the import statements that a script begins with, up to the first of a module beside it.

    What follows may depend on what the script has done by then, as on variables of the environment.
    """
    try:
        statements = ast.parse(script.read_bytes()).body
    except (SyntaxError, ValueError):  # the runs report it
        return []
    # The fork server has this folder on its path.
    places = [str(script.absolute().parent), str(Path.cwd())]
    found = []
    for at, statement in enumerate(statements):
        match statement:
            case ast.Expr(ast.Constant(str())) if at == 0:
                continue
            case ast.Import(aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(str(name), level=0):
                names = [name]
            case _:
                break
        if any(PathFinder.find_spec(name.partition(".")[0], places) for name in names):
            break
        found.append(ast.unparse(statement))
    return found


if _VARIABLE in os.environ:
    watch_dropout()  # before a library keeps one of the functions under a name of its own
    for _statement in json.loads(os.environ.pop(_VARIABLE)):
        # A run meets the same error, and reports it. What is printed would be printed into the report.
        with suppress(Exception, SystemExit), redirect_stdout(sys.stderr):
            exec(_statement, {})  # noqa: S102 - the script's own
