"""Kill random ranks at random moments and compare with an undisturbed run: python tests/chaos/run.py

The ranks are started by `tp launch --max-restarts`; each kill restarts all of them from the last
checkpoint. In the end the weights have to be those of a run that nobody disturbed, bit for bit.
With `--backend fsdp` parameters are sharded over the ranks, with `--tensor 2` layers are split over pairs of
ranks and their shards sharded over the pairs. With `--sizes 2,4,1,2` each start has another number
of ranks than the one before it, and the weights are those of one device to rounding. With `--backend
pipeline --layers 8` each rank has some of the layers, and after a restart others; `tests.chaos.stages` takes
all layouts with stages in turn.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

PROGRAM = Path(__file__).with_name("program.py")


def launch(
    folder: Path,
    *,
    kills: int,
    epochs: int,
    seed: int,
    ranks: int,
    timeout_s: float,
    backend: str = "auto",
    more: Sequence[str] = (),
    restarts: int | None = None,
) -> int:
    """Run the program in ``ranks`` processes until it is done; return how many of its ranks were killed.

    Args:
        folder: Where it writes.
        kills: How many of its starts end by a kill.
        epochs: How many it trains.
        seed: Of the chaos.
        ranks: How many processes.
        timeout_s: How long it may take.
        backend: The trainer's backend.
        more: Further arguments of the program.
        restarts: How often it is started again, as often as it is killed by default. Where that is less, the
            run is left where a kill has ended it.

    Raises:
        RuntimeError: Something else than a kill has ended it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    again = kills if restarts is None else restarts
    command = [sys.executable, "-m", "tp_core.cli", "launch", "-n", str(ranks), "--max-restarts", str(again)]
    arguments = ["--kills", str(kills), "--seed", str(seed), "--epochs", str(epochs), *more]
    before = len(list((folder / "kills").glob("*")))
    done = subprocess.run(
        [*command, str(PROGRAM), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TP_BACKEND": backend},
    )
    killed = len(list((folder / "kills").glob("*")))
    if done.returncode and (again >= kills or killed == before):
        msg = f"the run ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(msg)
    return killed


def launch_in_sizes(
    folder: Path,
    sizes: Sequence[int],
    *,
    seed: int,
    timeout_s: float,
    backend: str,
    tensor: int = 1,
    layers: int = 2,
) -> int:
    """Run the program in other numbers of processes after each kill; the last start is left alone.

    Returns:
        How many ranks were killed.
    """
    killed = 0
    for start, ranks in enumerate(sizes):
        splits = tensor > 1 and ranks % tensor == 0
        chosen = "single" if ranks == 1 else "shard" if splits else backend
        killed = launch(
            folder,
            kills=len(sizes) - 1,
            epochs=len(sizes),
            seed=seed,
            ranks=ranks,
            timeout_s=timeout_s,
            backend=chosen,
            more=[
                *("--still", "--start", str(start), "--layers", str(layers)),
                *("--tensor", str(tensor if splits else 1)),
            ],
            restarts=0 if start < len(sizes) - 1 else None,
        )
    return killed


def same_weights(one: Path, other: Path, *, to_rounding: bool = False, name: str = "end.pt") -> bool:
    """Whether two runs ended with the same weights, bit for bit or but for rounding."""
    a, b = (torch.load(folder / name, weights_only=True) for folder in (one, other))
    if to_rounding:
        return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=1e-8, atol=1e-10) for n in a)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        calm, wild = Path(name, "calm"), Path(name, "wild")
        began = time.monotonic()
        if args.sizes:
            more = ["--still", "--layers", str(args.layers)]
            launch(calm, kills=0, epochs=len(args.sizes), seed=0, ranks=1, timeout_s=900, more=more)
            kills = launch_in_sizes(
                wild,
                args.sizes,
                seed=args.seed,
                timeout_s=900,
                backend=args.backend,
                tensor=args.tensor,
                layers=args.layers,
            )
            is_same, where = same_weights(calm, wild, to_rounding=True), f"{args.sizes} ranks"
        else:
            # No start gets further than one epoch, so that all kills happen.
            run = {"epochs": args.kills + 1, "seed": args.seed, "ranks": args.ranks, "backend": args.backend}
            more = ["--tensor", str(args.tensor), "--layers", str(args.layers)]
            launch(calm, kills=0, timeout_s=900, more=more, **run)
            kills = launch(wild, kills=args.kills, timeout_s=300 + 120 * args.kills, more=more, **run)
            is_same, where = same_weights(calm, wild), f"{args.ranks} ranks"
        verdict = "the same weights" if is_same else "OTHER WEIGHTS"
        print(f"{kills} kills over {where}, {time.monotonic() - began:.0f} s: {verdict}")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
