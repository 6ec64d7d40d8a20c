"""A backend that is asked whether it fits changes nothing."""

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tp_core._contracts._memory import Footprint, MemoryNeed
from tp_core._contracts._verdict import Verdict
from tp_core.testing._bodies import make_job, on_cpu
from tp_core.testing._kit import PooledKit

__all__ = ["AssessChecks", "environment_now"]


FREE = 2**40


class AssessChecks(PooledKit):
    """``assess()`` returns a verdict, and has no side effects."""

    def test_it_has_a_name_and_fits_the_job(self) -> None:
        assert isinstance(self.backend.name, str)
        assert self.backend.name
        for first, second in self.everywhere(_assessed_twice):
            assert first == second, "assess() must not depend on having been called before"
            assert isinstance(first, Verdict)
            assert first.is_fit, first.reason

    def test_assess_answers_where_no_model_is_known_yet(self) -> None:
        for verdict in self.everywhere(_assessed_without_a_model):
            assert isinstance(verdict, Verdict)

    def test_what_it_needs_of_memory_is_estimated_from_what_training_takes(self) -> None:
        for nothing, little, much in self.everywhere(_needs):
            assert nothing is None, "estimate_memory() has nothing to go by without a footprint"
            assert isinstance(little, MemoryNeed)
            assert isinstance(much, MemoryNeed)
            assert little.free == much.free == FREE
            assert little.fits
            assert not much.fits, f"no device of {FREE} bytes holds a thousandth of that model: {much}"

    def test_assess_changes_nothing_in_the_process(self) -> None:
        for effects in self.everywhere(_effects_of_assess):
            assert not effects, f"assess() must have no side effects: {', '.join(effects)}"

    def test_assess_leaves_the_model_alone(self) -> None:
        assert all(self.everywhere(_left_the_model_alone)), "assess() must not change the model"


# -- on every rank --------------------------------------------------------------------------------


def _assessed_twice(kit: AssessChecks) -> tuple[Any, Any]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    return backend.assess(job), backend.assess(job)


def _assessed_without_a_model(kit: AssessChecks) -> Any:
    return kit.backend().assess(make_job(kit))


def _needs(kit: AssessChecks) -> tuple[Any, Any, Any]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    little = Footprint(weights=10, gradients=10, optimizer=20, activations=30, with_gradients=40)
    large = 1000 * FREE
    much = Footprint(weights=large, gradients=large, optimizer=large, activations=large, with_gradients=large)
    first, second = (replace(job, footprint=each, free_nbytes=FREE) for each in (little, much))
    return backend.estimate_memory(job), backend.estimate_memory(first), backend.estimate_memory(second)


def _effects_of_assess(kit: AssessChecks) -> list[str]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    before = environment_now()
    with _watched() as done:
        backend.assess(job)
        backend.assess(job)
        backend.estimate_memory(job)
    after = environment_now()
    changed = [f"{what} changed" for what in before if before[what] != after[what]]
    return [*changed, *sorted(set(done))]


def _left_the_model_alone(kit: AssessChecks) -> bool:
    model = kit.make_model()
    before = on_cpu(model.state_dict())
    facts = _facts(model)
    kit.backend().assess(make_job(kit, model=model))
    after = on_cpu(model.state_dict())
    same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    return same and facts == _facts(model)


def _facts(model: Any) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [type(module) for module in model.modules()],
        [module.training for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [(id(t), t.requires_grad, t.grad is None, t.device) for t in tensors],
    ]


def environment_now() -> dict[str, Any]:
    """Return what of a process a plugin could change, by what to call it."""
    numpy = sys.modules.get("numpy")
    return {
        "environment variables": dict(os.environ),
        "the current folder": str(os.path.realpath(os.curdir)),
        "torch's generator": torch.get_rng_state().tolist(),
        "Python's generator": random.getstate(),
        "numpy's generator": None if numpy is None else str(numpy.random.get_state()),
        "torch's default type": torch.get_default_dtype(),
        "the mode of gradients": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "the process group": dist.is_available() and dist.is_initialized(),
        "the threads": {t.ident for t in threading.enumerate()},
    }


# -- what it does outside of the process ----------------------------------------------------------

_ACTS = {
    "os.mkdir": "a folder was made",
    "os.remove": "a file was removed",
    "os.rename": "a file was renamed",
    "os.rmdir": "a folder was removed",
    "os.fork": "a process was started",
    "os.forkpty": "a process was started",
    "os.posix_spawn": "a process was started",
    "os.system": "a process was started",
    "subprocess.Popen": "a process was started",
    "socket.bind": "a port was opened",
    "socket.connect": "a connection was made",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC

_seen: list[str] | None = None


@contextmanager
def _watched() -> Iterator[list[str]]:
    """Give a list of what is done to files, processes and connections meanwhile."""
    global _seen  # noqa: PLW0603 - audit hooks cannot be removed, so there is one
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_notice)
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


_hooked: list[bool] = []


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _ACTS:
        _seen.append(_ACTS[event])
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
        path = str(arguments[0])
        # The first import of a module writes its bytecode, whoever imports it.
        if "__pycache__" not in path and path != os.devnull:
            _seen.append(f"{path} was opened for writing")
