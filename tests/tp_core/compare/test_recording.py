"""What modules return is recorded by place and call; a check leaves no trace."""

import random
import threading

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_core.compare import Recording, TensorPlace, undisturbed


class Twice(nn.Module):
    """One layer called twice, the second time computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return checkpoint(self.layer, self.layer(x), use_reentrant=False), x.sum()


def test_outputs_are_recorded_as_modules_end_by_call_and_place():
    model = Twice()
    with Recording(model) as recording:
        output, total = model(torch.ones(2, 3))
    assert list(recording.outputs) == [
        TensorPlace("layer", 0, ""),
        TensorPlace("layer", 1, ""),
        TensorPlace("", 0, "0"),
        TensorPlace("", 0, "1"),
    ]
    assert torch.equal(recording.outputs["layer", 1, ""].tensor, output)
    assert recording.outputs["", 0, "1"].tensor == total
    assert not recording.gradients


def test_what_a_checkpoint_computes_again_is_recorded_once():
    model = Twice()
    with Recording(model, gradients=True) as recording:
        model(torch.ones(2, 3))[0].sum().backward()
    assert [place.call for place in recording.outputs if place.module == "layer"] == [0, 1]


def test_gradients_are_recorded_at_the_outputs_and_the_inputs():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with Recording(model, gradients=True) as recording:
        model(torch.ones(2, 3)).sum().backward()
    keys = list(recording.gradients)
    assert keys[0][1] == "output"
    assert keys[-1] == (TensorPlace("0", 0, ""), "output")
    given = recording.gradients[TensorPlace("1", 0, "0"), "input"].tensor
    assert torch.equal(given, model[1].weight.detach().expand(2, 3))


def test_inputs_are_recorded_as_modules_begin():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.ones(2, 3)
    with Recording(model, inputs=True) as recording:
        model(x)
    assert [place.module for place in recording.inputs] == ["", "0", "1"]
    assert torch.equal(recording.inputs["0", 0, "0"].tensor, x)
    assert torch.equal(recording.inputs["1", 0, "0"].tensor, recording.outputs["0", 0, ""].tensor)


class AddsInPlace(nn.Module):
    def forward(self, x):
        return x.add_(1.0)


def test_a_tensor_that_several_modules_hand_on_is_copied_once_unless_it_is_written():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Identity(), AddsInPlace())
    with torch.no_grad(), Recording(model, inputs=True) as recording:
        model(torch.ones(1, 2))
    linear, *others = [recording.outputs[TensorPlace(name, 0, "")].tensor for name in ("0.0", "0", "1")]
    assert all(other is linear for other in others)
    assert recording.inputs[TensorPlace("2", 0, "0")].tensor is linear
    written = recording.outputs[TensorPlace("2", 0, "")].tensor
    assert torch.equal(written, linear + 1.0)
    assert recording.outputs[TensorPlace("", 0, "")].tensor is written


def test_names_can_be_changed_and_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    names = {"": None, "0": "first", "1": None}
    with Recording(model, plain_name=names.get) as recording:
        model(torch.ones(2, 3))
    assert [place.module for place in recording.outputs] == ["first"]


def test_calls_of_other_threads_are_left_out():
    model = nn.Linear(3, 3)
    with Recording(model) as recording:
        thread = threading.Thread(target=model, args=(torch.ones(2, 3),))
        thread.start()
        thread.join()
        assert not recording.outputs
        model(torch.ones(2, 3))
    assert len(recording.outputs) == 1


def test_an_evaluation_amid_a_training_is_left_out():
    model = nn.Linear(3, 3)
    with Recording(model) as recording:
        model(torch.ones(2, 3))
        model.eval()
        with torch.no_grad():
            model(torch.zeros(2, 3))
        assert len(recording.outputs) == 1
        model(torch.zeros(2, 3))  # trained in this mode
    assert len(recording.outputs) == 2


def test_an_evaluation_is_recorded_where_it_is_asked_for():
    model = nn.Linear(3, 3).eval()
    with Recording(model) as recording, torch.no_grad():
        model(torch.ones(2, 3))
    assert len(recording.outputs) == 1


def test_a_check_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[2].eval()
    model(torch.randn(4, 3)).sum().backward()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    states = torch.get_rng_state(), random.getstate()
    with undisturbed(model):
        assert all(p.grad is None for p in model.parameters())
        model.train()
        model(torch.randn(4, 3)).square().sum().backward()
        random.random()
    assert [module.training for module in model] == [True, True, False]
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
