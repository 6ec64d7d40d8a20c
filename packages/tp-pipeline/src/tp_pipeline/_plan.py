"""How a model is cut into stages: found by one run of the step on stand-ins, on each rank alike.

The model's own forward runs on every rank. Its *units* are the modules between which it can be cut: the
blocks that repeat, and what stands beside them (embeddings, norms, heads). A stage computes the calls of its
own units. What runs between the calls ("glue": masks, positions, sums) runs everywhere, as it costs little.

Which tensors cross a cut is seen in the run on stand-ins. There a unit computes on fake tensors, which have
no memory, and its outputs are replaced by random ones of known *sources*: every operator passes the
sources of its inputs on to its outputs. So a skip connection, an encoder's states for each decoder stage, or
a value that a hook has collected within a block is found wherever it is used::

    out    (call, leaf)                 a tensor that a unit has returned
    inner  (call, module, time, leaf)   one that a module within a unit has returned, and which is used
    outside
    param  name                         a parameter
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork  # private, and how torch's own fake collectives end
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import _global_forward_hooks, register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import tree_leaves, tree_map
from tp_core.errors import ConfigError, ModelError, StepError
from tp_core.modules import repeated_blocks

Item = tuple[Any, ...]
"""A source of values, as the head of this module lists them."""

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_READ_PAST = ("numpy", "tolist")
_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item"}


class Leaf:
    """The place of a tensor in what a module has returned.

    Or of an argument that it has returned as it is, for example a cache.
    """

    def __init__(self, index: int, *, is_argument: bool = False) -> None:
        self.index, self.is_argument = index, is_argument


@dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(slots=True)
class Output:
    """What a module has returned: its structure with `Leaf` in place of tensors, and their specs."""

    structure: Any
    specs: list[Spec]


@dataclass(slots=True)
class InnerCall:
    """A call of a module within a unit: its name in the unit, which of its calls it is, what it returned."""

    name: str
    time: int
    output: Output


@dataclass(slots=True)
class Call:
    """A call of a unit in the run of the step.

    Attributes:
        unit: The unit's name.
        output: What it returned.
        needs: The sources that it has used.
        inner: The calls of modules within it.
    """

    unit: str
    output: Output
    needs: set[Item] = field(default_factory=set)
    inner: list[InnerCall] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """The stages of a step, for batches of one form.

    Attributes:
        calls: The calls of units, in their order.
        stage_of: The stage of each call.
        sends: For each stage, the items that it sends to the next one.
        holders: For each parameter that is used, the stages that use it.
        specs: What is known of the items.
        replayed: For each call, the calls within it with outputs that are used outside.
        has_loss: Whether the step returns a loss to differentiate.
        draws: Whether it draws random numbers.
        stages: The number of stages.
    """

    calls: list[Call]
    stage_of: list[int]
    sends: list[list[Item]]
    holders: dict[str, set[int]]
    specs: dict[Item, Spec]
    replayed: list[list[InnerCall]]
    has_loss: bool
    draws: bool
    stages: int

    def last_call(self, stage: int) -> int:
        """Return the number of a stage's last call."""
        return max(i for i, s in enumerate(self.stage_of) if s == stage)

    def describe(self) -> object:
        """Return what must be the same on all ranks."""
        return [c.unit for c in self.calls], self.stage_of, self.sends, self.has_loss


# -- Units ------------------------------------------------------------------------------------------


def find_units(model: nn.Module, cuts: Sequence[str] | None) -> tuple[dict[str, nn.Module], set[str]]:
    """Return the units of a model by name, and the names of those with which a stage may begin.

    Raises:
        ModelError: The model has no blocks that repeat.
        ConfigError: A cut by hand is no module of the model.
    """
    modules = dict(model.named_modules())
    if cuts is not None:
        missing = next((name for name in cuts if name not in modules or not name), None)
        if missing is not None:
            known = [n for n, m in modules.items() if n and next(m.parameters(), None) is not None]
            msg = (
                f"the option cuts of backend 'pipeline' names {missing!r}, which is no module of the model; "
                f"it has {', '.join(known[:8])}{', ...' * (len(known) > 8)}"
            )
            raise ConfigError(msg)
        starts = set(cuts)
    else:
        starts = set(_blocks(model))
    ancestors = {"" if "." not in n else n.rpartition(".")[0] for n in starts} | {""}
    for name in list(ancestors):
        while name:
            name = name.rpartition(".")[0]  # noqa: PLW2901 - upwards
            ancestors.add(name)
    nested = next((n for n in starts if n in ancestors), None)
    if nested is not None:
        msg = f"the option cuts names {nested!r} and a module within it; a stage begins with one of them"
        raise ConfigError(msg)
    units = {
        name: module
        for name, module in modules.items()
        if name
        and name.rpartition(".")[0] in ancestors
        and name not in ancestors
        and (name in starts or next(module.parameters(), None) is not None)
    }
    return units, starts


def _blocks(model: nn.Module) -> list[str]:
    try:
        return list(repeated_blocks(model))
    except ModelError:
        pass
    # Layers of a kind each, as in Sequential(Linear, Tanh, Linear): the longest list of them.
    lists = {
        name: [
            f"{name}.{n}" if name else n
            for n, m in module.named_children()
            if any(True for _ in m.parameters())
        ]
        for name, module in model.named_modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
    }
    longest = max(lists.values(), key=len, default=[])
    if len(longest) < 2:
        msg = (
            "backend 'pipeline' finds no place to cut the model: it has no blocks that repeat in a "
            "Sequential or ModuleList; name the modules with which stages begin: "
            "options={'pipeline': {'cuts': ['decoder', ...]}}"
        )
        raise ModelError(msg)
    return longest


# -- The run on stand-ins ---------------------------------------------------------------------------


class _RefusedError(BaseException):
    """Raised in an operator in place of its cause: an error of types would let torch try another operator."""


class _NeedsNumbersError(BaseException):  # not an Exception: the model may catch those
    """Raised where a unit decides by numbers, which fake tensors do not have."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


def make_plan(
    step: Callable[..., Any],
    model: nn.Module,
    batch: Any,
    *,
    shape_of: Callable[[str], torch.Size],
    count_of: Callable[[str], int],
    cuts: Sequence[str] | None,
    starts: Sequence[tuple[str, int]] | None,
    stages: int,
    device: torch.device,
) -> tuple[Plan, list[tuple[str, int]]]:
    """Run a step on stand-ins, and return its stages and the calls with which they begin.

    Args:
        step: The user's step.
        model: The plain model; parameters that this rank has not may be empty.
        batch: A micro-batch.
        shape_of: Returns the shape of a parameter by its name, before parts of it were freed.
        count_of: Returns the number of elements of a whole parameter by its name, the same on all ranks.
        cuts: The modules with which stages begin, or ``None``.
        starts: The calls with which stages begin, if the model is cut already: names and which call of it.
        stages: The number of stages.
        device: The device.

    Raises:
        ModelError: The model cannot be cut.
        ConfigError: The options do not fit the model.
    """
    units, can_start = find_units(model, cuts)
    with_numbers: set[type] = set()
    while True:
        run = _Run(model, units, shape_of, with_numbers, device)
        try:
            with run.recording():
                output = step(model, batch)
            return _cut(run, output, can_start, cuts, starts, stages, count_of)
        except _NeedsNumbersError as found:
            call_last_hooks(found)
            with_numbers.add(found.kind)
        except _RefusedError as refused:
            call_last_hooks(refused)
            raise cast("ModelError", refused.__cause__) from None
        finally:
            run.forget()


class _Run:
    """One run of a step on stand-ins."""

    def __init__(
        self,
        model: nn.Module,
        units: dict[str, nn.Module],
        shape_of: Callable[[str], torch.Size],
        with_numbers: set[type],
        device: torch.device,
    ) -> None:
        self.model, self.units, self.device = model, units, device
        self.shape_of, self.with_numbers = shape_of, with_numbers
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.calls: list[Call] = []
        self.decisions: list[tuple[int, set[Item]]] = []
        self.trackers = _Tracker(self)
        self.sources: dict[int, frozenset[Item]] = {}  # by the address of a storage
        self.alive: list[Any] = []  # or addresses would be used again
        self.inner_items: dict[int, Item] = {}  # by the address of a storage, too
        self._real: dict[int, Tensor] = {}
        self._fakes: dict[int, Any] = {}  # by the identity of a tensor

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace parameters by stand-ins and the units' forwards by recorded ones meanwhile."""
        buffers = [(b, b.detach().clone()) for b in self.model.buffers()]
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), swapped(self.model, self._stand_in_of):
            torch.manual_seed(0)  # all ranks see the same
            with forwards(self.units, self._call), self._watched_numbers(), self.trackers:
                yield
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    @contextmanager
    def _watched_numbers(self) -> Iterator[None]:
        """Note what reads numbers past operators, which modes of torch do not see."""

        def watched(body: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                within = self.trackers.within
                if within is None:
                    self.decisions.append((len(self.calls), set(self.items_of(tensor))))
                elif isinstance(tensor, FakeTensor):
                    raise _NeedsNumbersError(type(self.units[self.calls[within].unit]))
                return body(tensor, *args, **kwargs)

            return read

        before = {name: vars(Tensor).get(name) for name in _READ_PAST}
        try:
            for name in before:
                setattr(Tensor, name, watched(getattr(Tensor, name)))
            yield
        finally:
            for name, body in before.items():
                if body is None:  # its base has it
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, body)

    def _stand_in_of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        with self.mode:
            fake = torch.empty(self.shape_of(name), dtype=parameter.dtype, device=self.device)
        stand_in = nn.Parameter(fake, parameter.requires_grad)
        self.note(stand_in, {("param", name)})
        return stand_in

    def forget(self) -> None:
        """Free the tensors of the run, which refers to itself: the collector may come only after steps."""
        for values in (self.alive, self._real, self._fakes):
            values.clear()

    def note(self, tensor: Tensor, items: set[Item] | frozenset[Item]) -> None:
        """Record the sources of a tensor, and of all that share its memory."""
        storage = tensor.untyped_storage()
        self.sources[storage._cdata] = frozenset(items)  # private: fake storages have no data_ptr()
        self.alive.append(storage)

    def items_of(self, tensor: Tensor) -> frozenset[Item]:
        """Return the sources of a tensor."""
        return self.sources.get(tensor.untyped_storage()._cdata, frozenset())

    def numbers_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor with numbers for a fake one, the same each time."""
        key = tensor.untyped_storage()._cdata
        if key not in self._real or self._real[key].shape != tensor.shape:
            self._real[key] = self._random(tensor)
            self.note(self._real[key], self.items_of(tensor))
        return self._real[key]

    def fake_for(self, value: Any) -> Any:
        """Return a fake tensor for one with numbers; other values as they are."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._fakes.get(id(value))
        if fake is None:
            # Not by torch's own conversion, which would look at the gradients of the tensor.
            with self.mode:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            self._fakes[id(value)] = fake
            self.alive.append(value)
        return fake

    # -- a call of a unit

    def _call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.trackers.within is not None:  # a unit calls another one: a part of it
            return forward(*args, **kwargs)
        number, unit = len(self.calls), self.units[name]
        call = Call(name, Output(None, []))
        self.calls.append(call)
        counts: dict[str, int] = {}
        names = {id(m): n for n, m in unit.named_modules() if n}

        def record(module: nn.Module, _args: Any, output: Any) -> None:
            inner = names.get(id(module))
            if inner is None or self.trackers.within != number:
                return
            time = counts[inner] = counts.get(inner, -1) + 1
            described = _described(output, (), inner)
            if described is not None:
                call.inner.append(InnerCall(inner, time, described))
                for i, leaf in enumerate(_tensors(output)):
                    key = leaf.untyped_storage()._cdata
                    if module._forward_hooks or key not in self.inner_items:  # which collect it elsewhere
                        self.inner_items[key] = ("inner", number, inner, time, i)

        handle = register_module_forward_hook(record)
        self.trackers.within = number
        try:
            if type(unit) in self.with_numbers:
                with swapped(unit, lambda _, p: nn.Parameter(self.numbers_for(p), p.requires_grad)):
                    output = forward(*args, **kwargs)
            else:
                self.trackers.is_below = True
                with self.mode, _Within(self):
                    output = forward(*args, **kwargs)
        except (
            DynamicOutputShapeException,
            DataDependentOutputException,
            UnsupportedOperatorException,
        ) as e:
            raise _NeedsNumbersError(type(unit)) from e
        finally:
            self.trackers.within, self.trackers.is_below = None, False
            handle.remove()
        described = _described(output, (*tree_leaves(args), *tree_leaves(kwargs)), name)
        if described is None:
            kinds = sorted({type(v).__name__ for v in tree_leaves(output) if not isinstance(v, Tensor)})
            msg = (
                f"{name!r} ({type(unit).__name__}) returns {', '.join(kinds)} beside tensors, which another "
                "stage cannot be sent; let it return tensors, numbers and None, in lists, tuples and dicts"
            )
            raise ModelError(msg)
        call.output = described
        call.needs = {item for item in call.needs if item[:2] not in {("within", number), ("out", number)}}
        count = iter(range(len(described.specs)))

        def replace(value: Any) -> Any:
            return (
                self._as_output(value, ("out", number, next(count))) if isinstance(value, Tensor) else value
            )

        return tree_map(replace, output)

    def _as_output(self, value: Tensor, item: Item) -> Tensor:
        real = self._random(value)
        self.note(real, {item})
        return real

    def _random(self, like: Tensor) -> Tensor:
        quiet, self.trackers.is_quiet = self.trackers.is_quiet, True
        try:
            if like.dtype.is_floating_point or like.dtype.is_complex:
                with torch.no_grad():
                    real = torch.rand(like.shape, dtype=torch.float32, device=self.device).to(like.dtype)
                with torch.enable_grad():  # no leaf, which could not be changed in place
                    return real.requires_grad_().clone() if like.requires_grad else real
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        finally:
            self.trackers.is_quiet = quiet


class _Tracker(TorchDispatchMode):
    """Passes the sources of inputs on to outputs, in glue and in units that run with numbers."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.run = run
        self.within: int | None = None
        self.is_quiet = self.is_below = self.draws = False

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_below:  # what fake tensors do inside
            return func(*args, **(kwargs or {}))
        return self.track(func, args, kwargs or {})

    def track(self, func: Any, args: Any, kwargs: Any, *, is_fake: bool = False) -> Any:
        """Run an operator, on fake tensors or not, and record the sources of its outputs."""
        run, call = self.run, self.within
        if self.is_quiet:
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        found: set[Item] = set()
        for tensor in inputs:
            found |= run.items_of(tensor)
        found = self.resolved(found, inputs, call)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.draws = self.draws or is_random
        if call is None:
            args, kwargs = tree_map(self._with_numbers, (args, kwargs))
            if is_random:
                found.add(("random", len(run.calls), func._opname))
            if func._opname in _READS and any(_call_of(i) is not None for i in found):
                run.decisions.append((len(run.calls), found))
        else:
            run.calls[call].needs |= {i for i in found if i[0] != "within"}
            found = {("within", call)}
        if func.namespace == "c10d" and any(isinstance(t, FakeTensor) for t in inputs):
            outputs = exchange_nothing(func, args)
        elif is_fake:
            fakes = tree_map(run.fake_for, (args, kwargs))
            outputs = func(*fakes[0], **fakes[1])
        else:
            outputs = func(*args, **kwargs)
        if func.namespace == "c10d":  # it has filled tensors that were made for it
            for tensor in inputs if call is None else ():
                run.note(tensor, found)
            return outputs
        # What shares its memory with an input has the sources of that, too.
        known = {t.untyped_storage()._cdata for t in inputs}
        for tensor in _tensors(outputs):
            is_view = tensor.untyped_storage()._cdata in known
            if not (is_view and call is not None and not func._schema.is_mutable):
                run.note(tensor, found | (run.items_of(tensor) if is_view else set()))
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in _tensors(value):
                        run.note(tensor, found | run.items_of(tensor))
        return outputs

    def _with_numbers(self, value: Any) -> Any:
        return self.run.numbers_for(value) if isinstance(value, FakeTensor) else value

    def resolved(self, found: set[Item], inputs: list[Tensor], call: int | None = None) -> set[Item]:
        """Replace what was made within another unit by the module there that has returned it.

        Raises:
            ModelError: No module has.
        """
        run, own = self.run, ("within", call)
        if all(i[0] != "within" or i == own for i in found):
            return found
        resolved = {i for i in found if i[0] != "within"}
        for tensor in inputs:
            within = [i for i in run.items_of(tensor) if i[0] == "within" and i != own]
            if not within:
                continue
            item = run.inner_items.get(tensor.untyped_storage()._cdata)
            if item is None:
                unit = run.calls[within[0][1]].unit
                msg = (
                    f"backend 'pipeline' cannot cut the model: a tensor of shape {tuple(tensor.shape)} that "
                    f"{unit!r} makes is used outside of it, and no module there returns it; return it from "
                    f"{unit!r}"
                )
                raise _RefusedError from ModelError(msg)
            resolved.add(item)
        return resolved


class _Within(TorchDispatchMode):
    """The tracker, above fake tensors."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run.trackers.track(func, args, kwargs or {}, is_fake=True)


def exchange_nothing(func: Any, args: Sequence[Any]) -> Any:
    """Return what a collective does, with tensors that have no numbers to exchange.

    Those that it fills are among its arguments.
    """
    done = FakeWork().boxed()
    return done if len(func._schema.returns) == 1 else (args[0], done)


_CALL = nn.Module._call_impl.__code__  # private: a traceback has no other mark of a module's call


def call_last_hooks(error: BaseException) -> None:
    """Call the hooks that modules have for each end of a call, after an error that torch does not look at.

    torch calls them after each `Exception`. Without them, random numbers of a split model would stay apart.
    """
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed([f for f in frames if f.f_code is _CALL]):
        module, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
        for key in module._forward_hooks_always_called:
            given = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
            module._forward_hooks[key](module, *given, None)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _described(output: Any, arguments: Sequence[Any], _name: str) -> Output | None:
    """Return the structure of what a module has returned; ``None`` if it has other objects in it."""
    specs: list[Spec] = []
    others = {id(a): i for i, a in enumerate(arguments) if not isinstance(a, (Tensor, *_PLAIN))}
    fine = True

    def describe(value: Any) -> Any:
        nonlocal fine
        if isinstance(value, Tensor):
            specs.append(Spec(tuple(value.shape), value.dtype, value.requires_grad))
            return Leaf(len(specs) - 1)
        if id(value) in others:
            return Leaf(others[id(value)], is_argument=True)
        fine = fine and isinstance(value, _PLAIN)
        return value

    structure = tree_map(describe, output)
    return Output(structure, specs) if fine else None


# -- The cut ----------------------------------------------------------------------------------------


def _cut(
    run: _Run,
    output: Any,
    can_start: set[str],
    cuts: Sequence[str] | None,
    starts: Sequence[tuple[str, int]] | None,
    stages: int,
    count_of: Callable[[str], int],
) -> tuple[Plan, list[tuple[str, int]]]:
    calls = run.calls
    early = next(
        (u for i, u in run.decisions if any(_call_of(x) is not None for x in u) and i < len(calls)), None
    )
    if early is not None:
        unit = calls[min(c for x in early if (c := _call_of(x)) is not None)].unit
        msg = (
            f"backend 'pipeline' cannot cut the model: between its blocks it decides by the numbers that "
            f"{unit!r} returns (an if, item(), numpy() or nonzero()), which other stages do not have; put "
            "that into a block"
        )
        raise ModelError(msg)
    seen: dict[str, int] = {}
    named: list[tuple[str, int]] = []
    for call in calls:
        time = seen[call.unit] = seen.get(call.unit, -1) + 1
        named.append((call.unit, time))
    if starts is None:
        starts = [(n, 0) for n in cuts] if cuts is not None else None
    if starts is None:
        starts = _balanced(run.units, named, can_start, stages, count_of)
    missing = next((start for start in starts if start not in named), None)
    if missing is not None:
        msg = (
            f"the step does not call {missing[0]!r}, with which a stage begins; the first step that runs "
            "must call all blocks, and the later ones in the same order"
        )
        raise StepError(msg)
    at = sorted(named.index(start) for start in starts)
    stage_of = [sum(i >= a for a in at) for i in range(len(calls))]
    ends: set[Item] = set()
    for leaf in _tensors(output):
        ends |= run.trackers.resolved(set(run.items_of(leaf)), [leaf])
    for _, found in run.decisions:
        ends |= found
    wanted = [set[Item]() for _ in range(stages)]
    for call, stage in zip(calls, stage_of, strict=True):
        wanted[stage] |= call.needs
    wanted[-1] |= ends
    return _planned(run, output, wanted, stage_of, can_start, stages), list(starts)


def _planned(
    run: _Run, output: Any, wanted: list[set[Item]], stage_of: list[int], can_start: set[str], stages: int
) -> Plan:
    calls = run.calls
    holders: dict[str, set[int]] = {}
    crossing: dict[Item, int] = {}  # the last stage that needs it
    random: dict[Item, set[int]] = {}
    for stage, items in enumerate(wanted):
        for item in items:
            if item[0] == "param":
                holders.setdefault(item[1], set()).add(stage)
            elif item[0] == "random":
                random.setdefault(item, set()).add(stage)
            elif (c := _call_of(item)) is not None and stage_of[c] < stage:
                crossing[item] = max(stage, crossing.get(item, 0))
    if any(len(where) > 1 for where in random.values()):
        msg = (
            "backend 'pipeline' cannot cut the model: random numbers that are drawn between its blocks are "
            "used in several stages, which would draw different ones; put the dropout into a module of its "
            "block"
        )
        raise ModelError(msg)
    for item in sorted((i for i in crossing if i[0] == "inner"), key=repr):
        unit = calls[item[1]].unit
        module = run.units[unit].get_submodule(item[2])
        # A hook may collect it where the step finds it; torch has no public list of a module's hooks.
        if not module._forward_hooks and not _global_forward_hooks:
            msg = (
                f"the step uses in stage {crossing[item]} what {unit!r} of stage {stage_of[item[1]]} keeps "
                f"of its {item[2]!r}, for example as an attribute, which other stages do not have; return it "
                f"from {unit!r}, or collect it with register_forward_hook() of {item[2]!r}"
            )
            raise ModelError(msg)
    for name, where in sorted(holders.items()):  # sets differ between processes
        owner = next((u for u in can_start if name.startswith(f"{u}.")), None)
        own = {s for c, s in zip(calls, stage_of, strict=True) if c.unit == owner}
        if owner is not None and own and not where <= own:
            msg = (
                f"the step reads the parameter {name!r} of stage {min(own)} in stage {max(where)}, "
                "which does not have it; compute what needs it in its block, or let "
                "the optimizer do it (weight_decay=)"
            )
            raise StepError(msg)
    specs: dict[Item, Spec] = {}
    replayed: list[list[InnerCall]] = [[] for _ in calls]
    for number, call in enumerate(calls):
        for i, spec in enumerate(call.output.specs):
            specs["out", number, i] = spec
        for inner in call.inner:
            here = [("inner", number, inner.name, inner.time, i) for i in range(len(inner.output.specs))]
            specs |= dict(zip(here, inner.output.specs, strict=True))
            if any(item in w for item in here for w in wanted):
                replayed[number].append(inner)
    sends = [
        sorted((i for i, last in crossing.items() if stage_of[i[1]] <= stage < last), key=repr)
        for stage in range(stages)
    ]
    loss = output.get("loss") if hasattr(output, "get") else output
    has_loss = isinstance(loss, Tensor) and loss.requires_grad
    draws = run.trackers.draws
    return Plan(calls, stage_of, sends, holders, specs, replayed, has_loss, draws, stages)


def _call_of(item: Item) -> int | None:
    number: int | None = item[1] if item[0] in {"out", "inner"} else None
    return number


def _balanced(
    units: dict[str, nn.Module],
    named: list[tuple[str, int]],
    can_start: set[str],
    stages: int,
    count_of: Callable[[str], int],
) -> list[tuple[str, int]]:
    """Return the calls with which stages begin, so that the largest stage is as small as can be.

    By parameters, which all ranks know alike whatever their batch: an embedding is looked up and counts
    nothing.

    Raises:
        ConfigError: There are fewer blocks than stages.
    """
    places = [i for i, (name, _) in enumerate(named) if name in can_start]
    if len(places) < stages:
        msg = (
            f"backend 'pipeline' has {stages} stages, and the step calls {len(places)} blocks, of which each "
            "stage needs one; take fewer ranks for a model, or other cuts"
        )
        raise ConfigError(msg)
    costs = []
    for name, _ in named:
        cost = 0.0
        for prefix, module in units[name].named_modules(prefix=name):
            if not isinstance(module, nn.Embedding):
                cost += sum(count_of(f"{prefix}.{n}") for n, _ in module.named_parameters(recurse=False))
        costs.append(cost)
    # The calls before the second block belong to the first stage, and so on.
    bounds = [0, *places[1:], len(named)]
    pieces = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    ends = smallest_largest(pieces, stages)
    return [named[bounds[e]] for e in ends]


def smallest_largest(pieces: list[float], parts: int) -> list[int]:
    """Cut a list into consecutive parts so that the largest sum is the smallest; return where parts begin.

    Example:
        >>> smallest_largest([1, 1, 1, 1, 4], 2)
        [4]
    """
    sums = [0.0]
    for piece in pieces:
        sums.append(sums[-1] + piece)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for end in range(1, len(pieces) + 1):
        best[1, end] = sums[end], []
    for count in range(2, parts + 1):
        for end in range(count, len(pieces) + 1):
            options = [(max(best[count - 1, a][0], sums[end] - sums[a]), a) for a in range(count - 1, end)]
            largest, a = min(options)
            best[count, end] = largest, [*best[count - 1, a][1], a]
    return best[parts, len(pieces)][1]


# -- What is replaced in a model meanwhile ----------------------------------------------------------


@contextmanager
def swapped(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Replace parameters of a model meanwhile, tied ones by the same; ``None`` keeps one."""
    made: dict[int, nn.Parameter | None] = {}
    undo: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = make(f"{prefix}.{name}" if prefix else name, parameter)
                new = made[id(parameter)]
                if new is not None:
                    vars(new).update(vars(parameter))  # marks of those who split it
                    undo.append((module._parameters, name, parameter))
        for held, name, parameter in undo:  # past nn.Module's slow and checking __setattr__
            held[name] = made[id(parameter)]
        yield
    finally:
        for held, name, parameter in undo:
            held[name] = parameter


@contextmanager
def forwards(units: dict[str, nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Let ``call(name, forward, *args, **kwargs)`` stand for the forward of each unit meanwhile."""
    before = {name: vars(unit).get("forward") for name, unit in units.items()}
    try:
        for name, unit in units.items():
            vars(unit)["forward"] = partial(call, name, unit.forward)
        yield
    finally:
        for name, unit in units.items():
            if before[name] is None:
                vars(unit).pop("forward", None)
            else:
                vars(unit)["forward"] = before[name]
