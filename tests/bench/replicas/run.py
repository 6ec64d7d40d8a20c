"""Costs of replicas against the plain calls and against torch: python -m tests.bench.replicas.run

Each row interleaves the variants and takes medians, so that what else the machine does hits all of
them alike: trust the ratios.
"""

import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import default_collate as torch_collate
from tp_core.replicas import Replicas
from tp_dp_gather import DataParallel
from tp_tuple import TupleParallel, default_collate

from tests.bench._results import Results
from tests.bench.replicas.resnet import resnet50


def medians(variants: dict[str, Callable[[], object]], *, rounds: int, calls: int) -> dict[str, float]:
    """Return the median seconds of one call of each variant."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant()
    for _ in range(rounds):
        for name, variant in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                variant()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(t) for name, t in times.items()}


results = Results("replicas")


def row(name: str, value: float, unit: str, target: str) -> None:
    results.add(name, value, unit, note=target)


def bare_worker(task: Callable[[], object]) -> Callable[[Callable[[], object]], None]:
    """Return what runs ``task`` in a thread that waits on a lock, and something else here meanwhile."""
    go, done = threading.Lock(), threading.Lock()
    go.acquire(), done.acquire()

    def serve() -> None:
        while True:
            go.acquire()
            task()
            done.release()

    def both(here: Callable[[], object]) -> None:
        go.release()
        here()
        done.acquire()

    threading.Thread(target=serve, daemon=True).start()
    return both


def wrapping() -> None:
    tiny, x = nn.Linear(8, 8), torch.randn(4, 8)
    one, two = TupleParallel(tiny, ["cpu"]), TupleParallel(tiny, ["cpu", "cpu"])
    engine = Replicas(tiny, ["cpu", "cpu"])
    copied = Replicas(tiny, ["cpu", "cpu"], force_copies=True)
    worker = bare_worker(lambda: tiny(x))
    t = medians(
        {
            "bare": lambda: worker(lambda: tiny(x)),
            "direct": lambda: tiny(x),
            "one": lambda: one((x,)),
            "both": lambda: (tiny(x), tiny(x)),
            "two": lambda: two((x, x)),
            "engine": lambda: engine.run(lambda m, p: m(p), (x, x)),
            "copied": lambda: copied.run(lambda m, p: m(p), (x, x)),
        },
        rounds=31,
        calls=200,
    )
    row("TupleParallel, 1 device, over the direct call", 1e6 * (t["one"] - t["direct"]), "us", "at most 5")
    row("TupleParallel, 2 CPU replicas, over two calls", 1e6 * (t["two"] - t["both"]), "us", "at most 60")
    row("a bare thread that is woken and waited for, over two calls", 1e6 * (t["bare"] - t["both"]), "us", "")
    row("the engine by itself, 2 CPU replicas, over two calls", 1e6 * (t["engine"] - t["both"]), "us", "")
    row("the same with copied parameters", 1e6 * (t["copied"] - t["both"]), "us", "")


def preparing() -> None:
    """What a call costs the caller before anything runs, with nothing changed."""
    module = resnet50()
    for copies in (False, True):
        cache = Replicas(module, ["cpu"] * 8, force_copies=copies)._cache
        t = medians({"prepare": lambda r=cache: r.prepare(8, grad=True)}, rounds=31, calls=5)
        how = "copied" if copies else "shared"
        row(
            f"ResNet-50 without BatchNorm, 8 CPU replicas, {how}: before a call",
            1e3 * t["prepare"],
            "ms",
            "at most 1",
        )


def speed_up() -> None:
    module, x = nn.Sequential(*[nn.Linear(512, 512) for _ in range(7)]), torch.randn(128, 512)
    wrapped = TupleParallel(module, ["cpu", "cpu"])

    def bare() -> None:
        thread = threading.Thread(target=module, args=(x,))
        thread.start()
        module(x)
        thread.join()

    t = medians(
        {"turn": lambda: (module(x), module(x)), "two": lambda: wrapped((x, x)), "bare": bare},
        rounds=41,
        calls=3,
    )
    row("the module whose replicas are compared", t["turn"] * 500, "ms", "")
    row(
        "2 CPU replicas of it, times as fast",
        t["turn"] / t["two"],
        "x",
        "1.85",
    )
    row("two bare threads, which is what this machine gives now", t["turn"] / t["bare"], "x", "")


def refreshes(devices: list[str]) -> None:
    home = devices[0]
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(50)]).to(home)
    parts = [torch.randn(8, 256, device=d) for d in devices]
    replicas = Replicas(module, devices, force_copies=home == "cpu")
    optimizer = torch.optim.SGD(module.parameters(), 1e-6)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def ours(forwards: int) -> None:
        optimizer.step()
        with torch.no_grad():
            for _ in range(forwards):
                replicas.run(lambda m, p: m(p), parts)

    def anew(forwards: int) -> None:
        optimizer.step()
        with torch.no_grad():
            for _ in range(forwards):
                replicas.refresh()
                replicas.run(lambda m, p: m(p), parts)

    for forwards in (1, 4, 16):
        t = medians(
            {"ours": lambda n=forwards: ours(n), "anew": lambda n=forwards: anew(n)}, rounds=11, calls=1
        )
        name = f"{'+'.join(devices)}: copying each time over resident, {forwards} forwards per step"
        row(name, t["anew"] / t["ours"], "x", "")


def replicate_of_torch() -> None:
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if len(devices) < 2:
        print("torch.nn.parallel.replicate: needs two CUDA devices")
        return
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(50)]).cuda()
    x = torch.randn(64, 256, device="cuda:0")
    peer, ours = nn.DataParallel(module), DataParallel(module, devices)
    with torch.no_grad():
        t = medians(
            {"peer": lambda: peer(x).sum().item(), "ours": lambda: ours(x).sum().item()}, rounds=11, calls=5
        )
    row("torch.nn.DataParallel over tp_dp_gather.DataParallel, evaluation", t["peer"] / t["ours"], "x", "")


def collate() -> None:
    for shape in ((64,), (3, 64, 64)):
        collate_items([(torch.randn(shape), i) for i in range(128)], shape)


def collate_items(items: list[object], shape: tuple[int, ...]) -> None:
    ours = default_collate(2)

    def chunked() -> object:
        x, y = torch_collate(items)
        return x.chunk(2), y.chunk(2)

    t = medians({"torch": chunked, "ours": lambda: ours(items)}, rounds=31, calls=20)
    row(
        f"tp_collate over torch's default_collate and chunk, 128 of {shape}",
        t["ours"] / t["torch"],
        "x",
        "at most 1.1",
    )


def loss_in_parts() -> None:
    classes, rows = 20_000, 128
    module, x = nn.Linear(32, classes), torch.randn(rows, 32)
    target = torch.randint(classes, (rows,))
    whole, parts = (DataParallel(module, ["cpu", "cpu"], gather_to_one_device=g) for g in (True, False))
    criterion = nn.CrossEntropyLoss()
    t = medians(
        {
            "gathered": lambda: criterion(whole(x), target).backward(),
            "in parts": lambda: parts.apply_loss(criterion, parts(x), target).backward(),
        },
        rounds=11,
        calls=1,
    )
    row("criterion on gathered outputs over apply_loss, time", t["gathered"] / t["in parts"], "x", "")
    gathered = rows * classes * 4 / 2**20
    row(
        "bytes that travel to the first device: outputs, MiB", gathered / 2, "MiB", "with apply_loss: 8 bytes"
    )


def main() -> None:
    torch.set_num_threads(1)
    wrapping()
    preparing()
    speed_up()
    refreshes(["cpu", "cpu"])
    if torch.cuda.is_available():
        refreshes(["cuda:0", "cpu"])
    replicate_of_torch()
    collate()
    loss_in_parts()


if __name__ == "__main__":
    with results:
        main()
