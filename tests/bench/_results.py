"""What a benchmark measured: shown as it comes, and written as JSON, from which documents are rendered.

``docs/benchmarks/NAME.json`` has the figures of one benchmark, and what they were measured on and with.
"""

import json
import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

__all__ = ["FOLDER", "Results"]

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PEERS = ["accelerate", "easycore", "joblib", "lightning-fabric", "mpire", "ray", "torchshard", "trl"]
PEERS += ["spmd-types", "webdataset"]


class Results:
    """The figures of one benchmark; its file is written when the block ends without an error.

    Args:
        name: Of the benchmark: its file's.
        folder: Where the file is written.
        is_part: Whether a part of the benchmark is run: figures of the file that it does not measure stay.

    Example:
        >>> with Results("start") as results:  # doctest: +SKIP
        ...     results.add("importing everything", 19.0, "ms", note="at most 60")
    """

    def __init__(self, name: str, folder: Path = FOLDER, *, is_part: bool = False) -> None:
        self.name, self.folder = name, folder
        self._is_part = is_part
        self.figures: dict[str, float] = {}

    def add(self, figure: str, value: float, unit: str, *, note: str = "") -> None:
        """Note and print a figure; its name is what documents quote it by."""
        self.figures[figure] = value
        print(f"{figure:<84} {value:>12,.3f} {unit:<14} {note}", flush=True)

    def __enter__(self) -> Self:
        print(f"\n== {self.name}", flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"{self.name}.json"
            known = json.loads(file.read_text("utf-8"))["figures"] if self._is_part and file.exists() else {}
            found = {"measured": date.today().isoformat(), "machine": machine(), "versions": versions()}
            text = json.dumps(found | {"figures": known | self.figures}, indent=2)
            file.write_text(text + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "cuda": devices,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of torch, and of the peers that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
