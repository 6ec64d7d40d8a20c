"""Evaluation: loaders in evaluation mode, each sample of all ranks once."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tp_core import tree_map
from tp_core.data import PreparedLoader

from tp_lightning._arguments import Stage
from tp_lightning._module import call_step, length_of, transferred
from tp_lightning._run import ModuleRun

# The field of a run that says which stage it is in.
_FLAGS = {"validate": "validating", "test": "testing", "predict": "predicting"}


def evaluate(
    run: ModuleRun,
    stage: Stage,
    loaders: Sequence[Any],
    take: Callable[[Any], None] | None = None,
    most: int | None = None,
) -> dict[str, Tensor]:
    """Go through loaders with the module in evaluation mode; return what it logged."""
    model = run.model
    own = run.own
    word = "validation" if stage == "validate" else stage
    step = f"{word}_step"
    prepared = [
        given if isinstance(given, PreparedLoader) else own.prepare(given, training=False)
        for given in loaders
    ]
    modes = {module: module.training for module in model.modules()}
    was_training = run.training
    run.training = False
    setattr(run, _FLAGS[stage], True)
    model.eval()
    try:
        with torch.no_grad():
            if run.prepared is not None:
                run.session.sync_buffers(run.prepared)
            run.results.begin(f"on_{word}_start", None)
            run.hook(f"on_{word}_start")
            run.results.begin(f"on_{word}_epoch_start", None)
            run.hook(f"on_{word}_epoch_start")
            for number, loader in enumerate(prepared):
                if len(prepared) > 1:
                    run.results.loader = number
                else:
                    run.results.loader = None
                limit = most
                if limit is None and run.batches.of(stage) is not None:
                    limit = run.batches.cut(stage, length_of(loader) or 0)
                for index, yielded in enumerate(itertools.islice(loader, limit)):
                    batch = transferred(model, yielded)
                    run.results.begin(step, batch)
                    run.hook(f"on_{word}_batch_start", batch, index, number)
                    output = own.run(
                        lambda m, b, i=index, n=number: call_step(m, step, b, i, n), model, batch
                    )
                    run.hook(f"on_{word}_batch_end", output, batch, index, number)
                    if take is not None:
                        take(_all_rows(run, output))
            run.results.loader = None
            run.results.begin(f"on_{word}_epoch_end", None)
            run.hook(f"on_{word}_epoch_end")
            logged = run.results.finish(word, run.session)
            run.hook(f"on_{word}_end")
    finally:
        for module, mode in modes.items():
            module.training = mode
        run.training = was_training
        run.validating = False
        run.testing = False
        run.predicting = False
    return logged


def _all_rows(run: ModuleRun, output: Any) -> Any:
    if run.session.data_size == 1:
        return output
    return tree_map(lambda v: run.session.gather(v) if isinstance(v, Tensor) and v.dim() else v, output)
