"""A module that is moved keeps its parameters, where torch would put others into it."""

import pytest
import torch
from torch import nn
from tp_core import move_module

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens))[0])


@pytest.fixture
def replaced():
    """What torch does where a device's tensors are of another kind than the CPU's, as an extension's are."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_parameters_stay_the_same_and_tied(replaced):
    module = Tied()
    before = dict(module.named_parameters())
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    assert move_module(module, CPU) is module
    after = dict(module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert list(after) == list(before)
    assert module.head.weight is module.embed.weight
    torch.testing.assert_close(dict(module.state_dict()), expected)
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_an_optimizer_of_before_trains_what_was_moved(replaced):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    move_module(module, CPU)
    before = [p.detach().clone() for p in module.parameters()]
    module(torch.arange(6).view(2, 3)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_gradients_move_along(replaced):
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    gradient = module.weight.grad.clone()
    move_module(module, CPU)
    torch.testing.assert_close(module.weight.grad, gradient)


def test_to_another_kind_of_device_it_is_torchs_own():
    module = Tied()
    before = module.embed.weight
    move_module(module, torch.device("meta"))
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert module.head.weight is module.embed.weight
    assert before.device.type in {"cpu", "meta"}
