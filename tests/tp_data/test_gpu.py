"""Packed rows on an accelerator: batches arrive whole, and the check leaves no trace."""

import pytest
import torch
from torch.utils.data import DataLoader
from tp_core import recursive_to
from tp_data import check_packing

from tests.accelerator import GPU, KIND
from tests.tp_data.test_packed_rows import Decoder, packed

pytestmark = pytest.mark.gpu


def test_the_check_leaves_the_generators_of_the_accelerator_as_they_were():
    model = Decoder().to(GPU)
    batch = recursive_to(packed(), GPU)
    states = torch.get_device_module(KIND).get_rng_state(GPU), torch.get_rng_state()
    check_packing(model, batch)
    assert torch.equal(states[0], torch.get_device_module(KIND).get_rng_state(GPU))
    assert torch.equal(states[1], torch.get_rng_state())


def test_pinned_rows_arrive_whole():
    rows = packed()
    for batch in DataLoader([rows] * 3, batch_size=None, pin_memory=True):
        moved = recursive_to(batch, GPU, non_blocking=True)
        for name in ("input_ids", "position_ids", "labels"):
            assert moved[name].device == torch.device(GPU)
            assert torch.equal(moved[name].cpu(), rows[name])
