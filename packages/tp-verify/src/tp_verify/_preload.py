"""The script's imports, made once in the fork server of its runs: each run would make them again.

The fork server imports this module, as it imports the modules of tp that its parent has.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.machinery import PathFinder
from pathlib import Path

from tp_verify._script_recorder import watch_dropout

_VARIABLE = "TP_VERIFY_IMPORTS"


@contextmanager
def preloading(script: Path) -> Iterator[None]:
    """Have a fork server make the imports of a script while it starts."""
    os.environ[_VARIABLE] = json.dumps(imports_of(script))
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def imports_of(script: Path) -> list[str]:
    """Return the import statements of a script that do not depend on what it does before them.

    They are those that it begins with, up to the first of a module beside it; and where it has none of
    these, and nowhere names the environment or the path of modules, all others, also in functions.
    """
    try:
        source = script.read_bytes()
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the runs report it
        return []
    # The fork server has this folder on its path.
    places = [str(script.absolute().parent), str(Path.cwd())]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    if not any(_is_beside(node, places) for node in nodes) and not re.search(
        rb"environ|putenv|sys\.path", source
    ):
        return list(dict.fromkeys(map(ast.unparse, nodes)))
    imports = []
    for at, statement in enumerate(tree.body):
        if at == 0 and isinstance(statement, ast.Expr):  # a docstring
            continue
        if not isinstance(statement, ast.Import | ast.ImportFrom) or _is_beside(statement, places):
            break
        imports.append(ast.unparse(statement))
    return imports


def _is_beside(statement: ast.Import | ast.ImportFrom, places: list[str]) -> bool:
    """Return whether an import is of a module in one of these folders, or of the script's own package."""
    if isinstance(statement, ast.ImportFrom):
        if statement.level == 0:
            names = [statement.module or ""]
        else:
            names = [""]
    else:
        names = [alias.name for alias in statement.names]
    return any(not name or PathFinder.find_spec(name.partition(".")[0], places) for name in names)


if _VARIABLE in os.environ:
    # What some backends import, for two ranks of each.
    import torch.distributed.fsdp
    import torch.distributed.pipelining  # noqa: F401 - as above

    watch_dropout()  # before a library keeps one of the functions under a name of its own
    for _statement in json.loads(os.environ.pop(_VARIABLE)):
        # A run meets the same error, and reports it. What is printed would be printed into the report.
        with suppress(Exception, SystemExit), redirect_stdout(sys.stderr):
            exec(_statement, {})  # noqa: S102 - the script's own
