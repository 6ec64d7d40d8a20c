"""Copies of a module's parameters and buffers that stay on another device."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel.comm import broadcast

from tp_core._transfer import to_device
from tp_core.device_types import can_broadcast, is_capturing
from tp_core.errors import ModelError
from tp_core.modules._parameters import is_quantized
from tp_core.output import get_logger

log = get_logger("tp_core")

# -- Comparison of dictionaries by identity -------------------------------------------------------


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether both hold the same objects, by identity."""
    return len(a) == len(b) and all(map(is_, a, b))


class Contents:
    """A snapshot of several dictionaries, to compare with later.

    The comparison runs in C. It covers the parameters, buffers and attributes of hundreds of modules on
    each call: a loop in Python would cost as much as the call.
    """

    __slots__ = ("_names", "_rows", "_sizes", "_values")

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows = list(rows)
        self.read()

    def read(self) -> None:
        rows = self._rows
        self._sizes = list(map(len, rows))
        self._names = list(chain.from_iterable(rows))
        self._values = list(chain.from_iterable(map(dict.values, rows)))

    def is_same(self) -> bool:
        """Return whether the dictionaries hold the same objects under the same names as then."""
        rows = self._rows
        return not rows or (
            list(map(len, rows)) == self._sizes
            and list(chain.from_iterable(rows)) == self._names
            and all(map(is_, self._values, chain.from_iterable(map(dict.values, rows))))
        )


# -- Few transfers for many tensors ---------------------------------------------------------------


BUCKET_NBYTES = 32 * 2**20
"""A bucket is one transfer. Larger ones win nothing and need as much memory on both sides."""


def move_in_buckets(
    tensors: Sequence[Tensor], device: torch.device, *, force_flat: bool
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield, for each transfer, positions and their tensors on ``device``; those already there are left out.

    Gradients flow through. Small tensors of one dtype travel together, in one flat tensor.

    Collective: none. Forward copies between two devices; backward copies the gradients back.
    """
    for bucket in _buckets(tensors, device, force_flat=force_flat):
        members = [tensors[i] for i in bucket]
        if len(bucket) == 1:
            yield bucket, [to_device(members[0], device)]
        else:
            yield bucket, _pieces(to_device(_flat(members), device), members)


@torch.no_grad()
def copy_coalesced(
    rows: Sequence[Sequence[Tensor]], sources: Sequence[Tensor], *, force_flat: bool = False
) -> None:
    """Copy each source into its target of each row in place; the targets of a row are on one device.

    Collective: with several CUDA devices, torch's broadcast between them. No gradients.
    """
    if not sources:
        return
    plain = [source.detach() for source in sources]
    devices = [row[0].device for row in rows]
    near = [d for d in devices if d == plain[0].device and not force_flat]
    for row, device in zip(rows, devices, strict=True):
        if device in near:
            # Private to torch, as the other _foreach functions: there is no public copy of many tensors.
            torch._foreach_copy_(list(row), plain)
    far = [(row, d) for row, d in zip(rows, devices, strict=True) if d not in near]
    if not far:
        return
    # The buckets of one device serve for all: which tensors travel together does not depend on the target.
    for bucket in _buckets(plain, far[0][1], force_flat=force_flat):
        members = [plain[i] for i in bucket]
        whole = members[0] if len(bucket) == 1 else _flat(members)
        arrived = _spread(whole, [device for _, device in far])
        for (row, _), tensor in zip(far, arrived, strict=True):
            if len(bucket) == 1:
                pieces = [tensor]
            else:
                pieces = _pieces(tensor, members)
            torch._foreach_copy_([row[i] for i in bucket], pieces)  # one kernel for all of them


def _spread(tensor: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    remote = [d for d in dict.fromkeys(devices) if d != tensor.device]
    if len(remote) > 1 and can_broadcast([tensor.device, *remote]):
        # Separate copies would wait for each other in the stream of the source device.
        copies = broadcast(tensor, [tensor.device, *remote])
        copy_on = dict(zip([tensor.device, *remote], copies, strict=True))
        return [copy_on[d] for d in devices]
    return [to_device(tensor, d) for d in devices]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all values in one vector, each tensor's in the order of its memory."""
    return torch.cat([_in_order(t).reshape(-1) for t in tensors])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `_flat`, with the strides that the tensors have: kernels for many tensors need equal ones."""
    pieces = []
    for piece, tensor in zip(torch.split(flat, [t.numel() for t in like]), like, strict=True):
        order = _order(tensor)
        if order is None:
            pieces.append(piece.view(tensor.shape))
        else:
            places = sorted(range(len(order)), key=order.__getitem__)
            pieces.append(piece.view([tensor.shape[d] for d in order]).permute(places))
    return pieces


def _in_order(tensor: Tensor) -> Tensor:
    order = _order(tensor)
    if order is None:
        return tensor
    return tensor.permute(order)


def _order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions as they lie in memory, outermost first; ``None`` for their own order.

    ``None`` also for tensors with gaps in memory, which are copied to contiguous memory.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(order).is_contiguous():
        return order
    return None


def _buckets(tensors: Sequence[Tensor], device: torch.device, *, force_flat: bool) -> Iterator[list[int]]:
    """Yield the positions of the tensors that travel together; those that need not travel are left out."""
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.device == device and not force_flat:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.layout is not torch.strided or nbytes >= BUCKET_NBYTES:
            yield [i]
            continue
        key = (tensor.dtype, tensor.device)
        bucket, size = open_buckets.pop(key, ([], 0))
        if size + nbytes > BUCKET_NBYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        open_buckets[key] = (bucket, size + nbytes)
    for bucket, _ in open_buckets.values():
        yield bucket


# -- Copies of parameters -------------------------------------------------------------------------


def versions_of(tensors: Sequence[Tensor]) -> Any:
    """Return the versions of all tensors in a form that is quick to make and to compare.

    Where one of them has no counter, the result is unequal to every other.
    """
    # ``_version`` is private: torch has no public way to ask for the counter that its autograd uses.
    try:
        return [t._version for t in tensors], [t.data_ptr() for t in tensors]
    except RuntimeError:  # a tensor that was made in inference mode
        return object()


def version_of(tensor: Tensor) -> Any:
    """Return the version counter of ``tensor`` and the address of its data, which change when it does.

    Tensors made in inference mode have no counter; they count as changed each time.
    """
    if tensor.is_inference():
        return object()  # the object, not its id: a later object may have the same id
    return (tensor._version, tensor.data_ptr())


_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_FEW = 4096  # elements of a tensor whose bits are compared one by one


def is_comparable(tensor: Tensor) -> bool:
    """Return whether :func:`digest_of` can look at a tensor's memory."""
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


class Digest(NamedTuple):
    """Whole numbers that show a change of tensors.

    Attributes:
        numbers: The numbers of all tensors, one after another: (number,).
        lengths: How many of them are of each tensor.
    """

    numbers: Tensor
    lengths: list[int]

    def changed_since(self, before: "Digest") -> list[int]:
        """Return the positions of the tensors that have changed; the host waits for the device."""
        if torch.equal(self.numbers, before.numbers):
            return []
        pairs = zip(self.numbers.split(self.lengths), before.numbers.split(before.lengths), strict=True)
        return [i for i, (now, then) in enumerate(pairs) if not torch.equal(now, then)]


@torch.no_grad()
def digest_of(tensors: Sequence[Tensor]) -> Digest:
    """Return what shows a change of these tensors, which are on one device.

    A version counter counts no write through ``.data``. These are sums of bits, by whole numbers and so
    exact, over the first dimension and over the others: a change of one element changes one of each, and
    rows that trade places change the latter.
    """
    numbers: list[Tensor] = []
    lengths = []
    for tensor in tensors:
        bits = tensor.detach()
        if bits.is_complex():
            bits = torch.view_as_real(bits)
        fits = bits.storage_offset() * bits.itemsize % 4 == 0 and bits.is_contiguous()
        if fits and bits.dim() and bits.nbytes % (4 * len(bits)) == 0:
            # Four bytes at once, and not eight: sums are of 64 bits, in which two changes of the first bit of
            # eight bytes, a sign's, would cancel out.
            bits = bits.view(len(bits), -1).view(torch.int32)
        else:
            bits = bits.unsqueeze(-1).view(_WHOLE_NUMBERS[bits.itemsize])
        if bits.dim() < 2 or bits.numel() <= _FEW:
            of_tensor = [bits.reshape(-1)]
        else:
            of_tensor = [bits.sum(0).reshape(-1), bits.sum(list(range(1, bits.dim())))]
        numbers += of_tensor
        lengths.append(sum(map(len, of_tensor)))
    return Digest(torch.cat(numbers), lengths)


class ParameterMirror:
    """Copies of parameters that stay on one device.

    Quantized parameters cannot be copied: on their own device they stand for themselves.

    Args:
        device: The device of the copies; it may be the parameters' own.
        force_flat: Transfer copies and gradients in flat pieces, as between two devices.
    """

    def __init__(self, device: torch.device, *, force_flat: bool = False) -> None:
        self.device = device
        self.force_flat = force_flat
        self.parameters: list[Parameter] = []
        self.copies: list[Tensor] = []
        self.copied = 0
        self._seen: list[Any] = []
        self._suspected: set[int] = set()
        self._unchanged: Any = None
        # The digest of the copies at some positions, on the parameters' device.
        self._digest: tuple[tuple[int, ...], Digest] | None = None

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Set the parameters to copy; copies of earlier ones that are still among them are kept."""
        copies = {
            id(p): (r, seen) for p, r, seen in zip(self.parameters, self.copies, self._seen, strict=True)
        }
        self.parameters = list(parameters)
        pairs = [copies.get(id(p)) or (self._empty_like(p), None) for p in parameters]
        self.copies = [copy for copy, _ in pairs]
        self._seen = [seen for _, seen in pairs]
        self._suspected.clear()
        self._unchanged = None
        self._digest = None

    def suspect(self, positions: Iterable[int]) -> None:
        """Mark the parameters at these positions to be copied next time, whatever their versions are."""
        self._suspected.update(positions)

    def take_stale(
        self, now: Any, digest_at: Callable[[tuple[int, ...]], Digest], *, force: bool = False
    ) -> tuple[list[int], bool]:
        """Find parameters that changed since the last time, or their copies; `note_copied` must follow.

        Args:
            now: The parameters' versions.
            digest_at: Returns the digest of the parameters at some positions.
            force: Whether all count as changed.

        Returns:
            Their positions, and whether a copy is another tensor now, because its parameter has another
            shape or dtype.
        """
        suspected = self._suspected
        stale: list[int] = []
        if force or suspected or (now, self._copy_versions()) != self._unchanged:
            stale = [
                i
                for i, seen in enumerate(self._seen)
                if (force or i in suspected or seen != self._versions(i))
                and self.copies[i] is not self.parameters[i]
            ]
        suspected.clear()
        stale = sorted([*stale, *self._silently_changed(stale, digest_at)])
        replaced = False
        for i in stale:
            if not _same_form(self.copies[i], self.parameters[i]):
                self.copies[i] = self._empty_like(self.parameters[i])
                replaced = True
        return stale, replaced

    def _silently_changed(
        self, stale: Sequence[int], digest_at: Callable[[tuple[int, ...]], Digest]
    ) -> list[int]:
        """Return the positions of further parameters that differ from their copies.

        In training an optimizer has stepped all, mostly: then none is left to look at.
        """
        if len(stale) == len(self.copies) or is_capturing(self.device):
            return []
        positions = set(stale)
        compared = tuple(
            i
            for i, (parameter, copy) in enumerate(zip(self.parameters, self.copies, strict=True))
            if i not in positions and copy is not parameter and copy.numel() and is_comparable(parameter)
        )
        if not compared:
            return []
        if self._digest is None or self._digest[0] != compared:
            numbers, lengths = digest_of([self.copies[i] for i in compared])
            home = self.parameters[compared[0]].device
            self._digest = compared, Digest(to_device(numbers, home), lengths)
        return [compared[i] for i in digest_at(compared).changed_since(self._digest[1])]

    def note_copied(self, now: Any, stale: Sequence[int]) -> None:
        for i in stale:
            self._seen[i] = self._versions(i)
        self.copied += len(stale)
        self._unchanged = now, self._copy_versions()
        if self._digest is not None and not set(stale).isdisjoint(self._digest[0]):
            self._digest = None

    def _copy_versions(self) -> list[int]:
        return [r._version for r in self.copies]  # they are never made in inference mode

    def _versions(self, i: int) -> Any:
        return version_of(self.parameters[i]), version_of(self.copies[i])

    def _empty_like(self, parameter: Parameter) -> Tensor:
        if is_quantized(parameter):
            if parameter.device == self.device:
                return parameter
            msg = (
                f"a quantized weight ({type(parameter).__name__}) cannot be copied to {self.device}: train "
                "over it on one device, or with a process for each device on the backend 'ddp'"
            )
            raise ModelError(msg)
        # Autograd refuses tensors made in inference mode, and copies outlive the call that makes them.
        with torch.inference_mode(mode=False):
            return torch.empty_like(parameter.detach(), device=self.device)


def refresh(mirrors: Sequence[ParameterMirror], now: Any, *, forced: Sequence[bool]) -> list[bool]:
    """Copy changed parameters into all mirrors; mirrors that need the same ones get them in one transfer.

    Returns:
        For each mirror, whether a copy is another tensor now.

    Collective: with several CUDA devices, torch's broadcast between them. No gradients.
    """

    @functools.cache  # for all mirrors
    def digest_at(positions: tuple[int, ...]) -> Digest:
        return digest_of([mirrors[0].parameters[i] for i in positions])

    refreshed = [
        mirror.take_stale(now, digest_at, force=force) for mirror, force in zip(mirrors, forced, strict=True)
    ]
    groups: dict[tuple[int, ...], list[ParameterMirror]] = {}
    for mirror, (stale, _) in zip(mirrors, refreshed, strict=True):
        if stale:
            groups.setdefault(tuple(stale), []).append(mirror)
    for positions, group in groups.items():
        first = group[0]
        with torch.inference_mode(mode=False):
            copy_coalesced(
                [[mirror.copies[i] for i in positions] for mirror in group],
                [first.parameters[i] for i in positions],
                force_flat=first.force_flat,
            )
        for mirror in group:
            mirror.note_copied(now, positions)
    return [replaced for _, replaced in refreshed]


def _same_form(copy: Tensor, parameter: Parameter) -> bool:
    return copy.shape == parameter.shape and copy.dtype == parameter.dtype


def expose_to_autograd(
    parameters: Sequence[Parameter], mirrors: Sequence[ParameterMirror]
) -> list[list[Tensor]]:
    """Return for each mirror its copies, connected by autograd to the parameters.

    They share storage and version counters with the copies. So a later refresh reaches them, and a
    backward pass through an older graph raises torch's error.

    Collective: none in forward; backward sums the gradients of all mirrors on the parameters' device.
    """
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    copies = [list(m.copies) for m in mirrors]
    if not trained:
        return copies
    flat = _ExposeToAutograd.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        [[r[i] for i in trained] for r in copies],
        any(m.force_flat for m in mirrors),
        *[parameters[i] for i in trained],
    )
    for row, start in zip(copies, range(0, len(flat), len(trained)), strict=True):
        for i, tensor in zip(trained, flat[start : start + len(trained)], strict=True):
            row[i] = tensor
    return copies


class _ExposeToAutograd(torch.autograd.Function):
    """Autograd's link from copies to parameters.

    Collective: forward returns the copies, without a transfer. Backward moves their gradients to the
    parameters' device and returns the sum.
    """

    @staticmethod
    def forward(
        ctx: Any, copies: list[list[Tensor]], force_flat: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.force_flat = force_flat
        ctx.set_materialize_grads(False)
        ctx.home = parameters[0].device
        ctx.stream = side_stream(ctx.home)
        ctx.width = len(parameters)
        return tuple(tensor.detach() for row in copies for tensor in row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        total = _Sum(ctx.width)
        with on_stream(ctx.stream):
            for start in range(0, len(gradients), ctx.width):
                indexed = [
                    (i, g) for i, g in enumerate(gradients[start : start + ctx.width]) if g is not None
                ]
                total.add(indexed, ctx.home, force_flat=ctx.force_flat)
        return (None, None, *total.values)


LINK = _ExposeToAutograd._backward_cls
"""The type of the nodes between copies and parameters; torch has no public name for it."""


class _Sum:
    """A sum of gradients for each parameter; it adds up one transfer at a time, to need little memory."""

    def __init__(self, width: int) -> None:
        self.values: list[Tensor | None] = [None] * width
        self._own: set[int] = set()  # positions of values that nothing else holds: added to in place

    def add(self, indexed: Sequence[tuple[int, Tensor]], home: torch.device, *, force_flat: bool) -> None:
        moved = set()
        for bucket, arrived in move_in_buckets([g for _, g in indexed], home, force_flat=force_flat):
            moved.update(bucket)
            are_new = all(tensor is not indexed[k][1] for k, tensor in zip(bucket, arrived, strict=True))
            self._add([indexed[k][0] for k in bucket], arrived, are_new=are_new)
        near = [pair for k, pair in enumerate(indexed) if k not in moved]
        self._add([i for i, _ in near], [g for _, g in near], are_new=False)

    def _add(self, positions: list[int], gradients: list[Tensor], *, are_new: bool) -> None:
        in_place: list[tuple[int, Tensor, Tensor]] = []
        again: list[tuple[int, Tensor, Tensor]] = []
        for i, gradient in zip(positions, gradients, strict=True):
            total = self.values[i]
            if total is None:
                self.values[i] = gradient
                if are_new:
                    self._own.add(i)
            elif total.layout is not torch.strided or gradient.layout is not torch.strided:
                self.values[i] = total + gradient
            elif i in self._own and not torch.is_grad_enabled():  # double backward records the sum
                in_place.append((i, total, gradient))
            else:
                again.append((i, total, gradient))
        # One kernel for all tensors of a kind: one each would cost a launch per parameter.
        if in_place:
            torch._foreach_add_([total for _, total, _ in in_place], [g for _, _, g in in_place])
        if again:
            sums = torch._foreach_add([total for _, total, _ in again], [g for _, _, g in again])
            for (i, _, _), added in zip(again, sums, strict=True):
                self.values[i] = added
                self._own.add(i)


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream on a device; ``None`` for the default stream of all threads."""
    if device.type == "cpu":
        return None
    stream = torch.accelerator.current_stream(device)
    if stream.stream_id == 0:
        return None
    return stream


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run a block on a stream; later work on this thread's own stream waits for it.

    For backward: autograd makes later nodes wait only for the stream of the node's own device. Without the
    wait they would read gradients that are still being summed.
    """
    if stream is None:
        yield
        return
    own = torch.accelerator.current_stream()
    with stream:
        yield
    own.wait_stream(stream)


# -- Buffers of the real modules ------------------------------------------------------------------


SMALL_NUMEL = 65_536
"""Buffers of at most this many elements are copied in each call in training mode, where most change."""


@dataclass(slots=True)
class _Buffer:
    """One buffer.

    Attributes:
        tensor: The buffer itself.
        owners: The modules that have it.
        generation: A number that grows with each change.
        seen: Its version when it was last checked.
        follows: Whether it counts as changed on each call while a module is in training mode.
        is_unsure: Whether it counts as changed on each call.
    """

    tensor: Tensor
    owners: list[nn.Module]
    generation: int = 0
    seen: Any = None
    follows: bool = False
    is_unsure: bool = False

    def has_new_version(self) -> bool:
        before, self.seen = self.seen, version_of(self.tensor)
        return bool(before != self.seen)

    def counts_as_changed(self) -> bool:
        return self.is_unsure or (self.follows and any(m.training for m in self.owners))


class OriginalBuffers:
    """The buffers of the real modules.

    Version counters reveal most changes. Kernels like ``batch_norm``, and writes through ``.data``, leave
    them unchanged. So in training mode each small buffer, and each floating-point buffer that is saved,
    counts as changed on each call. Of all others the digests are compared.

    Attributes:
        modules: Those modules.
        tensors: The buffers, each once.
        slots: For each, its places: the number of a module, and a name.
        holders: The numbers of the modules that have any.
        generations: For each, a number that grows with a change.
        layout: A number that grows when there are other buffers, or other names.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._contents = Contents(m._buffers for m in modules)
        self._version = -1
        self._clock = 0
        self._buffers: list[_Buffer] = []
        self._warns = True
        self._digests: tuple[list[int], Digest] | None = None  # of which buffers
        self._read()

    def look(self, *, version: int) -> None:
        """Update the generations of buffers that have changed.

        Args:
            version: The structure's version: while it stays, the buffers are the same tensors.
        """
        if version != self._version:
            self._version = version
            if not self._contents.is_same():
                self._contents.read()
                self._read()
        if not self._buffers:
            return
        self._clock += 1
        compared = []
        for buffer in self._buffers:
            if buffer.has_new_version():
                buffer.generation = self._clock
            if buffer.counts_as_changed():
                buffer.generation = self._clock
            elif buffer.tensor.numel():
                compared.append(buffer)
        if compared and not is_capturing(compared[0].tensor.device):
            self._compare(compared)
        self.generations = [b.generation for b in self._buffers]

    def warn_written(self, positions: Iterable[int]) -> None:
        """Warn once if another replica's forward has written buffers: what it wrote is not kept.

        Not of norms, which are known to take the statistics of each replica's part of a batch, nor of whole
        numbers, as all replicas count the same.
        """
        if not self._warns:
            return
        for i in positions:
            buffer = self._buffers[i]
            if buffer.tensor.is_floating_point() and not isinstance(buffer.owners[0], _NormBase):
                self._warns = False
                log.warning(
                    "forward writes the buffer %r (%s) on each device, from its own rows of a batch, and "
                    "what the first device writes is kept: a queue or a running mean has the rows of that "
                    "one. Gather the rows of all devices before, as by trainer.all_gather in the step",
                    self.slots[i][0][1],
                    type(buffer.owners[0]).__name__,
                )
                return

    def _compare(self, buffers: Sequence[_Buffer]) -> None:
        """Note buffers that have changed without their version counters."""
        before, known = self._digests, [id(buffer) for buffer in buffers]
        digest = digest_of([buffer.tensor for buffer in buffers])
        self._digests = known, digest
        if before is not None and before[0] == known:
            buffers = [buffers[i] for i in digest.changed_since(before[1])]
        # Otherwise all of them: in the first call, and in another mode.
        for buffer in buffers:
            buffer.generation = self._clock

    def _read(self) -> None:
        self._clock += 1
        self.layout = self._clock
        self._digests = None
        by_id: dict[int, _Buffer] = {}
        slots: dict[int, list[tuple[int, str]]] = {}
        for number, module in enumerate(self.modules):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    # A tensor under two names is one buffer: a replica that got two copies would not see
                    # what it writes through the other name.
                    buffer = by_id.setdefault(id(tensor), _Buffer(tensor, []))
                    buffer.owners.append(module)
                    slots.setdefault(id(tensor), []).append((number, name))
                    is_saved = name not in module._non_persistent_buffers_set
                    buffer.follows |= tensor.numel() <= SMALL_NUMEL
                    buffer.follows |= is_saved and tensor.is_floating_point()
                    buffer.is_unsure |= tensor.requires_grad or not is_comparable(tensor)
        self._buffers = list(by_id.values())
        self.tensors = [b.tensor for b in self._buffers]
        self.slots = list(slots.values())
        self.holders = sorted({number for row in self.slots for number, _ in row})
        self.generations = [0] * len(self._buffers)


class OwnBuffers:
    """The buffers of one replica: copies, because its forward may write into them.

    The next forward overwrites what it wrote, as in ``nn.DataParallel``. Only the statistics of replica 0
    are kept, which is the module itself.

    Args:
        originals: The buffers of the real modules.
        rows: For each of those modules, the dictionary that gets the replica's buffers.
        device: The replica's device.
    """

    def __init__(
        self, originals: OriginalBuffers, rows: Sequence[dict[str, Tensor | None]], device: torch.device
    ) -> None:
        self._originals = originals
        self._rows = rows
        self._device = device
        self._layout = -1
        self._generations: list[int] = []
        self._own: list[Tensor] = []
        self._versions: list[Any] = []
        self._contents = Contents([])

    def sync(self, *, force: bool = False) -> None:
        """Make the replica's buffers equal to the module's; only changed ones are copied."""
        originals = self._originals
        if originals.layout == self._layout and not self._own:
            return
        wanted = originals.generations
        versions = _versions_of(self._own)
        is_same = self._contents.is_same()
        if not (is_same and versions == self._versions) and len(versions) == len(originals.slots):
            originals.warn_written(self._written(versions))
        force = force or originals.layout != self._layout or not is_same
        if not force and wanted == self._generations and versions == self._versions:
            return
        if force:
            stale = list(range(len(wanted)))
            self._own, self._versions = list(originals.tensors), [None] * len(wanted)
        else:
            now = zip(wanted, self._generations, versions, self._versions, strict=True)
            stale = [i for i, (a, b, c, d) in enumerate(now) if a != b or c != d]
        self._copy(stale)
        for i in stale:
            self._versions[i] = _versions_of([self._own[i]])[0]
        self._generations = wanted
        if force:
            self._layout = originals.layout
            for row, module in zip(self._rows, originals.modules, strict=True):
                row.clear()
                row.update(module._buffers)  # those that are None, and the order of the others
            self._contents = Contents(self._rows[number] for number in originals.holders)
        for i in stale:
            for number, name in originals.slots[i]:
                self._rows[number][name] = self._own[i]
        self._contents.read()

    def _written(self, versions: Sequence[Any]) -> list[int]:
        """Return the positions of buffers that the replica's forward has written or replaced."""
        return [
            i
            for i, (now, before) in enumerate(zip(versions, self._versions, strict=True))
            if now != before
            or any(self._rows[n].get(name) is not self._own[i] for n, name in self._originals.slots[i])
        ]

    def _copy(self, stale: list[int]) -> None:
        sources = self._originals.tensors
        plain = [i for i in stale if not sources[i].requires_grad]
        with torch.inference_mode(mode=False), torch.no_grad():
            # New tensors and no copies in place: a graph of an earlier forward may hold the old.
            for i in plain:
                self._own[i] = torch.empty_like(sources[i], device=self._device)
            copy_coalesced([[self._own[i] for i in plain]], [sources[i] for i in plain])
        for i in stale:
            if sources[i].requires_grad:
                self._own[i] = sources[i].to(self._device)


def _versions_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the version counters; a tensor made in inference mode, which has none, gets a new object."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [object() if t.is_inference() else t._version for t in tensors]
