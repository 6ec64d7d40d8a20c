"""Lists, dicts and sets that forward fills: each replica has its own, as the module's when a call begins."""

import gc
import weakref
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas

BOTH = pytest.mark.parametrize("force_copies", [False, True], ids=["shared", "copied"])


class Layer(nn.Module):
    """Leaves a loss of its own in a list that the model has given it."""

    def __init__(self, sink):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.sink = sink

    def forward(self, x):
        x = self.inner(x)
        self.sink.append(x.square().mean())
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.losses = []
        self.layers = nn.ModuleList([Layer(self.losses), Layer(self.losses)])
        self.seen = {"rows": [], "calls": {}}
        self.in_a_list = [self.layers[1].inner, self.layers[0].inner]

    def forward(self, x):
        self.losses.clear()
        for layer in self.layers:
            x = layer(x)
        self.seen["rows"].append(len(x))
        return x


def losses(replica, part):
    out = replica(part)
    return out.mean() + sum(replica.losses), len(replica.losses)


@BOTH
def test_losses_that_layers_leave_in_a_list_are_those_of_the_own_part(force_copies):
    parts = [torch.randn(20, 3), torch.randn(30, 3), torch.randn(2, 3)]
    plain = Model()
    wanted = [losses(plain, part) for part in parts]
    replicas = Replicas(Model(), ["cpu"] * 3, force_copies=force_copies)
    for _ in range(5):
        assert replicas.run(losses, parts) == wanted


@BOTH
def test_what_is_in_a_container_when_a_call_begins_is_there(force_copies):
    model = Model()
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=force_copies)
    look = lambda r, _: [list(r.seen["rows"]), dict(r.seen["calls"]), len(r.losses)]  # noqa: E731 - short

    def spoil(replica, part):
        if part:
            replica.seen["rows"].append("spoilt")
            replica.losses.append(0)

    for change in (
        lambda: model.seen["rows"].append(3),
        lambda: model.seen["calls"].update(a=1),
        lambda: model.losses.extend([1, 2]),
        model.losses.clear,
        lambda: setattr(model, "seen", {"rows": [9], "calls": {}}),
    ):
        change()
        first, second = replicas.run(look, [0, 1])
        assert first == second
        replicas.run(spoil, [0, 1])
    assert model.seen == {"rows": [9], "calls": {}}
    assert model.losses == []


@pytest.mark.parametrize(
    "kept",
    [[1], {1}, deque([1], maxlen=2), {"a": [1]}, OrderedDict(a=1), defaultdict(list, a=[1])],
    ids=lambda kept: type(kept).__name__,
)
def test_containers_keep_their_kind(kept):
    model = Model()
    model.kept = kept
    (first, second) = Replicas(model, ["cpu", "cpu"]).run(lambda r, _: r.kept, [0, 1])
    assert first is kept
    assert type(second) is type(kept)
    assert second == kept
    assert second is not kept
    assert getattr(second, "maxlen", 0) == getattr(kept, "maxlen", 0)


@BOTH
def test_modules_in_a_list_are_the_replicas_own(force_copies):
    model = Model()

    def are_own(replica, _):
        return [replica.in_a_list[i] is replica.layers[1 - i].inner for i in (0, 1)]

    assert Replicas(model, ["cpu", "cpu"], force_copies=force_copies).run(are_own, [0, 1]) == [[True] * 2] * 2


def test_a_container_that_is_replaced_is_let_go():
    class Item:
        pass

    model = Model()
    replicas = Replicas(model, ["cpu", "cpu"])
    gc.disable()
    try:
        item = Item()
        model.cache = [item]
        replicas.run(lambda r, _: r.cache, [0, 1])
        gone = weakref.ref(item)
        model.cache = []
        del item
        replicas.run(lambda r, _: r.cache, [0, 1])
        assert gone() is None
    finally:
        gc.enable()


def test_an_embedding_that_scales_its_rows_is_refused_where_devices_have_copies():
    from tp_core.errors import ModelError

    model = nn.Embedding(5, 3, max_norm=1.0)
    parts = [torch.tensor([0, 1]), torch.tensor([2])]
    Replicas(model, ["cpu", "cpu"]).run(lambda r, x: r(x), parts)  # one weight
    assert (model.weight[:3].norm(dim=1) < 1.001).all()
    with pytest.raises(ModelError, match=r"max_norm=1.0.*torch.renorm\(weight.data, 2, 0, 1\)"):
        Replicas(model, ["cpu", "cpu"], force_copies=True).run(lambda r, x: r(x), parts)


class Noisy(nn.Module):
    """Draws from generators of its own, one of them in a list."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.others = [torch.Generator().manual_seed(4)]

    def forward(self, x):
        noise = [torch.rand((), generator=g) for g in (self.generator, *self.others)]
        return x + torch.stack(noise).sum()


def test_each_replica_draws_the_same_numbers_of_a_generator_of_the_module():
    model, plain = Noisy(), Noisy()
    replicas = Replicas(model, ["cpu"] * 3)
    for seed in (None, None, 9):
        if seed is not None:  # between calls, as a program does
            model.generator.manual_seed(seed)
            plain.generator.manual_seed(seed)
        expected = plain(torch.zeros(2))
        for output in replicas.run(lambda replica, x: replica(x), [torch.zeros(2)] * 3):
            assert torch.equal(output, expected)
