"""The command `tp`, called in this process as a shell calls it."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from tp_core.cli import main
from tp_core.plugins import registry

__all__ = ["KINDS", "doctor", "new_plugin", "run", "seen"]

KINDS = ("backend", "adapter")


def run(words):
    """Run `tp` with these words, and return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tp", *words])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code


@contextlib.contextmanager
def seen(distribution):
    """Have the registry of the process see a made-up distribution, as long as it is there."""
    try:
        with distribution:
            registry.refresh()
            yield registry
    finally:
        registry.refresh()


def doctor():
    """Return what `tp doctor` reports."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(["doctor", "--ranks", "0", "--json"])
    return json.loads(out.getvalue())


def new_plugin(kind, name, folder):
    """Write a plugin with `tp new-plugin`, and return its folder."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(["new-plugin", kind, name, "--into", str(folder), "--json"]) == 0
    return Path(json.loads(out.getvalue())["folder"])
