"""One loss scale serves several optimizers and models: each gradient is divided once, by its own scale."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer
from tp_trainer.tuning._batch_size import traceless  # private: its callers pick their own steps

PRECISIONS = ["fp32", "fp16-mixed"]


def batches():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)) * 0.02
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def squares(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean()


def linear(seed=1):
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.bias)
    return model


def moves(train):
    """Return what a training does to its parameters, in float32 and with scaled losses."""
    results = {}
    for precision in PRECISIONS:
        with Trainer(seed=0, progress=False, devices="cpu", precision=precision) as trainer:
            results[precision] = train(trainer)
    return results


def assert_close(results):
    exact, scaled = (results[precision] for precision in PRECISIONS)
    for name, move in exact.items():
        assert move.norm() > 0, name
        assert (scaled[name] - move).norm() < 0.01 * move.norm(), name  # fp16 has 11 bits


def moved(model, before):
    return {name: value - before[name] for name, value in model.state_dict().items()}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_two_optimizers_of_one_model_get_gradients_that_are_divided_once(order, clip_norm):
    def train(trainer):
        model, loader = trainer.prepare(linear(), batches())
        optimizers = [torch.optim.SGD([model.weight], lr=0.5), torch.optim.SGD([model.bias], lr=0.5)]
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for batch in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            trainer.backward(trainer.run(squares, model, batch))
            for number in order:
                assert trainer.update(model, optimizers[number], clip_norm=clip_norm)
        return moved(model, before)

    assert_close(moves(train))


def test_a_gradient_that_stays_after_its_update_is_added_to():
    def train(trainer):
        model, loader = trainer.prepare(linear(), batches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for batch in loader:  # the gradients are never cleared: each step has all before it
            trainer.backward(trainer.run(squares, model, batch))
            assert trainer.update(model, optimizer)
        return moved(model, before)

    assert_close(moves(train))


def test_an_overflow_of_one_model_leaves_the_gradients_of_another_right():
    def large(model, batch):
        return squares(model, batch) * 3e8

    firsts = []

    def train(trainer):
        one, two, loader = trainer.prepare(linear(1), linear(2), batches())
        first = torch.optim.SGD(one.parameters(), lr=1e-12)
        second = torch.optim.SGD(two.parameters(), lr=0.5)
        before = {name: value.clone() for name, value in two.state_dict().items()}
        stepped = []
        for batch in loader:
            first.zero_grad()
            second.zero_grad()
            trainer.backward(trainer.run(large, one, batch))
            trainer.backward(trainer.run(squares, two, batch))
            stepped.append((trainer.update(one, first), trainer.update(two, second)))
        assert {second for _, second in stepped} == {True}
        firsts.append({first for first, _ in stepped})
        return moved(two, before)

    assert_close(moves(train))
    assert firsts == [{True}, {False}]


def test_models_that_share_a_parameter_divide_its_gradient_once():
    def train(trainer):
        one, two = linear(1), linear(2)
        two.weight = one.weight
        one, two, loader = trainer.prepare(one, two, batches())
        first = torch.optim.SGD(one.parameters(), lr=0.5)
        second = torch.optim.SGD([two.bias], lr=0.5)
        before = {name: value.clone() for name, value in [*one.state_dict().items()]}
        for batch in loader:
            for parameter in (one.weight, one.bias, two.bias):
                parameter.grad = None
            trainer.backward(trainer.run(squares, one, batch))
            trainer.backward(trainer.run(squares, two, batch))
            assert trainer.update(two, second)
            assert trainer.update(one, first)
        return moved(one, before)

    assert_close(moves(train))


def test_gradients_of_an_older_scale_are_put_at_the_new_one():
    def train(trainer):
        """One model accumulates over two batches, while another overflows in each."""
        one, two, loader = trainer.prepare(linear(1), linear(2), batches())
        first = torch.optim.SGD(one.parameters(), lr=1e-12)
        second = torch.optim.SGD(two.parameters(), lr=0.5)
        before = {name: value.clone() for name, value in two.state_dict().items()}
        for number, batch in enumerate(loader):
            first.zero_grad()
            trainer.backward(trainer.run(squares, two, batch))
            trainer.backward(trainer.run(squares, one, batch) * 3e8)
            trainer.update(one, first)
            if number % 2:
                assert trainer.update(two, second)
                second.zero_grad()
        return moved(two, before)

    assert_close(moves(train))


def test_the_scale_is_halved_once_for_all_models_of_a_step():
    one, two, loader = linear(1), linear(2), batches()
    with Trainer(seed=0, progress=False, devices="cpu", precision="fp16-mixed") as trainer:
        one, two, loader = trainer.prepare(one, two, loader)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-12) for model in (one, two)]
        scales = []
        for batch in loader:
            for model, optimizer in zip((one, two), optimizers, strict=True):
                optimizer.zero_grad()
                loss = trainer.run(squares, model, batch)
                trainer.backward(loss * 3e12)
                scales.append(
                    trainer._preparation.scaler.scale
                )  # private: nothing shows it before a step is kept
            assert [trainer.update(m, o) for m, o in zip((one, two), optimizers, strict=True)] == [
                False,
                False,
            ]
    assert scales == [65536.0, 65536.0, 32768.0, 32768.0, 16384.0, 16384.0, 8192.0, 8192.0]


def test_a_trial_between_two_passes_leaves_gradients_at_their_scale():
    def train(trainer):
        model, loader = trainer.prepare(linear(), batches())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for batch in loader:  # the gradients are never cleared
            trainer.backward(trainer.run(squares, model, batch))
            assert trainer.update(model, optimizer)
            with traceless(trainer, model, optimizer):
                trainer.backward(trainer.run(squares, model, batch))  # as where no memory is left for a step
        return moved(model, before)

    assert_close(moves(train))
