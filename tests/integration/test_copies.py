"""Whether the host waits for a copy is decided in one place: a copy to the CPU is always waited for."""

import ast

from tests.wheels import ROOT

DECIDES = "tp_core/_transfer.py"
# The old spelling of `recursive_to` for objects with a method .cuda alone, with the same rule.
REPEATS = "tp_tuple/_batch.py"

# The copies of a save, all into pinned memory: it waits once for all of them.
WAITS = "tp_trainer/_checkpoint/_host_copies.py"

# `Tensor.cuda` under the name of CUDA's passes on what the program says.
PASSES = "tp_simulator/_cuda_names.py"


def names_in(node):
    """Return the names of the keywords of a call, and the keys of a dictionary."""
    if isinstance(node, ast.Call):
        return [keyword.arg for keyword in node.keywords]
    return [getattr(key, "value", None) for key in node.keys] if isinstance(node, ast.Dict) else []


def test_packages_name_non_blocking_where_the_rule_is():
    found = set()
    for source in (ROOT / "packages").glob("*/src"):
        for file in source.rglob("*.py"):
            text = file.read_text()
            if "non_blocking" not in text:  # to parse all files takes seconds
                continue
            names = {name for node in ast.walk(ast.parse(text)) for name in names_in(node)}
            if "non_blocking" in names:
                found.add(file.relative_to(source).as_posix())
    assert found == {DECIDES, REPEATS, WAITS, PASSES}
