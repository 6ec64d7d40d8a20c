"""Checkpoints of the trained weights alone, over a frozen base that is known by digests."""

import logging
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, ModelError, StateError
from tp_core.tensors import TensorSlice
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer, convert, find_checkpoint
from tp_trainer._checkpoint import _base  # a digest that depends on the split is seen on many splits alone
from tp_trainer.callbacks import ExponentialMovingAverage


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, and a buffer that training changes."""

    def __init__(self, width=16, rank=1, base_seed=0, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        torch.manual_seed(1)
        self.down = nn.Linear(width, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, width, bias=False, dtype=dtype)

    def forward(self, x):
        self.seen += 1
        return self.base(x) + self.up(self.down(x))


def step(model, batch):
    return (model(batch[0]) - batch[0].sin()).square().mean()


def fit(
    folder, model=None, *, epochs=1, weights="trainable", step=step, backend="single", resume="auto", **more
):
    model = Adapted() if model is None else model
    width = model.base.in_features
    x = torch.randn(12, width, generator=torch.Generator().manual_seed(2)).to(model.base.weight.dtype)
    settings = None if folder is None else Checkpoints(folder, weights=weights)
    with Trainer(seed=0, progress=False, devices="cpu", backend=backend) as trainer:
        trainer.fit(
            model,
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05),
            DataLoader(TensorDataset(x), batch_size=4, shuffle=True),
            step=step,
            epochs=epochs,
            checkpoint=settings,
            resume=None if folder is None else resume,
            **more,
        )
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def names_in(folder):
    stored = torch.load(find_checkpoint(folder) / "tensors.pt", weights_only=True)
    return {name.removeprefix("model.") for name in stored if name.startswith("model.")}


def test_a_resumed_run_is_the_uninterrupted_one_and_the_base_is_in_no_checkpoint(tmp_path):
    fit(tmp_path)
    assert names_in(tmp_path) == {"seen", "down.weight", "up.weight"}
    assert same(fit(tmp_path, epochs=3), fit(None, epochs=3))


def test_a_checkpoint_is_at_most_a_fifth_larger_than_adapter_and_optimizer(tmp_path):
    model = Adapted(width=1024, rank=8, dtype=torch.float32)
    fit(tmp_path, model, callbacks=[ExponentialMovingAverage()])
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    adapter_optimizer_and_average = trained * 4
    nbytes = sum(file.stat().st_size for file in find_checkpoint(tmp_path).rglob("*") if file.is_file())
    assert nbytes <= 1.2 * adapter_optimizer_and_average
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert nbytes < whole


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"base_seed": 5}, r"'base.weight' \(its values are other ones\)"),
        (
            {"dtype": torch.float32},
            r"'base.weight' \(it was float64 \(16, 16\), and is float32 \(16, 16\) now\)",
        ),
    ],
)
def test_another_base_is_refused_by_the_name_of_the_first_weight(tmp_path, other, words):
    fit(tmp_path)
    calls = []
    with pytest.raises(StateError, match=rf"trained on another base.*{words}"):
        fit(tmp_path, Adapted(**other), epochs=2, step=lambda *batch: calls.append(batch))
    with pytest.raises(StateError, match=rf"trained on another base.*{words}"):
        Trainer(devices="cpu", progress=False).load_model(Adapted(**other), find_checkpoint(tmp_path))
    assert not calls


def test_a_single_bit_of_the_base_is_noticed(tmp_path):
    fit(tmp_path)
    model = Adapted()
    with torch.no_grad():
        model.base.bias[7] = torch.nextafter(model.base.bias[7], torch.tensor(9.0, dtype=torch.float64))
    with pytest.raises(StateError, match=r"differs is 'base.bias'"):
        fit(tmp_path, model, epochs=2)


def test_where_nothing_is_frozen_the_option_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"leaves out frozen weights, and the model has none"):
        fit(tmp_path, Adapted().requires_grad_(True))
    with pytest.raises(ConfigError, match=r"weights=\.\.\.\) must be 'all' or 'trainable', got 'adapter'"):
        Checkpoints(tmp_path, weights="adapter")


def test_where_the_base_came_from_is_kept_and_named(tmp_path):
    def named(**other):
        model = Adapted(**other)
        model.config = type("Config", (), {"name_or_path": "example/base-7b"})()
        return model

    fit(tmp_path, named())
    with pytest.raises(StateError, match=r"that the run had, of 'example/base-7b'"):
        fit(tmp_path, named(base_seed=3), epochs=2)


def test_the_trained_part_is_loaded_over_its_base_and_is_no_whole_model(tmp_path):
    trained = fit(tmp_path)
    model = Adapted()
    Trainer(devices="cpu", progress=False).load_model(model, find_checkpoint(tmp_path))
    assert same(model.state_dict(), trained)
    with pytest.raises(
        StateError, match=r"the trained weights of a model alone.*without 2 frozen ones.*load_model"
    ):
        convert(tmp_path, tmp_path / "model.safetensors")


def test_checkpoints_with_and_without_the_base_continue_each_other(tmp_path):
    expected = fit(None, epochs=3)
    fit(tmp_path / "one", weights="all")
    fit(tmp_path / "one", epochs=2)
    assert same(fit(tmp_path / "one", weights="all", epochs=3), expected)
    assert "base.weight" in names_in(tmp_path / "one")


@pytest.mark.parametrize("through_data", [False, True])
def test_a_frozen_weight_that_the_step_writes_is_saved(tmp_path, through_data):
    """As the one of a momentum encoder."""

    def moving(model, batch):
        bias = model.base.bias.data if through_data else model.base.bias.detach()
        bias.mul_(0.9)
        return step(model, batch)

    fit(tmp_path, step=moving)
    assert "base.bias" in names_in(tmp_path)
    assert "base.weight" not in names_in(tmp_path)
    fit(tmp_path, step=step, epochs=2)  # it stays in the checkpoints of the run
    assert "base.bias" in names_in(tmp_path)
    assert same(fit(tmp_path, step=moving, epochs=3), fit(tmp_path, step=moving, epochs=3))


def test_a_frozen_weight_that_moves_through_data_after_the_first_checkpoint_is_saved(tmp_path):
    calls = []

    def moving(model, batch):
        calls.append(batch)
        if len(calls) > 3:  # an epoch has three batches
            model.base.bias.data.mul_(0.9)
        return step(model, batch)

    fit(tmp_path, step=moving, epochs=2)
    assert "base.bias" in names_in(tmp_path)
    assert "base.weight" not in names_in(tmp_path)


def test_a_weight_that_trains_from_a_later_run_on_is_saved_from_then_on(tmp_path):
    def free():
        model = Adapted()
        model.base.bias.requires_grad_(True)
        return model

    fit(tmp_path)
    with pytest.raises(StateError, match=r"without the parameter 'base.bias', which this one has"):
        fit(tmp_path, free(), epochs=2)
    model = free()
    Trainer(devices="cpu", progress=False).load_model(model, find_checkpoint(tmp_path))
    fit(tmp_path / "next", model)
    assert "base.bias" in names_in(tmp_path / "next")


def test_the_log_says_what_checkpoints_do_with_frozen_weights(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tp_trainer")
    fit(tmp_path / "all", weights="all")
    assert (
        "holds the frozen weights too (89% of the model, 2 frozen weights): weights='trainable'"
        in caplog.text
    )
    fit(tmp_path / "trainable")
    assert "checkpoints leave out 89% of the model, 2 frozen weights, and keep their digests" in caplog.text


def test_averages_are_of_the_trained_weights(tmp_path):
    average = ExponentialMovingAverage(0.5)
    fit(tmp_path, callbacks=[average])
    assert set(average.averages) == {"down.weight", "up.weight"}


# -- Digests ---------------------------------------------------------------------------------------


class Split:
    """A session of one rank that cuts a tensor at random places."""

    def __init__(self, generator):
        self._generator = generator

    def gather_objects(self, value, *, where):
        return [value]

    def as_slice(self, _, value):
        parts = [((0,) * value.dim(), value)]
        for dim, length in enumerate(value.shape):
            at = self._generator.randrange(length + 1)
            for start, part in parts.copy():
                parts.remove((start, part))
                moved = (*start[:dim], start[dim] + at, *start[dim + 1 :])
                parts += [(start, part.narrow(dim, 0, at)), (moved, part.narrow(dim, at, length - at))]
        return TensorSlice(tuple(value.shape), parts)


class Whole(Split):
    def as_slice(self, _, value):
        return value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_a_digest_is_the_same_however_a_tensor_is_split(dtype):
    generator = random.Random(0)
    torch.manual_seed(0)
    for shape in ((), (1,), (700, 900), (3, 5, 7), (4, 3, 2, 2), (0, 3)):
        tensor = (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)
        whole = _base.digests(Whole(generator), {"x": tensor})
        assert _base.digests(Split(generator), {"x": tensor}) == whole
        assert _base.digests(Whole(generator), {"x": tensor.clone()}) == whole


def test_a_digest_differs_for_values_that_are_moved():
    torch.manual_seed(0)
    tensor = torch.randn(40, 30)
    versions = [
        tensor,
        tensor.flip(0),
        tensor.flip(1),
        tensor[torch.randperm(40)],
        tensor.t().reshape(40, 30),
    ]
    versions += [tensor + 0, -tensor, tensor.double().to(torch.float32) * 2]
    found = {_base.digests(Whole(None), {"x": version})["x"] for version in versions}
    assert len(found) == len(versions) - 1


# -- On ranks --------------------------------------------------------------------------------------


def on_two_ranks(folder, backend):
    model = Adapted()
    resumed = fit(folder, model, epochs=2, backend=backend)
    with pytest.raises(StateError, match=r"differs is 'base.weight'"):
        fit(folder, Adapted(base_seed=1), epochs=3, backend=backend)
    with pytest.raises(ConfigError, match=r"the model has none"):
        fit(folder, Adapted().requires_grad_(True), epochs=3, backend=backend)
    return resumed


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_one_device_and_two_ranks_continue_each_other(tmp_path, backend):
    fit(tmp_path)
    one, other = run_ranks(on_two_ranks, 2, tmp_path, backend)
    assert same(one, other)
    expected = fit(None, epochs=3)
    resumed = fit(tmp_path, epochs=3)
    for name in ("down.weight", "up.weight", "base.weight"):
        torch.testing.assert_close(resumed[name], expected[name], rtol=1e-9, atol=1e-12)


# -- Quantized weights -----------------------------------------------------------------------------


class Int8(Tensor):
    """A weight of int8 with a scale for each row, as libraries that quantize have it."""

    @staticmethod
    def __new__(cls, values, scales, dtype):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)

    def __init__(self, values, scales, dtype):
        self.values, self.scales = values, scales

    def __tensor_flatten__(self):
        return ["values", "scales"], (self.dtype,)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, *_):
        return cls(inner["values"], inner["scales"], *context)

    def dequantize(self):
        return self.values.to(self.dtype) * self.scales

    @classmethod
    def of(cls, weight):
        scales = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales, weight.dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is functional.linear:
            x, weight, *rest = args
            return functional.linear(x, weight.dequantize(), *rest)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.name() in {"aten::detach", "aten::clone", "aten::_to_copy"}:
            self = args[0]
            return cls(self.values.clone(), self.scales.clone(), self.dtype)
        msg = f"{function} of a quantized weight"
        raise NotImplementedError(msg)


def quantized(**other):
    model = Adapted(**other)
    model.base.weight = nn.Parameter(Int8.of(model.base.weight.detach()), requires_grad=False)
    return model


def test_adapters_over_a_quantized_base_resume_and_the_base_is_known(tmp_path):
    expected = fit(None, quantized(), epochs=3)
    fit(tmp_path, quantized())
    resumed = fit(tmp_path, quantized(), epochs=3)
    assert torch.equal(resumed["up.weight"], expected["up.weight"])
    assert names_in(tmp_path) == {"seen", "down.weight", "up.weight"}
    with pytest.raises(StateError, match=r"differs is 'base.weight'"):
        fit(tmp_path, quantized(base_seed=1), epochs=4)
    with pytest.raises(StateError, match=r"'base.weight' \(it was Int8 of int8, float64"):
        fit(tmp_path, epochs=4)


def test_files_of_whole_weights_refuse_a_quantized_one(tmp_path):
    with pytest.raises(StateError, match=r"'base.weight' is quantized \(Int8\).*weights='trainable'"):
        fit(tmp_path / "run", quantized(), weights="all")
    with pytest.raises(StateError, match=r"no Int8, which 'base.weight' is: it is quantized"):
        Trainer(devices="cpu", progress=False).export(quantized(), tmp_path / "model.safetensors")


def quantized_on_two_ranks(folder):
    # Another base on the second rank: all get the first one's.
    model = quantized(base_seed=torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    trained = fit(folder, model, epochs=3, backend="ddp")
    with pytest.raises(ModelError, match=r"'base.weight' is quantized \(Int8\), and fully_shard cannot cut"):
        fit(folder / "sharded", quantized(), backend="fsdp")
    return trained["up.weight"]


@pytest.mark.slow
def test_two_ranks_train_over_a_quantized_base_as_one_does(tmp_path):
    expected = fit(None, quantized(), epochs=3)["up.weight"]
    for found in run_ranks(quantized_on_two_ranks, 2, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
