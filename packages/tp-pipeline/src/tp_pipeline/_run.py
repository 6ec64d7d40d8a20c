"""A batch on its way through the stages: forwards, backwards and what is sent between them.

::

    rank 0, stage 0     F0 F1 F2    B0 F3 B1    B2    B3         the schedule 1F1B with four micro-batches
    rank 1, stage 1        F0 B0 F1 B1 F2 B2 F3 B3
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not export them all
    PrefixStore,
    ProcessGroup,
    Store,
)
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
    stage_backward_weight,
)
from tp_core import tree_leaves, tree_map
from tp_core.data import near_power_of_two, read_weight
from tp_core.errors import RankFailedError, StepError
from tp_core.random import seed_of, seed_torch

from tp_pipeline._plan import (
    InnerCall,
    Item,
    Leaf,
    Output,
    Plan,
    Spec,
    call_last_hooks,
    exchange_nothing,
    forwards,
)
from tp_pipeline._schedule import Orders, Work


class StandIn(Tensor):
    """A tensor without numbers, for one that a stage does not have: what is computed with it has none, too.

    Args:
        like: A tensor without memory (on the device "meta"), of its shape and type.
        device: The device that it seems to be on.
    """

    # Private to torch, and how its own wrappers are made: results are not to be made of this class by it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's way
    like: Tensor

    def __new__(cls, like: Tensor, device: torch.device) -> Self:
        """Make the tensor."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # private, too
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.like = like
        return made

    @classmethod
    def of(cls, spec: Spec, device: torch.device) -> "StandIn":
        """Return one of a shape and type."""
        return cls(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a plain function
        cls, func: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute shapes and types alone."""
        devices = [t.device for t in tree_leaves((args, kwargs or {})) if isinstance(t, cls)]

        def to_meta(value: Any) -> Any:
            if isinstance(value, cls):
                return value.like
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return value

        if func.namespace == "c10d":
            return exchange_nothing(func, args)
        args, named = tree_map(to_meta, (args, dict(kwargs or {})))
        device = named.get("device") or devices[0]
        if "device" in named:
            named["device"] = torch.device("meta")
        outputs = func(*args, **named)
        return tree_map(lambda v: cls(v, torch.device(device)) if isinstance(v, Tensor) else v, outputs)


class _StageEndError(BaseException):  # not an Exception: the user's step may catch those
    """Raised in a step where the last block of a stage has ended."""


class _StageRun:
    """The forward pass of one stage for one micro-batch.

    Args:
        plan: The plan.
        stage: The stage.
        given: What has come from the stages before.
        seed: The seed of this micro-batch's random numbers.
        units: The units.
        device: The device.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        given: Mapping[Item, Tensor],
        *,
        seed: int,
        units: Mapping[str, nn.Module],
        device: torch.device,
    ) -> None:
        self.plan, self.stage, self.given, self.units = plan, stage, given, units
        self._device = device
        self.made: dict[Item, Tensor] = {}
        self.compiled: Mapping[str, Callable[..., Any]] = {}
        self._seed, self._next = seed, 0
        self._end = plan.last_call(stage) if stage < plan.stages - 1 else len(plan.calls)
        self._wanted = {i for i in plan.sends[stage] if i not in given}

    def call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand for the forward of a unit."""
        plan, number = self.plan, self._next
        if number >= len(plan.calls) or plan.calls[number].unit != name:
            expected = repr(plan.calls[number].unit) if number < len(plan.calls) else "no block"
            msg = (
                f"the step calls {name!r} where it called {expected} when backend 'pipeline' ran it on "
                "stand-ins: which blocks run, and in which order, must not depend on the numbers of the batch"
            )
            raise StepError(msg)
        self._next += 1
        if plan.stage_of[number] < self.stage:
            output = self._stand_in(number, args, kwargs)
        else:
            self._draw(number, 0)
            if not plan.replayed[number]:  # a compiler would compile its hooks again in each call
                forward = self.compiled.get(name, forward)
            with self._watching(number) if plan.replayed[number] else nullcontext():
                output = forward(*args, **kwargs)
            self._note(("out", number), output, plan.calls[number].output)
            if number == self._end:
                raise _StageEndError
        self._draw(number, 1)
        return output

    def _draw(self, number: int, after: int) -> None:
        """Let random numbers depend on the micro-batch and the call, and on neither stage nor schedule."""
        if self.plan.draws:
            seed_torch(seed_of((self._seed, number, after)))

    def _note(self, key: Item, output: Any, expected: Output) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(leaves) != len(expected.specs):
            msg = (
                f"{self.plan.calls[key[1]].unit!r} returns {len(leaves)} tensors, and returned "
                f"{len(expected.specs)} when backend 'pipeline' ran the step on stand-ins: what it returns "
                "must not depend on the numbers of the batch"
            )
            raise StepError(msg)
        for i, leaf in enumerate(leaves):
            if (*key, i) in self._wanted:
                self.made[*key, i] = leaf

    def _stand_in(self, number: int, args: Any, kwargs: Any) -> Any:
        """Return what a unit of an earlier stage has returned, where it is needed, else without numbers."""
        call, arguments = self.plan.calls[number], [*tree_leaves(args), *tree_leaves(kwargs)]
        for inner in self.plan.replayed[number]:
            # Its hooks collect outputs for use outside of the block, as transformers' router logits.
            module = self.units[call.unit].get_submodule(inner.name)
            value = self._filled(inner.output, ("inner", number, inner.name, inner.time), [])
            with forwards({inner.name: module}, lambda _n, _f, v=value, *_a, **_k: v):
                module()
        return self._filled(call.output, ("out", number), arguments)

    def _filled(self, output: Output, key: Item, arguments: Sequence[Any]) -> Any:
        def fill(value: Any) -> Any:
            if not isinstance(value, Leaf):
                return value
            if value.is_argument:
                return arguments[value.index]
            found = self.given.get((*key, value.index))
            return StandIn.of(output.specs[value.index], self._device) if found is None else found

        return tree_map(fill, output.structure)

    @contextmanager
    def _watching(self, number: int) -> Iterator[None]:
        """Keep what modules within a unit return for use outside of it."""
        call, handles = self.plan.calls[number], []
        by_name: dict[str, dict[int, InnerCall]] = {}
        for inner in self.plan.replayed[number]:
            by_name.setdefault(inner.name, {})[inner.time] = inner

        def watch(name: str, times: dict[int, InnerCall]) -> Callable[..., None]:
            count = 0

            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                nonlocal count
                if count in times:
                    self._note(("inner", number, name, count), output, times[count].output)
                count += 1

            return hook

        for name, times in by_name.items():
            module = self.units[call.unit].get_submodule(name)
            handles.append(module.register_forward_hook(watch(name, times)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Exchange:
    """Sends tensors to other ranks of a group, and receives them.

    Args:
        group: The group.
        orders: Which rank has a stage.
        device: The device.
        timeout_s: The seconds that a rank waits for another one.
        store: A store of all ranks.
        mates: A name of the ranks that compute together with this one in its stages, and their number.

    Attributes:
        me: This rank in the group.
        is_broken: Whether another rank has not sent or received what it should have.
        waited_s: The seconds that this rank has waited for tensors.
    """

    def __init__(
        self,
        group: ProcessGroup,
        orders: Orders,
        device: torch.device,
        timeout_s: float,
        store: Store,
        mates: tuple[str, int],
    ) -> None:
        self._group, self.rank_of, self._stages = group, orders.rank_of, orders.stages
        self.device, self._timeout_s = device, timeout_s
        self.me, self._global_me = dist.get_rank(group), dist.get_rank()
        self._store = PrefixStore(f"tp/pipeline/{group.group_name}", store)
        name, self.mates = mates
        self._failures, self._batches = PrefixStore(f"tp/pipeline/failures/{name}", store), 0
        self.is_broken = False
        self.waited_s = 0.0
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, work: Work, tensors: Sequence[Tensor], to: int) -> None:
        """Begin to send tensors to the rank of a stage. One message for each tensor."""
        for i, tensor in enumerate(tensors):
            raw = _bytes_of(tensor.detach().contiguous())
            if raw.numel():
                # Without waiting: it may come to its receive only after this rank's next work.
                sending = dist.isend(
                    raw, group=self._group, group_dst=self.rank_of(to), tag=self._tag(work, i)
                )
                self._sent.append((sending, raw))

    def receive(self, work: Work, specs: Sequence[Spec], source: int) -> tuple[list[Any], list[Tensor]]:
        """Begin to receive tensors from the rank of a stage."""
        waits, tensors = [], []
        for i, spec in enumerate(specs):
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            tensors.append(tensor)
            if tensor.numel():
                waits.append(
                    dist.irecv(
                        _bytes_of(tensor),
                        group=self._group,
                        group_src=self.rank_of(source),
                        tag=self._tag(work, i),
                    )
                )
        return waits, tensors

    def wait(self, waits: Sequence[Any], what: str, work: Work, stage: int) -> None:
        """Wait for tensors that come from the rank of a stage.

        Raises:
            RankFailedError: They have not come in time, or the rank has gone.
        """
        began = time.time()
        try:
            for waiting in waits:
                waiting.wait(timedelta(seconds=self._timeout_s))
            self.waited_s += time.time() - began
        except RuntimeError as error:
            self.is_broken = True
            if "imed out" in str(error):
                silent = self._silent(stage)
                how = f"for {self._timeout_s:g} s (the option timeout_s)"
                where = f"stage {silent}, on rank {self._global(silent)}, hangs: nothing has come from it"
            else:
                how, where = "in vain", self._end_of(self._global(stage))
            msg = (
                f"stage {work.stage} has waited {how} for the {what} of micro-batch {work.part} from stage "
                f"{stage}; {where}"
            )
            raise RankFailedError(msg) from error

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self.rank_of(stage))

    def _silent(self, stage: int) -> int:
        """Return the stage that all wait for, by what ranks that wait write into the store."""
        self._store.set(str(self._global_me), str(stage))
        seen: set[int] = set()
        while stage not in seen:
            seen.add(stage)
            key = str(self._global(stage))
            try:
                # Those that wait, too, began a little later.
                self._store.wait([key], timedelta(seconds=min(self._timeout_s, _CHAIN_S)))
                stage = int(self._store.get(key))
            except RuntimeError:  # it says nothing, or the store has gone with its rank
                break
        return stage

    def _end_of(self, rank: int) -> str:
        """Return how a rank of this group has ended, by what it wrote into the store if it had an error."""
        with suppress(RuntimeError):  # the store has gone with its rank
            if self._store.check([f"failed/{rank}"]):
                return self._store.get(f"failed/{rank}").decode()
        return f"rank {rank} has ended"

    def fail(self, error: Exception) -> Exception:
        """Return the error with which this rank comes to the end of the batch.

        Ranks that compute together with this one wait for it within layers, where it has no zeros for them.
        Unless all of them have failed, it ends here: so they learn of it, and their launcher does.

        Raises:
            Exception: The error, if another one of them has not failed, or a neighbor has gone.
        """
        ends = self.is_broken or self.mates > 1
        if self.mates > 1:
            batch = str(self._batches)
            try:
                error = self._noted(error, batch)
                if not self.is_broken:
                    self._failures.wait([f"{batch}/all"], timedelta(seconds=_MATES_S))
                    ends = False
            except RuntimeError:  # not in time, or the store has gone with its rank
                pass
        if ends:
            text = f"rank {self._global_me} has failed in its stages: {type(error).__name__}: {error}"
            with suppress(RuntimeError):  # the store has gone with its rank
                key = f"failed/{self._global_me}"
                self._store.set(key, str(error) if isinstance(error, RankFailedError) else text)
            raise error
        return error

    def _noted(self, error: Exception, batch: str) -> Exception:
        """Write an error into the store; return the first one of them if this rank's may follow from it."""
        number = self._failures.add(f"{batch}/number", 1)
        text = f"has failed in its stages: {type(error).__name__}: {error}"
        if number == 1:
            self._failures.set(f"{batch}/first", f"rank {self._global_me} {text}")
        else:
            first = self._failures.get(f"{batch}/first").decode()
            if not first.endswith(text):  # such as a connection that the first one has left
                error = RankFailedError(first)
        if number == self.mates:
            self._failures.set(f"{batch}/all", "")
        return error

    def finish(self) -> None:
        """Wait until all has been sent.

        Raises:
            RankFailedError: Another rank has not received it.
        """
        try:
            for sending, _ in self._sent:
                sending.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            msg = f"the rank of a neighboring stage has ended, or hangs, before it received all: {error}"
            raise RankFailedError(msg) from error
        finally:
            self._sent.clear()
            self._batches += 1

    def _tag(self, work: Work, number: int) -> int:
        is_back = work.kind.endswith("B")
        sender = work.stage
        if work.kind.startswith("RECV"):
            sender += 1 if is_back else -1
        return ((work.part * self._stages + sender) * 2 + is_back) * 256 + number


def _bytes_of(tensor: Tensor) -> Tensor:
    # Not every group sends every type (gloo sends no bool).
    return tensor.view(-1).view(torch.uint8)


class BatchRun:
    """The work of this rank for one batch.

    Args:
        step: The user's step.
        model: The plain model.
        parts: The micro-batches.
        plans: The plan of each.
        units: The units of the model.
        exchange: Sends and receives.
        seed: The seed of the batch's random numbers.
        weigh: Returns the loss and the weight of a micro-batch's output.
        trained: The trained parameters that this rank has.
        uncast: Returns a context for backward passes, in which nothing is cast.
        compiled: The compiled forwards of units, by name.
        scale: A factor on losses, which keeps gradients in half precision from underflow.
        is_timed: Whether to note when what is computed.

    Attributes:
        outputs: What the step has returned for each micro-batch, on the last stage's rank.
        weights: The weight of each micro-batch there.
        factor: What the gradients of each micro-batch's loss were multiplied by, beside its weight.
        failure: The error that this rank's work has raised.
        spans: What was computed, with the times at which it began and ended, if they are noted.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        parts: Sequence[Any],
        plans: Sequence[Plan],
        *,
        units: Mapping[str, nn.Module],
        exchange: Exchange,
        seed: int,
        weigh: Callable[[Any, int], tuple[Tensor, float]],
        trained: Sequence[nn.Parameter],
        uncast: Callable[[], AbstractContextManager[Any]],
        compiled: Mapping[str, Callable[..., Any]],
        scale: float,
        is_timed: bool,
    ) -> None:
        self._step, self._model, self._parts, self._plans = step, model, parts, plans
        self._units, self._exchange = dict(units), exchange
        self._seed, self._weigh, self._trained, self._uncast = seed, weigh, trained, uncast
        self._compiled, self._scale = compiled, scale
        self.factor: float | None = None
        self.failure: Exception | None = None
        self._is_timed = is_timed
        self.spans: list[tuple[Work, float, float]] = []
        self._given: dict[tuple[int, int], tuple[list[Any], list[Tensor]]] = {}
        self._leaves: dict[tuple[int, int], dict[Item, Tensor]] = {}
        self._ends: dict[tuple[int, int], list[Tensor]] = {}
        self._gradients: dict[tuple[int, int], tuple[list[Any], list[Tensor]]] = {}
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._weight_of: dict[Any, nn.Parameter] = {}
        self.outputs: list[Any] = [None] * len(parts)
        self.weights: list[float] = [0.0] * len(parts)

    def perform(self, order: Sequence[Work]) -> None:
        """Do this rank's work in an order, and wait until all is sent.

        After an error the others get zeros. So they come to the end of the batch, where all learn of it.

        Raises:
            RankFailedError: Another rank has gone, or not sent in time.

        Collective: sends and receives between the ranks of neighboring stages.
        """
        does = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }
        for work in order:
            if self.failure is not None and work.kind in _COMPUTED:
                continue
            began, waited_s = time.time(), self._exchange.waited_s
            try:
                does[work.kind](work)
            except Exception as error:  # noqa: BLE001 - raised at the end, on all ranks, or there
                self.failure = self._exchange.fail(error)
            if self._is_timed and work.kind in _COMPUTED:
                began += self._exchange.waited_s - waited_s  # it waits before it computes
                self.spans.append((work, began, time.time()))
        for key, (waits, _) in self._given.items():  # there are some after an error alone
            self._exchange.wait(waits, "outputs", Work("F", *key), key[0] - 1)
        for key, (waits, _) in self._gradients.items():
            self._exchange.wait(waits, "gradients", Work("B", *key), key[0] + 1)
        self._exchange.finish()

    # -- forward

    def _receive_forward(self, work: Work) -> None:
        plan = self._plans[work.part]
        specs = [plan.specs[i] for i in plan.sends[work.stage - 1]]
        self._given[work.stage, work.part] = self._exchange.receive(work, specs, work.stage - 1)

    def _forward(self, work: Work) -> None:
        _, stage, part = work
        plan, key = self._plans[part], (stage, part)
        given: dict[Item, Tensor] = {}
        leaves: dict[Item, Tensor] = {}
        if stage:
            waits, tensors = self._given.pop(key)
            self._exchange.wait(waits, "outputs", work, stage - 1)
            for item, tensor in zip(plan.sends[stage - 1], tensors, strict=True):
                learns = plan.specs[item].requires_grad and torch.is_grad_enabled()
                leaves[item] = leaf = tensor.requires_grad_(learns)
                given[item] = _Given.apply(leaf) if learns else leaf  # type: ignore[no-untyped-call]
        seed = seed_of((self._seed, part))
        run = _StageRun(plan, stage, given, seed=seed, units=self._units, device=self._exchange.device)
        run.compiled = self._compiled
        output = None
        if plan.draws:
            seed_torch(seed)
        with forwards(self._units, run.call):
            try:
                output = self._step(self._model, self._parts[part])
            except _StageEndError as end:
                call_last_hooks(end)
            else:
                if stage < plan.stages - 1:
                    msg = (
                        "the step has ended before the blocks of this stage had: does it catch "
                        "BaseException? Let exceptions that are no Exception pass"
                    )
                    raise StepError(msg)
        self._leaves[key] = leaves
        if stage == plan.stages - 1:
            for leaf in tree_leaves(output):
                if isinstance(leaf, StandIn):
                    msg = (
                        "the step returns a value of what another stage has, which its run on stand-ins did "
                        "not show: what it uses must not depend on the numbers of the batch"
                    )
                    raise StepError(msg)
            # Where weights have their turn later, a graph lives as long as its loss.
            self.outputs[part] = tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, output)
            if plan.has_loss:
                loss, self.weights[part] = self._weigh(output, part)
                self._ends[key] = [loss]
            return
        ends = [leaves[i] if i in leaves else run.made[i] for i in plan.sends[stage]]
        for item, tensor in zip(plan.sends[stage], ends, strict=True):
            _check_as_expected(item, tensor, plan)
        if self._exchange.rank_of(stage + 1) == self._exchange.me:
            self._given[stage + 1, part] = [], [t.detach() for t in ends]
        self._ends[key] = ends

    def _send_forward(self, work: Work) -> None:
        plan = self._plans[work.part]
        ends = self._ends.get((work.stage, work.part)) or self._zeros(plan, plan.sends[work.stage])
        self._exchange.send(work, ends, work.stage + 1)

    def _zeros(self, plan: Plan, items: Sequence[Item]) -> list[Tensor]:
        specs = [plan.specs[item] for item in items]
        return [torch.zeros(spec.shape, dtype=spec.dtype, device=self._exchange.device) for spec in specs]

    # -- backward

    def _learning(self, stage: int, part: int) -> list[Item]:
        """Return the items with gradients that a stage sends on."""
        plan = self._plans[part]
        return [i for i in plan.sends[stage] if plan.specs[i].requires_grad]

    def _receive_backward(self, work: Work) -> None:
        items = self._learning(work.stage, work.part)
        specs = [self._plans[work.part].specs[i] for i in items]
        self._gradients[work.stage, work.part] = self._exchange.receive(work, specs, work.stage + 1)

    def _roots(self, stage: int, part: int) -> tuple[list[Tensor], list[Tensor], dict[Item, Tensor]]:
        """Return what to go back from, its gradients, and the tensors that have come from before."""
        plan, key = self._plans[part], (stage, part)
        ends, leaves = self._ends.pop(key), self._leaves.pop(key)
        if stage == plan.stages - 1:
            (loss,) = ends
            weight = self.weights[part]
            if not weight:  # its loss may be NaN
                return [], [], leaves
            if self.factor is None:  # near the mean's gradients, which half precision has the range for
                self.factor = self._scale * near_power_of_two(1 / (weight * len(self._parts)))
            return [loss], [torch.full_like(loss, weight * self.factor)], leaves
        waits, gradients = self._gradients.pop(key)
        self._exchange.wait(waits, "gradients", Work("B", stage, part), stage + 1)
        learning = [t for i, t in zip(plan.sends[stage], ends, strict=True) if plan.specs[i].requires_grad]
        return learning, gradients, leaves

    def _backward(self, work: Work) -> None:
        roots, gradients, leaves = self._roots(work.stage, work.part)
        if roots:
            with self._uncast():
                torch.autograd.backward(roots, gradients)
        self._hand_back(work, leaves)

    def _backward_inputs(self, work: Work) -> None:
        roots, gradients, leaves = self._roots(work.stage, work.part)
        inputs = [t for t in leaves.values() if t.requires_grad]
        with self._uncast():
            # A compiled unit has one node, which goes back once: to inputs and weights.
            if roots and inputs and not self._compiled:
                if not self._weight_of:  # by the nodes that add their gradients, the same in each graph
                    nodes = ((_get_grad_fn_or_grad_acc(w), w) for w in self._trained)
                    self._weight_of = {node: weight for node, weight in nodes if node is not None}
                self._groups[work.stage, work.part] = _go_back_to_inputs(
                    roots, gradients, inputs, list(self._weight_of)
                )
            elif roots:  # the first stage sends nothing back, too
                torch.autograd.backward(roots, gradients)
        self._hand_back(work, leaves)

    def _backward_weights(self, work: Work) -> None:
        groups = self._groups.pop((work.stage, work.part), [])
        weights = [self._weight_of[node] for group in groups for node in group["params"]]
        with self._uncast():
            stage_backward_weight(iter(weights), groups)

    def _hand_back(self, work: Work, leaves: dict[Item, Tensor]) -> None:
        if not work.stage:
            return
        sent = [leaves[i] for i in self._learning(work.stage - 1, work.part)]
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in sent]
        if self._exchange.rank_of(work.stage - 1) == self._exchange.me:
            self._gradients[work.stage - 1, work.part] = [], gradients
        else:
            self._inputs[work.stage, work.part] = gradients

    def _send_backward(self, work: Work) -> None:
        gradients = self._inputs.pop((work.stage, work.part), None)
        if gradients is None:
            gradients = self._zeros(self._plans[work.part], self._learning(work.stage - 1, work.part))
        self._exchange.send(work, gradients, work.stage - 1)


_CHAIN_S = 5.0  # how long a rank that has waited in vain waits for what the next one waits for
_MATES_S = 2.0  # how long a rank that has failed waits for the same of those that compute with it
_COMPUTED = {"F", "B", "I", "W"}


class _Given(torch.autograd.Function):
    """A tensor that has come from another stage, which the model may change in place.

    Forward and backward exchange nothing.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return grad


def _check_as_expected(item: Item, tensor: Tensor, plan: Plan) -> None:
    spec, unit = plan.specs[item], plan.calls[item[1]].unit
    learns = spec.requires_grad and torch.is_grad_enabled()
    found = Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    if isinstance(tensor, StandIn) or found != Spec(spec.shape, spec.dtype, learns):
        msg = (
            f"{unit!r} returns a tensor of shape {found.shape} and type {found.dtype}"
            f"{' with' if found.requires_grad else ' without'} gradients, and the next stage expects "
            f"{spec.shape}, {spec.dtype}{' with' if learns else ' without'} gradients, as in the run on "
            "stand-ins: what a block returns must not depend on the numbers of the batch"
        )
        raise StepError(msg)


def _go_back_to_inputs(
    roots: list[Tensor], gradients: list[Tensor], inputs: list[Tensor], ends: list[Any]
) -> list[dict[str, Any]]:
    """Add the gradients of inputs; return what `stage_backward_weight` needs to add those of weights.

    ``ends`` are the nodes that add the gradients of weights. Where torch's private functions do not separate
    what belongs to weights alone, all is added at once.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
    """
    nodes = [n for t in roots if (n := _get_grad_fn_or_grad_acc(t)) is not None]
    starts = [n for t in inputs if (n := _get_grad_fn_or_grad_acc(t)) is not None]
    reverse = construct_reverse_graph(nodes)
    groups = get_param_groups(starts, ends, reverse)
    passed, _ = reverse_closure(starts, set(), reverse)
    # T5's position bias is used in all layers and sent on, and no input leads to it: torch (2.13) leaves the
    # gradient of what is sent out, and has the weight in several groups.
    are_apart = all(_are_disjoint([set(g[key]) for g in groups]) for key in ("params", "intermediates"))
    if not are_apart or not passed.issuperset(nodes):
        torch.autograd.backward(roots, gradients)
        return []
    handles = []
    try:
        for group in groups:
            group["intermediates"] = list(group["intermediates"])
            group["grads"] = [None] * len(group["intermediates"])
            for i, node in enumerate(group["intermediates"]):
                handles.append(node.register_prehook(_keeper(group["grads"], i)))
        found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, grad in zip(inputs, found, strict=True):
        tensor.grad = grad
    for group in groups:
        reached = [i for i, grads in enumerate(group["grads"]) if grads is not None]
        group["intermediates"] = [group["intermediates"][i] for i in reached]
        group["grads"] = [group["grads"][i] for i in reached]
    return [group for group in groups if group["grads"]]


def _are_disjoint(sets: Sequence[set[Any]]) -> bool:
    return len(set().union(*sets)) == sum(map(len, sets))


def _keeper(grads: list[Any], place: int) -> Callable[[Any], None]:
    def keep(found: Any) -> None:
        grads[place] = found

    return keep


def weigh_output(output: Any, samples: int, *, is_sum: bool) -> tuple[Tensor, float]:
    """Return the loss of a micro-batch and its weight."""
    is_dict = isinstance(output, Mapping)
    loss = output["loss"] if is_dict else output
    if is_sum:
        return loss, 1.0
    return loss, read_weight(output["weight"]) if is_dict and "weight" in output else float(samples)
