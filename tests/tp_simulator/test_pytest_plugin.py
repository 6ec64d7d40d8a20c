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


SAYS_CUDA = """
    import multiprocessing
    import threading

    import pytest
    import torch
    import torch.distributed as dist
    from torch import nn

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    DEVICE = torch.device("cuda")  # when the file is imported


    def test_names():
        x = torch.ones(2, device="cuda")
        assert x.is_cuda and not x.cpu().is_cuda
        assert x.device == torch.device("cuda:0") == torch.device("cuda", 0) != torch.device("cuda:1")
        assert (x.device.type, str(x.device)) == ("cuda", "cuda:0")
        assert repr(x.device) == "device(type='cuda', index=0)"
        assert isinstance(DEVICE, torch.device)
        assert x.to("cuda") is x.to(0) is x.cuda() is x
        assert x.cuda(1).device == torch.ones(1, device="cuda:1").device
        assert torch.get_device_module("cuda").current_device() == 0
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:7")


    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_step_in_mixed_precision(dtype):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to("cuda")
        optimizer = torch.optim.AdamW(model.cuda().parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        with torch.autocast("cuda", dtype=dtype):
            y = model(torch.ones(2, 4).cuda(non_blocking=True))
        assert y.dtype == dtype
        scaler.scale(y.float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.is_autocast_enabled("cuda")
        assert torch.cuda.max_memory_allocated() > 0


    def test_modules_keep_parameters_on_the_way_alone():
        model = nn.BatchNorm1d(2)
        weight = model.weight
        assert model.cuda().weight is weight and weight.is_cuda
        first = model.running_mean[:1]
        model.load_state_dict({"running_mean": torch.ones(2)}, strict=False)
        assert first.item() == 1


    def test_an_allocator_that_nothing_has_used():
        assert torch.cuda.memory_stats(1)["reserved_bytes.all.peak"] >= 0


    def test_random_numbers():
        torch.cuda.manual_seed_all(3)
        first = torch.rand(4, device=DEVICE)
        with torch.random.fork_rng([0]):
            torch.rand(4, device=DEVICE)
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert torch.equal(first, torch.rand(4, device="cuda", generator=generator))


    def test_files(tmp_path):
        torch.save({"x": torch.ones(2, device="cuda:1")}, tmp_path / "x")
        assert torch.load(tmp_path / "x")["x"].device == torch.device("cuda:1")
        assert torch.load(tmp_path / "x", map_location="cuda")["x"].device == torch.device("cuda:0")
        assert torch.load(tmp_path / "x", map_location={"cuda:1": "cpu"})["x"].device.type == "cpu"


    def test_a_default_device():
        with torch.device("cuda"):
            assert torch.zeros(1).is_cuda
        torch.set_default_device("cuda")
        try:
            assert nn.Linear(1, 1).weight.is_cuda
        finally:
            torch.set_default_device(None)


    def test_another_thread():
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="cuda:1")))
        thread.start()
        thread.join()
        assert made[0].is_cuda


    def rank_of_one():
        torch.cuda.set_device("cuda:1")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[1])
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        dist.all_reduce(model.module.weight.grad)
        dist.destroy_process_group()


    def test_another_process_with_a_group():
        process = multiprocessing.get_context("spawn").Process(target=rank_of_one)
        process.start()
        process.join()
        assert process.exitcode == 0


    def test_an_optimizer_made_before_trains_what_moves():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()
        model.to("cuda")(torch.ones(1, 2, device="cuda")).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight.cpu(), before - 1)

    def test_a_race():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = torch.ones(4, device="cuda")
        y + 1
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


def test_a_suite_that_says_cuda_runs_as_it_is(tmp_path):
    done = _pytest(tmp_path, "--device=sim", "--sim-as-cuda", test_suite=SAYS_CUDA)
    assert set(re.findall(r"^FAILED test_suite.py::(\w+)", done.stdout, re.MULTILINE)) == {"test_a_race"}, (
        done.stdout
    )
    assert "1 race:" in done.stdout
    assert " 11 passed" in done.stdout
    without = _pytest(tmp_path, "--device=sim")
    assert "12 skipped" in without.stdout, without.stdout


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
