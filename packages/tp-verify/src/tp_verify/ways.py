"""Ready ways: of torch, transformers, Accelerate, and the backends of tp."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError
from tp_core.internal import is_dtensor, repeated_blocks

from tp_verify._way import MakeOptimizer, Step, Way, loss_and_weight, plain_options, rows_of

__all__ = [
    "Accelerate",
    "DataParallel",
    "FullyShard",
    "Pipelining",
    "TensorParallel",
    "TpBackend",
    "Transformers",
]


class DataParallel(Way):
    """``DistributedDataParallel``.

    Args:
        **options: Its options.
    """

    name, data = "ddp", "rows"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Wrap the model."""
        return nn.parallel.DistributedDataParallel(model, **self._options)

    def lines(self) -> list[str]:
        """Return the line of a script."""
        return [f"model = torch.nn.parallel.DistributedDataParallel(model{plain_options(self._options)})"]

    def sync_gradients(self, model: nn.Module, *, last: bool) -> None:
        """Reduce gradients in the last backward pass alone, as within ``no_sync()``."""
        model.require_backward_grad_sync = last  # type: ignore[assignment]  # torch's own attribute


class FullyShard(Way):
    """``fully_shard`` of each repeated block and of the whole model (FSDP2).

    Args:
        **options: Options of ``fully_shard``: ``mesh``, ``reshard_after_forward``, ``mp_policy``.
    """

    name, data = "fully_shard", "rows"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard the blocks, then the rest."""
        from torch.distributed.fsdp import fully_shard

        for block in repeated_blocks(model).values():
            fully_shard(block, **self._options)
        fully_shard(model, **self._options)
        return model

    def sync_gradients(self, model: nn.Module, *, last: bool) -> None:
        """Reduce gradients in the last backward pass alone."""
        model.set_requires_gradient_sync(last)  # type: ignore[operator]  # of what fully_shard returned


class TensorParallel(Way):
    """``parallelize_module`` with a plan; all ranks read the same batch.

    Args:
        plan: Styles by the names of modules, which may have wildcards.
    """

    name, data = "parallelize_module", "whole"

    def __init__(self, plan: Mapping[str, Any]) -> None:
        super().__init__()
        self._plan = plan

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Apply the plan over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(model, mesh, dict(self._plan))

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm over split and whole gradients; torch's function takes no mixture of them."""
        return clip_mixed(model, max_norm)


def clip_mixed(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of a model with DTensors and plain tensors; return the norm before.

    Collective: an all-reduce for each DTensor.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    plain = [n.full_tensor() if is_dtensor(n) else n for n in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(plain))
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
    return total


class Transformers(Way):
    """A model of transformers that ``from_pretrained`` loads in parts, by the model's own plan.

    Args:
        options: Options of ``from_pretrained``, such as ``experts_implementation``.
        **config: The fields of transformers' ``DistributedConfig``: ``tp_size=2``, ``fsdp_size=2``,
            ``ep_size=2``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, **config: Any) -> None:
        sizes = ", ".join(f"{key}={value}" for key, value in config.items())
        super().__init__(
            data="rows" if config.get("fsdp_size", 1) > 1 else "whole", name=f"transformers, {sizes}"
        )
        self._options, self._config = dict(options or {}), config

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Save the plain model, and load it in parts on all ranks."""
        from transformers.distributed.configuration_utils import DistributedConfig

        plain: Any = model
        with tempfile.TemporaryDirectory(prefix="tp-verify-") as own:
            folder = [own]
            dist.broadcast_object_list(folder)  # save_pretrained() writes on the first rank alone
            plain.save_pretrained(folder[0])
            dist.barrier()
            parallel: nn.Module = type(plain).from_pretrained(
                folder[0],
                distributed_config=DistributedConfig(**self._config),
                dtype=plain.dtype,
                **self._options,
            )
            dist.barrier()
        return parallel

    def lines(self) -> list[str]:
        """Return the lines of a script."""
        options = plain_options(self._options)
        return [
            "import tempfile",
            "from transformers.distributed import DistributedConfig",
            "folder = [tempfile.mkdtemp()]",
            "dist.broadcast_object_list(folder)",
            "model.save_pretrained(folder[0])",
            "dist.barrier()",
            f"config = DistributedConfig({plain_options(self._config).removeprefix(', ')})",
            "load = type(model).from_pretrained",
            f"model = load(folder[0], distributed_config=config, dtype=model.dtype{options})",
        ]

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm over split and whole gradients."""
        return clip_mixed(model, max_norm)


class Accelerate(Way):
    """Hugging Face Accelerate: ``Accelerator(**options).prepare(model, optimizer)``.

    Args:
        options: A function that returns the options on each rank, such as an ``fsdp_plugin``.
        **given: The options themselves, where they can be sent to other processes.
    """

    name, data = "accelerate", "rows"

    def __init__(self, options: Callable[[], Mapping[str, Any]] | None = None, **given: Any) -> None:
        super().__init__()
        self._options, self._given = options, given

    def prepare(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Prepare the model and its optimizer together."""
        from accelerate import Accelerator, PartialState
        from accelerate.utils import DistributedType

        options = dict(self._options() if self._options is not None else {})
        self._accelerator = Accelerator(cpu=True, **options, **self._given)
        plugin = {**options, **self._given}.get("fsdp_plugin")
        if plugin is not None:  # without a GPU Accelerate leaves it out in silence, and trains with DDP
            # In both states, as on a GPU: each new accelerator's state is made from the partial one.
            self._accelerator.state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self._accelerator.state.fsdp_plugin = plugin
        prepared = self._accelerator.prepare(model, make(model))
        return prepared[0], prepared[1]

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip as Accelerate does."""
        norm: Tensor = self._accelerator.clip_grad_norm_(model.parameters(), max_norm)
        return norm

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:  # noqa: ARG002 - both prepared
        """Save all that is prepared."""
        self._accelerator.save_state(folder)

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:  # noqa: ARG002 - as above
        """Load all that is prepared."""
        self._accelerator.load_state(folder)

    def close(self) -> None:
        """Forget the state that all accelerators of a process share."""
        self._accelerator.state._reset_state()


class Pipelining(Way):
    """A schedule of ``torch.distributed.pipelining``, of a model that is a ``Sequential``.

    Args:
        inputs: A function from a batch to the model's input.
        target: A function from a batch to the loss's target.
        loss: ``loss(output, target)``, as the schedule takes it.
        schedule: The name of torch's class.
        microbatches: Their number.
    """

    name, data = "pipelining", "whole"

    def __init__(
        self,
        *,
        inputs: Callable[[Any], Tensor],
        target: Callable[[Any], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        schedule: str = "Schedule1F1B",
        microbatches: int = 2,
    ) -> None:
        super().__init__(name=f"pipelining, {schedule}")
        self._inputs, self._target, self._loss = inputs, target, loss
        self._schedule_name, self._microbatches = schedule, microbatches

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Cut the model into one stage for each rank."""
        from torch.distributed import pipelining

        rank, ranks = dist.get_rank(), dist.get_world_size()
        blocks = list(model.children())
        begin, end = rank * len(blocks) // ranks, (rank + 1) * len(blocks) // ranks
        self._first = begin
        module = nn.Sequential(*blocks[begin:end])
        stage = pipelining.PipelineStage(module, rank, ranks, torch.device("cpu"))
        make = getattr(pipelining, self._schedule_name)
        self._schedule = make(stage, self._microbatches, loss_fn=self._loss)
        return module

    def plain_name(self, name: str) -> str | None:
        """Count blocks from the beginning of the model."""
        number, _, rest = name.partition(".")
        if not number:
            return None
        return f"{int(number) + self._first}{'.' if rest else ''}{rest}"

    def backward(self, model: nn.Module, step: Step, parts: Sequence[Any]) -> Tensor:  # noqa: ARG002 - contract
        """Run the schedule; the last rank has the loss."""
        (batch,) = parts
        losses: list[Tensor] = []
        is_last = dist.get_rank() == dist.get_world_size() - 1
        given = [self._inputs(batch)] if dist.get_rank() == 0 else []
        more = {"target": self._target(batch), "losses": losses} if is_last else {}
        self._schedule.step(*given, **more)
        return torch.stack(losses).mean().detach() if is_last else torch.tensor(float("nan"))

    def evaluate(self, model: nn.Module, step: Step, share: Any) -> None:  # noqa: ARG002 - contract
        """Evaluate nothing: the schedule trains."""
        return


class TpBackend(Way):
    """A backend of tp by its name, through the contract that a trainer uses.

    Args:
        backend: The name.
        loss: What a step's loss is over the samples of a batch.
        **options: The backend's options.
    """

    def __init__(self, backend: str, *, loss: Literal["mean", "sum"] = "mean", **options: Any) -> None:
        super().__init__(name=f"tp's {backend}")
        self._backend, self._loss, self._options = backend, loss, options
        self.reorders = backend == "context"

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Open a session and prepare the model."""
        from tp_core import LaunchEnvironment
        from tp_core.plugins import Job, registry

        known = {c.item.name: c.item for c in registry.backends()}
        if self._backend not in known:
            msg = f"no backend {self._backend!r} is installed; there are {', '.join(sorted(known))}"
            raise ConfigError(msg)
        job = Job(
            devices=(torch.device("cpu"),),
            environment=LaunchEnvironment.read(),
            explicit_devices=True,
            model=model,
            seed=0,
            loss=self._loss,
            options={self._backend: self._options},
        )
        self._session = known[self._backend].open(job)
        return self._session.prepare_model(model)

    def prepare(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Prepare the model, then the optimizer over it."""
        prepared = self.parallelize(model)
        plain = self._session.unwrap(prepared)
        self._parameters = dict(plain.named_parameters())
        return prepared, self._session.prepare_optimizer(make(plain))

    def share(self, batch: Any) -> Any:
        """Return the rows of this data rank."""
        return rows_of(batch, self._session.data_rank, self._session.data_size)

    def backward(self, model: nn.Module, step: Step, parts: Sequence[Any]) -> Tensor:
        """Run the step and its backward pass in the session."""
        from tp_core.data import Share

        (batch,) = parts
        output: Any = self._session.run(step, model, batch)
        loss, weight = loss_and_weight(output, batch)
        total = self._session.reduce(torch.tensor(weight, dtype=torch.float64), "sum")
        self._session.backward(loss, Share(int(weight), int(total)))
        return loss.detach()

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip as the session does."""
        return self._session.clip_grad_norm(model, max_norm)

    def evaluate(self, model: nn.Module, step: Step, share: Any) -> tuple[float, float]:
        """Run the step in the session, without gradients."""
        with torch.no_grad():
            output: Any = self._session.run(step, model, share)
        loss, weight = loss_and_weight(output, share)
        return float(loss), weight

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Join the ranks' slices, as the session describes them for a checkpoint."""
        if is_dtensor(tensor):
            return super().whole(name, tensor)
        parameter = self._parameters.get(name)
        placed: Any = tensor if parameter is None else self._session.as_slice(parameter, tensor.detach())
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            everyones, None if isinstance(placed, Tensor) else (placed.shape, placed.parts)
        )
        if all(one is None for one in everyones):
            return tensor
        joined = torch.zeros(next(one[0] for one in everyones if one is not None), dtype=tensor.dtype)
        for one in everyones:
            for start, part in one[1] if one is not None else ():
                joined[tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))] = part
        return joined

    def close(self) -> None:
        """Close the session."""
        self._session.close()
