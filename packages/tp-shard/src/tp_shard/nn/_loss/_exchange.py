"""The one exchange of a loss over class shards, which carries the check of its targets along."""

import torch
from torch import Tensor
from tp_core.errors import DisagreementError

from tp_shard._groups import _debug
from tp_shard._groups._comm import all_gather_flat
from tp_shard.errors import OutOfRangeError
from tp_shard.nn._loss._options import LossOptions, Rows

__all__ = ["exchange"]

_HEADER = 3  # numbers before the rows: a wrong target or none, the number of classes, the targets' sum
_EXACT = 1 << 23  # integers below it are exact in float32
_OUT_OF_RANGE = float(1 << 24)


def exchange(found: Tensor, rows: Rows, options: LossOptions) -> Tensor:
    """Return what all ranks found, of shape (ranks, rows, columns).

    Targets are checked before anything is sent, and what the check found travels along: a rank
    that alone has a wrong target ends no other in a wait.

    Raises:
        OutOfRangeError: A target is none of the classes; on every rank. On accelerators and in compiled code
            it is torch's own assertion.
        DisagreementError: Ranks have other targets, or another number of classes.

    Collectives: one all-gather.
    """
    group = options.group
    # Asking for numbers would make an accelerator wait, and break a compiled graph in two.
    has_values = not hasattr(found, "fake_mode")
    can_ask = found.device.type == "cpu" and has_values and not torch.compiler.is_compiling()
    header = _check_targets(rows, options) if can_ask else [0.0] * _HEADER
    if not can_ask:
        wrong = rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))
        # Private: torch has no public assertion that does not wait. Tests of compiled losses notice its loss.
        torch._assert_async(~wrong.any(), "a target is none of the classes")  # type: ignore[no-untyped-call,unused-ignore]  # torch leaves it so
    if group.size == 1:
        _refuse_wrong([header], options)
        return found.unsqueeze(0)
    if _debug.state.enabled:
        _debug.check("all_gather", found, group, options.layer or "the loss")
    mine = torch.cat([found.new_tensor(header), found.view(-1)])
    everyones = mine.new_empty(group.size, mine.numel())
    all_gather_flat(everyones, mine, group)
    if can_ask:
        _refuse_wrong(everyones[:, :_HEADER].tolist(), options)
    return everyones[:, _HEADER:].view(group.size, *found.shape)


def _check_targets(rows: Rows, options: LossOptions) -> list[float]:
    wrong = 0.0
    if rows.target.numel():
        low, high = (int(t) for t in torch.aminmax(rows.target))
        if low < 0 or high >= options.num_classes:
            bad = rows.target[rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))]
            wrong = max(-_OUT_OF_RANGE, min(_OUT_OF_RANGE, float(bad[0]) * 2 + 1)) if bad.numel() else 0.0
    places = torch.arange(1, rows.target.numel() + 1)  # so that another order gives another sum
    total = float(int(rows.target.dot(places)) % _EXACT)
    return [wrong, float(options.num_classes % _EXACT), total]


def _refuse_wrong(headers: list[list[float]], options: LossOptions) -> None:
    classes = [int(h[1]) for h in headers]
    if len(set(classes)) > 1:
        msg = (
            f"ranks count different numbers of classes: {classes}, by rank; where class shards are uneven, "
            "or the mark that carries their number was lost, say num_classes="
        )
        raise DisagreementError(msg)
    for rank, (wrong, _, _) in enumerate(headers):
        if wrong:
            target = f"target {int((wrong - 1) / 2)}" if abs(wrong) < _OUT_OF_RANGE else "a target"
            msg = (
                f"{target} on rank {rank} is not one of {options.num_classes} classes, 0 to "
                f"{options.num_classes - 1}, nor ignore_index={options.ignore_index}"
            )
            raise OutOfRangeError(msg)
    sums = [h[2] for h in headers]
    if len(set(sums)) > 1:
        msg = (
            "ranks that hold the classes together have different targets; each of them needs the same "
            "rows: gather the batch and its targets first (ts.distributed.gather_batch)"
        )
        raise DisagreementError(msg)
