"""Print how the public surface differs from the text of it; `--write` accepts it as it is."""

import difflib
import sys
from pathlib import Path

from tests.surface.names import PACKAGES, package_text
from tests.surface.outside import commands_text, files_text, plugins_text

__all__ = ["differences", "texts"]

FOLDER = Path(__file__).parent


def texts():
    """Return the surface of now, by the name of the file that has it."""
    found = {f"{package}.txt": package_text(package) for package in PACKAGES}
    return found | {"commands.txt": commands_text(), "files.txt": files_text(), "plugins.txt": plugins_text()}


def differences(found):
    """Return a unified diff from the files here to what was found."""
    lines = []
    for name, text in found.items():
        path = FOLDER / name
        before = path.read_text().splitlines() if path.exists() else []
        lines += difflib.unified_diff(
            before, text.splitlines(), f"tests/surface/{name}", "now", lineterm="", n=6
        )
    return "\n".join(lines)


def main():
    found = texts()
    if "--write" in sys.argv[1:]:
        for name, text in found.items():
            (FOLDER / name).write_text(text)
    else:
        print(differences(found), end="")


if __name__ == "__main__":
    main()
