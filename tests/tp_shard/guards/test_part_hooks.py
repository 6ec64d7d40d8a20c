"""Hooks that see a rank's part of a tensor are named in a line."""

import logging
from functools import partial

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Callback, Trainer

from tests.models import Block


def make_model():
    torch.manual_seed(1)
    return ts.parallelize(
        nn.Sequential(Block(4, 6), nn.Linear(4, 1)), {"0.up": ts.Column(), "0.down": ts.Row()}
    )


def gradient_hook(gradient):
    return gradient * 2


def module_hook(module, args, output):
    return None


class PutsHooks(Callback):
    def on_fit_start(self, run):
        run.model[0].up.weight.register_hook(gradient_hook)


def lines_of(plant, *, callbacks=(), options=None):
    """Return the lines on hooks of a run."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_shard").addHandler(handler)
    ts.distributed.init_process_group(-1)
    try:
        with Trainer(seed=0, devices="cpu", backend="shard", options=options, progress=False) as trainer:
            model = make_model()
            plant(model)
            x = torch.randn(8, 4)
            batches = DataLoader(TensorDataset(x), batch_size=4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(
                model, optimizer, batches, step=mean_of, epochs=2, callbacks=[make() for make in callbacks]
            )
    finally:
        ts.distributed.destroy_process_group()
        logging.getLogger("tp_shard").removeHandler(handler)
    return lines


def mean_of(model, batch):
    return model(batch[0]).square().mean()


def on_split_layers(model):
    model[0].down.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model[0].up.register_forward_hook(module_hook)
    model[0].down.register_full_backward_hook(module_hook)


def on_whole_tensors(model):
    model[1].weight.register_hook(gradient_hook)
    model[0].down.bias.register_hook(gradient_hook)
    model[0].register_forward_hook(module_hook)


@pytest.mark.parametrize("options", [None, {"shard": {"data": "fsdp"}}], ids=["whole", "fsdp"])
def test_hooks_on_split_layers_are_named_once(pair, options):
    found = pair.run(partial(lines_of, on_split_layers, callbacks=[PutsHooks], options=options))
    assert [line.partition(" see")[0] for line in found[0]] == [
        "the hooks on '0.up', '0.down.weight', '0.down'",
        "the hooks on '0.up.weight'",
    ]
    assert "is split over 2 ranks" in found[0][0]
    assert found[1] == []


def test_hooks_on_whole_tensors_are_not(pair):
    assert pair.run(lines_of, on_whole_tensors) == [[], []]
