"""What runs in autograd's own threads, which only accelerators have."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_core.compare import nudged

from tests.accelerator import GPU

pytestmark = pytest.mark.gpu


def test_a_nudge_is_repeated_where_a_checkpoint_computes_again():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(GPU), torch.randn(3, 4, device=GPU)
    with nudged(model, torch.float32):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
