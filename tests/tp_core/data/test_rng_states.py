"""The generators of any accelerator are kept, not those of CUDA devices alone."""

from types import SimpleNamespace

import pytest
import torch
from tp_core.random import capture_rng_state, device_rng_state, restore_rng_state, set_device_rng_state

HOME = torch.device("xpu:1")


@pytest.fixture
def device_states(monkeypatch):
    """States of the generators of two devices that are not here; what is asked for is that of a device."""
    states = {torch.device("xpu", i): torch.tensor([i, 7], dtype=torch.uint8) for i in range(2)}

    def set_rng_state(state, device):
        states[torch.device(device)] = state

    module = SimpleNamespace(
        get_rng_state=lambda device: states[torch.device(device)], set_rng_state=set_rng_state
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr("tp_core._devices.available_devices", lambda: tuple(states))
    return states


def test_an_accelerators_generator_goes_on_where_it_was(device_states):
    kept = capture_rng_state((HOME,))
    device_states[HOME] = torch.tensor([9, 9], dtype=torch.uint8)
    restore_rng_state(kept)
    assert device_states[HOME].tolist() == [1, 7]
    assert list(kept["devices"]) == ["xpu:1"]


def test_the_state_of_a_device_that_is_not_here_is_left_out(device_states):
    kept = capture_rng_state((HOME,))
    del device_states[HOME]
    restore_rng_state(kept)
    assert HOME not in device_states
    assert capture_rng_state((HOME,))["devices"] == {}


def test_files_of_before_are_read(device_states):
    kept = capture_rng_state((HOME,))
    kept["cuda"] = kept.pop("devices")
    device_states[HOME] = torch.tensor([9, 9], dtype=torch.uint8)
    restore_rng_state(kept)
    assert device_states[HOME].tolist() == [1, 7]


def test_apples_generator_is_asked_without_a_device(monkeypatch):
    found = []
    module = SimpleNamespace(get_rng_state=lambda: torch.ones(1), set_rng_state=found.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    state = device_rng_state(torch.device("mps:0"))
    set_device_rng_state(torch.device("mps:0"), state)
    assert found == [state]
