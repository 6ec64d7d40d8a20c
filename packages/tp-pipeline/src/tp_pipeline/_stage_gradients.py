"""The gradients of a batch in stages, from the backward passes of its micro-batches to the parameters."""

# Note [how gradients of stages are counted]
# ------------------------------------------
# A batch adds the gradients of one device to the parameters, however many micro-batches and ranks there
# are.
#
# 1. Micro-batches. A step's loss is a mean, over samples or over what the step returns as "weight". So the
#    loss of each micro-batch goes backward times its weight, and torch adds the gradients up in `.grad`,
#    which was set aside before. A power of two, the same for all micro-batches of a batch, keeps gradients
#    in half precision from underflow. The last stage knows the sum of weights times this power: the `total`
#    by which the sum of gradients is divided at the end.
# 2. Tied parameters. The stages that use one parameter have a part of its gradient each. Their ranks send
#    each other these parts, and add them in the order of places. So all have the same bits, and the copies
#    of a parameter stay equal.
# 3. Backward. All this has happened when the step returns. But users scale the loss, weigh it by a rank's
#    share of the samples, add losses up, or drop it. So a step returns a loss that depends on one leaf
#    alone, the anchor. The gradient that reaches the anchor multiplies what is added to `.grad`; where none
#    does, nothing is added.
# 4. Data-parallel ranks. After that, ranks with the same stages average `.grad`, unless in `no_sync()`.
#    Sharded parameters are different: a rank has room for the gradients of its rows only. So these are
#    averaged before they are added, also in `no_sync()`.
# 5. Norm. A parameter counts on one rank: on the first of its places and, where data-parallel ranks shard
#    parameters, on the first data rank if it is not sharded itself.

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tp_core.device_types import wide_float

from tp_pipeline._row_shards import RowShards, buckets
from tp_pipeline._staged_model import PipelineRanks, StagedModel


class DataParallelGradients:
    """Averages gradients over the data-parallel ranks, those with the same stages.

    Args:
        group: These ranks; ``None`` for all.
        host_group: These ranks, for what the host has; ``None`` if it is one.
        size: Their number.
        rows: The rows of parameters that this rank has, where the ranks shard them.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        host_group: ProcessGroup | None,
        size: int,
        rows: RowShards | None,
    ) -> None:
        self.size = size
        self._group, self._host_group, self._rows = group, host_group, rows

    def mean_rows(self, staged: StagedModel, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of the mean gradients of sharded parameters.

        Args:
            staged: The model.
            gradients: The whole gradients by name, from which those of sharded parameters are removed.

        Collectives: an all-reduce, and reduce-scatters.
        """
        if self._rows is None:
            return {}
        sharded = {name: p for name, p in staged.sharded().items() if p.requires_grad}
        names = self._names_with_gradient(list(sharded), [name in gradients for name in sharded])
        whole = []
        for name in names:
            if name in gradients:
                whole.append(gradients.pop(name))
            else:
                whole.append(sharded[name].new_zeros(staged.placements[name].shape))
        return dict(zip(names, self._rows.mean(whole), strict=True))

    def average(self, staged: StagedModel) -> None:
        """Average the gradients of parameters that are not sharded.

        Collectives: all-reduces.
        """
        trained = {n: p for n, p in staged.trained().items() if not staged.placements[n].is_sharded}
        names = self._names_with_gradient(list(trained), [p.grad is not None for p in trained.values()])
        gradients = []
        for name in names:
            parameter = trained[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for first, end in buckets([g.shape for g in gradients], [g.dtype for g in gradients]):
            self._average_bucket(gradients[first:end])

    def _names_with_gradient(self, names: list[str], has_gradient: list[bool]) -> list[str]:
        """Return the names of parameters that have a gradient on any data-parallel rank.

        Collective: an all-reduce.
        """
        flags = torch.tensor(has_gradient, dtype=torch.float32)
        if len(flags):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._host_group)
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    def _average_bucket(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=self._group)
        flat.div_(self.size)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


class PendingGradients:
    """The gradients of a batch until its loss goes backward: see Note [how gradients of stages are counted].

    Args:
        staged: The model.
        gradients: The sums over micro-batches and stages, by name.
        total: What they are divided by.
    """

    def __init__(self, staged: StagedModel, gradients: dict[str, Tensor], total: float) -> None:
        self._staged, self._gradients, self._total = staged, gradients, total

    @torch.no_grad()
    def add(self, factor: Tensor, data_parallel: DataParallelGradients, *, averages: bool) -> None:
        """Add the gradients to the parameters, times the gradient of the batch's loss; a second time nothing.

        Args:
            factor: The gradient of the loss.
            data_parallel: Averages over the data-parallel ranks.
            averages: Whether they average gradients now.

        Collectives: with data-parallel ranks, those of `DataParallelGradients`.
        """
        gradients = self._gradients
        if not gradients and data_parallel.size == 1:
            return
        self._scale_by(factor)
        gradients |= data_parallel.mean_rows(self._staged, gradients)
        parameters = dict(self._staged.model.named_parameters())
        for name, gradient in gradients.items():
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        gradients.clear()
        if data_parallel.size > 1 and averages:
            data_parallel.average(self._staged)

    def _scale_by(self, factor: Tensor) -> None:
        gradients = list(self._gradients.values())
        if not gradients:
            return
        if factor.device.type == "cpu" or not self._total:
            number = 0.0
            if self._total:
                number = float(factor) / self._total
            torch._foreach_mul_(gradients, number)  # private, as torch's optimizers use it: one call for all
            if number:
                return
            for gradient in gradients:
                gradient.zero_()  # one that counts nothing may be NaN
            return
        # The host does not wait for the factor of an accelerator, nor ask whether it is zero.
        scale = factor.to(wide_float(factor.device)) / self._total
        torch._foreach_mul_(gradients, scale)
        counts_nothing = scale == 0
        for gradient in gradients:
            gradient.masked_fill_(counts_nothing, 0.0)


def sum_over_stages(
    staged: StagedModel, ranks: PipelineRanks, own: dict[str, Tensor], reached: set[str]
) -> dict[str, Tensor]:
    """Return the gradients that any rank has, with those of tied parameters summed over stages.

    Args:
        staged: The model.
        ranks: The ranks that hold it.
        own: The gradients of this rank, by name.
        reached: The names of parameters that have a gradient on any rank.

    Collective: the ranks that have a tied parameter send each other its gradients.
    """
    gradients: dict[str, Tensor] = {}
    for name, parameter in staged.model.named_parameters():
        if name not in reached:
            continue
        placement = staged.placements[name]
        gradient = own.get(name)
        if gradient is None:
            if placement.is_sharded:
                shape = placement.shape
            else:
                shape = parameter.shape
            gradient = parameter.new_zeros(shape)
        if len(placement.places) > 1 and ranks.place in placement.places:
            gradient = _sum_over_places(gradient.contiguous(), placement.places, ranks)
        gradients[name] = gradient
    return gradients


def _sum_over_places(local: Tensor, places: list[int], ranks: PipelineRanks) -> Tensor:
    """Return the sum of the gradients of places: see Note [how gradients of stages are counted], 2.

    Collective: each rank sends to and receives from all others.
    """
    of_places = {}
    operations = []
    for place in places:
        if place == ranks.place:
            of_places[place] = local
            continue
        of_places[place] = torch.empty_like(local)
        operations.append(dist.P2POp(dist.isend, local, group=ranks.group, group_peer=place))
        operations.append(dist.P2POp(dist.irecv, of_places[place], group=ranks.group, group_peer=place))
    # Batched, as each rank sends and receives at once.
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    total = torch.zeros_like(local)
    for place in places:
        total += of_places[place]
    return total


def counted_in_norm(
    model: nn.Module, staged: StagedModel | None, *, place: int, counts_unsharded: bool
) -> list[nn.Parameter]:
    """Return the parameters that count on this rank: see Note [how gradients of stages are counted], 5.

    Args:
        model: The plain model.
        staged: Its stages; ``None`` if it has none.
        place: The place of this rank.
        counts_unsharded: Whether parameters count that data-parallel ranks do not shard.
    """
    counted = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or not parameter.grad.numel():
            continue  # a rank may have none of a tensor's rows, which have no largest one
        is_sharded, first_place = False, place
        if staged is not None:
            placement = staged.placements[name]
            is_sharded, first_place = placement.is_sharded, placement.places[0]
        if first_place == place and (counts_unsharded or is_sharded):
            counted.append(parameter)
    return counted
