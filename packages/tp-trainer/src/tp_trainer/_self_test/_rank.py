"""Each process of ``tp test``: ``python -m tp_trainer._self_test._rank BACKEND DEVICES FOLDER``."""

import json
import os
import sys
from pathlib import Path

import torch
from tp_core.errors import SelectionError
from tp_core.plugins import registry

from tp_trainer._self_test._training import train

__all__ = ["main"]


def main(name: str, devices: str, folder: Path) -> None:
    """Train on a backend; a rank that fails leaves the reason in ``folder``."""
    try:
        backend = next(c.item for c in registry.backends() if c.item.name == name)
        train(backend, [torch.device(device) for device in devices.split(",")], folder)
    except BaseException as error:
        said = {"unfit": isinstance(error, SelectionError), "reason": f"{type(error).__name__}: {error}"}
        (folder / f"error-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(said))
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
