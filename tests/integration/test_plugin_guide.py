"""What the guide for authors of plugins writes passes the kits that it names."""

import ast
import json
import re
from pathlib import Path

import pytest
from tp_testing import AdapterConformance, CallbackConformance, EngineConformance, LoggerConformance

GUIDES = Path(__file__).parents[2] / "docs" / "plugins"
GUIDE_OF_TESTS = GUIDES.with_name("plugin-tests.md")


def defined_in_the_block_of(name, guide):
    """Return a class that a block of a guide defines, with its imports."""
    blocks = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [b for b in blocks if f"class {name}(" in b]
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef)  # and not what uses them
    body = [node for node in ast.parse(block).body if isinstance(node, kept)]
    namespace = {"__name__": "guide"}
    exec(compile(ast.Module(body, []), str(guide), "exec"), namespace)
    return namespace[name]


class TestTheAdapterOfTheGuide(AdapterConformance):
    adapter = defined_in_the_block_of("SpreadAdapter", GUIDES / "adapter.md")


class TestTheEngineOfTheGuide(EngineConformance):
    engine = defined_in_the_block_of("FuturesEngine", GUIDES / "engine.md")


class TestTheLoggerOfTheGuide(LoggerConformance):
    logger = defined_in_the_block_of("OneFileLogger", GUIDES / "logger.md")

    def make(self, folder):
        return self.logger(folder / "numbers.json")

    def read(self, folder):
        found = {}
        for name, step, value in json.loads((folder / "numbers.json").read_text()):
            found.setdefault(name, []).append((step, value))
        return found


class TestTheLoggerOfTheGuideOfTests(defined_in_the_block_of("TestLines", GUIDE_OF_TESTS)):
    """Makes and reads it as the guide does."""


@pytest.mark.slow
class TestTheCallbackOfTheGuide(CallbackConformance):
    callback = defined_in_the_block_of("Energy", GUIDES / "callback.md")

    def make(self, folder):
        return self.callback()
