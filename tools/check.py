"""Run the tests, and beside them the checks of types and imports: ``hatch run test``.

Tests wait, for other processes and for the disk, and the checks never do. So they take the time in which no
test has work. Arguments are pytest's. What a check printed stands at the end.
"""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BESIDE = ("types", "imports")


def main(arguments: list[str]) -> int:
    """Run all of it, and return the exit status of what failed, of the tests first."""
    scripts: dict[str, str] = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"]
    checks = {
        name: _start(scripts[name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in BESIDE
    }
    tests = scripts["unit"].replace("{args}", shlex.join(arguments))
    status = _start(tests).wait()
    for name, check in checks.items():
        output, _ = check.communicate()
        print(f"\n{name}: {scripts[name]}\n{output}", end="")
        status = status or check.returncode
    return status


def _start(script: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(script, shell=True, cwd=ROOT, **options)  # noqa: S602 - hatch has a shell read it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
