"""The base class of layers with split parameters."""

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tp_core.errors import ModelError

from tp_shard._groups._group import Group
from tp_shard._shards._attributes import is_marked, mark_parameter
from tp_shard._shards._dtensors import check_data_mesh
from tp_shard._split import Split

_NORMS = ("_SpectralNorm", "_WeightNorm", "_Orthogonal", "SpectralNorm", "WeightNorm")


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
        """Mark the layer's own parameters."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._mark(name, parameter)

    def _mark(self, name: str, parameter: Tensor) -> None:
        split = self.splits.get(name)
        mark_parameter(
            parameter,
            None if split is None else self.dim,
            self.order_type,
            split=split,
            sharded=split is not None and self.group.size > 1,
        )

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
        """Register a hook as torch does.

        Raises:
            ModelError: The hook belongs to torch's older ``weight_norm`` or ``spectral_norm``.
        """
        self._refuse_norm(hook)
        return super().register_forward_pre_hook(hook, **options)

    def refuse_norms(self) -> None:
        """Raise if a parametrization would take the norm of a shard for the norm of the whole weight.

        Raises:
            ModelError: torch's ``weight_norm``, ``spectral_norm`` or ``orthogonal`` was applied to the layer.
        """
        parametrized = self._modules.get("parametrizations")
        if parametrized is not None:
            for transforms in parametrized.children():
                for transform in transforms.children():
                    self._refuse_norm(transform)

    def _refuse_norm(self, transform: object) -> None:
        if self.group.size > 1 and self.splits and _is_norm(transform):
            msg = (
                f"{type(transform).__name__.strip('_')} of {type(self).__name__}({self.extra_repr()}) would "
                "take the norm of this rank's shard for that of the whole weight; apply it to layers that "
                "are not split"
            )
            raise ModelError(msg)


def _is_norm(transform: object) -> bool:
    """Return whether a parametrization or hook of torch uses the norm of the whole weight."""
    return type(transform).__name__ in _NORMS and type(transform).__module__.startswith("torch.nn.utils")
