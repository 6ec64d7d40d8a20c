"""The small training as a script of tp: ``tp verify`` runs it on each backend, as it runs a user's."""

import os

import torch
from torch.utils.data import DataLoader
from tp_core.device_types import wide_float
from tp_core.plugins import registry
from tp_trainer import Trainer
from tp_verify import _small_training as small

name = os.environ["TP_BACKEND"]
options = {backend.item.name: backend.item.self_test_options for backend in registry.backends()}
dtype = wide_float(*map(torch.device, os.environ["TP_DEVICES"].split(",")))

with Trainer(seed=0, progress=False, options={name: options[name]}) as trainer:
    model = small.build(dtype)
    trainer.fit(
        model,
        small.make_optimizer(model),
        DataLoader(small.make_samples(small.SAMPLES, dtype), batch_size=small.BATCH),
        step=small.step,
        epochs=small.EPOCHS,
        validation=DataLoader(small.make_samples(small.HELD_OUT, dtype), batch_size=small.BATCH),
        clip_norm=small.MAX_NORM,
    )
