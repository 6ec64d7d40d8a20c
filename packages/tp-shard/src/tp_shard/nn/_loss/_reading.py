"""How logits and options of a loss are read, and what is refused."""

from dataclasses import replace

import torch
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._groups._group import Group
from tp_shard._shards._marks import get_parallel_dim, get_parallel_size
from tp_shard._split import bounds, shard_sizes
from tp_shard.nn._loss._options import LossOptions, computed_in

__all__ = [
    "check_class_indices",
    "check_head",
    "check_local_width",
    "check_options",
    "check_unambiguous",
    "find_class_dim",
    "read_chunk_rows",
    "read_options",
    "read_width",
]

_CHUNK = 1 << 24  # logits that exist at a time: 64 MiB in float32
_CHUNK_ROWS = 128  # fewer would read the weight more often than it is worth


def check_options(reduction: str, label_smoothing: float, z_loss: float) -> None:
    """Make sure that a loss can be made with these options.

    Raises:
        ConfigError: An option is unknown, or outside of its range.
    """
    if reduction not in ("mean", "sum", "none"):
        msg = f"reduction is 'mean', 'sum' or 'none', got {reduction!r}"
        raise ConfigError(msg)
    if not 0.0 <= label_smoothing <= 1.0:
        msg = f"label_smoothing is between 0 and 1, got {label_smoothing!r}"
        raise ConfigError(msg)
    if not 0.0 <= z_loss < float("inf"):
        msg = f"z_loss is a factor of 0 or more, got {z_loss!r}"
        raise ConfigError(msg)


def check_class_indices(target: Tensor) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        msg = (
            f"targets are classes, as integers; got {target.dtype} of shape {tuple(target.shape)}. Class "
            "probabilities are not supported: use label_smoothing, or F.cross_entropy on whole logits"
        )
        raise ConfigError(msg)


def check_head(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    num_classes: int | None,
    ranks: Group,
) -> int:
    """Make sure that features, a head's shard and targets fit; return the number of classes over all ranks.

    Raises:
        ConfigError: The shapes of input, weight and targets do not fit, or the number of classes.
    """
    if weight.dim() != 2 or input.dim() < 1 or input.size(-1) != weight.size(1):
        msg = (
            f"input (..., in) and weight (local classes, in) do not fit: got shapes {tuple(input.shape)} "
            f"and {tuple(weight.shape)}"
        )
        raise ConfigError(msg)
    if target.shape != input.shape[:-1]:
        msg = (
            f"targets have the input's shape without its last dimension, {tuple(input.shape[:-1])}, got "
            f"{tuple(target.shape)}"
        )
        raise ConfigError(msg)
    size = num_classes if num_classes is not None else get_parallel_size(weight)
    if size is None:
        size = weight.size(0) * ranks.size
    start, stop = bounds(size, ranks.size, ranks.rank)
    if weight.size(0) != stop - start:
        msg = (
            f"rank {ranks.rank} of {ranks.size} holds {stop - start} of {size} classes, got a weight of "
            f"shape {tuple(weight.shape)}"
        )
        raise ConfigError(msg)
    return size


def read_chunk_rows(chunk_rows: int | None, local_classes: int) -> int:
    """Return how many rows of logits exist at a time; ``None`` leaves it to us.

    Raises:
        ConfigError: ``chunk_rows`` is not a number of rows, 1 or more.
    """
    if chunk_rows is None:
        return max(_CHUNK_ROWS, _CHUNK // max(1, local_classes))
    if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
        msg = f"chunk_rows is a number of rows, 1 or more, got {chunk_rows!r}"
        raise ConfigError(msg)
    return chunk_rows


def read_width(
    input: Tensor,
    target: Tensor,
    num_classes: int | None,
    parallel: bool | None,
    class_dim: int | None,
    ranks: Group,
) -> tuple[int, bool]:
    """Return the number of classes over all ranks, and whether the logits are split."""
    if num_classes is not None and (isinstance(num_classes, bool) or num_classes < 1):
        msg = f"num_classes is a number of classes, 1 or more, got {num_classes!r}"
        raise ConfigError(msg)
    dim = find_class_dim(input, target, class_dim, prefer_last=True)
    width = input.size(dim)
    marked = get_parallel_dim(input) in (1, -1)
    given = num_classes if num_classes is not None else (get_parallel_size(input) if marked else None)
    if parallel is None:
        parallel = marked
        if num_classes is not None and ranks.size > 1:
            if num_classes == 1:
                msg = "whether logits of one class are split cannot be seen: say parallel=True or False"
                raise ConfigError(msg)
            # As torch has it, the classes may be in dim 1 though the last dimension would fit too.
            widths = {width, input.size(min(1, input.dim() - 1))} if class_dim is None else {width}
            start, stop = bounds(num_classes, ranks.size, ranks.rank)
            parallel = stop - start in widths and num_classes not in widths
            if not parallel and num_classes not in widths:
                msg = (
                    f"logits of shape {tuple(input.shape)} are neither {num_classes} classes wide nor "
                    f"{stop - start}, which is the shard of rank {ranks.rank} of {ranks.size}"
                )
                raise ConfigError(msg)
    if not parallel:
        dim = find_class_dim(input, target, class_dim, prefer_last=False)
        return (input.size(dim) if num_classes is None else num_classes), False
    return (width * ranks.size if given is None else given), True


def check_unambiguous(target: Tensor, size: int, ranks: Group) -> None:
    """Refuse shapes that can be read in two ways on any of the ranks, on all of them."""
    inner = set(target.shape[1:])
    if target.dim() > 1 and len(inner) == 1 and inner <= set(shard_sizes(size, ranks.size)):
        msg = (
            f"logits of {size} classes over {ranks.size} ranks with targets of shape {tuple(target.shape)} "
            "may have their classes in dim 1 or last; say class_dim=1 or class_dim=-1"
        )
        raise ConfigError(msg)


def find_class_dim(input: Tensor, target: Tensor, class_dim: int | None, *, prefer_last: bool) -> int:
    ndim = input.dim()
    if class_dim is not None:
        if class_dim not in (1, -1) or (ndim == 1 and class_dim == 1):
            msg = (
                f"class_dim is 1 or -1 and a dimension of the logits, got {class_dim!r} for {ndim} dimensions"
            )
            raise ConfigError(msg)
        return class_dim % ndim
    if ndim < 3:
        return ndim - 1
    last = input.shape[:-1] == target.shape
    second = input.shape[:1] + input.shape[2:] == target.shape
    if last and second:
        return ndim - 1 if prefer_last else 1
    return 1 if second else ndim - 1


def check_local_width(
    input: Tensor,
    dim: int,
    size: int,
    is_split: bool,
    ranks: Group,
) -> None:
    width = input.size(dim)
    start, stop = bounds(size, ranks.size, ranks.rank)
    expected = stop - start if is_split else size
    if width == expected:
        return
    whole = " (whole logits are not split, though an argument or a mark says so)" if width == size else ""
    share = f"rank {ranks.rank} of {ranks.size} holds {expected} of {size} classes" if is_split else f"{size}"
    msg = (
        f"logits of shape {tuple(input.shape)} are {width} classes wide, expected {share}{whole}; say "
        f"parallel= and num_classes= as they are"
    )
    raise ConfigError(msg)


def read_options(options: LossOptions, input: Tensor) -> LossOptions:
    """Return options whose class weights are in the type in which the loss of ``input`` is computed.

    Raises:
        ConfigError: The input has no floating-point numbers, or there is not one weight for each class.
    """
    if not input.is_floating_point():
        msg = f"logits are floating point numbers, got {input.dtype}"
        raise ConfigError(msg)
    weight, size = options.weight, options.num_classes
    if weight is None:
        return options
    if weight.shape != (size,):
        msg = f"the weight has a factor for each of {size} classes, got shape {tuple(weight.shape)}"
        raise ConfigError(msg)
    return replace(options, weight=weight.detach().to(computed_in(input.dtype)))
