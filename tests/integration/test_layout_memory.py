"""The memory of layouts that split a plain model, as `tp estimate` lists them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError
from tp_core.plugins import Job, registry
from tp_trainer._memory import measure_footprint  # private: a trainer's, with its own reserve

RANKS, WORDS = 8, 2048


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Words(nn.Module):
    """Blocks with an embedding and a head, as transformers' models have them."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=8)
        self.words = nn.Embedding(WORDS, 64)
        self.blocks = nn.ModuleList(nn.Sequential(Block()) for _ in range(3))
        self.head = nn.Linear(64, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def needs_of(name, model, tokens):
    """Return the needs of a backend's layouts by their axes, where the readers of each get these tokens."""
    (backend,) = [found.item for found in registry.backends() if found.item.name == name]
    job = Job(
        devices=(torch.device("cpu"),),
        environment=LaunchEnvironment(world_size=RANKS, local_world_size=RANKS),
        model=model,
        footprint=measure_footprint(model, None, tokens, loss),
    )
    found = {}
    for layout in backend.layouts(job):
        if "fsdp" in layout.axes:  # which shares the weights of stages over data ranks
            continue
        footprint = replace(job.footprint, part=layout.readers / layout.ranks)
        need = backend.estimate_memory(replace(job, options=layout.options, footprint=footprint))
        found[tuple(ranks for ranks in layout.axes.values() if ranks > 1)] = need
    return job.footprint, found


def test_split_tensors_share_weights_and_have_whole_logits_at_the_loss():
    tokens, model = torch.zeros(2, 32, dtype=torch.long), Words()
    footprint, needs = needs_of("shard", model, tokens)
    need = needs[RANKS,]
    assert need.weights == pytest.approx(footprint.weights / RANKS, rel=0.01)  # all of it is in layers
    # Log-probabilities and two gradients of whole logits, before there is a gradient of a weight.
    assert need.gradients + need.activations >= 3 * tokens.numel() * WORDS * 4


def test_stages_of_split_tensors_need_less_than_stages_of_whole_ones():
    _, needs = needs_of("pipeline", Words(), torch.zeros(16, 32, dtype=torch.long))
    whole, split = needs[4, 2], needs[2, 2, 2]
    assert split.weights < 0.6 * whole.weights
    assert split.optimizer < 0.6 * whole.optimizer


def test_a_step_without_attention_has_no_layout_of_split_sequences():
    with pytest.raises(ConfigError, match="calls no attention of torch"):
        needs_of("context", Words(), torch.zeros(2, 32, dtype=torch.long))
