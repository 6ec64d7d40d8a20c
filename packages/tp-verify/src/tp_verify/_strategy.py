"""The contract of a parallel strategy: what `verify` asks of it, with defaults that it overrides."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core import tree_map
from tp_core.compare import named_tensors
from tp_core.errors import ConfigError
from tp_core.messages import closest
from tp_core.random import seed_torch
from tp_core.tensors import is_dtensor

Step = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module], Optimizer]

_WRAPPED = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Strategy:
    """A parallel strategy of training. All methods are called on every rank, in a process group (gloo).

    Override :meth:`parallelize`, and what your training does otherwise than the defaults.

    Args:
        parallelize: A function from the plain model to the parallel one, in place of the method.
        data: What a rank gets of each batch: "rows", its share of them, or "whole", as in tensor parallelism.
        name: The name in reports.

    Attributes:
        reorders: Whether ranks have rows, or places of a sequence, in an order that :meth:`share` does not
            say, as of a loader that shuffles, or zigzag slices. Activations are then compared in any order.

    Example:
        >>> from torch.distributed.fsdp import fully_shard
        >>> class Mine(Strategy):
        ...     name, data = "mine", "rows"
        ...     def parallelize(self, model):
        ...         return fully_shard(model)
    """

    name: str = "parallel"
    data: Literal["rows", "whole"] = "rows"
    reorders: bool = False

    def __init__(
        self,
        parallelize: Callable[[nn.Module], nn.Module | None] | None = None,
        *,
        data: Literal["rows", "whole"] | None = None,
        name: str | None = None,
    ) -> None:
        self._parallelize = parallelize
        self.data = data or self.data
        self.name = name or str(getattr(parallelize, "__name__", self.name))

    def parallelize(self, model: nn.Module) -> nn.Module | None:
        """Return the parallel model, or change the plain one in place and return nothing.

        Raises:
            ConfigError: There is no function, or it returns something else.
        """
        if self._parallelize is None:
            msg = f"{type(self).__name__} has no parallelize(): override it, or give a function in its place"
            raise ConfigError(msg)
        parallel = self._parallelize(model)
        if not isinstance(parallel, nn.Module | None):
            msg = f"{self.name}() has to return the parallel model, got {type(parallel).__name__}"
            raise ConfigError(msg)
        if parallel is None:  # changed in place
            return model
        return parallel

    def share(self, batch: Any) -> Any:
        """Return this rank's part of a whole batch, by default as ``data`` says.

        It may only select elements of the tensors: `verify` calls it with their numbers, too, to learn which
        rank has which.
        """
        if self.data == "whole":
            return batch
        return rows_of(batch, dist.get_rank(), dist.get_world_size())

    def prepare(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Return the parallel model and its optimizer, by default made after :meth:`parallelize`."""
        parallel = self.parallelize(model)
        if parallel is None:  # changed in place
            parallel = model
        return parallel, make(parallel)

    def backward(self, model: nn.Module, step: Step, parts: Sequence[Any]) -> Tensor:
        """Run the forward and backward passes of one optimizer step, and return the loss.

        The default gives the gradient of the whole batch's mean, where the wrapper averages gradients over
        ranks that have different samples, and accumulates over ``parts``.

        Args:
            model: The parallel model.
            step: The user's step: ``step(model, batch)`` returns a loss, or a dict with "loss" and "weight".
            parts: The micro-batches of this rank's share.

        Returns:
            The mean over this rank's samples, or over all. Ranks count by the weights of the steps that it
            calls, and equally where it calls none.

        Collective: an all-reduce of the weights, where ranks have different samples.
        """
        # Of parameters that the optimizer has not: nobody drops them, and they are scaled already.
        before: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                before[parameter] = parameter.grad
                parameter.grad = None
        count = dist.get_world_size() if self.data == "rows" else 1
        weights = torch.zeros((), dtype=torch.float64)
        mean = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(parts):
            self.sync_gradients(model, last=number == len(parts) - 1)
            loss, weight = loss_and_weight(step(model, part), part)
            (loss * weight).backward()
            mean += loss.detach().double() * weight
            weights += weight
        mean /= weights.clamp(min=1e-30)
        if count > 1:
            dist.all_reduce(weights)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(count / weights.item())
            if parameter in before:
                new = parameter.grad
                if new is None:
                    parameter.grad = before[parameter]
                else:
                    parameter.grad = before[parameter] + new
        return mean

    def sync_gradients(self, model: nn.Module, *, last: bool) -> None:
        """Have the next backward pass reduce gradients over ranks, or not; by default each does."""

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to the global norm ``max_norm`` at most; return the norm before."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model: nn.Module, optimizer: Optimizer) -> None:  # noqa: ARG002 - for others
        """Make the optimizer step, and drop the gradients."""
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(self, model: nn.Module, step: Step, share: Any) -> tuple[float, float] | None:
        """Return the loss of an evaluation and its weight; ``None`` where the strategy cannot evaluate."""
        with torch.no_grad():
            loss, weight = loss_and_weight(step(model, share), share)
        return float(loss), weight

    def seed(self, number: int) -> None:
        """Seed what a step draws: by default the same on ranks with the same samples, else each otherwise."""
        if self.data == "rows":
            number = number * dist.get_world_size() + dist.get_rank()
        seed_torch(number)

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        """Write a checkpoint into a folder of all ranks, by default with ``torch.distributed.checkpoint``."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        weights, states = get_state_dict(model, optimizer)
        save({"model": weights, "optimizer": states}, checkpoint_id=folder)

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        """Load what :meth:`save` has written, perhaps on another number of ranks."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        weights, states = get_state_dict(model, optimizer)
        load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    def close(self) -> None:
        """Release what the strategy holds, once all is recorded."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's gradient of a parameter; what a wrapper keeps elsewhere is not in ``grad``."""
        return parameter.grad

    def whole(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002 - for those that need the name
        """Return a whole parameter, gradient or optimizer state from this rank's part of it.

        DTensors are known. Plain parts may stay as they are, if ranks have slices along one dimension.

        Args:
            name: The parameter's name in the plain model.
            tensor: This rank's tensor.

        Collective: all-gathers. Every rank calls it for the same tensors in the same order.
        """
        if is_dtensor(tensor):
            return tensor.full_tensor()
        return tensor

    def plain_name(self, name: str) -> str | None:
        """Return the plain model's name of a module or parameter; ``None`` for one that it has not."""
        for wrapper in _WRAPPED:
            name = name.replace(wrapper, "")
            if name == wrapper[:-1]:
                name = ""
            else:
                name = name.removesuffix(f".{wrapper[:-1]}")
        return name

    def lines(self) -> list[str]:
        """Return the lines of a script that make ``model`` parallel, for a reproduction without tp.

        A strategy with a :meth:`backward` of its own runs it there, too: on ``batch``, with the loss in
        ``loss``.

        Raises:
            ConfigError: The strategy has none.
        """
        if self._parallelize is None:
            msg = f"{type(self).__name__} has no lines for a script: override lines(), or leave out reproduce"
            raise ConfigError(msg)
        (imported,) = function_lines(self._parallelize)
        return [imported, f"model = {self._parallelize.__name__}(model) or model"]


def check_strategy(strategy: Strategy) -> None:
    """Check that a strategy has a way to make a model parallel, before a process is started.

    Raises:
        ConfigError: It has neither the method nor a function.
    """
    kind = type(strategy)
    is_own = kind.parallelize is not Strategy.parallelize or strategy._parallelize is not None
    # `prepare` calls parallelize(): one that is overridden need not.
    if is_own or kind.prepare is not Strategy.prepare:
        return
    hint = ""
    own = closest("parallelize", vars(kind))
    if own is not None:
        hint = f"; it has {own}(), which nobody calls"
    msg = f"{kind.__name__} has no parallelize(): override it, or give a function in its place{hint}"
    raise ConfigError(msg)


def function_lines(*functions: Any) -> list[str]:
    """Return the lines that make functions of files known to a script.

    Raises:
        ConfigError: One is not a function at the top of a file.
    """
    by_file: dict[str | None, list[str]] = {}
    for function in functions:
        if not inspect.isfunction(function) or "." in function.__qualname__ or "<" in function.__qualname__:
            msg = f"a script calls functions at the top of a file, not {function!r}: leave out reproduce"
            raise ConfigError(msg)
        by_file.setdefault(inspect.getsourcefile(function), []).append(function.__name__)
    lines = []
    for file, names in by_file.items():
        if len(names) > 1:
            lines.append(f"{', '.join(names)} = map(runpy.run_path({file!r}).get, {names})")
        else:
            lines.append(f"{names[0]} = runpy.run_path({file!r})[{names[0]!r}]")
    return lines


def plain_options(options: Mapping[str, Any]) -> str:
    """Return options as a script has them.

    Raises:
        ConfigError: One has no text.
    """
    for key, value in options.items():
        if not isinstance(value, bool | int | float | str | None):
            msg = f"a script cannot say {key}={value!r}: leave out reproduce"
            raise ConfigError(msg)
    return "".join(f", {key}={value!r}" for key, value in options.items())


# -- Batches and the outputs of steps -------------------------------------------------------------


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with ``function`` applied to each tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def row_count(batch: Any) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor that has one."""
    return next((tensor.size(0) for _, tensor in named_tensors(batch) if tensor.dim()), 1)


def rows_of(batch: Any, number: int, parts: int) -> Any:
    """Return one of ``parts`` consecutive shares of a batch's rows; they may be uneven."""
    rows = row_count(batch)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() > 0 and tensor.size(0) == rows:
            return tensor.tensor_split(parts)[number]
        return tensor

    return mapped(batch, cut)


def repeat_first_row(batch: Any) -> Any:
    """Return a batch all rows of which are its first."""
    rows = row_count(batch)

    def repeated(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != rows:
            return tensor
        return tensor[:1].repeat_interleave(rows, 0)

    return mapped(batch, repeated)


def loss_and_weight(output: Any, batch: Any) -> tuple[Tensor, float]:
    """Return the loss of a step's output, and its weight: what it returned as "weight", else the rows.

    Raises:
        ConfigError: The step returned no loss, or not one number.
    """
    weight = None
    if isinstance(output, Mapping):
        loss = output.get("loss")
        weight = output.get("weight")
    elif isinstance(output, Tensor):
        loss = output
    else:
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(output).__name__
        msg = f"a step returns a loss of one number, or a dict with it as 'loss', and a 'weight'; got {got}"
        raise ConfigError(msg)
    if weight is None:
        weight = row_count(batch)
    return loss, float(weight)
