"""Plant faults in parallel training, and see whether each is found: ``python -m tests.tp_verify.faults``.

With a word, it tries the cases that have it; without one, it writes the figures that the documents quote.
Beside them are correct strategies, in float32 and bfloat16, for which nothing may be said.
"""

import re
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from tp_core.ranks import RankPool
from tp_verify import Strategy, strategies, verify

from tests.bench._results import Results
from tests.tp_verify import models as m


@dataclass(frozen=True)
class Case:
    """A fault, or a correct strategy.

    Attributes:
        name: What is wrong, or what is right.
        strategy: The strategy.
        kind: Where the fault is.
        where: A pattern of what and where the report has to say; empty for correct strategies.
    """

    name: str
    strategy: Strategy
    kind: str = ""
    where: str = ""
    build: Any = m.build
    batches: Any = field(default_factory=lambda: m.UNEVEN)
    step: Any = m.step
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, ranks, dtype=torch.float64):
        options = {"optimizer": m.adamw, **self.options}
        return verify(
            self.build,
            self.batches,
            parallel=self.strategy,
            step=self.step,
            ranks=ranks,
            dtype=dtype,
            **options,
        )

    def is_right(self, report):
        if not self.where:
            return report.ok
        return report.finding is not None and bool(re.search(self.where, str(report.finding)))


# -- Faults of data parallelism, sharding, accumulation, clipping and states ----------------------


class Ddp(strategies.DDP):
    """DDP with a fault by its name."""

    def __init__(self, fault="", **options):
        super().__init__(**options)
        self.fault = fault

    def share(self, batch):
        if self.fault == "all ranks read the first rows":
            return {k: v[: len(v) // dist.get_world_size()] for k, v in batch.items()}
        if self.fault == "the last row is dropped":
            return super().share({k: v[:-1] for k, v in batch.items()})
        return super().share(batch)

    def parallelize(self, model):
        if self.fault == "another seed on each rank":
            with torch.no_grad():
                model.blocks[0].mlp.up.weight += dist.get_rank()
            return model
        if self.fault == "one parameter ignored":
            name = "blocks.1.mlp.up.weight"
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
        if self.fault == "buffers of the ranks part":
            model.seen += dist.get_rank()
            return super().parallelize(model)
        wrapped = super().parallelize(model)
        if self.fault == "sum in place of a mean":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hook

            def total(state, bucket):
                return hook.allreduce_hook(state, bucket).then(lambda f: f.value() * 2)

            wrapped.register_comm_hook(None, total)
        return wrapped

    def prepare(self, model, make):
        if self.fault == "decay of all weights":
            parallel = self.parallelize(model)
            return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2, weight_decay=0.5)
        if self.fault == "another rate":
            parallel = self.parallelize(model)
            return parallel, torch.optim.AdamW(parallel.parameters(), lr=2e-2)
        if self.fault == "a group left out":
            parallel = self.parallelize(model)
            own = [p for n, p in parallel.named_parameters() if "head" not in n]
            return parallel, torch.optim.AdamW(own, lr=1e-2)
        return super().prepare(model, make)

    def backward(self, model, step, parts):
        if self.fault == "wrapper left out":
            return super().backward(model.module, step, parts)
        if self.fault in ("means of ranks", "means of micro-batches", "not divided"):
            mean = torch.zeros((), dtype=torch.float64)
            for part in parts:
                loss = step(model, part)["loss"]
                (loss if self.fault == "not divided" else loss / len(parts)).backward()
                mean += loss.detach() / len(parts)
            return mean
        if self.fault == "last micro-batch alone":
            for part in parts:
                model.zero_grad()
                loss = super().backward(model, step, [part])
            return loss
        return super().backward(model, step, parts)

    def sync_gradients(self, model, *, last):
        if self.fault == "wrapper left out":
            return
        super().sync_gradients(model, last=last and self.fault != "never reduced")

    def clip(self, model, max_norm):
        if self.fault == "each tensor clipped alone":
            norms = [float(nn.utils.clip_grad_norm_([p], max_norm)) for p in model.parameters()]
            return torch.tensor(norms, dtype=torch.float64).norm()
        if self.fault == "clipped by values":
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grad_value_(model.parameters(), max_norm)
            return norm
        return super().clip(model, max_norm)

    def update(self, model, optimizer):
        if self.fault == "gradients kept":
            optimizer.step()
            return
        super().update(model, optimizer)
        if self.fault == "momentum lost":
            optimizer.state.clear()
        if self.fault == "buffer of one rank":
            model.module.seen *= 1 + dist.get_rank()
        if self.fault == "weights of one rank":
            with torch.no_grad():
                model.module.norm.bias += 1e-3 * dist.get_rank()


class Sharded(strategies.FullyShard):
    """FSDP2 with a fault by its name."""

    def __init__(self, fault="", **options):
        super().__init__(**options)
        self.fault = fault

    def parallelize(self, model):
        if self.fault == "one parameter left out":
            from torch.distributed.fsdp import fully_shard

            return fully_shard(model, ignored_params={model.head.weight})
        if self.fault == "ties lost":
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        model = super().parallelize(model)
        if self.fault == "another divisor":
            model.blocks[1].set_gradient_divide_factor(4.0)
        return model

    def prepare(self, model, make):
        if self.fault == "optimizer made too early":
            optimizer = make(model)
            return self.parallelize(model), optimizer
        return super().prepare(model, make)

    def clip(self, model, max_norm):
        if self.fault == "norm of shards":
            local = [p.grad.to_local() for p in model.parameters()]
            norm = nn.utils.get_total_norm(local)
            for one in local:
                one.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
            return norm
        return super().clip(model, max_norm)

    def update(self, model, optimizer):
        super().update(model, optimizer)
        if self.fault == "states of shards lost":
            for state in optimizer.state.values():
                state["exp_avg"].to_local().zero_()


OF_ONE_LENGTH = {"vary": False}
CLIP = {"max_norm": 0.1}
TWICE = {"micro": 2}
PIPE = {"inputs": lambda b: b["tokens"], "target": lambda b: b["labels"], "loss": m.loss_of}

UP, DOWN = "blocks.1.mlp.up", "blocks.1.mlp.down"


def by_hand(fault, at, where, **options):
    return Case(fault, m.ByHand(fault, at), "TP", where, options=options)


FAULTS = [
    by_hand("column backward", UP, r"gradient of the input of blocks\.1\.mlp\.up"),
    by_hand("column backward", "blocks.0.attention.k", r"gradient of the input of blocks\.0\.attention\.k"),
    by_hand("column twice", UP, r"output of blocks\.1\.mlp\.up"),
    by_hand("row forward", DOWN, r"output of blocks\.1\.mlp\.down"),
    by_hand("row forward", "blocks.0.attention.o", r"output of blocks\.0\.attention\.o"),
    by_hand("row mean", DOWN, r"output of blocks\.1\.mlp\.down"),
    by_hand("row backward twice", DOWN, r"blocks\.1\.mlp\.down"),
    by_hand("row slices swapped", DOWN, r"weights before the first step of blocks\.1\.mlp\.down\.weight"),
    by_hand("bias on every rank", DOWN, r"output of blocks\.1\.mlp\.down"),
    by_hand("vocabulary mask", "embed", r"output of embed"),
    by_hand("norm on a slice", "blocks.1.norm2", r"output of blocks\.1\.norm2"),
    by_hand("gradient of a norm left out", "blocks.1.norm2", r"gradient of blocks\.1\.norm2\.weight"),
    by_hand("draws of one rank", "blocks.0.drop", r"output of blocks\.0\.drop"),
    by_hand("norm counts copies", "none", r"the norm that gradients are clipped by", **CLIP),
    by_hand("norm of one rank", "none", r"the norm that gradients are clipped by", **CLIP),
    Case("wrapper left out", Ddp("wrapper left out"), "DDP", r"gradient of head\.weight"),
    Case("one parameter ignored", Ddp("one parameter ignored"), "DDP", r"blocks\.1\.mlp\.up\.weight"),
    Case("sum in place of a mean", Ddp("sum in place of a mean"), "DDP", r"every one is 2 times"),
    Case("another seed on each rank", Ddp("another seed on each rank"), "DDP", r"before.*blocks\.0\.mlp\.up"),
    Case(
        "buffers of the ranks part",
        Ddp("buffers of the ranks part", broadcast_buffers=False),
        "DDP",
        r"buffer of seen",
    ),
    Case("all ranks read the first rows", Ddp("all ranks read the first rows"), "DDP", r"the loss"),
    Case("the last row is dropped", Ddp("the last row is dropped"), "DDP", r"the loss"),
    Case("weights of one rank", Ddp("weights of one rank"), "DDP", r"change of the weight of norm\.bias"),
    Case(
        "means of ranks",
        Ddp("means of ranks"),
        "accumulation",
        r"step 1: the (loss|gradient)( of head\.weight)?:",
    ),
    Case(
        "means of micro-batches",
        Ddp("means of micro-batches"),
        "accumulation",
        r"step 1: the (loss|gradient)",
        options=TWICE,
    ),
    Case(
        "not divided",
        Ddp("not divided"),
        "accumulation",
        r"every one is 2 times",
        batches=m.EVEN,
        options=TWICE,
    ),
    Case(
        "last micro-batch alone",
        Ddp("last micro-batch alone"),
        "accumulation",
        r"step 1: the (loss|gradient)",
        options=TWICE,
    ),
    Case("never reduced", Ddp("never reduced"), "accumulation", r"gradient of head\.weight", options=TWICE),
    Case("gradients kept", Ddp("gradients kept"), "accumulation", r"step 2: the gradient"),
    Case(
        "each tensor clipped alone",
        Ddp("each tensor clipped alone"),
        "clipping",
        r"clipped gradient",
        options=CLIP,
    ),
    Case(
        "clipped by values",
        Ddp("clipped by values"),
        "clipping",
        r"clipped gradient",
        options={"max_norm": 0.01},
    ),
    Case("norm of shards", Sharded("norm of shards"), "clipping", r"the norm that gradients", options=CLIP),
    Case("one parameter left out", Sharded("one parameter left out"), "FSDP", r"gradient of head\.weight"),
    Case("another divisor", Sharded("another divisor"), "FSDP", r"gradient of blocks\.1\."),
    Case("ties lost", Sharded("ties lost"), "FSDP", r"gradient of (embed|head)\.weight", build=m.build_tied),
    Case(
        "optimizer made too early", Sharded("optimizer made too early"), "states", r"change of the weight of"
    ),
    Case("states of shards lost", Sharded("states of shards lost"), "states", r"state of \S+ exp_avg"),
    Case("momentum lost", Ddp("momentum lost"), "states", r"state of", options={"optimizer": m.sgd}),
    Case(
        "buffer of one rank", Ddp("buffer of one rank", broadcast_buffers=False), "states", r"buffer of seen"
    ),
    Case("decay of all weights", Ddp("decay of all weights"), "states", r"change of the weight of"),
    Case("another rate", Ddp("another rate"), "states", r"change of the weight of"),
    Case("a group left out", Ddp("a group left out"), "states", r"change of the weight of head\.weight"),
    *(
        Case(fault, m.Context(fault), "context", where, options=OF_ONE_LENGTH)
        for fault, where in {
            "positions": r"output of places",
            "own keys alone": r"output of blocks\.1\.attention",
            "mask begins at 0": r"output of blocks\.1\.attention",
            "mask is off by one": r"output of blocks\.1\.attention",
            "halves merged without weights": r"output of blocks\.1\.attention",
            "gradient of keys": r"blocks\.1\.attention\.k",
            "gradient of values": r"blocks\.1\.attention\.v",
            "last label lost": r"step 1: the loss",
            "means of slices": r"step 1: the (loss|gradient)",
            "one weight not summed": r"gradient of blocks\.0\.mlp\.up\.weight",
        }.items()
    ),
    Case(
        "torch's pipelining, uneven tokens",
        strategies.Pipelining(**PIPE),
        "pipeline",
        r"step 1: the (loss|gradient)",
        build=m.build_stages,
        batches=[m.make_batch(8, n) for n in range(2)],
    ),
]

PLAN = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
HEADS = {f"blocks.*.attention.{n}": ColwiseParallel(use_local_output=False) for n in "qkv"}
HEADS |= {"blocks.*.attention.o": RowwiseParallel()}
NORMS = {"norm": SequenceParallel(use_local_output=True)}


def correct_cases():
    """Return correct strategies: each with two batches, then accumulated, clipped and tied."""
    found = []
    for name, strategy in {
        "ddp": strategies.DDP(),
        "ddp, buffers of their own": strategies.DDP(broadcast_buffers=False),
        "ddp, as views": strategies.DDP(gradient_as_bucket_view=True, static_graph=False),
        "fully_shard": strategies.FullyShard(),
        "fully_shard, kept": strategies.FullyShard(reshard_after_forward=False),
        "a plan of the MLPs": strategies.TensorParallel(PLAN),
        "two dimensions": m.Mixed(),
        "by hand": m.ByHand(),
    }.items():
        for more, options in {
            "": {},
            ", accumulated": TWICE,
            ", clipped": CLIP,
            ", both, SGD": {**TWICE, **CLIP, "optimizer": m.sgd},
        }.items():
            found.append(Case(name + more, strategy, options=options))
    found += [
        Case("ddp, tied", strategies.DDP(), build=m.build_tied),
        Case("fully_shard, tied", strategies.FullyShard(), build=m.build_tied, options=CLIP),
        Case("context by hand", m.Context(), options=OF_ONE_LENGTH),
        Case("context by hand, even", m.Context(), batches=m.EVEN, options=OF_ONE_LENGTH),
        *(
            Case(
                f"pipelining, {name}",
                strategies.Pipelining(schedule=name, **PIPE),
                build=m.build_stages,
                batches=m.EVEN,
            )
            for name in ("ScheduleGPipe", "Schedule1F1B")
        ),
        Case("accelerate", strategies.Accelerate(), options=CLIP),
        *(
            Case(f"tp's {name}", strategies.InstalledBackend(name), options=CLIP)
            for name in ("ddp", "fsdp", "shard")
        ),
    ]
    return found


def main(only=""):
    wrong = 0
    with Results("verify", is_part=True) as results, RankPool(2, timeout_s=120) as ranks:
        for kind, cases, types in (
            ("fault", FAULTS, [torch.float64]),
            ("right", correct_cases(), [torch.float32, torch.bfloat16]),
        ):
            good = 0
            for case in cases:
                if only not in f"{kind} {case.kind} {case.name}":
                    continue
                for dtype in types:
                    try:
                        report = case.run(ranks, dtype)
                        said, ok = str(report.finding or "equal"), case.is_right(report)
                    except Exception as error:  # noqa: BLE001 - it is in the table
                        said, ok = f"{type(error).__name__}: {str(error)[-200:]}", False
                    good, wrong = good + ok, wrong + (not ok)
                    place = case.kind or str(dtype).removeprefix("torch.")
                    print(f"{'ok   ' if ok else 'WRONG'} {kind} | {place} | {case.name} | {said}", flush=True)
            if not only:
                results.add(f"{kind}, tried", len(cases), "cases")
                results.add(f"{kind}, reported wrongly", len(cases) - good / len(types), "cases")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]) > 0)
