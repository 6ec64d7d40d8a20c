"""What a step takes, from a run of it on stand-ins, is what it takes."""

import threading

import pytest
import torch
from torch import nn
from tp_trainer._memory import measure_footprint  # private: a command adds much to it

WIDTH, ROWS = 64, 32


def step(model, batch):
    return nn.functional.mse_loss(model(batch), batch)


def make(**kwargs):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, **kwargs), nn.ReLU(), nn.Linear(WIDTH, WIDTH, **kwargs))


BATCH = torch.zeros(ROWS, WIDTH)
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH) * 4
ROW_NBYTES = ROWS * WIDTH * 4


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.AdamW(p, foreach=True), 2),
        (torch.optim.Adagrad, 1),
    ],
)
def test_an_optimizer_is_asked_what_it_keeps(kind, values):
    model = make()
    found = measure_footprint(model, kind(model.parameters()))
    assert abs(found.optimizer - values * PARAMETERS) <= 64  # counts of steps
    assert found.weights == found.gradients == PARAMETERS


def test_state_that_is_there_already_is_counted_and_left_alone():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, BATCH + 1).backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [float(state["step"]) for state in optimizer.state.values()]
    found = measure_footprint(model, optimizer, BATCH, step)
    assert abs(found.optimizer - 2 * PARAMETERS) <= 64
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert steps == [float(state["step"]) for state in optimizer.state.values()]


def test_activations_are_those_of_the_highest_point():
    found = measure_footprint(make(), None, BATCH, step)
    # After the forward pass: both layers' outputs, ReLU's, and the loss; at its height one gradient more.
    assert 3 * ROW_NBYTES <= found.activations <= 6 * ROW_NBYTES + WIDTH * WIDTH * 4
    assert found.batch == ROW_NBYTES
    assert not found.unknown


def test_frozen_parameters_have_no_gradients_and_no_state():
    model = make()
    model[0].requires_grad_(False)
    found = measure_footprint(model, torch.optim.AdamW(model.parameters()), BATCH, step)
    assert found.gradients == PARAMETERS // 2
    assert abs(found.optimizer - PARAMETERS) <= 64


def test_values_of_the_shape_of_frozen_weights_are_no_gradients():
    model = make()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    found = measure_footprint(model, None, torch.zeros(WIDTH, WIDTH), step)
    assert found.alone == found.activations


def test_copies_in_a_lower_type_are_known_for_what_they_are():
    found = measure_footprint(make(), None, BATCH, step, precision="bf16-mixed")
    assert found.casts == WIDTH * WIDTH * 2  # of the second layer: the first one's input needs no gradient
    found = measure_footprint(make(), None, BATCH, step, precision="bf16-true")
    assert found.weights == PARAMETERS // 2
    assert found.casts == 0


class OfWeights(nn.Module):
    """Computes its weight anew from the parameter, as DoRA does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        return x @ (self.weight * 2).T.sin()


def test_values_made_of_weights_are_smaller_where_these_are_gathered_in_a_lower_type():
    found = measure_footprint(OfWeights(), None, BATCH, step, precision="bf16-mixed")
    assert found.casts == 0
    # The doubled weight and its sine: in fp32, with a copy for the product; or in bf16 both.
    assert found.activations - found.alone >= WIDTH * WIDTH * (4 + 4 + 2 - 2 - 2)


def test_tied_weights_count_once():
    model = make()
    model[2].weight = model[0].weight
    found = measure_footprint(model, None, BATCH, step)
    assert found.weights == found.gradients == PARAMETERS - WIDTH * WIDTH * 4


def test_a_model_on_the_meta_device_will_do():
    meta = make(device="meta")
    model = make()
    found = [measure_footprint(m, torch.optim.AdamW(m.parameters()), BATCH, step) for m in (meta, model)]
    assert found[0] == found[1]


def test_a_step_that_looks_at_values_is_unknown_and_said_why():
    found = measure_footprint(make(), None, BATCH, lambda model, batch: float(step(model, batch)))
    assert found.activations is None
    assert found.unknown.startswith("the step needs values: ")


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_model_that_cannot_be_copied_has_its_weights_known(precision):
    model = make()
    model.lock = threading.Lock()
    found = measure_footprint(model, torch.optim.AdamW(model.parameters()), BATCH, step, precision=precision)
    assert found.weights == found.gradients == PARAMETERS // (2 if precision == "bf16-true" else 1)
    assert found.unknown.startswith("the model cannot be copied: TypeError: ")


def test_random_numbers_go_on_as_if_nothing_had_been():
    before = torch.get_rng_state()
    model = nn.Sequential(make(), nn.Dropout())
    torch.set_rng_state(before)
    measure_footprint(model, None, BATCH, step)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_modules_keep_is_known_by_name():
    model = nn.ModuleList([make(), make()])

    def through(model, batch):
        for block in model:
            batch = block(batch)
        return batch.square().mean()

    found = measure_footprint(model, None, BATCH, through)
    assert sorted(found.kept) == sorted(found.passed) == ["0", "1"]
    assert found.passed["0"] == ROW_NBYTES
    assert found.kept["0"] >= 2 * ROW_NBYTES


def test_attention_with_dropout_is_one_kernel_on_devices_that_have_one():
    words = torch.zeros(2, 512, WIDTH)

    def of(device):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        return measure_footprint(
            layer, None, words, lambda m, b: m(b).square().mean(), device=torch.device(device)
        )

    weights = 2 * 4 * 512 * 512 * 4  # (batch, heads, queries, keys)
    here, elsewhere = of("cpu"), of("cuda")
    assert here.activations > weights > elsewhere.activations
    assert (here.attentions, elsewhere.attentions) == (0, 1)
