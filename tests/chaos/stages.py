"""Kill ranks of every layout with stages, with averages of weights: python -m tests.chaos.stages --kills 60

By turns, runs of all layouts are ended in steps and in validations, by SIGKILL or by SIGTERM, and started
again. They end with the weights, and the averages of them, of an undisturbed run, bit for bit. The models are
tiny, and nearly all of the time is that of starts.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.chaos.run import launch, same_weights

KILLS = 4  # of a run, which has an epoch more
FILES = ("end.pt", "average.pt")


@dataclass(frozen=True)
class Layout:
    """How ranks hold a model.

    Attributes:
        ranks: The number of ranks.
        options: Those of backends.
        average: The average of weights.
        backend: The backend.
        calls: How often a rank calls the step for a batch.
        more: Further arguments of the program.
    """

    ranks: int
    options: dict[str, Any]
    average: str
    backend: str = "pipeline"
    calls: int = 4
    more: list[str] = field(default_factory=list)

    def arguments(self) -> list[str]:
        """Return the arguments of the program."""
        return [
            *("--options", json.dumps(self.options), "--average", self.average, "--calls", str(self.calls)),
            *("--layers", "8", "--everywhere", "--workers", "0", *self.more),
        ]


def _pipeline(world_size: int, average: str, **options: Any) -> Layout:
    laps = 1 if options.get("schedule", "1F1B") == "1F1B" else 2
    return Layout(world_size, {"pipeline": {"microbatches": 4, **options}}, average, calls=4 * laps)


def _shard(average: str) -> Layout:
    options = {"pipeline": {"ranks": 2, "weights": "shard", "microbatches": 4}, "shard": {"data": "ddp"}}
    return Layout(4, options, average, more=["--tensor", "2"])


def _context(average: str) -> Layout:
    options = {"pipeline": {"ranks": 2, "microbatches": 4}}
    return Layout(4, options, average, backend="context", more=["--weights", "pipeline"])


LAYOUTS = {
    "pipeline, moving": _pipeline(2, "moving"),
    "pipeline in a V, stochastic": _pipeline(2, "stochastic", schedule="ZBVZeroBubble"),
    "pipeline x fsdp, moving": _pipeline(4, "moving", ranks=2, data="fsdp"),
    "pipeline x fsdp, stochastic": _pipeline(4, "stochastic", ranks=2, data="fsdp"),
    "pipeline x ddp, stochastic": _pipeline(4, "stochastic", ranks=2),
    "shard x pipeline, moving": _shard("moving"),
    "shard x pipeline, stochastic": _shard("stochastic"),
    "context x pipeline, moving": _context("moving"),
    "context x pipeline, stochastic": _context("stochastic"),
}


def run_calmly(folder: Path, layout: Layout, *, kills: int) -> None:
    """Run without a kill, for as long as one with this many."""
    run = {"epochs": kills + 1, "seed": 0, "ranks": layout.ranks, "backend": layout.backend}
    launch(folder, kills=0, timeout_s=600, more=layout.arguments(), **run)


def run_wildly(folder: Path, layout: Layout, *, kills: int, seed: int) -> Counter[str]:
    """Run until it is done, with a start for each kill and one more; return how often which signal came."""
    run = {"epochs": kills + 1, "seed": seed, "ranks": layout.ranks, "backend": layout.backend}
    for start in range(kills + 1):
        more = [*layout.arguments(), "--start", str(start)]
        restarts = 0 if start < kills else None
        launch(folder, kills=kills, timeout_s=300, more=more, restarts=restarts, **run)
    return Counter(note.read_text() for note in (folder / "kills").glob("*"))


def end_alike(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights and averages, bit for bit."""
    return all(same_weights(one, other, name=name) for name in FILES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="how many to end with the same weights")
    parser.add_argument("--seed", type=int, default=0, help="the first one of the chaos")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    args = parser.parse_args()
    same: Counter[str] = Counter()
    others = 0
    with tempfile.TemporaryDirectory() as name:
        calm = {layout: Path(name, f"calm-{number}") for number, layout in enumerate(args.layouts)}
        for seed in count(args.seed):
            for layout in args.layouts:
                if sum(same.values()) >= args.kills:
                    break
                began = time.monotonic()
                if not calm[layout].exists():
                    run_calmly(calm[layout], LAYOUTS[layout], kills=KILLS)
                with tempfile.TemporaryDirectory() as wild:
                    killed = run_wildly(Path(wild), LAYOUTS[layout], kills=KILLS, seed=seed)
                    is_same = end_alike(calm[layout], Path(wild))
                if is_same:
                    same += killed
                else:
                    others += sum(killed.values())
                verdict = "the same weights" if is_same else "OTHER WEIGHTS"
                took = time.monotonic() - began
                print(f"{layout}, seed {seed}: {dict(killed)}, {took:.0f} s: {verdict}", flush=True)
            if sum(same.values()) >= args.kills:
                break
    print(f"{sum(same.values())} kills ended with the same weights: {dict(same)}; {others} with others")
    sys.exit(1 if others else 0)


if __name__ == "__main__":
    main()
