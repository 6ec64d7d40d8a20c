"""A plan is proven, or the first module whose numbers differ is named."""

import copy
import json
import math

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from tp_core.errors import ConfigError, DisagreementError, ModelError

# The groups' mesh has no public name, and ranks that are simulated may fail in any order.
from tp_shard._verify._report import ModuleReport, PlanReport  # private: verify alone makes them
from tp_shard._verify._simulate import SimulatedError, simulate  # private: ranks that fall out of step

from tests.cases import first_fast
from tests.run_tp import run

Column, Row, Vocab, Local, Replicated, Sequence = (
    ts.Column,
    ts.Row,
    ts.Vocab,
    ts.Local,
    ts.Replicated,
    ts.Sequence,
)


class Attention(nn.Module):
    """Heads that the module counts by itself, with a norm and a number for each of them."""

    def __init__(self, heads=4, width=4, *, interleaved=False):
        super().__init__()
        self.heads, self.width, self.size = heads, width, heads * width
        self.interleaved = interleaved
        self.qkv, self.out = nn.Linear(16, 3 * self.size), nn.Linear(self.size, 16)
        self.norm = nn.RMSNorm(width)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.drop = nn.Dropout(0.5)

    def forward(self, x, bias=None):
        made = self.qkv(x)
        if self.interleaved:
            q, k, v = made.unflatten(-1, (self.heads, 3 * self.width)).chunk(3, -1)
        else:
            q, k, v = (part.unflatten(-1, (self.heads, self.width)) for part in made.split(self.size, -1))
        q, k, v = (t.transpose(1, 2) for t in (self.norm(q), k, v))
        bias = self.sinks.view(1, -1, 1, 1) if bias is None else bias + self.sinks.view(1, -1, 1, 1)
        scores = (q @ k.transpose(-1, -2) * bias).softmax(-1)
        return self.out((self.drop(scores) @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.before, self.attention = nn.LayerNorm(16), Attention(**options)
        self.up, self.act, self.down = nn.Linear(16, 24), nn.PReLU(), nn.Linear(24, 16)

    def forward(self, x, bias=None):
        x = x + self.attention(self.before(x), bias=bias)
        return x + self.down(self.act(self.up(x)))


PLAN = {
    "attention": Local(heads=4, query=("heads", "size"), parameters=("sinks",), inputs=("bias",)),
    "attention.qkv": Column(heads=4, holds="qkv"),
    "attention.norm": Replicated(),
    "attention.out": Row(heads=4),
    "up": Column(),
    "act": Replicated(),
    "down": Row(),
}


def batch():
    return torch.randn(2, 5, 16)


@pytest.mark.parametrize("ranks", first_fast([1, 2, 3, 4], 2))
def test_a_right_plan_is_equal_in_every_number(ranks):
    torch.manual_seed(0)
    report = ts.verify(Block(), PLAN, batch(), ranks=ranks)
    report.assert_ok()
    assert (report.ok, report.ranks, report.modes) == (True, ranks, ("evaluation", "training"))
    assert report.outputs < 1e-12
    assert report.loss < 1e-12
    rows = {m.name: m for m in report.modules}
    assert rows["attention.norm"].gradient < 1e-12
    assert rows["before"].style == ""
    scope, lines = str(report).splitlines()[-2:]
    assert scope.startswith("equal; proven for [0] (2, 5, 16) and [0] (3, 8, 16), on ")
    (idle,) = report.idle_lines  # of qkv that is interleaved
    assert idle == f"Attention.forward, line {Attention.forward.__code__.co_firstlineno + 3}"
    assert lines == f"not proven, because these lines did not run: {idle}"


class Near(nn.Module):
    """Adds a small share of a mean over features, of which each rank has its own."""

    def forward(self, x):
        return x + 1e-5 * x.mean(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fault_of_one_part_in_a_hundred_thousand_is_named(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), Near(), nn.Linear(32, 4)).to(dtype)
    report = ts.verify(model, {"0": Column(), "3": Row()}, torch.randn(8, 8).to(dtype))
    assert report.fault.module == "3"
    assert report.tolerance == 1e-9


class Norm32(nn.RMSNorm):
    """A norm in float32, whatever the type of the model, as transformers' are."""

    def forward(self, x):
        return super().forward(x.float()).to(x)

    def _apply(self, fn, recurse=True):
        return self  # its weights stay in float32


def test_a_bound_is_not_below_the_coarsest_type_inside_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16), Norm32(16), nn.Linear(16, 24))
    report = ts.verify(model, {"0": Column(), "2": Row()}, batch())
    report.assert_ok()
    assert report.tolerance == 2e-5


@pytest.mark.slow
def test_arguments_with_all_heads_are_taken_apart():
    torch.manual_seed(0)
    for bias in (torch.randn(1, 4, 5, 5), torch.randn(2, 4, 5, 1)):
        ts.verify(Block(), PLAN, {"x": batch(), "bias": bias}).assert_ok()


class Distances(nn.Module):
    """Attention with a slope for each head, which equal tokens hide."""

    def __init__(self):
        super().__init__()
        self.heads, self.table = 4, nn.Embedding(50, 16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens):
        x = self.table(tokens)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=x.dtype)
        places = torch.arange(tokens.size(1))
        bias = -(places[:, None] - places).abs() * slopes[:, None, None]
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class Late(nn.Module):
    """Mixes features from its third call on."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x):
        self.calls += 1
        hidden = self.up(x).relu()
        return self.down(hidden if self.calls < 3 else hidden.roll(1, -1))


class Hidden(nn.Module):
    """Has the mean of all features at hidden places; those on the left may give no numbers."""

    def __init__(self, *, left):
        super().__init__()
        self.up, self.down, self.left = nn.Linear(8, 16), nn.Linear(16, 8), left

    def forward(self, x, mask):
        hidden = self.up(x).relu()
        hidden = torch.where(mask[..., None] == 1, hidden, hidden.mean(-1, keepdim=True))
        return self.down(hidden if self.left else hidden / mask[:, :1, None])


@pytest.mark.slow
def test_a_batch_of_its_own_and_three_steps_find_what_the_given_one_hides():
    plan = {"": Local(heads=4, query=("heads",)), "o": Row(heads=4)}
    plan |= dict.fromkeys("qkv", Column(heads=4))
    report = ts.verify(Distances(), plan, torch.zeros(2, 7, dtype=torch.long))
    assert report.fault is not None
    assert report.batch == "[0] (2, 7) and [0] (3, 10)"
    report = ts.verify(Late(), {"up": Column(), "down": Row()}, torch.randn(4, 8))
    assert report.fault.module == "down"
    assert report.modes == ("evaluation", "training")
    for left in (True, False):
        given = {"x": torch.randn(2, 4, 8), "mask": torch.ones(2, 4, dtype=torch.long)}
        assert ts.verify(Hidden(left=left), {"up": Column(), "down": Row()}, given).fault.module == "down"


def changed(**changes):
    """The right plan with some styles otherwise, or (None) without them."""
    plan = {**PLAN, **{name.replace("__", "."): style for name, style in changes.items()}}
    return {name: style for name, style in plan.items() if style is not None}


@pytest.mark.parametrize(
    ("plan", "module", "reason"),
    [
        (changed(attention__norm=None), "attention.out", r"norm.weight, on which its input depends"),
        (changed(act=None), "down", r'"act": ts.Replicated\(\)'),
        (
            changed(attention=Local(heads=4, query=("heads", "size"))),
            "attention",
            r"RuntimeError in its forward",
        ),
        (changed(attention=None), "attention", r"needs ts.Local\(...\)"),
        (changed(attention__qkv=Column(heads=4)), "attention.out", "in another order than the plan says"),
        (changed(before=Replicated()), "before", "summed over 2 ranks that all have the whole of it"),
    ],
)
def test_the_first_module_that_differs_is_named(plan, module, reason):
    torch.manual_seed(0)
    report = ts.verify(Block(), plan, batch())
    assert not report.ok
    assert report.fault.module == module
    with pytest.raises(ts.VerificationError, match=f"(?s)^{module}: .*{reason}"):
        report.assert_ok()
    assert str(report).splitlines()[-1].startswith(f"first difference: {module}: ")


def test_a_forgotten_sum_of_gradients_is_told_from_one_too_many():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.register_buffer("one", torch.ones(()))

        def forward(self, x):
            return x * self.scale

    class Hidden(torch.autograd.Function):
        """Hides what is before it from a look at the graph, as a recomputation does."""

        @staticmethod
        def forward(ctx, x, module):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = module(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, grad):
            ctx.y.backward(grad)
            return ctx.x.grad, None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.scaled, self.down = nn.Linear(4, 6), Scaled(), nn.Linear(6, 4)

        def forward(self, x):
            return self.down(Hidden.apply(self.up(x), self.scaled))

    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    report = ts.verify(Net(), {"up": Column(), "down": Row()}, x)
    assert (report.fault.module, report.ok) == ("scaled", False)
    assert "have to be summed: give the module ts.Replicated()" in report.fault.reason
    ts.verify(Net(), {"up": Column(), "down": Row(), "scaled": Replicated()}, x).assert_ok()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.up, self.down = Scaled(), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.down(self.up(Hidden.apply(x, self.before)))

    report = ts.verify(Twice(), {"up": Column(), "down": Row(), "before": Replicated()}, x)
    assert report.fault.module == "before"
    assert "summed over 2 ranks that all have the whole of it" in report.fault.reason


def test_split_logits_need_a_loss_that_takes_them_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    ids, target = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (10,))

    def loss(logits):
        return ts.nn.functional.parallel_cross_entropy(logits.flatten(0, 1), target, num_classes=11)

    plan = {"0": Vocab(), "1": Vocab()}
    ts.verify(model, plan, ids, loss=loss).assert_ok()
    assert "its outputs are split" in ts.verify(model, plan, ids).fault.reason
    ts.verify(model, {"0": Vocab(), "1": Vocab(gather_output=True)}, ids).assert_ok()


class Residual(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.up, self.down, self.drop, self.out = nn.Linear(8, 15), nn.Linear(15, 8), drop, nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.drop(self.down(nn.functional.dropout(self.up(x), training=self.training))))


def test_what_ranks_hold_alike_drops_alike_and_what_does_not_is_named():
    plan = {"up": Column(), "down": Row()}
    x = torch.ones(2, 3, 8)
    ts.verify(Residual(nn.Dropout(0.5)), plan, x, ranks=3).assert_ok()
    ts.verify(Residual(nn.Dropout(0.5)), {**plan, "drop": ts.Replicated()}, x).assert_ok()
    apart = Residual(OwnDropout())
    report = ts.verify(apart, plan, x)
    assert report.fault.module == "drop"
    assert report.fault.what == "with dropout its outputs differ between ranks"
    assert "look for a ts.nn.ParallelDropout" in report.fault.reason


def dropped(x, training: bool):
    return F.dropout(x, 0.5, training)


class Scripted(Residual):
    def forward(self, x):
        return self.out(self.down(self.dropped(self.up(x), self.training)))


def test_dropout_that_cannot_be_left_out_is_named(monkeypatch):
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        function = torch.jit.script(dropped)
    # Of the class: the function of a module cannot be copied.
    monkeypatch.setattr(Scripted, "dropped", staticmethod(function), raising=False)
    report = ts.verify(Scripted(None), {"up": Column(), "down": Row()}, torch.ones(2, 3, 8))
    assert "draws random numbers that are no dropout of torch" in report.fault.reason


class OwnDropout(nn.Module):
    def forward(self, x):
        with ts.RandomTracker(1).fork():
            return nn.functional.dropout(x, training=self.training)


def test_dropout_is_left_out_and_nothing_is_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.9), nn.Linear(16, 16))
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ts.verify(model, {"0": Column(), "2": Row()}, torch.ones(2, 16)).assert_ok()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_memory_is_verified_with_values_of_its_own():
    with torch.device("meta"):
        model = Block()
    ts.verify(model, PLAN, batch()).assert_ok()
    assert next(model.parameters()).is_meta


@pytest.mark.slow
def test_blocks_that_are_alike_are_one_where_memory_is_short(monkeypatch):
    model = nn.Sequential(*(Block() for _ in range(4)))
    plan = {f"*.{name}": style for name, style in PLAN.items()}
    size = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr("tp_shard._verify._report.free_memory", lambda: 7 * 8 * size - 1)
    report = ts.verify(model, plan, batch())
    report.assert_ok()
    assert "equal blocks as one" in str(report)
    monkeypatch.setattr("tp_shard._verify._report.free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="GiB of memory, and 0 GiB are free; verify the plan on a smaller"):
        ts.verify(model, plan, batch())


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(ModelError, match=r"must be a torch.nn.Module, got str"):
        ts.verify("model", {}, batch())
    with pytest.raises(ConfigError, match="ranks is a number of 1 or more, got 0"):
        ts.verify(Block(), PLAN, batch(), ranks=0)
    with pytest.raises(ModelError, match="the whole model fails on this batch in evaluation: RuntimeError"):
        ts.verify(Block(), PLAN, torch.randn(2, 5, 7))
    with pytest.raises(ConfigError, match="fit no layer"):
        ts.verify(Block(), {"nothing": Column()}, batch())
    with pytest.raises(ConfigError, match=r"heads = 4, which is not in proportion to 3 heads"):
        ts.verify(Block(), {"attention": Local(heads=3, query=("heads",))}, batch())
    with pytest.raises(ConfigError, match=r"attention.sinks has shape \(4,\), and not 2 heads first"):
        ts.verify(Block(), {"attention": Local(heads=2, parameters=("sinks",))}, batch())
    with pytest.raises(ModelError, match="without a parameter weights; it has"):
        ts.verify(Block(), {"attention": Local(heads=2, parameters=("weights",))}, batch())


def test_debug_mode_does_not_hinder_verifying():
    with ts.distributed.debug():
        ts.verify(Block(), PLAN, batch()).assert_ok()


class OddError(Exception):
    """It is pickled, and cannot be read again."""

    def __init__(self, part, *, why):
        super().__init__(f"{part} {why}")


class Uncopied(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


def an_error_that_cannot_be_sent_is_raised_on_all_ranks():
    class LocalError(Exception):
        """It cannot be pickled."""

    for error in (LocalError("it stays one"), OddError("it", why="stays one")):
        kind = type(error) if ts.distributed.get_rank() == 0 else ModelError
        with pytest.raises(kind, match="it stays one"):
            ts.verify(nn.Sequential(Uncopied(error), nn.Linear(4, 4)), {"1": Column()}, torch.ones(1, 4))


def on_a_group_the_first_rank_works_and_all_know():
    torch.manual_seed(0)
    report = ts.verify(Block(), PLAN, batch())
    report.assert_ok()
    assert report.ranks == ts.distributed.get_world_size()
    assert "attention.out" in str(ts.verify(Block(), changed(attention__qkv=Column(heads=4)), batch()).fault)
    with pytest.raises(ModelError, match="the whole model fails on this batch"):
        ts.verify(Block(), PLAN, torch.randn(2, 5, 7))
    split = ts.parallelize(Block(), PLAN)
    with pytest.raises(ModelError, match="is split already; a plan is verified on the whole model"):
        ts.verify(split, PLAN, batch())


@pytest.mark.parametrize(
    "check",
    [on_a_group_the_first_rank_works_and_all_know, an_error_that_cannot_be_sent_is_raised_on_all_ranks],
    ids=lambda c: c.__name__,
)
def test_on_ranks(on_ranks, check):
    on_ranks(2, check)


def the_mesh_of_the_groups_stays():
    d, block = ts.distributed, Block()
    d.destroy_process_group()
    d.init_process_group(init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp")))
    ts.verify(block, PLAN, batch())
    # By the mesh, each rank is the first one of its stage; without one, rank 0 alone has the state.
    assert ts.collect_state_dict(block, block.state_dict(), to="rank0")


@pytest.mark.slow
def test_verifying_leaves_the_mesh_of_the_groups(on_ranks):
    on_ranks(2, the_mesh_of_the_groups_stays, fresh=True)  # it forms groups of its own


def test_simulated_ranks_compute_what_ranks_do():
    def body(group):
        own = torch.full((2,), float(group.rank + 1))
        drawn = torch.rand(3)
        joined = ts.distributed.gather(own, 0)
        return joined, ts.distributed.reduce(own), drawn, torch.rand(3), ts.distributed.get_rank()

    found = simulate(3, body)
    for rank, (joined, total, first, second, number) in enumerate(found):
        assert joined.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert total.tolist() == [6.0, 6.0]
        assert torch.equal(first, found[0][2])  # each rank draws from a generator of its own
        assert torch.equal(second, found[0][3])
        assert number == rank
    assert not ts.distributed.is_initialized()


@pytest.mark.parametrize("last", [0, 1, 2])
def test_simulated_ranks_that_do_something_else_are_an_error_and_no_hang(last):
    def ends(group):
        if group.rank != last:
            ts.distributed.reduce(torch.ones(2))

    with pytest.raises(SimulatedError, match=f"all_reduce .* and rank {last} has ended without it") as caught:
        simulate(3, ends)
    assert isinstance(caught.value.error, DisagreementError)

    def other(group):
        ts.distributed.reduce(torch.ones(2 + (group.rank == last)))

    with pytest.raises(SimulatedError, match=r"rank 0 calls all_reduce .*, and rank . all_reduce"):
        simulate(3, other)

    def fails(group):
        if group.rank == last:
            raise ValueError("no")
        ts.distributed.reduce(torch.ones(2))

    with pytest.raises(SimulatedError, match=f"rank {last} raised ValueError: no"):
        simulate(3, fails)


BUILDER = """
import torch, tp_shard as ts
from torch import nn

def small():
    return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def wrong():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    return {"model": model, "plan": {"0": ts.Column(), "2": ts.Row()}, "batch": torch.randn(2, 8)}

def nothing():
    return 3

def unknown():
    return {"model": small(), "bath": 1}

def unfed():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
"""


def test_the_command_line_verifies(tmp_path, capsys):
    path = tmp_path / "builders.py"
    path.write_text(BUILDER)
    assert run(["shard", "verify", f"{path}:small", "--ranks", "3"]) == 0
    printed = capsys.readouterr().out
    assert "on 3 ranks, float64, in evaluation and training" in printed
    assert "Row()" in printed
    assert run(["shard", "verify", f"{path}:wrong"]) == 1
    assert "first difference: 1: RuntimeError" in capsys.readouterr().out
    assert run(["shard", "verify", f"{path}:wrong", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["ranks"], found["dtype"]) == (False, 2, "float64")
    assert found["fault"]["module"] == "1"


def test_differences_that_are_not_finite_are_their_names_in_plain_values():
    module = ModuleReport("0", "", math.nan, math.inf)
    report = PlanReport(2, torch.float64, 1e-5, ("evaluation",), (module,), math.nan, None, None)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["modules"] == [{"name": "0", "style": "", "forward": "nan", "gradient": "inf"}]
    assert (found["outputs"], found["loss"]) == ("nan", None)


@pytest.mark.parametrize(
    ("builder", "message", "status"),
    [
        ("{path}:nothing", 'with one as "model"; got int', 1),
        ("{path}:unknown", r"returns ['bath'] beside what is known", 2),
        ("{path}:unfed", "what it takes is not known", 2),
        ("{path}:none", "has no function 'none'", 2),
        ("{path}", "is written file.py:build", 2),
        ("missing.py:build", "there is no file 'missing.py'", 2),
        ("missing:build", "there is no module 'missing'", 2),
    ],
)
def test_a_builder_that_is_none_is_named(tmp_path, capsys, builder, message, status):
    path = tmp_path / "builders.py"
    path.write_text(BUILDER)
    assert run(["shard", "verify", builder.format(path=path)]) == status
    assert message in capsys.readouterr().err


def test_a_plan_for_experts_is_proven_and_its_shapes_are_checked():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 12))
            self.gate_up_bias = nn.Parameter(torch.randn(3, 12))
            self.down_proj = nn.Parameter(torch.randn(3, 6, 16))
            self.down_bias = nn.Parameter(torch.randn(3, 16))

        def forward(self, x, weights):
            made = torch.einsum("nd,edf->enf", x, self.gate_up_proj) + self.gate_up_bias.unsqueeze(1)
            hidden = F.silu(made[..., ::2]) * made[..., 1::2]
            out = torch.einsum("enf,efd->end", hidden, self.down_proj) + self.down_bias.unsqueeze(1)
            return torch.einsum("end,ne->nd", out, weights)

    torch.manual_seed(0)
    given = (torch.randn(5, 16), torch.rand(5, 3))
    right = ts.Experts(
        columns=("gate_up_proj", "gate_up_bias"),
        rows=("down_proj",),
        sections=1,
        transposed=True,
        once=("down_bias",),
    )
    for ranks in (2, 4):
        ts.verify(Experts(), {"": right}, given, ranks=ranks).assert_ok()
    model = nn.ModuleDict({"experts": Experts()})
    with pytest.raises(ConfigError, match=r"experts.down_bias has shape \(3, 16\); weights of experts have"):
        ts.parallelize(model, {"experts": ts.Experts(rows=("down_bias",))})
    with pytest.raises(ModelError, match="experts is a Experts without a parameter up; it has"):
        ts.parallelize(model, {"experts": ts.Experts(columns=("up",))})
    with pytest.raises(ConfigError, match=r".down_proj has 6 features .*, too few for 7 ranks"):
        ts.verify(model["experts"], {"": right}, given, ranks=7)
