"""The bounds within which two runs compute the same numbers: one table, by type and depth, with its reasons.

A difference is the norm of what one tensor has and the other has not, in float64. A norm is steady: the
largest single element of two runs in bfloat16 varies from draw to draw, their distance hardly.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tp_core.compare._trial_runs import in_backward_pass, named_tensors

Depth = Literal["sum", "pass", "training"]
"""What lies between two numbers: one reduction, a forward and backward pass, or the steps of a training."""

# How much farther from exact numbers than the reference's own rounding: sums may have another order. Of the
# right ways in tests/tp_verify/faults.py none needs more than 3.
SLACK = 6.0

# For each depth (rtol, atol): a share of the tensor's own norm, and one of the largest norm of its kind, for
# tensors that are all but zero, as the gradient of a bias before a norm layer is.
#
# float64: rounding is 1e-16 in a sum, and some 1e-14 in a deep model. The bound is a thousand times as much:
# a fault of one part in a billion shows, and no order of sums, kernel or processor comes near.
# float32: rounding is 6e-8. Sums over a few thousand elements in another order differ by up to 1e-6, losses
# and gradients of some layers by 1e-5. Over some tens of steps Adam divides by what may be rounding alone.
# bfloat16, float16: two roundings of a result (eps 7.8e-3 and 9.8e-4). What more there is in a deep model,
# the reference's own rounding has to show: see `Bound.limit`.
_TABLE: Mapping[torch.dtype, Mapping[Depth, tuple[float, float]]] = {
    torch.float64: {"sum": (1e-12, 1e-12), "pass": (1e-9, 1e-10), "training": (1e-8, 1e-10)},
    torch.float32: {"sum": (1e-6, 1e-7), "pass": (2e-5, 1e-7), "training": (1e-3, 1e-4)},
    torch.float16: {"sum": (2e-3, 1e-6), "pass": (2e-3, 1e-6), "training": (1e-2, 1e-3)},
    torch.bfloat16: {"sum": (1.6e-2, 1e-5), "pass": (1.6e-2, 1e-5), "training": (3e-2, 1e-2)},
}


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest difference that rounding explains.

    Attributes:
        rtol: A share of the tensor's own norm.
        atol: A share of the largest norm of its kind, for tensors that are all but zero.

    Example:
        >>> Bound.of([torch.float64])
        Bound(rtol=1e-09, atol=1e-10)
        >>> Bound.of([torch.float64, torch.float32]) == Bound.of([torch.float32])
        True
    """

    rtol: float
    atol: float

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype], *, depth: Depth = "pass") -> "Bound":
        """Return the bound of what is computed in some types: the bound of the coarsest of them.

        Args:
            dtypes: All types in which either side computes, see :class:`ComputedTypes`.
            depth: What lies between the two: one reduction ("sum"), a forward and backward pass ("pass"), or
                the steps of a training ("training").
        """
        dtype = coarsest(dtypes)
        if dtype in _TABLE:
            return cls(*_TABLE[dtype][depth])
        eps = torch.finfo(dtype).eps  # of eight bits: two roundings, as bfloat16
        return cls(2 * eps, 1e-3 * eps)

    def limit(self, exact: Tensor, near: Tensor | None = None, scale: float | None = None) -> float:
        """Return the largest norm of a difference from ``exact``.

        Args:
            exact: The reference.
            near: The reference with roundings of its own: in the type of the other side, or under
                :func:`nudged`. Where rounding grows, as before a softmax, this shows by how much.
            scale: The largest norm of a tensor of its kind; by default its own.
        """
        if not _has_digits(exact.dtype):
            return 0.0  # integers are equal, or not
        own = norm_of(exact)
        if near is None or near.shape != exact.shape:
            by_rounding = 0.0
        else:
            by_rounding = distance(exact, near)
        scale = own if scale is None else scale
        return SLACK * by_rounding + self.rtol * own + self.atol * scale


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the type with the fewest digits; float64 if none of them has digits."""
    floating = filter(_has_digits, dtypes)
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _has_digits(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# -- Differences ----------------------------------------------------------------------------------


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in float64."""
    if tensor.layout != torch.strided:
        values = tensor.detach().to_dense()
    else:
        values = tensor.detach()
    if values.is_complex():
        return torch.view_as_real(values).double()
    return values.double()


def norm_of(tensor: Tensor) -> float:
    """Return the norm of a tensor's finite numbers, in float64."""
    values = _wide(tensor)
    return float(torch.linalg.vector_norm(values.nan_to_num(0.0, 0.0, 0.0)))


def distance(exact: Tensor, other: Tensor) -> float:
    """Return the norm of the difference, in float64.

    It is infinite for other shapes, and where the two are not infinite, or no number, in the same places.
    """
    if exact.shape != other.shape:
        return float("inf")
    exact_wide, other_wide = _wide(exact), _wide(other).to(exact.device)
    difference = exact_wide - other_wide
    odd = ~difference.isfinite()
    if bool(odd.any()):
        # Such as a mask of -inf, which both have.
        if not torch.equal(exact_wide[odd].nan_to_num(nan=0.5), other_wide[odd].nan_to_num(nan=0.5)):
            return float("inf")
        difference = difference.masked_fill(odd, 0.0)
    return float(torch.linalg.vector_norm(difference))


def relative_error(exact: Tensor, other: Tensor, scale: float | None = None) -> float:
    """Return the norm of the difference as a share of ``scale``, by default the norm of ``exact``.

    Example:
        >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        0.1
    """
    apart = distance(exact, other)
    if apart == 0:
        return 0.0
    scale = norm_of(exact) if scale is None else scale
    return apart / max(scale, 1e-300)


def first_difference(
    exact: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    *,
    bound: Bound,
    near: Mapping[str, Tensor] | None = None,
) -> tuple[str, str] | None:
    """Return the first name whose tensors differ by more than the bound, and by how much, in words.

    Args:
        exact: The reference.
        found: What is compared with it. Each name of the reference has to be there, in the same shape.
        bound: What rounding explains.
        near: The reference with roundings of its own, see :meth:`Bound.limit`.

    Example:
        >>> one, other = {"weight": torch.ones(4)}, {"weight": torch.tensor([1.0, 1.0, 1.0, 1.1])}
        >>> first_difference(one, other, bound=Bound.of([torch.float32]))
        ('weight', 'it differs by 0.05 of its norm')
    """
    scale = max(map(norm_of, exact.values()), default=0.0)
    for name, tensor in exact.items():
        other = found.get(name)
        if other is None:
            return name, "it is missing"
        rounded = None if near is None else near.get(name)
        limit = bound.limit(tensor, rounded, scale)
        difference = difference_in_words(tensor, other, limit)
        if difference:
            return name, difference
    return None


def assert_same(
    found: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    *,
    dtypes: Iterable[torch.dtype] = (),
    depth: Depth = "pass",
) -> None:
    """Assert that tensors have the same names, types and, up to rounding, the same values.

    Args:
        found: The tensors.
        exact: What they have to be.
        dtypes: The types in which either side computes, beside those of the tensors.
        depth: What lies between the two: see :meth:`Bound.of`.

    Raises:
        AssertionError: They are not; the first that differs is named.

    Example:
        >>> assert_same({"loss": torch.tensor(0.25)}, {"loss": torch.tensor(0.25 + 1e-8)})
    """
    if sorted(found) != sorted(exact):
        msg = f"the names are {sorted(found)}, and not {sorted(exact)}"
        raise AssertionError(msg)
    for name, tensor in exact.items():
        if found[name].dtype != tensor.dtype:
            msg = f"{name}: its type is {found[name].dtype}, and not {tensor.dtype}"
            raise AssertionError(msg)
    bound = Bound.of([*dtypes, *(tensor.dtype for tensor in exact.values())], depth=depth)
    difference = first_difference(exact, found, bound=bound)
    if difference is not None:
        msg = f"{': '.join(difference)}, beyond {bound}"
        raise AssertionError(msg)


def difference_in_words(exact: Tensor, other: Tensor, limit: float) -> str:
    """Return how a tensor differs from the exact one; empty within the limit."""
    if exact.shape != other.shape:
        return f"it has the shape {tuple(other.shape)}, and not {tuple(exact.shape)}"
    if distance(exact, other) <= limit:
        return ""
    return f"it differs by {relative_error(exact, other):.2g} of its norm"


# -- The types in which a model computes, and its own rounding ------------------------------------


class ComputedTypes(TorchFunctionMode):
    """A context manager that notes the floating-point types in which torch computes.

    A model in float64 may compute in float32 inside: norms, softmax and losses of transformers do. So may
    one under autocast. What is made of numbers alone, such as a mask of zeros, does not count.

    Attributes:
        dtypes: The types.

    Example:
        >>> with ComputedTypes() as computed:
        ...     _ = torch.ones(2, dtype=torch.float64).float().square()
        >>> computed.dtypes
        {torch.float32}
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype in self.dtypes or not _has_digits(result.dtype):
            return result
        # Only what is made of floating-point numbers is rounded: positions and zeros are exact.
        if any(_has_digits(tensor.dtype) for _, tensor in named_tensors((args, kwargs or {}))):
            self.dtypes.add(result.dtype)
        return result


@contextmanager
def nudged(model: nn.Module, dtype: torch.dtype, *, seed: int = 0) -> Iterator[None]:
    """Move numbers that innermost modules return by one rounding of a type.

    How far a model's outputs and gradients move by this is how far another order of sums may move them, with
    all that grows on the way: the ``near`` of :meth:`Bound.limit`.

    In a wider type, half of the numbers move down by half a unit of the last place of ``dtype``. In ``dtype``
    itself, where none can move by less than a unit, a twelfth of them moves by one, up or down: this has the
    variance of one rounding, and no drift.

    Args:
        model: The model. Its weights stay as they are.
        dtype: The coarsest type in which it computes.
        seed: Another one draws other numbers.
    """
    generators: dict[torch.device, torch.Generator] = {}
    half = torch.finfo(dtype).eps / 2
    # Replicas share a module's hooks, and each is checked in the thread of its device.
    thread = threading.get_ident()
    devices = {parameter.device for parameter in model.parameters()}

    def is_own(device: torch.device) -> bool:
        if threading.get_ident() == thread:
            return True
        # On an accelerator autograd has a thread for each device, which repeats the forwards of checkpoints:
        # they must save the tensors that they saved before.
        return in_backward_pass() and device.type != "cpu" and device in devices

    def move(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(move, value))
        if not isinstance(value, Tensor) or not value.is_floating_point() or not is_own(value.device):
            return value
        generator = generators.get(value.device)
        if generator is None:
            generator = generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        drawn = torch.rand(value.shape, generator=generator, device=value.device)
        down = value * (1 - half)
        if value.dtype != dtype:
            return torch.where(drawn < 0.5, down, value)
        up = value * (1 + half)
        # The least number of a type, as masks have it, must not become infinite.
        up = torch.where(up.isinf(), value, up)
        return torch.where(drawn < 1 / 24, down, torch.where(drawn > 23 / 24, up, value))

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return move(output)

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(hook) for module in innermost]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
