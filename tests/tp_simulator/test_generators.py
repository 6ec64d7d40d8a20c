"""Random numbers are those of a seed, of a device, and of the order of launches."""

import pytest
import torch
import tp_simulator

pytestmark = pytest.mark.simulated


def _drawn(device="sim:0"):
    return torch.stack(
        [
            torch.rand(5, device=device),
            torch.randn(5, device=device),
            torch.randint(9, (5,), device=device).float(),
            torch.randperm(5, device=device).float(),
            torch.bernoulli(torch.full((5,), 0.5, device=device)),
            torch.multinomial(torch.ones(9, device=device), 5).float(),
            torch.empty(5, device=device).exponential_(),
        ]
    ).cpu()


def test_a_seed_gives_the_same_numbers_however_late_they_are_drawn():
    torch.manual_seed(3)
    first = _drawn()
    for seed in (0, 1):
        torch.manual_seed(3)
        with tp_simulator.hostile(seed):
            assert torch.equal(_drawn(), first)
    assert not torch.equal(_drawn(), first)


def test_each_device_has_a_generator():
    torch.sim.manual_seed_all(4)
    first = _drawn("sim:0")
    assert torch.equal(_drawn("sim:1"), first)
    torch.sim.set_device(1)
    torch.sim.manual_seed(4)
    torch.sim.set_device(0)
    assert torch.equal(_drawn("sim:1"), first)
    assert not torch.equal(_drawn("sim:0"), first)


def test_a_state_is_restored():
    states = torch.sim.get_rng_state_all()
    first = _drawn("sim:0"), _drawn("sim:1")
    torch.sim.set_rng_state_all(states)
    assert torch.equal(_drawn("sim:0"), first[0])
    torch.sim.set_rng_state(states[1], "sim:1")
    assert torch.equal(_drawn("sim:1"), first[1])


def test_the_host_draws_its_own_numbers():
    torch.manual_seed(1)
    first = torch.rand(3)
    torch.manual_seed(1)
    _drawn()
    assert torch.equal(torch.rand(3), first)


def test_a_generator_of_its_own_is_seeded_and_copied():
    generator = torch.Generator("sim:0").manual_seed(8)
    assert generator.initial_seed() == 8
    first = torch.rand(4, device="sim:0", generator=generator)
    generator.set_offset(0)
    assert torch.equal(torch.rand(4, device="sim:0", generator=generator), first)
    copy = generator.clone_state()
    assert torch.equal(copy.get_state(), generator.get_state())
    assert torch.sim.initial_seed() != generator.seed()


def test_a_state_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="the state of a generator is 16 bytes on the CPU, not 5056 items"):
        torch.sim.set_rng_state(torch.get_rng_state())
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        torch.rand(3, device="sim:0", generator=torch.Generator())
