"""What monitors log of a run."""

import json

import cloudpickle
import pytest
import torch
from tp_core.errors import ConfigError
from tp_trainer import Callback
from tp_trainer.callbacks import GradientNorm, LearningRateMonitor, Profiler, Throughput

from tests.reference_training import squared_error
from tests.tp_trainer import callback_run
from tests.tp_trainer.callback_run import STEPS, Spy, network, stop, train

cloudpickle.register_pickle_by_value(callback_run)  # for ranks, which do not know this folder


def test_the_learning_rate_of_each_step_is_logged():
    spy, model = Spy(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train([spy, LearningRateMonitor()], model=model, optimizer=optimizer, scheduler=scheduler)
    assert [step for step, _ in spy.logged] == list(range(1, 2 * STEPS + 1))
    assert [numbers["lr"] for _, numbers in spy.logged] == [1.0] * STEPS + [0.5] * STEPS


def test_groups_of_parameters_are_told_apart():
    spy, model = Spy(), network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "name": "head"}]
    train([spy, LearningRateMonitor()], model=model, optimizer=torch.optim.SGD(groups, lr=0.2), epochs=1)
    assert spy.logged[0][1] == {"lr/0": 0.1, "lr/head": 0.2}


def norms(backend, **options):
    spy, model = Spy(), torch.nn.Linear(3, 1).double()
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    train([spy, GradientNorm()], model=model, backend=backend, clip_norm=1e-3, **options)
    return [float(numbers["grad_norm"]) for _, numbers in spy.logged]


@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
def test_the_norm_before_clipping_is_that_of_one_device(backend):
    assert norms(backend) == pytest.approx(norms("single"), rel=1e-9)


def test_the_norm_is_that_of_the_gradients():
    found = []

    def watched(model, batch):
        if model.training and model.weight.grad is None:
            loss = squared_error(model, batch)
            found.append(
                torch.stack([g.norm() for g in torch.autograd.grad(loss, model.parameters())]).norm()
            )
        return squared_error(model, batch)

    assert norms("single", step=watched) == pytest.approx([float(norm) for norm in found])
    assert len(found) == 2 * STEPS


def on_a_rank(folder):
    spy = Spy()
    train([spy, Throughput(every_steps=2), Profiler(folder, first_step=2, steps=2)], backend="ddp")
    return norms("ddp"), [sorted(numbers) for _, numbers in spy.logged]


@pytest.mark.slow
def test_monitors_on_ranks(two_ranks, tmp_path):
    for found, logged in two_ranks.run(on_a_rank, tmp_path):
        assert found == pytest.approx(norms("single"), rel=1e-9)
        assert logged == [["peak_memory", "samples_per_s", "steps_per_s", "waiting"]] * 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "steps-2-3-rank-0.json",
        "steps-2-3-rank-1.json",
    ]


def test_throughput_is_of_so_many_steps_and_the_end_of_each_epoch():
    spy = Spy()
    throughput = Throughput(every_steps=2, tokens_per_sample=10, flops_per_sample=3.0, peak_flops=6.0)
    train([spy, throughput])
    assert [step for step, _ in spy.logged] == [2, 4, 5, 7, 9, 10]
    for _, numbers in spy.logged:
        assert numbers["samples_per_s"] == pytest.approx(4 * numbers["steps_per_s"])
        assert numbers["tokens_per_s"] == pytest.approx(10 * numbers["samples_per_s"])
        assert numbers["mfu"] == pytest.approx(numbers["samples_per_s"] / 2)
        assert 0 <= numbers["waiting"] <= 1
        assert numbers["peak_memory"] > 2**26  # of a process with torch in it, in bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"tokens_per_sample": 0}, "tokens_per_sample"),
        ({"peak_flops": 1e12}, "flops_per_sample and peak_flops together"),
        ({"flops_per_sample": 1e12}, "flops_per_sample and peak_flops together"),
    ],
)
def test_wrong_numbers_of_a_throughput_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Throughput(**options)


def traced_steps(path):
    """Return how many optimizer steps a trace has."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(1 for event in events if event.get("name", "").startswith("Optimizer.step#"))


@pytest.mark.parametrize(
    ("first", "steps", "name", "traced"),
    [
        (1, 2, "steps-1-2-rank-0.json", 2),
        (4, 3, "steps-4-6-rank-0.json", 3),
        (9, 9, "steps-9-17-rank-0.json", 2),
    ],
)
def test_a_trace_has_the_steps_that_were_chosen(tmp_path, first, steps, name, traced):
    train([Profiler(tmp_path / "traces", first_step=first, steps=steps)], validation=None)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [name]
    assert traced_steps(tmp_path / "traces" / name) == traced


def test_a_run_that_ends_before_the_steps_leaves_no_trace(tmp_path):
    train([Profiler(tmp_path / "traces", first_step=50)], epochs=1)
    assert not (tmp_path / "traces").exists()


def test_a_run_that_fails_within_the_steps_leaves_what_there_is(tmp_path):
    stop(3, [Profiler(tmp_path, first_step=2, steps=5)])
    assert [path.name for path in tmp_path.iterdir()] == ["steps-2-6-rank-0.json"]


class LogsAll(Callback):
    """Logs the step that each event is about, and keeps what is logged."""

    def __init__(self):
        self.rows = []

    def on_fit_start(self, run):
        run._logs.add = lambda numbers, *, step, epoch: self.rows.append((step, epoch, numbers))

    def on_optimizer_step(self, run, grad_norm):
        run.log(step=run.step + 1)

    def on_step_end(self, run):
        run.log(step=run.step)

    def on_epoch_end(self, run):
        run.log(step=run.step, epoch=run.epoch)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_are_logged_under_the_step_that_they_are_about(accumulate):
    logs = LogsAll()
    train([logs], accumulate=accumulate)
    rows = [row for row in logs.rows if "step" in row[2]]
    assert [step for step, _, _ in rows] == [numbers["step"] for _, _, numbers in rows]
    ends = [(step, epoch) for step, epoch, numbers in rows if "epoch" in numbers]
    assert ends == ([(5, 1), (10, 2)] if accumulate == 1 else [(3, 1), (6, 2)])
    assert len(rows) == 2 * ends[-1][0] + 2
