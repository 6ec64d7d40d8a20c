"""Operations compute what they compute on the CPU, promptly and as late as they may."""

import contextlib
import io
import warnings

import pytest
import torch
import tp_simulator
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.simulated


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x):
        return self.last(F.max_pool2d(F.gelu(self.norm(self.first(x))), 2)).flatten(1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.block(self.table(x.abs().long() % 10)))


MODELS = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)),
        (5, 6),
    ),
    "convolutions": (Convolutions, (2, 3, 8, 8)),
    "words": (Words, (3, 7)),
}


def _trained(name, device):
    """Train a model for three steps, and return its losses, its gradients and its weights, on the CPU."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, batches = make().to(device), 5 * torch.randn(3, *shape)
    parameters = [*model.parameters()]
    losses = []
    for batch in batches:
        model.zero_grad()
        loss = model(batch.pin_memory().to(device, non_blocking=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        with torch.no_grad():
            torch._foreach_sub_(parameters, [parameter.grad for parameter in parameters], alpha=0.1)
        losses.append(loss.detach())
    grads = [parameter.grad for parameter in parameters]
    return [tensor.cpu() for tensor in (*losses, *grads, *model.state_dict().values())]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_to_the_numbers_of_the_cpu(name):
    expected = _trained(name, "cpu")
    for seed in (None, 0, 1):
        with tp_simulator.watch() if seed is None else tp_simulator.hostile(seed) as report:
            got = _trained(name, "sim:0")
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert report.races == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Muon"])
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"]
)
def test_an_optimizer_steps_as_on_the_cpu(name, options):
    def weights(device):
        torch.manual_seed(0)
        layer = nn.Linear(6, 4, bias=False).to(device)
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01, **options)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 6, device=device)).square().sum().backward()
            optimizer.step()
        return layer.weight.detach().cpu()

    try:
        expected = weights("cpu")
    except (RuntimeError, TypeError):  # an optimizer has not each of these forms
        return
    with tp_simulator.hostile():
        torch.testing.assert_close(weights("sim:0"), expected)


X = torch.linspace(-2, 2, 12).reshape(3, 4)
OPERATIONS = {
    "a view of columns": lambda x: x[:, 1:3] * 2,
    "a transposed product": lambda x: x.T @ x,
    "a mask": lambda x: x[x > 0],
    "an index": lambda x: x[[2, 0]],
    "an index of the host": lambda x: x[torch.tensor([1, 1])],
    "a masked write": lambda x: x.clone().masked_fill_(x < 0, 9),
    "an indexed write": lambda x: x.clone().index_put_((torch.tensor([0], device=x.device),), x[1]),
    "a write by a mask": lambda x: torch.where(x > 1, x, 0).add_(x),
    "sorting": lambda x: torch.sort(x, dim=1, descending=True),
    "the largest": lambda x: torch.topk(x, 2),
    "places": torch.nonzero,
    "counts": lambda x: torch.bincount((x.flatten() + 2).long()),
    "a scalar": lambda x: x * torch.tensor(3.0) + 1,
    "promotion": lambda x: (x.long() + torch.tensor(1.5, dtype=torch.float64)).to(torch.float64),
    "out=": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "out= of a mask": lambda x: torch.masked_select(x, x > 0, out=torch.empty(0, device=x.device)),
    "concatenation": lambda x: torch.cat([x, x[:1]]),
    "pieces": torch.unbind_copy,
    "windows": lambda x: x.unfold(1, 2, 1).sum(-1),
    "complex numbers": lambda x: torch.view_as_real(torch.fft.fft(x.to(torch.complex64)).conj() * 2),
    "imaginary parts": lambda x: torch.view_as_complex(x.reshape(3, 2, 2)).imag,
    "softmax": lambda x: torch.softmax(x, -1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "attention, fused": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True),
    "attention of columns": lambda x: F.scaled_dot_product_attention(*[x.T[None, None]] * 3),
    "attention, fused, with a mask": lambda x: F.scaled_dot_product_attention(
        *[x[None, None]] * 3, torch.ones(3, 3, dtype=torch.bool, device=x.device).tril(), scale=0.3
    ),
    "attention, fused, with shared keys": lambda x: F.scaled_dot_product_attention(
        x.expand(1, 4, 3, 4), *[x.expand(1, 2, 3, 4)] * 2, x[:, :3], enable_gqa=True
    ),
    "a loss of classes": lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1], device=x.device)),
    "bags": lambda x: F.embedding_bag(
        torch.tensor([0, 2, 1], device=x.device), x, torch.tensor([0, 2], device=x.device)
    ),
    "a solution": lambda x: torch.linalg.solve(torch.eye(3, device=x.device) * 2, x),
    "a range": lambda x: torch.arange(5, device=x.device) + torch.zeros(5, device=x.device),
    "half precision": lambda x: (x.bfloat16() @ x.bfloat16().T).float(),
    "a smooth loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "a mean of squares": lambda x: F.mse_loss(x, x.flip(0)),
    "a norm of batches, for evaluation": lambda x: F.batch_norm(x, x[0], x[1].abs()),
    "a norm over groups": lambda x: F.group_norm(x[None].transpose(1, 2), 2),
    "many tensors": lambda x: torch._foreach_add([x, x * 2], 1),
    "a comparison": lambda x: torch.tensor(torch.equal(x, x + 0)),
    "a power in place": lambda x: x.abs().pow_(2),
    "a copy of strides": lambda x: x.T.clone().contiguous(),
    "an expansion": lambda x: x[:, :1].expand(3, 5) + 1,
    "nothing": lambda x: x[:0] + 1,
}


def _flat(value):
    return (
        [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in _flat(part)]
    )


@pytest.mark.parametrize("mode", ["prompt", "hostile"])
def test_an_operation_has_the_result_of_the_cpu(mode):
    wrong = {}
    with tp_simulator.hostile() if mode == "hostile" else contextlib.nullcontext():
        for name, operation in OPERATIONS.items():
            try:
                got = [tensor.cpu() for tensor in _flat(operation(X.to("sim:0")))]
                torch.testing.assert_close(got, _flat(operation(X)))
            except (AssertionError, RuntimeError) as error:
                wrong[name] = str(error)
    assert wrong == {}, wrong


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "options", [{"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=["two", "bare"]
)
def test_a_recurrent_layer_has_the_numbers_of_the_cpu(kind, options):
    def numbers(device):
        torch.manual_seed(0)
        layer, x = kind(3, 5, **options).to(device), torch.randn(4, 2, 3).to(device).requires_grad_()
        outputs = _flat(layer(x))
        sum(output.square().sum() for output in outputs).backward()
        return [tensor.detach().cpu() for tensor in (*outputs, x.grad, *(p.grad for p in layer.parameters()))]

    expected = numbers("cpu")
    with tp_simulator.hostile() as report:
        torch.testing.assert_close(numbers("sim:0"), expected)
    assert report.races == ()


def _attention_gradients(device, tokens=7):
    parts = (
        torch.linspace(-1, 1, 3 * 2 * tokens * 4).sin().view(3, 1, 2, tokens, 4).to(device).requires_grad_()
    )
    F.scaled_dot_product_attention(*parts, is_causal=True).square().sum().backward()
    return parts.grad.cpu()


def test_fused_attention_has_the_gradients_of_the_cpu_and_keeps_no_scores():
    with tp_simulator.hostile() as report:
        torch.testing.assert_close(_attention_gradients("sim:0"), _attention_gradients("cpu"))
    assert report.races == ()
    torch.sim.synchronize()
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    _attention_gradients("sim:0", tokens=2048)
    assert torch.sim.max_memory_allocated() - before < 2 * 2048 * 2048 * 4 / 8  # an eighth of the scores


def test_attention_is_by_what_sdpa_kernel_allows():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = torch.ones(1, 1, 3, 4, device="sim:0")
    with sdpa_kernel(SDPBackend.MATH), tp_simulator.watch() as report:
        F.scaled_dot_product_attention(x, x, x)
        assert report.kernels > 1
    with sdpa_kernel(SDPBackend.OVERRIDEABLE), tp_simulator.watch() as report:
        F.scaled_dot_product_attention(x, x, x)
        assert report.kernels == 1
        with pytest.raises(RuntimeError, match="the backends that are enabled cannot do this attention"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    with pytest.raises(NotImplementedError, match="no dropout in fused attention"):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable(x, x, x, None, 0.5)


def test_attention_in_float64_is_not_fused_as_on_cards():
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 2, 3, 4)
    found, expected = x.to("sim:0").requires_grad_(), x.clone().requires_grad_()
    with tp_simulator.watch() as report:
        F.scaled_dot_product_attention(found, found, found).sum().backward()
    F.scaled_dot_product_attention(expected, expected, expected).sum().backward()
    torch.testing.assert_close(found.grad.cpu(), expected.grad)
    assert report.kernels > 4
    with pytest.raises(NotImplementedError, match="no fused attention in Double"):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable(found, found, found)


def test_dropout_scales_what_it_keeps():
    x = torch.ones(1000, device="sim:0", requires_grad=True)
    with tp_simulator.hostile():
        y = F.dropout(x, 0.25)
        y.sum().backward()
        kept = y.cpu() != 0
    assert 650 < kept.sum() < 850
    torch.testing.assert_close(y.cpu(), kept / 0.75)
    torch.testing.assert_close(x.grad.cpu(), kept / 0.75)
    assert F.dropout(x, 1.0).cpu().abs().sum() == 0


def test_autocast_chooses_types_as_on_cuda():
    x, layer = torch.ones(2, 3, device="sim:0"), nn.Linear(3, 2, device="sim:0")
    with torch.autocast("sim", dtype=torch.bfloat16):
        out = layer(x)
        assert out.dtype == torch.bfloat16
        assert out.softmax(-1).dtype == torch.float32
        assert out.sum().dtype == torch.float32
        assert (out + torch.ones(2, 2, device="sim:0")).dtype == torch.float32


def test_tensors_move_by_the_name_of_the_device():
    assert torch.ones(2).sim().device == torch.device("sim:0")
    assert torch.ones(2).sim(1).is_sim
    assert nn.Linear(2, 2).sim().weight.device == torch.device("sim:0")
    assert str(torch.ones(2, device="sim:1")) == "tensor([1., 1.], device='sim:1')"


def test_state_is_saved_and_loaded():
    file = io.BytesIO()
    torch.save({"x": torch.ones(3, device="sim:1")}, file)
    file.seek(0)
    assert torch.load(file)["x"].device == torch.device("sim:1")
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == [1, 1, 1]


def test_operands_on_several_devices_are_refused_in_torchs_words():
    sim, other, host = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1"), torch.ones(2)
    for tensor, name in ((other, "sim:1"), (host, "cpu")):
        with pytest.raises(
            RuntimeError, match=f"same device, but found at least two devices, sim:0 and {name}!"
        ):
            sim + tensor


def test_what_there_is_no_kernel_for_is_refused():
    with pytest.raises(NotImplementedError, match=r"sim: no tensors of layout Sparse"):
        torch.ones(2, device="sim:0").to_sparse()


def test_a_host_value_is_read_at_the_launch():
    factor = torch.tensor(2.0)
    with tp_simulator.hostile():
        y = torch.ones(2, device="sim:0") * factor
        factor.fill_(5)
        assert y.tolist() == [2, 2]


def test_a_wrong_shape_is_refused_at_the_launch():
    with tp_simulator.hostile(), pytest.raises(RuntimeError, match="size of tensor a"):
        torch.ones(2, device="sim:0") + torch.ones(3, device="sim:0")


def test_means_of_losses_are_made_without_a_warning_of_torchs():
    x = torch.arange(12.0, device="sim:0").reshape(3, 4).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (F.mse_loss, F.smooth_l1_loss):
            loss(x, x.detach().flip(0)).backward()
            assert loss(x, x.detach().flip(0), reduction="none").shape == x.shape


def test_a_call_like_an_earlier_one_has_results_of_its_own_form():
    x = torch.arange(6.0, device="sim:0").reshape(2, 3)
    for _ in range(2):  # what meta kernels say is kept, by all that it depends on
        assert (x.sum(0).shape, x.sum(1).shape, x.sum(1, keepdim=True).shape) == ((3,), (2,), (2, 1))
        assert (torch.cat([x, x]).shape, torch.cat([x, x, x]).shape) == ((4, 3), (6, 3))
        assert ((x + 1).stride(), (x.t() + 1).stride()) == ((3, 1), (1, 3))
        assert (x.int() + 1.5).dtype is torch.float32
        wide = torch.tensor(1.0, dtype=torch.float64)
        assert ((x.int() + wide).dtype, (x + wide).dtype) == (torch.float64, torch.float32)
        torch.set_default_dtype(torch.float64)
        try:
            assert (x.int() / 2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert (x.int() / 2).dtype is torch.float32
        target = torch.empty(0, device="sim:0")
        torch.add(x, x, out=target)
        torch.testing.assert_close(target.cpu(), 2 * x.cpu())
