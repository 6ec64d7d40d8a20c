"""Compiling models, or their blocks: each class once, for all lengths, with the same numbers everywhere."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError, ModelError
from tp_core.jobs import CompileOptions
from tp_trainer import FsdpOptions, Trainer, checkpoint_activations

from tests.models import Block
from tests.tp_trainer.callback_run import BACKENDS, Spy

# torch hides this one of its own, but not where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
# aot_eager finds and counts graphs as the default compiler does; that one would take many seconds.
BLOCKS = CompileOptions(blocks=True, backend="aot_eager")
WHOLE = CompileOptions(backend="aot_eager")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8, 16, norm=True) for _ in range(4))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Texts(torch.utils.data.Dataset):
    """Samples of one length for each batch of four: three lengths."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        length = 5 + 2 * (index // 4 % 3)
        return torch.randint(11, (length,), generator=torch.Generator().manual_seed(index))


def step(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Torchs(nn.Module):
    """Torch's own layers, of which its compiler finds nothing by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)))


def whole():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))


def trained(backend, *, compiled, make=Network, policy=None, options=None, accumulate=1):
    """Return the weights after two epochs, and what was logged."""
    torch.compiler.reset()
    model, spy = make(), Spy()
    if backend == "shard":
        ts = pytest.importorskip("tp_shard")
        if not ts.distributed.is_initialized():
            ts.distributed.init_process_group()
        names = {whole: ("1", "3"), Torchs: ("blocks.layers.*.linear1", "blocks.layers.*.linear2")}.get(
            make, ("blocks.*.up", "blocks.*.down")
        )
        model = ts.parallelize(model, {names[0]: ts.Column(), names[1]: ts.Row()})
    if policy is not None:
        checkpoint_activations(model, **policy)
    settings = BACKENDS.get(backend, {"backend": backend, "devices": "cpu"})
    with Trainer(
        **settings,
        options=options,
        seed=3,
        progress=False,
        accumulate=accumulate,
        compile=compiled,
    ) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, DataLoader(Texts(), batch_size=4), step=step, epochs=2, callbacks=[spy])
        weights = trainer.session.model_state(model)
        return {name: tensor.clone() for name, tensor in weights.items()}, spy.logged


def compare(backend, compiled=BLOCKS, **settings):
    """Return the differences of weights with and without compiling, and the logged graphs."""
    plain, _ = trained(backend, compiled=False, **settings)
    found, logged = trained(backend, compiled=compiled, **settings)
    assert plain.keys() == found.keys()  # no name has changed
    graphs = [(at, row["compiled_graphs"]) for at, row in logged if "compiled_graphs" in row]
    assert any("first_step_s" in row for _, row in logged)
    return max((plain[name] - found[name]).abs().max().item() for name in plain), graphs


def check(found, accumulate=1, *, watched=False):
    difference, logged = found
    assert difference < 1e-6
    first, epoch, end = (n for _, n in logged)
    assert epoch == end  # nothing is compiled again
    if not watched:
        # A graph of the first batch's length, and one of all lengths, which the second batch makes.
        assert (first, end) == (accumulate, 2)


@pytest.mark.slow
def test_a_class_of_blocks_is_compiled_once_for_all_lengths():
    check(compare("single"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{}, {"keep": "matmuls"}])
def test_blocks_are_compiled_with_checkpointed_activations(policy):
    check(compare("single", policy=policy, accumulate=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", None),
        pytest.param("shard", None, marks=pytest.mark.nightly),
        ("fsdp", FsdpOptions(units=Block)),
    ],
)
def test_blocks_are_compiled_on_ranks(two_ranks, backend, options, accumulate):
    for found in two_ranks.run(functools.partial(compare, backend, options=options, accumulate=accumulate)):
        # Split layers look for random numbers in their first passes, between which graphs break.
        check(found, accumulate, watched=backend == "shard")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["ddp", "shard", "fsdp"])
def test_blocks_are_compiled_with_checkpointed_activations_on_ranks(two_ranks, backend):
    options = FsdpOptions(units=Block) if backend == "fsdp" else None
    for found in two_ranks.run(functools.partial(compare, backend, options=options, policy={})):
        check(found)
    if backend == "fsdp":
        options = FsdpOptions(units=Block, activation_checkpointing=True)
        for found in two_ranks.run(functools.partial(compare, backend, options=options)):
            check(found)


@pytest.mark.slow
def test_a_model_of_torchs_own_class_is_compiled():
    check(compare("single", WHOLE, make=whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "shard",
        pytest.param("ddp", marks=pytest.mark.nightly),
        pytest.param("fsdp", marks=pytest.mark.nightly),
    ],
)
def test_a_model_of_torchs_own_class_is_compiled_on_ranks(two_ranks, backend):
    for found in two_ranks.run(functools.partial(compare, backend, WHOLE, make=whole)):
        check(found)


def check_torchs(found):
    difference, ((_, first), (_, epoch), (_, end)) = found
    assert difference < 1e-6
    assert 0 < first <= epoch == end


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "compiled"), [("single", BLOCKS), ("tuple", WHOLE)])
def test_torchs_own_blocks_are_compiled(backend, compiled):
    check_torchs(compare(backend, compiled, make=Torchs))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "compiled"),
    [("fsdp", WHOLE), ("ddp", BLOCKS), ("shard", BLOCKS), ("fsdp", BLOCKS)],  # the first one unit by unit
)
def test_torchs_own_blocks_are_compiled_on_ranks(two_ranks, backend, compiled):
    for found in two_ranks.run(functools.partial(compare, backend, compiled, make=Torchs)):
        check_torchs(found)


def test_what_cannot_be_compiled_by_blocks_is_refused():
    for backend, model, error, words in [
        ("single", nn.Linear(2, 2), ModelError, "no blocks that repeat"),
        ("tuple", Network(), ConfigError, "compiles each as a whole; take compile=True"),
        ("dp-gather", Network(), ConfigError, "compiles each as a whole; take compile=True"),
    ]:
        trainer = Trainer(**BACKENDS[backend], compile="blocks", progress=False)
        with trainer, pytest.raises(error, match=words):
            trainer.prepare(model)
    with pytest.raises(ConfigError, match="compile must be True, False, 'blocks' or CompileOptions"):
        Trainer(compile="block")


def test_options_reach_the_compiler():
    assert CompileOptions(mode="reduce-overhead", dynamic=True).arguments() == {
        "mode": "reduce-overhead",
        "dynamic": True,
    }
