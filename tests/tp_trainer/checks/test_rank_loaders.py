"""Ranks share the batches of a loader: those that draw other samples, or by other means, are told."""

import os
import re
from functools import partial

import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader
from tp_core.errors import DisagreementError
from tp_trainer import Trainer

NUMBERS = list(range(20))


def own():
    """Return a generator as a rank has that was never seeded."""
    return torch.Generator().manual_seed(int(os.environ["RANK"]))


def shuffled_on_one_rank():
    return DataLoader(NUMBERS, batch_size=4, shuffle=own().initial_seed() == 1)


def split_at_random():
    return DataLoader(data.random_split(NUMBERS, [16, 4], generator=own())[0], batch_size=4)


def parts_that_were_split_at_random():
    parts = data.random_split(NUMBERS, [12, 8], generator=own())
    return DataLoader(data.ConcatDataset(parts), batch_size=4)


def sampler_of_a_random_part():
    chosen = torch.randperm(20, generator=own())[:16]
    return DataLoader(NUMBERS, batch_size=4, sampler=data.SubsetRandomSampler(chosen))


def weights_at_random():
    weights = torch.rand(20, generator=own())
    return DataLoader(NUMBERS, batch_size=4, sampler=data.WeightedRandomSampler(weights, 20))


def more_samples_on_one_rank():
    return DataLoader(NUMBERS[own().initial_seed() :], batch_size=4)


def prepared(make):
    """Return the message of the error that ``prepare`` ends in, or all samples of an epoch."""
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        _, loader = trainer.prepare(torch.nn.Linear(1, 1), make())
        mine = [int(sample) for batch in loader for sample in batch]
        return sorted(sample for theirs in trainer.session.gather_objects(mine) for sample in theirs)


def refused(make):
    with pytest.raises(DisagreementError) as caught:
        prepared(make)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            shuffled_on_one_rank,
            r"rank 0 has '20 samples of list by SequentialSampler and .*', rank 1",
        ),
        (split_at_random, r"rank 0 has '16 samples of Subset by SequentialSampler and BatchSampler, indices"),
        (parts_that_were_split_at_random, r"20 samples of ConcatDataset .*, indices .*, indices"),
        (sampler_of_a_random_part, r"SubsetRandomSampler and BatchSampler, indices"),
        (weights_at_random, r"WeightedRandomSampler and BatchSampler, indices or weights"),
        (more_samples_on_one_rank, r"rank 0 has '20 samples .* rank 1 has '19 samples"),
    ],
)
def test_what_ranks_would_draw_apart_is_told(two_ranks, make, words):
    for message in two_ranks.run(partial(refused, make)):
        assert re.search(rf"ranks disagree on what a loader draws: .*{words}", message)


def split_alike():
    return DataLoader(data.random_split(NUMBERS, [16, 4], generator=torch.Generator())[0], batch_size=4)


def test_a_split_from_one_seed_is_drawn_once(two_ranks):
    (first, second) = two_ranks.run(partial(prepared, split_alike))
    assert first == second == sorted(set(first))
    assert len(first) == 16


X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)


def trained(backend, batches, val):
    """Train on batches that are a rank's own; return the weights and the losses of the validations."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, batch):
        loss = (model(batch).sum(1) - batch.prod(1)).square().mean()
        return {"loss": loss, "weight": len(batch)}

    with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
        model, optimizer, train = trainer.prepare(model, optimizer, batches, shard=False)
        validation = trainer.prepare(val, shard=False, training=False)
        history = []
        for _ in range(2):  # calls that share the prepared loader
            history += trainer.fit(model, optimizer, train, step=step, validation=validation)
        state = {name: tensor.clone() for name, tensor in trainer.session.model_state(model).items()}
        return state, [(record.train["loss"], record.val["loss"]) for record in history]


def trained_on_own_parts(backend):
    rank = own().initial_seed()
    sizes = ([1, 3], [3, 1])[rank]  # of the four samples of a global batch, by batches in turn
    starts = ([0, 4, 8], [1, 7, 9])[rank]
    parts = [X[start : start + sizes[number % 2]] for number, start in enumerate(starts)]
    return trained(backend, parts, [X[rank::2]])


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_loaders_with_samples_of_their_own_train_what_one_device_trains_on_all(two_ranks, backend):
    state, numbers = trained("single", [X[:4], X[4:8], X[8:]], [X])
    for own_state, own_numbers in two_ranks.run(trained_on_own_parts, backend):
        torch.testing.assert_close(own_state, state)
        torch.testing.assert_close(own_numbers, numbers)


# -- batches of different sizes on the ranks ------------------------------------------------------


def mean_of_squares(model, batch):
    return (model(batch[0]).sum(1) - batch[0].prod(1)).square().mean()


def trained_in_uneven_batches(samples, batch_size):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model, optimizer = trainer.prepare(model, optimizer)
        mine = samples[trainer.session.data_rank]
        loader = DataLoader(data.TensorDataset(X[mine]), batch_size=batch_size)
        loader = trainer.prepare(loader, shard=False)
        trainer.fit(model, optimizer, loader, step=mean_of_squares, epochs=2)
        trained = trainer.session.model_state(model)["weight"].clone()
        gradients = []
        for batch in loader:  # in a loop of the user's own, too
            optimizer.zero_grad()
            trainer.backward(trainer.run(mean_of_squares, model, batch))
            gradients.append(trainer.session.unwrap(model).weight.grad.clone())
        return trained, gradients


def test_uneven_batches_of_the_ranks_loaders_have_the_gradient_of_the_whole(two_ranks):
    expected = trained_in_uneven_batches([[0, 1, 2, 3, 4, 5, 6]], 4)
    # Of the first four and of the last three samples rank 1 has one, in its batch of two and in its last.
    for found in two_ranks.run(trained_in_uneven_batches, [[0, 1, 4, 5], [2, 3, 6]], 2):
        torch.testing.assert_close(found, expected)
