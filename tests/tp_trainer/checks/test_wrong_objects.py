"""Models, optimizers, loaders and schedulers that cannot be: a sentence each, before the first step."""

from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_trainer import (
    FunctionMetric,
    GradientRules,
    Limits,
    SchedulerOptions,
    Trainer,
    Validation,
)

from tests.reference_training import squared_error


def make_data():
    x = torch.arange(6.0).reshape(6, 1)
    return TensorDataset(x, 2 * x)


def make_loader():
    return DataLoader(make_data(), batch_size=2)


MODEL = nn.Linear(1, 1)
OPTIMIZER = SGD(MODEL.parameters(), lr=1e-3)
OTHER = SGD(nn.Linear(1, 1).parameters(), lr=1e-3)


def never(model, batch):
    pytest.fail("a step was made")


def fit(**kwargs):
    arguments = {
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "train_loader": make_loader(),
        "step": never,
    } | kwargs
    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.fit(**arguments)


WRONG = {
    "models in a list": (
        {"model": [MODEL, MODEL]},
        r"fit\(\) takes one model, got a list of 2 \(Linear\); put several into one module.* trainer",
    ),
    "models by name": ({"model": {"a": MODEL}}, r"takes one model, got a dict of 1 \(Linear\)"),
    "no model": ({"model": None}, r"fit\(\) takes a model, a torch.nn.Module, got NoneType: None"),
    "optimizers in a list": (
        {"optimizer": [OPTIMIZER, OPTIMIZER]},
        r"fit\(\) takes one optimizer, got a list of 2 \(SGD\); .*parameter groups.*trainer.prepare\(model",
    ),
    "no optimizer": ({"optimizer": None}, "must be a torch.optim.Optimizer, got NoneType: None"),
    "a scheduler for an optimizer": ({"optimizer": StepLR(OPTIMIZER, 1)}, "must be a torch.optim.Optimizer"),
    "lbfgs": (
        {"optimizer": torch.optim.LBFGS(MODEL.parameters())},
        r"LBFGS.step\(\) needs a closure.*optimizer.step\(closure\) in a loop of your own",
    ),
    "train loaders in a list": (
        {"train_loader": [make_loader(), make_loader()]},
        r"train_loader must be one loader, got a list of 2 \(DataLoader\); join the datasets",
    ),
    "train loaders by name": (
        {"train_loader": {"a": make_loader()}},
        "train_loader must be one loader, got a dict",
    ),
    "a path": (
        {"train_loader": "data.csv"},
        "train_loader must be a DataLoader or another iterable of batches",
    ),
    "a tensor": ({"train_loader": torch.ones(4, 1)}, "train_loader must be a DataLoader .* got Tensor"),
    "validation loaders in a list": (
        {"validation": [make_loader(), make_loader()]},
        r"validation must be one loader, got a list of 2 \(DataLoader\); give several by name",
    ),
    "validation loaders without names": (
        {"validation": {1: make_loader()}},
        r"validation must be a loader, or a dict of loaders by names without '/', got the names \[1\]",
    ),
    "a function for a loader": (
        {"validation": dict},
        "validation must be a DataLoader or another iterable of batches, got type: <class 'dict'>",
    ),
    "validation on a dataset": ({"validation": make_data()}, "validation must yield batches, got a dataset"),
    "no step": (
        {"step": None},
        r"step must be a function step\(model, batch\) that returns the loss, got NoneType",
    ),
    "schedulers in a list": (
        {"scheduler": [StepLR(OPTIMIZER, 1), StepLR(OPTIMIZER, 2)]},
        r"scheduler must be one scheduler, got a list of 2 \(StepLR\); join several with SequentialLR",
    ),
    "an optimizer for a scheduler": (
        {"scheduler": OPTIMIZER},
        "must move a learning rate, got an optimizer, SGD",
    ),
    "text for a limit": ({"clip_norm": "1"}, "clip_norm must be None or a number greater than 0, got '1'"),
    "two numbers of steps": (
        {"max_steps": 1, "limits": Limits(max_steps=2)},
        r"max_steps=1 and limits=Limits\(max_steps=2\) are given; give one",
    ),
    "limits in a dict": ({"limits": {"epochs": 1}}, r"limits must be Limits\(...\), got dict: {'epochs': 1}"),
    "rules in a dict": ({"gradients": {}}, r"gradients must be GradientRules\(...\), got dict: {}"),
    "no number for a limit": (
        {"clip_norm": float("nan")},
        "clip_norm must be None or a number greater than 0, got nan",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_told_before_the_first_step(case):
    arguments, words = WRONG[case]
    with pytest.raises(ConfigError, match=words):
        fit(**arguments)


WRONG_OPTIONS = {
    "a step of a function": (
        lambda: Validation(dict, step=never),
        r"Validation\(step=..., metrics=...\) go with a loader; a function makes its own results",
    ),
    "metrics in a list": (
        lambda: Validation(make_loader(), metrics=[FunctionMetric(max)]),
        "metrics must be a dict of metrics by name",
    ),
    "no steps between validations": (
        lambda: Validation(make_loader(), every_steps=0),
        r"Validation\(every_steps=...\) must be a whole number from 1, got 0",
    ),
    "a truth for batches": (
        lambda: Validation(make_loader(), sanity_batches=True),
        r"Validation\(sanity_batches=...\) must be a whole number from 0, got True",
    ),
    "a model to validate on": (lambda: Validation(MODEL), "validation must be a DataLoader .*, got Linear"),
    "a metric for no scheduler": (
        lambda: SchedulerOptions(StepLR(OPTIMIZER, 1), monitor="val_f1"),
        "monitor='val_f1' is what ReduceLROnPlateau looks at, and the scheduler is none",
    ),
    "a metric at every step": (
        lambda: SchedulerOptions(ReduceLROnPlateau(OPTIMIZER), every="step"),
        "ReduceLROnPlateau looks at a metric of an epoch, so it is stepped with every='epoch'",
    ),
    "a truth for a limit": (
        lambda: GradientRules(clip_value=True),
        "clip_value must be None or a number greater than 0, got True",
    ),
    "half a skipped step": (
        lambda: GradientRules(max_skipped=0.5),
        "max_skipped must be a whole number from 0, got 0.5",
    ),
    "an epoch of less than nothing": (
        lambda: Limits(steps_per_epoch=-1),
        "steps_per_epoch must be a whole number from 1, got -1",
    ),
    "few batches": (
        lambda: Limits(overfit_batches=0),
        "overfit_batches must be a whole number from 1, got 0",
    ),
    "text for seconds": (
        lambda: Limits(step_timeout_s="5"),
        "step_timeout_s must be None or a number of seconds above 0, got '5'",
    ),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_options_check_their_values(case):
    make, words = WRONG_OPTIONS[case]
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_file_in_the_place_of_a_folder_for_checkpoints_is_told_before_the_first_step(tmp_path):
    (tmp_path / "taken").write_text("kept")
    with pytest.raises(
        FileExistsError, match=r"taken cannot be made, or is no folder: .*\nwhile the folder for"
    ):
        fit(checkpoint=tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "kept"


def test_what_only_looks_wrong_goes_on():
    x = torch.ones(2, 1)
    first, second = StepLR(OPTIMIZER, 1), StepLR(OPTIMIZER, 2)
    scheduler = SequentialLR(OPTIMIZER, [first, second], milestones=[1])
    fit(
        step=squared_error,
        train_loader=[(x, x)] * 2,
        clip_norm=np.float32(1.0),
        scheduler=scheduler,
        epochs=2,
    )
    fit(step=squared_error, train_loader=iter([(x, x)]), limits=Limits(steps_per_epoch=1))


PREPARED = {
    "nothing but a list": (
        [[MODEL, MODEL]],
        r"one by one, as in prepare\(\*objects\), got a list of 2 \(Linear\)",
    ),
    "a list among others": ([MODEL, [OPTIMIZER]], r"one by one, .* got a list of 1 \(SGD\)"),
    "loaders by name": ([MODEL, {"train": make_loader()}], r"one by one, .* got a dict of 1 \(DataLoader\)"),
    "text": (["model"], r"prepare\(\) takes models, optimizers, loaders and schedulers, got str: 'model'"),
    "nothing": ([None], r"prepare\(\) takes models, .* got NoneType: None"),
}


@pytest.mark.parametrize("case", PREPARED)
def test_prepare_takes_its_objects_one_by_one(case):
    objects, words = PREPARED[case]
    with Trainer(devices="cpu") as trainer:
        with pytest.raises(ConfigError, match=words):
            trainer.prepare(*objects)
        assert trainer._preparation.current is None


METHODS = {
    "evaluate": lambda trainer, model: trainer.evaluate(model, make_loader(), step=squared_error),
    "save_model": lambda trainer, model: trainer.save_model(model, "no.pt"),
    "load_model": lambda trainer, model: trainer.load_model(model, "no.pt"),
    "update": lambda trainer, model: trainer.update(model, OPTIMIZER),
    "no_sync": lambda trainer, model: trainer.no_sync(model),
    "clip_grad_norm": lambda trainer, model: trainer.clip_grad_norm(model, 1.0),
}


def test_every_method_that_takes_a_model_says_so():
    with Trainer(devices="cpu") as trainer:
        for method, wrong in zip(METHODS, cycle([None, [MODEL], "model"])):
            with pytest.raises(ConfigError, match=r"takes (one|a) model"):
                METHODS[method](trainer, wrong)


def test_evaluating_on_several_loaders_says_how():
    with (
        Trainer(devices="cpu") as trainer,
        pytest.raises(ConfigError, match="loader must be one loader, got a list"),
    ):
        trainer.evaluate(MODEL, [make_loader(), make_loader()], step=squared_error)


def test_update_takes_one_optimizer():
    with (
        Trainer(devices="cpu") as trainer,
        pytest.raises(ConfigError, match=r"update\(\) takes one optimizer"),
    ):
        trainer.update(MODEL, [OPTIMIZER, OTHER])


def test_update_does_not_step_an_optimizer_that_needs_a_closure():
    with (
        Trainer(devices="cpu") as trainer,
        pytest.raises(ConfigError, match=r"LBFGS.step\(\) needs a closure"),
    ):
        trainer.update(MODEL, torch.optim.LBFGS(MODEL.parameters()))


# -- parameters that are not the model's -----------------------------------------------------------


def with_others(**kwargs):
    model, temperature = nn.Linear(1, 1), nn.Parameter(torch.ones(3))
    optimizer = SGD([{"params": model.parameters()}, {"params": [temperature]}], lr=1e-3)

    def step(model, batch):
        return squared_error(model, batch) + temperature.sum()

    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.fit(model, optimizer, make_loader(), step=step, **kwargs)
    return temperature.tolist()


WORDS = r"parameter 0 of group 1, of shape \(3,\), is not the model's: "


def test_parameters_of_something_else_are_trained_in_one_process():
    assert with_others() == pytest.approx([1 - 3e-3] * 3)


def test_parameters_of_something_else_are_no_part_of_a_checkpoint_and_refused(tmp_path):
    with pytest.raises(ConfigError, match=WORDS + "its value would be in no checkpoint; make"):
        with_others(checkpoint=tmp_path)


def refused_on_ranks():
    with pytest.raises(ConfigError, match=WORDS + "its gradients would differ between the ranks"):
        with_others()


def test_parameters_of_something_else_are_refused_where_ranks_would_drift_apart(two_ranks):
    two_ranks.run(refused_on_ranks)


@pytest.mark.parametrize(
    ("precision", "made", "words"),
    [
        ("fp32", None, r"build\(\) takes a model, a torch.nn.Module, got NoneType: None"),
        (
            "bf16-true",
            (MODEL, OPTIMIZER),
            r"build\(\) takes one model, got a tuple of 2 \(Linear, SGD\); put several",
        ),
    ],
    ids=["nothing", "several"],
)
def test_what_builds_no_model_is_told_so(made, words, precision):
    trainer = Trainer(devices="cpu", progress=False, precision=precision)
    with pytest.raises(ConfigError, match=words):
        trainer.build(lambda: made)


@pytest.mark.parametrize(
    ("make", "every", "warned"),
    [
        (
            lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6),
            "epoch",
            "OneCycleLR goes over 6 batches",
        ),
        (lambda optimizer: CyclicLR(optimizer, 0.1, 0.2, 3), "epoch", "CyclicLR goes over 6 batches"),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6), "step", ""),
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=2), "epoch", ""),
        (lambda optimizer: StepLR(optimizer, 6), "epoch", ""),
    ],
)
def test_a_schedule_over_batches_that_is_moved_once_per_epoch_is_told(caplog, make, every, warned):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)

    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.fit(
            model,
            optimizer,
            make_loader(),
            step=squared_error,
            epochs=2,
            scheduler=SchedulerOptions(make(optimizer), every=every),
        )
    said = [record.getMessage() for record in caplog.records if "per epoch" in record.getMessage()]
    assert len(said) == bool(warned)
    assert all(warned in message for message in said)
