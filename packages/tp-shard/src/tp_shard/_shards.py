"""Shards: the marks and layers that say how tensors are split, and where each shard lies in the whole tensor.

A layer of this package knows its split itself: :class:`ParallelLayer`. Other code reads it from attributes of
the tensors.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle
from tp_core.errors import ConfigError, ModelError
from tp_core.random import preserve_torch_rng_state
from tp_core.tensors import SHARDED_ATTRIBUTE, TensorSlice, is_dtensor

from tp_shard._groups import _patches
from tp_shard._groups._group import ALONE, Group, current_group
from tp_shard._split import Split

# -- Shards under ``fully_shard``, which shards them again over the copies of the model -----------
# It replaces the parameters by DTensors over the data mesh. Each describes this rank's shard alone, because
# ``fully_shard`` does not know our split. `ParallelLayer` marks them again.


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, any other tensor as it is."""
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor


def part_of(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the part of a tensor that this rank holds: its offset in each dimension, and its values."""
    if not is_dtensor(tensor):
        return (0,) * tensor.dim(), tensor
    # The protocol by which torch.distributed.checkpoint asks a DTensor for its offsets.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), local(tensor)


def sharded_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a DTensor is sharded; none for any other tensor, which is whole.

    Raises:
        ConfigError: The DTensor has a partial placement: its sum over the ranks is still to be made.
    """
    if not is_dtensor(tensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        msg = (
            f"a DTensor of shape {tuple(tensor.shape)} has the placements {tensor.placements}: a sum that "
            "is yet to be made has no norm; redistribute it first"
        )
        raise ConfigError(msg)
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def check_data_mesh(parameter: Tensor, group: Group, what: object) -> None:
    """Raise unless ``fully_shard`` shards a parameter over ranks that hold the same shard of it, in order."""
    if group.size == 1 or not is_dtensor(parameter):
        return
    mesh = parameter.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if len(set(ranks) & set(dist.get_process_group_ranks(group.handle))) > 1:
        msg = (
            f"fully_shard() over the ranks {ranks} would mix the shards of {what}, which some of them hold "
            "together; give it the axes of data alone: mesh = init_device_mesh(device, (2, 2), "
            'mesh_dim_names=("dp", "tp")), ts.distributed.init_process_group(mesh), '
            'fully_shard(module, mesh=mesh["dp"])'
        )
        raise ConfigError(msg)
    # Torch sorts the ranks of a group and cuts in that order; a DTensor counts its parts along the mesh.
    if any((mesh.mesh.diff(dim=axis) < 0).any() for axis in range(mesh.ndim)):
        msg = (
            f"fully_shard() over the ranks {ranks} would save parts of {what} in wrong places: give it a "
            "mesh with ranks that ascend along each axis"
        )
        raise ConfigError(msg)


# -- Tensor attributes that mark the dimension that is split over ranks ---------------------------
# They are for people, and for code that was written with them. Most operations drop them, so no layer of this
# package depends on the marks of an activation.


PARALLEL_DIM = "_parallel_dim"
"""The attribute with the split dimension, as the layers count: inputs 0, outputs 1 or -1."""
ORDER_TYPE = "_order_type"
"""The attribute with the order of a parameter's dimensions: 0 for (out, in), 1 for (in, out)."""
PARALLEL_SIZE = "_parallel_size"
"""The attribute with the size of the split dimension over all shards."""
PARALLEL_RANGES = "_parallel_ranges"
"""The attribute with the pieces that each rank holds of it, if the split is not even."""

_DIMS = (None, 0, 1, -1)


def get_parallel_dim(tensor: Tensor) -> int | None:
    """Return the dimension along which ``tensor`` is marked as split: 1, -1, 0 or ``None``.

    Example:
        >>> get_parallel_dim(torch.empty(20, 30)) is None
        True
    """
    dim: int | None = getattr(tensor, PARALLEL_DIM, None)
    return dim


def get_parallel_size(tensor: Tensor) -> int | None:
    """Return the size of the split dimension over all shards, ``None`` if the mark lacks it."""
    size: int | None = getattr(tensor, PARALLEL_SIZE, None)
    return size


def mark_parameter(
    tensor: Tensor, parallel_dim: int | None, order_type: int, *, split: Split | None, sharded: bool
) -> None:
    """Mark a parameter of a layer that knows its split.

    The marks are plain numbers: torch saves the attributes of parameters, and does not load our classes.
    """
    setattr(tensor, PARALLEL_DIM, parallel_dim)
    setattr(tensor, ORDER_TYPE, order_type)
    setattr(tensor, PARALLEL_SIZE, None)
    setattr(tensor, PARALLEL_RANGES, None)
    if split is not None:
        setattr(tensor, PARALLEL_SIZE, split.size)
        if not split.is_even:
            setattr(tensor, PARALLEL_RANGES, split.ranges)
    setattr(tensor, SHARDED_ATTRIBUTE, sharded)


def is_marked(parameter: Tensor) -> bool:
    return getattr(parameter, SHARDED_ATTRIBUTE, None) is not None


def copy_marks(source: Tensor, target: Tensor) -> None:
    for name in (PARALLEL_DIM, ORDER_TYPE, PARALLEL_SIZE, PARALLEL_RANGES, SHARDED_ATTRIBUTE):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def get_split(tensor: Tensor, group: Group) -> Split | None:
    """Return the split of a marked tensor, ``None`` if it is not split.

    A mark without a size means that all ranks hold shards of the same size.
    """
    parallel_dim = get_parallel_dim(tensor)
    if parallel_dim is None:
        return None
    dim = tensor_dim(parallel_dim, getattr(tensor, ORDER_TYPE, 0), tensor.dim())
    size = get_parallel_size(tensor)
    if size is None:
        size = tensor.size(dim) * group.size
    ranges = getattr(tensor, PARALLEL_RANGES, None)
    if ranges is None:
        return Split.even(dim, size, group.size)
    return Split(dim, size, ranges)


def holds_shard(tensor: Tensor) -> bool:
    """Return whether a parameter holds a shard: by the note of its layer, or else by its mark."""
    noted: bool | None = getattr(tensor, SHARDED_ATTRIBUTE, None)
    if noted is None:
        return get_parallel_dim(tensor) is not None
    return bool(noted)


def tensor_dim(parallel_dim: int, order_type: int, ndim: int) -> int:
    """Return the dimension of the tensor itself for ``parallel_dim``.

    A vector has one dimension only: it is the bias of a layer with split outputs.
    """
    if ndim == 1:
        return 0
    if order_type == 1:
        return parallel_dim % ndim
    if parallel_dim == 0:
        return 1
    return 0


def check_dim(parallel_dim: object) -> None:
    if parallel_dim not in _DIMS or isinstance(parallel_dim, bool):
        msg = (
            "a layer is split along dim 1 or -1 (output features), 0 (input features) or None "
            f"(not split), got {parallel_dim!r}"
        )
        raise ConfigError(msg)


# -- Marks of users on the tensors of their own layers --------------------------------------------


def register_parallel_dim(tensor: Tensor, parallel_dim: int | None, *, size: int | None = None) -> None:
    """Mark ``tensor`` as split along ``parallel_dim``, in place.

    Args:
        tensor: Any tensor.
        parallel_dim: 1 or -1 for split output features, 0 for split input features, as a linear layer of
            shape (out, in) counts them; ``None`` removes the mark.
        size: The size of that dimension over all shards. The loss needs it if the shards are uneven.

    Raises:
        ConfigError: ``parallel_dim`` is another number.

    Example:
        >>> data = torch.empty(20, 30)
        >>> register_parallel_dim(data, -1)
        >>> get_parallel_dim(data)
        -1
    """
    check_dim(parallel_dim)
    setattr(tensor, PARALLEL_DIM, parallel_dim)
    if parallel_dim is None:
        size = None
    setattr(tensor, PARALLEL_SIZE, size)
    if isinstance(tensor, nn.Parameter):
        group = current_group()
        is_split = parallel_dim is not None and group is not None and group.size > 1
        setattr(tensor, SHARDED_ATTRIBUTE, is_split)
        if is_split:
            _carry_marks()


def register_parallel_attribute(
    tensor: Tensor, parallel_dim: int | None, order_type: int = 0, *, size: int | None = None
) -> None:
    """Mark a parameter of a custom layer as split, in place.

    Args:
        tensor: The parameter.
        parallel_dim: The dimension that is split, counted as ``order_type`` says; ``None`` removes the mark.
        order_type: 0 for a parameter of shape (out, in), where ``parallel_dim`` counts in reverse order,
            as in a linear layer; 1 for (in, out), as in an embedding.
        size: The size of that dimension over all shards; by default all shards have the size of this one.

    Raises:
        ConfigError: ``parallel_dim`` or ``order_type`` is another number.
    """
    if order_type not in (0, 1):
        msg = f"order_type is 0 for (out, in) or 1 for (in, out), got {order_type!r}"
        raise ConfigError(msg)
    register_parallel_dim(tensor, parallel_dim, size=size)
    setattr(tensor, ORDER_TYPE, order_type)


def _carry_marks() -> None:
    """Keep the marks of users on parameters under ``fully_shard``, while there are groups.

    A layer of this package restores its marks itself. A plain module does not notice that ``fully_shard``
    replaces its parameters.
    """
    # Private: torch's class for one sharded parameter is the only place where the old parameter and the new
    # one meet. The test `parameters_with_marks_of_ones_own_keep_them` notices its loss.
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original: Any
    gather: Any
    original = FSDPParam._init_sharded_param
    gather = FSDPParam.init_unsharded_param
    if hasattr(original, "_tp_shard"):
        return

    @functools.wraps(original)
    def shard(self: Any, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        original(self, param, *args, **kwargs)
        group = current_group()
        if holds_shard(param) and group is not None and _patches.is_active():
            check_data_mesh(self.sharded_param, group, f"a parameter of shape {tuple(param.shape)}")
            copy_marks(param, self.sharded_param)

    @functools.wraps(gather)
    def unshard(self: Any) -> None:
        gather(self)
        if _patches.is_active():
            copy_marks(self.sharded_param, self._unsharded_param)

    shard._tp_shard = True  # type: ignore[attr-defined]  # so that a second mark does not wrap it again
    _patches.also(_patches.replace(FSDPParam, "_init_sharded_param", shard))
    _patches.also(_patches.replace(FSDPParam, "init_unsharded_param", unshard))


# -- The base class of layers with split parameters -----------------------------------------------


# Private: the parametrizations have no public names. `norms_of_split_weights_are_refused` notices their loss.
_NORMS = (
    parametrizations._SpectralNorm,
    parametrizations._WeightNorm,
    parametrizations._Orthogonal,
    SpectralNorm,
    WeightNorm,
)
# Other parametrizations that were tried. Weak: one that is removed must not live on here.
_tried: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class ParallelLayer(nn.Module):
    """A layer with shards among its parameters, and the split of each.

    Marks on the parameters carry the same facts for other code. The layer marks them again whenever torch
    makes new parameters: after a copy, a pickle, a move to another device, a load.

    Attributes:
        group: The ranks that hold the layer together.
        splits: The split of each split parameter, by its name; all others are the same on all ranks.
        dim: The dimension along which the layer is split, as users give it: 1, -1, 0 or ``None``.
        order_type: 0 if weights have shape (out, in), 1 if they have shape (in, out).
    """

    group: Group
    splits: Mapping[str, Split]
    dim: int | None
    order_type: int = 0

    def mark_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._mark(name, parameter)

    def _mark(self, name: str, parameter: Tensor) -> None:
        split = self.splits.get(name)
        dim = None if split is None else self.dim
        is_sharded = split is not None and self.group.size > 1
        mark_parameter(parameter, dim, self.order_type, split=split, sharded=is_sharded)

    def __setattr__(self, name: str, value: Any) -> None:
        # ``fully_shard`` sets its new parameters through here; without marks they would count as whole, and
        # clipping and saving would be wrong (`training_and_clipping_are_those_of_the_whole_model`).
        if isinstance(value, nn.Parameter) and not is_marked(value) and "splits" in self.__dict__:
            if name in self.splits:
                check_data_mesh(value, self.group, self)
            self._mark(name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it so
        self.mark_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # as above
        self.mark_parameters()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.mark_parameters()  # assign=True replaces the parameters

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        """Register a hook as torch does."""
        self._refuse_norm(hook)
        return super().register_forward_pre_hook(hook, **options)

    def refuse_norms(self) -> None:
        """Raise if a parametrization would compute with a shard what it should with the whole weight."""
        parametrized = self._modules.get("parametrizations")
        if parametrized is None or self.group.size == 1:
            return
        for name, transforms in parametrized.named_children():
            for transform in transforms.children():
                self._refuse_norm(transform)
                if not torch.compiler.is_compiling() and transform not in _tried:
                    self._try_transform(name, transform)
                    _tried.add(transform)

    def _refuse_norm(self, transform: object) -> None:
        if self.group.size > 1 and self.splits and isinstance(transform, _NORMS):
            raise self._mixes_shard(transform, "take the norm of this rank's shard for the whole weight's")

    def _try_transform(self, name: str, transform: nn.Module) -> None:
        """Raise unless elements of a shard stay as they are when others along the split dimension change."""
        split = self.splits.get(name)
        shard: Any = getattr(self.parametrizations, name)
        original = shard._parameters.get("original")
        if split is None or original is None or original.size(split.dim) < 2:
            return
        weight = original.detach().clone()
        changed = weight.clone()
        half = weight.size(split.dim) // 2
        changed.narrow(split.dim, half, weight.size(split.dim) - half).add_(1.0)
        transformed = []
        for value in (weight, changed):
            with torch.no_grad(), preserve_torch_rng_state([weight.device]):
                transformed.append(copy.deepcopy(transform)(value))
        kept = [value.narrow(split.dim, 0, half) for value in transformed]
        if not torch.equal(*kept):
            raise self._mixes_shard(transform, "compute with this rank's shard as with the whole weight")

    def _mixes_shard(self, transform: object, what: str) -> ModelError:
        msg = (
            f"{type(transform).__name__.strip('_')} of {type(self).__name__}({self.extra_repr()}) would "
            f"{what}; apply it to layers that are not split"
        )
        return ModelError(msg)


class TrainedParameters:
    """The parameters of a model by their modules, to see which of them are trained.

    ``fully_shard`` replaces parameters, and training may begin with some of them frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [module._parameters for module in model.modules() if module._parameters]

    def flags(self) -> tuple[bool, ...]:
        """Return whether each of them is trained."""
        return tuple([p.requires_grad for own in self._owners for p in own.values() if p is not None])


# -- The shards in a model's state: their splits, and their places in the whole tensors -----------


_WRAPPERS = frozenset({"module", "_orig_mod"})  # DistributedDataParallel's and torch.compile's


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter or buffer of a model that is a shard.

    Attributes:
        tensor: The model's own tensor; a tied one is the same object under several names. Under
            ``fully_shard`` it is a DTensor of the shape of the shard.
        split: Its split.
        group: The ranks that hold it together.
    """

    tensor: Tensor
    split: Split
    group: Group

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.split.full_shape(tuple(self.tensor.shape))


class ShardTable:
    """The shards of a model, by the names of its state, with or without the prefixes of wrappers."""

    def __init__(self, model: object) -> None:
        if not isinstance(model, nn.Module):
            msg = f"the model must be a torch.nn.Module, got {type(model).__name__}: {model!r}"
            raise ModelError(msg)
        self.exact = dict(_shards(model))
        self._bare = {_bare(name): shard for name, shard in self.exact.items()}
        self._own = {_bare(name): tensor for name, tensor, *_ in _tensors(model)}

    def get(self, name: str) -> Shard | None:
        """Return the shard with this name, ``None`` if the entry is not split."""
        return self.exact.get(name) or self._bare.get(_bare(name))

    def own(self, name: str) -> Tensor | None:
        """Return the model's parameter or buffer with this name, split or not."""
        return self._own.get(_bare(name))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain module inside ``DistributedDataParallel`` and ``torch.compile``."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module, str]]:
    """Yield a model's parameters and buffers under all of their names, with their module and name there."""
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield start + name, tensor, module, name


def _shards(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    for full_name, tensor, module, name in _tensors(model):
        if isinstance(module, ParallelLayer):
            group = module.group
            split = module.splits.get(name)
        else:  # a layer of the user's own, with marks on its tensors
            group = current_group() or ALONE
            split = get_split(tensor, group)
        if split is not None and group.size > 1:
            yield full_name, Shard(tensor, split, group)


# -- The place of a rank's shard in the whole tensor ----------------------------------------------
# Not DTensor's: it splits 10 over 4 ranks as 3, 3, 3, 1, where ours are 3, 3, 2, 2. Under ``fully_shard`` a
# rank's shard is split once more over the copies of the model, so it may be a part of a part.


Part = tuple[tuple[int, ...], Tensor]
"""A part of a tensor: its offset in each dimension, and its values."""


def parts_of_whole(parts: Sequence[Part], split: Split, rank: int, *, own: bool) -> list[Part]:
    """Return parts of a rank's shard, which begins at 0, as parts of the whole tensor: views, no copies.

    With ``own``, pieces that an earlier rank holds too are left out.
    """
    # A piece that several ranks hold counts for the first of them alone: written or summed twice, a key head
    # that ranks share would be counted twice.
    earlier: set[tuple[int, int]] = set()
    if own:
        earlier.update(piece for pieces in split.ranges[:rank] for piece in pieces)
    result = []
    for begins, values in parts:
        first = begins[split.dim]
        last = first + values.size(split.dim)
        at = 0
        for start, stop in split.ranges[rank]:
            low, high = max(at, first), min(at + stop - start, last)
            if low < high and (start, stop) not in earlier:
                offsets = list(begins)
                offsets[split.dim] = start + low - at
                result.append((tuple(offsets), values.narrow(split.dim, low - first, high - low)))
            at += stop - start
    return result


def slice_of(value: Tensor | TensorSlice, shard: Shard | None, *, own: bool = False) -> Tensor | TensorSlice:
    """Return ``value``, of the shape of a shard, with its place in the whole tensor: views, no copies.

    Without a shard the value is whole and the same on all ranks, or a part that carries its own place.
    """
    if shard is None:
        return value
    if isinstance(value, TensorSlice):
        parts = value.parts
    else:
        parts = [((0,) * value.dim(), value)]
    whole = shard.split.full_shape(tuple(value.shape))
    return TensorSlice(whole, parts_of_whole(parts, shard.split, shard.group.rank, own=own))


def shard_spec(model: nn.Module, *, own: bool = False) -> Callable[..., Tensor | TensorSlice]:
    """Return a function ``cut(parameter, value)`` that gives ``value`` its place in the whole tensor.

    Under ``fully_shard`` the model has the parameters that it holds between steps. With ``own``, pieces that
    several ranks hold count for the first of them alone, for writing.
    """
    shards = {id(shard.tensor): shard for shard in ShardTable(model).exact.values()}
    return lambda parameter, value: slice_of(value, shards.get(id(parameter)), own=own)
