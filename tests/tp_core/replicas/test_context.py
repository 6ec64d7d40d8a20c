"""What torch and Python keep for each thread reaches every replica."""

import contextvars
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from tp_core.errors import ModelError
from tp_core.replicas import Replicas
from tp_core.replicas._caller import Caller, on_streams  # private: streams of devices that cannot be had here

X = [torch.ones(2, 3), torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)]
VARIABLE = contextvars.ContextVar("VARIABLE", default="nothing")


def call(replica, part):
    return replica(part)


@pytest.fixture(params=[False, True], ids=["shared", "copied"])
def replicas(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return Replicas(model, ["cpu"] * 3, force_copies=request.param)


def test_a_context_variable_has_the_callers_value_in_every_replica(replicas):
    for value in ("one", "two"):
        VARIABLE.set(value)
        assert replicas.run(lambda r, x: VARIABLE.get(), X) == [value] * 3


def test_a_context_variable_that_a_thread_sets_is_its_own(replicas):
    VARIABLE.set("before")
    replicas.run(lambda r, x: VARIABLE.set("a part's own") if x is not X[0] else None, X)
    assert VARIABLE.get() == "before"
    assert replicas.run(lambda r, x: VARIABLE.get(), X) == ["before"] * 3


def test_saved_tensors_are_packed_and_unpacked_on_every_replica(replicas):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number):
        unpacked.append(number)
        return packed[number]

    model, x = replicas.module, torch.cat(X)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model(x)
        for_one = len(packed)
        packed.clear()
        outputs = replicas.run(call, X)
    assert len(packed) == 3 * for_one
    torch.cat(outputs).square().sum().backward()
    assert len(unpacked) >= len(packed) - 3  # a first layer does not need all of them
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_saving_on_the_cpu_gives_the_same_gradients(replicas):
    with torch.autograd.graph.save_on_cpu():
        torch.cat(replicas.run(call, X)).square().sum().backward()
    found = [p.grad.clone() for p in replicas.module.parameters()]
    replicas.module.zero_grad()
    replicas.module(torch.cat(X)).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in replicas.module.parameters()])


def test_hooks_that_are_refused_are_refused_in_every_replica(replicas):
    def refused(replica, x):
        with (
            pytest.raises(RuntimeError, match="not here"),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            pass
        return True

    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert replicas.run(refused, X) == [True] * 3


class Names(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Names, Operations])
def test_a_mode_sees_the_operations_of_every_replica(replicas, mode):
    replicas.run(call, X)
    for_one = mode()
    with torch.no_grad(), for_one:
        replicas.module(X[0])
    for_all = mode()
    with torch.no_grad(), for_all:
        replicas.run(call, X)
    for name in set(for_one.seen):
        assert for_all.seen.count(name) >= 3 * for_one.seen.count(name)


def test_floating_point_operations_are_counted_on_every_replica(replicas):
    with FlopCounterMode(display=False) as whole:
        replicas.module(torch.cat(X)).sum().backward()
    with FlopCounterMode(display=False) as parts:
        torch.cat(replicas.run(call, X)).sum().backward()
    assert parts.get_total_flops() == whole.get_total_flops() > 0


def test_under_a_mode_an_error_names_its_part_and_the_others_run(replicas):
    over = []

    def fail(replica, x):
        if x is X[1]:
            raise ZeroDivisionError
        over.append(x)

    with Names(), pytest.raises(ZeroDivisionError) as caught:
        replicas.run(fail, X)
    assert caught.value.__notes__ == ["in part 1 of 3, on device cpu"]
    assert len(over) == 2


def test_under_a_mode_an_interrupt_ends_the_call(replicas):
    over = []

    def interrupt(replica, x):
        if x is X[1]:
            raise KeyboardInterrupt
        over.append(x)

    with Names(), pytest.raises(KeyboardInterrupt):
        replicas.run(interrupt, X)
    assert len(over) == 1
    assert len(replicas.run(call, X)) == 3


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")  # torch 2.11
def test_a_profiler_that_looks_at_all_threads_sees_every_replica(replicas):
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = torch.profiler.ProfilerActivity.CPU
    for _ in range(2):  # threads have to be there when it begins
        with torch.profiler.profile(activities=[cpu], experimental_config=options) as profiler:
            replicas.run(call, X)
    counts = {e.key: e.count for e in profiler.key_averages()}
    assert counts["aten::linear"] == 6


class Stream:
    """Stands for a stream: says when it is entered."""

    def __init__(self, name, stream_id, entered):
        self.name, self.stream_id, self.entered = name, stream_id, entered

    def __enter__(self):
        self.entered.append(self.name)

    def __exit__(self, *error):
        pass


def test_a_thread_enters_the_callers_side_streams_on_all_devices():
    cpu, entered = torch.device("cpu"), []
    streams = {
        torch.device("cuda:0"): Stream("side", 3, entered),
        torch.device("cuda:1"): Stream("default", 0, entered),
    }
    caller = Caller.capture((cpu,), ("cpu",))._replace(contexts=[partial(on_streams, streams)])
    assert caller.call(lambda replica, part: part, nn.Identity(), 5, device=cpu, rng=nullcontext()) == 5
    assert entered == ["side"]


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own use, once
def test_transforms_of_torch_func_reach_every_replica_that_shares_memory():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    replicas = Replicas(module, ["cpu"] * 3)
    x = torch.randn(6, 3)

    def split(rows):
        return torch.cat(replicas.run(call, rows.chunk(3)))

    transforms = {
        "grad": lambda f: torch.func.grad(lambda rows: f(rows).square().sum())(x),
        "jacrev": lambda f: torch.func.jacrev(f)(x),
        "jacfwd": lambda f: torch.func.jacfwd(f)(x),
        "jvp": lambda f: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        "vmap": lambda f: torch.func.vmap(f)(x.expand(2, 6, 3)),
    }
    for name, transform in transforms.items():
        expected = transform(module)
        torch.testing.assert_close(transform(split), expected, msg=lambda m, n=name: f"{n}: {m}")


def test_transforms_of_torch_func_are_refused_before_they_reach_a_copy():
    module = nn.Linear(3, 2)
    replicas = Replicas(module, ["cpu"] * 2, force_copies=True)
    x = torch.randn(4, 3)

    def total(rows):
        return torch.cat(replicas.run(call, rows.chunk(2))).sum()

    with pytest.raises(ModelError, match=r"torch\.func .* do not follow a module to its copies"):
        torch.func.grad(total)(x)
    torch.testing.assert_close(total(x), module(x).sum())
