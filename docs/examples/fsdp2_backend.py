"""A backend over torch's ``fully_shard``: each rank holds a shard of every parameter.

A distribution names this module in the entry-point group ``tp.plugins``; then

    tp launch -n 2 script.py

takes it for every model, since its score is above that of ``ddp``. A script can register it itself:
``registry.register(FullyShardBackend())``.
"""

import dataclasses
import math
import weakref
from contextlib import contextmanager

import torch
from tp_core.plugins import Backend, Verdict, hookimpl
from tp_core.sessions import ProcessGroupSession, join_process_group

tp_contract = 1


@dataclasses.dataclass(frozen=True, slots=True)
class FullyShardOptions:
    """The options of the backend ``fsdp2``.

    Attributes:
        wrap: Classes of modules whose parameters are gathered together, such as a transformer's block;
            those of the whole model are, where there are none.
        reshard_after_forward: Let go of gathered parameters until the backward pass needs them again.
    """

    wrap: tuple[type, ...] = ()
    reshard_after_forward: bool = True


class FullyShardBackend(Backend):
    """Runs one process per device, of which each holds a part of every parameter."""

    name = "fsdp2"
    options_type = FullyShardOptions

    def assess(self, job):
        """Fit several processes with one device each and a plain model."""
        if job.environment.world_size == 1:
            return Verdict.unfit("one process has nothing to shard", remedy="tp launch -n 2 script.py")
        if len(job.devices) != 1:
            return Verdict.unfit(f"{len(job.devices)} devices in each process, and this takes one")
        if job.traits is not None and job.traits.has_sharded_parameters:
            return Verdict.unfit("the model's parameters are sharded already")
        return Verdict.fits(70, f"parameters sharded over {job.environment.world_size} processes")

    def open(self, job):
        """Join the process group, unless the script has, and leave it when the session is closed."""
        options = self.parse_options(job)  # before anything is started
        leave = join_process_group(job.environment, device=job.devices[0])
        return FullyShardSession(job, options, leave=leave)


class FullyShardSession(ProcessGroupSession):
    """One rank of a job whose parameters are DTensors."""

    evaluates_together = True  # ranks gather parameters in a step without gradients, too

    def __init__(self, job, options, *, leave):
        super().__init__(job, leave=leave)
        self.options = options
        self.shards = {}  # and the parameter that each has taken the place of, by its identity

    def prepare_model(self, model):
        """Give all ranks rank 0's weights, then shard them, in place: the module stays the user's own.

        Collectives: an all-gather of the parameters' descriptions, a broadcast of each tensor.
        """
        from torch.distributed.fsdp import fully_shard

        self.check_plain(model)
        self.check_same_parameters(model)
        model = model.to(self.device)
        for tensor in [*model.parameters(), *model.buffers()]:
            torch.distributed.broadcast(tensor.data, src=0)
        plain = dict(model.named_parameters(remove_duplicate=False))
        settings = {"reshard_after_forward": self.options.reshard_after_forward}
        for module in [m for m in model.modules() if isinstance(m, self.options.wrap)]:
            fully_shard(module, **settings)
        fully_shard(model, **settings)
        shards = dict(model.named_parameters(remove_duplicate=False))
        # Weakly, since holding the parameters would hold their memory.
        self.shards |= {id(plain[name]): (weakref.ref(plain[name]), shard) for name, shard in shards.items()}
        return model

    def prepare_optimizer(self, optimizer):
        """Give the optimizer the shards in place of the parameters that it was made with."""
        for group in optimizer.param_groups:
            group["params"] = [self.shard_of(p) for p in group["params"]]
        return optimizer

    def shard_of(self, parameter):
        """Return what has taken the place of a parameter, or itself."""
        replaced, shard = self.shards.get(id(parameter), (None, None))
        return parameter if replaced is None or replaced() is not parameter else shard

    def compile_model(self, model):
        """Compile the forward pass; the hooks that gather parameters stay outside."""
        model.compile()

    @contextmanager
    def no_sync(self, model):
        """Add gradients up without reducing them; they are whole ones meanwhile."""
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def grad_norm(self, model, *, norm_type=2.0):
        """Return the norm over all ranks' shards, also where a rank holds nothing of a parameter.

        Collectives: one all-reduce of a number.
        """
        parts = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type)
        norm = norm.to(self.device, torch.float64)
        if norm_type == math.inf:
            return self.reduce(norm, "max")
        return self.reduce(norm**norm_type, "sum") ** (1 / norm_type)


@hookimpl
def tp_backends():
    """One backend, for models that are too large for one device."""
    return [FullyShardBackend()]
