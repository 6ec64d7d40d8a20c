"""Parts of tensors that the host keeps are put together where the ranks can exchange them."""

from types import SimpleNamespace

import torch
from tp_core.state import whole


def test_what_the_host_keeps_is_moved_to_the_device_of_its_mesh():
    moved = []

    class Kept:
        device = torch.device("cpu")
        device_mesh = SimpleNamespace(device_type="cuda")

        def to(self, device):
            moved.append(device)
            return SimpleNamespace(full_tensor=lambda: "the whole")

    assert whole(Kept()) == "the whole"
    assert moved == ["cuda"]
