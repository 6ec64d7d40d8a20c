"""Simulated ranks: threads of one process that take turns, so that a split model runs without a launcher.

One rank runs until it reaches a collective, then the next one does. The last to arrive computes the
collective for all. So there are no races, and each rank has its own random numbers. A rank that calls another
collective, or has ended, raises at once, where processes would hang.
"""

import random
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.compare import (
    ComputedTypes,
    Recording,
    TensorPlace,
    WithoutDropout,
    coarsest,
    copied,
    mapped,
    named_tensors,
    nudged,
)
from tp_core.errors import DisagreementError
from tp_core.random import preserve_rng_state, seed_everything

from tp_shard._groups import _group
from tp_shard._groups._group import ALONE, Group
from tp_shard._plans._maker import choose
from tp_shard._plans._parallelize import parallelize
from tp_shard._plans._styles import Plan, Row
from tp_shard._shards import ShardTable
from tp_shard._split import Split
from tp_shard._verify._examples import TrialCall, fresh, loss_of, tensors_of
from tp_shard.nn._layers import ParallelLinear

T = TypeVar("T")


class SimulatedError(Exception):
    """A rank raised; its error is the cause."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} raised {type(error).__name__}: {error}")
        self.rank, self.error = rank, error


class _StoppedRankError(BaseException):
    """The end of a rank after another rank raised; no ``Exception``, so that the model does not catch it."""


def simulate(ranks: int, function: Callable[[Group], T]) -> list[T]:
    """TrialCall ``function(group)`` on each of ``ranks`` simulated ranks; return the result of each.

    The group is the current group of each rank during the call. Random generators start in the same state on
    each rank and are restored afterwards.

    Raises:
        SimulatedError: A rank raised, or the ranks called different collectives. The other ranks end.

    Collectives: none, beyond the simulated ones.
    """
    return _Simulation(ranks).run(function)


class _Simulation:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # One rank runs at a time, and passes its turn on in each collective: the current groups and random
        # numbers belong to the process, and two ranks at once would mix theirs. An event for each rank: one
        # for all would wake all of them at each turn, 64 times 64 in a collective of 64 ranks.
        self._turns = [threading.Event() for _ in range(ranks)]
        self._turns[0].set()
        self._slots: list[tuple[str, Any] | None] = [None] * ranks
        self._done = [False] * ranks
        self._failed: SimulatedError | None = None

    def run(self, function: Callable[[Group], T]) -> list[T]:
        results: list[Any] = [None] * self.ranks
        outside = _Settings()

        def body(rank: int) -> None:
            try:
                self._wait(rank)
                outside.restore()
                if self.ranks > 1:
                    handle = _SimulatedGroup(self, rank, self.ranks)
                else:
                    handle = None
                group = Group(rank, self.ranks, handle)
                _group.set_groups(group, ALONE)
                # Backward in this thread: in one of the engine's threads a collective would run outside of
                # this rank's turn.
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = function(group)
            except _StoppedRankError:
                pass
            except BaseException as error:  # noqa: BLE001 - `run` raises it in the caller's thread
                if self._failed is None:
                    self._failed = SimulatedError(rank, error)
            self._done[rank] = True
            self._pass_on(rank)

        # Daemons: if the join below is interrupted, the process must not wait for the ranks at its exit.
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outside.restore()
        if self._failed is not None:
            raise self._failed from self._failed.error
        return results

    def meet(self, rank: int, collective: str, brought: Any, carry_out: Callable[[list[Any]], None]) -> None:
        """Wait until all ranks call the same collective; the last one computes it for all.

        Raises:
            DisagreementError: The ranks call different collectives, or one has ended without this one.
        """
        self._slots[rank] = collective, brought
        if all(slot is not None for slot in self._slots):
            slots = [slot for slot in self._slots if slot is not None]
            names = [name for name, _ in slots]
            other = next((r for r, name in enumerate(names) if name != names[0]), None)
            if other is not None:
                msg = f"rank 0 calls {names[0]}, and rank {other} {names[other]}"
                raise DisagreementError(msg)
            # Like torch's collectives without a graph: recorded, it would join the graphs of the ranks.
            with torch.no_grad():
                carry_out([brought for _, brought in slots])
            self._slots = [None] * self.ranks
            return
        if any(self._done):
            msg = f"rank {rank} calls {collective}, and rank {self._done.index(True)} has ended without it"
            raise DisagreementError(msg)
        settings = _Settings()
        self._pass_on(rank)
        self._wait(rank)
        settings.restore()

    def _wait(self, rank: int) -> None:
        self._turns[rank].wait()
        self._turns[rank].clear()
        if self._failed is not None:
            raise _StoppedRankError

    def _pass_on(self, rank: int) -> None:
        """Pass the turn to the next rank that does not wait for others."""
        following = [(rank + i) % self.ranks for i in range(1, self.ranks + 1)]
        free = [r for r in following if not self._done[r] and (self._slots[r] is None or self._failed)]
        if not free and not all(self._done) and self._failed is None:
            waiting = next(r for r in following if not self._done[r])
            collective = self._slots[waiting][0]  # type: ignore[index]  # it waits in it
            error = DisagreementError(
                f"rank {waiting} calls {collective}, and rank {rank} has ended without it"
            )
            self._failed = SimulatedError(waiting, error)
            free = [waiting]
        if free:
            self._turns[free[0]].set()


class _Settings:
    """The settings of the process that each rank needs for itself: random generators and current groups."""

    def __init__(self) -> None:
        self._random = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")  # a model that draws from numpy has imported it
        if numpy is None:
            self._numpy = None
        else:
            self._numpy = numpy.random.get_state()
        current = _group._current
        self._groups = current.tensor, current.data, current.mesh

    def restore(self) -> None:
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        _group.set_groups(*self._groups)


class _CompleteWork(dist.Work):
    """The work of a collective that is complete."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        return True

    def is_completed(self) -> bool:
        return True


class _SimulatedGroup(dist.ProcessGroup):
    """The collectives of one simulated rank, under the names by which torch calls them.

    Torch supports process groups in Python. The names of some of their methods differ between its versions:
    the class has both, and the tests of simulated ranks would notice a third.
    """

    is_simulated = True

    def __init__(self, simulation: _Simulation, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this constructor
        self._simulation, self._rank, self._size = simulation, rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "simulated"

    def _meet(
        self, collective: str, tensor: torch.Tensor, brought: Any, carry_out: Callable[[list[Any]], None]
    ) -> Any:
        described = f"{collective} of a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
        self._simulation.meet(self._rank, described, brought, carry_out)
        return _CompleteWork()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # the one form that is called
        biggest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX

        def carry_out(everyones: list[torch.Tensor]) -> None:
            stacked = torch.stack(everyones)
            result = stacked.amax(0) if biggest else stacked.sum(0)
            for tensor in everyones:
                tensor.copy_(result)

        return self._meet("all_reduce", tensors[0], tensors[0], carry_out)

    def all_gather_single(self, output: torch.Tensor, local: torch.Tensor, opts: Any = None) -> Any:  # noqa: ARG002 - torch's signature, as below
        def carry_out(everyones: list[Any]) -> None:
            joined = torch.cat([sent.reshape(-1) for _, sent in everyones])
            for place, _ in everyones:
                place.copy_(joined.view_as(place))

        return self._meet("all_gather", local, (output, local), carry_out)

    def reduce_scatter_single(self, output: torch.Tensor, local: torch.Tensor, opts: Any = None) -> Any:  # noqa: ARG002
        def carry_out(everyones: list[Any]) -> None:
            total = torch.stack([sent.reshape(-1) for _, sent in everyones]).sum(0)
            for (place, _), part in zip(everyones, total.chunk(self._size), strict=True):
                place.copy_(part.view_as(place))

        return self._meet("reduce_scatter", local, (output, local), carry_out)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # as above
        source = 0 if opts is None else opts.rootRank

        def carry_out(everyones: list[torch.Tensor]) -> None:
            for tensor in everyones:
                tensor.copy_(everyones[source])

        return self._meet("broadcast", tensors[0], tensors[0], carry_out)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # as above
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # as above


# -- Runs of a whole model, and of a split model on simulated ranks -------------------------------


@dataclass(slots=True)
class TrialRun:
    """The result of a call.

    Attributes:
        steps: The name and output of each call of a module inside, in the order in which they ended.
        entered: The names of the modules with a ``forward`` that has begun and not ended; the last one
            raised.
        called: The names of all modules that were called.
        outputs: The tensors that the model returned, by their places in the output.
        gradients: The gradients of all trained parameters, by name; on a rank those of its shards.
        inputs: The gradients of floating-point arguments.
        kept: Buffers and other tensors of modules after the run, by name; each with whether it is part of the
            model's state.
        row_inputs: The inputs of the watched row layers, for each call.
        splits: The splits of a rank's parameters, by name.
        cuts: The splits of the outputs of a rank's layers, by name.
        stage: The stage of the error: "forward", "loss" or "backward".
        dtypes: The types in which a whole model computes, and of its parameters.
        near: The run with roundings of its own, of a whole model that does not compute in float64 alone.
    """

    steps: list[tuple[str, Tensor]] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    inputs: dict[str, Tensor | None] = field(default_factory=dict)
    kept: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)
    row_inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    splits: dict[str, Split] = field(default_factory=dict)
    cuts: dict[str, Split] = field(default_factory=dict)
    error: Exception | None = None
    stage: str = "forward"
    dtypes: set[torch.dtype] = field(default_factory=set)
    near: "TrialRun | None" = None

    @property
    def nudged(self) -> "TrialRun":
        """The run with roundings of its own, or this one where it has none to speak of."""
        return self.near or self


@dataclass(frozen=True, slots=True)
class Updates:
    """The optimizer steps that a run makes before what it records."""

    count: int = 0
    rate: float = 0.0


_NO_UPDATES = Updates()


def run_whole(
    module: nn.Module,
    call: TrialCall,
    watched: Collection[str],
    updates: Updates = _NO_UPDATES,
    *,
    seed: int = 0,
    nudge: torch.dtype | None = None,
) -> TrialRun:
    """Run a module that is not split forward and backward, and record the inputs of ``watched`` modules.

    With ``nudge`` each module inside rounds what it returns once more in that type.
    """
    own, run = copied(module), TrialRun()
    rounding = nullcontext() if nudge is None else nudged(own, nudge)
    with preserve_rng_state(), torch.enable_grad(), rounding:
        return _run(own, call, run, watched, updates, seed=seed)


def reference(
    module: nn.Module, call: TrialCall, watched: Collection[str], updates: Updates = _NO_UPDATES
) -> tuple[TrialRun, TrialCall]:
    """Run a whole module to compare with, and again with roundings of its own where it has some."""
    run, example = run_whole_or_detached(module, call, watched, updates)
    dtype = coarsest(run.dtypes)
    if dtype != torch.float64:
        run.near = run_whole(module, example, watched, updates, nudge=dtype)
    return run, example


def run_whole_or_detached(
    module: nn.Module, call: TrialCall, watched: Collection[str], updates: Updates = _NO_UPDATES
) -> tuple[TrialRun, TrialCall]:
    """Run as :func:`run_whole`; if that fails, with arguments without gradients. Return the call, too."""
    try:
        return run_whole(module, call, watched, updates), call
    except Exception:  # noqa: BLE001 - an error of the second run is raised
        args, kwargs = mapped((call.args, dict(call.kwargs)), lambda t: t.detach())
        plain = replace(call, args=args, kwargs=kwargs)
        return run_whole(module, plain, watched, updates), plain


def takes(model: nn.Module, call: TrialCall) -> bool:
    """Return whether a model takes a call, in evaluation and in training, with finite numbers to compare."""
    try:
        for training in (False, True):
            run, _ = run_whole_or_detached(model, replace(call, training=training), ())
            if not all(tensor.isfinite().any() for tensor in run.outputs.values() if tensor.numel()):
                return False
            if not all(g.to_dense().isfinite().all() for g in run.gradients.values() if g is not None):
                return False  # such as of a place that sees padding alone
    except Exception:  # noqa: BLE001 - generated values and shapes may not suit the model
        return False
    return True


def run_split(
    module: nn.Module,
    plan: Plan,
    call: TrialCall,
    ranks: int,
    *,
    dropout: bool = False,
    updates: Updates = _NO_UPDATES,
) -> list[TrialRun]:
    """Split copies of a module by a plan on simulated ranks, and run them forward and backward.

    Returns:
        The runs, by rank. If a rank raised, the others' runs end where they waited for it.
    """
    runs = [TrialRun() for _ in range(ranks)]

    def body(group: Group) -> None:
        split = parallelize(copied(module), plan, group=group)
        started[group.rank] = True
        _describe(split, runs[group.rank])
        _run(split, call, runs[group.rank], watched, updates, dropout=dropout)

    started = [False] * ranks
    watched = frozenset(rows_of(module, plan))
    with preserve_rng_state():
        try:
            simulate(ranks, body)
        except SimulatedError as failure:
            error = failure.error
            if not started[failure.rank] or not isinstance(error, Exception):
                raise error from None
            runs[failure.rank].error = error
    return runs


def _update(model: nn.Module, call: TrialCall, updates: Updates) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=updates.rate, momentum=0.9)
    for _ in range(updates.count):
        optimizer.zero_grad()
        output = model(*fresh(call.args), **{name: fresh(value) for name, value in call.kwargs.items()})
        loss_of(output, dict(tensors_of(output)), call.loss).backward()
        optimizer.step()


def _run(
    model: nn.Module,
    call: TrialCall,
    run: TrialRun,
    watched: Collection[str],
    updates: Updates,
    *,
    dropout: bool = False,
    seed: int = 0,
) -> TrialRun:
    model.train(call.training)
    seed_everything(seed, devices=False)  # numpy's generator too: speech models draw masks from it
    if updates.count:
        with WithoutDropout(), torch.enable_grad():
            _update(model, call, updates)
    model.zero_grad()  # gradients of the copied model would be added to
    args, kwargs = fresh(call.args), {name: fresh(value) for name, value in call.kwargs.items()}
    computed = ComputedTypes()
    drawing = nullcontext() if dropout else WithoutDropout()
    with drawing, torch.enable_grad():
        with computed, Trace(model, run, watched):
            output = model(*args, **kwargs)
        run.stage = "loss"
        run.outputs = dict(tensors_of(output))
        with computed:
            run.loss = loss_of(output, run.outputs, call.loss)
        run.stage = "backward"
        if run.loss.requires_grad:
            run.loss.backward()
    run.stage = "done"
    run.dtypes = computed.dtypes | {p.dtype for p in model.parameters()}
    run.outputs = {name: tensor.detach() for name, tensor in run.outputs.items()}
    run.loss = run.loss.detach()
    run.gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    state = model.state_dict()
    run.kept = {}
    for path, module in model.named_modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor):
                full = f"{path}.{name}" if path else name
                run.kept[full] = (value.detach(), full in state)
    inputs = [*tensors_of(args, "input"), *tensors_of(kwargs, "input")]
    run.inputs = {name: tensor.grad for name, tensor in inputs if tensor.requires_grad}
    return run


def _describe(model: nn.Module, run: TrialRun) -> None:
    """Record the splits of a rank's parameters and outputs."""
    run.splits = {name: shard.split for name, shard in ShardTable(model).exact.items()}
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear) and module.dim not in (0, None) and not module.gather_output:
            cut = module.splits["weight"]
            run.cuts[name] = Split(-1, cut.size, cut.ranges)


class Trace:
    """A context manager that records in a run the first output of each call of a model's modules."""

    def __init__(self, model: nn.Module, run: TrialRun, watched: Collection[str]) -> None:
        self._model, self._run, self._watched = model, run, watched
        self._recording = Recording(model)
        self._calls: dict[str, int] = {}
        self._firsts: list[TensorPlace] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._recording.__enter__()
        for name, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                continue
            before = module.register_forward_pre_hook(lambda _m, args, n=name: self._begin(n, args))
            after = module.register_forward_hook(lambda _m, _args, output, n=name: self._end(n, output))
            self._handles += [before, after]
        return self

    def _begin(self, name: str, args: tuple[Any, ...]) -> None:
        self._run.entered.append(name)
        self._run.called.add(name)
        if name in self._watched and args and isinstance(args[0], Tensor):
            self._run.row_inputs.append((name, args[0].detach().clone()))

    def _end(self, name: str, output: Any) -> None:
        while self._run.entered and self._run.entered.pop() != name:
            pass
        call = self._calls[name] = self._calls.get(name, -1) + 1
        first = next(named_tensors(output), None)
        if first is not None:
            self._firsts.append(TensorPlace(name, call, first[0]))

    def __exit__(self, *error: object) -> None:
        self._recording.__exit__(*error)
        outputs = self._recording.outputs
        self._run.steps = [(p.module, outputs[p].tensor) for p in self._firsts if p in outputs]
        for handle in self._handles:
            handle.remove()


def rows_of(module: nn.Module, plan: Plan) -> list[str]:
    """Return the names of the row layers of a plan."""
    return [name for name, (_, style) in choose(module, plan).items() if isinstance(style, Row)]
