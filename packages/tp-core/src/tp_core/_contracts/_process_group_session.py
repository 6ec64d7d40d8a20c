"""The session of a process in torch's default process group: the base of all backends over groups."""

import hashlib
import linecache
import logging
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tp_core._contracts._job import Job
from tp_core._contracts._session import FORWARD, ReduceOp, Session, check_reduce_op
from tp_core._launch._process_group import new_process_group
from tp_core.data._batches import Share
from tp_core.data._step_outputs import StepOutput, zero_backward
from tp_core.errors import ConfigError, DisagreementError, ModelError, StepError
from tp_core.random import device_rng_state, seed_of, seed_torch, set_device_rng_state
from tp_core.state._optimizers import hook_steps, is_inner_step
from tp_core.tensors._slices import check_no_max_norm, is_sharded, quantized_parts

# -- A DistributedDataParallel with a whole step as its forward, and checks that gradients are averaged


R = TypeVar("R")

_MOST_NAMES = 3  # in a message
_NOT_REDUCED = "Expected to have finished reduction in the prior iteration"  # of torch's reducer.cpp


class SteppingDataParallel(DistributedDataParallel):
    """A DistributedDataParallel for steps that call any method of the module, and not only its forward.

    DDP prepares for a backward pass in its own forward. So the step runs there, with the inner module:
    ``module.encode(x)`` works as well as ``module(x)``.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.training = module.training  # torch's wrapper starts in training mode, whatever the module's is
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self._trained = [(n, p, p.dtype) for n, p in module.named_parameters() if p.requires_grad]
        # Whether the next backward pass averages: one does for each forward pass; `None` before any.
        # A list, since nn.Module sets attributes slowly, and this is set in each step.
        self._is_ready: list[bool | None] = [None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, or the step, and prepare to average the gradients of one backward pass.

        Collective: DDP's broadcast of buffers in forward, its bucketed all-reduces in backward.
        """
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as error:
            if not str(error).startswith(_NOT_REDUCED):
                raise
            # With several passes in one step, check_reduced at the step's end comes too late.
            raise StepError(self._unused(str(error))) from error
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_ready[0] = True
        return output

    def seen_gradients(self) -> list[tuple[int, int]] | None:
        """Return gradients' ids and versions if a backward pass now would average nothing, else ``None``."""
        if self._is_ready[0] is not False or not self.require_backward_grad_sync:
            return None
        return [(id(g), g._version) for _, p, _ in self._trained if (g := p.grad) is not None]

    def note_backward(self) -> None:
        """Record the end of a backward pass: if it averaged, the next one averages nothing."""
        if not self._is_ready[0]:
            return
        # Private to torch: no public call shows whether every bucket was reduced. This one raises if not.
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError:  # its gradients are still to come
            return
        self._is_ready[0] = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that is no method, for example ``config``.

        The same script then works with one process, where the model has no wrapper.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                raise
        value = getattr(module, name)
        if callable(value):
            msg = (
                f"{name!r} of the model is not called from outside of a step where there are several ranks, "
                "since its gradients would not be averaged; call it in a step for trainer.run(), or, for "
                f"what needs no gradients, trainer.session.unwrap(model).{name}"
            )
            raise AttributeError(msg)
        return value

    def run(self, body: Callable[..., R], *arguments: Any) -> R:
        """Return ``body(module, *arguments)``, run within this wrapper's forward.

        A compiled wrapper passes itself instead of the module: what was compiled is its call.

        Collective: those of :meth:`forward`.
        """
        if self._compiled_call_impl is not None:
            return body(self, *arguments)
        # Private to torch: the only call between DDP's work before and after a forward. It is set on the
        # object for this forward only, past nn.Module's slow __setattr__: a method of this class would run
        # in the wrapper's plain calls, too.
        own = self.__dict__

        def run_body(*_: Any, **__: Any) -> R:
            del own["_run_ddp_forward"]  # the body may call the wrapper
            return body(self.module, *arguments)

        own["_run_ddp_forward"] = run_body
        try:
            output: R = self(None)  # with device_ids, DDP wants an argument to move
            return output
        finally:
            own.pop("_run_ddp_forward", None)

    def check_reduced(self) -> None:
        """Check that the last backward pass, if there was one, has averaged every gradient.

        DDP averages a bucket once all its gradients are there. If one never comes, the others of its bucket
        stay different on each rank. torch reports that only in the next forward: after an optimizer step,
        or never after the last step. Parameters that were frozen when DDP was made it ignores for good.
        """
        for name, parameter, dtype in self._trained:
            if parameter.dtype is not dtype:
                msg = (
                    f"{name!r} of the model was {dtype} when it was prepared for several ranks, and is "
                    f"{parameter.dtype} now: its gradients are not averaged; convert the model before that"
                )
                raise StepError(msg)
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            msg = (
                f"{_listed(thawed)} of the model were frozen when it was prepared for several ranks, and are "
                "trained now: their gradients are not averaged; prepare the model with all that is trained "
                "at any time, and keep the rest back as tp_trainer.callbacks.GradualUnfreezing does"
            )
            raise StepError(msg)
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise StepError(self._unused(str(error))) from error

    def _unused(self, message: str) -> str:
        """Return the message for parameters without gradients, from their numbers in torch's message."""
        trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
        found = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        rank, unused = "this rank", "some"
        if found is not None:
            rank = f"rank {found[1]}"
            unused = _listed([trained[int(i)] for i in found[2].split()])
        return (
            f"the loss on {rank} came without {unused} of the model's {len(trained)} parameters, and the "
            "ranks wait for the gradients of all of them; use each in every step, freeze what is never "
            "trained, or give the backend's option find_unused_parameters=True"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more


log = logging.getLogger("tp_core")

_MOST_SHAPES = 3  # in a message

_TWICE = (
    "a second backward pass came to a parameter within one step of several ranks, which average each "
    "gradient once; add the losses and go back once, trainer.backward(first + second), or run the step for "
    "each of them"
)


class ReductionWatch:
    """A check before each optimizer step of this process that gradients have been averaged.

    Args:
        check: A function that raises for an optimizer that the session cannot step; called when it first
            steps with its parameters.
        ranks: The number of ranks that average gradients; with one there is nothing to average.
    """

    def __init__(self, check: Callable[[Optimizer], None], *, ranks: int) -> None:
        self._check, self._ranks = check, ranks
        self._models: list[ref[SteppingDataParallel]] = []
        # The ids of parameters with averaged gradients, while their modules live: later objects may have
        # the same ids. Weak references to parameters would keep torch from converting them in place.
        self._known: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        self._prepared: WeakSet[Optimizer] = WeakSet()
        # The parameter lists of each optimizer that passed the check, by the optimizer's id.
        self._fine: dict[int, tuple[ref[Optimizer], list[tuple[int, int]]]] = {}
        self._handle: RemovableHandle | None = None

    def watch(self, model: SteppingDataParallel) -> None:
        """Check the gradients of ``model`` before steps, too: `SteppingDataParallel.check_reduced`."""
        self._models = [*(known for known in self._models if known() is not None), ref(model)]
        self.know(model)

    def know(self, model: nn.Module) -> None:
        """Record that the gradients of the present parameters of ``model`` are averaged."""
        plain = model.module if isinstance(model, SteppingDataParallel) else model
        self._known.setdefault(plain, set()).update(map(id, model.parameters()))
        self.listen()

    def listen(self) -> None:
        """Check optimizers before they step, from now on; torch's hook is global to the process."""
        _open.add(self)
        if self._handle is not None:
            return
        reference = ref(self)  # torch's hook must not keep the session alive, which may never be closed

        def before_step(optimizer: Optimizer, *_: object) -> None:
            watch = reference()
            if watch is not None:
                watch._before_step(optimizer)

        self._handle = register_optimizer_step_pre_hook(before_step)
        finalize(self, self._handle.remove)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._prepared.add(optimizer)

    def close(self) -> None:
        _open.discard(self)
        if self._handle is not None:
            self._handle.remove()

    def run_backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass, and check that it averages all gradients that it adds.

        Collective: DDP's all-reduces in ``run``; none of its own.
        """
        # Loops and no generators: this runs in every step.
        done: list[tuple[SteppingDataParallel, list[tuple[int, int]]]] = []
        for reference in self._models:
            model = reference()
            before = None if model is None else model.seen_gradients()
            if model is not None and before is not None:
                done.append((model, before))
        try:
            run()
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):  # torch has no class for it
                raise
            raise StepError(_TWICE) from error
        for model, before in done:
            # torch reports nothing where all buckets were averaged, and each rank adds its own gradients.
            if model.seen_gradients() != before:
                raise StepError(_TWICE)
        for reference in self._models:
            model = reference()
            if model is not None:
                model.note_backward()

    def _before_step(self, optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        for reference in self._models:
            model = reference()
            if model is not None:
                model.check_reduced()
        lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        known, fine = self._fine.get(id(optimizer), (None, None))
        is_fine = known is not None and known() is optimizer and fine == lists
        if is_fine or is_inner_step(optimizer):  # the parameters may be others there
            return
        self._check(optimizer)
        if self._ranks == 1 or self._check_known(optimizer):
            self._fine[id(optimizer)] = ref(optimizer), lists

    def _check_known(self, optimizer: Optimizer) -> bool:
        """Check that an optimizer which steps parameters of prepared models steps no others.

        Returns:
            Whether that holds as long as its parameters are the same: others may get gradients later.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p for p in parameters if not any(watch._knows(p) for watch in _open)]
        if not others:
            return True
        if len(others) == len(parameters) and not any(optimizer in watch._prepared for watch in _open):
            if self is not min(_open, key=id):
                return True  # one watch warns for all
            log.warning(
                "on several ranks an optimizer, %s, was not prepared, and steps parameters of no prepared "
                "model: their gradients are this rank's own; trainer.prepare(model, optimizer) if ranks "
                "train them together",
                type(optimizer).__name__,
            )
            return True
        shapes: list[tuple[int, ...]] = [tuple(p.shape) for p in others if _has_gradient(p)]
        if shapes:
            listed = ", ".join(map(str, shapes[:_MOST_SHAPES])) + ", ..." * (len(shapes) > _MOST_SHAPES)
            msg = (
                f"the optimizer has {len(shapes)} parameter(s) that no prepared model has (shape {listed}), "
                "so on several ranks their gradients are not averaged; make what they belong to a submodule "
                "of the model before trainer.prepare(model, ...)"
            )
            raise StepError(msg)
        return False

    def _knows(self, parameter: Tensor) -> bool:
        return any(id(parameter) in known for known in self._known.values())


_open: WeakSet[ReductionWatch] = WeakSet()
"""All active watches: a program may have several sessions, and each knows its own models only."""


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None


# -- The session of a process in torch's default process group: the base of all backends over groups


T = TypeVar("T")


class ProcessGroupSession(Session):
    """One rank of a job with processes in torch's default process group.

    Ranks that read different samples form a data group, all ranks by default. Over it
    DistributedDataParallel averages gradients, and values are reduced. A backend that splits models over
    ranks passes its own data group. With `Job.ranks_per_sample` consecutive ranks of it share samples.
    Gradients are still averaged over all of them, and values are reduced over those with other samples::

        data ranks       0     0     1     1        8 ranks: 2 of data x 2 that share samples x 2 of tensors
        sample ranks     0     1     0     1        the outermost axis first, whichever of them there are
        ranks           0 1   2 3   4 5   6 7

    Args:
        job: The job.
        data_group: The ranks that read different samples; ``None`` for all.
        data_rank: The rank of this process among them; by default its rank in ``data_group``.
        data_size: The number of these ranks; by default the size of ``data_group``.
        leave: The function that leaves the process group, as `join_process_group` returned it, called when
            the session is closed; ``None`` if other code leaves it.

    Attributes:
        sample_group: The ranks that share this rank's samples; ``None`` for all ranks, or if it is one.
        sample_rank: The rank of this process among them.
        sample_size: The number of these ranks.

    Raises:
        ConfigError: The ranks of the data group are no multiple of those that share samples.

    Collectives: where ranks share samples, an all-gather of the groups, and the creation of theirs.
    """

    def __init__(
        self,
        job: Job,
        *,
        data_group: ProcessGroup | None = None,
        data_rank: int | None = None,
        data_size: int | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(job)
        # Read once: the training loop needs them in every step, and torch's functions cost more.
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        rank = dist.get_rank(data_group) if data_rank is None else data_rank
        size = dist.get_world_size(data_group) if data_size is None else data_size
        self._gradient_group, self._gradient_size = data_group, size
        shared = size if job.ranks_per_sample == -1 else job.ranks_per_sample
        if size % shared:
            if leave is not None:
                leave()
            msg = (
                f"each sample is to be shared by {shared} ranks, and {size} ranks, which hold the same "
                "weights, are not a multiple of it"
            )
            raise ConfigError(msg)
        self._data_group, self._data_rank, self._data_size = data_group, rank // shared, size // shared
        self.sample_group: ProcessGroup | None = None
        self.sample_rank, self.sample_size = rank % shared, shared
        if shared > 1:
            self._data_group, self.sample_group = self._divide(shared)
        self._leave = leave
        self._reductions = ReductionWatch(self.check_optimizer, ranks=self._gradient_size)

    def _divide(self, shared: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Return the group of ranks with other samples, and the group of those with the same."""
        found: list[ProcessGroup | None] = [None, None]
        own = dist.get_process_group_ranks(self._gradient_group or dist.group.WORLD)
        for ranks in sorted(set(map(tuple, self.gather_objects(own)))):  # every rank makes all, in one order
            others = [ranks[i::shared] for i in range(shared)]
            same = [ranks[i : i + shared] for i in range(0, len(ranks), shared)]
            for i, parts in enumerate((others, same)):
                for part in parts:
                    if 1 < len(part) < self._world_size:
                        found[i] = new_process_group(part) or found[i]
        return found[0], found[1]

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of processes that run the job."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """The rank of this process among those of its host, from 0."""
        return self.job.environment.local_rank

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the data, from 0."""
        return self._data_rank

    @property
    def data_size(self) -> int:
        """The number of shares that the data is split into."""
        return self._data_size

    # -- preparing ----------------------------------------------------------------------------

    def check_same_parameters(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Check that all ranks have the same model.

        Buffers are compared where no parameter is split. All ranks then get the first rank's buffers, and
        torch ends the process where shapes differ.

        Args:
            model: The plain module.
            shapes: The whole shapes of split parameters, by name.

        Raises:
            DisagreementError: On every rank, if parameters or buffers differ in name, shape or type.

        Collective: one all-gather of the parameters' descriptions.
        """
        whole = shapes or {}
        mine = [
            f"{name}: {whole.get(name, tuple(p.shape))} {p.dtype}{'' if p.requires_grad else ' frozen'}"
            for name, p in model.named_parameters()
        ]
        # Private to torch: DDP ignores the tensors that this attribute names, so they may differ.
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        buffers = [
            f"{name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers() if name not in ignored
        ]
        everyones = self.gather_objects((mine, [] if whole else buffers))
        for i, what in enumerate(("parameters", "buffers")):
            first = everyones[0][i]
            for rank, each in enumerate(everyones):
                theirs = each[i]
                if theirs == first:
                    continue
                here = [line for line in first if line not in theirs][:1] or ["nothing of it"]
                there = [line for line in theirs if line not in first][:1] or ["nothing of it"]
                msg = (
                    f"ranks disagree on the model's {what}: rank 0 has {here[0]}, rank {rank} has "
                    f"{there[0]} ({len(first)} and {len(theirs)} {what}); build the same model on every rank"
                )
                raise DisagreementError(msg)

    def average_gradients(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the model in a wrapper that averages its gradients over the ranks that train it together.

        A model without trained parameters is returned as it is, and so is one of a data group of one, or of a
        job with ``averages_gradients=False``.

        Args:
            model: The plain module, on its device.
            **options: The options of DistributedDataParallel.

        Raises:
            ModelError: An embedding writes its weight in the forward pass (``max_norm``); or ranks have
                weights of bitsandbytes with other scales.

        Collective: a broadcast of the weights of the group's first rank. Later, forward broadcasts buffers
        and backward all-reduces gradients in buckets, as DDP does.
        """
        if self._gradient_size == 1 or not self.job.averages_gradients:
            return model
        if not any(p.requires_grad for p in model.parameters()):
            self._reductions.listen()
            return model  # torch refuses to wrap a model without gradients
        check_no_max_norm(model, "each rank")
        self._share_quantized(model)
        self._check_scales(model)
        averaging = SteppingDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            process_group=self._gradient_group,
            **options,
        )
        self._reductions.watch(averaging)
        return averaging

    def _share_quantized(self, model: nn.Module) -> None:
        """Share the first rank's quantized weights with those that train them, which torch's wrapper cannot.

        Collective: a broadcast of each of the tensors of which they consist.
        """
        weights = {n: parts for n, p in model.named_parameters() if (parts := quantized_parts(p)) is not None}
        for part in (part for parts in weights.values() for part in parts):
            whole = part.contiguous()
            dist.broadcast(whole, group_src=0, group=self._gradient_group)
            if whole is not part:
                part.copy_(whole)
        if weights:
            # Private to torch: it has no public way to name what its wrapper ignores.
            ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *weights]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    def _check_scales(self, model: nn.Module) -> None:
        """Check that ranks have the same scales of quantized weights that are attributes of parameters.

        Collective: one all-gather of digests, where there are weights of bitsandbytes.
        """
        parameters = dict(model.named_parameters())
        if not any(type(p).__module__.startswith("bitsandbytes.") for p in parameters.values()):
            return
        held = parameters.keys() | dict(model.named_buffers()).keys()
        digests = {
            name: hashlib.sha256(bytes(value.cpu().reshape(-1).view(torch.uint8).numpy())).digest()
            for name, value in model.state_dict().items()
            if name not in held and isinstance(value, Tensor)
        }
        for other in self.gather_objects(digests):
            if other != digests:
                name = min(n for n in digests.keys() | other.keys() if digests.get(n) != other.get(n))
                msg = (
                    f"ranks have quantized the model's base from other weights: {name!r} differs, and nobody "
                    "shares these scales of bitsandbytes; load the same base on every rank, from files or "
                    "after the same torch.manual_seed"
                )
                raise ModelError(msg)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer, which from now on must step averaged gradients only.

        Random numbers of its steps are the same on all ranks, as of stochastic rounding.
        """
        self._reductions.add_optimizer(optimizer)
        # torch's own draw nothing, and need no hooks.
        is_own = all(kind.__module__.startswith("torch.") for kind in type(optimizer).__mro__[:-1])
        if self._world_size > 1 and not is_own and optimizer not in _drawing_alike:
            _drawing_alike.add(optimizer)
            _CommonDraws(optimizer, self.job.seed, self.device, self.gather_objects)
        return optimizer

    # -- the step -----------------------------------------------------------------------------

    def run(self, step: Callable[[nn.Module, Any], StepOutput], model: nn.Module, batch: Any) -> StepOutput:
        """Run the step on this rank's share of the batch.

        The step gets the user's own module, with all methods and attributes, and runs within the forward of
        the wrapper. Without gradients the wrapper is left out: DDP's forward broadcasts buffers, and ranks
        that evaluate different numbers of batches would wait for each other without an end.

        Collective: in forward DDP's broadcast of buffers, with gradients only; in backward its all-reduces.
        """
        if not torch.is_grad_enabled():
            return step(self.unwrap(model), batch)
        if isinstance(model, SteppingDataParallel):
            return model.run(step, batch)
        return step(model, batch)

    def run_several(
        self, step: Callable[..., StepOutput], models: Sequence[nn.Module], batch: Any
    ) -> StepOutput:
        """Run ``step(*models, batch)`` with the user's own modules, each within its own wrapper's forward.

        Collective: those of :meth:`run`, for each model.
        """

        def enter(entered: list[nn.Module]) -> StepOutput:
            if len(entered) == len(models):
                return step(*entered, batch)
            model = models[len(entered)]
            if not torch.is_grad_enabled():
                return enter([*entered, self.unwrap(model)])
            if isinstance(model, SteppingDataParallel):
                return model.run(lambda module: enter([*entered, module]))
            return enter([*entered, model])

        return enter([])

    def backward(
        self,
        loss: Tensor,
        share: Share | None = None,
        *,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of the loss over the whole global batch.

        DDP averages over the ranks, and each rank's mean loss counts by its samples. The loss of a stand-in
        counts nothing, even if it is NaN.

        Raises:
            StepError: A second backward pass of one step reached a parameter.

        Collective: DDP's bucketed all-reduces, unless inside :meth:`no_sync`.
        """
        retain_graph = retain_graph or create_graph
        if self.job.loss == "sum":
            factor = float(self._data_size) if share is None or share.samples else 0.0
        else:
            factor = 1.0 if share is None else share.samples * self._data_size / share.total

        def run() -> None:
            if factor:
                (loss if factor == 1.0 else loss * factor).backward(None, retain_graph, create_graph)
            else:
                zero_backward(loss, lambda of: (of * 0.0).backward(None, retain_graph, create_graph))

        self._reductions.run_backward(run)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return DDP's own context, in which gradients stay on the ranks."""
        if isinstance(model, DistributedDataParallel):
            context: AbstractContextManager[None] = model.no_sync()
            return context
        return super().no_sync(model)

    # -- between ranks ------------------------------------------------------------------------

    def reduce(self, value: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return ``value`` reduced over the data group, on all ranks; the argument is kept.

        Raises:
            ConfigError: ``op`` is none of the four.

        Collective: one all-reduce; no gradients.
        """
        check_reduce_op(op)
        result = value.detach().to(self.device, copy=True)
        if self._data_size > 1:
            kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
            # On a copy on the device: NCCL reduces no CPU tensors.
            dist.all_reduce(result, kinds.get(op, dist.ReduceOp.SUM), group=self._data_group)
        if op == "mean":
            # A sum, then a division: gloo has no average.
            result = result / self._data_size
        return result.to(value.device)

    def gather(self, value: Tensor) -> Tensor:
        """Return the data group's tensors concatenated along dim 0; their lengths may differ.

        Collective: an all-gather of the lengths, an all-gather of the padded tensors; no gradients.
        """
        mine = value.detach().to(self.device)
        mine = mine.reshape(1) if mine.dim() == 0 else mine.contiguous()
        if self._data_size == 1:
            return mine.to(value.device)
        # The lengths first: all_gather takes tensors of one shape, so each is padded to the longest.
        length = torch.tensor([mine.size(0)], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self._data_size)]
        dist.all_gather(lengths, length, group=self._data_group)
        sizes = [int(n) for n in lengths]
        padded = mine.new_zeros((max(sizes), *mine.shape[1:]))
        padded[: mine.size(0)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._data_group)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]).to(value.device)

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's object, in the order of the ranks.

        Collective: one all-gather of pickled objects.
        """
        return gather_objects(value, self._world_size)

    def broadcast(self, value: T, *, src: int = 0) -> T:
        """Return the object of rank ``src``, on all ranks.

        Collective: one broadcast of a pickled object.
        """
        return broadcast_object(value, src=src)

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Collective: one barrier over all ranks.
        """
        # NCCL's barrier is an all-reduce on a device: named here, or torch would choose one by itself.
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    # -- state --------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module of a prepared model."""
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def sync_buffers(self, model: nn.Module) -> None:
        """Give the data group its first rank's buffers, for example batch norm's running statistics.

        Collective: one broadcast for each buffer.
        """
        if self._gradient_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer.data, group_src=0, group=self._gradient_group)

    def close(self) -> None:
        """Leave the process group, if this session has joined it."""
        self._reductions.close()  # first: its hook on all optimizers must not outlive the group
        if not self.closed and self._leave is not None:
            self._leave()
        super().close()


# -- Random numbers of an optimizer ---------------------------------------------------------------


_drawing_alike: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class _CommonDraws:
    """Draws the random numbers of an optimizer's steps, the same on all ranks.

    Ranks draw other dropouts, and so have generators in other states. What they hold in common would drift
    apart by what an optimizer draws. The first step shows whether it draws at all.

    Collective: where some of its parameters are split, and not all, one all-gather after the first step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        seed: int,
        device: torch.device,
        gather: Callable[[list[bytes]], list[list[bytes]]],
    ) -> None:
        self._seed, self._device, self._gather = seed, device, gather
        self._draws: bool | None = None
        self._kept: list[Tensor] | None = None
        self._begun: list[Tensor] = []
        self._steps = 0
        hook_steps(optimizer, before=self._before, after=self._after)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Not with a closure: it draws the dropout of a forward pass.
        if self._draws is False or any(callable(value) for value in (*args, *kwargs.values())):
            return
        self._kept = self._states()
        # By the step of the state, if it has one: a resumed run then draws what one without a break does.
        known = (s["step"] for s in optimizer.state.values() if isinstance(s, dict) and "step" in s)
        seed_torch(seed_of((self._seed, int(next(known, self._steps)))))
        self._begun = self._states()

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._kept is None:
            return
        states = self._states()
        drew = any(not a.equal(b) for a, b in zip(self._begun, states, strict=True))
        self._draws = self._draws or drew
        self._steps += 1
        kept, self._kept = self._kept, None
        torch.set_rng_state(kept[0])
        if len(kept) > 1:
            set_device_rng_state(self._device, kept[1])
        split = {is_sharded(p) for group in optimizer.param_groups for p in group["params"]}
        if self._steps == 1 and len(split) == 2:
            found = self._gather([bytes(state.numpy()) for state in states])
            if any(one != found[0] for one in found):
                msg = (
                    f"{type(optimizer).__name__} draws random numbers, and here another number of them on "
                    "each rank, which has larger or smaller parts of split parameters: those that all ranks "
                    "hold would drift apart. Split parameters into equal parts, or take an optimizer that "
                    "draws none"
                )
                raise ConfigError(msg)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device.type == "cpu" else [*states, device_rng_state(self._device)]


# -- Exchange of objects --------------------------------------------------------------------------
# Each object travels with the place in the code that sends it. A rank that calls `evaluate` where another
# one calls `fit` would otherwise get the other's object, and fail or continue with wrong values.


def gather_objects(value: T, size: int) -> list[T]:
    """Return every rank's object, in the order of the ranks.

    Raises:
        DisagreementError: On every rank, if one is at another place of these packages.

    Collective: one all-gather of pickled objects; a second one where the places differ.
    """
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (_place(), value))
    if any(_differ(found[0][0], place) for place, _ in found):
        lines: list[Any] = [None] * size
        dist.all_gather_object(lines, _users_line())
        raise DisagreementError(_message([place for place, _ in found], lines))
    return [theirs for _, theirs in found]


def broadcast_object(value: T, *, src: int) -> T:
    """Return the object of rank ``src``, on all ranks.

    Raises:
        DisagreementError: On each rank that is at another place of these packages than ``src``.

    Collective: one broadcast of a pickled object.
    """
    place, line = _place(), _users_line()
    sent: list[Any] = [(place, line, value)]
    dist.broadcast_object_list(sent, src=src)
    other_place, other_line, theirs = cast("tuple[str | None, str, T]", sent[0])
    if _differ(place, other_place):
        raise DisagreementError(_message([other_place, place], [other_line, line], (src, dist.get_rank())))
    return theirs


def _place() -> str | None:
    """Return the function of these packages that exchanges objects; ``None`` for other code."""
    # Three frames up: past this function, the exchange, and the session's method.
    frame = sys._getframe(3)
    if frame.f_code is FORWARD and frame.f_back is not None:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    return f"{module}.{frame.f_code.co_qualname}" if module.startswith("tp_") else None


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _users_line() -> str:
    """Return the line of the user's program that led here."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if not module.startswith(("tp_", "contextlib")):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{code.co_filename}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return "a thread of its own"


def _message(places: list[str | None], lines: list[str], ranks: tuple[int, ...] = ()) -> str:
    ranks = ranks or tuple(range(len(places)))
    other = next(i for i, place in enumerate(places) if _differ(places[0], place))
    first, second = (f"rank {ranks[i]} at {lines[i]} (in {places[i]})" for i in (0, other))
    return (
        f"ranks are at different places: {first}; {second}. Every rank must make the same calls in the same "
        "order, with arguments of the same kinds"
    )
