"""What the commands of each recipe's page take: python -m tests.bench.recipes [PAGE ...]

The measure is the time of the processor, of all processes together: on two cores that are idle a reader waits
no longer. `docs/recipes/index.md` has it. The page "ray" needs Ray, and "notebooks" is
its notebook, run by `jupyter execute`.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench._results import FOLDER, Results
from tests.integration.test_recipes import EXAMPLES, commands

PAGES = FOLDER.parent / "recipes"
WITHOUT = ("index", "kubernetes", "slurm")  # pages for clusters, and the list of all


def seconds(page: Path) -> float:
    """Run the commands of a page in a folder of their own, and return their time of the processor."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
        environ = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "TP_STATE_DIR": f"{folder}/state"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        notebook = "jupyter execute ranks.ipynb"
        script = "\n".join(["set -e", *(commands(page) or [notebook])])
        subprocess.run(["bash", "-c", script], cwd=folder, env=environ, check=True, timeout=1800)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    names = sys.argv[1:] or sorted(page.stem for page in PAGES.glob("*.md") if page.stem not in WITHOUT)
    with Results("recipes", is_part=bool(sys.argv[1:])) as results:
        for name in names:
            taken = seconds(PAGES / f"{name}.md")
            results.add(name, taken, "s")


if __name__ == "__main__":
    main()
