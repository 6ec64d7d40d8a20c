"""What things cost on a CUDA device, beside what they would cost without these packages.

    python tests/gpu/benchmarks.py --list
    python tests/gpu/benchmarks.py NAME OUT.json [--device cpu]

One benchmark in one process: variants take turns, and medians of the rounds are told. On the CPU, which is
for trying the program out, everything is small.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.pop(0)  # this folder: its modules are for nobody else to find

BENCHMARKS = {}


def benchmark(gpus=1, limit_s=75):
    """Mark a function of a `Bench`; it needs so many CUDA devices, and at most so many seconds."""

    def mark(function):
        BENCHMARKS[function.__name__] = (function, gpus, limit_s)
        return function

    return mark


class Bench:
    """The device, and how to measure on it.

    Args:
        device: Its name.
    """

    def __init__(self, device):
        import torch

        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        self.is_accelerator = self.device.type != "cpu"  # simulated devices, too, to rehearse with

    def size(self, full, tiny):
        """Return a size for a card, or one for trying the program out."""
        return full if self.is_gpu else tiny

    def wait(self):
        import torch

        if self.is_accelerator:
            torch.accelerator.synchronize()

    def medians_ms(self, variants, *, rounds=15, calls=5):
        """Return the median milliseconds of one call of each variant."""
        rounds, calls = self.size(rounds, 2), self.size(calls, 1)
        times = {name: [] for name in variants}
        for function in variants.values():
            for _ in range(self.size(3, 1)):
                function()
        for _ in range(rounds):
            for name, function in variants.items():
                self.wait()
                began = time.perf_counter()
                for _ in range(calls):
                    function()
                self.wait()
                times[name].append(1e3 * (time.perf_counter() - began) / calls)
        return {f"{name}, ms": round(statistics.median(t), 4) for name, t in times.items()}

    def peak_mib(self, function):
        """Return how many MiB more were allocated within a call than before it."""
        import torch

        if not self.is_accelerator:
            function()
            return None
        function()
        self.wait()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        function()
        self.wait()
        return round((torch.accelerator.max_memory_allocated() - before) / 2**20, 2)

    def peaks_mib(self, variants):
        return {f"{name}, MiB at the peak": self.peak_mib(function) for name, function in variants.items()}


def make_net(width, depth, device):
    from torch import nn

    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 1)).to(device)


def step_of(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


# -- a language model ------------------------------------------------------------------------------------


def language_models():
    """Return the module beside this one."""
    spec = importlib.util.spec_from_file_location("llama", Path(__file__).with_name("llama.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """When two steps of a run begin, with all that was launched before them at its end."""

    def __init__(self, bench, first, last):
        self._bench, self._at, self._calls = bench, (first, last), 0
        self.times = []

    def tick(self):
        if self._calls in self._at:
            self._bench.wait()
            self.times.append(time.perf_counter())
        self._calls += 1

    @property
    def seconds_per_step(self):
        began, ended = self.times
        return (ended - began) / (self._at[1] - self._at[0])


def some_words(bench, sizes, rows):
    """Return a batch: words and those that follow them, (rows, length) each."""
    import torch

    words = torch.randint(sizes.words, (rows, sizes.length + 1), device=bench.device)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


@benchmark(limit_s=150)
def language_model(bench):
    """`fit` of a Llama of 1.1 billion weights, its blocks compiled, in bf16, beside the same loop by hand."""
    import torch
    from tp_trainer import Trainer

    llama = language_models()
    sizes, rows = bench.size(llama.Sizes(), llama.TINY), bench.size(8, 2)
    first, last = bench.size(3, 1), bench.size(13, 3)
    batches = [some_words(bench, sizes, rows)] * (last + 1)

    def make():
        with bench.device:
            model = llama.Llama(sizes)
        # One after the other, which is what takes minutes less. Nothing compiles for simulated devices.
        for block in model.blocks if bench.is_gpu or not bench.is_accelerator else ():
            block.compile()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def fit():
        model, optimizer = make()
        trainer = Trainer(devices=[bench.device], precision="bf16-mixed", progress=False)

        def run():
            clock = Clock(bench, first, last)

            def step(model, batch):
                clock.tick()
                return model(*batch)

            trainer.fit(model, optimizer, batches, step=step, epochs=1)
            return clock.seconds_per_step

        return run

    def by_hand():
        model, optimizer = make()

        def run():
            clock, total = Clock(bench, first, last), torch.zeros((), device=bench.device)
            for batch in batches:
                clock.tick()
                optimizer.zero_grad()
                with torch.autocast(bench.device.type, dtype=torch.bfloat16):
                    loss = model(*batch)
                loss.backward()
                optimizer.step()
                total += loss.detach()
            return clock.seconds_per_step

        return run

    ways = {"by hand": by_hand(), "fit": fit()}
    times = {name: [] for name in ways}
    for _ in range(bench.size(3, 2)):
        for name, run in ways.items():
            times[name].append(run())
    with torch.device("meta"):
        operations = llama.operations_of_a_token(llama.Llama(sizes), sizes)
    card = torch.cuda.get_device_name(bench.device) if bench.is_gpu else "CPU"
    figures = {"tokens of a step": rows * sizes.length}
    for name, found in times.items():
        per_s = rows * sizes.length / statistics.median(found)
        figures[f"{name}, tokens per second"] = round(per_s, 1)
        figures[f"{name}, part of the card's operations"] = llama.utilization(per_s * operations, card)
    ratios = [b / f for b, f in zip(times["by hand"], times["fit"], strict=True)]
    return {**figures, "fit over by hand, tokens per second": round(statistics.median(ratios), 4)}


def predicted_and_measured(bench, backend, options, rows):
    """Train the model for three steps; return what is said that it needs, what it took, and a step's time."""
    import torch
    from tp_trainer import Trainer

    llama = language_models()
    sizes = bench.size(llama.Sizes(), llama.TINY)
    batch = some_words(bench, sizes, rows)
    times = []

    def trainer():
        return Trainer(
            backend=backend,
            devices=[bench.device],
            options={"fsdp": options},
            precision="bf16-mixed",
            progress=False,
        )

    def make(device):
        with torch.device(device):
            model = llama.Llama(sizes)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train():
        model, optimizer = make(bench.device)
        clock = Clock(bench, 1, 2)

        def step(model, batch):
            clock.tick()
            return model(*batch)

        with trainer() as ours:
            ours.fit(model, optimizer, [batch] * 3, step=step, epochs=1)
        times.append(clock.seconds_per_step)

    with trainer() as ours:
        table = ours.estimate(*make("meta"), batch, lambda m, b: m(*b), devices=1, memory="139GiB")
    predicted = table.verdicts[backend].memory.total / 2**20
    measured = bench.peak_mib(train)
    return {
        "predicted, MiB": round(predicted, 1),
        "measured, MiB": measured,
        "predicted over measured": None if measured is None else round(predicted / measured, 3),
        "a step, s": round(times[-1], 4),
    }


@benchmark(limit_s=60)
def language_model_memory(bench):
    """What is predicted of the device's memory for that model, not compiled, and what it takes."""
    return predicted_and_measured(bench, "single", {}, rows=bench.size(4, 2))


@benchmark(limit_s=100)
def language_model_offloaded(bench):
    """The same by `fsdp` on one device, with weights, gradients and optimizer state in pinned memory."""
    options = {"reshard_after_forward": True, "activation_checkpointing": False, "offload": True}
    backend = "fsdp" if bench.is_accelerator else "single"  # nothing is offloaded from the CPU
    return predicted_and_measured(bench, backend, options, rows=bench.size(4, 2))


# -- long sequences ---------------------------------------------------------------------------------------


def operators_of(function):
    """Return the names of the operators of attention that a function calls, one for each kernel."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = set()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "scaled_dot_product" in operator.name():
                names.add(operator.name().removeprefix("aten::"))
            return operator(*args, **(kwargs or {}))

    with Operators():
        function()
    return sorted(names)


@benchmark(limit_s=60)
def context_at_128k(bench):
    """Causal attention of a rank of eight to 131,072 tokens, forward and backward, without the exchanges."""
    from unittest.mock import patch

    import torch
    from tp_context import _ring

    # Private, all: the other ranks are not here. A round of the ring gets this rank's own keys again.
    from tp_context._algorithms import attend
    from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
    from tp_context._ring import RingAttention
    from tp_context._slices import Cut

    ranks, features = 8, bench.size(128, 8)
    tokens = bench.size(131_072, 512)
    heads, shared = bench.size((32, 8), (8, 8))
    cut = Cut(tokens, 3, ranks, None)

    def made(heads, tokens):
        shape = (1, heads, tokens, features)
        return torch.randn(shape, device=bench.device, dtype=torch.bfloat16, requires_grad=True)

    query, own = made(heads, cut.tokens), [made(shared, cut.tokens) for _ in range(2)]
    whole = [made(shared, tokens) for _ in range(2)]
    some = [made(count // ranks, tokens) for count in (heads, shared, shared)]
    rules = Rules(None, None, is_causal=True, grouped=True)

    def all_gather():
        attend(Inputs(query, *whole), rules._replace(rows=cut), "all-gather").sum().backward()

    def ulysses():
        attend(Inputs(*some), rules, "all-gather").sum().backward()

    def ring():
        with patch.object(_ring, "_pass_on", lambda tensor, _: (tensor.clone(), [])):
            cuts = QueryKeyCuts(cut, cut)
            found = RingAttention.apply(rules, cuts, query, *own, None, None, None)
            found.sum().backward()

    ways = {"all-gather": all_gather, "ulysses": ulysses, "ring": ring}
    figures = {f"{name}: kernels": operators_of(way) for name, way in ways.items()}
    scores = heads * cut.tokens * tokens * 4
    figures["scores of a rank in float32, MiB"] = round(scores / 2**20, 2)
    return figures | bench.medians_ms(ways, rounds=3, calls=1) | bench.peaks_mib(ways)


# -- the trainer -----------------------------------------------------------------------------------------


@benchmark()
def step_time(bench):
    """`fit` on one device beside the same loop written out, a small and a larger net."""
    import torch
    from tp_trainer import Trainer

    figures = {}
    for name, width, rows in (("small", 64, 32), ("large", bench.size(2048, 64), bench.size(4096, 32))):
        for precision in ("fp32", "bf16-mixed"):
            steps = bench.size(150, 4)
            batches = [
                {
                    "x": torch.randn(rows, width, device=bench.device),
                    "y": torch.zeros(rows, 1, device=bench.device),
                }
                for _ in range(8)
            ]
            batches = [batches[i % 8] for i in range(steps)]

            def fit(width=width, batches=batches, precision=precision):
                with Trainer(devices=[bench.device], progress=False, precision=precision) as trainer:
                    model = make_net(width, 4, bench.device)
                    optimizer = torch.optim.AdamW(model.parameters())
                    trainer.fit(model, optimizer, batches, step=step_of, epochs=1)

            def by_hand(width=width, batches=batches, precision=precision):
                model = make_net(width, 4, bench.device)
                optimizer = torch.optim.AdamW(model.parameters())
                total = torch.zeros((), device=bench.device)
                for batch in batches:
                    optimizer.zero_grad()
                    lower = precision != "fp32"
                    with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=lower):
                        loss = step_of(model, batch)
                    loss.backward()
                    optimizer.step()
                    total += loss.detach()
                return total.item()

            found = bench.medians_ms({"fit": fit, "by hand": by_hand}, rounds=5, calls=1)
            per_step = {key: round(value / steps, 5) for key, value in found.items()}
            per_step["fit over by hand"] = round(per_step["fit, ms"] / per_step["by hand, ms"], 3)
            figures[f"{name}, {precision}, a step"] = per_step
    return figures


@benchmark()
def memory_per_step(bench):
    """The peak of training on nested batches with the garbage collector off, beside a plain loop."""
    import torch
    from tp_trainer import Trainer

    rows, width, steps = bench.size(2048, 16), bench.size(2048, 8), bench.size(6, 2)

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y = torch.randn(rows, width), torch.zeros(rows, 1)

        def __len__(self):
            return steps * rows

        def __getitem__(self, i):
            return {"x": self.x[i % rows], "more": [{"y": self.y[i % rows]}]}

    loader = torch.utils.data.DataLoader(Rows(), batch_size=rows)

    def step(model, batch):
        return (model(batch["x"]) - batch["more"][0]["y"]).square().mean()

    def by_hand():
        model = make_net(width, 2, bench.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in loader:
            y = batch["more"][0]["y"].to(bench.device)
            moved = {"x": batch["x"].to(bench.device), "more": [{"y": y}]}
            optimizer.zero_grad()
            step(model, moved).backward()
            optimizer.step()

    def fit(backend):
        def run():
            devices = [bench.device] if backend == "single" else [bench.device] * 2
            with Trainer(devices=devices, backend=backend, progress=False) as trainer:
                model = make_net(width, 2, bench.device)
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                trainer.fit(model, optimizer, loader, step=step, epochs=1)

        return run

    variants = {"by hand": by_hand, **{name: fit(name) for name in ("single", "tuple", "dp-gather")}}
    gc.collect()
    gc.disable()
    return bench.peaks_mib(variants)


@benchmark()
def prefetch(bench):
    """A step on batches of the host: plain copies, pinned ones, and those of the trainer's loader."""
    import torch
    from tp_core import recursive_to
    from tp_trainer import Trainer

    rows, width, steps = bench.size(8192, 16), bench.size(2048, 8), bench.size(40, 3)
    data = torch.utils.data.TensorDataset(torch.randn(rows * 4, width), torch.zeros(rows * 4, 1))
    model = make_net(width, 2, bench.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    host = [(torch.randn(rows, width), torch.zeros(rows, 1)) for _ in range(4)]
    pinned = [tuple(t.pin_memory() for t in batch) for batch in host] if bench.is_accelerator else host
    there = [tuple(t.to(bench.device) for t in batch) for batch in host]

    def loop(batches, **how):
        def run():
            for i in range(steps):
                x, y = recursive_to(batches[i % 4], bench.device, **how)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()

        return run

    def fit():
        with Trainer(devices=[bench.device], progress=False) as trainer:
            loader = torch.utils.data.DataLoader(
                data, batch_size=rows, pin_memory=bench.is_accelerator, num_workers=2
            )
            step = lambda m, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731 - it is short
            trainer.fit(model, optimizer, loader, step=step, epochs=1)

    variants = {
        "on the device already": loop(there),
        "from pageable memory": loop(host),
        "from pinned memory": loop(pinned, non_blocking=True),
    }
    figures = {k: round(v / steps, 4) for k, v in bench.medians_ms(variants, rounds=5, calls=1).items()}
    whole = bench.medians_ms({"fit of four batches by two workers": fit}, rounds=3, calls=1)
    return {"a step": figures, **whole}


# -- replicas ----------------------------------------------------------------------------------------------


@benchmark()
def replicas_on_one_card(bench):
    """Two replicas on one device, whose parameters are shared or copied, beside two plain calls."""
    import torch
    from tp_core.replicas import Replicas

    width, rows = bench.size(1024, 16), bench.size(512, 4)
    model = make_net(width, 8, bench.device)
    x = torch.randn(rows, width, device=bench.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(forward):
        def run():
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

        return run

    def plain():
        return sum(model(part).square().mean() for part in x.tensor_split(2))

    def replicated(force_copies):
        replicas = Replicas(model, [bench.device] * 2, force_copies=force_copies)

        def forward():
            outputs = replicas.run(lambda replica, part: replica(part), x.tensor_split(2))
            return sum(y.square().mean() for y in outputs)

        return forward

    variants = {
        "two plain calls": step(plain),
        "shared": step(replicated(force_copies=False)),
        "copied": step(replicated(force_copies=True)),
        "copied in flat pieces": step(replicated(force_copies="flat")),
    }
    weights = round(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20, 2)
    return {"weights, MiB": weights, **bench.medians_ms(variants), **bench.peaks_mib(variants)}


@benchmark(gpus=2)
def replicas_beside_torchs(bench):
    """A training step on all devices beside ``torch.nn.DataParallel``: broadcast, run, gradient sum."""
    import torch
    from torch import nn
    from tp_dp_gather import DataParallel
    from tp_tuple import TupleParallel

    devices = [bench.device] * 2
    if bench.is_accelerator:
        devices = [torch.device(bench.device.type, i) for i in range(torch.accelerator.device_count())]
    count = len(devices)
    figures = {}
    for name, width in (("10M parameters", 1024), ("200M parameters", 4608)):
        width = bench.size(width, 16)  # noqa: PLW2901 - a smaller one for trying out
        model = make_net(width, 10, devices[0])
        x = torch.randn(bench.size(1024, 8), width, device=devices[0])
        parts = [p.to(d) for p, d in zip(x.tensor_split(count), devices, strict=True)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        theirs = nn.DataParallel(model) if bench.is_gpu else DataParallel(model, devices)
        ours, tuples = DataParallel(model, devices), TupleParallel(model, devices, transfer_output=True)

        def step(forward, optimizer=optimizer):
            def run():
                optimizer.zero_grad()
                forward().backward()
                optimizer.step()

            return run

        variants = {
            "torch.nn.DataParallel": step(lambda m=theirs, x=x: m(x).square().mean()),
            "DataParallel": step(lambda m=ours, x=x: m(x).square().mean()),
            "TupleParallel": step(lambda m=tuples, p=tuple(parts): torch.cat(m(p)).square().mean()),
        }
        figures[f"{name}, {count} devices"] = bench.medians_ms(variants) | bench.peaks_mib(variants)
    return figures


@benchmark()
def many_small_parameters(bench):
    """Copies of many small tensors: in flat pieces, and one by one."""
    import torch
    from tp_core.replicas._mirror import copy_coalesced

    count, width = bench.size(1000, 20), bench.size(64, 8)
    figures = {}
    for name, shape, memory_format in (
        ("contiguous", (width, width), torch.contiguous_format),
        ("channels_last", (width, width, 3, 3), torch.channels_last),
    ):
        sources = [
            torch.randn(shape, device=bench.device).contiguous(memory_format=memory_format)
            for _ in range(count)
        ]
        targets = [torch.empty_like(s) for s in sources]

        def one_by_one(targets=targets, sources=sources):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        variants = {
            "in flat pieces": lambda t=targets, s=sources: copy_coalesced([t], s, force_flat=True),
            "in one kernel": lambda t=targets, s=sources: torch._foreach_copy_(t, s),
            "one by one": one_by_one,
        }
        figures[name] = bench.medians_ms(variants) | bench.peaks_mib(variants)
    return figures


@benchmark()
def loss_in_parts(bench):
    """The loss where the outputs are, beside the loss of gathered outputs."""
    import torch
    from torch import nn
    from tp_dp_gather import DataParallel

    classes, rows = bench.size(32_000, 50), bench.size(8192, 8)
    module = nn.Linear(64, classes).to(bench.device)
    x = torch.randn(rows, 64, device=bench.device)
    target = torch.randint(classes, (rows,), device=bench.device)
    devices = [bench.device] * 2
    whole = DataParallel(module, devices)
    parts = DataParallel(module, devices, gather_to_one_device=False)
    criterion = nn.CrossEntropyLoss()
    variants = {
        "gathered": lambda: criterion(whole(x), target).backward(),
        "in parts": lambda: parts.apply_loss(criterion, parts(x), target).backward(),
    }
    return bench.medians_ms(variants, calls=2) | bench.peaks_mib(variants)


# -- layers and streams ------------------------------------------------------------------------------------


@benchmark()
def vocabulary_cross_entropy(bench):
    """The loss over class shards with one rank, in place and not, beside torch's own."""
    import torch
    from torch.nn import functional as F
    from tp_shard.nn.functional import parallel_cross_entropy

    rows, classes = bench.size(8192, 16), bench.size(128_256, 100)
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(rows, classes, device=bench.device, dtype=dtype)
        target = torch.randint(classes, (rows,), device=bench.device)

        def with_torch(logits=logits, target=target):
            x = logits.detach().requires_grad_()
            F.cross_entropy(x, target).backward()

        def sharded(*, inplace, logits=logits, target=target):
            x = logits.detach().requires_grad_()
            y = x * 1 if inplace else x  # what is overwritten is nobody else's
            parallel_cross_entropy(y, target, parallel=True, inplace=inplace).backward()

        variants = {
            "torch": with_torch,
            "sharded": lambda f=sharded: f(inplace=False),
            "sharded, in place, with the copy that it overwrites": lambda f=sharded: f(inplace=True),
        }
        figures[str(dtype)] = bench.medians_ms(variants, rounds=7, calls=2) | bench.peaks_mib(variants)
        del logits
    return figures


class Model:
    """What the stream's worker keeps: made in its process, from its device."""

    def __init__(self, device):
        import torch

        self.device = device
        self.net = torch.nn.Linear(1024, 1024).to(device)


def predict(model, item):
    import torch

    with torch.inference_mode():
        return model.net(item.to(model.device)).cpu()


@benchmark()
def stream_through_a_worker(bench):
    """Items of 128 KiB through a worker process that computes on the device, beside a plain loop."""
    import torch
    import tp_runner

    count = bench.size(600, 10)
    items = [torch.randn(32, 1024) for _ in range(16)]

    def plain():
        model = Model(str(bench.device))
        for i in range(count):
            predict(model, items[i % 16])

    def streamed():
        source = (items[i % 16] for i in range(count))
        for _ in tp_runner.map(predict, source, devices=[bench.device], init=Model):
            pass

    found = bench.medians_ms(
        {"plain loop": plain, "one worker, its start included": streamed}, rounds=3, calls=1
    )
    return {"items": count, **found}


# -- the command -------------------------------------------------------------------------------------------


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the names, and their limits in seconds")
    parser.add_argument("name", nargs="?", choices=BENCHMARKS)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", default="cuda:0", help="cpu or sim:0, to try the program out")
    given = parser.parse_args(arguments)
    if given.list:
        for name, (_, _, limit_s) in BENCHMARKS.items():
            print(name, limit_s)
        return
    function, gpus, _ = BENCHMARKS[given.name]
    given.out.write_text(json.dumps(outcome_of(function, gpus, given.device), indent=1))


def outcome_of(function, gpus, device):
    import torch

    what = function.__doc__
    if device.startswith("cuda") and torch.cuda.device_count() < gpus:
        needed = "a CUDA device" if gpus == 1 else f"{gpus} CUDA devices"
        return {"outcome": "skipped", "reason": f"needs {needed}", "what": what}
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    return {"outcome": "passed", "what": what, "figures": function(Bench(device))}


if __name__ == "__main__":
    main()
