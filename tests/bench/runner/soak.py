"""Millions of items through workers that are killed at random: each one exactly once, no leak.

Run it as a program. It ends with an error if an item is lost or doubled, if memory grows, or if a
descriptor, a process or a segment of shared memory is left. ``--minutes 5`` adds five minutes of streams,
early breaks, futures and kills by turns.
"""

import argparse
import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from tp_runner import OrderedRunner

from tests.bench._results import Results


class Same(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return item


class Killer(threading.Thread):
    """Kills workers at random, so many times within a pass over so many items."""

    def __init__(self, n_kills, n_items, start_method):
        super().__init__(daemon=True)
        # Not at the very end, where a worker may have nothing left to do and nobody looks any more.
        span = range(n_items // 20, n_items - n_items // 20)
        self.due = sorted(random.Random(0).sample(span, n_kills))
        self.forkserver = start_method == "forkserver"
        self.patience = n_items // 10_000
        self.patient_until = 0
        self.n_done = 0
        self.n_killed = 0
        self.over = False

    def run(self):
        me = psutil.Process()
        killed = set()  # a signal to one that is dead, but not yet buried, would kill nobody
        while self.due and not self.over:
            if self.n_done >= self.due[0]:
                with contextlib.suppress(psutil.Error, IndexError):  # it is ending by itself
                    parents = me.children() if self.forkserver else [me]
                    workers = [p for parent in parents for p in parent.children()]
                    victim = random.choice([p for p in workers if p.pid not in killed])
                    victim.send_signal(signal.SIGKILL)
                    killed.add(victim.pid)
                    self.due.pop(0)
                    self.n_killed += 1
            time.sleep(0.001)

    def wait_for_kill(self, n_done):
        """Say how far the pass is; when a kill is due, give it a moment to happen."""
        self.n_done = n_done
        if n_done < self.patient_until:  # the one before has just been waited for, in vain
            return
        self.patient_until = n_done + self.patience
        deadline = time.monotonic() + 0.05
        while self.due and n_done >= self.due[0] and time.monotonic() < deadline:
            time.sleep(0.0005)


def soak(results, title, make, check, n_items, n_kills, start_method):
    killer = Killer(n_kills, n_items, start_method)
    me = psutil.Process()
    began = time.perf_counter()
    early = late = 0
    with Same(2, max_restarts=10 * n_kills, start_method=start_method) as runner:
        killer.start()
        for n, result in enumerate(runner.stream(make(n_items))):
            check(n, result)
            if killer.due and n >= killer.due[0]:
                killer.wait_for_kill(n)
            if n == n_items // 4:
                early = me.memory_info().rss
        assert n == n_items - 1, "items were lost"
        late = me.memory_info().rss
        killer.over = True
        killer.join()
        deaths = sum(worker.deaths for worker in runner.stats().workers)
        print(runner.stats())
    seconds = time.perf_counter() - began
    results.add(f"{title}: items", n_items, "")
    results.add(f"{title}: time", seconds, "s")
    results.add(f"{title}: resident after a quarter", early >> 20, "MiB")
    results.add(f"{title}: resident at the end", late >> 20, "MiB")
    assert deaths == killer.n_killed == n_kills, "a death was not noticed, or a worker not killed"
    assert late < early + (128 << 20), "memory grows"
    return seconds, killer.n_killed, deaths


def mixed(results, minutes, start_method):
    """For so long: whole streams, streams that are left early, futures, and kills between all of it."""
    me, rng = psutil.Process(), random.Random(0)
    end = time.monotonic() + 60 * minutes
    seen, n_items, n_kills = [], 0, 0
    with Same(2, max_restarts=1_000_000, start_method=start_method) as runner:
        while time.monotonic() < end:
            size = rng.choice((1, 1000, 100_000))
            items = [torch.full((size,), n) for n in range(rng.randrange(10, 200))]
            if rng.random() < 0.3:
                servers = [me] if start_method != "forkserver" else me.children()
                workers = [worker for server in servers for worker in server.children()]
                with contextlib.suppress(psutil.Error, IndexError):
                    rng.choice(workers).kill()
                    n_kills += 1
            kind = rng.choice(("whole", "break", "submit"))
            if kind == "submit":
                futures = [runner.submit(item) for item in items]
                given = [future.result() for future in futures]
            else:
                stop = len(items) if kind == "whole" else rng.randrange(1, len(items))
                with runner.stream(iter(items)) as stream:
                    given = list(itertools.islice(stream, stop))
            assert [int(tensor[-1]) for tensor in given] == list(range(len(given))), (
                "lost, doubled or mixed up"
            )
            n_items += len(given)
            del items, given
            seen.append((me.num_fds(), me.num_threads(), me.memory_info().rss))
    quarter = len(seen) // 4
    for name, column, room in (("descriptors", 0, 16), ("threads", 1, 8), ("memory", 2, 128 << 20)):
        early = max(values[column] for values in seen[quarter : 2 * quarter] or seen)
        late = max(values[column] for values in seen[-quarter or -1 :])
        results.add(f"mixed: {name}, in the second quarter", early, "")
        results.add(f"mixed: {name}, in the last quarter", late, "")
        assert late <= early + room, f"{name} grow: {early} to {late}"
    results.add("mixed: items", n_items, "")
    results.add("mixed: workers killed", n_kills, "")


def check_number(n, result):
    if n != result:
        msg = f"item {n} came as {result}"
        raise AssertionError(msg)


def check_tensor(n, tensor):
    if tensor.shape != (1 << 18,) or int(tensor[0]) != n or int(tensor[-1]) != n:
        msg = f"tensor {n} came as {tensor}"
        raise AssertionError(msg)


def tensors(n_items):
    return (torch.full((1 << 18,), n, dtype=torch.int32) for n in range(n_items))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--start-method", default="fork")
    parser.add_argument("--minutes", type=float, default=0.0, help="how long to mix all kinds of use, too")
    options = parser.parse_args()
    # A kill waits for its item's result, and a death for the next one: chunks have thousands of numbers.
    if options.items < 5000 * options.kills or options.tensors < 20 * options.kills:
        parser.error("so many kills need at least 5000 numbers and 20 tensors each, or some find no worker")
    torch.set_num_threads(1)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    half = options.kills // 2
    method, rest = options.start_method, options.kills - half
    with Results("runner-soak", is_part=not options.minutes) as results:
        both = [
            soak(results, "numbers", range, check_number, options.items, half, method),
            soak(results, "tensors", tensors, check_tensor, options.tensors, rest, method),
        ]
        for name, values in zip(
            ("time", "workers killed", "deaths mended"), zip(*both, strict=True), strict=True
        ):
            results.add(name, sum(values), "s" if name == "time" else "")
        if options.minutes:
            mixed(results, options.minutes, method)
    left = len(list(Path("/proc/self/fd").iterdir())) - descriptors
    servers = 1 if options.start_method == "forkserver" else 0
    assert left <= servers, f"{left} descriptors were left"
    assert len(psutil.Process().children()) == servers, "processes were left"
    print("no item lost or doubled, no descriptor or process left")


if __name__ == "__main__":
    sys.exit(main())
