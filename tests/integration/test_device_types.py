"""Types of devices are known by name in one file alone; all other code works for any accelerator."""

import ast
import re

import pytest

from tests.wheels import ROOT

THE_FILE = "tp_core/device_types.py"
TYPES = {"cuda", "hip", "hpu", "mps", "mtia", "npu", "privateuseone", "sim", "xla", "xpu"}
MODULES = {"torch", "torch.backends", "torch._C"}
PROPERTIES = {f"is_{name}" for name in TYPES}
NAMED = re.compile(rf"\b(?:is_)?(?:{'|'.join(TYPES)})\b")

# Files that name one nevertheless, and why that is no decision by the type.
ELSEWHERE = {
    "tp_context/_fused_kernels.py": "torch names its switches for attention kernels, those of the CPU too",
    "tp_shard/nn/_own_forward.py": "a property of a tensor that a forward may read",
}


def named_types(source):
    """Return the lines that name a type of device: as a text, a module of torch or a property of a tensor."""
    looks = (names_as_text, names_as_import, names_as_attribute)
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if any(look(node) for look in looks)})


def names_as_text(node):
    """Whether it is a name, f"cuda:{index}", or a call that looks how a name begins."""
    if isinstance(node, ast.Constant):
        return node.value in TYPES | PROPERTIES
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        return node.values[0].value.partition(":")[0] in TYPES
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        of_beginning = node.func.attr in {"startswith", "removeprefix"}
        texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        return of_beginning and any(str(text).rstrip(":") in TYPES for text in texts)
    return False


def names_as_import(node):
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return False
    of = getattr(node, "module", None) or ""
    paths = [f"{of}.{alias.name}".strip(".").split(".") for alias in node.names]
    return any(path[0] == "torch" and not TYPES.isdisjoint(path) for path in paths)


def names_as_attribute(node):
    if not isinstance(node, ast.Attribute):
        return False
    is_module = node.attr in TYPES and ast.unparse(node.value) in MODULES
    return is_module or node.attr in PROPERTIES


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
        'f"cuda:{index}"',
        'str(device).startswith("cuda:")',
        "import torch.cuda as card",
        "from torch import mps",
        "from torch.cuda import synchronize",
        "torch.backends.mps.is_available()",
    ],
)
def test_each_kind_of_naming_is_seen(line):
    assert named_types(line) == [1]


@pytest.mark.parametrize("line", ['devices="cuda:0"', "torch.accelerator.synchronize()", "value.cuda()"])
def test_examples_and_calls_for_any_accelerator_are_none(line):
    assert named_types(line) == []
