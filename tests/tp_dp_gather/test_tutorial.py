"""The two test cases of the tutorial, with one, two and three devices."""

import pytest
import torch
from torch import nn, optim
from tp_dp_gather import DataParallel


class NetworkA(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(5, 2)

    def forward(self, x):
        return self.model(x)


class NetworkB(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 1)

    def forward(self, x):
        return self.model(x)


class ComplexNetworkA(NetworkA):
    def forward(self, x):
        output = self.model(x)
        return {"outputs": {"out1": output, "out2": output}, "second_output": output}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_case_one_features_stay_in_parts_between_two_networks(count):
    net_a, net_b = NetworkA(), NetworkB()
    before = net_a.model.weight.detach().clone()
    optimizer = optim.Adam(net_a.parameters(), lr=1e-4, betas=(0.5, 0.9))
    devices = ["cpu"] * count
    a = DataParallel(net_a, devices, gather_to_one_device=False)
    b = DataParallel(net_b, devices, inputs_are_scattered=True)
    x = torch.ones(16, 5)
    a_out = a(x)
    assert type(a_out) is tuple
    assert a_out[0].shape == (-(-16 // count), 2)
    b_out = b(a_out)
    torch.testing.assert_close(b_out, net_b(net_a(x)))
    b_out.mean().backward()
    optimizer.step()
    assert not torch.equal(net_a.model.weight, before)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_case_two_some_outputs_are_gathered_and_others_stay_in_parts(count):
    net_a, net_b = ComplexNetworkA(), NetworkB()
    devices = ["cpu"] * count
    a = DataParallel(net_a, devices, except_keywords=["out1", "out2"])
    b = DataParallel(net_b, devices, inputs_are_scattered=True)
    x = torch.randn(16, 5)
    a_out = a(x)
    out1, out2 = a_out["outputs"]["out1"], a_out["outputs"]["out2"]
    assert type(out1) is type(out2) is tuple
    assert out1[0].shape == (-(-16 // count), 2)
    torch.testing.assert_close(a_out["second_output"], net_a.model(x))
    b_out = b(tuple(o1 + o2 for o1, o2 in zip(out1, out2, strict=True)))
    torch.testing.assert_close(b_out, net_b(2 * net_a.model(x)))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_devices_go_through_the_chain(rows):
    net_a, net_b = NetworkA(), NetworkB()
    a = DataParallel(net_a, ["cpu"] * 4, gather_to_one_device=False)
    b = DataParallel(net_b, ["cpu"] * 4, inputs_are_scattered=True)
    x = torch.randn(rows, 5)
    parts = a(x)
    assert len(parts) == rows
    torch.testing.assert_close(b(parts), net_b(net_a(x)))


def test_the_chain_passes_parts_along_without_a_copy():
    a = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False)
    b = DataParallel(nn.Identity(), ["cpu"] * 2, gather_to_one_device=False, inputs_are_scattered=True)
    x = torch.randn(4, 5)
    first, second = a(x), b(a(x))
    assert [p.data_ptr() for p in first] == [p.data_ptr() for p in second]
    assert first[0].data_ptr() == x.data_ptr()
