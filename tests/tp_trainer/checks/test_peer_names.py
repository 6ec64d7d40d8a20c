"""Mistakes of those who come from another trainer: each is answered with what to write here."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_trainer import Trainer

from tests.reference_training import squared_error

LOADER = DataLoader(TensorDataset(torch.ones(6, 3), torch.ones(6, 2)), batch_size=3)


def run(step, **options):
    model = nn.Linear(3, 2)
    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.fit(model, SGD(model.parameters(), lr=0.1), LOADER, step=step, **options)


ARGUMENTS = {
    "the model": (
        lambda: Trainer(nn.Linear(1, 1)),
        r"Trainer\(\): too many positional .* trainer.fit\(model",
    ),
    "an argument of fit": (lambda: Trainer(epochs=3), r"no argument 'epochs', which belongs to fit\(\)"),
    "a misspelled one": (lambda: Trainer(presicion="fp32"), "'presicion'; did you mean 'precision'"),
    "no step": (
        lambda: run(squared_error, val_loader=LOADER),
        r"'val_loader'; write fit\(validation=loader\)",
    ),
    "a clipping": (lambda: run(squared_error, clip_grad_norm=1.0), r"write fit\(clip_norm=1.0\)"),
    "options without a backend": (
        lambda: run(squared_error) if Trainer(options={"static_graph": True}).session else None,
        r"write options=DdpOptions\(static_graph=...\)",
    ),
    "a module for a step": (lambda: run(nn.Linear(1, 1)), "step must be a function step.model, batch"),
}


@pytest.mark.parametrize("mistake", ARGUMENTS)
def test_an_argument_of_another_trainer_is_answered(mistake):
    call, answer = ARGUMENTS[mistake]
    with pytest.raises(ConfigError, match=answer):
        call()


def test_attributes_of_other_trainers_are_answered_and_others_are_not():
    trainer = Trainer()
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        _ = trainer.nonsense
    assert not hasattr(trainer, "global_step")


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
