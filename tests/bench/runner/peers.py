"""tp-runner against its peers, two workers each: a table of medians and ratios.

Run it as a program; it takes some minutes. ``--quick`` takes fewer and smaller rounds, ``--only
tiny,numpy`` some of the tables. Peers that are not installed are left out.
"""

import argparse
import concurrent.futures
import heapq
import importlib.util
import mmap
import multiprocessing
import os
import pickle
import statistics
import sys
import time

import numpy as np
import tp_runner

from tests.bench._results import Results

WORKERS = 2
N_TINY, N_TINY_SLOW = 2_000_000, 20_000


def square(x):
    return x * x


def plus_one(a):
    return a + 1


def sleep_skewed(i):
    time.sleep(0.1 if i % 10 == 0 else 0.01)
    return i


class Actor:
    def call(self, function, item):
        return function(item)


class Tools:
    """Each tool as a function of a function and a list, which yields results in order."""

    def __init__(self):
        fork = multiprocessing.get_context("fork")
        self._pool = fork.Pool(WORKERS)
        self._executor = concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=fork)
        self._runners = {}
        self.table = {
            "tp-runner": self.ours,
            "Pool.imap": self._pool.imap,
            "Pool.imap tuned": lambda f, items: self._pool.imap(f, items, chunksize=4096),
            "executor": self._executor.map,
            "executor tuned": lambda f, items: self._executor.map(f, items, chunksize=4096),
        }
        if importlib.util.find_spec("joblib"):
            import joblib

            call = joblib.delayed
            self._joblib = joblib.Parallel(WORKERS, return_as="generator")
            self.table["joblib"] = lambda f, items: self._joblib(call(f)(x) for x in items)
        if importlib.util.find_spec("mpire"):
            import mpire

            self._mpire = mpire.WorkerPool(WORKERS, start_method="fork")
            # It would take an array or tensor apart; it does so to a tuple instead.
            self.table["mpire"] = lambda f, items: self._mpire.imap(
                f, ((x,) for x in items), iterable_len=len(items) if hasattr(items, "__len__") else None
            )
        if importlib.util.find_spec("ray"):
            import ray
            from ray.util import ActorPool

            # Its own: without an address it joins whatever cluster this machine has.
            quiet = {"log_to_driver": False, "include_dashboard": False, "logging_level": "ERROR"}
            ray.init(address="local", num_cpus=WORKERS, **quiet)
            actor = ray.remote(Actor)
            self._actors = ActorPool([actor.remote() for _ in range(WORKERS)])
            self.table["ray ActorPool"] = self.ray
        if importlib.util.find_spec("easycore"):
            self._easy = {}
            self.table["easycore"] = self.easycore

    def ray(self, function, items):
        return self._actors.map(lambda actor, item: actor.call.remote(function, item), items)

    def easycore(self, function, items):
        from easycore.common.parallel import OrderedRunner

        if function not in self._easy:
            methods = {
                "producer_work": staticmethod(lambda device, cfg, item: function(item)),
                "consumer_init": staticmethod(lambda cfg: setattr(cfg, "results", [])),
                "consumer_work": staticmethod(lambda cfg, result: cfg.results.append(result)),
                "consumer_end": staticmethod(lambda cfg: cfg.results),
            }
            self._easy[function] = type("Easy", (OrderedRunner,), methods)(devices=WORKERS)
        return self._easy[function](items)

    def ours(self, function, items):
        if function not in self._runners:
            work = staticmethod(lambda device, cfg, item: function(item))
            kind = type("Bench", (tp_runner.OrderedRunner,), {"producer_work": work})
            self._runners[function] = kind(WORKERS, start_method="fork")
        return self._runners[function].stream(items)

    def close(self):
        for runner in [*self._runners.values(), *getattr(self, "_easy", {}).values()]:
            runner.close()
        self._pool.terminate()
        self._executor.shutdown()
        if hasattr(self, "_mpire"):
            self._mpire.terminate()


def cycled(made):
    """Return what gives n of these, over and over: making them shall not be measured."""
    return lambda n_items: [made[i % len(made)] for i in range(n_items)]


def rate(tool, function, make, n_items):
    items = make(n_items)
    began = time.perf_counter()
    n_got = sum(1 for _ in tool(function, items))
    assert n_got == n_items
    return n_items / (time.perf_counter() - began)


def table(results, title, tools, function, make, sizes, *, rounds):
    figures = {name: [] for name in tools.table}
    for _ in range(rounds):  # interleaved, so that noise hits all alike
        for name, tool in tools.table.items():
            n_items = sizes.get(name, sizes["others"])
            figures[name].append(rate(tool, function, make, n_items))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ours = medians["tp-runner"]
    for name, value in medians.items():
        results.add(f"{title}, {name}", value, "items/s")
        if name != "tp-runner":
            results.add(f"{title}, {name}: ratio", ours / value, "x as fast")


def many_workers(results):
    """More workers than cores, who sleep: how much of the time they are busy, of the least there can be."""
    n_workers, n_items = 8, 800
    ends = [0.0] * n_workers  # each item goes to whom it can begin with first, and nothing costs anything
    for i in range(n_items):
        heapq.heapreplace(ends, ends[0] + (0.1 if i % 10 == 0 else 0.01))
    work = staticmethod(lambda device, cfg, item: sleep_skewed(item))
    kind = type("Bench", (tp_runner.OrderedRunner,), {"producer_work": work})
    with multiprocessing.get_context("fork").Pool(n_workers) as pool, kind(n_workers) as runner:
        tools = {"tp-runner": runner.stream, "Pool.imap": lambda items: pool.imap(sleep_skewed, items)}
        figures = {name: [] for name in tools}
        for _ in range(3):
            for name, tool in tools.items():
                figures[name].append(rate(lambda _, items, t=tool: t(items), None, range, n_items))
        for name, rates in figures.items():
            share = statistics.median(rates) * max(ends) / n_items
            results.add(f"sleeps of 10 and 100 ms, 8 workers, {name}: share of the ideal", share, "")


def limits(results):
    block = bytes(64 << 20)
    memory = mmap.mmap(-1, len(block))
    for name in ("memory, fresh", "memory, reused"):
        began = time.perf_counter()
        memory[:] = block
        results.add(f"copy into shared {name}", len(block) / (time.perf_counter() - began) / 1e9, "GB/s")
    array = np.zeros(8 << 20)
    began = time.perf_counter()
    pickle.loads(pickle.dumps(array, 5))
    results.add("pickle in band and back", array.nbytes / (time.perf_counter() - began) / 1e9, "GB/s")
    reader, writer = os.pipe()
    n_blocks, block = 2000, bytes(1 << 16)
    if not (pid := os.fork()):
        for _ in range(n_blocks):
            os.write(writer, block)
        os._exit(0)
    os.close(writer)
    began, n_read = time.perf_counter(), 0
    while data := os.read(reader, 1 << 16):
        n_read += len(data)
    os.waitpid(pid, 0)
    os.close(reader)
    results.add("pipe", n_read / (time.perf_counter() - began) / 1e9, "GB/s")


def read_ahead(results, tools):
    for name, tool in tools.table.items():
        n_read, most = 0, 0

        def items():
            nonlocal n_read
            while n_read < 100_000:
                n_read += 1
                yield n_read

        stream = tool(square, items())
        for n_got, _ in enumerate(stream, 1):
            time.sleep(0.001)
            most = max(most, n_read - n_got)
            if n_got == 200:
                break
        if hasattr(stream, "close"):
            stream.close()
        results.add(f"read ahead of a slow consumer, of 100,000, {name}", most, "items")


PARTS = {"limits", "tiny", "skewed", "numpy", "torch", "memory"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(sorted(PARTS)))
    options = parser.parse_args()
    only = set(options.only.split(","))
    rounds = 3 if options.quick else 7
    with Results("runner" if only == PARTS else f"runner-{'-'.join(sorted(only))}") as results:
        measure(results, only, rounds)


def measure(results, only, rounds):
    if "limits" in only:
        limits(results)
    tools = Tools()
    if "tiny" in only:
        fast = {"tp-runner", "Pool.imap tuned", "executor tuned"}
        sizes = dict.fromkeys(fast, N_TINY) | {
            "joblib": 200_000,
            "ray ActorPool": 2000,
            "others": N_TINY_SLOW,
        }
        table(results, "x * x on integers", tools, square, range, sizes, rounds=rounds)
    few = {name: tool for name, tool in tools.table.items() if "tuned" not in name}
    tools.table, whole = few, tools.table
    if "skewed" in only:
        table(results, "sleeps of 10 and 100 ms", tools, sleep_skewed, range, {"others": 100}, rounds=2)
        ideal = WORKERS / 0.019
        share = results.figures["sleeps of 10 and 100 ms, tp-runner"] / ideal
        results.add("sleeps of 10 and 100 ms, tp-runner: share of the ideal", share, "")
        many_workers(results)
    if "numpy" in only:
        for title, n, count in (("1 MB", 1 << 17, 300), ("10 KB", 1280, 4000)):
            make = cycled([np.full(n, 1.0) for _ in range((32 << 20) // (8 * n))])
            table(results, f"{title} arrays", tools, plus_one, make, {"others": count}, rounds=rounds)
    if "torch" in only and importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
        for title, n, count in (("1 MB", 1 << 18, 300), ("10 KB", 2560, 2000)):
            make = cycled([torch.full((n,), 1.0) for _ in range((32 << 20) // (4 * n))])
            table(results, f"{title} tensors", tools, plus_one, make, {"others": count}, rounds=rounds)
    if "memory" in only:
        read_ahead(results, tools)
    tools.table = whole
    tools.close()


if __name__ == "__main__":
    sys.exit(main())
