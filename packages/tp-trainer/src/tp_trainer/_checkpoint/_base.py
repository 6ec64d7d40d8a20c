"""The frozen weights that ``Checkpoints(weights="trainable")`` leaves out, and their digests.

The digest of a weight is a sum over its elements, each multiplied by factors that depend on its place::

    digest = sum over (i, j) of bits[i, j] * factor_0[i] * factor_1[j]     modulo 2 ** 64

So ranks that hold slices of a weight add up their sums: it is the same however the weight is split, and no
rank needs the whole. It is against accidents, as digests of files are. A single changed element always
changes it, since the factors are odd.

Source: multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 2.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, StateError
from tp_core.plugins import Session
from tp_core.state import plain_name, slice_of
from tp_core.tensors import TensorSlice, is_dtensor, quantized_parts

from tp_trainer._checkpoint._folder import STATE, read_json

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
_SAMPLED = 256  # elements of a weight, about, that each checkpoint compares
_BLOCK = 1 << 16  # elements: their 64-bit integers stay in the processor's cache

_Sums = list[tuple[tuple[int, ...], tuple[int, ...], int]]
"""The place, the shape and the sum of each part that a rank holds of a weight."""


@dataclass(frozen=True, slots=True)
class Base:
    """The frozen weights beside a checkpoint's tensors.

    Attributes:
        source: Where they came from, the ``name_or_path`` of a model of transformers; ``None`` if unknown.
        weights: The digest, dtype and shape of each, by its name in the model's state.
    """

    source: str | None
    weights: Mapping[str, tuple[str, str, tuple[int, ...]]]

    def to_plain(self) -> dict[str, Any]:
        return {"source": self.source, "weights": {n: list(w) for n, w in self.weights.items()}}

    def of_model(self, name: str) -> "Base":
        """Return the weights of one of several models, with the names that they have in it."""
        start = f"{name}."
        weights = {n.removeprefix(start): w for n, w in self.weights.items() if n.startswith(start)}
        return Base(self.source, weights)

    def check(self, session: Session, model: nn.Module, path: Path) -> None:
        """Make sure that a model has these weights.

        Raises:
            StateError: The model has other ones; the first one is named; on all ranks.

        Collectives: one gather of digests.
        """
        entries = named_entries(model)
        current = digests(session, {n: entries[n] for n in self.weights if n in entries})
        for name, (_, dtype, shape) in self.weights.items():
            now = current.get(name)
            if now == self.weights[name]:
                continue
            how = "the model has none of that name"
            if now is not None:
                how = f"it was {dtype} {shape}, and is {now[1]} {now[2]} now"
                if (dtype, shape) == now[1:]:
                    how = "its values are other ones"
            msg = (
                f"{path} was trained on another base: the first frozen weight that differs is {name!r} "
                f"({how}). The checkpoint has the trained weights alone: build the model from the frozen "
                f"ones that the run had{self._from()}"
            )
            raise StateError(msg)

    def check_is_whole(self, path: Path) -> None:
        """Raise an error, since a whole model is wanted of the checkpoint at ``path``."""
        msg = (
            f"{path} has the trained weights of a model alone (weights='trainable'), without "
            f"{len(self.weights)} frozen ones{self._from()}: load it into the model with those, "
            "trainer.load_model(model, path), and write that with trainer.export()"
        )
        raise StateError(msg)

    def _from(self) -> str:
        if self.source is None:
            return ""
        return f", of {self.source!r}"


def read_base(path: Path) -> Base | None:
    """Return the frozen weights that a checkpoint of a run has left out; ``None`` if it is whole."""
    if not (path / STATE).is_file():  # of tp_shard.save_sharded
        return None
    return base_of(read_json(path / STATE))


def base_of(values: Mapping[str, Any]) -> Base | None:
    """Return the frozen weights that the plain values of a checkpoint name; ``None`` if there are none."""
    base = values.get("base")
    if base is None:
        return None
    weights = {n: (digest, dtype, tuple(shape)) for n, (digest, dtype, shape) in base["weights"].items()}
    return Base(base["source"], weights)


class FrozenWeights:
    """The frozen weights of a run; its checkpoints leave them out as long as they stay what they are.

    Args:
        model: The model, with what was restored.
        before: The frozen weights beside the checkpoint from which the run resumes; ``None`` if it has all.

    Collectives: one gather of digests.
    """

    def __init__(self, session: Session, model: nn.Module, before: Base | None) -> None:
        self._session = session
        frozen = frozen_weights(model)
        # What an earlier part of the run has trained, or written, is saved from then on.
        self._weights = {n: t for n, t in frozen.items() if before is None or n in before.weights}
        self._base = Base(_source_of(model), digests(session, self._weights))
        self._versions = {name: _versions(tensor) for name, tensor in self._weights.items()}
        self._changed: set[str] = set()
        self._is_compared = False

    def base(self, model: nn.Module) -> Base:
        """Return the weights that a checkpoint leaves out now: those that are frozen, and unchanged so far.

        A frozen weight may change without gradients, as in a momentum encoder. Version counters
        show that, unless it is written through ``.data``: so each checkpoint compares some of its elements,
        and the first one digests of all.

        Collectives: one gather of names; the first time one of digests, too.
        """
        frozen = frozen_weights(model)
        changed = {
            name
            for name in self._base.weights.keys() - self._changed
            if name not in frozen or _versions(frozen[name]) != self._versions[name]
        }
        if not self._is_compared:
            self._is_compared = True
            now = digests(self._session, {n: frozen[n] for n in self._base.weights if n in frozen})
            changed |= {name for name, weight in now.items() if weight != self._base.weights[name]}
        # The same on all ranks, as they write the checkpoint together.
        everyones = self._session.gather_objects(changed, where="changed weights of a base")
        self._changed |= set().union(*everyones)
        unchanged = {n: w for n, w in self._base.weights.items() if n not in self._changed}
        return Base(self._base.source, unchanged)


# -- The weights of a model ------------------------------------------------------------------------


def named_entries(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state, by their plain names."""
    state = model.state_dict(keep_vars=True)
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters, and what modules keep beside them (the scales of quantized weights).

    Buffers are none of them: training may change them, as the statistics of a batch norm.
    """
    parameters, buffers = {id(p) for p in model.parameters()}, {id(b) for b in model.buffers()}
    modules = {plain_name(name): module for name, module in model.named_modules()}
    weights = {}
    for name, tensor in named_entries(model).items():
        if id(tensor) in parameters:
            is_frozen = not tensor.requires_grad
        else:
            own = [p for p in _owner(modules, name)._parameters.values() if p is not None]
            is_quantized = bool(own) and not any(p.requires_grad for p in own)
            is_frozen = id(tensor) not in buffers and is_quantized and not name.endswith("_extra_state")
        if is_frozen:
            weights[name] = tensor
    return weights


def _owner(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return the module of an entry, which may be named "weight.absmax" within it."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return modules[name]


def check_frozen(model: nn.Module) -> None:
    """Make sure that a model has frozen weights to leave out, and trained ones to save."""
    if not frozen_weights(model):
        msg = (
            "Checkpoints(weights='trainable') leaves out frozen weights, and the model has none: each of its "
            "parameters has requires_grad=True; leave weights= out, or freeze some"
        )
        raise ConfigError(msg)


def describe_frozen(model: nn.Module, weights: str) -> str | None:
    """Return a text about the frozen weights in a run's checkpoints; ``None`` where they matter little."""
    frozen = {id(tensor): tensor for tensor in frozen_weights(model).values()}
    all_of_it = {id(tensor): tensor for tensor in named_entries(model).values()}
    share = sum(map(_nbytes, frozen.values())) / max(1, sum(map(_nbytes, all_of_it.values())))
    if share < 0.5:
        return None
    amount = f"{share:.0%} of the model, {len(frozen)} frozen weights"
    if weights == "trainable":
        source = _source_of(model)
        of = "" if source is None else f" of {source}"
        return f"checkpoints leave out {amount}{of}, and keep their digests"
    return f"each checkpoint holds the frozen weights too ({amount}): weights='trainable' leaves them out"


def _nbytes(tensor: Tensor) -> int:
    parts = quantized_parts(tensor) or [tensor]
    return sum(part.numel() * part.element_size() for part in parts)


def _source_of(model: nn.Module) -> str | None:
    """Return where a model of transformers came from, which may be within other modules."""
    for module in model.modules():
        name = getattr(getattr(module, "config", None), "name_or_path", None)
        if isinstance(name, str) and name:
            return name
    return None


# -- Digests of tensors, however they are split -----------------------------------------------------


@torch.no_grad()
def digests(session: Session, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Return the digest, dtype and shape of each tensor, the same on all ranks and for any sharding.

    Collectives: one gather of small objects.
    """
    own: dict[str, tuple[str, tuple[int, ...], _Sums]] = {}
    described: dict[int, tuple[str, tuple[int, ...], _Sums]] = {}  # tied weights have several names
    for name, tensor in tensors.items():
        if id(tensor) not in described:
            described[id(tensor)] = _described(session, tensor)
        own[name] = described[id(tensor)]
    everyones = session.gather_objects(own, where="digests of weights")
    result = {}
    for name, (dtype, shape, _) in own.items():
        # Ranks may hold the same part: of copies of a model, and of shared heads.
        parts = {(start, size): part for theirs in everyones for start, size, part in theirs[name][2]}
        result[name] = (f"{sum(parts.values()) % (1 << 64):016x}", dtype, shape)
    return result


def _described(session: Session, tensor: Tensor) -> tuple[str, tuple[int, ...], _Sums]:
    """Return the dtype and the whole shape of a tensor, and the sums of the parts that this rank holds."""
    inner = quantized_parts(tensor)
    if inner is not None:  # whole on each rank
        sums: _Sums = [((i,), tuple(t.shape), _sum(t, (0,) * t.dim())) for i, t in enumerate(inner)]
        kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in inner)
        return f"{type(tensor).__name__} of {kinds}", tuple(tensor.shape), sums
    own = slice_of(session.as_slice, tensor, tensor.detach())
    parts: Iterable[tuple[Sequence[int], Tensor]] = (
        own.parts if isinstance(own, TensorSlice) else [((0,) * own.dim(), own)]
    )
    sums = [(tuple(start), tuple(part.shape), _sum(part, start)) for start, part in parts]
    return str(tensor.dtype).removeprefix("torch."), tuple(own.shape), sums


def _sum(part: Tensor, start: Sequence[int]) -> int:
    """Return the sum of a part's elements, each multiplied by the factors of its place in the whole."""
    if part.is_complex():
        part, start = torch.view_as_real(part), (*start, 0)
    if not part.dim():
        part, start = part.reshape(1), (0,)
    bits = part.view(_INTEGERS[part.element_size()])
    outer, *inner = [
        _factors(first, length, dim, part.device)
        for dim, (first, length) in enumerate(zip(start, part.shape, strict=True))
    ]
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    rows = max(1, _BLOCK // max(1, part[:1].numel()))
    for first in range(0, part.shape[0], rows):
        block = bits[first : first + rows]
        for factor in reversed(inner):
            block = (block * factor).sum(-1)  # integers of 64 bits, as the factors are
        total += (block * outer[first : first + rows]).sum()
    return int(total)


def _factors(start: int, length: int, dim: int, device: torch.device) -> Tensor:
    """Return odd 64-bit factors for the places from ``start`` on in a dimension.

    Source: the finalizer of SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014, figure 17.
    """
    x = torch.arange(start, start + length, device=device).add_((dim + 1) * (1 << 40))
    x.mul_(-0x61C8864680B583EB)  # 0x9E3779B97F4A7C15 as a signed number, as the others
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(-0x40A7B892E31B1A47)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1)).bitwise_or_(1)


def _versions(tensor: Tensor) -> tuple[tuple[int, int, bytes], ...]:
    """Return what changes when a parameter is written, or gets other memory."""
    if not isinstance(tensor, nn.Parameter):  # made again in each state, as the scales of bitsandbytes are
        return ()
    with torch.no_grad():
        if is_dtensor(tensor):
            parts = [tensor.to_local()]
        else:
            parts = quantized_parts(tensor) or [tensor]
        return tuple((0 if t.is_inference() else t._version, t.data_ptr(), _sampled(t)) for t in parts)


def _sampled(tensor: Tensor) -> bytes:
    """Return some elements from all of a tensor: an average that goes on through ``.data`` changes them."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous().view(torch.uint8)
    return bytes(some.cpu().numpy())
