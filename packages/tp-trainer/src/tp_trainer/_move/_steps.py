"""Run some optimizer steps of a script, and write the loss of each backward pass: for ``tp move --prove``.

    python -m tp_trainer._move._steps FOLDER STEPS SCRIPT [ARGUMENTS]

Both scripts get their data in order and without dropout, from one seed, on the CPU: what a loader shuffles is
another order in each library. A call for a CUDA device is one for the CPU.
"""

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler, RandomSampler
from tp_core.internal import call_without_attention_dropout, is_inner_step

from tp_trainer import Trainer


def main(folder: str, steps: int, script: str, *arguments: str) -> None:
    """Run the script until it has made ``steps`` optimizer steps."""
    losses: list[float] = []
    _record(losses)
    _on_the_cpu()
    RandomSampler.__iter__ = lambda self: iter(range(len(self)))  # type: ignore[method-assign]
    _patch(
        DistributedSampler, "__init__", lambda own, self, *a, **k: own(self, *a, **{**k, "shuffle": False})
    )
    _without_dropout()
    out = Path(folder) / f"{os.environ.get('RANK', '0')}.json"
    done = 0

    def count(optimizer: Optimizer, *_: Any) -> None:
        nonlocal done
        done += not is_inner_step(optimizer)
        if done == steps:
            out.write_text(json.dumps(losses), encoding="utf-8")
            raise SystemExit(0)

    register_optimizer_step_post_hook(count)
    torch.manual_seed(0)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    out.write_text(json.dumps(losses), encoding="utf-8")


def _patch(owner: Any, name: str, call: Any) -> None:
    """Replace a function by ``call(own, *arguments)``."""
    own = getattr(owner, name)
    setattr(owner, name, functools.wraps(own)(lambda *a, **k: call(own, *a, **k)))


def _record(losses: list[float]) -> None:
    """Record the loss of each backward pass; on tp's trainer, the loss of all ranks."""
    within = False

    def of_tensor(own: Any, loss: Tensor, *args: Any, **options: Any) -> Any:
        if not within:
            losses.append(float(loss.detach()))
        return own(loss, *args, **options)

    def of_trainer(own: Any, trainer: Trainer, loss: Any, **options: Any) -> Any:
        nonlocal within
        losses.append(float(trainer.global_loss(loss)))
        within = True
        try:
            return own(trainer, loss, **options)
        finally:
            within = False

    _patch(torch.Tensor, "backward", of_tensor)
    _patch(Trainer, "backward", of_trainer)


def _without_dropout() -> None:
    """Keep what dropout would drop, also in attention, where dropout is no module."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        _patch(nn.functional, name, lambda own, x, *_, **__: x)  # noqa: ARG005
    attend = "scaled_dot_product_attention"
    _patch(nn.functional, attend, lambda own, *a, **k: call_without_attention_dropout(own, a, k))


def _on_the_cpu() -> None:
    """Take calls for devices of CUDA for calls for the CPU."""

    def moved(own: Any, value: Any, *args: Any, **options: Any) -> Any:
        if args and (isinstance(args[0], int) or str(args[0]).startswith("cuda")):
            args = ("cpu", *args[1:])
        return own(value, *args, **options)

    _patch(torch.Tensor, "to", moved)
    _patch(nn.Module, "to", moved)
    _patch(torch.cuda, "set_device", lambda own, *_: None)  # noqa: ARG005
    _patch(dist, "init_process_group", lambda own, *a, **k: own(*a[1:], **{**k, "backend": "gloo"}))
    whole = {"device_ids": None}
    ddp = nn.parallel.DistributedDataParallel
    _patch(ddp, "__init__", lambda own, self, module, *_, **k: own(self, module, **{**k, **whole}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
