"""Mistakes of those who come from another trainer: each is answered with what to write here."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, SelectionError, StateError, StepError
from tp_trainer import Trainer

LOADER = DataLoader(TensorDataset(torch.ones(6, 3), torch.ones(6, 2)), batch_size=3)


def run(step, **options):
    model = nn.Linear(3, 2)
    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.fit(model, SGD(model.parameters(), lr=0.1), LOADER, step=step, **options)


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


ARGUMENTS = {
    "an epoch's number": (lambda: Trainer(max_epochs=3), r"'max_epochs'; write fit\(epochs=5\)"),
    "a device": (
        lambda: Trainer(device="cuda"),
        r"no argument 'device'; write Trainer\(devices=\"cuda:0\"\)",
    ),
    "the model": (
        lambda: Trainer(nn.Linear(1, 1)),
        r"Trainer\(\): too many positional .* trainer.fit\(model",
    ),
    "an argument of fit": (lambda: Trainer(epochs=3), r"no argument 'epochs', which belongs to fit\(\)"),
    "a misspelled one": (lambda: Trainer(presicion="fp32"), "'presicion'; did you mean 'precision'"),
    "no optimizer": (
        lambda: Trainer().fit(nn.Linear(1, 1), LOADER),
        r"'train_loader'; write fit\(model, opt",
    ),
    "no step": (lambda: run(loss_of, val_loader=LOADER), r"'val_loader'; write fit\(validation=loader\)"),
    "a clipping": (lambda: run(loss_of, clip_grad_norm=1.0), r"write fit\(clip_norm=1.0\)"),
    "16 bits": (lambda: Trainer(precision=16), "precision=16 is 'fp16-mixed' here"),
    "brain floats": (lambda: Trainer(precision="bf16"), "is 'bf16-mixed' or 'bf16-true' here"),
    "options without a backend": (
        lambda: run(loss_of) if Trainer(options={"static_graph": True}).session else None,
        r"write options=DdpOptions\(static_graph=...\)",
    ),
    "a module for a step": (lambda: run(nn.Linear(1, 1)), "step must be a function step.model, batch"),
}


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_an_argument_of_another_trainer_is_answered(mistake):
    call, answer = ARGUMENTS[mistake]
    with pytest.raises(ConfigError, match=answer):
        call()


@pytest.mark.parametrize(
    ("name", "answer"),
    [("DDP", "did you mean 'ddp'"), ("nccl", "'nccl' is a transport of torch.distributed")],
)
def test_a_backend_is_meant(name, answer):
    with pytest.raises(SelectionError, match=answer):
        Trainer(backend=name)


def test_attributes_of_other_trainers_are_answered_and_others_are_not():
    trainer = Trainer()
    with pytest.raises(AttributeError, match=r"has no 'test'; write trainer.evaluate\(model, loader"):
        _ = trainer.test
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        _ = trainer.nonsense
    assert not hasattr(trainer, "global_step")


async def asynchronous(model, batch):
    return loss_of(model, batch)


def yielding(model, batch):
    yield loss_of(model, batch)


OUTPUTS = {
    "an output object": (lambda m, b: SimpleNamespace(loss=loss_of(m, b)), "return its loss: output.loss"),
    "a tuple": (lambda m, b: (loss_of(m, b), 1.0), "a tuple of 2; return one value"),
    "a coroutine": (asynchronous, "write the step without async"),
    "a generator": (yielding, "return the loss in place of yielding it"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_a_step_returned_is_named(output):
    step, answer = OUTPUTS[output]
    with pytest.raises(StepError, match=answer):
        run(step)


def test_a_step_that_takes_the_batch_for_something_else_learns_what_it_is():
    with pytest.raises(TypeError) as raised:
        run(lambda model, batch: model(batch["x"]).mean())
    assert raised.value.__notes__ == [
        "the batch that the step was given, on its device: list of 2 (Tensor(3, 3), Tensor(3, 2))"
    ]


def test_weights_under_a_key_are_named(tmp_path):
    torch.save({"state_dict": nn.Linear(3, 2).state_dict()}, tmp_path / "w.pt")
    with pytest.raises(StateError, match="has the weights under 'state_dict'"):
        Trainer(devices="cpu").load_model(nn.Linear(3, 2), tmp_path / "w.pt")
