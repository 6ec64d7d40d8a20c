"""Ranks step with the same optimizer and the same settings, or are told so: their parameters would part."""

import math
import os
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import DisagreementError
from tp_trainer import Callback, Checkpoints, Trainer

STEPS = 3  # of an epoch


def rank():
    return int(os.environ["RANK"])


def fit(make_optimizer, backend, **options):
    """Train for two epochs; return the error's message, or ``None``, and after how many steps it came."""
    torch.manual_seed(0)
    model, done = nn.Linear(2, 1), []
    loader = DataLoader(TensorDataset(torch.rand(12, 2)), batch_size=4)

    def step(model, batch):
        done.append(None)
        return model(batch[0]).square().mean()

    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        try:
            trainer.fit(model, make_optimizer(model.parameters()), loader, step=step, epochs=2, **options)
        except DisagreementError as error:
            return str(error), len(done)
    return None, len(done)


def own_rate(parameters):
    return torch.optim.SGD(parameters, lr=0.1 * (1 + rank()))


def own_rate_in_a_tensor(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1 * (1 + rank())))


def own_betas(parameters):
    return torch.optim.Adam(parameters, betas=(0.9, 0.999 - 0.1 * rank()))


def own_kind(parameters):
    return (torch.optim.SGD, torch.optim.Adagrad)[rank()](parameters, lr=0.1)


def own_sign(parameters):
    return torch.optim.SGD(parameters, lr=0.1, maximize=bool(rank()))


def rounded(parameters):
    return torch.optim.SGD(parameters, lr=math.nextafter(0.1, rank()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (own_rate, r"the setting 'lr' of parameter group 0 .*: rank 0 has 0.1, rank 1 has 0.2"),
        (own_rate_in_a_tensor, r"the setting 'lr' of parameter group 0"),
        (own_betas, r"the setting 'betas\[1\]' of parameter group 0"),
        (own_kind, r"the kind of the optimizer .*: rank 0 has 'SGD', rank 1 has 'Adagrad'"),
        (own_sign, r"the setting 'maximize' of parameter group 0"),
    ],
)
def test_optimizers_that_differ_are_told_before_the_first_step(two_ranks, make, words):
    for message, done in two_ranks.run(partial(fit, make, "ddp")):
        assert re.search(words, message)
        assert done == 0


def test_shards_are_held_to_it_too(two_ranks):
    for message, done in two_ranks.run(partial(fit, own_rate, "fsdp")):
        assert "ranks disagree on the setting 'lr'" in message
        assert done == 0


def test_rates_that_differ_by_rounding_are_the_same(two_ranks):
    assert two_ranks.run(partial(fit, rounded, "ddp")) == [(None, 2 * STEPS)] * 2


class Lower(Callback):
    """Lowers the rate on one rank, as one does that follows what this rank alone has seen."""

    def on_epoch_end(self, run):
        if rank() == 1:
            run.optimizer.param_groups[0]["lr"] = 0.01


def same(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def lowered(folder):
    found = fit(same, "ddp", callbacks=[Lower()], checkpoint=Checkpoints(folder))
    return *found, sorted(path.name for path in folder.iterdir())


def test_a_rate_that_one_rank_lowers_is_told_before_a_step_is_made_with_it_and_nothing_is_saved(
    two_ranks, tmp_path
):
    for message, done, saved in two_ranks.run(partial(lowered, tmp_path)):
        assert "ranks disagree on the setting 'lr'" in message
        assert done == STEPS
        assert not [name for name in saved if name.startswith("step-")]


def in_own_places(option, root):
    """Fit with a path made from the rank; return what came of it, and what is in the folder."""
    path = root / f"rank-{rank()}"
    checkpoint = {"checkpoint": root, "resume": path} if option == "resume" else {option: path}
    told = fit(lambda p: torch.optim.SGD(p, lr=0.1), "ddp", **checkpoint)
    return *told, sorted(one.name for one in root.iterdir())


@pytest.mark.parametrize(
    ("option", "words"),
    [("checkpoint", "the checkpoints' folder"), ("resume", "the resume")],
)
def test_a_path_made_from_the_rank_is_an_error_before_the_first_step(two_ranks, tmp_path, option, words):
    for message, steps, left in two_ranks.run(in_own_places, option, tmp_path):
        assert re.search(f"ranks disagree on {words}: rank 0 has '.*rank-0', rank 1 has '.*rank-1'", message)
        assert (steps, left) == (0, [])


def with_own_buffer(backend):
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(1 + rank()))
    with (
        Trainer(devices="cpu", backend=backend, progress=False) as trainer,
        pytest.raises(DisagreementError, match=r"model's buffers: rank 0 has seen: \(1,\)"),
    ):
        trainer.prepare(model)
    return True


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_buffers_of_other_shapes_are_an_error_when_the_model_is_prepared(two_ranks, backend):
    assert two_ranks.run(with_own_buffer, backend) == [True, True]
