"""Of the ways in which a job fits, the fastest is taken: ddp, then fsdp with less and less memory."""

import dataclasses

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment
from tp_core.discovery import select
from tp_core.errors import ConfigError
from tp_core.fully_sharded import resolve_options, sharded_memory
from tp_core.jobs import Footprint
from tp_core.plugins import Job, registry
from tp_trainer import FsdpOptions

WIDTH, BLOCKS = 2048, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.inner(x)


def make_model():
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1, bias=False))


MODEL = make_model()
BLOCK = WIDTH * WIDTH * 4
WEIGHTS = BLOCKS * BLOCK + WIDTH * 4
FOOTPRINT = Footprint(
    weights=WEIGHTS,
    gradients=WEIGHTS,
    optimizer=2 * WEIGHTS,
    update=BLOCK,
    activations=40 * BLOCK,
    alone=40 * BLOCK,
    with_gradients=40 * BLOCK,
    kept={str(i): 5 * BLOCK - 100 for i in range(BLOCKS)},
    passed={str(i): 100 for i in range(BLOCKS)},
)
ENVIRONMENT = LaunchEnvironment.read(
    {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
)


def make_job(free, *, device="cuda:0", footprint=FOOTPRINT, **values):
    return Job(
        devices=(torch.device(device),),
        environment=ENVIRONMENT,
        model=MODEL,
        footprint=footprint,
        free_nbytes=free,
        **values,
    )


def need_of(**options):
    job = make_job(None)
    return sharded_memory(job, FsdpOptions(**options), ranks=4).total


def way_of(free, **values):
    found = resolve_options(make_job(free, **values), FsdpOptions(), ranks=4)
    return (found.reshard_after_forward, found.activation_checkpointing, found.offload)


KEPT = need_of(reshard_after_forward=False, activation_checkpointing=False, offload=False)
LET_GO = need_of(reshard_after_forward=True, activation_checkpointing=False, offload=False)
CHECKPOINTED = need_of(reshard_after_forward=True, activation_checkpointing=True, offload=False)
OFFLOADED = need_of(reshard_after_forward=True, activation_checkpointing=True, offload=True)


def test_each_way_needs_less_than_the_one_before():
    assert KEPT > LET_GO > CHECKPOINTED > OFFLOADED > 0


def test_gloo_gathers_into_a_buffer_of_its_own():
    frozen = make_model().requires_grad_(False)
    options = FsdpOptions(reshard_after_forward=True, activation_checkpointing=False, offload=False)
    cuda, cpu = (
        sharded_memory(dataclasses.replace(make_job(None, device=device), model=frozen), options, ranks=4)
        for device in ("cuda:0", "cpu")
    )
    assert cpu.total - cuda.total == BLOCK + BLOCK // 4


def test_the_fastest_that_fits_is_taken():
    assert way_of(2 * KEPT) == (False, False, False)
    assert way_of(KEPT) == (True, False, False)  # it would fit with nothing to spare
    assert way_of(LET_GO) == (True, False, False)
    assert way_of(LET_GO - 1) == (True, True, False)
    assert way_of(CHECKPOINTED - 1) == (True, True, True)
    assert way_of(1) == (True, True, True)


def test_nothing_is_offloaded_from_the_cpu():
    assert way_of(1, device="cpu") == (True, True, False)


def test_where_nothing_is_known_parameters_are_let_go():
    assert way_of(None, footprint=None) == (True, False, False)
    unknown = dataclasses.replace(FOOTPRINT, activations=None)
    assert way_of(10 * KEPT, footprint=unknown)[0] is True


def test_a_small_model_has_the_same_options_measured_or_not():
    for model, free in ((nn.Linear(4, 4), 2**40), (MODEL, 2**50)):
        measured = dataclasses.replace(make_job(free), model=model)
        assert measured.is_small(free)
        plain = dataclasses.replace(measured, footprint=None, free_nbytes=None)
        assert resolve_options(measured, FsdpOptions(), ranks=4) == resolve_options(
            plain, FsdpOptions(), ranks=4
        )
        # Where the trainer chooses what is computed again, each model is measured.
        assert not dataclasses.replace(measured, recomputation="nothing").is_small(free)


def test_what_was_asked_for_is_kept():
    options = FsdpOptions(reshard_after_forward=False, activation_checkpointing=False, offload=False)
    assert resolve_options(make_job(1), options, ranks=4) == options


def test_a_switch_is_true_false_or_auto():
    with pytest.raises(ConfigError, match=r"FsdpOptions\(offload=...\) must be True, False or 'auto', got 1"):
        FsdpOptions(offload=1)


def test_auto_is_ddp_where_it_fits_and_else_fsdp():
    backends = [c for c in registry.backends() if c.item.name in {"ddp", "fsdp"}]
    whole = 4 * WEIGHTS + 40 * BLOCK
    assert select(make_job(whole), backends, environ={}).chosen.name == "ddp"
    selection = select(make_job(whole - 1), backends, environ={})
    assert selection.chosen.name == "fsdp"
    text = str(selection)
    assert f"needs {whole / 2**30:.1f} GiB of {whole / 2**30:.1f} free on cuda:0: weights 0.1" in text
    assert "less is needed with a smaller batch" in text
