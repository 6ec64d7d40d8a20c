"""Kill random ranks at random moments and compare with an undisturbed run: python tests/chaos/run.py

The ranks are started by `tp launch --max-restarts`; each kill restarts all of them from the last
checkpoint. In the end the weights have to be those of a run that nobody disturbed, bit for bit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

PROGRAM = Path(__file__).with_name("program.py")


def launch(folder: Path, *, kills: int, epochs: int, seed: int, ranks: int, timeout_s: float) -> int:
    """Run the program in ``ranks`` processes until it is done; return how many of its ranks were killed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tp_core.cli", "launch", "-n", str(ranks), "--max-restarts", str(kills)]
    done = subprocess.run(
        [*command, str(PROGRAM), str(folder), str(kills), str(seed), str(epochs)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        msg = f"the run ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        raise RuntimeError(msg)
    return len(list((folder / "kills").glob("*")))


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, bit for bit."""
    a, b = (torch.load(folder / "end.pt", weights_only=True) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        calm, wild = Path(name, "calm"), Path(name, "wild")
        epochs = args.kills + 1  # no start gets further than one epoch, so that all kills happen
        launch(calm, kills=0, epochs=epochs, seed=args.seed, ranks=args.ranks, timeout_s=900)
        began = time.monotonic()
        limit_s = 300 + 120 * args.kills
        kills = launch(
            wild, kills=args.kills, epochs=epochs, seed=args.seed, ranks=args.ranks, timeout_s=limit_s
        )
        verdict = "the same weights, bit for bit" if same_weights(calm, wild) else "OTHER WEIGHTS"
        print(f"{kills} kills over {args.ranks} ranks, {time.monotonic() - began:.0f} s: {verdict}")
    sys.exit(0 if verdict.startswith("the same") else 1)


if __name__ == "__main__":
    main()
