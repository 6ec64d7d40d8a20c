"""On a CUDA device, with NCCL and a single rank."""

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from tp_core.testing import run_ranks

pytestmark = pytest.mark.gpu


def one_rank_with_nccl():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    ts.distributed.init_process_group()
    x = torch.randn(4, 9, device="cuda")
    for dim in (None, 0, 1):
        torch.manual_seed(3)
        plain = nn.Linear(9, 7, device="cuda")
        torch.manual_seed(3)
        layer = ts.nn.ParallelLinear(9, 7, dim=dim, device="cuda")
        assert torch.equal(layer.weight, plain.weight)
        torch.testing.assert_close(layer(x), plain(x))
        layer(x).square().sum().backward()
        assert ts.clip_grad_norm_(layer, 1.0).is_cuda
        state = ts.collect_state_dict(layer, layer.state_dict(), to="rank0")
        assert not state["weight"].is_cuda
        layer.load_state_dict(ts.relocate_state_dict(layer, state))
    table = ts.nn.ParallelEmbedding(11, 4, dim=0, device="cuda")
    assert table(torch.tensor([0, 10], device="cuda")).shape == (2, 4)
    dist.destroy_process_group()


def test_one_rank_on_cuda_equals_torchs_own():
    run_ranks(one_rank_with_nccl, 1)
