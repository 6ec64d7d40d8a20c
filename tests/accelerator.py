"""The accelerator of tests marked `gpu`: a card, or with `pytest --device=sim` simulated devices.

Where there is none the names are CUDA's, and the tests are deselected.
"""

import pytest
import torch
import torch.distributed as dist

_FOUND = torch.accelerator.current_accelerator(check_available=True)
KIND = _FOUND.type if _FOUND is not None else "cuda"
COUNT = torch.accelerator.device_count()
GPU, SECOND = f"{KIND}:0", f"{KIND}:1"
COLLECTIVES = dist.get_default_backend_for_device(KIND)

needs_cuda = pytest.mark.skipif(KIND != "cuda", reason="needs CUDA: graphs, compilers and the like")
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two accelerators")


def on_a_card(value, otherwise):
    """Return a size for a card, which has to be kept busy, and another one for devices that are simulated."""
    return value if KIND == "cuda" else otherwise


def keep_busy():
    """Have the current stream do nothing for about a tenth of a second; simulated devices are late anyway."""
    if KIND == "cuda":
        torch.cuda._sleep(200_000_000)  # clock cycles


def group_of_two():
    """Return the process group of two ranks, and the device of each: NCCL needs two cards, gloo one."""
    return (COLLECTIVES, (GPU, SECOND)) if COUNT >= 2 else ("gloo", (GPU, GPU))
