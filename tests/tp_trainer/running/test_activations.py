"""Activations that are computed again in backward: the same numbers everywhere, and less that is kept."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError, ModelError
from tp_testing import run_ranks
from tp_trainer import FsdpOptions, Trainer, checkpoint_activations
from tp_trainer._memory import _job_memory  # private: memory that is short cannot be had here

from tests.installed import needs_failed_checkpoints_to_end
from tests.reference_training import squared_error
from tests.tp_trainer.callback_run import BACKENDS, data


class Block(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.outer(self.drop(torch.tanh(self.inner(x))))


def network(dropout=0.3):
    torch.manual_seed(1)
    blocks = Block(dropout), Block(dropout)
    return nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 1)).double()


def kept_elements(model):
    """Return how many elements a forward pass keeps for backward."""
    counts = []

    def pack(tensor):
        counts.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(64, 3, dtype=torch.float64)).sum()
    loss.backward()
    return sum(counts)


def trained(backend, *, policy=None, options=None, dropout=0.3):
    """Return weights after two epochs, with or without computing again."""
    model = network(dropout)
    if policy is not None:
        checkpoint_activations(model, **policy)
    if backend == "shard":
        ts = pytest.importorskip("tp_shard")
        if not ts.distributed.is_initialized():
            ts.distributed.init_process_group()
        model = ts.parallelize(model, {"*.inner": ts.Column(), "*.outer": ts.Row()})
    settings = BACKENDS.get(backend, {"backend": backend, "devices": "cpu", "options": options})
    with Trainer(**settings, seed=3, progress=False) as trainer:
        loader = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=squared_error, epochs=2)
        return {name: tensor.clone() for name, tensor in trainer.session.model_state(model).items()}


POLICIES = ({}, {"every": 2}, {"keep": "matmuls"})


def compare(backend, options=None, policies=POLICIES, dropout=0.3):
    """Return whether all policies lead to the same weights as none, bit for bit."""
    plain, *others = (
        trained(backend, policy=policy, options=options, dropout=dropout) for policy in (None, *policies)
    )
    return all(
        plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)
        for other in others
    )


@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_the_numbers_are_the_same_on_devices_of_one_process(backend):
    pytest.importorskip("tp_tuple" if backend == "tuple" else "tp_dp_gather")
    assert compare(backend, dropout=0.3 if backend == "single" else 0.0)


@needs_failed_checkpoints_to_end
@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_dropout_in_blocks_of_replicas_that_share_a_generator_is_refused(backend, policy):
    pytest.importorskip("tp_tuple" if backend == "tuple" else "tp_dp_gather")
    with pytest.raises(ModelError, match="drawn within an activation checkpoint"):
        trained(backend, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("ddp", None, marks=pytest.mark.nightly),
        pytest.param("fsdp", FsdpOptions(units=Block), marks=pytest.mark.nightly),
        ("fsdp", FsdpOptions(units=Block, activation_checkpointing=True)),
        ("shard", None),
    ],
)
def test_the_numbers_are_the_same_on_several_ranks(backend, options):
    assert all(run_ranks(compare, 2, backend, options))


def test_less_is_kept_for_backward():
    model = network()
    plain = kept_elements(model)
    checkpoint_activations(model, Block)
    checkpoint_activations(model, "Block")  # a second time changes nothing
    assert kept_elements(model) < plain / 2


def test_a_half_of_the_blocks_keeps_half():
    whole, half = network(), network()
    plain = kept_elements(network())
    checkpoint_activations(whole)
    checkpoint_activations(half, every=2)
    assert kept_elements(half) == (kept_elements(whole) + plain) / 2


def products(policy):
    """Return how many matrix products a forward and a backward pass of the blocks take."""
    model = network()[1:3]
    if policy is not None:
        checkpoint_activations(model, Block, **policy)
    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            found.append("mm" in str(operator))
            return operator(*args, **(kwargs or {}))

    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    with Count():
        model(x).sum().backward()
    return sum(found)


def test_matrix_products_are_kept_where_that_is_asked_for():
    assert products({"keep": "matmuls"}) == products(None) < products({})


# -- what "auto" chooses ----------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(4):  # four of the six tensors for backward are products, or inputs of one
            x = self.inner(x)
        return torch.sin(torch.sin(x))


def deep():
    torch.manual_seed(1)
    return nn.Sequential(*(Wide() for _ in range(8)), nn.Linear(8, 1))


SAMPLES = torch.utils.data.TensorDataset(torch.ones(2048, 8), torch.ones(2048, 1))


def choice(memory, **settings):
    """Return what a trainer computes again by its estimate for a free memory, and how much that needs."""
    trainer = Trainer(backend="single", devices="cpu", activation_checkpointing="auto", **settings)
    model = deep()
    table = trainer.estimate(
        model, torch.optim.SGD(model.parameters()), SAMPLES[:], squared_error, devices=1, memory=memory
    )
    return table.recomputation, table.verdicts["single"].memory.total


@pytest.mark.slow
def test_auto_computes_again_what_the_memory_needs_and_no_more():
    found, need = choice(2**40)
    assert found == "nothing"
    ladder = ["nothing"]
    while found != "every block" or len(ladder) == 1:
        found, less = choice(need - 1)
        assert less < need
        ladder.append(found)
        need = less
    assert ladder == ["nothing", "all but matmuls", "every 2nd block", "every block"]
    assert choice(1) == ("every block", need)  # it warns of that at the start


def fitted(backend, free):
    """Return what was computed again where some memory is free, and the whole weights."""
    model = deep()
    settings = {"backend": backend, "devices": "cpu", "seed": 0, "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_job_memory, "free_nbytes", lambda *_, **__: free + _job_memory.RESERVED["cpu"])
        with Trainer(**settings, activation_checkpointing="auto") as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(model, optimizer, DataLoader(SAMPLES, 2048), step=squared_error, epochs=2)
            weights = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
            return trainer.session.job.recomputation, weights


def choices(backend, *frees):
    """Return what was computed again for each free memory, and whether the weights are equal."""
    found = [fitted(backend, free) for free in frees]
    first = found[0][1]
    return [what for what, _ in found], all(w[n].equal(first[n]) for _, w in found for n in first)


@pytest.mark.slow
def test_fit_applies_the_choice_and_trains_the_same():
    held = sum(p.numel() * p.element_size() for p in deep().parameters())
    assert choices("single", 2**40, choice(1)[1] - held) == (["nothing", "every block"], True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"])
def test_ranks_make_one_choice_and_train_the_same(backend):
    for found in run_ranks(choices, 2, backend, 2**40, 1_200_000, 1):
        assert found == (["nothing", "every 2nd block", "every block"], True)


def test_auto_says_where_it_has_nothing_to_go_by(caplog):
    model = deep()
    with Trainer(backend="single", devices="cpu", progress=False, activation_checkpointing="auto") as trainer:
        trainer.prepare(model)
    assert "activation_checkpointing='auto' has nothing to go by" in caplog.text
    assert "no batch and step are known" in caplog.text


def test_another_value_is_refused():
    with pytest.raises(ConfigError, match="activation_checkpointing must be None or 'auto', got True"):
        Trainer(activation_checkpointing=True)


def test_a_module_stays_what_it_is():
    model = network()
    names = list(model.state_dict())
    checkpoint_activations(model, Block)
    assert list(model.state_dict()) == names
    assert isinstance(model[1], Block)
    assert repr(model) == repr(network())
    copied = copy.deepcopy(model).eval()
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(copied(x), network().eval()(x))
    with torch.no_grad():
        assert torch.equal(copied(x), network().eval()(x))


@pytest.mark.parametrize(
    ("kinds", "error", "words"),
    [
        ([nn.LSTM], ModelError, "no module of the class 'LSTM'; it has: Block, Dropout, Linear, Sequential"),
        (["Blok"], ModelError, "did you mean 'Block'"),
        ([network()], ConfigError, "needs classes of modules"),
    ],
)
def test_a_class_that_the_model_has_not_is_refused(kinds, error, words):
    with pytest.raises(error, match=words):
        checkpoint_activations(network(), *kinds)


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ModelError, match=r"has no blocks that repeat.*it has Linear"):
        checkpoint_activations(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="every must be a whole number from 1, got 0"):
        checkpoint_activations(network(), every=0)
    with pytest.raises(ConfigError, match="keep must be 'inputs' or 'matmuls', got 'all'"):
        checkpoint_activations(network(), keep="all")


# -- Caches of transformers, which a second forward pass would append to ---------------------------


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    }[name]
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    head = "ForConditionalGeneration" if name == "T5" else "ForCausalLM" if name == "Llama" else "LMHeadModel"
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=19, **sizes, **ends)
    return getattr(transformers, f"{name}{head}")(config).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keep"), [("Llama", "matmuls"), ("Llama", "inputs"), ("GPT2", "matmuls"), ("T5", "inputs")]
)
def test_models_that_would_cache_are_trained_the_same(name, keep):
    def gradients(**policy):
        model = of_transformers(name)
        if policy:
            checkpoint_activations(model, **policy)
        torch.manual_seed(1)
        ids = torch.arange(14).view(2, 7) % 19
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    torch.testing.assert_close(gradients(keep=keep), gradients())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # by later ones than we require
def test_a_cache_with_keys_is_refused():
    model = of_transformers("Llama")
    ids = torch.arange(14).view(2, 7) % 19
    with torch.no_grad():
        cache = model(input_ids=ids[:, :3], use_cache=True).past_key_values
    checkpoint_activations(model)
    with pytest.raises(ModelError, match="LlamaDecoderLayer gets a cache with keys and values"):
        model(input_ids=ids[:, 3:], past_key_values=cache)
