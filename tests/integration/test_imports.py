"""What importing a package loads: little beside torch, and without torch next to nothing."""

import ast
import builtins
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LOOK = """
import json, sys
before = set(sys.modules)
exec(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# Beside itself, tp_core, the standard library, and what torch has loaded already: none of torch, either.
MAY_LOAD = {
    "tp_context": set(),
    "tp_core": {"pluggy"},
    "tp_data": {"numpy"},
    "tp_dp_gather": set(),
    "tp_launch": {"psutil"},
    "tp_pipeline": set(),
    "tp_runner": set(),
    "tp_shard": set(),
    "tp_trainer": {"pluggy"},
    "tp_tuple": set(),
    "tp_verify": set(),
}
STANDARD = set(sys.stdlib_module_names)
# These take milliseconds, too.
LARGE = {"asyncio", "decimal", "email", "http", "multiprocessing", "sqlite3", "statistics", "unittest", "xml"}


def loaded_by(statement):
    """Return the modules that a statement loads in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, statement],
        capture_output=True,
        text=True,
        check=True,
        timeout=800,
    )
    return json.loads(done.stdout)


LOOK_AFTER_TORCH = """
import json, os, sys, warnings
sys.modules["numpy"] = None  # torch does without, and whoever imports it afterwards is seen
warnings.simplefilter("ignore")
import torch
del sys.modules["numpy"]
for statement in sys.argv[1:]:
    if os.fork() == 0:
        before = set(sys.modules)
        exec(statement)
        print(json.dumps([statement, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


ALL_NAMES, TRAINER = "from {} import *", "from tp_trainer import Trainer"
PLUGINS = "from tp_core.plugins import *"
BACKENDS = "from tp_core.plugins import registry; registry.backends()"


@pytest.fixture(scope="module")
def loaded_after_torch():
    """What statements load, in processes forked from one that has imported torch alone."""
    statements = [*map(ALL_NAMES.format, MAY_LOAD), TRAINER, PLUGINS, BACKENDS]
    command = [sys.executable, "-c", LOOK_AFTER_TORCH, *statements]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    return dict(map(json.loads, done.stdout.splitlines()))


def names_for_import(name):
    """The modules that tp_core and a package may load while nobody has used a name of them."""
    return {name, "tp_core", "tp_core._lazy", "tp_core.errors", "tp_core.plugins"}


@pytest.mark.parametrize("package", MAY_LOAD)
def test_all_names_of_a_package_load_itself_and_little_else_beside_torch(loaded_after_torch, package):
    loaded = loaded_after_torch[ALL_NAMES.format(package)]
    others = {name for name in loaded if name.split(".")[0] not in STANDARD - LARGE | {package, "tp_core"}}
    unexpected = {name for name in others if name.split(".")[0] not in MAY_LOAD[package]}
    assert unexpected == set(), "python -X importtime shows who imports them"


def test_a_trainer_loads_nothing_that_only_runs_and_files_need(loaded_after_torch):
    loaded = loaded_after_torch[TRAINER]
    needless = (
        "tp_core._contracts._callback",
        "tp_core._contracts._collate",
        "tp_core._contracts._engine",
        "tp_core._contracts._logger",
        "tp_core.state",
        "tp_trainer._metrics",
        "tp_trainer._running",
        "tp_trainer._memory",
        "tp_trainer._opening._agreement",
        "tp_trainer._steps._loaders",
        "tp_trainer._steps._optimizer_step",
    )
    assert [name for name in loaded if name.startswith(needless)] == []


def test_contracts_and_the_list_of_backends_load_nothing_that_only_sessions_need(loaded_after_torch):
    upper = ("tp_core.data", "tp_core.replicas", "tp_core.state", "tp_core.tensors")
    assert [name for name in loaded_after_torch[PLUGINS] if name.startswith(upper)] == []
    # Each backend imports its session when it opens one.
    sessions = (*upper, "tp_core.sessions._process_group_session", "tp_trainer._ddp_session")
    assert [name for name in loaded_after_torch[BACKENDS] if name.startswith(sessions)] == []


@pytest.mark.parametrize("package", MAY_LOAD)
def test_a_package_whose_names_nobody_uses_loads_neither_torch_nor_itself(package):
    loaded = loaded_by(f"import {package}")
    ours = {name for name in loaded if name.startswith("tp_")}
    assert ours <= names_for_import(package)
    assert {name.split(".")[0] for name in loaded} - STANDARD <= {package, "tp_core"}


def test_no_name_of_a_package_shadows_a_builtin():
    for package in MAY_LOAD:
        assert set(importlib.import_module(package).__all__) & set(dir(builtins)) == set(), package


SOURCES = sorted(Path(__file__).parents[2].glob("packages/*/src"))
LAZY = [
    path
    for source in SOURCES
    for path in source.glob("tp_*/**/__init__.py")
    if "lazy_exports(" in path.read_text()
]


def package_of(path):
    return ".".join(path.parent.parts[path.parts.index("src") + 1 :])


@pytest.mark.parametrize("path", LAZY, ids=package_of)
def test_type_checkers_see_the_names_that_a_package_exports(path):
    tree = ast.parse(path.read_text())
    branch = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    imports = [(n.module, a) for n in branch.body if isinstance(n, ast.ImportFrom) for a in n.names]
    if "# mypy: implicit-reexport" not in path.read_text():  # mypy's alone: for packages of this project
        assert all(a.name == a.asname for _, a in imports), "type checkers take other names for private ones"
    table = branch.orelse[0].value.args[1]
    pairs = zip(table.keys, table.values, strict=True)  # not the dictionary: a module may stand in it twice
    exported = [(key.value, name.value) for key, names in pairs for name in names.elts]
    assert sorted((module, a.name) for module, a in imports) == sorted(set(exported))
    assert len({key.value for key in table.keys}) == len(table.keys)
    module = importlib.import_module(package_of(path))
    assert {a.name for _, a in imports} <= set(dir(module))
    assert all(hasattr(module, a.name) for _, a in imports)
    assert set(module.__all__) <= {a.name for _, a in imports}


def test_every_package_is_lazy():
    assert {package_of(path) for path in LAZY} >= MAY_LOAD.keys()


LOOK_IN_ARCHIVE = """
import importlib, sys
archive, *packages = sys.argv[1:]
sys.path.insert(0, archive)
for package in packages:
    module = importlib.import_module(package)
    assert module.__file__.startswith(archive), module.__file__
    assert module.__all__
assert importlib.import_module("tp_core").errors.TpError
"""


def test_packages_are_imported_from_an_archive_of_python_files_alone(tmp_path):
    """As freezers make them, which leave out other files."""
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as files:
        for source in SOURCES:
            for path in source.rglob("*.py"):
                files.write(path, path.relative_to(source))
    command = [sys.executable, "-c", LOOK_IN_ARCHIVE, str(archive), *map(package_of, LAZY)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
