"""Devices that die, forks, and what is refused."""

import ctypes
import os
import signal

import pytest
import torch
import tp_simulator


@pytest.mark.simulated
def test_a_device_dies_at_the_kernel_that_was_named():
    x = torch.ones(3, device="sim:1")
    tp_simulator.fail_at_kernel(2, "sim:1")
    x = x + 1
    try:
        with pytest.raises(
            torch.AcceleratorError, match=r"sim:1 is dead: it was to die at this kernel, aten::mul"
        ):
            x * 2
        with pytest.raises(torch.AcceleratorError, match=r"sim:1 is dead"):
            x.cpu()
        assert torch.ones(3, device="sim:0").sum().item() == 3
    finally:
        tp_simulator.revive("sim:1")
    assert torch.ones(3, device="sim:1").sum().item() == 3


@pytest.mark.simulated
def test_a_death_is_noticed_by_the_next_wait():
    try:
        with tp_simulator.hostile():
            tp_simulator.fail_at_kernel(1, "sim:1")
            x = torch.ones(3, device="sim:1")  # its kernel is the one
            y = x * 2
            with pytest.raises(torch.AcceleratorError, match=r"aten::fill_"):
                torch.accelerator.synchronize("sim:1")
        del y
    finally:
        tp_simulator.revive("sim:1")


@pytest.mark.simulated
def test_a_kernel_that_fails_kills_its_device():
    table = torch.ones(4, 2, device="sim:1")
    index = torch.tensor([9], device="sim:1")
    try:
        with tp_simulator.hostile():
            torch.nn.functional.embedding(index, table)  # the launch is fine
            with pytest.raises(torch.AcceleratorError, match=r"sim:1 is dead: .*index out of range"):
                torch.accelerator.synchronize("sim:1")
    finally:
        tp_simulator.revive("sim:1")


@pytest.mark.simulated
def test_a_fork_cannot_use_what_its_parent_has():
    torch.ones(1, device="sim:0")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="sim:0")
            text = "it worked"
        except RuntimeError as error:
            text = str(error)
        os.write(write, f"{torch.sim._is_in_bad_fork()} {text}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).startswith(b"True Cannot re-initialize sim in forked subprocess")


@pytest.mark.simulated
def test_the_first_kernel_has_the_number_1():
    with pytest.raises(ValueError, match=r"there is none of number 0"):
        tp_simulator.fail_at_kernel(0)


@pytest.mark.simulated
def test_there_is_no_third_device():
    with pytest.raises(RuntimeError, match=r"invalid device ordinal 2: there are 2"):
        torch.sim.set_device(2)


@pytest.mark.simulated
def test_the_number_of_devices_stays():
    tp_simulator.activate(2)
    with pytest.raises(
        RuntimeError, match=r"this process has 2 simulated devices already, and cannot have 3"
    ):
        tp_simulator.activate(3)
    with pytest.raises(ValueError, match=r"1 to 16 simulated devices, and not 17"):
        tp_simulator.activate(17)


def test_without_devices_nothing_is_watched():
    with pytest.raises(RuntimeError, match=r"call tp_simulator.activate"), tp_simulator.watch():
        pass


@pytest.mark.simulated
def test_the_host_gets_an_error_where_it_touches_memory_of_a_device():
    address = torch.ones(3, device="sim:1").data_ptr()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        ctypes.c_float.from_address(address).value  # noqa: B018 - it never returns
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    with os.fdopen(read) as file:
        assert "code of the host followed an address of the memory of sim:1\n" in file.read()
