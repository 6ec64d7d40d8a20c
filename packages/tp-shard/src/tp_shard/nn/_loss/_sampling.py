"""Which class centers take part in a step, where not all do.

Partial FC (An et al., "Partial FC: Training 10 Million Identities on a Single Machine", arXiv:2010.05222, and
"Killing Two Birds with One Stone", arXiv:2203.15565): the centers of a batch's own classes always take part,
and of the others a sample that is drawn anew in each step.
"""

from dataclasses import replace

import torch
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._groups._comm import gather_sizes
from tp_shard._groups._group import GroupLike, as_group
from tp_shard._split import bounds
from tp_shard.nn._loss._options import LossOptions

__all__ = ["check_sample_rate", "sample_classes", "with_sample"]

_BLOCK = 1 << 16  # classes that one seed is for
_SEEDS = 2**63  # how many there are


def sample_classes(
    num_classes: int,
    rate: float,
    seed: int,
    *,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> Tensor:
    """Return which of this rank's classes are in a sample of all classes.

    For Partial FC (arXiv:2010.05222): a step of a margin loss takes these classes and its targets' own. Each
    class is in it with probability ``rate``, independently: the number of classes in it varies a little.
    The sample depends on ``seed`` and ``num_classes`` alone. On any number of ranks, on any device, it is
    the same, and a rank draws no more numbers than it has classes.

    Args:
        num_classes: Over all ranks.
        rate: The probability of a class, above 0 and at most 1.
        seed: Another one for each step.
        device: Where the result is; the CPU by default, where the numbers are drawn anyway.
        group: Who holds the classes; the current model-parallel group by default.

    Returns:
        Indices into this rank's shard, sorted, of shape (classes in the sample,).

    Raises:
        ConfigError: ``rate`` is not above 0 and at most 1.

    Example:
        >>> sample_classes(10, 0.5, seed=1)  # on one rank
        tensor([0, 1, 5, 6, 7, 9])
    """
    check_sample_rate(rate)
    ranks = as_group(group)
    start, stop = bounds(num_classes, ranks.size, ranks.rank)
    kept = []
    for block in range(start // _BLOCK, -(-stop // _BLOCK) if stop > start else 0):
        # Far apart for neighboring seeds and blocks.
        mixed = (seed * 0x9E3779B97F4A7C15 + (block + 1) * 0xBF58476D1CE4E5B9) % _SEEDS
        first = block * _BLOCK
        drawn = torch.rand(_BLOCK, generator=torch.Generator().manual_seed(mixed)) < rate
        kept.append(drawn[max(start - first, 0) : stop - first])
    mask = torch.cat(kept) if kept else torch.zeros(0, dtype=torch.bool)
    return mask.nonzero().squeeze(1).to(device)


def check_sample_rate(rate: float) -> None:
    """Make sure that a sample can be drawn at this rate.

    Raises:
        ConfigError: The rate is not above 0 and at most 1.
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
        msg = f"sample_rate is the share of classes that take part, above 0 and at most 1, got {rate!r}"
        raise ConfigError(msg)


def with_sample(options: LossOptions, sampled: Tensor, target: Tensor) -> LossOptions:
    """Return options for a sample and the targets' own classes.

    Args:
        options: What is computed for all classes.
        sampled: Indices into this rank's shard.
        target: Of shape (rows,), of all ranks' classes.

    Raises:
        ConfigError: ``sampled`` are not indices into this rank's shard.

    Collectives: with label smoothing an all-gather of a number.
    """
    start, stop = options.bounds
    if sampled.dim() != 1 or sampled.dtype not in (torch.int64, torch.int32):
        msg = (
            f"sampled are classes of this rank, as a vector of integers; got {sampled.dtype} of shape "
            f"{tuple(sampled.shape)}"
        )
        raise ConfigError(msg)
    if (
        sampled.numel()
        and sampled.device.type == "cpu"
        and not 0 <= int(sampled.min()) <= int(sampled.max()) < stop - start
    ):
        msg = (
            f"sampled are indices into this rank's {stop - start} classes, 0 to {stop - start - 1}; got "
            f"{int(sampled.min())} to {int(sampled.max())}"
        )
        raise ConfigError(msg)
    mask = torch.zeros(stop - start, dtype=torch.bool, device=target.device)
    mask[sampled.to(target.device)] = True
    mine = (target != options.ignore_index) & (target >= start) & (target < stop)
    mask[target[mine] - start] = True
    everything = mask.nonzero().squeeze(1)
    count = 0
    if options.label_smoothing > 0:
        count = everything.numel()
        if options.group.size > 1:
            count = sum(gather_sizes(count, options.group, target.device))
    return replace(options, sampled=everything, num_sampled=count)
