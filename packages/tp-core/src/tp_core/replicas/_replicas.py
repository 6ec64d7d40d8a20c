"""Replicas of one module on several devices of one process, and the order of their backward passes."""

import copy
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tp_core._devices import DeviceSpec, resolve_devices
from tp_core._trees import containers
from tp_core.device_types import is_capturing
from tp_core.errors import ConfigError, ModelError
from tp_core.modules._compiler import compile_in_place, untraced
from tp_core.modules._parameters import check_no_max_norm
from tp_core.output import get_logger
from tp_core.replicas._caller import Caller, on_device
from tp_core.replicas._mirror import (
    LINK,
    OriginalBuffers,
    ParameterMirror,
    digest_of,
    expose_to_autograd,
    is_comparable,
    refresh,
    same_objects,
    side_stream,
    versions_of,
)
from tp_core.replicas._random import Streams
from tp_core.replicas._replica_modules import ReplicaModules, Structure, call_as_replica, is_scripted
from tp_core.replicas._threads import ReplicaThreads, raise_first

log = get_logger("tp_core")

# -- The cache of replicas between calls, and the rules for its renewal ----------------------------


ForceCopies = bool | Literal["flat"]


class ReplicaCache:
    """The modules of all replicas of one module, and the mirrors of its parameters.

    Args:
        module: The real module.
        devices: One device per replica.
        force_copies: Give every replica parameters of its own; as ``"flat"``, copied as between devices.

    Attributes:
        compile_options: The options of ``torch.compile`` for replicas that are made afterwards, or ``None``.
    """

    def __init__(
        self, module: nn.Module, devices: tuple[torch.device, ...], *, force_copies: ForceCopies
    ) -> None:
        self.compile_options: Mapping[str, Any] | None = None
        self._module = module
        self._devices = devices
        self._force_flat = force_copies == "flat"
        home = devices[0]
        # Replicas on one device share its mirror; those on the home device need none. But a step may disable
        # adapters, and peft (0.21) then changes `requires_grad` in the thread of one replica: others that
        # share the parameters would miss gradients. Only peft's layers have this attribute.
        shares = not force_copies and not any(hasattr(m, "adapter_layer_names") for m in module.modules())
        self._keys: list[Any] = []
        for number, device in enumerate(devices):
            if not shares:
                self._keys.append(number)
            else:
                key = None if device == home else device
                self._keys.append(key)
        self._copies = any(key is not None for key in self._keys[1:])
        self._mirrors: dict[Any, ParameterMirror] = {}
        self._structure: Structure | None = None
        self._buffers = OriginalBuffers([])
        self._modules: dict[int, ReplicaModules] = {}
        self._parameters: list[Parameter] = []
        self._exposed: dict[Any, dict[int, Tensor]] = {}
        self._exposed_for: Any = None
        # A counter and no flag: fewer parts than devices leave replicas out of a call, and each compares
        # the counter with what it saw when it takes part again.
        self._refreshes = 0
        self._refreshed: dict[Any, int] = {}
        self._watches_optimizers = False
        self._positions: dict[int, int] = {}

    @property
    def mirrors(self) -> tuple[ParameterMirror, ...]:
        return tuple(self._mirrors.values())

    def refresh(self) -> None:
        self._refreshes += 1

    def has_users_hooks(self) -> bool:
        """Return whether the module has forward hooks of the program's own; `prepare` has looked."""
        return self._structure is not None and self._structure.has_users_hooks()

    def note_states(self, count: int) -> None:
        """Note the states that the first ``count`` replicas have left on their modules."""
        for number in range(1, count):
            if number in self._modules:
                self._modules[number].note_states()

    def prepare(self, count: int, *, grad: bool) -> list[nn.Module]:
        """Return the first ``count`` replicas, equal to the module as it is now.

        Collective: none. Forward copies changed parameters to each device; backward sums their gradients.
        """
        structure = self._structure
        if structure is None or not structure.is_current():
            structure = self._structure = Structure(self._module, self._devices[0])
            if self._copies:
                check_no_max_norm(self._module, "each device")
            plain = [o.module for o in structure.originals if not is_scripted(o.module)]
            self._buffers = OriginalBuffers(plain)
            self._modules.clear()
            self._exposed_for = None
        self._buffers.look(version=structure.version)
        if self._copies and any(key is not None for key in self._keys[1:count]):
            self._prepare_parameters(structure, count, grad=grad)
        roots = [self._module]
        for number in range(1, count):
            modules = self._modules_of(number, structure)
            modules.sync(force=self._must_refresh(("buffers", number)))
            roots.append(modules.root)
        return roots

    def _must_refresh(self, who: Any) -> bool:
        """Return whether there was a `refresh` since the last call for ``who``."""
        due = self._refreshed.get(who, 0) != self._refreshes
        self._refreshed[who] = self._refreshes
        return due

    def _modules_of(self, number: int, structure: Structure) -> ReplicaModules:
        modules = self._modules.get(number)
        if modules is None:
            copies = self._keys[number] is not None
            modules = ReplicaModules(
                structure,
                self._buffers,
                self._devices[number],
                copies=copies,
                compile_options=self.compile_options,
            )
            self._modules[number] = modules
        return modules

    def _prepare_parameters(self, structure: Structure, count: int, *, grad: bool) -> None:
        # Private: torch has no public way to ask for an active transform of torch.func.
        if torch._C._are_functorch_transforms_active():
            msg = (
                "transforms of torch.func (grad, vmap, ...) do not follow a module to its copies on other "
                "devices: transform the module itself, or replicas on one device that share its memory"
            )
            raise ModelError(msg)
        keys = [k for k in dict.fromkeys(self._keys[1:count]) if k is not None]
        parameters = structure.parameters()
        if not same_objects(self._parameters, parameters):
            self._parameters, self._exposed_for = parameters, None
            self._positions = {id(p): i for i, p in enumerate(parameters)}
            for mirror in self._mirrors.values():
                mirror.follow(parameters)
        for key in keys:
            if key not in self._mirrors:
                self._add_mirror(key, structure)
        now = versions_of(parameters)
        forced = [self._must_refresh(key) for key in keys]
        replaced = refresh([self._mirrors[key] for key in keys], now, forced=forced)
        for key, is_replaced in zip(keys, replaced, strict=True):
            if is_replaced:
                self._exposed_for = None
                self._flatten(key, structure)
        self._give(keys, count, structure, grad=grad)

    def _add_mirror(self, key: Any, structure: Structure) -> None:
        mirror = self._mirrors[key] = ParameterMirror(
            self._devices[self._keys.index(key)], force_flat=self._force_flat
        )
        mirror.follow(self._parameters)
        self._flatten(key, structure)
        if not self._watches_optimizers:
            self._watches_optimizers = True
            _watch_optimizers(self)

    def _flatten(self, key: Any, structure: Structure) -> None:
        """Lay the weights of recurrent layers in one piece of memory again, after a mirror replaced them."""
        copies = dict(zip(map(id, self._parameters), self._mirrors[key].copies, strict=True))
        self._modules_of(self._keys.index(key), structure).flatten_rnn_weights(copies)

    def _give(self, keys: list[Any], count: int, structure: Structure, *, grad: bool) -> None:
        """Give the copies to the modules, unless they have them already."""
        if grad:
            trained = [p.requires_grad for p in self._parameters]
        else:
            trained = []
        # Autograd runs backward on the stream of the forward: another stream needs another graph.
        wanted = keys, grad, trained, side_stream(self._devices[0])
        if self._exposed_for != wanted:
            mirrors = [self._mirrors[k] for k in keys]
            if grad:
                rows = expose_to_autograd(self._parameters, mirrors)
            else:
                rows = [m.copies for m in mirrors]
            ids = [id(p) for p in self._parameters]
            self._exposed = {k: dict(zip(ids, row, strict=True)) for k, row in zip(keys, rows, strict=True)}
            self._exposed_for = wanted
        for number in range(1, count):
            if self._keys[number] is not None:
                modules = self._modules_of(number, structure)
                exposed = self._exposed[self._keys[number]]
                if modules.given is not exposed:
                    modules.give_parameters(exposed)

    def note_step(self, optimizer: Optimizer) -> None:
        """Mark what an optimizer has updated for the next copy, so that nothing has to be compared."""
        positions = self._positions
        # An optimizer skips its frozen parameters: to copy these would cost a transfer for nothing.
        stepped = [
            positions[id(p)]
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in positions and (p.requires_grad or p.grad is not None)
        ]
        if stepped:
            for mirror in self._mirrors.values():
                mirror.suspect(stepped)


def _watch_optimizers(cache: ReplicaCache) -> None:
    """Report optimizer steps to ``cache`` for as long as it lives."""
    reference = weakref.ref(cache)  # torch's hook is global: it must not keep the module's copies alive

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's
        living = reference()
        if living is not None:
            living.note_step(optimizer)

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(cache, handle.remove)


# -- The order in which a backward pass goes through the nodes of replicas ------------------------
# Autograd runs the node with the largest number first, of those that are ready. It numbers nodes as they are
# made, in each thread on its own, from 0. So how the nodes of a replica's thread stand to the caller's would
# follow from what both threads did before. Sums of three and more gradients would be rounded differently from
# run to run. So each part but the first numbers its nodes again:
# by call, part and place. These numbers are larger than any that torch gives.

_CALL_BITS, _PART_BITS = 32, 24
_calls = itertools.count(1 << 24)  # the first number is beyond what a process makes of nodes
_CONTAINERS = containers()


class _Thread(threading.local):
    """What this thread knows of the part that it runs: the nodes in its graph that others have made."""

    foreign: set[Any] | None = None


_thread = _Thread()


class BackwardOrder:
    """The numbers of the autograd nodes that the parts of one call make."""

    def __init__(self) -> None:
        self._base = next(_calls) << _CALL_BITS
        self._caller = threading.get_ident()

    def call(self, task: Callable[[], Any], *, number: int, part: Any) -> Any:
        """Return ``task()``, and number the nodes of what it returns."""
        is_inline = threading.get_ident() == self._caller
        # Nodes of other threads may have the same numbers as those made here.
        foreign = set() if is_inline else set(_nodes_of(part))
        outer, _thread.foreign = _thread.foreign, foreign
        # Private, as the methods of nodes below: torch has no public way to ask for these numbers.
        first = torch._C._autograd._get_sequence_nr()
        try:
            result = task()
        finally:
            _thread.foreign = outer
        last = torch._C._autograd._get_sequence_nr()
        if last != first:
            offset = self._base + (number << _PART_BITS) - first
            are_own = is_inline and not foreign
            nodes = _nodes_of(result)
            for node in nodes:
                place = node._sequence_nr()
                if first <= place < last and (are_own or (node not in foreign and type(node) is not LINK)):
                    node._set_sequence_nr(place + offset)
                    nodes += [following for following, _ in node.next_functions if following is not None]
        return result


def leave_to_others(tensors: Sequence[Tensor]) -> None:
    """Leave the nodes of these tensors, which other parts have made, to the numbers of those parts."""
    if _thread.foreign is not None:
        _thread.foreign.update(_nodes_of(tensors))


def _nodes_of(value: Any) -> list[Any]:
    if type(value) is Tensor:
        if value.grad_fn is None:
            return []
        return [value.grad_fn]
    values, seen, nodes = [value], set(), []
    while values:
        item = values.pop()
        if isinstance(item, Tensor):
            if item.grad_fn is not None:
                nodes.append(item.grad_fn)
        elif (container := _CONTAINERS[type(item)]) is not None and id(item) not in seen:
            seen.add(id(item))  # it may contain itself
            values.extend(container.children(item))
    return nodes


# -- Parameters that parts write ------------------------------------------------------------------


class ParameterWatch:
    """A check that no part of a call writes parameters, as a forward does that moves a teacher.

    Each part would write: on one device the parameters are the same for all parts. It looks at the first call
    with gradients, the second, the fourth and so on.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._calls = 0
        self._looks = True

    @contextmanager
    def watching(self, parts: int) -> Iterator[None]:
        """Warn, once, if the block writes parameters."""
        self._calls += 1
        if not self._looks or self._calls & (self._calls - 1):
            yield
            return
        named = [
            (f"{prefix}.{name}".lstrip("."), parameter)
            for prefix, owner in self._module.named_modules()
            for name, parameter in owner.named_parameters(recurse=False)
            # A norm that an embedding bounds in forward is the same however often.
            if getattr(owner, "max_norm", None) is None and is_comparable(parameter) and parameter.numel()
        ]
        if not named or is_capturing(named[0][1].device):
            yield
            return
        before = digest_of([parameter for _, parameter in named])
        yield
        changed = digest_of([parameter for _, parameter in named]).changed_since(before)
        if changed:
            self._looks = False
            log.warning(
                "forward, or the step, writes the parameter %r on each of %d devices, so that it changes "
                "once for each part of a batch: a teacher moves as often, and a codebook is of the last "
                "part's rows. Write it between steps, as in a callback's on_step_end, or take a backend that "
                "runs the step once: ddp",
                named[changed[0]][0],
                parts,
            )


# -- Replicas of one module on several devices of one process -------------------------------------


R = TypeVar("R")


class Replicas:
    """One module on several devices, with a thread for each.

    Replica 0 is the module itself and runs in the caller's thread. The others have buffers of their own,
    and the module's attributes as they are when a call begins. Their parameters are copied only when they
    changed since the last call; replicas on the module's own device share its parameters. The gradients
    of all replicas add up in the module's parameters. Backward adds the gradients of what parts return, in
    tensors and containers, in the same order each time: equal runs are equal bit for bit.

    Replicas on devices of their own draw from the generators of these. Replicas that share a generator (on
    the CPU, or on a device that is named twice) draw one at a time, each from a state of its own, but not
    within activation checkpoints. In both cases the numbers follow from the caller's seed.

    Under modes and saved-tensor hooks, and with forward hooks of the program's own on modules, the parts run
    one after the other in the caller's thread: what a hook keeps of a part, in a dict that all share, is then
    that part's as long as it runs.

    Changes are noticed that a version counter does not count (``parameter.data.add_(1)``). Parameters that
    no optimizer has stepped since the last call, such as frozen ones, are compared with their copies by
    sums of their bits, so the host waits for the first device there.

    Collective: none, as all replicas are in one process. Forward copies changed parameters to the devices;
    backward sums their gradients on the first device.

    Args:
        module: The module; its parameters and buffers must be on the first device.
        devices: One device per replica, the same one several times if wanted; whatever
            `tp_core.resolve_devices` accepts.
        force_copies: Copy the parameters for every replica, also on the module's own device, to test on
            one device what needs several. ``"flat"`` also transfers them and the gradients in flat
            pieces, as between two devices.

    Attributes:
        module: The module.
        devices: One device per replica.
        runs_in_turn: Whether the parts of the call that runs, or of the last one, run one after the other.

    Raises:
        DeviceError: ``devices`` is empty, or names a device that this process does not have.

    Example:
        >>> import torch
        >>> replicas = Replicas(torch.nn.Linear(2, 1), ["cpu", "cpu"])
        >>> parts = [torch.zeros(3, 2), torch.zeros(2, 2)]
        >>> [y.shape[0] for y in replicas.run(lambda replica, x: replica(x), parts)]
        [3, 2]
    """

    def __init__(
        self,
        module: nn.Module,
        devices: DeviceSpec,
        *,
        force_copies: ForceCopies = False,
    ) -> None:
        self.module = module
        self.devices = resolve_devices(devices)
        self._force_copies = force_copies
        self._is_home_cpu = self.devices[0].type == "cpu"
        self._types = tuple(dict.fromkeys(d.type for d in self.devices))
        self._cache = ReplicaCache(module, self.devices, force_copies=force_copies)
        self._threads = ReplicaThreads(self.devices)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # The thread that holds the lock: its own second call is an error, another thread's call waits.
        self._owner: int | None = None
        self.runs_in_turn = False
        self._watch = ParameterWatch(module)

    def __len__(self) -> int:
        return len(self.devices)

    @untraced
    def run(
        self,
        call: Callable[[nn.Module, Any], R],
        parts: Sequence[Any],
        *,
        modules: Sequence[nn.Module] | None = None,
    ) -> list[R]:
        """Return ``call(replica, part)`` for each part, run on its device, all at once.

        Fewer parts than devices use the first devices only. If a call raises, this method waits for the
        others. It then raises the first error, with a note that names the part and the device.

        Args:
            call: What to do with a replica and a part.
            parts: One part per device that takes part.
            modules: The modules to call instead of the replicas, one per part, as `modules` returns them.

        Raises:
            ConfigError: ``parts`` is empty or longer than ``devices``, or ``modules`` has another length.
            ModelError: The module cannot be replicated as it is, or a replica's own forward calls
                this method.
        """
        count = len(parts)
        if modules is not None and len(modules) != count:
            msg = f"expected one module per part, got {len(modules)} modules and {count} parts"
            raise ConfigError(msg)
        if count == 1:
            module = None if modules is None else modules[0]
            return [self.run_alone(call, parts[0], module=module)]
        if not 0 < count <= len(self.devices):
            msg = f"expected 1 to {len(self.devices)} parts, one per device, got {count}"
            raise ConfigError(msg)
        lock = self._acquire()
        try:
            return self._run_all(call, parts, modules)
        finally:
            self._owner = None
            lock.release()

    def run_alone(
        self, call: Callable[[nn.Module, Any], R], part: Any, *, module: nn.Module | None = None
    ) -> R:
        """Return ``call(module, part)``, run on the first device, as `run` does with a single part.

        Args:
            call: What to do with the module and the part.
            part: The only part.
            module: What to call instead of the module itself.
        """
        module = self.module if module is None else module
        return self._run_first(call, module, part)

    def modules(self, count: int | None = None) -> list[nn.Module]:
        """Return the first ``count`` replicas, all by default, equal to the module as it is now.

        For code that runs them in its own way. The first is the module itself. The others are the
        same objects each time; the next call of this method or of `run` updates them.

        Raises:
            ConfigError: ``count`` is below 1 or above the number of devices.
            ModelError: The module cannot be replicated as it is.
        """
        count = len(self.devices) if count is None else count
        if not 0 < count <= len(self.devices):
            msg = f"expected 1 to {len(self.devices)} replicas, one per device, got {count}"
            raise ConfigError(msg)
        lock = self._acquire()
        try:
            grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            return self._cache.prepare(count, grad=grad)
        finally:
            self._owner = None
            lock.release()

    def compile(self, **options: Any) -> None:
        """Compile the module in place, and every replica separately.

        After ``module.compile()`` instead, only the module itself is compiled, not its replicas: torch does
        not keep the options.

        Args:
            **options: As :func:`torch.compile` takes them.
        """
        compile_in_place(self.module, **options)
        self._cache = self._fresh_cache(options)

    def refresh(self) -> None:
        """Copy everything at the next call, whatever the version counters say."""
        self._cache.refresh()

    def _run_all(
        self,
        call: Callable[[nn.Module, R], Any],
        parts: Sequence[Any],
        modules: Sequence[nn.Module] | None,
    ) -> list[Any]:
        count = len(parts)
        caller = Caller.capture(self.devices[:count], self._types)
        grad = caller.grad and not caller.inference
        replicas = self._cache.prepare(count, grad=grad) if modules is None else modules
        streams = Streams(self.devices[:count])
        order = BackwardOrder()

        def run_first() -> Any:
            with streams.of(0):
                return call_as_replica(self.module, self._run_first, call, replicas[0], parts[0])

        tasks: list[Callable[[], Any]] = []
        for i in range(1, count):
            device, rng = self.devices[i], streams.of(i)
            task = partial(caller.call, call, replicas[i], parts[i], device=device, rng=rng)
            tasks.append(partial(order.call, task, number=i, part=parts[i]))
        # A mode belongs to the caller's thread: other threads would run outside of it, and one mode object is
        # not made for several threads at once. Hooks of users fill dicts that all parts share.
        self.runs_in_turn = caller.has_modes or self._cache.has_users_hooks()
        watching: AbstractContextManager[None] = nullcontext()
        if grad and not caller.has_modes:  # a mode would see the look, too
            watching = self._watch.watching(count)
        try:
            with watching:
                outcomes = self._threads.run(run_first, tasks, in_turn=self.runs_in_turn)
        except BaseException:  # abandoned threads still use the cached replicas: later calls must not
            self._cache = self._fresh_cache(self._cache.compile_options)
            raise
        streams.close()
        raise_first(outcomes, self.devices)
        self._cache.note_states(count)
        return [o.result for o in outcomes]

    def _run_first(self, call: Callable[[nn.Module, Any], R], module: nn.Module, part: Any) -> R:
        if self._is_home_cpu:
            return call(module, part)
        with on_device(self.devices[0]):
            return call(module, part)

    def _fresh_cache(self, compile_options: Mapping[str, Any] | None) -> ReplicaCache:
        cache = ReplicaCache(self.module, self.devices, force_copies=self._force_copies)
        cache.compile_options = compile_options
        return cache

    def _acquire(self) -> threading.Lock:
        """Reserve the replicas for one call, after another thread's call has ended.

        Two calls at once would update the same cached replicas, one of them in the middle of a forward.
        """
        if self._pid != os.getpid():
            self._begin_in_fork()
        if self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            return self._lock
        thread = threading.get_ident()
        # From a forward, in the caller's thread or a replica's: waiting for the lock would never end.
        if thread == self._owner or thread in self._threads:
            msg = (
                "the module's own forward called its replicas again: that would wait for itself; "
                "call the plain module inside of forward"
            )
            raise ModelError(msg)
        self._lock.acquire()
        self._owner = thread
        return self._lock

    def _begin_in_fork(self) -> None:
        """Reset threads and lock in a forked process, which has no thread but the one that forked."""
        self._pid = os.getpid()
        self._threads.forget()
        if self._lock.locked():  # by a thread that this process lacks: nobody would release it
            self._lock = threading.Lock()
            self._cache = self._fresh_cache(self._cache.compile_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replicas":
        module = copy.deepcopy(self.module, memo)
        return Replicas(module, self.devices, force_copies=self._force_copies)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Replicas, force_copies=self._force_copies), (self.module, self.devices)
