"""Optimizers with quantized or lower states, over shards: the numbers of one device, resumed elsewhere.

The stand-in has the traits of torchao's 8-bit AdamW: blocks of a rank's own part, in a type of its own.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StateError
from tp_trainer import FsdpOptions, Trainer

from tests.models import Block
from tests.reference_training import squared_error

ts = pytest.importorskip("tp_shard")
BLOCK = 4


class Quantized(Tensor):
    """Codes of eight bits, with a scale for each block of elements."""

    @staticmethod
    def __new__(cls, codes, scale, signed):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float64, device=codes.device)

    def __init__(self, codes, scale, signed):
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, *_):
        return cls(inner["codes"], inner["scale"], *context)

    def dequantize(self):
        blocks = self.codes.reshape(-1, BLOCK).double() / (127 if self.signed else 255)
        return (blocks * self.scale[:, None]).reshape(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        name = str(operator)  # torch.ops cannot be pickled
        if name == "aten.copy_.default":
            blocks = args[1].reshape(-1, BLOCK)
            scale = blocks.abs().amax(1)
            top = 127 if args[0].signed else 255
            codes = (blocks / scale.clamp_min(1e-300)[:, None] * top).round()
            args[0].codes.copy_(codes.reshape(args[0].codes.shape))
            args[0].scale.copy_(scale)
            return args[0]
        if name in {
            "aten.detach.default",
            "aten.view.default",
            "aten._to_copy.default",
            "aten.alias.default",
        }:
            codes = args[0].codes.view(args[1]) if name == "aten.view.default" else args[0].codes
            found = cls(codes, args[0].scale, args[0].signed)
            return return_and_correct_aliasing(operator, args, kwargs or {}, found)
        raise NotImplementedError(operator)


class AdamW8bit(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    def _new_buffer(self, p, signed):
        local = p.to_local() if hasattr(p, "to_local") else p
        if local.numel() % BLOCK:
            return torch.zeros_like(p)
        codes = torch.zeros(local.shape, dtype=torch.int16)
        made = Quantized(codes, torch.zeros(local.numel() // BLOCK, dtype=torch.float64), signed)
        if local is p:
            return made
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            made, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = self._new_buffer(p, True)
                    state["exp_avg_sq"] = self._new_buffer(p, False)
                state["step"] += 1
                n = state["step"].item()
                grad, first, second, weight = (
                    t.to_local() if hasattr(t, "to_local") else t
                    for t in (p.grad, state["exp_avg"], state["exp_avg_sq"], p)
                )
                mean, square = (
                    t.dequantize() if isinstance(t, Quantized) else t.clone() for t in (first, second)
                )
                mean.lerp_(grad, 0.1)
                square.lerp_(grad.square(), 0.001)
                first.copy_(mean)
                second.copy_(square)
                update = mean / (1 - 0.9**n) / ((square / (1 - 0.999**n)).sqrt() + 1e-8)
                weight.mul_(1 - 0.01 * group["lr"]).sub_(update, alpha=group["lr"])


class LowAdamW(torch.optim.AdamW):
    """Keeps its moments in bfloat16."""

    @torch.no_grad()
    def step(self, closure=None):
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(torch.float64)
        super().step(closure)
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(torch.bfloat16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(8, 16) for _ in range(2))
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def fit(make, backend="single", epochs=2, folder=None):
    """Train, or go on; return the whole weights, and the types of the state of a matrix."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on torch calls hooks for inner steps, too
    if backend == "shard":
        if ts.distributed.is_initialized():  # by another file's test on the ranks that all share
            ts.distributed.destroy_process_group()
        ts.distributed.init_process_group(2)
    try:
        model = Net()
        if backend == "shard":
            model = ts.parallelize(model, {"blocks.*.up": ts.Column(), "blocks.*.down": ts.Row()})
        options = FsdpOptions(units=Block) if backend == "fsdp" else None
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3)).double()
        loader = DataLoader(TensorDataset(x, x.sin()), batch_size=4, shuffle=True)
        with Trainer(backend=backend, devices="cpu", options=options, seed=2, progress=False) as trainer:
            optimizer = make(model.parameters(), lr=0.02)
            arguments = {} if folder is None else {"checkpoint": folder, "resume": "auto"}
            trainer.fit(
                model, optimizer, loader, step=squared_error, epochs=epochs, clip_norm=0.5, **arguments
            )
            weights = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
            states = [s["exp_avg"] for p, s in optimizer.state.items() if p.dim() == 2]
            kinds = {type(s.to_local() if hasattr(s, "to_local") else s) for s in states}
            return weights, sorted(kind.__name__ for kind in kinds), {str(s.dtype) for s in states}
    finally:
        if backend == "shard":
            ts.distributed.destroy_process_group()


def assert_same(found, expected, *, within):
    assert found[1:] == expected[1:]
    for name, tensor in expected[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=0, atol=within)


@pytest.mark.slow
def test_quantized_states_are_sharded_and_resumed_on_other_backends(two_ranks, tmp_path):
    expected = fit(AdamW8bit, epochs=4)
    assert expected[1] == ["Quantized"]
    # The blocks of shards along the first dimension are those of the whole.
    for found in two_ranks.run(fit, AdamW8bit, "fsdp", 4):
        assert_same(found, expected, within=1e-6)
    fit(AdamW8bit, "single", 1, tmp_path)
    two_ranks.run(fit, AdamW8bit, "fsdp", 2, tmp_path)
    two_ranks.run(fit, AdamW8bit, "shard", 3, tmp_path)
    assert_same(fit(AdamW8bit, "single", 4, tmp_path), expected, within=5e-3)  # as of a step's last bits


@pytest.mark.slow
def test_quantized_states_of_split_layers_are_those_of_other_blocks(two_ranks):
    expected = fit(AdamW8bit)
    for found in two_ranks.run(fit, AdamW8bit, "shard"):
        assert_same(found, expected, within=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "shard"])
def test_lower_states_are_those_of_one_device_and_are_resumed(two_ranks, tmp_path, backend):
    expected = fit(LowAdamW, epochs=3)
    assert expected[2] == {"torch.bfloat16"}
    for found in two_ranks.run(fit, LowAdamW, backend, 3):
        assert_same(found, expected, within=1e-6)
    fit(LowAdamW, "single", 1, tmp_path)
    two_ranks.run(fit, LowAdamW, backend, 2, tmp_path)
    assert_same(fit(LowAdamW, "single", 3, tmp_path), expected, within=1e-6)


def test_a_state_of_a_type_without_values_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(Quantized, "dequantize")
    monkeypatch.setattr(AdamW8bit, "step", lambda self, closure=None: _keep(self))
    with pytest.raises(StateError, match="as a Quantized, which has no dequantize"):
        fit(AdamW8bit, "single", 1, tmp_path)


def _keep(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["exp_avg"] = optimizer._new_buffer(p, True)
