"""The functions that a backend's conformance tests run on ranks: sessions, collectives, loaders, state."""

import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tp_core._contracts._job import Footprint
from tp_core._contracts._session import Session
from tp_core._data._loader import PreparedLoader
from tp_core._launch._environment import LaunchEnvironment
from tp_core._launch._process_group import join_process_group
from tp_core._tensors._deferred import build_deferred, materialize
from tp_core.errors import ConfigError, DisagreementError, ModelError
from tp_core.state import whole as whole_of
from tp_core.testing._kit import (
    ConformanceKit,
    State,
    batch_loss,
    data,
    learn,
    loss_of,
    make_job,
    on_cpu,
    open_session,
    prepared,
    whole,
    with_shares,
)

FREE = 2**40


# -- on every rank --------------------------------------------------------------------------------


def assessed_twice(kit: ConformanceKit) -> tuple[Any, Any]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    return backend.assess(job), backend.assess(job)


def assessed_without_a_model(kit: ConformanceKit) -> Any:
    return kit.backend().assess(make_job(kit))


def needs(kit: ConformanceKit) -> tuple[Any, Any, Any]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    little = Footprint(weights=10, gradients=10, optimizer=20, activations=30, with_gradients=40)
    large = 1000 * FREE
    much = Footprint(weights=large, gradients=large, optimizer=large, activations=large, with_gradients=large)
    first, second = (replace(job, footprint=each, free_nbytes=FREE) for each in (little, much))
    return backend.estimate_memory(job), backend.estimate_memory(first), backend.estimate_memory(second)


def effects_of_assess(kit: ConformanceKit) -> list[str]:
    job, backend = make_job(kit, model=kit.make_model()), kit.backend()
    before = environment_now()
    with _watched() as done:
        backend.assess(job)
        backend.assess(job)
        backend.estimate_memory(job)
    after = environment_now()
    changed = [f"{what} changed" for what in before if before[what] != after[what]]
    return [*changed, *sorted(set(done))]


def left_the_model_alone(kit: ConformanceKit) -> bool:
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
    """Return the settings of the process that a plugin could change, by name."""
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
    """Yield a list of the audit events of files, processes and connections in the block."""
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


OPERATIONS: tuple[Any, ...] = ("sum", "mean", "min", "max")


def tensor_of(rank: int) -> Tensor:
    """Return values of which each rank has a largest or a smallest element."""
    return torch.tensor([(rank * 5) % 3, (rank * 2 + 1) % 3, -rank, rank**2], dtype=torch.float64)


# -- on every rank --------------------------------------------------------------------------------


def exchange(kit: ConformanceKit) -> dict[str, Any]:
    with open_session(kit) as session:
        mine = tensor_of(session.data_rank).to(session.device)
        rows = mine[: session.data_rank]
        return {
            "data_size": session.data_size,
            "rows": session.gather(rows).cpu(),
            "objects": session.gather_objects(str(session.rank)),
            "broadcasts": [
                session.broadcast(str(session.rank), src=src) for src in range(session.world_size)
            ],
            **{op: session.reduce(mine, op).cpu() for op in OPERATIONS},
        }


SAMPLES, BATCH_SIZE = 9, 4  # the last batch has one sample
Yielded = tuple[int, list[tuple[Any, Tensor]]]


# -- on every rank --------------------------------------------------------------------------------


def yielded(kit: ConformanceKit, training: bool) -> Yielded:
    """Return, for each batch, the share and the inputs of the step."""
    with prepared(kit) as (session, model):
        loader = DataLoader(data(SAMPLES), batch_size=BATCH_SIZE)
        batches = session.prepare_loader(loader, training=training)
        return session.data_rank, [(batches.share, _inputs(session, model, batch)) for batch in batches]


def _inputs(session: Session, model: nn.Module, batch: Any) -> Tensor:
    """Return the inputs of the step; a backend may run it on several devices at once."""
    met = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        met.append(batch[0].cpu())
        return loss_of(batch_loss()(model, batch))

    with torch.no_grad():
        session.run(step, model, batch)
    return torch.cat(met)


def unsharded(kit: ConformanceKit) -> Tensor:
    with prepared(kit) as (session, model):
        loader = DataLoader(data(SAMPLES), batch_size=BATCH_SIZE)
        batches = session.prepare_loader(loader, shard=False)
        return torch.cat([_inputs(session, model, batch) for batch in batches])


def evaluated(kit: ConformanceKit, samples: int, batch_size: int) -> tuple[int, float]:
    with prepared(kit) as (session, model):
        loader = DataLoader(data(samples), batch_size=batch_size)
        return _mean_loss(session, model, session.prepare_loader(loader, training=False))


def own_samples(data_rank: int) -> int:
    """Return how many samples a rank has that brings its own: each one a batch of two more."""
    return 2 * data_rank + 1


def evaluated_unevenly(kit: ConformanceKit) -> tuple[int, int, float]:
    with prepared(kit) as (session, model):
        loader = DataLoader(data(own_samples(session.data_rank)), batch_size=2)
        found = _mean_loss(session, model, session.prepare_loader(loader, training=False, shard=False))
        return session.data_size, *found


def _mean_loss(session: Session, model: nn.Module, batches: PreparedLoader) -> tuple[int, float]:
    """Return the number of samples that counted on all data ranks, and their mean loss."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        session.sync_buffers(model)
        for batch, share in with_shares(batches):
            loss = loss_of(session.run(batch_loss(), model, batch)).item()
            assert share is not None
            samples = share.samples
            total += torch.tensor([samples, samples * loss], dtype=torch.float64)
    samples, loss_sum = session.reduce(total.to(session.device), "sum").tolist()
    return int(samples), loss_sum / samples


TURNS = 20  # of a rank that waits, after which the one that comes last comes
DEADLINE_S = 60.0  # for these turns: a barrier that lets no other thread run is a barrier too
TYPES = [torch.float64, torch.float32, torch.int64]


REDUCTIONS: Any = {
    "sum": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


def of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    """Return values with their largest elements on different ranks, not all on the first or the last."""
    values = torch.tensor([[rank + 1, -rank], [(rank - 1) ** 2, 7]], dtype=dtype)
    return values / 3 if dtype.is_floating_point else values


def rows(rank: int, fewest: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(2 * (rank + fewest)).reshape(-1, 2) + rank).to(dtype)


def laid_out(shape: tuple[int, ...], rank: int) -> Tensor:
    """Return a tensor of that shape with a memory layout that is not contiguous."""
    size = math.prod(shape)
    backwards = torch.arange(float(size)).reshape(shape[::-1])
    return backwards.permute(*range(len(shape))[::-1]) + rank


# -- on every rank --------------------------------------------------------------------------------


def who(kit: ConformanceKit) -> dict[str, Any]:
    with open_session(kit) as session:
        names = ("rank", "world_size", "local_rank", "data_rank", "data_size", "is_main")
        return {name: getattr(session, name) for name in names} | {
            "local_rank_of_launcher": make_job(kit).environment.local_rank,
            "is_its_device": session.device in session.job.devices,
        }


def who_on_hosts(kit: ConformanceKit) -> dict[str, Any]:
    """Return a session's ranks as on as many hosts as ranks, where each rank is the first of its host."""
    if kit.processes == 1:
        return who(kit)
    hosts = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    with patch.dict(os.environ, hosts):
        return who(kit)


def reduced(kit: ConformanceKit, op: Any, dtype: torch.dtype) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = of_rank(session.data_rank, dtype).to(session.device)
        return session.data_size, session.reduce(mine, op).cpu()


def kept_argument(kit: ConformanceKit) -> bool:
    with open_session(kit) as session:
        mine = of_rank(session.data_rank, torch.float64).to(session.device)
        before = mine.clone()
        for op in ("sum", "mean", "min", "max"):
            session.reduce(mine, op)
        return torch.equal(mine, before)


def reduced_scalar(kit: ConformanceKit) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = torch.tensor(session.data_rank + 1.0, dtype=torch.float64, device=session.device)
        return session.data_size, session.reduce(mine).cpu()


def gathered(kit: ConformanceKit, fewest: int, dtype: torch.dtype) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = rows(session.data_rank, fewest, dtype).to(session.device)
        return session.data_size, session.gather(mine).cpu()


def of_shape(kit: ConformanceKit, shape: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    with open_session(kit) as session:
        mine = laid_out(shape, session.data_rank).to(session.device)
        return session.data_size, session.gather(mine).cpu(), session.reduce(mine).cpu()


def gathered_scalars(kit: ConformanceKit) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        mine = torch.tensor(float(session.data_rank), device=session.device)
        return session.data_size, session.gather(mine).cpu()


def gathered_objects(kit: ConformanceKit) -> list[dict[str, Any]]:
    with open_session(kit) as session:
        return session.gather_objects({"rank": session.rank, "text": "x" * session.rank})


def broadcast(kit: ConformanceKit) -> list[dict[str, int]]:
    with open_session(kit) as session:
        mine = {"from": session.rank}
        return [session.broadcast(mine, src=source) for source in range(session.world_size)]


def meet(kit: ConformanceKit, log: str) -> None:
    """Log before and after each barrier; in each round another rank comes last, and late.

    The clock does not measure how late. A second thread of each waiting rank logs its turns, and a machine
    that is too busy for the rank is too busy for that thread as well.
    """
    with open_session(kit) as session:
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            for round_ in range(session.world_size):
                _meet_once(session, _Log(log, file, round_, session.rank))
        finally:
            os.close(file)


def _meet_once(session: Session, log: "_Log") -> None:
    if log.round_ == session.rank:
        log.wait_for(session.world_size - 1)
        log.write("before")
        session.barrier()
    else:
        with log.turns():
            log.write("before")
            session.barrier()
    log.write("after")


def lines(path: Path | str) -> list[tuple[int, int, str]]:
    """Return round, rank and word of each line of a log."""
    whole = Path(path).read_text().rpartition("\n")[0]  # of the last line, there may be a part
    lines = [line.split() for line in whole.splitlines()]
    return [(int(round_), int(rank), word) for round_, rank, word in lines]


@dataclass(frozen=True, slots=True)
class _Log:
    """One rank's log of one round, in a file of all ranks."""

    path: str
    file: int
    round_: int
    rank: int

    def write(self, word: str) -> None:
        os.write(self.file, f"{self.round_} {self.rank} {word}\n".encode())

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Log the turns of a second thread."""
        done = threading.Event()

        def report() -> None:
            for _ in range(TURNS):
                if done.wait(0.01):
                    return
                self.write("turn")

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def wait_for(self, others: int) -> None:
        """Wait until each other rank has passed the barrier, or has had its turns without passing it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            mine = [(rank, word) for number, rank, word in lines(self.path) if number == self.round_]
            came = {rank for rank, word in mine if word == "before"}
            if len([r for r in came if (r, "after") in mine or mine.count((r, "turn")) == TURNS]) == others:
                return
            time.sleep(0.005)


def disagreed(kit: ConformanceKit) -> tuple[bool, str]:
    with open_session(kit) as session:
        session.check_agreement("the number", 3)
        try:
            session.check_agreement("the number", session.rank)
        except DisagreementError as error:
            return True, str(error)
        return session.world_size == 1, ""


_BEHIND_S = 1.0
MEETING_S = 120.0  # for ranks that wait for each other where nobody comes


# -- on every rank --------------------------------------------------------------------------------


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def raising_step(kit: ConformanceKit) -> str:
    def step(_model: nn.Module, _batch: Any) -> Tensor:
        msg = "the step's own words"
        raise ValueError(msg)

    with prepared(kit) as (session, model):
        batch = next(iter(session.prepare_loader(DataLoader(data(4), batch_size=4))))
        with pytest.raises(Exception, match="the step's own words") as caught:
            session.run(step, model, batch)
        return str(caught.value)


def wrapped_model(kit: ConformanceKit) -> str:
    with open_session(kit) as session, pytest.raises(ModelError) as caught:
        session.prepare_model(nn.DataParallel(kit.make_model()))
    return str(caught.value)


def unknown_option(kit: ConformanceKit) -> tuple[str, bool]:
    options = {kit.backend.name: {**kit.options, "no_such_option": 1}}
    was_joined = _is_joined()
    with pytest.raises(ConfigError) as caught:
        kit.backend().open(make_job(kit, options=options)).close()
    return str(caught.value), _is_joined() and not was_joined


def closed_twice(kit: ConformanceKit) -> bool:
    session = open_session(kit, model=kit.make_model())
    session.close()
    session.close()
    return True


def groups(kit: ConformanceKit) -> tuple[bool, bool]:
    model = kit.make_model()  # one that is split may need the group before
    before = _is_joined()
    with open_session(kit, model=model) as session:
        session.reduce(torch.ones(1, device=session.device))
    return before, _is_joined()


def within_a_group(kit: ConformanceKit) -> tuple[bool, float, int]:
    job = make_job(kit)
    if job.environment.world_size == 1:  # no group to join
        with open_session(kit, model=kit.make_model()) as session:
            return True, session.reduce(torch.ones(1, device=session.device)).item(), session.data_size
    leave = join_process_group(job.environment, device=job.devices[0])
    try:
        before = dist.group.WORLD
        with open_session(kit, model=kit.make_model()) as session:
            total = session.reduce(torch.ones(1, device=session.device)).item()
            size = session.data_size
        return _is_joined() and dist.group.WORLD is before, total, size
    finally:
        leave()


def two_sessions(kit: ConformanceKit) -> list[State]:
    found: list[State] = []
    for _ in range(2):
        # Ranks never come at once: one that is ahead must not take what another one has left for new.
        if found and LaunchEnvironment.read().rank == 0:
            time.sleep(_BEHIND_S)
        with prepared(kit) as (session, model):
            learn(session, model, whole(session))
            found.append(kit.gradients(session, model))
    return found


STEPS = 3


class _Counting(nn.Module):
    """A model that counts its forward passes in training mode in a buffer."""

    steps: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        output: Tensor = self.inner(x)
        return output


def of_one_device(kit: ConformanceKit) -> State:
    return {n: t + 1 for n, t in kit.make_reference().state_dict().items()}


def buffers(model: nn.Module) -> State:
    return on_cpu(dict(model.named_buffers()))


# -- on every rank --------------------------------------------------------------------------------


def state_round_trip(kit: ConformanceKit) -> tuple[State, State]:
    with prepared(kit) as (session, model):
        state = on_cpu(session.model_state(model))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
        session.load_model_state(model, state)
        return state, on_cpu(session.model_state(model))


def put_together(kit: ConformanceKit) -> tuple[State, State]:
    with prepared(kit) as (session, model):
        first = on_cpu({n: whole_of(part) for n, part in session.state_parts(model).items()})
        session.load_model_state(model, of_one_device(kit))
        return first, on_cpu({n: whole_of(part) for n, part in session.state_parts(model).items()})


def counted_steps(kit: ConformanceKit) -> list[int]:
    found = []
    with prepared(kit, _Counting(kit.make_model())) as (session, model):
        for shared in with_shares(session.prepare_loader(DataLoader(data(4 * STEPS), batch_size=4))):
            learn(session, model, shared)
            session.sync_buffers(model)
            found.append(int(session.model_state(model)["steps"]))
    return found


def loaded(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        session.load_model_state(model, of_one_device(kit))
        return on_cpu(session.model_state(model))


def loaded_wrong(kit: ConformanceKit, fault: str) -> str:
    with prepared(kit) as (session, model):
        state: dict[str, Any] = dict(kit.make_reference().state_dict())
        if fault == "missing":
            del state["0.bias"]
        elif fault == "surplus":
            state["0.other"] = torch.ones(1)
        else:
            state["0.bias"] = torch.ones(3, 3)
        try:
            session.load_model_state(model, state)
        except Exception as error:  # noqa: BLE001 - each backend has its own
            return repr(error)
        return ""


def built_without_memory(kit: ConformanceKit) -> State:
    with open_session(kit, model=kit.make_model()) as session:
        model = build_deferred(kit.make_model, least_nbytes=1)
        if not session.takes_deferred_models:
            materialize(model)
        return on_cpu(session.model_state(session.prepare_model(model)))


def count_of_weights(kit: ConformanceKit) -> tuple[int, int]:
    before = len(list(kit.make_model().parameters()))
    with prepared(kit) as (session, model):
        session.load_model_state(model, of_one_device(kit))
        return before, len(list(session.unwrap(model).parameters()))


def synced_buffers(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        with torch.no_grad():
            for buffer in session.unwrap(model).buffers():
                buffer.add_(session.data_rank)
        session.sync_buffers(model)
        return buffers(session.unwrap(model))
