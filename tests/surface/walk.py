"""Print the figures of the house: what a reader has to walk through, and how much there is of it.

`python -m tests.surface.walk` prints a table. Each walk runs twice in its process; the second is counted.
"""

import ast
import collections
import inspect
import json
import multiprocessing
import re
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = str(ROOT / "packages")
WORDS = re.compile(r"(?<![a-z])(tell|told|tells|whose)(?![a-z])", re.IGNORECASE)


def fit(batches):
    """One epoch of `fit` on one device."""
    import torch
    from tp_trainer import Trainer

    model = torch.nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.ones(2 * batches, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        trainer.fit(model, optimizer, loader, step=lambda model, batch: model(batch[0]).mean())


def selection():
    """Choosing a backend, with the plugins found anew."""
    from tp_core.plugins import registry
    from tp_trainer import Trainer

    registry.refresh()
    str(Trainer(progress=False, devices="cpu").selection)


def items(count, engine):
    """A map over items on one worker."""
    import tp_runner

    list(tp_runner.map(abs, range(count), engine=engine, n_workers=1, progress=False))


def _traced(pipe, walk, args):
    """Count calls of functions in each file of ours; a module's own code and what goes on in it are none."""
    import torch  # noqa: F401 - what it imports is no part of a walk

    calls = collections.Counter()

    def note(frame, event, _):
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not a module's or a class's body
        if event == "call" and is_function and code.co_filename.startswith(SOURCES):
            calls[code.co_filename] += 1

    walk(*args)  # what is imported and made once is no part of it
    threading.setprofile(note)
    sys.setprofile(note)
    walk(*args)
    sys.setprofile(None)
    pipe.send((len(calls), calls.total()))


def walked(walk, *args):
    """Return how many files a walk enters, and how many calls it makes in them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_traced, args=(theirs, walk, args))
    process.start()
    theirs.close()
    found = ours.recv()  # or EOFError, where the walk has failed
    process.join(60)
    return found


def house():
    """Return what is counted in the files: sources, and what tests import of them."""
    paths = sorted(ROOT.glob("packages/*/src/**/*.py"))
    found, children, homes = collections.Counter(files=len(paths)), collections.defaultdict(list), {}
    for path in paths:
        text = path.read_text()
        lines = text.splitlines()
        found["lines"] += len(lines)
        package = path.relative_to(ROOT / "packages").parts[0]
        found[f"{package} files"] += 1
        found[f"{package} lines"] += len(lines)
        found["comment lines"] += sum(line.lstrip().startswith("#") for line in lines)
        found["words in prose"] += len(WORDS.findall(text.replace("_", "-")))
        tree = ast.parse(text)
        for node in ast.walk(tree):
            is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if isinstance(node, (ast.Import, ast.ImportFrom)) or is_all:
                found["import and __all__ lines"] += node.end_lineno - node.lineno + 1
            name = getattr(node, "name", None) or getattr(node, "arg", None)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.arg)) and name:
                found["words in names"] += any(map(WORDS.fullmatch, name.split("_")))
            if isinstance(node, ast.ClassDef):
                homes[package, node.name] = path
                is_template = "templates" in path.parts  # a package of its own
                for base in [] if is_template else node.bases:
                    children[package, ast.unparse(base).partition("[")[0].rpartition(".")[2]].append(
                        node.name
                    )
    single = [  # `class Executor(concurrent.futures.Executor)` has a parent of its own name elsewhere
        key[1] for key, below in children.items() if key in homes and len(below) == 1 and below != [key[1]]
    ]
    found["single-subclass parents"] = len(single)
    imports = re.compile(r"^\s*(?:from (tp_\S+) import (.+)|import (tp_\S+))", re.MULTILINE)
    for path in ROOT.glob("tests/**/*.py"):
        for module, names, other in imports.findall(path.read_text()):
            found["imports of tp_* in tests"] += 1
            private = re.search(r"\._[a-z]", module + other) or re.match(r"_[a-z]", names)
            found["private ones of them"] += bool(private)
    return found, single


def main():
    found, single = house()
    few, some, many = walked(fit, 8), walked(fit, 24), walked(items, 10, "thread")
    more = walked(items, 210, "thread")
    figures = {
        "files that one epoch of fit enters": few[0],
        "calls in it, of 8 batches": few[1],
        "calls per further batch": (some[1] - few[1]) / 16,
        "files that Trainer().selection enters": walked(selection)[0],
        "files that a map of 10 items enters, thread": many[0],
        "calls per further item, thread": (more[1] - many[1]) / 200,
        **dict(sorted(found.items())),
    }
    if "--json" in sys.argv:
        print(json.dumps(figures | {"parents of one": sorted(single)}, indent=1))
        return
    for name, value in figures.items():
        print(f"| {name} | {value:,} |")


if __name__ == "__main__":
    main()
