"""A run of the step on stand-ins, on each rank: which values a unit uses, and where they come from.

The model's own forward runs on every rank. Its *units* are the modules between which it can be cut: the
blocks that repeat, and what stands beside them (embeddings, norms, heads). A stage computes the calls of its
own units. What runs between the calls ("glue": masks, positions, sums) runs everywhere, as it costs little.

Which tensors cross a cut is seen in the dry run. There a unit computes on fake tensors, which have no
memory, and its outputs are replaced by random ones of known *origins*: every operator passes the origins of
its inputs on to its outputs. So a skip connection, an encoder's states for each decoder stage, or a value
that a hook has collected within a block is seen wherever it is used.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import tree_leaves, tree_map
from tp_core.errors import ModelError
from tp_core.random import preserve_torch_rng_state, seed_torch

from tp_pipeline._module_attributes import ModuleAttributes
from tp_pipeline._stage_units import forwards, swapped

Origin = tuple[Any, ...]
"""Where a value comes from::

    out     (call, leaf)                 a tensor that a unit has returned
    inner   (call, module, time, leaf)   one that a module within a unit has returned, and which glue uses
    within  (call,)                      one that was made within a unit, whose module is not known yet
    param   name                         a parameter
    random  (calls before, operator)     random numbers that were drawn between units
"""

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""What a unit may return beside tensors: all ranks have the same."""
_READS_PAST_OPERATORS = ("numpy", "tolist")
_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item"}
_OF_SHAPES = {f"{kind}_like" for kind in ("empty", "full", "ones", "zeros", "rand", "randn", "randint")}
_OF_SHAPES |= {f"new_{kind}" for kind in ("empty", "empty_strided", "full", "ones", "zeros")}
"""Operators that take the shape of their input, and not its numbers."""
_COPIES = {"_to_copy", "clone"}
_BOUNDS = {"embedding_renorm_"}
"""Writes that come to the same however often they run."""
_BATCH = 0
"""What numbers follow from that are of the micro-batch; no storage has this address."""


# -- What units return ------------------------------------------------------------------------------


class Leaf:
    """The place of a tensor in what a module has returned.

    Or of an argument that it has returned as it is, for example a cache.
    """

    def __init__(self, index: int, *, is_argument: bool = False) -> None:
        self.index, self.is_argument = index, is_argument

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.index, self.is_argument))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(slots=True)
class UnitOutput:
    """What a module has returned: its structure with `Leaf` in place of tensors, and their specs."""

    structure: Any
    specs: list[TensorSpec]


@dataclass(slots=True)
class InnerCall:
    """A call of a module within a unit.

    Attributes:
        name: The name of the module in the unit.
        time: Which of its calls it is.
        output: What it returned.
    """

    name: str
    time: int
    output: UnitOutput


@dataclass(slots=True)
class UnitCall:
    """A call of a unit in the run of the step.

    Attributes:
        unit: The unit's name.
        output: What it returned.
        needs: The origins of what it has used.
        inner: The calls of modules within it.
    """

    unit: str
    output: UnitOutput
    needs: set[Origin] = field(default_factory=set)
    inner: list[InnerCall] = field(default_factory=list)


def call_of(origin: Origin) -> int | None:
    """Return the call that has made a value; ``None`` for parameters and random numbers."""
    number: int | None = None
    if origin[0] in {"out", "inner"}:
        number = origin[1]
    return number


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Box:
    """A leaf in a box: where all leaves are other objects, `tree_map` makes new containers of them."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


def own_batch(batch: Any, *, clones: bool) -> Any:
    """Return a batch for one run of the step, which may take values out of it: the step runs several times.

    Args:
        batch: The batch.
        clones: Whether the run may write the tensors, too.
    """

    def unbox(box: _Box) -> Any:
        if clones and isinstance(box.leaf, Tensor):
            return box.leaf.clone()
        return box.leaf

    return tree_map(unbox, tree_map(_Box, batch))


def _describe(output: Any, arguments: Sequence[Any]) -> UnitOutput | None:
    """Return the structure of what a module has returned; ``None`` if it has other objects in it."""
    specs: list[TensorSpec] = []
    objects = {id(a): i for i, a in enumerate(arguments) if not isinstance(a, (Tensor, *_PLAIN))}
    is_plain = True

    def describe(value: Any) -> Any:
        nonlocal is_plain
        if isinstance(value, Tensor):
            specs.append(TensorSpec(tuple(value.shape), value.dtype, value.requires_grad))
            return Leaf(len(specs) - 1)
        if id(value) in objects:
            return Leaf(objects[id(value)], is_argument=True)
        is_plain = is_plain and isinstance(value, _PLAIN)
        return value

    structure = tree_map(describe, output)
    if is_plain:
        return UnitOutput(structure, specs)
    return None


# -- Conversions of modules ---------------------------------------------------------------------------


@contextmanager
def _refused_conversions(model: nn.Module) -> Iterator[None]:
    """Refuse to convert modules in the context; ``module.to(dtype)`` of what has the dtype does nothing.

    torch would exchange a stand-in for another tensor, which it cannot, and say so in words of its own.
    """
    plain = nn.Module._apply
    names = {id(module): name for name, module in model.named_modules()}

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
            with torch.no_grad():
                if convert(tensor) is not tensor:
                    msg = (
                        f"forward converts {names.get(id(module), 'a module')!r} ({type(module).__name__}) "
                        "by to(), float() or the like, and on backend 'pipeline' weights stay as they are; "
                        "convert it before, and in forward its inputs alone"
                    )
                    raise RefusedError from ModelError(msg)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]  # private: to(), float() and others come here
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


# -- The run ----------------------------------------------------------------------------------------


class RefusedError(BaseException):
    """Raised in an operator in place of its cause: an error of types would let torch try another operator."""


class NeedsNumbersError(BaseException):  # not an Exception: the model may catch those
    """Raised where a unit decides by numbers, which fake tensors do not have."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class StageDryRun:
    """One run of a step on stand-ins.

    Args:
        model: The plain model; parameters that this rank does not have may be empty.
        batch: The micro-batch.
        units: Its units.
        shape_of: Returns the shape of a parameter by its name, before parts of it were freed.
        with_numbers: The classes of units that decide by numbers, and so run on random ones.
        device: The device.

    Attributes:
        calls: The calls of units, in their order.
        decisions: What glue has decided by: the number of calls before, and the origins of the numbers.
        written: The addresses of storages that operators have written in place.
        follows: What the numbers of a storage follow from, by its address: `_BATCH`, also by what blocks
            return, and the addresses of buffers and attributes as they were before the run.
        copied: The buffers and attributes whose numbers a storage has as they were, by its address.
        written_buffers: After the run, the names of buffers that it has written, or put others in place of.
        written_parameters: After the run, the names of parameters that it has written or replaced.
        writes_batch: After the run, whether it has written tensors of the micro-batch in place.
        kept: After the run, the names of attributes of modules that it has changed.
        tracker: Passes origins on.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        units: dict[str, nn.Module],
        shape_of: Callable[[str], torch.Size],
        with_numbers: set[type],
        device: torch.device,
    ) -> None:
        self.model, self.units, self.device = model, units, device
        self.calls: list[UnitCall] = []
        self.decisions: list[tuple[int, set[Origin]]] = []
        self.written: set[int] = set()
        self.follows: dict[int, frozenset[int]] = {}
        self._batch = tensors_of(batch)
        for tensor in self._batch:
            self.follows[_address_of(tensor)] = frozenset([_BATCH])
        self.copied: dict[int, frozenset[int]] = {}
        self.written_buffers: list[str] = []
        self.written_parameters: list[str] = []
        self.writes_batch = False
        self.kept: list[str] = []
        self._attributes: frozenset[int] = frozenset()  # the addresses of those that are tensors
        self.tracker = _OriginTracker(self)
        self._shape_of, self._with_numbers = shape_of, with_numbers
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

        # Origins by the address of a storage, so that views have those of their base. What was noted stays
        # alive, or addresses would be used again.
        self._origins: dict[int, frozenset[Origin]] = {}
        self._inner_origins: dict[int, Origin] = {}
        self._alive: list[Any] = []

        # Random tensors for fake ones by the address of a storage, and fake ones for tensors by identity.
        self._random_of: dict[int, Tensor] = {}
        self._fake_of: dict[int, Any] = {}
        # What has the place of a parameter, with the address of its storage then, by the parameter's name.
        self._stand_ins: dict[str, tuple[nn.Parameter, int]] = {}
        self._replaced: set[int] = set()  # the addresses of those whose data a unit with numbers has replaced

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace parameters by stand-ins and the units' forwards by recorded ones, in the context."""
        buffers = []
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    address = _address_of(buffer)
                    self.copied[address] = frozenset([address])
                    buffers.append((name, module, key, buffer, address, buffer.detach().clone()))
        attributes = ModuleAttributes(self.model)
        self._attributes = frozenset(map(_address_of, attributes.tensors()))
        for address in self._attributes:
            self.copied[address] = frozenset([address])
        try:
            with preserve_torch_rng_state([self.device]), swapped(self.model, self._stand_in_for):
                seed_torch(0, [self.device])  # all ranks see the same
                with (
                    forwards(self.units, self._call),
                    self._watching_reads(),
                    _refused_conversions(self.model),
                    self.tracker,
                ):
                    yield
                self.written_parameters = [name for name in self._stand_ins if self._has_changed(name)]
            self.kept = attributes.changed(self._is_kept, self._has_written)
            self.writes_batch = any(map(self._has_written, self._batch))
            for name, module, key, buffer, address, _ in buffers:
                if self._is_written(module, key, buffer, address):
                    self.written_buffers.append(name)
        finally:  # also of a run that ends early, after which another one begins
            attributes.restore()
            with torch.no_grad():
                for _, module, key, buffer, _, value in buffers:
                    module._buffers[key] = buffer
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

    def _is_written(self, module: nn.Module, key: str, buffer: Tensor, address: int) -> bool:
        """Return whether the run has left other numbers in a buffer, or another tensor in its place.

        Not a table that the model makes anew of shapes and constants, as some make that of their positions:
        it is no part of the model's state, and the same for each micro-batch.

        Args:
            module: The module.
            key: The buffer's name in it.
            buffer: The buffer before the run.
            address: That of its storage then.
        """
        now = module._buffers.get(key)
        if now is buffer and _address_of(now) == address:
            return self._has_written(buffer)
        if key not in module._non_persistent_buffers_set:  # private, and the only one to say so
            return True
        if now is None:
            follows = frozenset[int]()
        else:
            follows = self.follows.get(_address_of(now), frozenset())
        return _BATCH in follows or address in follows

    def _has_changed(self, name: str) -> bool:
        """Return whether the run has written a parameter's stand-in, or put another in its place."""
        stand_in, address = self._stand_ins[name]
        prefix, _, key = name.rpartition(".")
        if self.model.get_submodule(prefix)._parameters.get(key) is not stand_in:
            return True
        numbers = self._random_of.get(address)  # which glue, and units that decide by numbers, have for it
        if numbers is None:
            written = [address]
        else:
            written = [address, _address_of(numbers)]
        is_replaced = address in self._replaced or _address_of(stand_in) != address
        return is_replaced or not self.written.isdisjoint(written)

    def _has_written(self, tensor: Tensor) -> bool:
        """Return whether operators have written a tensor in place, or a view of it."""
        fake = self._fake_of.get(id(tensor))  # which blocks have in its place
        return any(_address_of(each) in self.written for each in (tensor, fake) if each is not None)

    def _is_kept(self, tensor: Tensor) -> bool:
        """Return whether numbers follow from the micro-batch, or from what modules kept before."""
        follows = self.follows.get(_address_of(tensor), frozenset())
        return _BATCH in follows or not follows.isdisjoint(self._attributes)

    @contextmanager
    def _watching_reads(self) -> Iterator[None]:
        """Note what reads numbers past operators, which modes of torch do not see."""

        def watched(body: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                within = self.tracker.within
                if within is None:
                    self.decisions.append((len(self.calls), set(self.origins_of(tensor))))
                elif isinstance(tensor, FakeTensor):
                    raise NeedsNumbersError(type(self.units[self.calls[within].unit]))
                return body(tensor, *args, **kwargs)

            return read

        before = {name: vars(Tensor).get(name) for name in _READS_PAST_OPERATORS}
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

    def _stand_in_for(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        with self._mode:
            fake = torch.empty(self._shape_of(name), dtype=parameter.dtype, device=self.device)
        stand_in = nn.Parameter(fake, parameter.requires_grad)
        self.note(stand_in, {("param", name)})
        self._stand_ins[name] = stand_in, _address_of(stand_in)
        return stand_in

    def forget(self) -> None:
        """Free the tensors of the run, which refers to itself: the collector may come only after steps."""
        self._alive.clear()
        self._random_of.clear()
        self._fake_of.clear()
        self._stand_ins.clear()

    def note(self, tensor: Tensor, origins: set[Origin] | frozenset[Origin]) -> None:
        """Record the origins of a tensor, and of all that share its memory."""
        storage = tensor.untyped_storage()
        self._origins[_address_of(tensor)] = frozenset(origins)
        self._alive.append(storage)

    def origins_of(self, tensor: Tensor) -> frozenset[Origin]:
        """Return the origins of a tensor."""
        return self._origins.get(_address_of(tensor), frozenset())

    def inner_origin_of(self, tensor: Tensor) -> Origin | None:
        """Return the call of a module within a unit that has returned a tensor."""
        return self._inner_origins.get(_address_of(tensor))

    def numbers_for(self, tensor: Tensor) -> Tensor:
        """Return a tensor with numbers for a fake one, the same each time."""
        address = _address_of(tensor)
        if address not in self._random_of or self._random_of[address].shape != tensor.shape:
            self._random_of[address] = self._random_like(tensor)
            self.note(self._random_of[address], self.origins_of(tensor))
        return self._random_of[address]

    def fake_for(self, value: Any) -> Any:
        """Return a fake tensor for one with numbers; other values as they are."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        fake = self._fake_of.get(id(value))
        if fake is None:
            # Not by torch's own conversion, which would look at the gradients of the tensor.
            with self._mode:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            self._fake_of[id(value)] = fake
            self._alive.append(value)
        return fake

    # -- a call of a unit

    def _call(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.tracker.within is not None:  # a unit calls another one: a part of it
            return forward(*args, **kwargs)
        number, unit = len(self.calls), self.units[name]
        call = UnitCall(name, UnitOutput(None, []))
        self.calls.append(call)
        handle = register_module_forward_hook(self._inner_recorder(call, number))
        self.tracker.within = number
        try:
            output = self._compute(unit, forward, args, kwargs)
        except Exception as error:
            error.add_note(
                f"in {name!r} ({type(unit).__name__}), which backend 'pipeline' runs on tensors without "
                "numbers before the first step, to see what it uses"
            )
            raise
        finally:
            self.tracker.within, self.tracker.is_below = None, False
            handle.remove()
        described = _describe(output, (*tree_leaves(args), *tree_leaves(kwargs)))
        if described is None:
            kinds = sorted({type(v).__name__ for v in tree_leaves(output) if not isinstance(v, Tensor)})
            msg = (
                f"{name!r} ({type(unit).__name__}) returns {', '.join(kinds)} beside tensors, which another "
                "stage cannot be sent; let it return tensors, numbers and None, in lists, tuples and dicts"
            )
            raise ModelError(msg)
        call.output = described
        own = {("within", number), ("out", number)}
        call.needs = {origin for origin in call.needs if origin[:2] not in own}
        count = iter(range(len(described.specs)))

        def replace(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            numbers = self._random_like(value)
            self.note(numbers, {("out", number, next(count))})
            return numbers

        return tree_map(replace, output)

    def _compute(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a unit returns, on fake tensors or on random numbers.

        Raises:
            NeedsNumbersError: It decides by numbers, which fake tensors do not have.
        """
        try:
            if type(unit) in self._with_numbers:
                return self._compute_with_numbers(unit, partial(forward, *args, **kwargs))
            self.tracker.is_below = True
            with self._mode, _TrackerAboveFakes(self):
                return forward(*args, **kwargs)
        except (
            DynamicOutputShapeException,
            DataDependentOutputException,
            UnsupportedOperatorException,
        ) as error:
            raise NeedsNumbersError(type(unit)) from error

    def _compute_with_numbers(self, unit: nn.Module, compute: Callable[[], Any]) -> Any:
        made: list[tuple[nn.Parameter, nn.Parameter, int]] = []

        def with_numbers(_: str, fake: nn.Parameter) -> nn.Parameter:
            parameter = nn.Parameter(self.numbers_for(fake), fake.requires_grad)
            made.append((fake, parameter, _address_of(parameter)))
            return parameter

        with swapped(unit, with_numbers):
            output = compute()
            present = set(map(id, unit.parameters()))
        for fake, parameter, address in made:
            if id(parameter) not in present or _address_of(parameter) != address:
                self._replaced.add(_address_of(fake))
        return output

    def _inner_recorder(self, call: UnitCall, number: int) -> Callable[[nn.Module, Any, Any], None]:
        """Return a hook that records the calls of modules within a call of a unit."""
        names = {id(module): name for name, module in self.units[call.unit].named_modules() if name}
        times: dict[str, int] = {}

        def record(module: nn.Module, _args: Any, output: Any) -> None:
            name = names.get(id(module))
            if name is None or self.tracker.within != number:
                return
            time = times[name] = times.get(name, -1) + 1
            described = _describe(output, ())
            if described is None:
                return
            call.inner.append(InnerCall(name, time, described))
            for index, leaf in enumerate(tensors_of(output)):
                address = _address_of(leaf)
                # Hooks of a module collect its output elsewhere, also what an inner one has returned before.
                if module._forward_hooks or address not in self._inner_origins:
                    self._inner_origins[address] = ("inner", number, name, time, index)

        return record

    def _random_like(self, like: Tensor) -> Tensor:
        """Return a tensor with random numbers, or zeros for integers, which the tracker does not see made."""
        before, self.tracker.is_quiet = self.tracker.is_quiet, True
        try:
            if not like.dtype.is_floating_point and not like.dtype.is_complex:
                return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
            with torch.no_grad():
                numbers = torch.rand(like.shape, dtype=torch.float32, device=self.device).to(like.dtype)
            if not like.requires_grad:
                return numbers
            with torch.enable_grad():  # no leaf, which could not be changed in place
                return numbers.requires_grad_().clone()
        finally:
            self.tracker.is_quiet = before


class _OriginTracker(TorchDispatchMode):
    """Passes the origins of inputs on to outputs, in glue and in units that run with numbers.

    Attributes:
        within: The call of a unit that runs; ``None`` in glue.
        is_quiet: Whether operators are not tracked.
        is_below: Whether operators are those that fake tensors use inside, as another mode is above.
        draws: Whether random numbers have been drawn.
    """

    def __init__(self, run: StageDryRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self._run = run
        self.within: int | None = None
        self.is_quiet = self.is_below = self.draws = False

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_below:
            return func(*args, **(kwargs or {}))
        return self.track(func, args, kwargs or {})

    def track(self, func: Any, args: Any, kwargs: Any, *, is_fake: bool = False) -> Any:
        """Run an operator, on fake tensors or not, and record the origins of its outputs."""
        run, call = self._run, self.within
        if self.is_quiet:
            return func(*args, **kwargs)
        inputs = tensors_of((args, kwargs))
        origins: set[Origin] = set()
        for tensor in inputs:
            origins |= run.origins_of(tensor)
        origins = self.resolve(origins, inputs, call)
        follows, copied = self._sources_of(inputs, origins)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.draws = self.draws or is_random

        if call is None:
            args, kwargs = tree_map(self._with_numbers, (args, kwargs))
            if is_random:
                origins.add(("random", len(run.calls), func._opname))
            if func._opname in _READS and any(call_of(origin) is not None for origin in origins):
                run.decisions.append((len(run.calls), origins))
        else:
            run.calls[call].needs |= {origin for origin in origins if origin[0] != "within"}
            origins = {("within", call)}

        if func.namespace == "c10d" and any(isinstance(tensor, FakeTensor) for tensor in inputs):
            outputs = exchange_nothing(func, args)
        elif is_fake:
            fake_args, fake_kwargs = tree_map(run.fake_for, (args, kwargs))
            outputs = func(*fake_args, **fake_kwargs)
        else:
            outputs = func(*args, **kwargs)
        if func.namespace == "c10d":  # it has filled tensors that were made for it
            if call is None:
                for tensor in inputs:
                    run.note(tensor, origins)
            return outputs
        self._note_sources(func, outputs, follows, copied)
        self._note_outputs(func, args, inputs, outputs, origins)
        return outputs

    def _sources_of(
        self, inputs: list[Tensor], origins: set[Origin]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return what numbers of inputs follow from, and of which buffers they are copies."""
        follows, copied = frozenset[int](), frozenset[int]()
        for tensor in inputs:
            follows |= self._run.follows.get(_address_of(tensor), frozenset())
            copied |= self._run.copied.get(_address_of(tensor), frozenset())
        if any(call_of(origin) is not None for origin in origins):
            follows |= {_BATCH}
        return follows, copied

    def _note_sources(self, func: Any, outputs: Any, follows: frozenset[int], copied: frozenset[int]) -> None:
        """Record what the numbers that an operator has returned follow from."""
        if func._opname in _OF_SHAPES:
            return
        if func._opname not in _COPIES and not func.is_view:
            follows, copied = follows | copied, frozenset()
        for tensor in tensors_of(outputs):
            address = _address_of(tensor)
            self._run.follows[address] = self._run.follows.get(address, frozenset()) | follows
            self._run.copied[address] = self._run.copied.get(address, frozenset()) | copied

    def _note_outputs(
        self, func: Any, args: Any, inputs: list[Tensor], outputs: Any, origins: set[Origin]
    ) -> None:
        """Record the origins of what an operator has returned, and of what it has written in place."""
        run, is_mutable = self._run, func._schema.is_mutable
        # What shares its memory with an input has the origins of that, too.
        addresses = {_address_of(tensor) for tensor in inputs}
        for tensor in tensors_of(outputs):
            if _address_of(tensor) not in addresses:
                run.note(tensor, origins)
            elif self.within is None or is_mutable:  # within a unit, a view of an input is as the input
                run.note(tensor, origins | run.origins_of(tensor))
        if not is_mutable:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_of(value):
                    run.note(tensor, origins | run.origins_of(tensor))
                    if func._opname not in _BOUNDS:
                        run.written.add(_address_of(tensor))

    def _with_numbers(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self._run.numbers_for(value)
        return value

    def resolve(self, origins: set[Origin], inputs: list[Tensor], call: int | None = None) -> set[Origin]:
        """Replace what was made within another unit by the module there that has returned it.

        Args:
            origins: The origins of all inputs.
            inputs: The tensors.
            call: The call that uses them; ``None`` for glue.

        Raises:
            RefusedError: No module has returned it; its cause is a ModelError.
        """
        own = ("within", call)
        if all(origin[0] != "within" or origin == own for origin in origins):
            return origins
        resolved = {origin for origin in origins if origin[0] != "within"}
        for tensor in inputs:
            made_in = [o for o in self._run.origins_of(tensor) if o[0] == "within" and o != own]
            if not made_in:
                continue
            inner = self._run.inner_origin_of(tensor)
            if inner is None:
                unit = self._run.calls[made_in[0][1]].unit
                msg = (
                    f"backend 'pipeline' cannot cut the model: a tensor of shape {tuple(tensor.shape)} that "
                    f"{unit!r} makes is used outside of it, and no module there returns it; return it from "
                    f"{unit!r}"
                )
                raise RefusedError from ModelError(msg)
            resolved.add(inner)
        return resolved


class _TrackerAboveFakes(TorchDispatchMode):
    """The tracker, above the mode of fake tensors."""

    def __init__(self, run: StageDryRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run.tracker.track(func, args, kwargs or {}, is_fake=True)


def exchange_nothing(func: Any, args: Sequence[Any]) -> Any:
    """Return what a collective does, with tensors that have no numbers to exchange.

    Those that it fills are among its arguments.
    """
    done = FakeWork().boxed()
    if len(func._schema.returns) == 1:
        return done
    return (args[0], done)


def _address_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # private: fake storages have no data_ptr()
    return address


_CALL = nn.Module._call_impl.__code__  # private: a traceback has no other mark of a module's call


def call_last_hooks(error: BaseException) -> None:
    """Call the hooks that modules have for each end of a call, after an error that torch does not look at.

    torch calls them after each `Exception`. Without them, random numbers of a split model would stay apart.
    """
    frames, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _CALL:
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        module, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
        for key in module._forward_hooks_always_called:
            hook = module._forward_hooks[key]
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, None)
            else:
                hook(module, args, None)
