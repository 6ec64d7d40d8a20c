"""`tp plan`: which layouts fit, how long a step takes, and lines that start them."""

import json
from dataclasses import replace

import pytest
import torch
from tp_core.errors import ConfigError
from tp_core.jobs import Forecast, Layout, MemoryNeed, StepWork, Transfer
from tp_core.plugins import Backend, Session, Verdict, registry
from tp_trainer import FsdpOptions, Trainer
from tp_trainer.planning import Links, Machine, plan

from tests.run_tp import run

BUILDER = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):  # (batch, tokens, 64)
        h = self.norm(x).unflatten(-1, (4, 16)).transpose(1, 2)
        x = x + attend(h, h, h, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(self.up(x).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    print("of the builder")
    model = Model()
    tokens = torch.zeros(2, 32, dtype=torch.long)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batch": tokens}

def without_batch():
    return nn.Linear(4, 4)
"""
MAX = 2**60
TWO = [c for c in registry.backends() if c.item.name in ("ddp", "fsdp")]
LINKS = "node=2x100GB/s,between=10GB/s"


def step(model, batch):
    return model(batch).float().mean()


@pytest.fixture(scope="module")
def made():
    space = {}
    exec(BUILDER, space)
    with torch.device("meta"):
        return space["build"]()


@pytest.fixture(scope="module")
def found(made):
    return plan(**made, step=step, devices=4, links=LINKS, memory=MAX, samples=8)


def test_layouts_of_all_installed_backends_are_ranked_by_the_time_of_a_step(found):
    assert {"ddp", "fsdp"} <= {p.backend for p in found.layouts}
    times = [p.time.total for p in found.layouts]
    assert times == sorted(times)
    assert all(p.layout.ranks == 4 for p in found.layouts)
    assert found.best is found.layouts[0]


@pytest.mark.slow
def test_what_lacks_memory_comes_last_with_how_much(made, found):
    ddp = next(p for p in found.layouts if p.backend == "ddp")
    free = 4 * ddp.memory.weights - 1  # its states alone are more
    less = plan(**made, step=step, devices=4, links=LINKS, memory=free, samples=8, backends=TWO)
    lacking = [p for p in less.layouts if p.lacks]
    assert "ddp" in {p.backend for p in lacking}
    assert all(p.lacks == p.memory.total - free for p in lacking)
    assert [bool(p.lacks) for p in less.layouts] == sorted(bool(p.lacks) for p in less.layouts)
    assert "do not fit" in str(less)


@pytest.mark.slow
def test_less_memory_makes_more_batches_or_computes_again(made, found):
    def of_ddp(plan):
        return next(p for p in plan.layouts if p.backend == "ddp")

    roomy = of_ddp(found)
    tight = of_ddp(
        plan(
            **made, step=step, devices=4, links=LINKS, memory=roomy.memory.total - 1, samples=8, backends=TWO
        )
    )
    assert (roomy.accumulate, roomy.recomputation) == (1, "nothing")
    assert not tight.lacks
    assert (tight.accumulate, tight.recomputation) != (1, "nothing")
    assert tight.time.total > roomy.time.total


@pytest.mark.slow
def test_slower_links_take_longer_where_layouts_exchange_more(made):
    slow, fast = (
        plan(**made, step=step, devices=4, links=f"node=4x{rate}", samples=8, backends=TWO)
        for rate in ("1MB/s", "900GB/s")
    )
    exposed = {p.name + p.backend: p.time.exposed for p in fast.layouts}
    assert all(p.time.exposed > exposed[p.name + p.backend] for p in slow.layouts)


def test_lines_that_start_a_layout_are_accepted_here(found):
    from tp_core.sessions import FullyShardOptions

    names = {"Trainer": Trainer, "FullyShardOptions": FullyShardOptions, "FsdpOptions": FsdpOptions}
    axes = {(p.backend, frozenset(p.layout.axes)) for p in found.layouts}
    combined = [("context", "data context pipeline"), ("pipeline", "fsdp pipeline")]
    for backend, names_of_axes in (*combined, ("pipeline", "data pipeline tensor")):
        assert (backend, frozenset(names_of_axes.split())) in axes
    for planned in found.layouts:
        lines = replace(found, precision="bf16-mixed").start(replace(planned, accumulate=2))
        assert planned.layout.setup in lines
        group = f"init_process_group({planned.layout.axes.get('tensor')})"
        assert (group in lines) is ("tensor" in planned.layout.axes)
        (line,) = (line for line in lines.splitlines() if line.startswith("Trainer("))
        assert "accumulate=2" in line
        eval(line.replace("Trainer(", "Trainer(devices='cpu', "), names)


def test_collectives_take_a_round_for_each_doubling_and_the_slowest_link():
    links, machine = Links.parse("node=4x100GB/s,between=10GB/s"), Machine(latency_s=(1.0, 1.0))
    within = Transfer(kind="all-gather", nbytes=4 * 10**11, ranks=4)
    between = Transfer(kind="all-gather", nbytes=4 * 10**11, ranks=2, stride=4)
    assert machine.seconds_for(within, links) == pytest.approx(2 + 3.0)
    assert machine.seconds_for(between, links) == pytest.approx(1 + 20.0)
    # Four members on each host send at the same time.
    across = Transfer(kind="all-gather", nbytes=4 * 10**11, ranks=8)
    assert machine.seconds_for(across, links) == pytest.approx(3 + 7 / 8 * 10.0)


def test_a_backend_of_another_project_is_compared_by_its_forecast(made):
    class Mine(Backend):
        name = "mine"

        def assess(self, job):
            return Verdict.fits(1, "it is mine")

        def open(self, job):
            return Session(job)

        def layouts(self, job):
            return [Layout(axes={"data": job.environment.world_size})]

        def forecast(self, job, layout):
            need = MemoryNeed(weights=1, gradients=1, optimizer=1, activations=1, free=job.free_nbytes)
            return Forecast(memory=need, work=StepWork(operations=1e-3, starts=1e-3))

    contribution = replace(next(iter(registry.backends())), item=Mine())
    backends = [*TWO, contribution]
    best = plan(**made, step=step, devices=4, links=LINKS, samples=8, backends=backends).best
    assert best.backend == "mine"


def test_layouts_of_packages_that_are_missing_are_named(made):
    found = plan(**made, step=step, devices=4, links=LINKS, samples=4, backends=TWO)
    assert found.left_out["pipeline"] == "it is not installed: pip install tp-pipeline"
    assert "not compared: pipeline: it is not installed" in str(found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"links": None}, "links are not given"),
        ({"links": "450GB/s"}, "links are written node=8x450GB/s"),
        ({"links": "node=4xfast"}, "a rate above 0 is written"),
        ({"devices": 5}, "5 devices do not fill hosts of 2"),
        ({"samples": 7}, "do not divide among the readers"),
        ({"batch": None}, "needs a batch and a step"),
        ({"length": 0}, "length"),
    ],
)
def test_wrong_requests_are_refused_in_a_sentence(made, changed, message):
    given = {"backends": TWO, **made, "step": step, "devices": 4, "links": LINKS, "samples": 8, **changed}
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_command_prints_the_table_or_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "things.py").write_text(BUILDER, "utf-8")
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "things.py:build", "--devices", "2", "--links", "node=2x1GB/s", "--batch", "4"]
    assert run([*asked, "--length", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["tokens"]) == (4, 16)
    assert {"memory", "seconds", "start", "lacks_bytes"} <= set(told["layouts"][0])
    assert run(["plan", "things.py:without_batch"]) == 2
    assert 'return {"model": model, "batch": batch, "step": step}' in capsys.readouterr().err
    assert run([*asked, "--memory", "1KB"]) == 1
    assert "do not fit" in capsys.readouterr().out
