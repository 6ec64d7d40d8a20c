"""The table of mistakes: arguments that are refused before a worker starts, with what to do."""

import os

import pytest
import tp_runner
from tp_core.errors import ConfigError, DeviceError
from tp_runner import Executor, OrderedRunner, Pipeline

HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def runner(n_workers=1, cfg=None, **options):
    return lambda: OrderedRunner(n_workers, cfg, **options)


def pipeline(**options):
    return Pipeline(engine="thread", **options)


OPTIONS = [
    (runner(retry=1), "unknown option 'retry' of engine 'process'; there are: batch, collate"),
    (runner(retry_delay=1.0), "unknown option 'retry_delay' .*; did you mean 'retry_delay_s'"),
    (runner(worker_lifespan=3), "unknown option 'worker_lifespan' .*; it is 'max_items_per_worker' here"),
    (runner(cpu_ids=[0]), "unknown option 'cpu_ids' .*; it is 'cpus' here"),
    (runner(engine="steam"), "no engine is called 'steam'"),
    (runner(max_retries=-1), "max_retries must be a whole number of at least 0, got -1"),
    (runner(on_error="ignore"), "on_error must be one of 'raise', 'return', got 'ignore'"),
    (runner(start_method="vfork"), "start_method must be one of 'forkserver', 'spawn', 'fork'"),
    (runner(log_level="LOUD"), "log_level must be a level of logging such as .*, got 'LOUD'"),
    (runner(timeout_s=0), "timeout_s must be a positive number, got 0"),
    (runner(retry_delay_s=1.0), "retry_delay_s is about items that are tried again; give max_retries= too"),
    (runner(retry_delay_s=0, max_retries=1), "retry_delay_s must be a positive number, got 0"),
    (runner(retry_delay_s="1", max_retries=1), "retry_delay_s must be a positive number, got '1'"),
    (runner(cfg=3), "a mapping, a namespace, a dataclass or None, got int"),
    # of other engines
    (runner(resources={"num_cpus": 2}), "engine 'process' has no use for resources=.*: only Ray places"),
    (runner(placement="spread"), "engine 'process' has no use for placement='spread': only Ray"),
    (runner(engine="thread", timeout_s=1.0), "a thread cannot be stopped"),
    (runner(engine="thread", max_bytes=1 << 20), "no use for max_bytes=1048576: .* handed over as they are"),
    (runner(engine="thread", max_items_per_worker=3), "only processes are replaced"),
    (runner(engine="inline", max_restarts=1), "there is no worker"),
]
BATCHES = [
    (runner(max_wait_s=1.0), "max_wait_s is about batches; give batch="),
    (runner(collate=list), "collate is about batches; give batch="),
    (runner(batch=2, collate=3), "collate must be a function of a list of items, got 3"),
    (runner(batch=0), "batch must be a whole number of at least 1, got 0"),
]
PIPELINES = [
    (lambda: Pipeline(batch=2), "batch=2 is given to the stage"),
    (lambda: pipeline().map(abs, batch=0), "batch must be a whole number"),
    (lambda: pipeline().map(abs, collate=list), "collate is about batches; give batch= too"),
    (lambda: pipeline().stream([1]), "a pipeline needs a stage"),
    (lambda: pipeline(timeout_s=1).map(abs).stream([1]), "no use for timeout_s"),
]
ENVIRONMENTS = [
    (runner(env="A=1"), r"env must map names .* to their values, such as \{'TZ': 'UTC'\}, got 'A=1'"),
    (runner(env={"A": 1}), r"env\['A'\] must be a string, or None to remove the variable, got 1"),
    (runner(env={"A": "\0"}), r"env\['A'\] must be a string"),
    (runner(env={"A=B": "1"}), "env has 'A=B', which cannot be the name of a variable"),
    (runner(env={1: "1"}), "env has 1, which cannot be the name"),
    (
        runner(env={"OMP_NUM_THREADS": "2"}, threads=2),
        "threads=2 and env's OMP_NUM_THREADS='2' say the same; give one",
    ),
    (runner(env={"A": "1"}, engine="thread"), "engine 'thread' has no use for env=.*those of their process"),
    (runner(env={"A": "1"}, engine="inline"), "engine 'inline' has no use for env=.*there is no worker"),
]
PRELOADS = [
    (lambda: Executor(1, preload="json"), "preload must be names of modules"),
    (lambda: Executor(1, preload=["no_such.module"]), "preload names the module 'no_such.module', and there"),
    (lambda: Executor(1, preload=["json"], start_method="fork"), "start_method='fork' has none"),
    (lambda: Executor(1, preload=["json"], engine="thread"), "no use for preload"),
]
CORES = [
    (runner(2, cpus="all"), r"cpus must be 'split', or cores .* such as \[\{0, 1\}, \{2, 3\}\], got 'all'"),
    (runner(2, cpus=3), "cpus must be 'split', or cores for each worker"),
    (runner(2, cpus=[{0}]), r"cpus=\[\{0\}\] has cores for 1 workers, and there are 2; give each its own"),
    (runner(2, cpus=[set(), {0}]), r"cpus must have at least one core, .* for worker 0, got set\(\)"),
    (runner(2, cpus=[set(HERE[:1]), "a"]), "at least one core, by its number, for worker 1, got 'a'"),
    (runner(2, cpus=[HERE[:1], [True]]), r"for worker 1, got \[True\]"),
    (runner(2, cpus=[{4000}, {0}]), "cpus has core 4000 for worker 0, and this process may use .* alone"),
    (runner(2, cpus="split", engine="thread"), "engine 'thread' has no use for cpus='split': threads share"),
    (runner(2, cpus="split", engine="inline"), "engine 'inline' has no use for cpus='split': there is no"),
]
MISTAKES = OPTIONS + BATCHES + PIPELINES + ENVIRONMENTS + PRELOADS + (CORES if HERE else [])


def test_each_mistake_is_answered():
    for call, message in MISTAKES:
        with pytest.raises(ConfigError, match=message):
            call()


def test_no_devices_are_refused():
    for devices in (0, -1, [], ()):
        with pytest.raises(DeviceError):
            tp_runner.map(abs, [1], devices=devices)
