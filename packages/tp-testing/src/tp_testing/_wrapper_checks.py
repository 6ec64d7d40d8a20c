"""The conformance tests of modules that wrap replicas of another module."""

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from tp_core import available_devices
from tp_core.random import preserve_rng_state, seed_torch
from tp_core.replicas import Replicas, ReplicaWrapper

COPIES = pytest.mark.parametrize("force_copies", [False, True], ids=["shared", "copied"])
COMPILERS = pytest.mark.parametrize(
    ("backend", "force_copies"),
    [("eager", False), ("aot_eager", True)],
    ids=["eager, shared", "traced, copied"],
)
CPUS = ("cpu", "cpu")


class _Wrapped:
    """The methods that both suites need of a wrapper."""

    def wrap(self, module: nn.Module, devices: Sequence[str]) -> ReplicaWrapper:
        """Return the wrapper of ``module`` on these devices."""
        raise NotImplementedError

    def output(self, wrapper: Callable[..., Any], x: Tensor) -> Tensor:
        """Return the whole output for the whole batch ``x``, (rows, features), over two devices."""
        raise NotImplementedError


class WrapperConformance(_Wrapped):
    """A wrapper that is compiled computes what the plain module computes.

    A subclass, with a name that begins with ``Test``, defines `wrap` and `output`.
    """

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [
        # The compiler reads .grad of all tensors and hides torch's warning about it; inductor scripts.
        pytest.mark.filterwarnings("ignore:The .grad attribute"),
        pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    ]

    @COMPILERS
    def test_a_wrapper_that_is_compiled_is_right(self, backend: str, force_copies: bool) -> None:
        torch.compiler.reset()
        module = small_net()
        self.check(torch.compile(self.wrapped(module, force_copies), backend=backend), module)

    @COPIES
    def test_compiling_a_wrapper_traces_nothing_of_what_splits_and_joins(self, force_copies: bool) -> None:
        graphs = _Graphs()
        module = small_net()
        self.check(torch.compile(self.wrapped(module, force_copies), backend=graphs.backend), module)
        assert graphs.count == 0

    @COMPILERS
    def test_a_wrapper_that_is_compiled_in_place_is_right(self, backend: str, force_copies: bool) -> None:
        torch.compiler.reset()
        module = small_net()
        wrapper = self.wrapped(module, force_copies)
        wrapper.compile(backend=backend)
        self.check(wrapper, module)

    def test_compiling_a_wrapper_in_place_compiles_the_module_on_every_replica(self) -> None:
        graphs = _Graphs()
        wrapper = self.wrap(small_net(), CPUS)
        wrapper.compile(backend=graphs.backend, dynamic=False)
        self.output(wrapper, torch.randn(4, 3).double())
        assert graphs.count >= 2

    def test_a_wrapper_of_a_compiled_module_can_be_compiled(self) -> None:
        graphs = _Graphs()
        module = small_net()
        compiled: Any = torch.compile(module, backend=graphs.backend)
        self.check(torch.compile(self.wrap(compiled, CPUS), backend=graphs.backend), module)
        assert graphs.count == 2, "one for each replica of the module, and none of the wrapper"

    def check(self, wrapper: Any, module: nn.Module) -> None:
        """Compare outputs and gradients of three steps with a plain copy of ``module``."""
        plain = copy.deepcopy(module)
        for seed in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).double()
            output, expected = self.output(wrapper, x), plain(x)
            torch.testing.assert_close(output, expected)
            for model, y in ((module, output), (plain, expected)):
                model.zero_grad()
                y.square().sum().backward()
            gradients = [p.grad for p in module.parameters()]
            torch.testing.assert_close(gradients, [p.grad for p in plain.parameters()])
            with torch.no_grad():
                for parameter in (*module.parameters(), *plain.parameters()):
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)

    def wrapped(self, module: nn.Module, force_copies: bool) -> ReplicaWrapper:
        """Return a wrapper with replicas that share the parameters of ``module``, or have copies."""
        wrapper = self.wrap(module, CPUS)
        wrapper._replicas = Replicas(module, CPUS, force_copies=force_copies)
        return wrapper


class GpuWrapperConformance(_Wrapped):
    """A wrapper on an accelerator; skipped where there is none."""

    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [
        pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
    ]

    def test_a_step_leaves_no_memory_behind_without_the_garbage_collector(self) -> None:
        device = str(available_devices()[0])
        model = self.wrap(nn.Linear(512, 512).to(device), (device, device))
        gc.collect()
        gc.disable()
        try:
            allocated = []
            for _ in range(5):
                self.output(model, torch.randn(64, 512, device=device)).square().mean().backward()
                model.zero_grad()
                allocated.append(torch.accelerator.memory_allocated(device))
        finally:
            gc.enable()
        assert allocated[2] == allocated[3] == allocated[4]


class _Graphs:
    """A backend of the compiler that counts its graphs."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.count = 0

    def backend(self, graph: Callable[..., Any], _: Any) -> Callable[..., Any]:
        self.count += 1
        return graph


def small_net() -> nn.Module:
    with preserve_rng_state():
        seed_torch(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
