"""`pytest --device=sim` runs the suite of a stranger, and finds what is wrong with it."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "packages" / "tp-simulator" / "README.md"

SUITE = """
    import multiprocessing

    import pytest
    import torch

    assert torch.accelerator.is_available()  # when the file is imported


    def test_devices(device, devices):
        assert [str(d) for d in devices] == ["sim:0", "sim:1"]
        assert device == devices[0]


    def test_a_race(device):
        side = torch.Stream(device=device)
        x = torch.ones(4, device=device)
        side.wait_stream(torch.accelerator.current_stream(device))
        with side:
            y = x * 2
        y + 1
        side.synchronize()


    def race_elsewhere():
        test_a_race(torch.device("sim:1"))


    def test_a_race_in_another_process():
        process = multiprocessing.get_context("spawn").Process(target=race_elsewhere)
        process.start()
        process.join()
        assert process.exitcode == 0


    def test_waits_too_often(device):
        for _ in range(4):
            torch.ones(1, device=device).item()


    @pytest.mark.sync_budget(4)
    def test_may_wait_so_often(device):
        test_waits_too_often(device)


    def test_kills_the_device(device):
        with pytest.raises(torch.AcceleratorError):
            torch.ones(3, device=device)[torch.tensor([7], device=device)].tolist()


    def test_has_a_device_again(device):
        assert torch.ones(2, device=device).sum().item() == 2
"""


def _pytest(folder, *arguments, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SIM_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=800
    )


def _rows(text):
    """Return the table: races and waits, by the name of the test."""
    row = re.compile(r"^ +(\d+) +\d+ +(\d+) +(\d+) +(\d+) (?:in|\S+::(\S+))", re.MULTILINE)
    return {match[5]: tuple(map(int, match.groups()[:4])) for match in row.finditer(text)}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_each_test_is_watched(tmp_path, workers):
    done = _pytest(tmp_path, "--device=sim", "--sync-budget=3", *workers, test_suite=SUITE)
    failed = set(re.findall(r"^FAILED test_suite.py::(\w+)", done.stdout, re.MULTILINE))
    assert failed == {"test_a_race", "test_a_race_in_another_process", "test_waits_too_often"}, done.stdout
    assert "4 passed" in done.stdout
    assert re.search(r"1 race:\n.*test_suite.py:\d+: aten::add on stream 0 of sim:0 reads", done.stdout)
    assert "the host waited 4 times for a device, and may 3 times" in done.stdout
    rows = _rows(done.stdout)
    assert rows["test_a_race"][:2] == (1, 1)
    assert rows["test_a_race_in_another_process"][:2] == (1, 0)
    assert rows["test_waits_too_often"][:2] == (0, 4)
    assert rows[None][:2] == (2, sum(waits for name, (_, waits, *_) in rows.items() if name))


def test_the_readme_finds_its_fault_and_an_option_of_the_suite_is_kept(tmp_path):
    loop, test = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    function = loop[loop.index("@torch.no_grad()") : loop.index("with tp_simulator")]
    suite = f"import torch\n\n{function}\n{test}"
    conftest = """
        def pytest_addoption(parser):
            parser.addoption("--device", default="cpu")
    """
    done = _pytest(tmp_path, "--device=sim", test_loop=suite, conftest=conftest)
    shown = re.search(r"^\$ pytest .*?\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[1]
    for line in shown.splitlines():
        assert line.strip("= ") in done.stdout, done.stdout
    suite = """
        def test_the_option_is_the_suites(request, device):
            assert request.config.getoption("--device") == device.type == "cpu"
    """
    passed = _pytest(tmp_path, "--device=cpu", test_loop=suite)
    assert "1 passed" in passed.stdout
    assert "simulated devices" not in passed.stdout


def test_without_the_option_nothing_is_simulated(tmp_path):
    suite = """
        import sys
        import torch

        def test_there_is_no_device(device):
            assert device.type == str(torch.accelerator.current_accelerator() or "cpu")
            assert "tp_simulator._torch_sim" not in sys.modules
    """
    done = _pytest(tmp_path, test_suite=suite)
    assert "1 passed" in done.stdout, done.stdout
    assert "--device" in _pytest(tmp_path, "--help").stdout
