"""A batch on its way through the stages: forwards, backwards and what is sent between them.

::

    rank 0, stage 0     F0 F1 F2    B0 F3 B1    B2    B3         the schedule 1F1B with four micro-batches
    rank 1, stage 1        F0 B0 F1 B1 F2 B2 F3 B3
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
    stage_backward_weight,
)
from tp_core import tree_leaves, tree_map
from tp_core.data import Parts, near_power_of_two, read_weight
from tp_core.errors import StepError
from tp_core.random import seed_of, seed_torch

from tp_pipeline._schedule import StageWork
from tp_pipeline._stage_dry_run import (
    InnerCall,
    Leaf,
    Origin,
    TensorSpec,
    UnitOutput,
    call_last_hooks,
    own_batch,
    tensors_of,
)
from tp_pipeline._stage_exchange import PendingTensors, StageExchange
from tp_pipeline._stage_plan import StagePlan
from tp_pipeline._stage_units import forwards
from tp_pipeline._staged_model import StagedModel
from tp_pipeline._stand_in import StandIn
from tp_pipeline._work_times import WorkTimes

_COMPUTED = {"F", "B", "I", "W"}
"""The kinds of work that compute; the others exchange tensors."""


# -- The forward pass of a stage --------------------------------------------------------------------


class _StageEndError(BaseException):  # not an Exception: the user's step may catch those
    """Raised in a step where the last block of a stage has ended."""


class _StageForward:
    """The forward pass of one stage for one micro-batch.

    Args:
        staged: The model.
        plan: The plan.
        stage: The stage.
        received: What has come from the stages before.
        seed: The seed of this micro-batch's random numbers.
        device: The device.

    Attributes:
        made: What later stages need of it, by origin.
    """

    def __init__(
        self,
        staged: StagedModel,
        plan: StagePlan,
        stage: int,
        received: Mapping[Origin, Tensor],
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.made: dict[Origin, Tensor] = {}
        self._staged, self._plan, self._stage = staged, plan, stage
        self._received, self._seed, self._device = received, seed, device
        self._next_call = 0
        if stage < plan.stages - 1:
            self._last_call = plan.last_call(stage)
        else:
            self._last_call = len(plan.calls)
        self._wanted = {origin for origin in plan.sends[stage] if origin not in received}

    def call(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what a unit returns; the replacement for the forward of each.

        Raises:
            StepError: The step calls another unit than on stand-ins.
        """
        plan, number = self._plan, self._next_call
        if number < len(plan.calls):
            expected = plan.calls[number].unit
        else:
            expected = None
        if name != expected:
            if expected is None:
                planned = "no block"
            else:
                planned = repr(expected)
            msg = (
                f"the step calls {name!r} where it called {planned} when backend 'pipeline' ran it on "
                "stand-ins: which blocks run, and in which order, must not depend on the numbers of the batch"
            )
            raise StepError(msg)
        self._next_call += 1
        if plan.stage_of[number] < self._stage:
            output = self._replay(number, args, kwargs)
        else:
            self._seed_call(number, 0)
            output = self._compute(number, forward, args, kwargs)
            self._note(("out", number), output, plan.calls[number].output)
            if number == self._last_call:
                raise _StageEndError
        self._seed_call(number, 1)
        return output

    def _compute(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._plan.replayed[number]:  # not compiled: a compiler would compile its hooks again in each call
            with self._watching(number):
                return forward(*args, **kwargs)
        compiled = self._staged.compiled.get(self._plan.calls[number].unit, forward)
        return compiled(*args, **kwargs)

    def _seed_call(self, number: int, after: int) -> None:
        """Let random numbers depend on the micro-batch and the call, and on neither stage nor schedule."""
        if self._plan.draws:
            seed_torch(seed_of((self._seed, number, after)), [self._device])

    def _note(self, key: Origin, output: Any, expected: UnitOutput) -> None:
        """Keep what later stages need of an output."""
        leaves = tensors_of(output)
        if len(leaves) != len(expected.specs):
            msg = (
                f"{self._plan.calls[key[1]].unit!r} returns {len(leaves)} tensors, and returned "
                f"{len(expected.specs)} when backend 'pipeline' ran the step on stand-ins: what it returns "
                "must not depend on the numbers of the batch"
            )
            raise StepError(msg)
        for index, leaf in enumerate(leaves):
            if (*key, index) in self._wanted:
                self.made[*key, index] = leaf

    def _replay(self, number: int, args: Any, kwargs: Any) -> Any:
        """Return what a unit of an earlier stage has returned, where it is needed, else without numbers."""
        call = self._plan.calls[number]
        arguments = [*tree_leaves(args), *tree_leaves(kwargs)]
        for inner in self._plan.replayed[number]:
            # Its hooks collect outputs for use outside of the block, as transformers' router logits.
            module = self._staged.units[call.unit].get_submodule(inner.name)
            value = self._filled(inner.output, ("inner", number, inner.name, inner.time), [])
            with forwards({inner.name: module}, lambda _n, _f, v=value, *_a, **_k: v):
                module()
        return self._filled(call.output, ("out", number), arguments)

    def _filled(self, output: UnitOutput, key: Origin, arguments: Sequence[Any]) -> Any:
        """Return an output with the tensors that have come, and stand-ins for the others."""

        def fill(value: Any) -> Any:
            if not isinstance(value, Leaf):
                return value
            if value.is_argument:
                return arguments[value.index]
            received = self._received.get((*key, value.index))
            if received is None:
                return StandIn.of(output.specs[value.index], self._device)
            return received

        return tree_map(fill, output.structure)

    @contextmanager
    def _watching(self, number: int) -> Iterator[None]:
        """Keep what modules within a unit return for use outside of it."""
        unit = self._staged.units[self._plan.calls[number].unit]
        by_name: dict[str, dict[int, InnerCall]] = {}
        for inner in self._plan.replayed[number]:
            by_name.setdefault(inner.name, {})[inner.time] = inner

        def watch(name: str, times: dict[int, InnerCall]) -> Callable[..., None]:
            count = 0

            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                nonlocal count
                if count in times:
                    self._note(("inner", number, name, count), output, times[count].output)
                count += 1

            return hook

        handles = []
        for name, times in by_name.items():
            handles.append(unit.get_submodule(name).register_forward_hook(watch(name, times)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _ReceivedInput(torch.autograd.Function):
    """A tensor that has come from another stage, which the model may change in place.

    Forward and backward exchange nothing.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return grad


# -- The work of a rank -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch that is ready to run.

    Attributes:
        step: The user's step.
        parts: The micro-batches.
        plans: The plan of each.
    """

    step: Callable[..., Any]
    parts: Parts
    plans: Sequence[StagePlan]


def _none_pending() -> PendingTensors:
    return PendingTensors([], [])


@dataclass(slots=True)
class _StageState:
    """What a rank holds of a micro-batch in one of its stages.

    Attributes:
        received: The outputs of the stage before, until the forward pass.
        leaves: The same tensors, in which their gradients arise, until the backward pass.
        ends: What the stage sends to the next one, or its loss, until the backward pass.
        gradients: The gradients of these, until the backward pass.
        input_gradients: The gradients of what was received, until they are sent.
        groups: What is left of the graph for the gradients of weights, if they have their turn later.
    """

    received: PendingTensors = field(default_factory=_none_pending)
    leaves: dict[Origin, Tensor] = field(default_factory=dict)
    ends: list[Tensor] = field(default_factory=list)
    gradients: PendingTensors = field(default_factory=_none_pending)
    input_gradients: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)


class BatchRun:
    """The work of this rank for one batch.

    Args:
        batch: The micro-batches and their plans.
        staged: The model.
        exchange: Sends and receives.
        trained: The trained parameters that this rank has.
        seed: The seed of the batch's random numbers.
        is_sum: Whether the step's loss is a sum over samples, and not a mean.
        scale: A factor on losses, which keeps gradients in half precision from underflow.
        is_timed: Whether to note when what is computed.

    Attributes:
        outputs: What the step has returned for each micro-batch, on the last stage's rank.
        weights: The weight of each micro-batch there.
        factor: What the gradients of each micro-batch's loss were multiplied by, beside its weight.
        failure: The error that this rank's work has raised.
    """

    def __init__(
        self,
        batch: PlannedBatch,
        staged: StagedModel,
        exchange: StageExchange,
        *,
        trained: Sequence[nn.Parameter],
        seed: int,
        is_sum: bool,
        scale: float,
        is_timed: bool,
    ) -> None:
        self.outputs: list[Any] = [None] * len(batch.parts)
        self.weights: list[float] = [0.0] * len(batch.parts)
        self.factor: float | None = None
        self.failure: Exception | None = None
        self._batch, self._staged, self._exchange = batch, staged, exchange
        self._trained, self._seed = trained, seed
        self._is_sum, self._scale = is_sum, scale
        self._times = WorkTimes(exchange.device) if is_timed else None
        self._begin: Any = None  # the mark at which the work that is under way began to compute

        self._states: defaultdict[tuple[int, int], _StageState] = defaultdict(_StageState)
        # The parameters, by the nodes that add their gradients.
        self._weight_of: dict[Any, nn.Parameter] = {}

    def perform(self, order: Sequence[StageWork]) -> None:
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
            times = self._times if work.kind in _COMPUTED else None
            if times is not None:
                self._begin = times.mark()
            try:
                does[work.kind](work)
            except Exception as error:  # noqa: BLE001 - raised at the end, on all ranks, or there
                self.failure = self._exchange.fail(error)
            if times is not None:
                times.note(work, self._begin, times.mark())
        if self.failure is not None:
            self._wait_for_unused()
        self._exchange.finish()

    def spans(self) -> list[tuple[StageWork, float, float]]:
        """Return what was computed, with the times at which it began and ended, if they were noted."""
        if self._times is None:
            return []
        return self._times.spans()

    def _wait(self, requests: Sequence[Any], what: str, work: StageWork, stage: int) -> None:
        """Wait for tensors that come from the rank of a stage; what is timed begins when they are here."""
        self._exchange.wait(requests, what, work, stage)
        if self._times is not None:
            self._begin = self._times.mark()

    def _wait_for_unused(self) -> None:
        """Wait for what has come, or comes, after an error: no work has done so."""
        for (stage, part), state in self._states.items():
            self._wait(state.received.requests, "outputs", StageWork("F", stage, part), stage - 1)
        for (stage, part), state in self._states.items():
            self._wait(state.gradients.requests, "gradients", StageWork("B", stage, part), stage + 1)

    def _state_of(self, work: StageWork) -> _StageState:
        return self._states[work.stage, work.part]

    # -- forward

    def _receive_forward(self, work: StageWork) -> None:
        plan = self._batch.plans[work.part]
        specs = [plan.specs[origin] for origin in plan.sends[work.stage - 1]]
        self._state_of(work).received = self._exchange.receive(work, specs, work.stage - 1)

    def _forward(self, work: StageWork) -> None:
        stage, part = work.stage, work.part
        plan, state = self._batch.plans[part], self._state_of(work)
        received = self._wait_for_inputs(work) if stage else {}
        seed = seed_of((self._seed, part))
        if plan.draws:
            seed_torch(seed, [self._exchange.device])
        forward = _StageForward(self._staged, plan, stage, received, seed=seed, device=self._exchange.device)
        output = self._run_step(forward, work)
        if stage == plan.stages - 1:
            self._finish_step(output, work)
            return
        ends = []
        for origin in plan.sends[stage]:
            if origin in state.leaves:
                tensor = state.leaves[origin]
            else:
                tensor = forward.made[origin]
            _check_as_expected(origin, tensor, plan)
            ends.append(tensor)
        state.ends = ends  # all of them or none: after an error the next stage gets zeros
        if self._exchange.rank_of(stage + 1) == self._exchange.me:
            inputs = [tensor.detach() for tensor in ends]
            self._states[stage + 1, part].received = PendingTensors([], inputs)

    def _wait_for_inputs(self, work: StageWork) -> dict[Origin, Tensor]:
        """Return what has come from the stage before, as the step sees it."""
        plan, state = self._batch.plans[work.part], self._state_of(work)
        pending, state.received = state.received, _none_pending()
        self._wait(pending.requests, "outputs", work, work.stage - 1)
        received: dict[Origin, Tensor] = {}
        for origin, tensor in zip(plan.sends[work.stage - 1], pending.tensors, strict=True):
            learns = plan.specs[origin].requires_grad and torch.is_grad_enabled()
            leaf = tensor.requires_grad_(learns)
            state.leaves[origin] = received[origin] = leaf
            if learns:
                received[origin] = _ReceivedInput.apply(leaf)  # type: ignore[no-untyped-call]  # torch's
        return received

    def _run_step(self, forward: _StageForward, work: StageWork) -> Any:
        """Return what the step returns, if this is the last stage.

        Raises:
            StepError: It has ended before the stage had.
        """
        batch = self._batch
        part = own_batch(batch.parts[work.part], clones=batch.plans[work.part].writes_batch)
        with forwards(self._staged.units, forward.call):
            try:
                output = batch.step(self._staged.model, part)
            except _StageEndError as end:
                call_last_hooks(end)
                return None
        if work.stage < batch.plans[work.part].stages - 1:
            msg = (
                "the step has ended before the blocks of this stage had: does it catch "
                "BaseException? Let exceptions that are no Exception pass"
            )
            raise StepError(msg)
        return output

    def _finish_step(self, output: Any, work: StageWork) -> None:
        """Keep the output of a step, and its loss to go back from."""
        part = work.part
        if any(isinstance(leaf, StandIn) for leaf in tree_leaves(output)):
            msg = (
                "the step returns a value of what another stage has, which its run on stand-ins did "
                "not show: what it uses must not depend on the numbers of the batch"
            )
            raise StepError(msg)
        # Where weights have their turn later, a graph lives as long as its loss.
        self.outputs[part] = tree_map(_detached, output)
        if self._batch.plans[part].has_loss:
            samples = self._batch.parts.counts[part]
            loss, self.weights[part] = _weigh(output, samples, is_sum=self._is_sum)
            self._state_of(work).ends = [loss]

    def _send_forward(self, work: StageWork) -> None:
        plan = self._batch.plans[work.part]
        ends = self._state_of(work).ends or self._zeros(plan, plan.sends[work.stage])
        self._exchange.send(work, ends, work.stage + 1)

    def _zeros(self, plan: StagePlan, origins: Sequence[Origin]) -> list[Tensor]:
        specs = [plan.specs[origin] for origin in origins]
        return [torch.zeros(spec.shape, dtype=spec.dtype, device=self._exchange.device) for spec in specs]

    # -- backward

    def _differentiated(self, stage: int, part: int) -> list[Origin]:
        """Return the origins of the values with gradients that a stage sends on."""
        plan = self._batch.plans[part]
        return [origin for origin in plan.sends[stage] if plan.specs[origin].requires_grad]

    def _receive_backward(self, work: StageWork) -> None:
        plan = self._batch.plans[work.part]
        specs = [plan.specs[origin] for origin in self._differentiated(work.stage, work.part)]
        self._state_of(work).gradients = self._exchange.receive(work, specs, work.stage + 1)

    def _take_roots(self, work: StageWork) -> tuple[list[Tensor], list[Tensor]]:
        """Return what to go back from, and its gradients.

        The losses of micro-batches are weighted: see Note [how gradients of stages are counted], 1.
        """
        stage, part = work.stage, work.part
        plan, state = self._batch.plans[part], self._state_of(work)
        ends, state.ends = state.ends, []
        if stage == plan.stages - 1:
            (loss,) = ends
            weight = self.weights[part]
            if not weight:  # its loss may be NaN
                return [], []
            if self.factor is None:  # near the mean's gradients, which half precision has the range for
                self.factor = self._scale * near_power_of_two(1 / (weight * len(self._batch.parts)))
            return [loss], [torch.full_like(loss, weight * self.factor)]
        pending, state.gradients = state.gradients, _none_pending()
        self._wait(pending.requests, "gradients", StageWork("B", stage, part), stage + 1)
        roots = []
        for origin, tensor in zip(plan.sends[stage], ends, strict=True):
            if plan.specs[origin].requires_grad:
                roots.append(tensor)
        return roots, pending.tensors

    def _backward(self, work: StageWork) -> None:
        roots, gradients = self._take_roots(work)
        if roots:
            with self._without_autocast():
                torch.autograd.backward(roots, gradients)
        self._hand_back(work)

    def _backward_inputs(self, work: StageWork) -> None:
        roots, gradients = self._take_roots(work)
        state = self._state_of(work)
        inputs = [leaf for leaf in state.leaves.values() if leaf.requires_grad]
        with self._without_autocast():
            # A compiled unit has one node, which goes back once: to inputs and weights.
            if roots and inputs and not self._staged.compiled:
                if not self._weight_of:  # they are the same in each graph
                    self._weight_of = _nodes_of(self._trained)
                state.groups = _go_back_to_inputs(roots, gradients, inputs, list(self._weight_of))
            elif roots:  # the first stage sends nothing back, too
                torch.autograd.backward(roots, gradients)
        self._hand_back(work)

    def _backward_weights(self, work: StageWork) -> None:
        state = self._state_of(work)
        groups, state.groups = state.groups, []
        weights = [self._weight_of[node] for group in groups for node in group["params"]]
        with self._without_autocast():
            # What groups share is for all of them, as with PegasusX: the graph ends with the last use.
            stage_backward_weight(iter(weights), groups, retain_graph=True)

    def _without_autocast(self) -> AbstractContextManager[Any]:
        # The trainer's autocast is around the whole step, and a backward pass runs in the types of forward.
        kind = self._exchange.device.type
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
        return nullcontext()

    def _hand_back(self, work: StageWork) -> None:
        """Give the gradients of inputs to the stage before, or keep them until they are sent."""
        stage, part = work.stage, work.part
        state = self._state_of(work)
        leaves, state.leaves = state.leaves, {}
        if not stage:
            return
        gradients = []
        for origin in self._differentiated(stage - 1, part):
            leaf = leaves[origin]
            if leaf.grad is None:
                gradient = torch.zeros_like(leaf)
            else:
                gradient = leaf.grad
            gradients.append(gradient)
        if self._exchange.rank_of(stage - 1) == self._exchange.me:
            self._states[stage - 1, part].gradients = PendingTensors([], gradients)
        else:
            state.input_gradients = gradients

    def _send_backward(self, work: StageWork) -> None:
        state = self._state_of(work)
        gradients, state.input_gradients = state.input_gradients, []
        if not gradients:
            plan = self._batch.plans[work.part]
            gradients = self._zeros(plan, self._differentiated(work.stage - 1, work.part))
        self._exchange.send(work, gradients, work.stage - 1)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return value


def _weigh(output: Any, samples: int, *, is_sum: bool) -> tuple[Tensor, float]:
    """Return the loss of a micro-batch and its weight."""
    loss = output["loss"] if isinstance(output, Mapping) else output
    if is_sum:
        return loss, 1.0
    if isinstance(output, Mapping) and "weight" in output:
        return loss, read_weight(output["weight"])
    return loss, float(samples)


def _check_as_expected(origin: Origin, tensor: Tensor, plan: StagePlan) -> None:
    """Check that a tensor has the form that the next stage expects.

    Raises:
        StepError: It has another one.
    """
    spec = plan.specs[origin]
    learns = spec.requires_grad and torch.is_grad_enabled()
    actual = TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    if isinstance(tensor, StandIn) or actual != TensorSpec(spec.shape, spec.dtype, learns):
        unit = plan.calls[origin[1]].unit
        has = "with" if actual.requires_grad else "without"
        expects = "with" if learns else "without"
        msg = (
            f"{unit!r} returns a tensor of shape {actual.shape} and type {actual.dtype} {has} gradients, and "
            f"the next stage expects {spec.shape}, {spec.dtype} {expects} gradients, as in the run on "
            "stand-ins: what a block returns must not depend on the numbers of the batch"
        )
        raise StepError(msg)


# -- Backward in two turns --------------------------------------------------------------------------


def _nodes_of(weights: Sequence[nn.Parameter]) -> dict[Any, nn.Parameter]:
    """Return parameters by the nodes that add their gradients."""
    nodes = {}
    for weight in weights:
        node = _get_grad_fn_or_grad_acc(weight)
        if node is not None:
            nodes[node] = weight
    return nodes


def _go_back_to_inputs(
    roots: list[Tensor], gradients: list[Tensor], inputs: list[Tensor], weight_nodes: list[Any]
) -> list[dict[str, Any]]:
    """Add the gradients of inputs; return what `stage_backward_weight` needs to add those of weights.

    Where torch's private functions do not separate what belongs to weights alone, all is added at once.

    Args:
        roots: What to go back from.
        gradients: Its gradients.
        inputs: What the stage has received.
        weight_nodes: The nodes that add the gradients of weights.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
    """
    root_nodes = _grad_nodes(roots)
    input_nodes = _grad_nodes(inputs)
    reverse = construct_reverse_graph(root_nodes)
    groups = get_param_groups(input_nodes, weight_nodes, reverse)
    passed, _ = reverse_closure(input_nodes, set(), reverse)
    # T5's position bias is used in all layers and sent on, and no input leads to it: torch (2.13) leaves the
    # gradient of what is sent out, and has the weight in several groups.
    weights_are_disjoint = _are_disjoint([group["params"] for group in groups])
    nodes_are_disjoint = _are_disjoint([group["intermediates"] for group in groups])
    if not weights_are_disjoint or not nodes_are_disjoint or not passed.issuperset(root_nodes):
        torch.autograd.backward(roots, gradients)
        return []
    handles = []
    try:
        for group in groups:
            group["intermediates"] = list(group["intermediates"])
            group["grads"] = [None] * len(group["intermediates"])
            for place, node in enumerate(group["intermediates"]):
                handles.append(node.register_prehook(_keeper(group["grads"], place)))
        input_gradients = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, gradient in zip(inputs, input_gradients, strict=True):
        tensor.grad = gradient
    for group in groups:
        reached = [place for place, grads in enumerate(group["grads"]) if grads is not None]
        group["intermediates"] = [group["intermediates"][place] for place in reached]
        group["grads"] = [group["grads"][place] for place in reached]
    return [group for group in groups if group["grads"]]


def _grad_nodes(tensors: Sequence[Tensor]) -> list[Any]:
    nodes = map(_get_grad_fn_or_grad_acc, tensors)
    return [node for node in nodes if node is not None]


def _are_disjoint(groups: Sequence[Iterable[Any]]) -> bool:
    sets = [set(group) for group in groups]
    return len(set().union(*sets)) == sum(map(len, sets))


def _keeper(grads: list[Any], place: int) -> Callable[[Any], None]:
    """Return a hook that keeps the gradients of a node."""

    def keep(gradients: Any) -> None:
        grads[place] = gradients

    return keep
