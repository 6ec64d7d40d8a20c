"""Types of devices are known by name in one file alone; all other code works for any accelerator."""

import ast
import re

import pytest

from tests.wheels import ROOT

THE_FILE = "tp_core/device_types.py"
TYPES = {"cuda", "hip", "hpu", "mps", "mtia", "npu", "privateuseone", "sim", "xla", "xpu"}
PROPERTIES = {f"is_{name}" for name in TYPES}
NAMED = re.compile(rf"\b(?:is_)?(?:{'|'.join(TYPES)})\b")

# Files that name one nevertheless, and why that is no decision by the type.
ELSEWHERE = {
    "tp_shard/nn/_own_forward.py": "a property of a tensor that a forward may read",
}


def named_types(source):
    """Return the lines that name a type of device: as a text, a module of torch or a property of a tensor."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Constant) and node.value in TYPES | PROPERTIES
        is_module = (
            isinstance(node, ast.Attribute)
            and node.attr in TYPES
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        )
        is_property = isinstance(node, ast.Attribute) and node.attr in PROPERTIES
        if is_text or is_module or is_property:
            found.append(node.lineno)
    return found


@pytest.fixture(scope="module")
def naming():
    """The files of all packages that name types of devices, with the lines."""
    found = {}
    for source in sorted((ROOT / "packages").glob("tp-*/src")):
        if source.parent.name == "tp-simulator":
            continue  # it is one
        for file in sorted(source.rglob("*.py")):
            text = file.read_text()
            # To parse all files takes seconds.
            if NAMED.search(text) and (lines := named_types(text)):
                found[file.relative_to(source).as_posix()] = lines
    return found


def test_one_file_knows_types_of_devices(naming):
    assert {name: lines for name, lines in naming.items() if name not in {THE_FILE, *ELSEWHERE}} == {}


def test_every_reason_is_of_a_file_that_names_one(naming):
    assert ELSEWHERE.keys() <= naming.keys()


@pytest.mark.parametrize(
    "line",
    [
        'device.type == "cuda"',
        'kind in ("cpu", "mps")',
        "torch.cuda.synchronize()",
        "x.is_cuda",
        'getattr(torch, "xpu")',
    ],
)
def test_each_kind_of_naming_is_seen(line):
    assert named_types(line) == [1]


@pytest.mark.parametrize("line", ['devices="cuda:0"', "torch.accelerator.synchronize()", "value.cuda()"])
def test_examples_and_calls_for_any_accelerator_are_none(line):
    assert named_types(line) == []
