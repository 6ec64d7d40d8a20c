"""What packages import of others is what their metadata says that they need."""

import ast
import sys
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.wheels import CORE, PACKAGES, ROOT, project, with_siblings

# Names that no requirement of a package brings, and why it may import them.
ELSEWHERE = {
    "tp-core": {
        "cloudpickle": "to start ranks from a notebook or a script; who does has it",
        "IPython": "who is in a notebook has it",
        "datasets": "looked at where a user hands one over, who has it then",
    },
    "tp-context": {"transformers": "whoever hands over a model of it has it"},
    "tp-runner": {
        "numpy": "work that asks for a generator of it has it",
        "typing_extensions": "type checkers alone read it, and bring it",
    },
    "tp-shard": {"typer": "its command is loaded by tp alone, which cannot start without it"},
    "tp-simulator": {
        "_pytest": "pytest alone loads its plugin",
        "pytest": "as above",
    },
    "tp-verify": {
        "accelerate": "whoever verifies it has it",
        "tp_trainer": "the built-in script runs as a user's does, and says so where it is missing",
        "deepspeed": "whoever verifies it has it",
        "megatron": "whoever verifies it has it",
        "pytest": "pytest alone loads its plugin",
        "transformers": "whoever verifies a model of it has it",
    },
    "tp-trainer": {"markupsafe": "jinja2, of the extra report, is made of it"},
}
DYNAMIC = {"import_module", "__import__"}


def imported(package):
    """Return the first parts of the names of what a package imports, with the files."""
    found = {}
    for file in (ROOT / "packages" / package / "src").rglob("*.py"):
        if "templates" in file.parts:  # those are of other packages
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            for name in names_in(node):
                found.setdefault(name.split(".")[0], set()).add(file.name)
    return found


def names_in(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [node.module]
    is_call = isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    if is_call and getattr(node.func, "attr", getattr(node.func, "id", "")) in DYNAMIC:
        return [node.args[0].value]
    return []


def required(package):
    """Return the distributions that a package and its extras require, tp-core's extras followed."""
    found = project(package)
    extras = [text for extra in found.get("optional-dependencies", {}).values() for text in extra]
    names = set()
    for need in map(Requirement, [*found["dependencies"], *extras]):
        names.add(canonicalize_name(need.name))
        for extra in need.extras if need.name in PACKAGES else ():
            brought = project(need.name)["optional-dependencies"][extra]
            names |= {canonicalize_name(Requirement(text).name) for text in brought}
    return names


@pytest.fixture(scope="module")
def distributions():
    """The distributions that bring a module, which the metadata of all that is installed says."""
    return packages_distributions()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package, distributions):
    needed = required(package)
    ours = {name.replace("-", "_") for name in [*with_siblings([package]), CORE]}
    unknown = {}
    for name, files in imported(package).items():
        if name in sys.stdlib_module_names or name in ours or name in ELSEWHERE.get(package, {}):
            continue
        brought_by = {canonicalize_name(d) for d in distributions.get(name, [name])}
        if not brought_by & needed:
            unknown[name] = sorted(files)
    assert unknown == {}
