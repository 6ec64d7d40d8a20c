"""A model's and an optimizer's state goes by names, into files and back."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from tp_core.errors import ModelError, StateError
from tp_core.state import (
    collect_state,
    collect_values,
    from_json,
    hook_steps,
    open_tensors,
    restore_state,
    restore_values,
    to_json,
    write_tensors,
    write_whole,
)


def uncut(parameter, value):
    return value


def make_model(seed=0, names="abc"):
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in names})


def train(model, optimizer, steps=3):
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=generator)
            for layer in model.values():
                x = layer(x).tanh()
            loss = x.square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.fixture(params=["file", "folder"])
def save(request, tmp_path):
    """Write tensors as one rank does, or as several do, and return where."""

    def write(tensors):
        path = tmp_path / "state"
        if request.param == "file":
            write_whole(tensors, path)
        else:
            write_tensors(tensors, path)
        return path

    return write


def saved(save, model, optimizer):
    return save(collect_state(model, optimizer, cut=uncut))


def load(model, optimizer, path, **kwargs):
    restore_state(model, optimizer, open_tensors(path), cut=uncut, **kwargs)


def entries(model, optimizer):
    """What the optimizer keeps of each parameter, by name."""
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def check_goes_on(model, optimizer, fresh, other):
    """Both are trained on, and lead to the same."""
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))
    assert equal(entries(fresh, other), entries(model, optimizer))
    train(model, optimizer)
    train(fresh, other)
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))


ORDERS = {
    "the same": lambda model: list(model.parameters()),
    "reversed": lambda model: list(model.parameters())[::-1],
    "biases first": lambda model: sorted(model.parameters(), key=lambda p: p.dim()),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_parameter_gets_its_own_state_in_whatever_order_they_come(save, order):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    path = saved(save, model, optimizer)
    other = Adam(ORDERS[order](fresh), lr=0.5)
    load(fresh, other, path)
    assert other.param_groups[0]["lr"] == 0.01
    check_goes_on(model, optimizer, fresh, other)


def groups_of(model, *names, **lrs):
    return [{"params": list(model[n].parameters()), "lr": lrs.get(n, 0.1)} for n in names]


def test_settings_follow_the_parameters_of_their_group(save):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = SGD(groups_of(model, "a", "b", "c", a=0.1, b=0.2, c=0.3), momentum=0.9)
    train(model, optimizer)
    path = saved(save, model, optimizer)
    other = SGD(groups_of(fresh, "c", "a", "b"), momentum=0.5)
    load(fresh, other, path)
    assert [(g["lr"], g["momentum"]) for g in other.param_groups] == [(0.3, 0.9), (0.1, 0.9), (0.2, 0.9)]
    check_goes_on(model, optimizer, fresh, other)


def test_groups_may_be_split_or_joined_where_their_settings_were_the_same(save):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = SGD(groups_of(model, "a", "b", "c", c=0.3), momentum=0.9)
    train(model, optimizer)
    path = saved(save, model, optimizer)
    joined = [*fresh["b"].parameters(), *fresh["a"].parameters()]
    other = SGD([{"params": [fresh["c"].bias]}, {"params": joined}, {"params": [fresh["c"].weight]}], lr=1)
    load(fresh, other, path)
    assert [g["lr"] for g in other.param_groups] == [0.3, 0.1, 0.3]
    check_goes_on(model, optimizer, fresh, other)


def test_a_group_of_parameters_with_different_settings_is_refused_by_name(save):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = SGD(groups_of(model, "a", "b", "c", c=0.3), momentum=0.9)
    path = saved(save, model, optimizer)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(
        StateError,
        match=r"group 0 has 'a.weight' and 'c.weight', which were in groups of different 'lr': 0.1 and 0.3",
    ):
        load(fresh, SGD(fresh.parameters(), lr=1, momentum=0.9), path)
    assert equal(dict(fresh.state_dict()), dict(before))


def test_groups_in_another_order_are_refused_where_their_order_matters(save):
    model, fresh = make_model(), make_model(seed=1)
    path = saved(save, model, SGD(groups_of(model, "a", "b", "c")))
    load(fresh, SGD(groups_of(fresh, "a", "b", "c")), path, same_groups=True)
    for names in (["c", "b", "a"], ["a", "b"]):
        groups = groups_of(fresh, *names)
        if len(names) == 2:
            groups[1]["params"] += fresh["c"].parameters()
        with pytest.raises(StateError, match="groups come in another order, or hold other parameters"):
            load(fresh, SGD(groups), path, same_groups=True)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("abc", "ab", r"an optimizer with the parameter 'c.bias' \(and 1 more\), which this one lacks"),
        ("ab", "abc", r"an optimizer without the parameter 'c.bias' \(and 1 more\), which this one has"),
    ],
)
def test_a_parameter_that_is_missing_or_new_is_named_and_nothing_is_changed(save, before, now, words):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = SGD(groups_of(model, *before), momentum=0.9)
    train(model, optimizer)
    path = saved(save, model, optimizer)
    old, other = copy.deepcopy(fresh.state_dict()), SGD(groups_of(fresh, *now), momentum=0.9)
    with pytest.raises(StateError, match=words):
        load(fresh, other, path)
    assert equal(dict(fresh.state_dict()), dict(old))
    assert not other.state


def test_a_parameter_that_is_not_the_models_is_refused(save):
    model = make_model()
    optimizer = SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    with pytest.raises(ModelError, match=r"a parameter of shape \(7,\) that is not the model's"):
        saved(save, model, optimizer)


def test_frozen_parameters_and_those_without_state_are_left_as_they_are(save):
    def make(seed):
        model = make_model(seed)
        model["b"].requires_grad_(requires_grad=False)
        return model, Adam(list(model.parameters())[:: 1 if seed else -1], lr=0.01)

    (model, optimizer), (fresh, other) = make(0), make(1)
    train(model, optimizer)
    path = saved(save, model, optimizer)
    load(fresh, other, path)
    assert fresh["b"].weight not in other.state
    check_goes_on(model, optimizer, fresh, other)


def test_a_tied_parameter_keeps_its_state_under_any_of_its_names(save):
    def make(first, second, seed):
        model = make_model(seed, names=first + second)
        model[second].weight = model[first].weight
        return model

    model, fresh = make("a", "b", 0), make("b", "a", 1)
    optimizer = Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    other = Adam(fresh.parameters(), lr=0.5)
    load(fresh, other, saved(save, model, optimizer))
    assert equal(other.state[fresh["a"].weight], optimizer.state[model["a"].weight])
    assert fresh["a"].weight is fresh["b"].weight


class Curious(torch.optim.Optimizer):
    """Keeps what optimizers of other people keep: numbers, text, lists, counters, state of the whole."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "scale": torch.tensor([1.0, 2.0]), "betas": (0.9, 0.99)})

    def step(self, closure=None):
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"count": torch.tensor(0), "name": "row", "rows": torch.zeros(p.shape[0] + 1)}
                    state |= {"past": [], "pair": (1, None), "by": {"a.b": torch.zeros(2), 3: 0.5}}
                state["count"] += 1
                state["wide"] = p.detach().double()
                state["past"] = [*state["past"], p.detach().mean()][-2:]
                p.data.add_(p.grad, alpha=-group["lr"])
        total = self.state.setdefault("global", {"steps": 0, "norm": torch.zeros(())})
        total["steps"] += 1
        total["norm"] += 1


def test_state_of_any_shape_and_kind_comes_back_as_it_was(save):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = Curious(model.parameters())
    train(model, optimizer)
    optimizer.param_groups[0]["scale"] = torch.tensor([5.0, 6.0])
    path = saved(save, model, optimizer)
    other = Curious(list(fresh.parameters())[::-1])
    load(fresh, other, path)
    assert equal(other.state["global"], optimizer.state["global"])
    assert other.state[fresh["a"].weight]["count"].dtype == torch.int64
    assert other.state[fresh["a"].weight]["wide"].dtype == torch.float64
    assert other.param_groups[0]["scale"].tolist() == [5.0, 6.0]
    assert other.param_groups[0]["betas"] == (0.9, 0.99)
    check_goes_on(model, optimizer, fresh, other)


def lbfgs(parameters):
    return torch.optim.LBFGS(list(parameters), lr=0.1, history_size=3)


def test_an_optimizer_with_state_of_all_parameters_goes_on_in_the_same_order(save):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = lbfgs(model.parameters())
    train(model, optimizer)
    path = saved(save, model, optimizer)
    other = lbfgs(fresh.parameters())
    load(fresh, other, path)
    assert len(entries(fresh, other)["a.weight"]["old_dirs"]) == 3
    check_goes_on(model, optimizer, fresh, other)


def test_an_optimizer_with_state_of_all_parameters_is_refused_in_another_order(save):
    model, fresh = make_model(), make_model(seed=1)
    optimizer = lbfgs(model.parameters())
    train(model, optimizer)
    with pytest.raises(
        StateError, match=r"LBFGS keeps its state of all parameters at once.*was 'a.weight' and is 'c.bias'"
    ):
        load(fresh, lbfgs(list(fresh.parameters())[::-1]), saved(save, model, optimizer))


def test_numbers_that_are_tensors_stay_so_and_others_stay_numbers(save):
    model = make_model()
    path = saved(save, model, Adam(model.parameters(), lr=torch.tensor(0.25)))
    for lr in (0.5, torch.tensor(0.5)):
        other = Adam(model.parameters(), lr=lr)
        load(model, other, path)
        assert equal(other.param_groups[0]["lr"], 0.25 if isinstance(lr, float) else torch.tensor(0.25))


def test_names_that_came_with_the_parameters_are_those_of_the_new_optimizer(save):
    model = make_model()
    path = saved(save, model, SGD(model.named_parameters(), lr=0.1))
    turned = list(model.named_parameters())[::-1]
    other = SGD(turned, lr=0.2)
    load(model, other, path)
    assert other.param_groups[0]["param_names"] == [name for name, _ in turned]


def test_tensors_that_were_on_an_accelerator_return_to_the_one_that_is_here(save):
    value = {"there": [torch.ones(2, device="meta")], "here": torch.ones(3)}
    plain, tensors = collect_values("state.x", value)
    path = save({name: torch.ones(tensor.shape) for name, tensor in tensors.items()})
    restored = restore_values(from_json(to_json("it", plain)), open_tensors(path), torch.device("meta"))
    on_the_cpu = restore_values(plain, open_tensors(path))
    assert restored["there"][0].device.type == "meta"
    assert torch.equal(restored["here"], value["here"])
    assert torch.equal(on_the_cpu["there"][0], torch.ones(2))


def test_a_state_without_an_optimizer_says_so(save):
    model = make_model()
    path = save(collect_state(model, None, cut=uncut))
    load(make_model(seed=1), None, path)
    with pytest.raises(StateError, match=r"has no state of an optimizer: it lacks optimizer.values(\n|$)"):
        load(model, SGD(model.parameters()), path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (b'{"format": 99}', r"in format 99, and this version reads 1"),
        (b"{", "is damaged: optimizer.values cannot be read"),
        (b"[1]", "is damaged: optimizer.values cannot be read"),
    ],
)
def test_another_format_and_damage_are_refused(save, values, words):
    model = make_model()
    tensors = collect_state(model, SGD(model.parameters()), cut=uncut)
    tensors["optimizer.values"] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    with pytest.raises(StateError, match=words):
        load(model, SGD(model.parameters()), save(tensors))


def test_what_another_program_wrote_of_an_optimizer_is_refused(save):
    model = make_model()
    tensors = collect_state(model, None, cut=uncut) | {"optimizer.0.momentum_buffer": torch.ones(3, 3)}
    with pytest.raises(StateError, match="was written by another program, or by an earlier version"):
        load(model, SGD(model.parameters()), save(tensors))


def test_a_tensor_that_a_module_keeps_besides_is_given_back_to_it(save):
    class WithNotes(nn.Linear):
        note = torch.zeros(2)

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    model, fresh = WithNotes(2, 2), WithNotes(2, 2)
    model.note = torch.tensor([1.0, 2.0])
    load(fresh, None, save(collect_state(model, None, cut=uncut)))
    assert fresh.note.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("from_compiled", [False, True])
def test_compiled_modules_are_written_under_plain_names_and_load_both_ways(save, from_compiled):
    def compiled(model):
        return torch.compile(model, backend="eager")

    plain, other = make_model(), make_model(seed=1)
    other["a"] = compiled(other["a"])
    pairs = [(plain, plain), (compiled(other), other)]  # what is given, and what is in it
    (source, trained), (target, read) = pairs[::-1] if from_compiled else pairs
    optimizer, fresh = Adam(source.parameters(), lr=0.01), Adam(target.parameters(), lr=0.5)
    train(trained, optimizer)
    tensors = collect_state(source, optimizer, cut=uncut)
    assert not any("_orig_mod" in name for name in tensors)
    load(target, fresh, save(tensors))
    assert torch.equal(trained["a"].weight, read["a"].weight)
    assert equal(fresh.state[read["c"].bias], optimizer.state[trained["c"].bias])


def test_hooks_of_a_step_within_a_step_run_once_and_after_an_error_too():
    class Twice(SGD):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise ValueError("fails")

    model = make_model()
    SGD(model.parameters(), lr=0.1)  # from here on torch calls hooks for the base's step, too
    optimizer, seen = Twice(model.parameters(), lr=0.1), []
    hook_steps(optimizer, before=lambda *_: seen.append("before"), after=lambda *_: seen.append("after"))
    optimizer.step()
    optimizer.fails = True
    with pytest.raises(ValueError, match="fails"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert seen == ["before", "after", "before", "before", "after"]
