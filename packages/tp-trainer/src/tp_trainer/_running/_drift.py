"""A watch over what ranks hold in common: it stays equal, or a warning names the first that differs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tp_core.device_types import wide_float
from tp_core.output import get_logger
from tp_core.plugins import Session
from tp_core.state import slice_of
from tp_core.tensors import TensorSlice

from tp_trainer._opening._agreement import check_same_optimizers
from tp_trainer._preparation import Preparation

log = get_logger("tp_trainer")

# Elements that are summed at once. Their copies in float64 have 4 MiB each, and malloc leaves some unused.
_MOST_AT_ONCE = 1 << 19

Place = tuple[str, tuple[tuple[int, ...], ...]]
"""The name of a tensor, and where in the whole a rank's parts begin; nothing for a whole one."""

Version = tuple[int, int]
"""The number of writes in place, and the storage."""


class TensorSum(NamedTuple):
    """What is compared of a parameter or buffer.

    Attributes:
        total: The sum of its elements.
        norm: Their norm.
        tolerance: The part of the norm by which totals may differ.
    """

    total: float
    norm: float
    tolerance: float

    def differs(self, other: "TensorSum") -> bool:
        # Equal gradients and equal kernels leave equal bits. Processors of several kinds round in their own
        # way, which over many steps stays below the root of the type's precision; random draws do not. NaN
        # has an error of its own.
        least = self.tolerance * max(self.norm, other.norm, 1e-3)
        return abs(self.total - other.total) > least


class DriftWatch:
    """Warns once if ranks hold different values of a tensor that they should have in common.

    Gradients are averaged, and optimizers are the same on all ranks, so that parameters stay equal. Random
    numbers that a program draws between two steps are not: a layer that a callback initializes anew, noise in
    a loop of the user's own. Nor is what forward writes from a rank's own rows, as a codebook. Of frozen
    parameters and buffers those that have been written since are looked at: a frozen base is large, and stays
    as it is. Norms have a warning of their own, and buffers that no checkpoint has are of a rank alone, as
    what a module keeps for the last length.

    Args:
        session: The session.
        models: The prepared models, by name.
        first_versions: Gets the versions of frozen parameters and buffers that it does not have yet, by name:
            what has another one is compared.
    """

    def __init__(
        self,
        session: Session,
        models: Mapping[str, nn.Module],
        first_versions: dict[str, Version | None] | None = None,
    ) -> None:
        self._session = session
        is_shared = session.job.averages_gradients and session.world_size > 1
        self._models = models if is_shared else {}
        self._warns = True
        if first_versions is None:
            first_versions = {}
        self._versions = first_versions
        self._buffers: set[str] = set()  # the names of those that are compared
        for model_name, model in self._models.items():
            plain = session.unwrap(model)
            for name, parameter in plain.named_parameters():
                if not parameter.requires_grad:
                    self._versions.setdefault(f"{model_name}.{name}", _version_of(parameter))
            for name, buffer in _named_buffers(plain):
                self._versions.setdefault(f"{model_name}.{name}", _version_of(buffer))

    @torch.no_grad()
    def sums(self) -> dict[Place, TensorSum]:
        """Return the sums of trained parameters and written tensors, or of the parts that this rank has."""
        if not self._warns:
            return {}
        places: list[Place] = []
        tolerances: list[float] = []
        stored: list[Tensor] = []
        wide = wide_float(self._session.device)
        for place, parts in self._parts():
            pieces = [piece for part in parts for piece in _pieces(part)]
            total = sum(piece.sum(dtype=wide) for piece in pieces)
            square = sum(torch.linalg.vector_norm(piece, dtype=wide).square() for piece in pieces)
            stored += [torch.as_tensor(total), torch.as_tensor(square).sqrt()]
            places.append(place)
            tolerances.append(torch.finfo(parts[0].dtype).eps ** 0.5)
        if not stored:
            return {}
        # Read together, so that an accelerator waits once.
        numbers = torch.stack([number.to(self._session.device) for number in stored]).view(-1, 2).tolist()
        return {
            place: TensorSum(total, norm, tolerance)
            for place, (total, norm), tolerance in zip(places, numbers, tolerances, strict=True)
        }

    def _parts(self) -> Iterator[tuple[Place, list[Tensor]]]:
        """Yield where each trained parameter and each written tensor is, and this rank's parts of it."""
        for model_name, model in self._models.items():
            plain = self._session.unwrap(model)
            # Private to torch: a program names there what each rank has for itself.
            own_names = getattr(plain, "_ddp_params_and_buffers_to_ignore", ())
            for name, parameter in plain.named_parameters():
                if parameter.dtype.itemsize == 1:  # torch adds up no float8
                    continue
                if not parameter.requires_grad and not self._is_written(f"{model_name}.{name}", parameter):
                    continue
                value = slice_of(self._session.as_slice, parameter, parameter.detach())
                if isinstance(value, TensorSlice):
                    parts = [(start, part) for start, part in value.parts if part.numel()]
                elif name in own_names or not value.numel():
                    continue
                else:
                    parts = [((), value)]
                if not parts or type(parts[0][1]) is not Tensor:  # another class may have no sum
                    continue
                starts = tuple(tuple(start) for start, _ in parts if start)
                yield (self._full_name(model_name, name), starts), [_real(part) for _, part in parts]
            # Where several ranks hold a model together, each may have buffers of its part alone.
            has_all = self._session.data_size == self._session.world_size
            if not has_all:
                continue
            for name, buffer in _named_buffers(plain):
                if name in own_names or not _has_sum(buffer) or not buffer.numel():
                    continue
                if self._is_written(f"{model_name}.{name}", buffer):
                    full_name = self._full_name(model_name, name)
                    self._buffers.add(full_name)
                    yield (full_name, ()), [buffer]

    def _is_written(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor has been written since the beginning, or was not there then."""
        now = _version_of(tensor)
        return now is not None and self._versions.get(name) != now

    def _full_name(self, model: str, name: str) -> str:
        if len(self._models) == 1:
            return name
        return f"{model}.{name}"

    def compare(self, everyones: Sequence[Mapping[Place, TensorSum]], *, when: str) -> bool:
        """Warn unless all ranks have equal sums in the same places; return whether they have."""
        first: dict[Place, tuple[int, TensorSum]] = {}
        for rank, sums in enumerate(everyones):
            for place, tensor_sum in sums.items():
                holder, expected = first.setdefault(place, (rank, tensor_sum))
                if tensor_sum.differs(expected):
                    self._warn(place[0], holder, rank, when)
                    return False
        return True

    def _warn(self, name: str, first_rank: int, other: int, when: str) -> None:
        self._warns = False
        if not self._session.is_main:  # all ranks find the same
            return
        if name in self._buffers:
            log.warning(
                "%s the ranks %d and %d hold different values of the buffer %r: forward writes it "
                "on each rank, from its own rows of a batch, and what rank %d has is kept: a queue or a "
                "running mean has the rows of that one. Gather the rows of all ranks before, as by "
                "trainer.all_gather in the step",
                when,
                first_rank,
                other,
                name,
                first_rank,
            )
            return
        log.warning(
            "%s the ranks %d and %d hold different values of the parameter %r, which they should have in "
            "common: the program has changed it on each rank in another way, or on one rank alone: by "
            "weights that it loads or an optimizer step under `if trainer.is_main`, by random numbers that "
            "it draws between two steps (noise, a layer that is initialized anew), or by the rank's own rows "
            "of a batch (a codebook). Load and step on every rank; draw numbers in a callback's "
            "on_optimizer_step, where all ranks draw the same, or with "
            "generator=torch.Generator().manual_seed(run.step); gather rows before, as by "
            "trainer.all_gather. What is saved is rank %d's",
            when,
            first_rank,
            other,
            name,
            first_rank,
        )


def note_reduction(preparation: Preparation, number: int) -> None:
    """Compare what ranks hold in common after some backward passes of a loop of the user's own.

    It is called after 1, 2, 4, 8 and 16 passes, as most faults of a program show early, and after each 1,024.

    Args:
        preparation: As for `compare_prepared`.
        number: How many passes there have been with a reduction over the ranks, which all of them make.

    Raises:
        DisagreementError: Settings of an optimizer differ.

    Collectives: but after the first as in `Session.gather_objects`, on several ranks.
    """
    if number == 1:
        _watch(preparation)  # what is written from now on is looked at
    else:
        compare_prepared(preparation, when=f"after {number} backward passes")


def compare_prepared(preparation: Preparation, *, when: str) -> None:
    """Compare what ranks hold in common where no loop does it: their optimizers' settings and parameters.

    Args:
        preparation: Has the session, and the prepared models and optimizers.
        when: Where all ranks are, for the message.

    Raises:
        DisagreementError: Settings of an optimizer differ.

    Collectives: as in `Session.gather_objects`, on several ranks.
    """
    session = preparation.session
    if session.world_size == 1:
        return
    watch = _watch(preparation)
    everyones = check_same_optimizers(session, preparation.optimizers(), beside=watch.sums())
    if not watch.compare(everyones, when=when):
        preparation.warns_of_drift = False


def _watch(preparation: Preparation) -> DriftWatch:
    models = {}
    if preparation.warns_of_drift:
        models = preparation.named_models()
    return DriftWatch(preparation.session, models, preparation.first_versions)


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each buffer that a checkpoint has, but norms'."""
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                yield name, buffer


def _has_sum(buffer: Tensor) -> bool:
    return type(buffer) is Tensor and buffer.is_floating_point() and buffer.dtype.itemsize > 1


def _version_of(tensor: Tensor) -> Version | None:
    """Return what shows that a tensor was written in place, or its data replaced.

    ``None`` for those that have no such thing: sparse and nested ones have no storage, and those that were
    made in inference mode count no writes.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference():
        return None
    # Private to torch: there is no public counter of writes, nor another identity of a storage.
    return tensor._version, tensor.untyped_storage()._cdata


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of a tensor: on a CPU a sum in a wider type makes a copy of what is summed."""
    if tensor.numel() <= _MOST_AT_ONCE or not tensor.dim():
        yield tensor
        return
    rows = max(1, _MOST_AT_ONCE * len(tensor) // tensor.numel())
    for piece in tensor.split(rows):
        if rows == 1 and tensor.dim() > 1:
            yield from _pieces(piece[0])
        else:
            yield piece


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor
