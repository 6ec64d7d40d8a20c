"""The other replicas begin each call with the attributes that the module has then."""

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas, _mirror, _replica_modules  # what is looked at again, and what is not

BOTH = pytest.mark.parametrize("force_copies", [False, True], ids=["shared", "copied"])


def call(replica, part):
    return replica(part)


def two(model, force_copies=False):
    return Replicas(model, ["cpu", "cpu"], force_copies=force_copies)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = 1

    def forward(self, x):
        return self.layer(x) * self.scale


X = [torch.ones(2, 3), torch.ones(2, 3)]


@BOTH
def test_attributes_that_change_in_any_way_are_followed(force_copies):
    model = nn.Sequential(Block(), nn.Dropout(0.0))
    replicas = two(model, force_copies)
    look = lambda r, _: (dict(vars(r[0])), r[1].p, r[1].training)  # noqa: E731 - short
    replicas.run(call, X)
    for change in (
        lambda: setattr(model[0], "scale", 2.0),
        lambda: setattr(model[0], "scale", 2),  # equal, and another type
        lambda: setattr(model[0], "extra", []),
        lambda: setattr(model[0], "extra", []),  # equal, and another list
        lambda: model[0].__dict__.pop("extra"),
        lambda: setattr(model[0], "other", model[0].scale),
        lambda: setattr(model[1], "p", 0.25),
        model.eval,
    ):
        change()
        (first, *one), (second, *two_) = replicas.run(look, [0, 1])
        assert one == two_
        own = {"_modules", "_parameters", "_buffers", "_is_replica", "zero_grad", "extra"}
        assert first.keys() | own == second.keys() | own
        assert all(first[name] is second[name] for name in first.keys() - own)


@BOTH
def test_what_a_replica_sets_on_itself_is_lost(force_copies):
    model = nn.Sequential(Block(), nn.Linear(3, 3))
    replicas = two(model, force_copies)

    def spoil(replica, part):
        if part:
            replica[0].scale = 77
            replica[0].new = 1

    replicas.run(spoil, [0, 1])
    assert replicas.run(lambda r, _: (r[0].scale, hasattr(r[0], "new")), [0, 1]) == [(1, False)] * 2


@BOTH
def test_what_a_hook_sets_on_a_layer_of_torch_is_lost_on_the_others(force_copies):
    model = nn.Sequential(nn.Linear(3, 3))
    seen = []

    def count(module, args, output):
        seen.append(getattr(module, "calls", 0))
        module.calls = seen[-1] + (1 if args[0] is X[0] else 10)

    handle = model[0].register_forward_hook(count)
    replicas = two(model, force_copies)
    for _ in range(3):
        replicas.run(call, X)
    handle.remove()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    assert replicas.run(lambda r, _: r[0].calls, [0, 1]) == [3, 3]


@BOTH
def test_a_dictionary_of_hooks_that_is_replaced_is_followed(force_copies):
    model = nn.Sequential(nn.Linear(3, 3))
    replicas, seen = two(model, force_copies), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    replicas.run(call, X)
    model[0]._forward_hooks = type(model[0]._forward_hooks)()
    replicas.run(call, X)
    assert seen == [1, 1]


@BOTH
def test_a_full_backward_hook_that_is_registered_later_runs_on_every_replica(force_copies):
    model = nn.Sequential(nn.Linear(3, 3))
    replicas, seen = two(model, force_copies), []
    replicas.run(call, X)
    model[0].register_full_backward_hook(lambda *_: seen.append(1))
    torch.cat(replicas.run(call, [x.clone().requires_grad_() for x in X])).sum().backward()
    assert seen == [1, 1]


@BOTH
def test_a_class_that_changes_is_followed(force_copies):
    class Double(Block):
        def forward(self, x):
            return 2 * super().forward(x)

    model = Block()
    replicas = two(model, force_copies)
    before = replicas.run(call, X)[1]
    model.__class__ = Double
    torch.testing.assert_close(replicas.run(call, X)[1], 2 * before)


@BOTH
def test_parameters_that_change_their_names_are_followed(force_copies):
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    replicas = two(model, force_copies)
    replicas.run(lambda r, _: None, [0, 1])
    model.a, model.b = model.b, model.a
    assert replicas.run(lambda r, _: r.a.item(), [0, 1]) == [1.0, 1.0]


@BOTH
def test_an_alias_of_a_layer_that_moves_on_leads_to_the_twin_of_the_other_one(force_copies):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    object.__setattr__(model, "current", model[0])
    replicas = two(model, force_copies)
    assert replicas.run(lambda r, _: r.current is r[0], [0, 1]) == [True, True]
    object.__setattr__(model, "current", model[1])
    assert replicas.run(lambda r, _: r.current is r[1], [0, 1]) == [True, True]


def on_meta(model):
    """Return the modules of a model on a second device; the meta device needs no hardware."""
    structure = _replica_modules.Structure(model, torch.device("cpu"))
    modules = _replica_modules.ReplicaModules(
        structure, _mirror.OriginalBuffers(list(model.modules())), torch.device("meta"), copies=True
    )

    def sync():
        assert structure.is_current()
        modules.sync()
        return modules.root

    return sync


def test_a_tensor_that_is_a_plain_attribute_is_on_the_replicas_device():
    model = Block()
    model.table = torch.ones(3)
    model.kept = torch.ones(3, requires_grad=True)
    sync = on_meta(model)
    first = sync()
    assert first.table.device.type == "meta"
    assert sync().table is first.table
    assert first.kept is model.kept  # a part of somebody's graph


def test_a_table_that_is_built_in_the_first_forward_or_changed_is_moved_again():
    model = Block()
    model.table = None
    sync = on_meta(model)
    assert sync().table is None
    model.table = torch.ones(3)
    first = sync().table
    assert first.device.type == "meta"
    model.table.add_(1)
    assert sync().table is not first
