"""The rates of a machine: measured, written, read, and what they make of operators."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from tp_core.errors import ConfigError
from tp_core.jobs import Footprint, StepWork, Transfer
from tp_trainer.planning import Links, Machine, calibrate
from tp_trainer.planning._machine import Operators
from tp_trainer.planning._plan import time_of
from tp_trainer.planning._samples import Measured, Subject, between


def test_rates_are_read_as_they_were_written(tmp_path):
    machine = Machine(flops=1e9, collectives={"all-reduce": {"2": [1e-3, 1e-9, 0.5]}})
    machine.write(tmp_path / "rates.json")
    found = Machine.read(tmp_path / "rates.json")
    assert (found.flops, found.collectives) == (machine.flops, machine.collectives)
    assert "rates.json" in found.source


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "rates.json").write_text("[]", "utf-8")
    for name in ("rates.json", "nowhere.json"):
        with pytest.raises(ConfigError, match="has no measured rates, as tp plan --calibrate writes them"):
            Machine.read(tmp_path / name)


@pytest.mark.parametrize(
    "old", [{"slower": {"forward": 1.5}}, {"collectives": {"send": {"2": [1e-3, 1e-9]}}}]
)
def test_rates_of_another_version_are_refused_with_what_to_run(tmp_path, old):
    (tmp_path / "rates.json").write_text(json.dumps({"flops": 1e9, **old}), "utf-8")
    with pytest.raises(
        ConfigError, match=r"rates\.json has rates .* tp plan --calibrate --devices RANKS --rates"
    ):
        Machine.read(tmp_path / "rates.json")


def test_an_operator_takes_the_longer_of_its_products_and_its_memory():
    operators = Operators.of([(100.0, 1.0), (1.0, 50.0)])
    here = Machine(flops=10.0, bandwidth=10.0, start_s=1.0, is_ahead=False)
    assert here.seconds_of(operators) == pytest.approx(10 + 5 + 2)
    ahead = Machine(flops=10.0, bandwidth=10.0, start_s=6.0)
    assert ahead.seconds_of(operators) == pytest.approx(10 + 6)


def test_a_pass_takes_what_was_measured_of_its_starts_operations_and_bytes():
    machine = Machine(passes={"update": (2.0, 0.1, 1.0)}, is_ahead=False)
    operators = Operators.of([(0.0, 6.0), (100.0, 4.0)])
    assert machine.seconds_of(operators, "update") == pytest.approx(2 + 6 + 2 + 10)
    # Two pieces of half the size each.
    assert machine.seconds_of(operators, "update", starts=2) == pytest.approx(2 * (2 + 3 + 2 + 5))
    assert machine.with_speed("1").seconds_of(operators, "update") == pytest.approx(2 + 6 + 2 + 100)


def test_the_work_of_an_exchange_is_not_hidden_where_ranks_share_cores():
    needed = Measured(Footprint(weights=8, gradients=8, activations=8), *[Operators.of([(100.0, 0.0)])] * 3)
    sums = Transfer(kind="all-reduce", nbytes=10, ranks=2, times=8, hidden_by="backward")
    rates = {
        "flops": 1.0,
        "bandwidth": 1.0,
        "is_ahead": False,
        "collectives": {"all-reduce": {"2": [0.0, 0.1, 0.5]}},
    }

    def exposed(crowding):
        work, links = StepWork(transfers=(sums,)), Links.parse("node=2x1GB/s")
        return time_of(needed, work, 1, Machine(**rates, crowding=crowding), links, trained=1.0).exposed

    assert exposed(2.0) == pytest.approx(8 / 2)
    assert exposed(1.0) == pytest.approx(1)  # the last one, which comes after all operators


def test_rates_of_one_rank_are_refused():
    with pytest.raises(ConfigError, match="takes two of them or more, got 1"):
        calibrate(1)


@pytest.mark.slow
def test_this_machine_is_measured():
    found = calibrate(2)
    assert set(found.collectives) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"}
    assert min(found.flops, found.bandwidth, found.start_s) > 0
    assert found.crowding >= 1
    assert found.seconds_of(Operators.of([(1e9, 1e6)])) > 0
    assert torch.tensor([found.flops]).isfinite().all()


def test_what_lies_between_two_measurements_grows_in_a_straight_line():
    low, high = (
        Measured(
            Footprint(weights=8, gradients=8, activations=n, alone=n, kept={"block": n}),
            *[Operators.of([(n, n)])] * 3,
        )
        for n in (10, 30)
    )
    found = between(low, high, 0.5)
    assert (found.footprint.weights, found.footprint.activations, found.footprint.kept) == (
        8,
        20,
        {"block": 20},
    )
    machine = Machine(flops=10.0, bandwidth=10.0, start_s=0.0)
    assert machine.seconds_of(found.forward) == pytest.approx(2.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Listed(nn.Sequential):
    """The blocks by their list, and by their numbers, of which not one may be missing."""

    def forward(self, x):
        return self[2](self[1](super().forward(x)) if len(self) > 2 else x)


@pytest.mark.parametrize("kind", [nn.Sequential, Listed])
@pytest.mark.parametrize("what", ["nothing", "every block"])
def test_many_blocks_are_computed_from_a_few(kind, what):
    model = nn.Sequential(nn.Linear(8, 8), kind(*(Block() for _ in range(7))), nn.Linear(8, 50))
    found, few = (
        Subject(model, None, torch.ones(2, 8), lambda m, b: m(b).square().mean(), "fp32") for _ in range(2)
    )
    found._blocks = None  # all of them
    expected, computed = found.measure(3, what), few.measure(3, what)
    assert (few._blocks is None) is (kind is Listed)
    assert computed.footprint.to_dict() == expected.footprint.to_dict()
    assert list(computed.footprint.timeline) == list(expected.footprint.timeline)
    for name in ("forward", "backward"):
        assert Machine().seconds_of(getattr(computed, name)) == pytest.approx(
            Machine().seconds_of(getattr(expected, name))
        )


def test_packing_takes_its_time_of_the_host_and_two_copies():
    gather = Transfer(kind="all-gather", nbytes=8, ranks=2, is_packed=True)
    machine, links = Machine(bandwidth=4.0, packing_s=3.0), Links.parse("node=2x1GB/s")
    plain = machine.seconds_for(replace(gather, is_packed=False), links)
    assert machine.seconds_for(gather, links) - plain == pytest.approx(3 + 2 * 8 / 4)


def test_ranks_in_step_with_others_wait_for_the_slowest_of_all():
    machine = Machine(collectives={"all-reduce": {"2": (1.0, 0.5, 0.0), "4": (8.0, 0.7, 0.0)}})
    between, links = Transfer(kind="all-reduce", nbytes=4, ranks=2), Links.parse("node=4x1GB/s")
    assert machine.seconds_for(between, links) == 1.0 + 4 * 0.5
    assert machine.seconds_for(replace(between, in_step=4), links) == 8.0 + 4 * 0.5
