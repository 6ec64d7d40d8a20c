"""Models that are built without memory have the values that they would have had."""

import pytest
import torch
from torch import nn
from tp_core.tensors import build_deferred, initial_value, is_deferred, materialize


class Everything(nn.Module):
    """Draws and computes its values in the ways in which models do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(30, 40)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.first.bias)
        self.embedding = nn.Embedding(50, 30, padding_idx=3)
        self.head = nn.Linear(30, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.computed = nn.Parameter(torch.randn(40, 40) * 0.02 + torch.arange(40.0))
        self.transposed = nn.Parameter(self.computed.detach().clone().t())
        self.register_buffer("mask", torch.tril(torch.ones(30, 30)).view(1, 1, 30, 30))
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 40)]
        self.coins = nn.Parameter(torch.empty(40, 40).bernoulli_(0.3))
        generator = torch.Generator().manual_seed(5)
        self.seeded = nn.Parameter(torch.empty(40, 40).normal_(generator=generator))
        self.more = nn.Parameter(torch.rand(40, 40, generator=generator))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False
        )
        self.apply(self._again)

    def _again(self, module):
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)
            module.weight.data[module.padding_idx].zero_()


def tensors_of(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_as_usual(make):
    torch.manual_seed(3)
    expected, after = make(), torch.rand(3)
    torch.manual_seed(3)
    model = build_deferred(make, least_nbytes=64)
    assert torch.equal(torch.rand(3), after), "the generator must go on as it would have"
    assert any(is_deferred(p) for p in model.parameters())
    torch.manual_seed(9)  # the values do not depend on it any more
    wanted = tensors_of(expected)
    for name, tensor in tensors_of(model).items():
        found = initial_value(tensor) if is_deferred(tensor) else tensor
        assert torch.equal(found, wanted[name]), name
        assert found.stride() == wanted[name].stride(), name
    materialize(model)
    assert not any(is_deferred(t) for t in tensors_of(model).values())
    for name, tensor in tensors_of(model).items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.requires_grad == wanted[name].requires_grad
    return model


def test_each_value_is_that_of_a_model_which_was_built_as_usual():
    model = assert_as_usual(Everything)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(20, 30, 2), lambda: nn.Conv2d(3, 8, 3), lambda: nn.Linear(20, 30).bfloat16()]
)
def test_layers_of_torch(make):
    assert_as_usual(make)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    assert_as_usual(lambda: transformers.AutoModel.from_config(config))


def test_large_tensors_say_that_they_are_on_the_cpu_and_keep_what_they_carry():
    seen = []

    def make():
        model = nn.Linear(200, 100)
        model.weight.note = "mine"
        seen.extend([model.weight.device, model.weight.is_meta])
        return model

    model = build_deferred(make)
    materialize(model)
    assert seen == [torch.device("cpu"), False]
    assert model.weight.note == "mine"


def test_small_tensors_are_made_at_once():
    model = build_deferred(lambda: nn.Linear(200, 100))
    assert is_deferred(model.weight)
    assert not is_deferred(model.bias)


def test_what_needs_the_memory_is_told():
    with pytest.raises(Exception, match="meta") as caught:
        build_deferred(lambda: nn.Linear(200, int(torch.ones(200, 200).numpy().sum())))
    assert "without the memory of its parameters" in caught.value.__notes__[0]


def test_an_error_of_the_model_is_its_own():
    def fails():
        raise RuntimeError("its own words")

    with pytest.raises(RuntimeError, match="its own words") as caught:
        build_deferred(fails)
    assert not hasattr(caught.value, "__notes__")
