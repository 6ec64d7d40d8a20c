"""Ready strategies: of torch, transformers, Accelerate, DeepSpeed, Megatron-core, and the backends of tp."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError, ModelError
from tp_core.messages import check_installed, those_known
from tp_core.modules import repeated_blocks
from tp_core.tensors import is_dtensor

from tp_verify._strategy import (
    MakeOptimizer,
    Step,
    Strategy,
    function_lines,
    loss_and_weight,
    plain_options,
    rows_of,
)

__all__ = [
    "DDP",
    "Accelerate",
    "DeepSpeed",
    "FullyShard",
    "InstalledBackend",
    "Megatron",
    "Pipelining",
    "TensorParallel",
    "Transformers",
]


def __getattr__(name: str) -> NoReturn:
    """Refuse a name that is not here, and say which ones are."""
    msg = f"module {__name__!r} has no attribute {name!r}"
    if not name.startswith("_"):
        msg += those_known(name, __all__)
    raise AttributeError(msg)


class DDP(Strategy):
    """``DistributedDataParallel``.

    Args:
        **options: Its options.
    """

    name = "ddp"
    data = "rows"

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


class FullyShard(Strategy):
    """``fully_shard`` of each repeated block and of the whole model (FSDP2).

    Args:
        **options: Options of ``fully_shard``: ``mesh``, ``reshard_after_forward``, ``mp_policy``.
    """

    name = "fully_shard"
    data = "rows"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard the blocks, then the rest."""
        from torch.distributed.fsdp import fully_shard

        with suppress(ModelError):  # a model without such blocks is sharded as one
            for block in repeated_blocks(model).values():
                fully_shard(block, **self._options)
        fully_shard(model, **self._options)
        return model

    def lines(self) -> list[str]:
        """Return the lines of a script."""
        options = plain_options(self._options)
        return [
            "from torch.distributed.fsdp import fully_shard",
            "for name, block in reversed(list(model.named_modules())):",
            '    if name.rpartition(".")[2].isdigit():',
            f"        fully_shard(block{options})",
            f"model = fully_shard(model{options})",
        ]

    def sync_gradients(self, model: nn.Module, *, last: bool) -> None:
        """Reduce gradients in the last backward pass alone."""
        model.set_requires_gradient_sync(last)  # type: ignore[operator]  # of what fully_shard returned


class TensorParallel(Strategy):
    """``parallelize_module`` with a plan; all ranks read the same batch.

    Args:
        plan: Styles by the names of modules, which may have wildcards.
    """

    name = "parallelize_module"
    data = "whole"

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
    norms = []
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient)
        if is_dtensor(norm):
            norm = norm.full_tensor()
        norms.append(norm)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    factor = min(1.0, max_norm / (float(total) + 1e-6))  # as torch does
    for gradient in gradients:
        gradient.mul_(factor)
    return total


class Transformers(Strategy):
    """A model of transformers that ``from_pretrained`` loads in parts, by the model's own plan.

    Args:
        options: Options of ``from_pretrained``, such as ``experts_implementation``.
        **config: The fields of transformers' ``DistributedConfig``: ``tp_size=2``, ``fsdp_size=2``,
            ``ep_size=2``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, **config: Any) -> None:
        sizes = ", ".join(f"{key}={value}" for key, value in config.items())
        data: Literal["rows", "whole"] = "whole"
        if config.get("fsdp_size", 1) > 1:
            data = "rows"
        super().__init__(data=data, name=f"transformers, {sizes}")
        self._options = dict(options or {})
        self._config = config

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Save the plain model, and load it in parts on all ranks.

        Raises:
            ConfigError: transformers is not installed.
        """
        check_installed("transformers", by="strategies.Transformers", extra="transformers")
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


class Accelerate(Strategy):
    """Hugging Face Accelerate: ``Accelerator(**options).prepare(model, optimizer)``.

    Args:
        options: A function that returns the options on each rank, such as an ``fsdp_plugin``.
        **more: The options themselves, where they can be sent to other processes.
    """

    name = "accelerate"
    data = "rows"

    def __init__(self, options: Callable[[], Mapping[str, Any]] | None = None, **more: Any) -> None:
        super().__init__()
        self._make_options = options
        self._options = more

    def prepare(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Prepare the model and its optimizer together.

        Raises:
            ConfigError: Accelerate is not installed.
        """
        check_installed("accelerate", by="strategies.Accelerate", extra="accelerate")
        from accelerate import Accelerator, PartialState
        from accelerate.utils import DistributedType

        options: dict[str, Any] = {}
        if self._make_options is not None:
            options |= self._make_options()
        options |= self._options
        if options.keys() & {"fsdp_plugin", "parallelism_config"}:
            # As on a GPU: on a CPU, Accelerate leaves the former out in silence, and refuses the latter.
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self._accelerator = Accelerator(cpu=True, **options)
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
        self._accelerator.state._reset_state(reset_partial_state=True)


class DeepSpeed(Strategy):
    """DeepSpeed's engine, with ZeRO. It computes in float32 or bfloat16: verify with that ``dtype``.

    Args:
        stage: The stage of ZeRO: 1, 2 or 3.
        **config: More of DeepSpeed's configuration. Without ``gradient_clipping=0.0`` it clips to a norm of 1
            where `verify` gets no ``max_norm``.
    """

    name = "deepspeed"
    data = "rows"

    def __init__(self, stage: int = 2, **config: Any) -> None:
        super().__init__(name=f"deepspeed, ZeRO {stage}")
        self._config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **config,
        }

    def prepare(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Make the engine.

        Raises:
            ConfigError: DeepSpeed is not installed.
        """
        check_installed("deepspeed", by="strategies.DeepSpeed", extra="deepspeed")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before the import
        import deepspeed

        # Without its own kernels: a compiler would build them, and the lock of a build that was ended
        # makes all later ones wait without end. Gloo communicates.
        deepspeed.ops.__compatible_ops__ = {}
        self._deepspeed = deepspeed.utils
        plain = make(model)
        self._engine, self._zero, *_ = deepspeed.initialize(model=model, optimizer=plain, config=self._config)
        self._parameters = dict(model.named_parameters())
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._is_updated = False
        states: Any = _ZeroStates(self._zero, list(self._parameters.values()))
        return self._engine, states

    def backward(self, model: nn.Module, step: Step, parts: Sequence[Any]) -> Tensor:  # noqa: ARG002 - contract
        """Run the engine's backward pass for each micro-batch.

        Collective: an all-reduce of the weights, and the engine's own.
        """
        weights = torch.zeros((), dtype=torch.float64)
        mean = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(parts):
            self._engine.set_gradient_accumulation_boundary(number == len(parts) - 1)
            loss, weight = loss_and_weight(step(self._engine, part), part)
            self._engine.backward(loss * weight, scale_wrt_gas=False)
            mean += loss.detach().double() * weight
            weights += weight
        mean /= weights.clamp(min=1e-30)
        dist.all_reduce(weights)
        self._scale_gradients(dist.get_world_size() / weights.item())
        return mean

    def _scale_gradients(self, factor: float) -> None:
        """Scale the gradients that ZeRO keeps, which are means over ranks; note them whole."""
        for parameter in self._parameters.values():
            gradient = self._deepspeed.safe_get_full_grad(parameter)
            if gradient is not None:
                self._gradients[parameter] = gradient * factor
                self._deepspeed.safe_set_full_grad(parameter, self._gradients[parameter])

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the whole gradient, as ZeRO had it after the backward pass."""
        return self._gradients.get(parameter)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:  # noqa: ARG002 - the engine has it
        """Make the engine's optimizer step, which clips; return the norm before."""
        self._zero.clip_grad = max_norm
        self._engine.step()
        self._is_updated = True
        norm = torch.as_tensor(self._engine.get_global_grad_norm())
        for gradient in self._gradients.values():
            gradient.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def update(self, model: nn.Module, optimizer: Optimizer) -> None:  # noqa: ARG002 - the engine has both
        """Make the engine's optimizer step, unless :meth:`clip` has."""
        if not self._is_updated:
            self._engine.step()
        self._is_updated = False
        self._gradients.clear()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a weight, of which ZeRO 3 keeps slices elsewhere."""
        if tensor.numel():
            return tensor
        whole: Tensor = self._deepspeed.safe_get_full_fp32_param(self._parameters[name])
        return whole

    def save(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:  # noqa: ARG002 - as above
        """Save the engine's checkpoint."""
        self._engine.save_checkpoint(folder)

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:  # noqa: ARG002 - as above
        """Load the engine's checkpoint."""
        self._engine.load_checkpoint(folder)

    def close(self) -> None:
        """Release the engine."""
        self._engine.destroy()


class _ZeroStates:
    """The states of an optimizer that ZeRO has wrapped, by the model's parameters."""

    def __init__(self, zero: Any, parameters: list[nn.Parameter]) -> None:
        self._zero = zero
        self.param_groups = [{"params": parameters}]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return whole states; those without dimensions are the same for all.

        Collective: an all-reduce for each.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        # ZeRO keeps one flat state for all parameters of a group; its keys are those of each.
        flat: dict[str, Tensor] = next(iter(self._zero.optimizer.state.values()), {})
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for parameter in self.param_groups[0]["params"]:
            states[parameter] = {}
            for key, value in flat.items():
                if value.dim():
                    value = safe_get_full_optimizer_state(parameter, key)  # noqa: PLW2901 - of the parameter
                states[parameter][key] = value
        return states


class Megatron(Strategy):
    """Layers of megatron-core in place of a plain model's; all ranks read the same batch.

    Args:
        plan: "column", "row" or "vocab" by the names of modules, which may have wildcards.
    """

    name = "megatron-core"
    data = "whole"

    def __init__(self, plan: Mapping[str, Literal["column", "row", "vocab"]]) -> None:
        super().__init__()
        self._plan = plan

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Replace the layers that the plan names, and keep their values.

        Raises:
            ConfigError: megatron-core is not installed.
        """
        check_installed("megatron", by="strategies.Megatron", extra="megatron-core")
        from megatron.core import tensor_parallel

        for name, module in list(model.named_modules()):
            kind = next((k for pattern, k in self._plan.items() if fnmatch(name, pattern)), None)
            if kind is not None:
                model.set_submodule(name, _megatron_layer(tensor_parallel, kind, module))
        return model

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm over split and whole gradients.

        Collective: an all-reduce.
        """
        parameters = [p for p in model.parameters() if p.grad is not None]
        squares = torch.zeros(2, dtype=torch.float64)  # of whole gradients, and of this rank's slices
        for parameter in parameters:
            norm: Tensor = torch.linalg.vector_norm(parameter.grad)
            squares[int(getattr(parameter, "tensor_model_parallel", False))] += norm.square()
        dist.all_reduce(squares[1:])
        norm = squares.sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def _megatron_layer(layers: Any, kind: str, module: Any) -> nn.Module:
    """Return megatron-core's layer with this rank's part of the plain layer's values."""
    from megatron.core import ModelParallelConfig

    ranks = dist.get_world_size()
    weight = module.weight
    config = ModelParallelConfig(
        tensor_model_parallel_size=ranks, use_cpu_initialization=True, params_dtype=weight.dtype
    )
    # Megatron's own initial values are of float32, so the plain layer's are copied below.
    shared = {"config": config, "init_method": lambda weight: weight, "tp_group": dist.group.WORLD}
    if kind == "vocab":
        layer = layers.VocabParallelEmbedding(module.num_embeddings, module.embedding_dim, **shared)
    else:
        shared |= {"bias": module.bias is not None, "skip_bias_add": False}
        sizes = module.in_features, module.out_features
        if kind == "row":
            layer = layers.RowParallelLinear(*sizes, input_is_parallel=True, **shared)
        else:
            # An output that is joined would be joined on a GPU.
            layer = layers.ColumnParallelLinear(*sizes, gather_output=False, **shared)
        layer.register_forward_hook(lambda _layer, _args, output: output[0])  # without the bias
    for name, parameter in layer.named_parameters():
        whole = getattr(module, name).detach()
        if getattr(parameter, "tensor_model_parallel", False):
            whole = whole.chunk(ranks, parameter.partition_dim)[dist.get_rank()]
        parameter.data.copy_(whole)
    return layer  # type: ignore[no-any-return]  # a module of a package that may be missing


class Pipelining(Strategy):
    """A schedule of ``torch.distributed.pipelining``, of a model that is a ``Sequential``.

    Args:
        inputs: A function from a batch to the model's input.
        target: A function from a batch to the loss's target.
        loss: ``loss(output, target)``, as the schedule takes it.
        schedule: The name of torch's class.
        microbatches: Their number.
    """

    name = "pipelining"
    data = "whole"

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
        self._inputs = inputs
        self._target = target
        self._loss = loss
        self._schedule_name = schedule
        self._microbatches = microbatches

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Cut the model into one stage for each rank."""
        from torch.distributed import pipelining

        rank = dist.get_rank()
        ranks = dist.get_world_size()
        blocks = list(model.children())
        begin = rank * len(blocks) // ranks
        end = (rank + 1) * len(blocks) // ranks
        self._first = begin
        module = nn.Sequential(*blocks[begin:end])
        stage = pipelining.PipelineStage(module, rank, ranks, torch.device("cpu"))
        make = getattr(pipelining, self._schedule_name)
        self._schedule = make(stage, self._microbatches, loss_fn=self._loss)
        self._shape: torch.Size | None = None
        return module

    def plain_name(self, name: str) -> str | None:
        """Count blocks from the beginning of the model."""
        number, _, rest = name.partition(".")
        if not number:
            return None
        return f"{int(number) + self._first}.{rest}".rstrip(".")

    def lines(self) -> list[str]:
        """Return the lines of a script, with the schedule's own passes."""
        inputs, target, loss = (f.__name__ for f in (self._inputs, self._target, self._loss))
        return [
            *function_lines(self._inputs, self._target, self._loss),
            "from torch.distributed import pipelining",
            "blocks, losses = list(model.children()), []",
            "begin, end = rank * len(blocks) // ranks, (rank + 1) * len(blocks) // ranks",
            "own = torch.nn.Sequential(*blocks[begin:end])",
            'stage = pipelining.PipelineStage(own, rank, ranks, torch.device("cpu"))',
            f"schedule = pipelining.{self._schedule_name}(stage, {self._microbatches}, loss_fn={loss})",
            f"args = [{inputs}(batch)] if rank == 0 else []",
            f"kwargs = {{'target': {target}(batch), 'losses': losses}} if rank == ranks - 1 else {{}}",
            "schedule.step(*args, **kwargs)",
            "loss = torch.stack(losses).mean() if losses else torch.zeros(0)",
        ]

    def backward(self, model: nn.Module, step: Step, parts: Sequence[Any]) -> Tensor:  # noqa: ARG002 - contract
        """Run the schedule; the last rank has the loss.

        Raises:
            ConfigError: The input has another shape than in the first step.
        """
        (batch,) = parts
        shape = self._inputs(batch).shape
        if self._shape not in (None, shape):  # gloo would end the processes
            msg = f"torch's schedules keep the shape of their first input, {tuple(self._shape)}"
            raise ConfigError(msg)
        self._shape = shape
        # As torch's schedules want it: the first rank gives the input, the last one the target.
        is_last = dist.get_rank() == dist.get_world_size() - 1
        losses: list[Tensor] = []
        args: list[Tensor] = []
        kwargs: dict[str, Any] = {}
        if dist.get_rank() == 0:
            args = [self._inputs(batch)]
        if is_last:
            kwargs = {"target": self._target(batch), "losses": losses}
        self._schedule.step(*args, **kwargs)
        if not is_last:
            return torch.tensor(float("nan"))
        return torch.stack(losses).mean().detach()

    def evaluate(self, model: nn.Module, step: Step, share: Any) -> None:  # noqa: ARG002 - contract
        """Evaluate nothing: the schedule trains."""
        return


class InstalledBackend(Strategy):
    """A backend of tp by its name, through the contract that a trainer uses.

    Args:
        backend: The name.
        loss: What a step's loss is over the samples of a batch.
        **options: The backend's options.
    """

    def __init__(self, backend: str, *, loss: Literal["mean", "sum"] = "mean", **options: Any) -> None:
        super().__init__(name=f"tp's {backend}")
        self._backend = backend
        self._loss = loss
        self._options = options
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
        placed: Any = tensor
        if parameter is not None:
            placed = self._session.as_slice(parameter, tensor.detach())
        local = None  # where this rank has the whole
        if not isinstance(placed, Tensor):
            local = (placed.shape, placed.parts)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, local)
        slices = [one for one in gathered if one is not None]
        if not slices:
            return tensor
        shape, _ = slices[0]
        joined = torch.zeros(shape, dtype=tensor.dtype)
        for _, parts in slices:
            for start, part in parts:
                ends = [first + size for first, size in zip(start, part.shape, strict=True)]
                joined[tuple(map(slice, start, ends))] = part
        return joined

    def close(self) -> None:
        """Close the session."""
        self._session.close()
