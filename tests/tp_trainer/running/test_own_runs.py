"""Runs of one's own loop: several models and optimizers, interrupted and resumed bit for bit."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer, Validation

from tests.reference_training import squared_error, train

N, BATCH = 24, 8


def loader():
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(N, 2, generator=generator), torch.randn(N, 2, generator=generator))
    return DataLoader(data, batch_size=BATCH, shuffle=True)


class Critic(nn.Module):
    """A discriminator whose method the steps call, not its forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.margin = 0.1

    def score(self, x):
        return self.body(x) - self.margin


def gan_models():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), Critic()


def disc_step(disc, gen, batch):
    real, noise = batch
    return F.softplus(-disc.score(real)).mean() + F.softplus(disc.score(gen(noise).detach())).mean()


def gen_step(gen, disc, batch):
    _, noise = batch
    return F.softplus(-disc.score(gen(noise))).mean()


def critic_step(disc, gen, batch):
    """Wasserstein with a gradient penalty: differentiated twice."""
    real, noise = batch
    fake = gen(noise).detach()
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(disc.score(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return disc.score(fake).mean() - disc.score(real).mean() + penalty


def numbers_of(*models):
    parameters = [p.detach() for model in models for p in model.parameters()]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return torch.cat([p.double().flatten() for p in whole]).tolist()


def gan(step, *, devices="cpu", backend="auto", epochs=2, folder=None, stop_at=None, keep=("seen",)):
    """Train both, in the loop, and return the parameters and what was logged."""
    gen, disc = gan_models()
    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        gen, disc, batches = trainer.prepare(gen, disc, loader())
        opt_g = torch.optim.Adam(gen.parameters(), lr=0.01)
        opt_d = torch.optim.Adam(disc.parameters(), lr=0.02)
        state = {"gen": gen, "disc": disc, "opt_g": opt_g, "opt_d": opt_d}
        state |= {"seen": [], "best": 0.0} if folder else {}
        checkpoint = Checkpoints(folder, every_steps=2) if folder else None
        loop = trainer.loop(
            batches, epochs=epochs, state=state, checkpoint=checkpoint, resume="auto" if folder else None
        )
        with loop:
            for batch in loop:
                opt_d.zero_grad()
                loss_d = trainer.run(step, disc, gen, batch)
                trainer.backward(loss_d)
                opt_d.step()
                opt_g.zero_grad()
                loss_g = trainer.run(gen_step, gen, disc, batch)
                trainer.backward(loss_g)
                opt_g.step()
                loop.log(loss_d=loss_d, loss_g=loss_g)
                if folder:
                    state["seen"].append(loop.step)
                    state["best"] = float(loop.step)
                if loop.step + 1 == stop_at:
                    loop.stop("enough for today")
        logged = [dict(record.train) for record in loop.history]
        return {"weights": numbers_of(gen, disc), "logged": logged, "seen": state.get("seen")}


def by_hand(step, epochs=2):
    """The same without the trainer, but for the order of its loader."""
    gen, disc = gan_models()
    opt_g = torch.optim.Adam(gen.parameters(), lr=0.01)
    opt_d = torch.optim.Adam(disc.parameters(), lr=0.02)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        batches = trainer.prepare(loader())
        for _ in range(epochs):
            for batch in batches:
                opt_d.zero_grad()
                step(disc, gen, batch).backward()
                opt_d.step()
                opt_g.zero_grad()
                gen_step(gen, disc, batch).backward()
                opt_g.step()
    return numbers_of(gen, disc)


STEPS = [disc_step, critic_step]
IN_ONE_PROCESS = [("cpu", "auto"), (["cpu", "cpu"], "tuple"), (["cpu", "cpu"], "dp-gather")]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("devices", "backend"), IN_ONE_PROCESS)
def test_two_models_train_as_by_hand(step, devices, backend):
    found = gan(step, devices=devices, backend=backend)
    assert found["weights"] == pytest.approx(by_hand(step), rel=1e-4, abs=1e-6)


def _gan_on_a_rank():
    return [gan(step)["weights"] for step in STEPS]


def test_two_models_train_on_two_ranks_as_by_hand(two_ranks):
    expected = [by_hand(step) for step in STEPS]
    for found in two_ranks.run(_gan_on_a_rank):
        for weights, hand in zip(found, expected, strict=True):
            assert weights == pytest.approx(hand, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("devices", "backend"), IN_ONE_PROCESS)
def test_a_resumed_loop_goes_on_bit_for_bit(tmp_path, devices, backend):
    arguments = {"devices": devices, "backend": backend, "epochs": 3}
    whole = gan(disc_step, **arguments, folder=tmp_path / "whole")
    stopped = gan(disc_step, **arguments, folder=tmp_path / "parts", stop_at=5)
    assert stopped["seen"] == [0, 1, 2, 3, 4]
    assert stopped["weights"] != whole["weights"]
    # Autograd numbers from 0 in a new thread, as in a new process.
    with ThreadPoolExecutor(1) as thread:
        resumed = thread.submit(gan, disc_step, **arguments, folder=tmp_path / "parts").result(800)
    assert resumed == whole
    assert resumed["seen"] == list(range(9)), "a list is put back in place"


def _resumed_on_a_rank(folder):
    whole = gan(disc_step, folder=folder / "whole", epochs=2)
    gan(disc_step, folder=folder / "parts", epochs=1)
    return whole == gan(disc_step, folder=folder / "parts", epochs=2)


@pytest.mark.slow
def test_a_resumed_loop_goes_on_bit_for_bit_on_two_ranks(tmp_path):
    from functools import partial

    assert run_ranks(partial(_resumed_on_a_rank, tmp_path), 2) == [True, True]


def test_a_shared_trunk_and_two_losses_through_one_graph():
    """An actor and a critic on one trunk, each loss with a backward pass of its own."""

    def make():
        torch.manual_seed(2)
        trunk = nn.Linear(2, 8)
        actor, critic = nn.Sequential(trunk, nn.Linear(8, 2)), nn.Sequential(trunk, nn.Linear(8, 1))
        both = [*actor.parameters(), *critic[1].parameters()]
        return actor, critic, torch.optim.SGD(both, lr=0.1)

    def losses(actor, critic, batch):
        state, action = batch
        hidden = torch.tanh(actor[0](state))
        policy = (actor[1](hidden) - action).square().mean()
        value = (critic[1](hidden) - action.sum(1, keepdim=True)).square().mean()
        return {"loss": policy, "value": value}

    hand_actor, hand_critic, hand_optimizer = make()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        batches = trainer.prepare(loader())
        for batch in batches:
            hand_optimizer.zero_grad()
            found = losses(hand_actor, hand_critic, batch)
            (found["loss"] + found["value"]).backward()
            hand_optimizer.step()
    actor, critic, optimizer = make()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        actor, critic, optimizer, batches = trainer.prepare(actor, critic, optimizer, loader())
        state = {"actor": actor, "critic": critic, "optimizer": optimizer}
        with trainer.loop(batches, state=state) as loop:
            for batch in loop:
                optimizer.zero_grad()
                found = trainer.run(losses, actor, critic, batch)
                trainer.backward(found["loss"], retain_graph=True)
                trainer.backward(found["value"])
                optimizer.step()
    assert numbers_of(actor, critic) == pytest.approx(numbers_of(hand_actor, hand_critic), rel=1e-5)


def test_lbfgs_steps_with_a_closure_in_a_loop():
    def fitted(closure_of):
        torch.manual_seed(2)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        with Trainer(seed=0, devices="cpu", progress=False) as trainer:
            model, optimizer, batches = trainer.prepare(model, optimizer, loader())
            with trainer.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}) as loop:
                for batch in loop:
                    optimizer.step(closure_of(trainer, model, optimizer, batch))
        return numbers_of(model)

    def ours(trainer, model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = trainer.run(squared_error, model, batch)
            trainer.backward(loss)
            return loss

        return closure

    def plain(_, model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = squared_error(model, batch)
            loss.backward()
            return loss

        return closure

    assert fitted(ours) == fitted(plain)


@pytest.mark.parametrize(("window", "stop", "warns"), [(2, 3, True), (2, 2, False), (1, 3, False)])
def test_gradients_that_a_checkpoint_leaves_out_are_named(tmp_path, caplog, window, stop, warns):
    """A loop that accumulates by a count of its own is saved between two of its batches."""
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model, batches = trainer.prepare(nn.Linear(2, 2), loader())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        with trainer.loop(batches, epochs=2, max_steps=stop, state=state, checkpoint=tmp_path) as loop:
            for batch in loop:
                trainer.backward(trainer.run(squared_error, model, batch))
                if loop.step % window == window - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    found = [text for text in caplog.messages if text.startswith("the checkpoint of step 3 has no gradients")]
    assert bool(found) == warns


# -- what cannot be ---------------------------------------------------------------------------------


def start(**arguments):
    trainer = Trainer(seed=0, devices="cpu", progress=False)
    model, batches = trainer.prepare(nn.Linear(2, 2), loader())
    return trainer, model, lambda **more: trainer.loop(batches, **arguments, **more)


def test_an_optimizer_without_its_model_is_named():
    _, model, loop = start()
    with pytest.raises(ConfigError, match="'opt' in state= has parameters of no model there"):
        loop(state={"opt": torch.optim.SGD(model.parameters(), lr=0.1)})


@pytest.mark.parametrize("state", [[1], {"a.b": 1}, {3: 1}])
def test_state_is_a_dict_of_names(state):
    _, _, loop = start()
    with pytest.raises(ConfigError, match=r"state must be a dict|names in state="):
        loop(state=state)


def test_what_no_checkpoint_holds_is_found_before_the_first_batch(tmp_path):
    _, _, loop = start(checkpoint=tmp_path)
    with pytest.raises(StateError, match="'odd'"), loop(state={"odd": object()}):
        pytest.fail("the loop began")


def test_an_epoch_that_is_left_early_is_pointed_out():
    _, _, loop = start(epochs=2)
    with loop() as running:
        epochs = running.by_epoch()
        next(next(epochs))
        with pytest.raises(ConfigError, match=r"left after 0 of 3 batches; call stop\(\)"):
            next(epochs)


def test_a_loop_is_used_in_a_with_block():
    _, _, loop = start()
    with pytest.raises(ConfigError, match="in a with block"):
        next(iter(loop()))


def test_a_function_validates_a_loop_at_the_times_that_are_given():
    calls = []

    def validate():
        calls.append(1)
        return {"calls": len(calls)}

    _, _, loop = start(epochs=2)
    for validation, expected in (
        (validate, [1, 2]),
        (Validation(validate, every_steps=2, sanity_batches=1), [3, 5]),  # after steps 0, 2, 3, 4 and 6
    ):
        calls.clear()
        with loop(validation=validation) as running:
            for _ in running:
                pass
        assert [record.val["calls"] for record in running.history] == expected


@pytest.mark.parametrize("validation", [[1, 2], Validation([1, 2])])
def test_a_loop_is_not_validated_on_a_loader(validation):
    _, _, loop = start()
    with pytest.raises(
        ConfigError, match="validation must be a function that returns numbers by name, got list"
    ):
        loop(validation=validation)


def test_run_needs_a_model_and_a_batch():
    trainer, model, _ = start()
    with pytest.raises(ConfigError, match="last the batch"):
        trainer.run(lambda model: 0, model)
    with pytest.raises(ConfigError, match="last the batch"):
        trainer.run(lambda: 0)


def test_one_model_of_several_is_loaded_by_its_name(tmp_path):
    gan(disc_step, folder=tmp_path, epochs=1)
    newest = max(path for path in tmp_path.iterdir() if path.is_dir())
    gen, disc = gan_models()
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.load_model(gen, newest, name="gen")
        trainer.load_model(disc, newest, name="disc")
        assert numbers_of(gen, disc) == gan(disc_step, folder=tmp_path, epochs=1)["weights"]
        with pytest.raises(ConfigError, match=r"has no model 'net'; .* begin with \['disc', 'gen'\]"):
            trainer.load_model(gen, newest, name="net")
        trainer.save_model(gen, tmp_path / "gen.pt")
        with pytest.raises(ConfigError, match="is a file of one model, and name='gen'"):
            trainer.load_model(gen, tmp_path / "gen.pt", name="gen")


def two_loaders(*, devices="cpu", backend="auto", folder=None, stop_at=None):
    """Labeled and unlabeled batches in one step, of which the second loader is the shorter one."""
    torch.manual_seed(4)
    model = nn.Linear(2, 2)
    generator = torch.Generator().manual_seed(5)
    more = DataLoader(TensorDataset(torch.randn(10, 2, generator=generator)), batch_size=4, shuffle=True)

    def endless(loader):
        while True:
            yield from loader

    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer, labeled, unlabeled = trainer.prepare(model, optimizer, loader(), more)
        state = {"model": model, "optimizer": optimizer, "unlabeled": unlabeled}
        checkpoint = Checkpoints(folder, every_steps=1) if folder else None
        others = endless(unlabeled)
        with trainer.loop(
            labeled, epochs=3, state=state, checkpoint=checkpoint, resume="auto" if folder else None
        ) as loop:
            for batch in loop:
                other = next(others)
                optimizer.zero_grad()
                loss = trainer.run(lambda m, b: F.mse_loss(m(b[0]), b[1]), model, batch)
                trainer.backward(loss, batch=batch)
                loss = trainer.run(lambda m, b: m(b[0]).square().mean(), model, other)
                trainer.backward(loss, batch=other)
                optimizer.step()
                if loop.step + 1 == stop_at:
                    loop.stop("enough")
        return numbers_of(model)


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_two_loaders_are_both_resumed_where_they_stood(tmp_path, stop_at):
    whole = two_loaders()
    two_loaders(folder=tmp_path, stop_at=stop_at)
    assert two_loaders(folder=tmp_path) == whole


@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
def test_two_loaders_are_those_of_one_device(backend):
    found = two_loaders(devices=["cpu", "cpu"], backend=backend)
    assert found == pytest.approx(two_loaders(), rel=1e-5)


def _two_loaders_on_a_rank(folder):
    whole = two_loaders()
    two_loaders(folder=folder, stop_at=4)
    return whole, two_loaders(folder=folder)


@pytest.mark.slow
def test_two_loaders_are_resumed_on_two_ranks(tmp_path):
    from functools import partial

    expected = two_loaders()
    for whole, parts in run_ranks(partial(_two_loaders_on_a_rank, tmp_path), 2):
        assert parts == whole == pytest.approx(expected, rel=1e-5)


def _on_shards(folder):
    found = [gan(step, backend="fsdp")["weights"] for step in STEPS] + [two_loaders(backend="fsdp")]
    whole = gan(critic_step, backend="fsdp", folder=folder / "whole")
    gan(critic_step, backend="fsdp", folder=folder / "parts", stop_at=4)
    return found, gan(critic_step, backend="fsdp", folder=folder / "parts") == whole


@pytest.mark.slow
def test_own_loops_train_sharded_models_as_by_hand_and_are_resumed(tmp_path):
    from functools import partial

    expected = [by_hand(step) for step in STEPS] + [two_loaders()]
    for found, is_resumed in run_ranks(partial(_on_shards, tmp_path), 2):
        assert is_resumed
        for weights, hand in zip(found, expected, strict=True):
            assert weights == pytest.approx(hand, rel=1e-4, abs=1e-6)


def _shares_a_trunk():
    trunk = nn.Linear(2, 8)
    with Trainer(devices="cpu", progress=False) as trainer:
        with pytest.raises(ConfigError) as caught:
            trainer.prepare(nn.Sequential(trunk, nn.Linear(8, 2)), nn.Sequential(trunk, nn.Linear(8, 1)))
        trainer.prepare(nn.Sequential(trunk, nn.Linear(8, 2)))
    return str(caught.value)


@pytest.mark.slow
def test_models_that_share_parameters_are_refused_on_several_ranks():
    for message in run_ranks(_shares_a_trunk, 2):
        assert "models 1 and 2 share a parameter ('0.weight' and '0.weight')" in message
        assert "put both into one module" in message.replace("\n", " ")


def test_a_loop_over_numbers_trains_on_loaders_of_its_own_on_every_backend():
    def trained(devices):
        torch.manual_seed(2)
        model = nn.Linear(2, 2)
        with Trainer(seed=0, devices=devices, progress=False) as trainer:
            model, optimizer, batches = trainer.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), loader()
            )
            rounds = []
            numbers = trainer.prepare(range(3), shard=False)
            with trainer.loop(numbers, state={"model": model, "optimizer": optimizer}) as loop:
                for number in loop:
                    rounds.append(number)
                    run = functools.partial(trainer.run, squared_error)
                    train(model, optimizer, batches, run, backward=trainer.backward)
            assert rounds == [0, 1, 2]
            return trainer.selection.chosen.name, numbers_of(model)

    name, found = trained(["cpu", "cpu"])
    assert (name, found) == ("tuple", pytest.approx(trained("cpu")[1], rel=1e-5))
