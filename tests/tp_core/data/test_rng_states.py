"""The generators of any accelerator are kept, not those of CUDA devices alone."""

import random
from types import SimpleNamespace

import pytest
import torch
from tp_core.random import (
    capture_rng_state,
    device_rng_state,
    preserve_rng_state,
    restore_rng_state,
    seed_torch,
    set_device_rng_state,
)

CPU = torch.device("cpu")
FIRST, SECOND = torch.device("xpu:0"), torch.device("xpu:1")


@pytest.fixture
def module(monkeypatch):
    """Return the module of two devices that are not here, with the states of their generators."""
    states = {FIRST: torch.tensor([0, 7], dtype=torch.uint8), SECOND: torch.tensor([1, 7], dtype=torch.uint8)}

    def set_rng_state(state, device):
        states[torch.device(device)] = state

    def manual_seed_all(seed):
        module.seeded.append(seed)
        for device in states:
            states[device] = torch.tensor([seed % 256], dtype=torch.uint8)

    module = SimpleNamespace(
        states=states,
        seeded=[],
        get_rng_state=lambda device: states[torch.device(device)],
        set_rng_state=set_rng_state,
        manual_seed_all=manual_seed_all,
        is_initialized=lambda: True,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr("tp_core._devices.available_devices", lambda: tuple(states))
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(states))
    return module


def change(module):
    for device in module.states:
        module.states[device] = torch.tensor([9, 9], dtype=torch.uint8)


def values(module):
    return [state.tolist() for state in module.states.values()]


# -- a checkpoint's states ------------------------------------------------------------------------


def test_an_accelerators_generator_continues_where_it_was(module):
    kept = capture_rng_state((SECOND,))
    change(module)
    assert restore_rng_state(kept, (SECOND,)) == ()
    assert values(module) == [[9, 9], [1, 7]]


def test_the_state_is_of_the_place_of_a_device_and_not_of_its_number(module):
    kept = capture_rng_state((FIRST, SECOND))
    change(module)
    assert restore_rng_state(kept, (SECOND, FIRST)) == ()
    assert values(module) == [[1, 7], [0, 7]]


def test_of_a_device_with_two_places_the_first_counts(module):
    kept = capture_rng_state((FIRST, SECOND))
    change(module)
    assert restore_rng_state(kept, (SECOND, SECOND)) == ()
    assert values(module) == [[9, 9], [0, 7]]


@pytest.mark.parametrize("before", [(CPU, FIRST), (CPU,), (SECOND, CPU)])
def test_devices_without_a_state_are_named(module, before):
    kept = capture_rng_state(before)
    change(module)
    assert restore_rng_state(kept, (FIRST, SECOND)) == tuple(
        device
        for device, then in zip((FIRST, SECOND), (*before, CPU), strict=False)
        if then.type != device.type
    )


def test_files_of_before_have_states_by_names_in_the_same_order(module):
    kept = capture_rng_state((FIRST, SECOND))
    kept["devices"] = {f"{kind}:{number + 5}": text for number, (kind, text) in enumerate(kept["devices"])}
    change(module)
    assert restore_rng_state(kept, (FIRST, SECOND)) == ()
    assert values(module) == [[0, 7], [1, 7]]


def test_a_device_that_is_not_here_has_no_state(module):
    module.states.clear()
    kept = capture_rng_state((FIRST,))
    module.states[FIRST] = torch.tensor([3], dtype=torch.uint8)
    assert restore_rng_state(kept, (FIRST,)) == (FIRST,)
    assert values(module) == [[3]]


def test_apples_generator_is_asked_without_a_device(monkeypatch):
    found = []
    module = SimpleNamespace(get_rng_state=lambda: torch.ones(1), set_rng_state=found.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    state = device_rng_state(torch.device("mps:0"))
    set_device_rng_state(torch.device("mps:0"), state)
    assert found == [state]


# -- a block that leaves no trace -----------------------------------------------------------------


def test_a_block_restores_all_accelerators_of_a_process_that_uses_them(module):
    before = values(module)
    with preserve_rng_state():
        change(module)
    assert values(module) == before
    assert module.seeded == []


def test_a_block_can_name_its_devices(module):
    with preserve_rng_state([CPU, SECOND]):
        change(module)
    assert values(module) == [[9, 9], [1, 7]]


def test_an_accelerator_that_is_not_in_use_begins_with_the_seed_of_the_cpu(module):
    module.is_initialized = lambda: False
    torch.manual_seed(5)
    module.seeded.clear()
    with preserve_rng_state():
        torch.default_generator.manual_seed(1)
        module.manual_seed_all(1)  # as torch.manual_seed does, whose seed waits for the start
    assert module.seeded == [1, 5]


def seed_and_fail():
    with preserve_rng_state():
        seed_torch(1)
        random.seed(1)
        raise KeyError


def test_a_block_restores_the_cpu_and_python_after_an_error():
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(2), random.random()
    torch.manual_seed(5)
    random.seed(5)
    with pytest.raises(KeyError):
        seed_and_fail()
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]
