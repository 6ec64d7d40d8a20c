"""Which modules of a model are units of the backend ``fsdp``, and which jobs it fits."""

import dataclasses
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError, ModelError
from tp_core.fully_sharded import find_units
from tp_core.fully_sharded._options import parameter_type, reduction_type
from tp_core.plugins import Job
from tp_trainer import FsdpOptions

from tests.installed import backend_class

FsdpBackend = backend_class("fsdp")

LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Named(Model):
    """Names its blocks as models of Hugging Face do."""

    _no_split_modules = ("LayerNorm",)


def names(model, rule="auto"):
    return list(find_units(model, rule).modules)


def job(model=None, options=None, **kwargs):
    return Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment.read(LAUNCHED),
        model=model,
        options={"fsdp": options or {}},
        **kwargs,
    )


# -- auto -----------------------------------------------------------------------------------------


def test_blocks_that_repeat_are_units():
    units = find_units(Model(), "auto")
    assert list(units.modules) == ["blocks.0", "blocks.1", "blocks.2"]
    assert str(units) == "units: 3 x Block (blocks that repeat)"


def test_blocks_that_the_model_names_go_first():
    assert names(Named()) == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]


def test_blocks_in_stages_are_found():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(Block(), Block())
            self.second = nn.Sequential(nn.Sequential(Block(), Block()), nn.ReLU())

    assert names(Stages()) == ["first.0", "first.1", "second.0.0", "second.0.1"]


def test_a_large_model_without_blocks_is_cut_by_size():
    model = nn.Sequential(nn.Linear(1024, 1536), nn.Tanh(), nn.Linear(1536, 1024), nn.Linear(1024, 4))
    assert str(find_units(model, "auto")) == "units: 2 x Linear (by size)"


def test_attention_is_not_cut_into_parts_whose_weights_it_uses():
    model = nn.Sequential(nn.MultiheadAttention(1024, 4), nn.Linear(1024, 4))
    assert names(model) == ["0"]


def test_a_small_model_is_one_unit():
    assert str(find_units(nn.Linear(2, 2), "auto")).startswith("the whole model is one unit")


def test_a_weight_that_is_tied_to_the_head_leaves_the_blocks_as_they_are():
    assert names(Model(tied=True)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_that_share_a_weight_are_gathered_with_the_model():
    model = Model()
    model.blocks[2].inner.weight = model.blocks[0].inner.weight
    assert names(model) == ["blocks.1"]


def test_a_block_that_is_used_in_several_places_is_one_unit():
    model = Model()
    model.blocks[1] = model.blocks[0]
    assert names(model) == ["blocks.0", "blocks.2"]


@pytest.mark.slow
def test_blocks_of_transformers_are_found():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    assert names(transformers.GPT2LMHeadModel(config)) == ["transformer.h.0", "transformer.h.1"]


# -- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Block, "Block", [Block], ("Block",), lambda m: isinstance(m, Block)])
def test_units_are_classes_names_or_a_function(rule):
    assert names(Model(), rule) == ["blocks.0", "blocks.1", "blocks.2"]


def test_units_may_lie_in_units():
    assert names(Model(), [Block, nn.LayerNorm])[:2] == ["blocks.0", "blocks.0.norm"]


@pytest.mark.parametrize("rule", [3, [3], nn.Linear(1, 1).weight, int])
def test_other_rules_are_refused(rule):
    with pytest.raises(ConfigError, match="must be 'auto', a class of modules"):
        find_units(Model(), rule)


def test_a_rule_that_finds_nothing_names_what_there_is():
    with pytest.raises(ConfigError, match="finds no module in the model, which has Block, Embedding"):
        find_units(Model(), "Blokc")


def test_a_container_cannot_be_a_unit():
    with pytest.raises(ModelError, match="'blocks' is a ModuleList, which has no forward pass"):
        find_units(Model(), nn.ModuleList)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Embedding(4, 2, sparse=True), r"its '1' has sparse gradients"),
        (lambda: nn.EmbeddingBag(4, 2, sparse=True), "sparse=False, or take backend 'ddp'"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), r"its '1' was made by torch\.jit\.script"),
    ],
)
def test_modules_that_cannot_be_sharded_are_refused(make, words):
    with pytest.raises(ModelError, match=f"the model cannot be sharded: .*{words}"):
        find_units(nn.Sequential(nn.Linear(2, 2), make()), "auto")


def test_units_that_share_a_parameter_are_refused():
    model = Model()
    model.blocks[2].inner.weight = model.blocks[0].inner.weight
    with pytest.raises(ModelError, match=r"lies in the unit 'blocks\.0' and in the unit 'blocks\.2'"):
        find_units(model, Block)


def test_a_unit_that_shares_a_parameter_with_the_rest_is_refused():
    with pytest.raises(ModelError, match="lies in the unit 'embedding' and in no unit"):
        find_units(Model(tied=True), nn.Embedding)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replicas", "prefetch"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_are_whole_numbers(name, value):
    with pytest.raises(ConfigError, match=f"{name}=...\\) must be a whole number from 1"):
        FsdpOptions(**{name: value})


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", [torch.int64, "bf16", 16])
def test_types_are_of_floating_point(name, value):
    with pytest.raises(ConfigError, match=f"{name}=...\\) must be a type of floating point"):
        FsdpOptions(**{name: value})


@pytest.mark.parametrize(
    ("precision", "types"),
    [
        ("fp32", (None, None)),
        ("bf16-mixed", (torch.bfloat16, torch.float32)),
        ("fp16-mixed", (torch.float16, torch.float32)),
        ("bf16-true", (None, torch.float32)),
    ],
)
def test_types_follow_the_precision(precision, types):
    options, of = FsdpOptions(), job(precision=precision)
    assert (parameter_type(options, of), reduction_type(options, of)) == types


def test_types_that_are_given_are_taken():
    options, of = FsdpOptions(param_dtype=None, reduce_dtype=torch.bfloat16), job(precision="bf16-mixed")
    assert (parameter_type(options, of), reduction_type(options, of)) == (None, torch.bfloat16)


# -- assess ---------------------------------------------------------------------------------------


def test_the_verdict_says_what_the_units_are():
    verdict = FsdpBackend().assess(job(Model()))
    assert verdict.score == 40
    assert verdict.reason.startswith(
        "parameters sharded over 4 processes, units: 3 x Block (blocks that repeat)"
    )
    assert "ddp is faster" in verdict.reason


def test_copies_of_the_shards_are_told():
    verdict = FsdpBackend().assess(job(Model(), FsdpOptions(replicas=2)))
    assert "over 2 of 4 processes" in verdict.reason


def test_copies_must_fit_the_ranks():
    verdict = FsdpBackend().assess(job(Model(), FsdpOptions(replicas=3)))
    assert "4 ranks are not a multiple" in verdict.reason


def test_units_that_do_not_exist_are_the_reason_why_it_does_not_fit():
    verdict = FsdpBackend().assess(job(Model(), {"units": "Blokc"}))
    assert not verdict.is_fit
    assert "finds no module" in verdict.reason


def test_one_process_has_nothing_to_shard():
    alone = Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}))
    verdict = FsdpBackend().assess(alone)
    assert verdict.reason == "one process, and this takes one per device"
    assert verdict.remedy == "tp launch -n 2 script.py (pip install tp-launch)"


def test_one_process_with_one_accelerator_may_offload():
    alone = Job(devices=(torch.device("cuda:0"),), environment=LaunchEnvironment.read({}))
    verdict = FsdpBackend().assess(dataclasses.replace(alone, options={"fsdp": {"offload": True}}))
    assert verdict.reason == "parameters sharded over 1 process; ddp is faster where a model fits"
    on_two = dataclasses.replace(alone, devices=(torch.device("cuda:0"), torch.device("cuda:1")))
    for other in (alone, dataclasses.replace(on_two, options={"fsdp": {"offload": True}})):
        assert FsdpBackend().assess(other).reason == "one process, and this takes one per device"


def test_a_model_whose_parameters_are_marked_as_shards_is_left_to_others():
    model = Model()
    model.head.weight.tp_sharded = True
    assert "split otherwise already" in FsdpBackend().assess(job(model)).reason


def test_offload_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match="leave it out"):
        FsdpBackend().open(job(Model(), {"offload": True}))


def test_offload_where_no_memory_can_be_pinned_is_refused(monkeypatch):
    def fail(_tensor):
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    on_a_card = dataclasses.replace(job(Model(), {"offload": True}), devices=(torch.device("cuda:0"),))
    with pytest.raises(ConfigError, match=r"cannot pin any here: CUDA error: out of memory; raise the limit"):
        FsdpBackend().open(on_a_card)


@pytest.mark.slow
def test_torch_fsdp_is_imported_when_a_session_is_opened_and_not_before():
    code = (
        "import sys; from tp_core.plugins import registry; from tp_trainer import FsdpOptions; "
        "assert 'fsdp' in {c.item.name for c in registry.backends()}; "
        "assert 'torch.distributed.fsdp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)


def test_a_search_for_units_keeps_no_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    gc.collect()
    gc.disable()  # so that nothing but references decides
    try:
        find_units(model, nn.Linear)
        whole = weakref.ref(model[0].weight)
        model[0].weight = nn.Parameter(torch.zeros(1))  # as a shard takes its place
        assert whole() is None
    finally:
        gc.enable()
