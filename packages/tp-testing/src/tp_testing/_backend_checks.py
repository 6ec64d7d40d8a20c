"""The functions that a backend's conformance tests run on ranks."""

import gc
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tp_core import LaunchEnvironment
from tp_core.data import LossReduction, PreparedLoader
from tp_core.errors import ConfigError, DisagreementError, ModelError, StepError
from tp_core.jobs import Footprint
from tp_core.plugins import Session
from tp_core.sessions import join_process_group
from tp_core.state import whole as whole_of
from tp_core.tensors import build_deferred, materialize

from tp_testing._kit import (
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
    train,
    whole,
    with_shares,
)

FREE = 2**40


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
    changed = [f"{name} changed" for name in before if before[name] != after[name]]
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
    return torch.tensor([(rank * 5) % 3, (rank * 2 + 1) % 3, -rank, rank**2], dtype=torch.float64)


def exchange(kit: ConformanceKit) -> dict[str, Any]:
    with open_session(kit) as session:
        own = tensor_of(session.data_rank).to(session.device)
        rows = own[: session.data_rank]
        return {
            "data_size": session.data_size,
            "rows": session.gather(rows).cpu(),
            "objects": session.gather_objects(str(session.rank)),
            "broadcasts": [
                session.broadcast(str(session.rank), src=src) for src in range(session.world_size)
            ],
            **{op: session.reduce(own, op).cpu() for op in OPERATIONS},
        }


SAMPLES, BATCH_SIZE = 9, 4  # the last batch has one sample
Yielded = tuple[int, list[tuple[Any, Tensor]]]


def yielded(kit: ConformanceKit, training: bool) -> Yielded:
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
        counted = _mean_loss(session, model, session.prepare_loader(loader, training=False, shard=False))
        return session.data_size, *counted


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


REDUCTIONS: Any = {
    "sum": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


def of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    """Return values with their largest elements on different ranks, not all on the first or the last."""
    values = torch.tensor([[rank + 1, -rank], [(rank - 1) ** 2, 7]], dtype=dtype)
    if dtype.is_floating_point:
        return values / 3
    return values


def rows(rank: int, fewest: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(2 * (rank + fewest)).reshape(-1, 2) + rank).to(dtype)


def laid_out(shape: tuple[int, ...], rank: int) -> Tensor:
    """Return a tensor of that shape with a memory layout that is not contiguous."""
    size = math.prod(shape)
    backwards = torch.arange(float(size)).reshape(shape[::-1])
    return backwards.permute(*range(len(shape))[::-1]) + rank


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
        own = of_rank(session.data_rank, dtype).to(session.device)
        return session.data_size, session.reduce(own, op).cpu()


def kept_argument(kit: ConformanceKit) -> bool:
    with open_session(kit) as session:
        own = of_rank(session.data_rank, torch.float64).to(session.device)
        before = own.clone()
        for op in ("sum", "mean", "min", "max"):
            session.reduce(own, op)
        return torch.equal(own, before)


def reduced_scalar(kit: ConformanceKit) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        own = torch.tensor(session.data_rank + 1.0, dtype=torch.float64, device=session.device)
        return session.data_size, session.reduce(own).cpu()


def gathered(kit: ConformanceKit, fewest: int, dtype: torch.dtype) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        own = rows(session.data_rank, fewest, dtype).to(session.device)
        return session.data_size, session.gather(own).cpu()


def of_shape(kit: ConformanceKit, shape: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    with open_session(kit) as session:
        own = laid_out(shape, session.data_rank).to(session.device)
        return session.data_size, session.gather(own).cpu(), session.reduce(own).cpu()


def gathered_scalars(kit: ConformanceKit) -> tuple[int, Tensor]:
    with open_session(kit) as session:
        own = torch.tensor(float(session.data_rank), device=session.device)
        return session.data_size, session.gather(own).cpu()


def gathered_objects(kit: ConformanceKit) -> list[dict[str, Any]]:
    with open_session(kit) as session:
        return session.gather_objects({"rank": session.rank, "text": "x" * session.rank})


def broadcast(kit: ConformanceKit) -> list[dict[str, int]]:
    with open_session(kit) as session:
        own = {"from": session.rank}
        return [session.broadcast(own, src=source) for source in range(session.world_size)]


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
    whole = Path(path).read_text().rpartition("\n")[0]  # of the last line, there may be a part
    lines = [line.split() for line in whole.splitlines()]
    return [(int(round_), int(rank), word) for round_, rank, word in lines]


@dataclass(frozen=True, slots=True)
class _Log:
    path: str
    file: int
    round_: int
    rank: int

    def write(self, word: str) -> None:
        os.write(self.file, f"{self.round_} {self.rank} {word}\n".encode())

    @contextmanager
    def turns(self) -> Iterator[None]:
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
            events = [(rank, word) for number, rank, word in lines(self.path) if number == self.round_]
            came = {rank for rank, word in events if word == "before"}
            done = [r for r in came if (r, "after") in events or events.count((r, "turn")) == TURNS]
            if len(done) == others:
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
    options = kit.job_options(no_such_option=1)
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
    states: list[State] = []
    for _ in range(2):
        # Ranks never come at once: one that is ahead must not take what another one has left for new.
        if states and LaunchEnvironment.read().rank == 0:
            time.sleep(_BEHIND_S)
        with prepared(kit) as (session, model):
            learn(session, model, whole(session))
            states.append(kit.gradients(session, model))
    return states


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
    counts = []
    with prepared(kit, _Counting(kit.make_model())) as (session, model):
        for shared in with_shares(session.prepare_loader(DataLoader(data(4 * STEPS), batch_size=4))):
            learn(session, model, shared)
            session.sync_buffers(model)
            counts.append(int(session.model_state(model)["steps"]))
    return counts


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


def reference_gradients(
    kit: ConformanceKit, *, samples: int, batch_size: int, loss: LossReduction = "mean"
) -> State:
    """Return one device's gradients, summed over the batches of an epoch."""
    model, step = kit.make_reference(), batch_loss(loss)
    for batch in DataLoader(data(samples), batch_size=batch_size):
        loss_of(step(model, batch)).backward()
    return gradients(model)


def reference_trained(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    samples: int = 12,
    epochs: int = 1,
    after_step: Callable[[], object] = lambda: None,
) -> State:
    """Return one device's weights after some epochs, with a step of the optimizers for each batch."""
    for _ in range(epochs):
        for batch in DataLoader(data(samples), batch_size=4):
            model.zero_grad()
            loss_of(batch_loss()(model, batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
            after_step()
    return dict(model.state_dict())


def reference_weights(kit: ConformanceKit) -> State:
    model = kit.make_reference()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return reference_trained(model, optimizer, samples=11, epochs=3)


def reference_with_unused(kit: ConformanceKit) -> State:
    model = _WithUnused(kit.make_reference())
    return reference_trained(model, torch.optim.SGD(model.parameters(), lr=0.05))


class _WithUnused(nn.Module):
    """A model with a layer that its forward leaves out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unused = nn.Linear(2, 2, bias=False).double()
        nn.init.ones_(self.unused.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


def of_several_types(model: nn.Module) -> nn.Module:
    """Return the model with one parameter, of a single element, in single precision."""
    tail: Any = model.get_submodule("3")
    tail.scale = nn.Parameter(tail.scale.detach().float())
    return model


def train_gradients(kit: ConformanceKit, samples: int, batch_size: int, loss: LossReduction) -> State:
    with prepared(kit, loss=loss) as (session, model):
        loader = session.prepare_loader(DataLoader(data(samples), batch_size=batch_size))
        for shared in with_shares(loader):
            learn(session, model, shared, batch_loss(loss))
        return kit.gradients(session, model)


def gradients_without_a_share(kit: ConformanceKit) -> tuple[int, State]:
    """Return the gradients of a batch of which each data rank has as many samples."""
    with prepared(kit) as (session, model):
        loader = session.prepare_loader(DataLoader(data(5), batch_size=5))
        learn(session, model, next(with_shares(loader)))  # an uneven batch before it does not weigh its loss
        model.zero_grad()
        batch, _ = whole(session, samples=4 * session.data_size)
        learn(session, model, (batch, None))
        return session.data_size, kit.gradients(session, model)


def single_precision(kit: ConformanceKit) -> State:
    with prepared(kit, kit.make_model().float()) as (session, model):
        learn(session, model, whole(session, dtype=torch.float32))
        return kit.gradients(session, model)


def several_types(kit: ConformanceKit) -> State:
    with prepared(kit, of_several_types(kit.make_model())) as (session, model):
        learn(session, model, whole(session))
        return kit.gradients(session, model)


def dict_gradients(kit: ConformanceKit) -> State:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = loss_of(batch_loss()(model, batch))
        return {"loss": loss, "half": loss.detach() / 2}

    with prepared(kit) as (session, model):
        learn(session, model, whole(session), step)
        return kit.gradients(session, model)


def accumulated_gradients(kit: ConformanceKit) -> State:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(batch_loss()(model, batch)) / 2

    with prepared(kit) as (session, model):
        first, second = with_shares(session.prepare_loader(DataLoader(data(8), batch_size=4)))
        with session.no_sync(model):
            learn(session, model, first, step)
        learn(session, model, second, step)
        return kit.gradients(session, model)


def held_gradients(kit: ConformanceKit) -> tuple[int, State]:
    with prepared(kit) as (session, model):
        shared = whole(session)
        with session.no_sync(model):
            learn(session, model, shared)
        named = session.unwrap(model).named_parameters()
        gradients = {n: p.grad for n, p in named if p.grad is not None}
        plain = {n: g for n, g in gradients.items() if not hasattr(g, "full_tensor")}
        seen = on_cpu(plain)
        learn(session, model, shared)
        return session.data_size, seen


def gradients_after_an_exception(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        shared = whole(session)
        error = LookupError("out of no_sync")
        with pytest.raises(LookupError, match="out of no_sync"), session.no_sync(model):
            raise error
        learn(session, model, shared)
        return kit.gradients(session, model)


def trained_with_unused(kit: ConformanceKit) -> State:
    model = _WithUnused(kit.make_model())
    options = kit.job_options(**kit.unused_options)
    with open_session(kit, model=model, options=options) as session:
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = session.prepare_model(model)
        return train(session, wrapped, [session.prepare_optimizer(plain)])


def trained_weights(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = torch.optim.Adam(model.parameters(), lr=0.05)
        model = session.prepare_model(model)
        return train(session, model, [session.prepare_optimizer(plain)], samples=11, epochs=3)


def who_is_trained(kit: ConformanceKit) -> tuple[bool, bool]:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = torch.optim.SGD(model.parameters(), lr=0.05)
        own = session.unwrap(session.prepare_model(model))
        optimizer = session.prepare_optimizer(plain)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return own is model, trained == {id(p) for p in own.parameters()}


def start_from_different_weights(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(session.data_rank)
        prepared_model = session.prepare_model(model)
        return on_cpu(session.model_state(prepared_model))


ALONE_S = 60.0  # for a busy machine; it is waited for only where there is no answer
NORMS = [1.0, 2.0, math.inf]


def reference(kit: ConformanceKit) -> nn.Module:
    model = kit.make_reference()
    loss_of(batch_loss()(model, data(8).tensors)).backward()
    return model


def gradients(model: nn.Module) -> State:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _run_backward(session: Session, model: nn.Module, factor: float = 1.0) -> None:
    learn(session, model, whole(session), lambda model, batch: loss_of(batch_loss()(model, batch)) * factor)


def clipped(kit: ConformanceKit, norm_type: float) -> tuple[Tensor, State]:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        norm = session.clip_grad_norm(model, 1e-3, norm_type=norm_type)
        return norm.detach().cpu(), kit.gradients(session, model)


def norms(kit: ConformanceKit, norm_type: float) -> tuple[Tensor, Tensor, State]:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        norm = session.grad_norm(model, norm_type=norm_type)
        unlimited = session.clip_grad_norm(model, math.inf, norm_type=norm_type)
        return norm.detach().cpu(), unlimited.detach().cpu(), kit.gradients(session, model)


def scaled(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        session.scale_gradients(model, 0.5)
        return kit.gradients(session, model)


def limited(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        _run_backward(session, model)
        session.clip_grad_value(model, 0.01)
        return kit.gradients(session, model)


def not_finite(kit: ConformanceKit) -> tuple[Any, Any]:
    with prepared(kit) as (session, model):
        before = session.find_nonfinite(model)
        with torch.no_grad():
            last = [p for p in session.unwrap(model).parameters() if p.requires_grad][-1]
            last.mul_(math.nan)
        return before, session.find_nonfinite(model)


def asked_alone(kit: ConformanceKit) -> bool:
    with prepared(kit) as (session, model):
        if session.rank != 0:
            return True
        answers = []
        # In a thread: a call that waits for other ranks would hang this one, and the test with it.
        thread = threading.Thread(target=lambda: answers.append(session.find_nonfinite(model)), daemon=True)
        thread.start()
        thread.join(ALONE_S)
        return bool(answers)


def norm_of_bad_gradients(kit: ConformanceKit) -> float:
    with prepared(kit) as (session, model):
        # Only the first data rank's part is bad; what comes of it must be known everywhere.
        factor = math.nan if session.data_rank == 0 else 1.0
        _run_backward(session, model, factor=factor)
        return session.grad_norm(model).item()


RATE = 0.05


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": others, "lr": 0.02, "weight_decay": 0.1}, {"params": [first], "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)


def scheduled(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@torch.no_grad()
def shifted(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.mul_(1.5)
    return model


def loss_of_two(first: nn.Module, second: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(first(x), y) + nn.functional.mse_loss(second(2 * x), y)


class _Branches(nn.Module):
    """A model with a layer that a step may leave out; with it, its output follows the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.more = nn.Linear(3, 2, bias=False).double()
        nn.init.constant_(self.more.weight, 0.5)

    def forward(self, x: Tensor, *, with_more: bool) -> Tensor:
        output: Tensor = self.inner(x)
        if with_more:
            return torch.cat([output, self.more(output)], 1)
        return output


def _with_branch(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of an output (samples, 3), or (samples, 5) where the layer took part."""
    loss = nn.functional.mse_loss(output[:, :3], y)
    if output.size(1) > 3:
        return loss + output[:, 3:].square().mean()
    return loss


def reference_with_branches(kit: ConformanceKit, size: int) -> State:
    """Return the weights where the loss is the mean over data ranks, of which the first has one term more."""
    model = _Branches(kit.make_reference())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for x, y in DataLoader(data(4 * size), batch_size=2 * size):
        optimizer.zero_grad()
        parts = zip(x.tensor_split(size), y.tensor_split(size), strict=True)
        losses = [_with_branch(model(p, with_more=i == 0), q) for i, (p, q) in enumerate(parts)]
        (sum(losses, torch.zeros(())) / size).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained_with_own_branches(kit: ConformanceKit) -> tuple[int, State]:
    model = _Branches(kit.make_model())
    options = kit.job_options(**kit.unused_options)
    with open_session(kit, model=model, options=options) as session:
        is_first, size = session.data_rank == 0, session.data_size

        def step(model: nn.Module, batch: Any) -> Tensor:
            return _with_branch(model(batch[0], with_more=is_first), batch[1])

        plain = torch.optim.SGD(model.parameters(), lr=RATE)
        wrapped = session.prepare_model(model)
        optimizers = [session.prepare_optimizer(plain)]
        return size, train(session, wrapped, optimizers, samples=4 * size, batch_size=2 * size, step=step)


def modes_in_steps(kit: ConformanceKit, training: bool) -> tuple[bool, list[bool]]:
    """Return the mode after the model is prepared, and the modes in steps after it is set."""
    model = kit.make_model()
    modes = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        modes.append(model.training)
        return loss_of(batch_loss()(model, batch))

    with prepared(kit, model) as (session, wrapped):
        first = model.training
        wrapped.train(training)
        batch, _ = whole(session)
        session.run(step, wrapped, batch)
        with torch.no_grad():
            session.run(step, wrapped, batch)
        return first, [*modes, model.training]


def returned(kit: ConformanceKit) -> tuple[float, dict[str, float]]:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = loss_of(batch_loss()(model, batch))
        return {"twice": 2 * loss.detach(), "loss": loss, "more": loss.detach() + 1}

    with prepared(kit) as (session, model):
        output: Any = session.run(step, model, whole(session)[0])
        return output["loss"].item(), {n: float(v) for n, v in output.items() if n != "loss"}


def gradients_of_two_models(kit: ConformanceKit) -> tuple[State, State] | None:
    first, second = kit.make_model(), shifted(kit.make_model())
    with open_session(kit, model=first) as session:
        models = [session.prepare_model(first), session.prepare_model(second)]
        batch, share = whole(session)
        try:
            output = session.run_several(loss_of_two, models, batch)
        except StepError:
            if not session.runs_step_in_parts:
                raise
            return None
        session.backward(loss_of(output), share)
        return kit.gradients(session, models[0]), kit.gradients(session, models[1])


def retains_the_graph(kit: ConformanceKit) -> bool:
    with prepared(kit) as (session, model):
        batch, share = whole(session)
        loss = loss_of(session.run(batch_loss(), model, batch))
        scale = torch.ones_like(loss).requires_grad_()
        scaled = loss * scale.square()  # keeps the scale for its own backward pass
        session.backward(scaled, share, retain_graph=True)
        (gradient,) = torch.autograd.grad(scaled, [scale])
        return torch.allclose(gradient, 2 * loss.detach())


def trained_in_groups(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain = grouped(model)
        wrapped = session.prepare_model(model)
        return train(session, wrapped, [session.prepare_optimizer(plain)], epochs=2)


def trained_on_schedule(kit: ConformanceKit) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        plain, scheduler = scheduled(model)
        wrapped = session.prepare_model(model)
        return train(session, wrapped, [session.prepare_optimizer(plain)], after_step=scheduler.step)


def gradients_beside_bad_stand_ins(kit: ConformanceKit) -> State:
    with prepared(kit) as (session, model):
        for batch, share in with_shares(session.prepare_loader(DataLoader(data(5), batch_size=4))):
            loss = loss_of(session.run(batch_loss(), model, batch))
            is_stand_in = share is not None and not share.samples
            if is_stand_in:
                loss = loss * math.nan
            session.backward(loss, share)
        return kit.gradients(session, model)


def shuffled(kit: ConformanceKit) -> tuple[int, list[list[Tensor]]]:
    met: list[Tensor] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        met.append(batch[0].cpu())
        return loss_of(batch_loss()(model, batch))

    with prepared(kit) as (session, model):
        loader = session.prepare_loader(DataLoader(data(12), batch_size=4, shuffle=True))
        epochs: list[list[Tensor]] = []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                met.clear()
                with torch.no_grad():
                    session.run(step, model, batch)
                epochs[-1].append(torch.cat(met))
        return session.data_rank, epochs


RATES = 0.05, 0.02


def make_optimizers(model: nn.Module, *, several: bool) -> list[torch.optim.Optimizer]:
    """Return one optimizer over all parameters, or one over the first and one over all others."""
    first, *others = model.parameters()
    parts = [[first], others] if several else [[first, *others]]
    return [torch.optim.SGD(part, lr=rate, momentum=0.9) for part, rate in zip(parts, RATES, strict=False)]


def trained(kit: ConformanceKit, late: bool, several: bool) -> State:
    model = kit.make_model()
    with open_session(kit, model=model) as session:
        if late:
            plain = []
        else:
            plain = make_optimizers(model, several=several)
        wrapped = session.prepare_model(model)
        if late:
            plain = make_optimizers(session.unwrap(wrapped), several=several)
        return train(session, wrapped, [session.prepare_optimizer(optimizer) for optimizer in plain])


def evaluated_frozen(kit: ConformanceKit) -> tuple[State, torch.Tensor]:
    model = kit.make_model().requires_grad_(requires_grad=False)
    outputs = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs.append(model(batch[0]).cpu())
        return loss_of(batch_loss()(model, batch))

    with open_session(kit, model=model) as session, torch.no_grad():
        wrapped = session.prepare_model(model)
        loader = session.prepare_loader(DataLoader(data(8), batch_size=8), training=False)
        for batch in loader:
            session.run(step, wrapped, batch)
        rows = session.gather(torch.cat(outputs).to(session.device)).cpu()
        return on_cpu(session.model_state(wrapped)), rows


# By mode: whether a step has gradients, whether it computes in lower precision, and what of.
MODES = {
    "plain": (True, False, torch.float32),
    "no_grad": (False, False, torch.float32),
    "autocast": (True, True, torch.bfloat16),
    "no_grad and autocast": (False, True, torch.bfloat16),
}
THREADS, ENDING_S = "the threads", 10.0
DRAWN = ("torch's generator", "Python's generator", "numpy's generator")


class _Nested(Dataset[Any]):
    """The samples of the other tests, as dicts with further entries."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data(8)[index]
        return {"x": x, "targets": {"y": y, "halves": (y / 2, y / 4)}, "number": index}


def modes(kit: ConformanceKit, mode: str) -> list[tuple[bool, bool, torch.dtype]]:
    seen_modes = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        product = nn.functional.linear(x, x)
        seen_modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), product.dtype))
        return loss_of(batch_loss()(model, batch))

    with prepared(kit, kit.make_model().float()) as (session, model):
        batch, _ = whole(session, dtype=torch.float32)
        autocast: AbstractContextManager[Any] = nullcontext()
        if "autocast" in mode:
            autocast = torch.autocast(session.device.type, dtype=torch.bfloat16)
        with torch.set_grad_enabled("no_grad" not in mode), autocast:
            session.run(step, model, batch)
    return seen_modes


def drawn(kit: ConformanceKit) -> list[str]:
    model = kit.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # So that a generator which is seeded does not come back to where it was, nor to where another rank's is.
    for _ in range(1 + LaunchEnvironment.read().rank):
        torch.rand(1), random.random()  # noqa: S311
    before = environment_now()
    with open_session(kit, model=model) as session:
        session.prepare_model(model)
        session.prepare_optimizer(optimizer)
        session.prepare_loader(DataLoader(data(8), batch_size=4, shuffle=True))
        return _changed(before, environment_now(), DRAWN)


def left_behind(kit: ConformanceKit) -> list[str]:
    model = kit.make_model()  # one that is split may need the group before
    before = {**environment_now(), **_handlers()}
    _make_one_step(kit, model)
    del model
    names = [name for name in before if name not in DRAWN]
    deadline = time.monotonic() + ENDING_S
    while True:  # threads that were asked to end may need a moment
        gc.collect()
        changed = _changed(before, {**environment_now(), **_handlers()}, names)
        if changed != [THREADS] or time.monotonic() > deadline:
            return changed
        time.sleep(0.01)


def _make_one_step(kit: ConformanceKit, model: nn.Module) -> None:
    with prepared(kit, model) as (session, wrapped):
        learn(session, wrapped, whole(session))


def _handlers() -> dict[str, Any]:
    return {f"the handler of {s.name}": signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any], names: Any) -> list[str]:
    return [name for name in names if before[name] != after[name]]


def gradients_of_nested_batches(kit: ConformanceKit) -> State:
    def step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        y = batch["targets"]["y"]
        half, quarter = batch["targets"]["halves"]
        assert len(batch["number"]) == len(y)
        return nn.functional.mse_loss(model(batch["x"]), half + 2 * quarter)

    with prepared(kit) as (session, model):
        (shared,) = with_shares(session.prepare_loader(DataLoader(_Nested(), batch_size=8)))
        learn(session, model, shared, step)
        return kit.gradients(session, model)
