"""What importing a package loads: little beside torch, and without torch next to nothing."""

import ast
import builtins
import importlib
import json
import subprocess
import sys
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
    "tp_core": {"pluggy"},
    "tp_dp_gather": set(),
    "tp_runner": set(),
    "tp_shard": set(),
    "tp_trainer": {"pluggy"},
    "tp_tuple": set(),
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


LOOK_AT_ALL = """
import json, os, sys, warnings
sys.modules["numpy"] = None  # torch does without, and whoever imports it afterwards is seen
warnings.simplefilter("ignore")
import torch
del sys.modules["numpy"]
for package in sys.argv[1:]:
    if os.fork() == 0:
        before = set(sys.modules)
        exec(f"from {package} import *")
        print(json.dumps([package, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def loaded_after_torch():
    """What all names of each package load, in processes forked from one that has imported torch alone."""
    command = [sys.executable, "-c", LOOK_AT_ALL, *MAY_LOAD]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    return dict(map(json.loads, done.stdout.splitlines()))


def names_for_import(name):
    """The modules that tp_core and a package may load while nobody has used a name of them."""
    return {name, "tp_core", "tp_core._lazy", "tp_core.errors", "tp_core.internal"}


@pytest.mark.parametrize("package", MAY_LOAD)
def test_all_names_of_a_package_load_itself_and_little_else_beside_torch(loaded_after_torch, package):
    loaded = loaded_after_torch[package]
    others = {name for name in loaded if name.split(".")[0] not in STANDARD - LARGE | {package, "tp_core"}}
    unexpected = {name for name in others if name.split(".")[0] not in MAY_LOAD[package]}
    assert unexpected == set(), "python -X importtime shows who imports them"


def test_a_trainer_loads_nothing_that_only_runs_and_files_need():
    loaded = loaded_by("from tp_trainer import Trainer")
    needless = ("tp_core.state", "tp_trainer._metrics", "tp_trainer._running", "tp_trainer._memory._work")
    assert [name for name in loaded if name.startswith(needless)] == []


@pytest.mark.parametrize("package", MAY_LOAD)
def test_a_package_whose_names_nobody_uses_loads_neither_torch_nor_itself(package):
    loaded = loaded_by(f"import {package}")
    ours = {name for name in loaded if name.startswith("tp_")}
    assert ours <= names_for_import(package)
    assert {name.split(".")[0] for name in loaded} - STANDARD <= {package, "tp_core"}


@pytest.mark.parametrize("package", MAY_LOAD)
def test_all_names_of_a_package_shadow_no_builtin(package):
    assert set(importlib.import_module(package).__all__).isdisjoint(dir(builtins))


STUBBED = [
    *MAY_LOAD,
    "tp_core.internal",
    "tp_core.plugins",
    "tp_core.state",
    "tp_trainer.callbacks",
    "tp_trainer.loggers",
]


@pytest.mark.parametrize("package", STUBBED)
def test_all_that_a_stub_imports_is_exported(package):
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    names = [a for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert all(a.name == a.asname for a in names)
    assert {a.name for a in names} <= set(dir(module))
    assert all(hasattr(module, a.name) for a in names)
    assert set(module.__all__) <= {a.name for a in names}
