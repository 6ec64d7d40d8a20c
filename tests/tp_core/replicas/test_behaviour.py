"""What modules do besides computing holds in replicas too."""

import pytest
import torch
from torch import nn
from tp_core.errors import ModelError
from tp_core.replicas import Replicas

BOTH = pytest.mark.parametrize("force_copies", [False, True], ids=["shared", "copied"])


def call(replica, part):
    return replica(part)


def two(model, force_copies):
    return Replicas(model, ["cpu", "cpu"], force_copies=force_copies)


class Named(nn.Module):
    """Runs a function of itself and the part, for tests of one trait each."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


X = [torch.ones(2, 3), torch.full((2, 3), 2.0)]


@BOTH
def test_tied_weights_are_one_tensor_in_each_replica(force_copies):
    model = Named(None, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model.b.weight = model.a.weight
    same = two(model, force_copies).run(lambda r, _: r.a.weight is r.b.weight, X)
    assert same == [True, True]


@BOTH
def test_a_shared_submodule_is_one_module_in_each_replica(force_copies):
    layer = nn.Linear(3, 3)
    model = Named(None, a=layer, b=nn.Sequential(layer))
    assert two(model, force_copies).run(lambda r, _: r.a is r.b[0], X) == [True, True]


@BOTH
@pytest.mark.parametrize("kind", ["orthogonal", "weight_norm", "spectral_norm"])
def test_parametrizations_give_the_same_gradients(kind, force_copies):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    model = getattr(nn.utils.parametrizations, kind)(layer)
    if kind == "spectral_norm":
        model.eval()  # in training each forward moves the estimate
    x = torch.randn(4, 3).double()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    outputs = two(model, force_copies).run(call, x.split(2))
    sum(y.square().sum() for y in outputs).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


@BOTH
def test_a_tensor_set_in_forward_is_the_replicas_own_and_others_are_replica_0s(force_copies):
    def remember(self, x):
        seen = getattr(self, "last", None), getattr(self, "size", None)
        self.last, self.size = x, len(x)
        return seen

    model = Named(remember)
    replicas = two(model, force_copies)
    assert replicas.run(call, X) == [(None, None)] * 2
    assert model.last is X[0]
    (first, size), (second, other_size) = replicas.run(call, [X[0], X[0][:1]])
    assert first is X[0]
    assert second is X[1]
    assert size == other_size == len(X[0])
    assert [size for _, size in replicas.run(call, X)] == [len(X[0])] * 2


@BOTH
def test_settings_changed_between_calls_are_followed(force_copies):
    model = nn.Sequential(nn.Dropout(0.5), nn.Hardtanh())
    replicas = two(model, force_copies)
    replicas.run(call, X)
    model.eval()
    model[1].max_val = 1.5
    assert replicas.run(call, X)[1].max().item() == 1.5


@BOTH
def test_running_statistics_are_those_of_replica_0(force_copies):
    model, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    replicas = two(model, force_copies)
    parts = [torch.randn(4, 3), torch.randn(4, 3) + 5]
    for _ in range(3):
        replicas.run(call, parts)
        reference(parts[0])
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))
    model.eval()
    reference.eval()
    torch.testing.assert_close(replicas.run(call, parts)[1], reference(parts[1]))


@BOTH
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_statistics_that_a_single_part_moved_reach_the_others(layer, force_copies):
    x = torch.randn(4, 3, 5) + 3
    replicas = two(layer.eval(), force_copies)
    replicas.run(call, [x, x])
    layer.train()
    replicas.run(call, [x])
    layer.eval()
    torch.testing.assert_close(replicas.run(call, [x, x])[1], layer(x))


def test_a_large_buffer_is_copied_once():
    model = nn.Linear(3, 3)
    model.register_buffer("table", torch.zeros(300, 300), persistent=False)
    replicas = two(model, force_copies=False)
    seen = [replicas.run(lambda r, _: r.table.data_ptr(), X) for _ in range(2)]
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
    model.table.add_(1)
    assert replicas.run(lambda r, _: r.table.sum().item(), X)[1] == 90_000.0


def test_a_buffer_under_two_names_is_one_in_each_replica():
    model = Named(None, a=nn.Module(), b=nn.Module())
    shared = torch.zeros(2)
    model.a.register_buffer("x", shared)
    model.b.register_buffer("y", shared)
    model.b.register_buffer("none", None)
    replicas = two(model, force_copies=True)
    for _ in range(2):
        assert replicas.run(lambda r, _: r.a.x is r.b.y, X) == [True, True]


def test_a_buffer_that_requires_grad_gets_its_gradient():
    model = Named(lambda self, x: self.scale * x)
    model.register_buffer("scale", torch.ones(3, requires_grad=True))
    sum(y.sum() for y in two(model, force_copies=True).run(call, X)).backward()
    assert model.scale.grad.tolist() == [6.0, 6.0, 6.0]


@BOTH
def test_forward_and_backward_hooks_run_in_each_replica(force_copies):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    forward, backward = [], []
    model[0].register_forward_hook(lambda module, args, output: forward.append(args[0][0, 0].item()))
    model[1].register_full_backward_hook(lambda module, gi, go: backward.append(len(go)))
    outputs = two(model, force_copies).run(call, X)
    sum(y.sum() for y in outputs).backward()
    assert sorted(forward) == [1.0, 2.0]
    assert backward == [1, 1]


@BOTH
def test_a_hook_on_a_parameter_sees_one_summed_gradient(force_copies):
    model = nn.Linear(3, 1, bias=False)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    sum(y.sum() for y in two(model, force_copies).run(call, X)).backward()
    assert seen == [18.0]


def test_a_hook_registered_later_runs_in_each_replica():
    model = nn.Linear(3, 1)
    replicas = two(model, force_copies=True)
    replicas.run(call, X)
    seen = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(1))
    replicas.run(call, X)
    handle.remove()
    replicas.run(call, X)
    assert seen == [1, 1]


@BOTH
def test_a_forward_that_was_overridden_on_the_instance_runs_on_the_twin(force_copies):
    model = Named(None, layer=nn.Linear(3, 2))
    model.forward = (lambda self, x: (id(self), self.layer(x))).__get__(model)
    (first, _), (second, _) = two(model, force_copies).run(call, X)
    assert first == id(model)
    assert second != id(model)


def test_a_module_held_as_a_plain_attribute_is_the_twins_own():
    model = Named(None, layer=nn.Linear(3, 2))
    object.__setattr__(model, "alias", model.layer)
    assert two(model, force_copies=True).run(lambda r, _: r.alias is r.layer, X) == [True, True]


@BOTH
def test_a_recurrent_layer_keeps_its_weights_in_one_list(force_copies):
    model = nn.LSTM(3, 4)
    replicas = two(model, force_copies)
    for _ in range(2):
        lists = replicas.run(
            lambda r, _: all(a is b for a, b in zip(r._flat_weights, r.parameters(), strict=True)), X
        )
        assert lists == [True, True]
    outputs = replicas.run(lambda r, x: r(x)[0], X)
    torch.testing.assert_close(outputs[1], model(X[1])[0])


@pytest.fixture
def compiler():
    """The compiler as in a fresh process: what other tests compiled counts towards a limit."""
    torch.compiler.reset()


@BOTH
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it, and hides that
def test_a_compiled_module_runs_compiled_on_each_replica(force_copies):
    compiled_for = []

    def backend(graph, inputs):
        compiled_for.append(len(inputs))
        return graph

    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    replicas = two(torch.compile(plain, backend=backend), force_copies)
    for _ in range(4):
        outputs = replicas.run(call, X)
        torch.testing.assert_close(outputs[1], plain(X[1]))
    assert 1 <= len(compiled_for) <= 4
    outputs[1].sum().backward()
    assert plain[0].weight.grad is not None


class Own(nn.Module):
    """A module whose forward torch compiles: in files of its own it begins nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.dropout(self.first(x)))


@pytest.mark.slow
@BOTH
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as above
def test_replicas_compiled_in_place_run_compiled_and_draw_their_own_numbers(force_copies):
    sizes = []

    def backend(graph, inputs):
        sizes.append(len(inputs))
        return graph

    plain = Own()
    replicas = two(plain, force_copies)
    torch.manual_seed(0)
    expected = replicas.run(call, X)
    replicas.compile(backend=backend)
    torch.manual_seed(0)
    outputs = replicas.run(call, X)
    assert sizes
    torch.testing.assert_close(outputs, expected)
    outputs[1].sum().backward()
    assert plain.first.weight.grad is not None


@BOTH
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as above
def test_replicas_of_torchs_own_class_are_compiled(force_copies):
    graphs = []
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    replicas = two(plain, force_copies)
    replicas.compile(backend=lambda graph, inputs: graphs.append(1) or graph)
    torch.testing.assert_close(replicas.run(call, X)[1], plain(X[1]))
    assert len(graphs) >= 2


@pytest.mark.slow
@BOTH
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as above
def test_a_module_compiled_in_place_runs_as_written_on_the_other_replicas(force_copies):
    graphs = []
    model = Own().eval()
    model.compile(backend=lambda graph, inputs: graphs.append(1) or graph)
    outputs = two(model, force_copies).run(call, X)
    torch.testing.assert_close(outputs[1], model.second(model.first(X[1])))
    assert graphs


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_shared_on_its_device_and_refused_elsewhere():
    model = torch.jit.script(nn.Linear(3, 2))
    torch.testing.assert_close(two(model, force_copies=False).run(call, X)[1], model(X[1]))
    with pytest.raises(ModelError, match=r"TorchScript module .* cannot be replicated on cpu"):
        two(model, force_copies=True).run(call, X)


@BOTH
def test_a_module_that_asks_for_its_parameters_in_forward_finds_them(force_copies):
    model = Named(lambda self, x: sum(p.square().sum() for p in self.parameters()), l=nn.Linear(3, 3))
    first, second = two(model, force_copies).run(call, X)
    assert first.item() == second.item() > 0
