"""Subclasses that override the steps of nn.DataParallel, and the steps called one by one."""

import threading
import warnings

import pytest
import torch
from torch import nn
from tp_core.errors import ConfigError, ModelError
from tp_dp_gather import DataParallel, gather, parallel_apply, replicate, scatter, sort_by_device

D = ["cpu", "cpu"]
X = torch.arange(8.0).reshape(4, 2)


def test_an_overridden_scatter_makes_the_parts():
    class ByColumns(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            (x,) = inputs
            return [(piece,) for piece in x.split([1, 3])], [kwargs] * 2

    parts = ByColumns(nn.Identity(), D, gather_to_one_device=False)(X)
    assert [p.shape[0] for p in parts] == [1, 3]


def test_an_overridden_scatter_may_build_on_the_inherited_one():
    class Doubled(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            parts, keywords = super().scatter(inputs, kwargs, device_ids)
            return [(2 * x,) for (x,) in parts], keywords

    assert torch.equal(Doubled(nn.Identity(), D)(X), 2 * X)


def test_an_overridden_gather_has_the_last_word():
    class InParts(DataParallel):
        def gather(self, outputs, output_device):
            return outputs, output_device

    outputs, device = InParts(nn.Identity(), D)(X)
    assert [o.shape[0] for o in outputs] == [2, 2]
    assert device == torch.device("cpu")


def test_with_one_device_an_overridden_gather_is_left_out_as_in_torch():
    class Never(DataParallel):
        def gather(self, outputs, output_device):
            raise AssertionError

    assert torch.equal(Never(nn.Identity(), ["cpu"])(X), X)


def test_an_overridden_replicate_prepares_the_modules_that_run():
    class Numbered(DataParallel):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            for i, replica in enumerate(replicas):
                for child in replica.modules():
                    child.number = i
            return replicas

    class Tells(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return x.new_full((len(x),), self.number + 10 * self.inner.number)

    wrapped = Numbered(Tells(), D)
    for _ in range(2):
        assert wrapped(X).tolist() == [0, 0, 11, 11]


def test_an_overridden_parallel_apply_runs_the_replicas():
    class OneByOne(DataParallel):
        def parallel_apply(self, replicas, inputs, kwargs):
            return [r(*i, **k) + 1 for r, i, k in zip(replicas, inputs, kwargs, strict=True)]

    model = nn.Linear(2, 3)
    output = OneByOne(model, D)(X)
    torch.testing.assert_close(output, model(X) + 1)
    output.sum().backward()
    assert model.weight.grad.tolist() == [[12.0, 16.0]] * 3


def test_a_method_that_one_object_has_is_called_too():
    wrapped = DataParallel(nn.Identity(), D)
    wrapped.gather = lambda outputs, device: len(outputs)
    assert wrapped(X) == 2


def test_a_subclass_with_a_forward_of_its_own_finds_the_steps():
    class Criterion(DataParallel):
        """Outputs that are in parts go in, and one loss comes out."""

        def forward(self, outputs, *targets, **kwargs):
            targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(outputs)])
            pairs = [(o, *t) for o, t in zip(outputs, targets, strict=True)]
            return self.gather(self.parallel_apply(replicas, pairs, kwargs), self.output_device).mean()

    loss = Criterion(nn.MSELoss(), D)((X[:2], X[2:]), torch.zeros(4, 2))
    torch.testing.assert_close(loss, nn.functional.mse_loss(X, torch.zeros(4, 2)))


@pytest.mark.parametrize("copies", [False, True, "flat"])
def test_the_steps_of_a_subclass_train_as_the_module_by_itself(copies):
    class Plain(DataParallel):
        def replicate(self, module, device_ids):
            return super().replicate(module, device_ids)

    from tp_core.replicas import Replicas

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    wrapped = Plain(models[1], D)
    wrapped._replicas = Replicas(models[1], D, force_copies=copies)
    for model, run in zip(models, (models[0], wrapped), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            run(X).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


def test_parallel_apply_runs_in_threads_and_takes_bare_inputs():
    barrier = threading.Barrier(2, timeout=800)

    def meet(x):
        barrier.wait()
        return x

    assert DataParallel(nn.Identity(), D).parallel_apply([meet, meet], [1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (([(X,)] * 3, [{}] * 3), "scatter must return 1 to 2 parts, one per device, got 3"),
        (([(X,)] * 2, [{}]), "expected keyword arguments for 2 parts, got those of 1"),
    ],
)
def test_what_a_scatter_returns_is_looked_at(returned, message):
    wrapped = DataParallel(nn.Identity(), D)
    wrapped.scatter = lambda *_: returned
    with pytest.raises(ConfigError, match=message):
        wrapped(X)


def test_a_scatter_of_nothing_calls_the_module_once():
    class Constant(nn.Module):
        def forward(self):
            return 7

    wrapped = DataParallel(Constant(), D, gather_to_one_device=False)
    wrapped.scatter = lambda *_: ([], [])
    assert wrapped() == (7,)


def test_the_functions_are_the_steps_of_the_wrapper():
    module = nn.Linear(2, 3)
    pieces = scatter(X, D)
    replicas = replicate(module, D)
    outputs = parallel_apply(replicas, pieces, devices=D)
    torch.testing.assert_close(gather(outputs, -1), module(X))
    gather(outputs, "cpu").sum().backward()
    assert module.weight.grad.tolist() == [[12.0, 16.0]] * 3


def test_scatter_splits_what_is_nested_and_keeps_the_rest_in_each_piece():
    pieces = scatter({"x": X, "name": "n"}, ["cpu"] * 3)
    assert [p["x"].shape[0] for p in pieces] == [2, 1, 1]
    assert [p["name"] for p in pieces] == ["n"] * 3
    assert scatter("n", D) == ("n",)
    torch.autograd.gradcheck(lambda x: scatter(x, D), (X.double().requires_grad_(),))


def test_detached_replicas_leave_the_modules_gradients_alone():
    module = nn.Linear(2, 3)
    first, second = replicate(module, D, detach=True)
    assert first is module
    assert second is not module


def test_parts_are_sorted_by_where_they_are():
    outputs = [{"x": torch.ones(1, device="meta")}, {"x": torch.ones(2)}]
    assert [o["x"].device.type for o in sort_by_device(outputs)] == ["cpu", "meta"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gather([], "cpu"), ConfigError, "no outputs to gather"),
        (lambda: parallel_apply([len], ["a", "b"]), ConfigError, "1 modules need as many inputs and devices"),
        (
            lambda: DataParallel(nn.Identity(), D).parallel_apply([len], ["a", "b"]),
            ConfigError,
            "expected inputs for 1 replicas, got 2",
        ),
        (lambda: replicate(nn.LazyLinear(2), D), ModelError, "has no shape yet"),
        (
            lambda: DataParallel(nn.Identity(), D).replicas.modules(3),
            ConfigError,
            "1 to 2 replicas, .* got 3",
        ),
        (
            lambda: DataParallel(nn.Identity(), D).replicas.run(len, [1, 2], modules=[nn.Identity()]),
            ConfigError,
            "one module per part, got 1 modules and 2 parts",
        ),
    ],
)
def test_wrong_arguments_of_the_steps_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.filterwarnings("always")
def test_zero_grad_inside_of_forward_warns_and_clears_nothing(copies):
    from tp_core.replicas import Replicas

    class Clears(nn.Linear):
        def forward(self, x):
            self.zero_grad()
            return super().forward(x)

    wrapped = DataParallel(Clears(2, 2), D)
    wrapped._replicas = Replicas(wrapped.module, D, force_copies=copies)
    wrapped.module.weight.grad = torch.ones(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(X)
    expected = "Calling .zero_grad() from a module created with nn.DataParallel() has no effect"
    assert [str(w.message)[: len(expected)] for w in caught] == [expected] * 2
    assert wrapped.module.weight.grad.sum() == 4
    wrapped.zero_grad()
    assert wrapped.module.weight.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_keywords": ["mask"]}, r"option cpu_keywords=\['mask'\] \(everything is moved"),
        ({"minibatch": True}, "pass inputs_are_scattered=True"),
        ({"batch_outputs": False}, "pass gather_to_one_device=False"),
        ({"nonsense": 1}, r"DataParallel does not have the option nonsense=1 \(unknown\)"),
        ({"except_keyword": ["a"]}, r"\(unknown; did you mean 'except_keywords'\?\)"),
        ({"gather_to_one_device": []}, "gather_to_one_device must be True or False, got \\[\\]"),
    ],
)
def test_options_of_other_wrappers_are_refused_with_what_to_say_instead(options, message):
    with pytest.raises(ConfigError, match=message):
        DataParallel(nn.Identity(), D, **options)


@pytest.mark.parametrize("option", ["samples", "broadcast"])
def test_a_name_that_no_argument_has_is_warned_of(option):
    with pytest.warns(match=f"{option} names 'inputs', and no argument is called so.* 'input'"):
        DataParallel(nn.Linear(2, 2), D, **{option: ("inputs",)})(X)
    with pytest.warns(match=f"{option} names 'text', .* did you mean 'texts'"):
        scatter({"x": X, "texts": X}, D, **{option: "text"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataParallel(nn.Linear(2, 2), D, **{option: "input"})(X)  # a parameter, also where it is not named


def test_options_of_other_wrappers_that_say_nothing_are_taken():
    DataParallel(nn.Identity(), D, cpu_keywords=[], minibatch=False, batch_outputs=True)


def test_minus_one_is_the_cpu():
    assert DataParallel(nn.Identity(), D, output_device=-1).output_device == torch.device("cpu")


def states():
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    return plain, {f"module.{name}": value for name, value in plain.items()}


@pytest.mark.parametrize("state", states(), ids=["plain", "wrapped"])
def test_states_load_with_and_without_module_in_front(state):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = DataParallel(module, D)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    wrapped.load_state_dict(state)
    assert torch.equal(module[0].weight, next(iter(state.values())))
    outer = nn.ModuleList([DataParallel(module, D)])
    outer.load_state_dict({f"0.{name}": value for name, value in state.items()})
    with pytest.raises(RuntimeError, match="nonsense"):
        wrapped.load_state_dict({**state, "nonsense": torch.ones(1)})
