"""Memory and time of filling a split model from the safetensors files of the whole one.

python -m tests.bench.shard.load

Two gloo ranks; a stack of column and row layers and an embedding, 0.5 GiB in float32 in four files. Peaks
are above what a rank held before; the bound is 1.15 times its shard, plus the largest tensor.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import tp_shard as ts
from safetensors.torch import load_file, save_file
from torch import nn
from tp_testing import run_ranks

from tests.bench._results import Results
from tests.bench.shard.head import forget_peak, status

LAYERS, WIDTH, HIDDEN, ROWS = 14, 1024, 4096, 16_384
FILES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)


def model() -> nn.Module:
    """Return the split model, without memory."""
    with torch.device("meta"):
        whole = nn.ModuleDict(
            {
                "table": nn.Embedding(ROWS, WIDTH),
                "blocks": nn.ModuleList(Block() for _ in range(LAYERS)),
            }
        )
    return ts.parallelize(whole, {"table": ts.Vocab(), "blocks.*.up": ts.Column(), "blocks.*.down": ts.Row()})


def write(folder: Path) -> float:
    """Write random weights of the whole model, and return the MiB of the largest tensor."""
    shapes = {n: t.shape for n, t in model().state_dict().items()}
    names = list(shapes)
    for i in range(FILES):
        own = {n: torch.randn(shapes[n]) for n in names[i::FILES]}
        save_file(own, folder / f"model-{i}.safetensors")
    places = {n: f"model-{i % FILES}.safetensors" for i, n in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return max(shape.numel() for shape in shapes.values()) * 4 / 2**20


def loaded(variant: str, folder: str) -> dict[str, float]:
    """Load one model in one way, and return what it took of this rank."""
    ts.distributed.init_process_group()
    torch.set_num_threads(1)
    split = model()
    ts.collect_state_dict(nn.Linear(2, 2), {})  # what is imported late
    before = forget_peak()
    start = time.perf_counter()
    if variant == "load_pretrained":
        ts.load_pretrained(split, folder)
    else:
        state = {
            n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()
        }
        split.load_state_dict(ts.relocate_state_dict(split, state), assign=True)
    seconds = time.perf_counter() - start
    peak = status("VmHWM") - before
    return {"peak": peak, "seconds": seconds, "shard": sum(p.nbytes for p in split.parameters()) / 2**20}


if __name__ == "__main__":
    with Results("shard-load") as results, tempfile.TemporaryDirectory() as place:
        largest = write(Path(place))
        results.add("largest tensor", largest, "MiB")
        for variant in ("load_pretrained", "load_file and relocate_state_dict"):
            runs = [run_ranks(loaded, 2, variant, place, timeout_s=200) for _ in range(3)]
            peak = max(rank["peak"] for run in runs for rank in run)
            shard = runs[0][0]["shard"]
            results.add(f"{variant}: shard", shard, "MiB")
            results.add(f"{variant}: peak", peak, "MiB", note=f"at most {1.15 * shard + largest:.0f}")
            results.add(f"{variant}: peak, ratio", peak / shard, "x the shard")
            results.add(f"{variant}: seconds", statistics.median(r[0]["seconds"] for r in runs), "s")
