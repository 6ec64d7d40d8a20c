"""`tp estimate`: the layouts that fit, what each needs, and what to write for it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from tp_core.errors import ConfigError
from tp_core.fully_sharded import FullyShardOptions
from tp_core.jobs import Layout, MemoryNeed
from tp_core.plugins import Backend, Session, Verdict, hookimpl, registry
from tp_trainer import FsdpOptions, Trainer, estimate

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
"""


def step(model, batch):
    return model(batch).float().mean()


@pytest.fixture(scope="module")
def made():
    space = {}
    exec(BUILDER, space)
    with torch.device("meta"):
        return space["build"]()


@pytest.fixture(scope="module")
def table(made):
    return estimate(**made, step=step, devices=4, memory=2**40)


def of(table, backend, name):
    (found,) = [found for found in table.layouts if (found.backends, found.name) == (backend, name)]
    return found


def first_shard(parameter, *, ranks, block=512):
    """Return the bytes of the largest piece of a parameter, in blocks of an accelerator's allocator."""
    rows = -(-parameter.shape[0] // ranks)
    return -(-parameter[:rows].nbytes // block) * block


def test_layouts_of_all_installed_backends_come_by_their_memory(made, table):
    axes = {(found.backends, found.name) for found in table.layouts}
    expected = {("single", "one device"), ("ddp", "data 4"), ("fsdp", "fsdp 4"), ("fsdp", "data 2 x fsdp 2")}
    assert expected <= axes
    assert all(found.memory.reserved >= found.memory.total for found in table.layouts)
    taken = [found.memory.taken for found in table.layouts]
    assert taken == sorted(taken)
    assert str(table).splitlines()[1].split()[:2] == ["total", "reserved"]
    assert table.to_dict()["layouts"][0]["memory"]["reserved"] == taken[0]
    assert len(axes) == len(table.layouts)
    assert table.fitting == list(table.layouts)
    shards = [first_shard(parameter, ranks=4) for parameter in made["model"].parameters()]
    assert of(table, "fsdp", "fsdp 4").memory.weights == sum(shards)


def test_layouts_of_one_device_are_those_of_one_process(made):
    table = estimate(**made, step=step)
    assert [(found.backend, found.name) for found in table.layouts] == [("single", "one device")]
    assert table.layouts[0].lines(accumulate=1, precision="fp32") == [
        "python train.py",
        'Trainer(backend="single")',
    ]
    assert "one process" in table.left_out["ddp"]


@pytest.mark.slow
def test_what_does_not_fit_comes_last_with_what_it_needs(made, table):
    states = 3.9 * of(table, "ddp", "data 4").memory.weights
    less = estimate(**made, step=step, devices=4, memory=int(states))
    assert not of(less, "ddp", "data 4").memory.fits
    fits = [found.memory.fits for found in less.layouts]
    assert fits == sorted(fits, reverse=True)
    text = str(less)
    # The optimizer's update needs the most: to compute more again would not help.
    assert text.index("do not fit:") < text.index("data 4 (ddp, all but matmuls again): needs")
    assert "less is needed with" in text


@pytest.mark.slow
def test_less_memory_has_more_computed_again(made):
    many = {"step": step, "devices": 4, "samples": 512}  # so that they are more than a segment
    ddp = of(estimate(**made, **many), "ddp", "data 4")
    assert ddp.recomputation == "nothing"
    tight = of(estimate(**made, **many, memory=ddp.memory.total - 1), "ddp", "data 4")
    assert tight.memory.fits
    assert tight.recomputation != "nothing"
    assert "checkpoint_activations(model" in tight.lines(accumulate=1, precision="fp32")[1]


def test_the_lines_of_a_layout_are_accepted_here(table):
    names = {"Trainer": Trainer, "FullyShardOptions": FullyShardOptions, "FsdpOptions": FsdpOptions}
    for found in table.layouts:
        command, *script, line = found.lines(accumulate=2, precision="bf16-mixed")
        assert command == ("tp launch -n 4 train.py" if found.is_launched else "python train.py")
        assert "\n".join(script) == found.layout.setup
        assert "accumulate=2" in line
        eval(line.replace("Trainer(", "Trainer(devices='cpu', "), names)


class Mine(Backend):
    name = "mine"

    def assess(self, job):
        return Verdict.fits(1, "it is mine")

    def open(self, job):
        return Session(job)

    def layouts(self, job):
        axes = {"data": job.environment.world_size}
        return [Layout(axes=axes, options={"mine": {"kept": kept}}) for kept in (2**50, 0)]

    def estimate_memory(self, job):
        kept = job.options["mine"]["kept"] if "mine" in job.options else 0
        need = MemoryNeed(weights=1, gradients=1, optimizer=1, activations=job.footprint.batch + kept)
        return replace(need, free=job.free_nbytes)


class Plain(Mine):
    name = "plain"
    layouts, estimate_memory = Backend.layouts, Backend.estimate_memory


class Broken(Mine):
    name = "broken"

    def layouts(self, job):
        raise KeyError("axes")


class Wrong(Mine):
    name = "wrong"

    def estimate_memory(self, job):
        raise KeyError("weights")


class Plugin:
    @hookimpl
    def tp_backends(self):
        return [Mine(), Plain(), Broken(), Wrong()]


def test_backends_of_other_projects_are_listed_and_broken_ones_named(made):
    plugin = Plugin()
    registry.register(plugin, name="others")
    try:
        table = estimate(**made, step=step, devices=4, memory=2**40)
    finally:
        registry.unregister("others")
    found = table.layouts[0]
    assert (found.backend, found.name, found.memory.total) == ("mine", "data 4", 3 + made["batch"].nbytes)
    assert found.layout.options["mine"] == {"kept": 0}, "the first options that fit"
    assert of(table, "plain", "data 4").memory.weights == of(table, "ddp", "data 4").memory.weights
    assert table.left_out["broken"] == "its layouts raised KeyError: 'axes'"
    assert table.left_out["wrong"] == "its estimate raised KeyError: 'weights'"


def test_backends_that_are_missing_are_named(made, monkeypatch):
    kept = [found for found in registry.backends() if found.item.name in ("ddp", "fsdp")]
    monkeypatch.setattr(type(registry), "backends", lambda _: kept)
    table = estimate(**made, step=step, devices=4)
    assert table.left_out["pipeline"] == "it is not installed: pip install tp-pipeline"
    assert "left out: pipeline: it is not installed" in str(table)


def test_a_model_without_blocks_is_left_out_where_blocks_are_needed():
    table = estimate(nn.Linear(4, 4), None, torch.zeros(2, 4), step, devices=2)
    assert of(table, "ddp", "data 2").recomputation == "nothing"
    assert not {"pipeline", "shard", "context"} & {found.backend for found in table.layouts}
    assert {"pipeline", "shard", "context"} <= set(table.left_out)


@pytest.mark.parametrize("changed", [{"devices": 0}, {"samples": 0}])
def test_wrong_requests_are_refused_in_a_sentence(made, changed):
    with pytest.raises(ConfigError, match=next(iter(changed))):
        estimate(**{**made, "step": step, "devices": 4, **changed})


def test_the_command_prints_the_table_or_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "things.py").write_text(BUILDER, "utf-8")
    monkeypatch.chdir(tmp_path)
    asked = ["estimate", "things.py:build", "--devices", "2", "--batch", "4"]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["devices"], found["samples"]) == (2, 4)
    assert set(found["layouts"][0]) == {"backend", "axes", "recomputation", "fits", "memory", "start"}
    assert run([*asked, "--memory", "1KB"]) == 1
    text = capsys.readouterr().out
    assert "none fits" in text
    assert "do not fit" in text
