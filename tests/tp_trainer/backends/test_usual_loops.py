"""Loops as most programs have them: models are called directly, and go back as often as they like."""

import itertools
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader
from tp_core.errors import StepError
from tp_trainer import DdpOptions, Trainer

from tests.models import perceptron
from tests.reference_training import rows_and_sums


class ByHand:
    """What a program trains with in plain PyTorch."""

    def prepare(self, *objects):
        return objects

    def unwrap(self, model):
        return model

    def backward(self, loss, **options):
        loss.backward(**options)

    def no_sync(self, model):
        return torch.enable_grad()


class OnRanks:
    """The same, with a trainer."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.prepare, self.backward, self.no_sync = trainer.prepare, trainer.backward, trainer.no_sync

    def unwrap(self, model):
        return self.trainer.session.unwrap(model)


def loader():
    return DataLoader(rows_and_sums(10, 4), batch_size=4)


def adversaries(run, critic=None):
    """Return a generator and a critic, the loader, and their optimizers."""
    critic = perceptron(4, 6, 1, seed=2) if critic is None else critic
    generator, critic, batches = run.prepare(perceptron(4, 6, 4), critic, loader())
    return (
        generator,
        critic,
        batches,
        SGD(generator.parameters(), lr=0.2),
        Adam(critic.parameters(), lr=0.05),
    )


def fake_loss(critic, rows):
    return softplus(critic(rows)).mean()


def real_loss(critic, rows):
    return softplus(-critic(rows)).mean()


def a_pass_for_each_forward(run):
    generator, critic, batches, of_generator, of_critic = adversaries(run)
    for real, _ in batches:
        of_critic.zero_grad()
        run.backward(real_loss(critic, real))
        fake = generator(real.flip(1))
        run.backward(fake_loss(critic, fake.detach()))
        of_critic.step()
        of_generator.zero_grad()
        run.backward(real_loss(critic, fake))
        of_generator.step()
    return generator, critic


def a_sum_of_two_forwards(run):
    """The generator's graph is from before the critic's pass and step; the critic is frozen in its pass."""
    generator, critic, batches, of_generator, of_critic = adversaries(run, Scaled())
    for real, _ in batches:
        fake = generator(real.flip(1))
        of_critic.zero_grad()
        run.backward((real_loss(critic, real) + fake_loss(critic, fake.detach())) / 2)
        of_critic.step()
        critic.requires_grad_(requires_grad=False)
        of_generator.zero_grad()
        run.backward(real_loss(critic, fake))
        of_generator.step()
        critic.requires_grad_(requires_grad=True)
    return generator, critic


class Scaled(nn.Module):
    """Has a buffer that its gradient needs, and one that counts."""

    def __init__(self):
        super().__init__()
        self.body = perceptron(4, 6, 1, seed=2)
        self.register_buffer("scale", torch.full((1,), 1.5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.body(x) * self.scale


def both_forwards_then_two_passes(run):
    generator, critic, batches, of_generator, of_critic = adversaries(run, Scaled())
    for real, _ in batches:
        fake = generator(real.flip(1))
        losses = real_loss(critic, real), fake_loss(critic, fake.detach())
        of_critic.zero_grad()
        for loss in losses:
            run.backward(loss)
        of_critic.step()
        of_generator.zero_grad()
        run.backward(real_loss(critic, fake))
        of_generator.step()
    return generator, critic


def two_passes_through_one_graph(run):
    model, batches = run.prepare(perceptron(4, 6, 1), loader())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        run.backward(loss, retain_graph=True)
        run.backward(0.5 * loss)
        optimizer.step()
    return (model,)


def cycles(run):
    """Two generators in one optimizer, each used twice, before two critics with a pass each."""
    built = [perceptron(4, 6, 4), perceptron(4, 6, 4, seed=3), perceptron(4, 6, 1), perceptron(4, 6, 1)]
    *models, batches = run.prepare(*built, loader())
    there, back, critic_there, critic_back = models
    of_generators = Adam(itertools.chain(there.parameters(), back.parameters()), lr=0.02)
    of_critics = Adam(itertools.chain(critic_there.parameters(), critic_back.parameters()), lr=0.02)
    for one, _ in batches:
        other = one.flip(1) + 1
        fakes = there(one), back(other)
        cycle = (back(fakes[0]) - one).abs().mean() + (there(fakes[1]) - other).abs().mean()
        of_generators.zero_grad()
        run.backward(cycle + real_loss(critic_there, fakes[0]) + real_loss(critic_back, fakes[1]))
        of_generators.step()
        of_critics.zero_grad()
        for critic, real, fake in ((critic_there, other, fakes[0]), (critic_back, one, fakes[1])):
            run.backward((real_loss(critic, real) + fake_loss(critic, fake.detach())) / 2)
        of_critics.step()
    return models


def accumulation(run):
    """Gradients of two batches for each step; a forward pass without synchronization goes back with it."""
    generator, critic, batches, of_generator, of_critic = adversaries(run)
    for number, (real, _) in enumerate(itertools.chain(batches, batches)):
        if number % 2 == 0:
            of_critic.zero_grad()
            of_generator.zero_grad()
            with run.no_sync(critic), run.no_sync(generator):
                fake = generator(real.flip(1))
                run.backward(fake_loss(critic, fake.detach()) / 2)
                loss = real_loss(critic, real) / 2
            run.backward(loss)
            continue
        run.backward(real_loss(critic, real) / 2)
        of_critic.step()
        run.backward(real_loss(critic, generator(real.flip(1))))
        of_generator.step()
    return generator, critic


def a_call_past_the_wrapper(run):
    model, batches = run.prepare(perceptron(4, 6, 1), loader())
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        run.backward((run.unwrap(model)(x) - y).square().mean())
        optimizer.step()
    return (model,)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = perceptron(4, 6), perceptron(6, 1), perceptron(6, 1, seed=2)

    def forward(self, x, head=None):
        hidden = torch.tanh(self.trunk(x))
        heads = [self.one, self.two] if head is None else [[self.one, self.two][head]]
        return [each(hidden) for each in heads]


def a_pass_for_each_head(run):
    """Of one forward pass, and of one for each head."""
    model, batches = run.prepare(Heads(), loader())
    optimizer = SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        for output in (model(x), [*model(x, 0), *model(x, 1)]):
            first, second = ((each - y).square().mean() for each in output)
            run.backward(first, retain_graph=True)
            run.backward(second)
        both = (model(x, 0)[0] - model(x, 1)[0]).square().mean()
        run.backward(both)
        optimizer.step()
    return (model,)


PROGRAMS = [
    a_pass_for_each_forward,
    a_sum_of_two_forwards,
    both_forwards_then_two_passes,
    two_passes_through_one_graph,
    cycles,
    accumulation,
]
OF_DDP = [a_call_past_the_wrapper, a_pass_for_each_head]


def states(models, state_of):
    return [{name: value.detach().clone() for name, value in state_of(m).items()} for m in models]


def on_ranks(backend, programs):
    """Return what models come to on this rank, by the program."""
    found = {}
    for program in programs:
        options = DdpOptions(find_unused_parameters=program is a_pass_for_each_head)
        with Trainer(
            seed=0,
            devices="cpu",
            backend=backend,
            progress=False,
            options=options if backend == "ddp" else None,
        ) as trainer:
            models = program(OnRanks(trainer))
            found[program.__name__] = states(models, trainer.session.model_state)
    return found


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_they_have_the_numbers_of_one_device_on_ranks(two_ranks, backend):
    programs = PROGRAMS + OF_DDP * (backend == "ddp")
    alone = {program.__name__: states(program(ByHand()), nn.Module.state_dict) for program in programs}
    for found in two_ranks.run(on_ranks, backend, programs):
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def refused(options, body):
    with (
        Trainer(seed=0, devices="cpu", backend="ddp", progress=False, options=options) as trainer,
        pytest.raises(StepError) as caught,
    ):
        body(OnRanks(trainer))
    return str(caught.value)


def test_passes_that_ranks_cannot_average_are_refused_with_the_line_to_change(two_ranks):
    for message in two_ranks.run(refused, None, a_pass_for_each_head):
        assert message.startswith("a backward pass came again to a parameter whose gradient is not averaged")
        assert "trainer.backward(first + second), or give the backend's option find_unused" in message
    for message in two_ranks.run(refused, DdpOptions(static_graph=True), two_passes_through_one_graph):
        assert message.endswith("leave static_graph out")


def clamped(gradient):
    return gradient.clamp(-0.1, 0.1)


def lines_on_hooks(backend, *, at_step):
    """Return the lines on hooks of two models, the first of which gets its hook later than the other."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_core").addHandler(handler)
    try:
        with Trainer(seed=0, devices="cpu", backend=backend, progress=False) as trainer:
            generator, critic, batches, of_generator, of_critic = adversaries(OnRanks(trainer))
            weight = trainer.session.unwrap(critic)[0].weight
            weight.register_post_accumulate_grad_hook(lambda parameter: None)
            for number, (x, _) in enumerate(itertools.chain(batches, batches)):
                if number == at_step:
                    trainer.session.unwrap(generator)[0].weight.register_hook(clamped)
                for optimizer in (of_generator, of_critic):
                    optimizer.zero_grad()
                trainer.backward(real_loss(critic, generator(x)))
                of_generator.step()
                of_critic.step()
    finally:
        logging.getLogger("tp_core").removeHandler(handler)
    return [line.partition(" see ")[0] for line in lines if line.startswith("the hooks on")]


@pytest.mark.parametrize("at_step", [0, 3])
def test_hooks_that_see_the_gradients_of_a_share_are_named_once(two_ranks, at_step):
    found = two_ranks.run(partial(lines_on_hooks, "ddp", at_step=at_step))
    # Of both models, whose parameters have the same names.
    assert found == [["the hooks on the gradients of '0.weight'"] * 2, []]


def test_hooks_that_see_the_mean_are_not_named(two_ranks):
    assert two_ranks.run(partial(lines_on_hooks, "fsdp", at_step=0)) == [[], []]
