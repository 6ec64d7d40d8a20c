"""``pytest --device=sim``: a suite for GPUs runs on simulated devices, and each test is watched."""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from _pytest.terminal import TerminalReporter

_SHOWN = 10  # tests in the summary, beside those with races; -v shows all


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulated devices")
    group.addoption(
        "--sync-budget",
        type=int,
        metavar="N",
        help="how often the host may wait for a device of --device=sim in a test; "
        "@pytest.mark.sync_budget(N) says it for one test",
    )
    group.addoption(
        "--sim-seed",
        type=int,
        default=0,
        metavar="SEED",
        help="the order in which simulated devices work; with 0, the default, all is as late as it may be",
    )
    group.addoption(
        "--sim-as-cuda",
        action="store_true",
        help="have simulated devices be CUDA's for a suite that says `cuda`",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    # Before the suite's own files: they may ask torch for devices when they are imported.
    is_simulated = _asked_for(args).partition(":")[0] == "sim"
    if is_simulated:
        _activate(early_config.known_args_namespace)
    result = yield
    # Many suites have an option of this name. Theirs is taken, which only now is known.
    _, unknown = parser.parse_known_and_unknown_args(args)
    if any(arg.partition("=")[0] == "--device" for arg in unknown) or {"-h", "--help"} & set(args):
        parser.getgroup("simulated devices").addoption(
            "--device", help="what the fixtures `device` and `devices` are, such as sim, cuda or cpu"
        )
    if is_simulated:
        early_config.pluginmanager.register(_Watch(early_config), "tp-simulator-watch")
    return result


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sync_budget(n): how often the host may wait for a simulated device in this test"
    )


def _asked_for(args: list[str]) -> str:
    """Return what stands behind ``--device``, the last one of them; "" without one."""
    found = ""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, _, value = arg.partition("=")
        if name == "--device":
            found = value or following
    return found


def _activate(options: argparse.Namespace) -> None:
    # Processes that tests start read these: they have devices, too, and these are as late.
    os.environ["SIM_HOSTILE"] = str(options.sim_seed)
    if options.sim_as_cuda:
        os.environ["SIM_AS_CUDA"] = "1"
    handle, os.environ["SIM_RACES"] = tempfile.mkstemp(prefix="sim-races-")
    os.close(handle)
    from tp_simulator._activation import activate
    from tp_simulator._build import extension

    activate(int(os.environ.get("SIM_DEVICES") or 2))
    extension().be_late(options.sim_seed)


# -- Fixtures -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def devices(request: pytest.FixtureRequest) -> "list[torch.device]":
    """All devices of the type that ``--device`` names; without it, of the accelerator, or the CPU."""
    import torch

    asked = request.config.getoption("--device", default=None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if asked:
        device = torch.device(str(asked))
    else:
        device = accelerator or torch.device("cpu")
    if device.index is not None or accelerator is None or device.type != accelerator.type:
        return [device]
    return [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]


@pytest.fixture(scope="session")
def device(devices: "list[torch.device]") -> "torch.device":
    """The first of `devices`."""
    return devices[0]


# -- What each test does --------------------------------------------------------------------------


class _Watch:
    """Looks at what each test does on simulated devices, and shows it at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._races = Path(os.environ["SIM_RACES"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        from tp_simulator._control import Report

        begin, report = self._races.stat().st_size, Report()
        try:
            result = yield
        finally:
            self._let_devices_finish()
            found = self._races.read_bytes()[begin:].decode(errors="replace").splitlines()
            # Memory may be freed early and be right: its own stream waits before it uses the memory again.
            races = [line for line in found if _FREED not in line]
            item.user_properties += [
                ("sim_races", len(races)),
                ("sim_freed", len(found) - len(races)),
                ("sim_waits", report.synchronizations),
                ("sim_copies", sum(report.copies.values())),
                ("sim_kernels", report.kernels),
            ]
            if found:
                item.add_report_section("call", "races", "\n".join(found))
        if races:
            text = "\n".join(races)
            pytest.fail(f"{len(races)} race{'s' if len(races) != 1 else ''}:\n{text}", pytrace=False)
        budget = self._budget_of(item)
        if budget is not None and report.synchronizations > budget:
            waits = report.synchronizations
            pytest.fail(f"the host waited {waits} times for a device, and may {budget} times", pytrace=False)
        return result

    def _budget_of(self, item: pytest.Item) -> int | None:
        mark = item.get_closest_marker("sync_budget")
        budget: int | None = mark.args[0] if mark else self._config.getoption("--sync-budget")
        return budget

    def _let_devices_finish(self) -> None:
        import torch

        from tp_simulator._build import extension
        from tp_simulator._control import revive

        # A device may die of what is left, or have died: the next test has one again.
        with contextlib.suppress(torch.AcceleratorError):
            extension().finish()
        for index in range(extension().device_count()):
            revive(index)

    def pytest_terminal_summary(self, terminalreporter: "TerminalReporter") -> None:
        rows = []
        for reports in terminalreporter.stats.values():
            for report in reports:
                if getattr(report, "when", None) == "call":
                    rows.append((report.nodeid, dict(report.user_properties)))
        rows = [(name, row) for name, row in rows if "sim_waits" in row]
        if not rows:
            return
        rows.sort(key=lambda each: (-each[1]["sim_races"], -each[1]["sim_waits"], each[0]))
        is_long = terminalreporter.verbosity > 0
        shown = [each for i, each in enumerate(rows) if is_long or i < _SHOWN or each[1]["sim_races"]]
        terminalreporter.section("simulated devices")
        terminalreporter.line("  races   freed   waits  copies kernels")
        for name, row in shown:
            terminalreporter.line("".join(f"{row[key]:7} " for key in _COLUMNS) + name)
        total: dict[str, Any] = {key: sum(row[key] for _, row in rows) for key in _COLUMNS}
        terminalreporter.line("".join(f"{total[key]:7} " for key in _COLUMNS) + f"in {len(rows)} tests")

    def pytest_unconfigure(self) -> None:
        self._races.unlink(missing_ok=True)


_FREED = "is freed while"  # in csrc/memory.h
_COLUMNS = ("sim_races", "sim_freed", "sim_waits", "sim_copies", "sim_kernels")
