"""Changes of parameters that move no version counter reach the copies, where a program makes them."""

import copy

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas
from tp_core.replicas._mirror import digest_of

X = [torch.ones(2, 3), torch.full((1, 3), 2.0)]


def call(replica, part):
    return replica(part)


def copied(replicas):
    return sum(mirror.copied for mirror in replicas._cache.mirrors)


class ByData(torch.optim.Optimizer):
    """Writes its parameters as many optimizers outside of torch do."""

    def __init__(self, parameters, write):
        super().__init__(parameters, {})
        self._write = write

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._write(p, p.grad)


def assign(p, g):
    p.data = p.data - 0.1 * g


WRITES = {
    "in place": lambda p, g: p.data.add_(g, alpha=-0.1),
    "assigned": assign,
    "foreach": lambda p, g: torch._foreach_add_([p.data], [g], alpha=-0.1),
    "copied": lambda p, g: p.data.copy_(p.data - 0.1 * g),
    "a view": lambda p, g: p.data.view(-1).sub_(0.1 * g.reshape(-1)),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def replicas(model):
    return Replicas(model, ["cpu"] * 2, force_copies=True)


def check(replicas):
    torch.testing.assert_close(replicas.run(call, X)[1], replicas.module(X[1]))


def loss_of(outputs):
    return torch.cat(outputs).square().mean()


@pytest.mark.parametrize("write", WRITES)
def test_training_with_an_optimizer_that_writes_data_is_that_of_one_device(model, replicas, write):
    plain = copy.deepcopy(model)
    optimizers = [ByData(m.parameters(), WRITES[write]) for m in (model, plain)]
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(replicas.run(call, X)).backward()
        loss_of([plain(x) for x in X]).backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("drop", ["module", "by hand"])
@pytest.mark.parametrize("write", WRITES)
def test_training_by_hand_is_that_of_one_device(model, replicas, write, drop):
    plain = copy.deepcopy(model)
    for _ in range(5):
        loss_of(replicas.run(call, X)).backward()
        loss_of([plain(x) for x in X]).backward()
        for m in (model, plain):
            for p in m.parameters():
                WRITES[write](p, p.grad)
                if drop == "by hand":
                    p.grad = None
            m.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_hook_of_an_optimizer_that_writes_data_is_seen(model, replicas):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()])
    loss_of(replicas.run(call, X)).backward()
    optimizer.step()
    check(replicas)


def test_a_step_copies_only_what_it_may_have_changed(model, replicas):
    model[0].requires_grad_(False)
    optimizer = ByData(list(model.parameters()), WRITES["in place"])
    loss_of(replicas.run(call, X)).backward()
    optimizer.step()
    before = copied(replicas)
    check(replicas)
    assert copied(replicas) == before + 2


def test_a_step_of_an_optimizer_of_something_else_copies_nothing(model, replicas):
    other = nn.Linear(2, 2)
    optimizer = ByData(other.parameters(), WRITES["in place"])
    replicas.run(call, X)
    before = copied(replicas)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    replicas.run(call, X)
    assert copied(replicas) == before


def test_accumulating_gradients_copies_once(model, replicas):
    for _ in range(4):
        loss_of(replicas.run(call, X)).backward()
    assert copied(replicas) == 4


def test_averaged_weights_that_are_put_in_for_an_evaluation_are_used_and_taken_out_again(model, replicas):
    replicas.run(call, X)
    trained = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(torch.full_like(p, 0.5))
    model.eval()
    with torch.no_grad():
        check(replicas)
    for p, old in zip(model.parameters(), trained, strict=True):
        p.data.copy_(old)
    model.train()
    check(replicas)


def test_a_state_that_is_loaded_or_assigned_is_seen(model, replicas):
    for how in ({}, {"assign": True}):
        replicas.run(call, X)
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, **how)
        check(replicas)


def test_a_parameter_that_is_given_other_storage_is_seen(model, replicas):
    replicas.run(call, X)
    model[0].weight.data = torch.randn(4, 3)
    check(replicas)
    with torch.no_grad():
        model[0].weight.set_(torch.randn(4, 3))
    check(replicas)


@pytest.mark.parametrize("grad", [True, False])
def test_a_bare_write_is_seen(model, replicas, grad):
    model[0].requires_grad_(False)
    with torch.set_grad_enabled(grad):
        for p in model.parameters():
            replicas.run(call, X)
            before = copied(replicas)
            p.data.add_(1)
            check(replicas)
            assert copied(replicas) == before + 1


CHANGES = {
    "one element, by the smallest step": lambda t: t.flatten()[5:6].copy_(
        torch.nextafter(t.flatten()[5:6], torch.tensor(9.0).to(t))
    ),
    "rows that trade places": lambda t: t.copy_(t.flip(0)),
    "columns that trade places": lambda t: t.copy_(t.flip(-1)),
    "signs": lambda t: t.neg_(),
}
TENSORS = {
    "a matrix": lambda: torch.randn(129, 66),
    "a vector": lambda: torch.randn(9001),
    "filters": lambda: torch.randn(70, 9, 3, 3),
    "channels last": lambda: torch.randn(70, 9, 3, 3).to(memory_format=torch.channels_last),
    "float64": lambda: torch.randn(70, 90, dtype=torch.float64),
    "an odd place in memory": lambda: torch.randn(6001)[1:].view(75, 80),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tensor", TENSORS)
def test_any_change_of_a_tensor_changes_its_digest(tensor, change):  # private: each kind of memory
    value = TENSORS[tensor]()
    before = digest_of([torch.ones(3), value])
    assert digest_of([torch.ones(3), value.clone()]).changed_since(before) == []
    view = value.data if value.is_contiguous() else value.permute(0, 2, 3, 1).data
    CHANGES[change](view)
    assert digest_of([torch.ones(3), value]).changed_since(before) == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.uint8])
def test_digests_are_of_any_type(dtype):
    value = torch.ones(80, 75).to(dtype)
    scalar = torch.ones((), dtype=dtype)
    before = digest_of([value, scalar])
    value.data[7, 9] = 0
    assert digest_of([value, scalar]).changed_since(before) == [0]
    value.data[7, 9] = 1
    scalar.data.zero_()
    assert digest_of([value, scalar]).changed_since(before) == [1]


def test_training_by_hand_that_zeroes_gradients_is_that_of_one_device(model, replicas):
    plain = copy.deepcopy(model)
    for _ in range(5):
        loss_of(replicas.run(call, X)).backward()
        loss_of([plain(x) for x in X]).backward()
        for p in (*model.parameters(), *plain.parameters()):
            p.data.sub_(p.grad, alpha=0.1)
            p.grad.zero_()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_watching_keeps_nothing_alive(memory, model):
    def once():
        replicas = Replicas(model, ["cpu"] * 2, force_copies=True)
        loss_of(replicas.run(call, X)).backward()

    assert memory.cycles_per_call(once) == 0
