"""The caller's settings hold in the replicas' threads, and errors come back from them."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from tp_core.errors import ModelError
from tp_core.replicas import Replicas, _threads  # private: interrupts and waits at one moment of a call

X = [torch.ones(2, 3), torch.full((2, 3), 2.0)]


@pytest.fixture
def replicas():
    return Replicas(nn.Linear(3, 2), ["cpu"] * 3)


def everywhere(replicas, question):
    return replicas.run(lambda replica, part: question(), [0, 1, 2])


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode(replicas, enabled):
    with torch.set_grad_enabled(enabled):
        assert everywhere(replicas, torch.is_grad_enabled) == [enabled] * 3
    assert everywhere(replicas, torch.is_grad_enabled) == [True] * 3


def test_inference_mode(replicas):
    with torch.inference_mode():
        assert everywhere(replicas, torch.is_inference_mode_enabled) == [True] * 3
    assert everywhere(replicas, torch.is_inference_mode_enabled) == [False] * 3


def test_copies_made_in_inference_mode_can_be_trained_later():
    replicas = Replicas(nn.Linear(3, 2), ["cpu", "cpu"], force_copies=True)
    with torch.inference_mode():
        assert replicas.run(lambda r, x: r(x), X)[1].is_inference()
    sum(y.sum() for y in replicas.run(lambda r, x: r(x), X)).backward()
    assert replicas.module.weight.grad.sum().item() == 36.0


def test_parameters_made_in_inference_mode_are_copied_each_time():
    with torch.inference_mode():
        model = nn.Linear(3, 2)
        replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
        replicas.run(lambda r, x: r(x), X)
        model.weight.add_(1)
        assert torch.equal(replicas.run(lambda r, x: r(x), X)[1], model(X[1]))


def test_autocast_with_its_dtype(replicas):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtypes = replicas.run(lambda r, _: r(X[0]).dtype, [0, 1, 2])
    assert dtypes == [torch.bfloat16] * 3
    assert replicas.run(lambda r, _: r(X[0]).dtype, [0, 1, 2]) == [torch.float32] * 3


def test_gradients_of_parts_under_autocast_are_added_up_in_full_precision(replicas):
    parts = [torch.full((1, 3), value) for value in (256.0, 1.0, 1.0)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = replicas.run(lambda r, x: r(x).float().sum(), parts)
    sum(outputs).backward()
    assert torch.equal(replicas.module.weight.grad, torch.full((2, 3), 258.0))  # 256 in bfloat16


def test_default_dtype(replicas):
    torch.set_default_dtype(torch.float64)
    try:
        assert everywhere(replicas, lambda: torch.zeros(1).dtype) == [torch.float64] * 3
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device(replicas):
    with torch.device("meta"):
        assert everywhere(replicas, lambda: torch.zeros(1).device.type) == ["meta"] * 3
    assert everywhere(replicas, lambda: torch.zeros(1).device.type) == ["cpu"] * 3


def test_threads_of_one_operation(replicas):
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert everywhere(replicas, torch.get_num_threads) == [count] * 3
    finally:
        torch.set_num_threads(before)


def test_replica_0_runs_in_the_caller_and_each_other_in_a_thread_that_stays(replicas):
    barrier = threading.Barrier(3, timeout=800)

    def who():
        barrier.wait()
        return threading.get_ident()

    first, second = (everywhere(replicas, who) for _ in range(2))
    assert first == second
    assert first[0] == threading.get_ident()
    assert len(set(first)) == 3


def test_parts_run_at_the_same_time(replicas):
    barrier = threading.Barrier(3, timeout=800)
    assert sorted(everywhere(replicas, barrier.wait)) == [0, 1, 2]


class BrokenPartError(Exception):
    pass


def test_an_error_keeps_its_type_and_names_part_and_device(replicas):
    def fail(replica, part):
        if part == 1:
            raise BrokenPartError("no good")
        return part

    with pytest.raises(BrokenPartError, match="no good") as caught:
        replicas.run(fail, [0, 1, 2])
    assert caught.value.__notes__ == ["in part 1 of 3, on device cpu"]
    assert replicas.run(lambda r, part: part, [0, 1, 2]) == [0, 1, 2]


@pytest.mark.parametrize("slow", [0, 2])
def test_the_others_are_waited_for(replicas, slow):
    over = []

    def fail(replica, part):
        if part == 1:
            raise BrokenPartError
        if part == slow:
            time.sleep(0.2)
            over.append(part)

    with pytest.raises(BrokenPartError):
        replicas.run(fail, [0, 1, 2])
    assert over == [slow]


def test_all_errors_are_told(replicas):
    def fail(replica, part):
        raise BrokenPartError(f"number {part}")

    with pytest.raises(BrokenPartError, match="number 0") as caught:
        replicas.run(fail, [0, 1, 2])
    note = caught.value.__notes__[0]
    assert "part 1 on device cpu failed too: BrokenPartError('number 1')" in note
    assert "part 2" in note


def test_an_error_frees_what_the_parts_held(replicas):
    import weakref

    class Part:
        pass

    def fail(replica, part):
        raise BrokenPartError

    parts = [Part(), Part(), Part()]
    references = [weakref.ref(p) for p in parts]
    with pytest.raises(BrokenPartError):
        replicas.run(fail, parts)
    del parts
    assert [r() for r in references] == [None, None, None]


def test_system_exit_in_a_replica_ends_the_caller_and_no_thread(replicas):
    def leave(replica, part):
        if part == 2:
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        replicas.run(leave, [0, 1, 2])
    assert everywhere(replicas, lambda: 1) == [1, 1, 1]


@pytest.fixture
def interrupts():
    """Released whenever an interrupt has been raised in the main thread."""
    heard = threading.Semaphore(0)

    def handle(number, frame):
        heard.release()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield heard
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_once_the_caller_waits():
    """Interrupt the main thread when it sleeps in its wait: on its way there a signal would not wake it."""
    caller, deadline = threading.main_thread(), time.monotonic() + 800
    waits = _threads._wait.__code__
    while not (sys._current_frames()[caller.ident].f_code is waits and sleeps_on(caller.native_id)):
        if time.monotonic() > deadline:
            break  # an interrupt ends the wait of the test too, which says the rest
        time.sleep(0.001)  # so as not to hold the lock that the caller needs on its way
    interrupt()


def sleeps_on(thread_id):
    before = switches(thread_id)
    time.sleep(0.05)  # who waits for the interpreter's lock looks for it every few milliseconds
    return before is not None and before == switches(thread_id)


def switches(thread_id):
    """Return how often a thread has gone to sleep; ``None`` if it is awake."""
    status = Path(f"/proc/self/task/{thread_id}/status").read_text()
    asleep = "\nState:\tS" in status
    return re.search(r"\nvoluntary_ctxt_switches:\t(\d+)", status)[1] if asleep else None


@pytest.mark.parametrize("busy", [0, 1])
def test_an_interrupt_waits_for_the_others_and_the_next_call_works(replicas, interrupts, busy):
    begun, over = threading.Semaphore(0), []

    def work(replica, part):
        if part != 0:
            begun.release()
        elif not (begun.acquire(timeout=800) and begun.acquire(timeout=800)):
            raise TimeoutError
        if part == busy:
            interrupt() if part == 0 else interrupt_once_the_caller_waits()
        if part != 0:
            interrupts.acquire(timeout=800)
            interrupts.release()
            time.sleep(0.1)
        over.append(part)

    with pytest.raises(KeyboardInterrupt):
        replicas.run(work, [0, 1, 2])
    assert {1, 2} <= set(over)
    assert everywhere(replicas, lambda: 1) == [1, 1, 1]


def test_a_second_interrupt_gives_up_a_replica_that_hangs(interrupts):
    replicas = Replicas(nn.Linear(3, 2), ["cpu"] * 3)
    release = threading.Event()

    def hang(replica, part):
        if part == 1:
            for _ in range(2):
                interrupt_once_the_caller_waits()
                interrupts.acquire(timeout=800)
            release.wait()

    with pytest.raises(KeyboardInterrupt):
        replicas.run(hang, [0, 1, 2])
    assert not release.is_set()
    assert everywhere(replicas, lambda: 1) == [1, 1, 1]
    release.set()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_an_interrupt_as_a_task_is_handed_over_ends_the_call(monkeypatch, is_handed_over):
    """No test could time a signal so: the method raises what the signal's handler would."""
    replicas = Replicas(nn.Linear(3, 2), ["cpu"] * 3)
    assert everywhere(replicas, lambda: 1) == [1, 1, 1]
    method = _threads.ReplicaThread.start
    interrupts = [KeyboardInterrupt()]

    def interrupted(thread, job):
        if not interrupts or is_handed_over:
            method(thread, job)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(_threads.ReplicaThread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        everywhere(replicas, lambda: 1)
    assert [everywhere(replicas, lambda: 2) for _ in range(20)] == [[2, 2, 2]] * 20


@pytest.mark.parametrize("part", [0, 1])
def test_a_forward_that_calls_its_own_replicas_is_refused(replicas, part):
    def recurse(replica, number):
        if number == part:
            replicas.run(recurse, [5, 6])

    with pytest.raises(ModelError, match="would wait for itself"):
        replicas.run(recurse, [0, 1])


def test_callers_in_two_threads_take_turns(replicas):
    sums = []

    def caller():
        for _ in range(20):
            sums.append(sum(replicas.run(lambda r, part: part, [1, 2, 3])))

    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(800)
    assert sums == [6] * 40


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_makes_threads_of_its_own(replicas):
    everywhere(replicas, lambda: 1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(800)
        os._exit(0 if replicas.run(lambda r, part: part, [1, 2, 3]) == [1, 2, 3] else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("force_copies", [False, True])
def test_a_process_forked_while_another_thread_runs_the_replicas_runs_them_too(force_copies):
    replicas = Replicas(nn.Linear(3, 2), ["cpu"] * 2, force_copies=force_copies)
    inside, leave = threading.Event(), threading.Event()

    def wait(replica, part):
        inside.set()
        leave.wait(800)
        return replica(part)

    other = threading.Thread(target=replicas.run, args=(wait, X))
    other.start()
    assert inside.wait(800)
    pid = os.fork()
    if pid == 0:
        signal.alarm(800)
        replicas.run(lambda r, x: r(x), X)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    leave.set()
    other.join(800)
    assert status == 0
    assert len(replicas.run(lambda r, x: r(x), X)) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_inside_of_forward_does_not_wait_for_threads_that_it_lacks(replicas):
    caller, children = os.getpid(), []

    def fork(replica, part):
        if part == 0:
            children.append(os.fork())

    try:
        replicas.run(fork, [0, 1, 2])
    except ModelError as error:
        os._exit(0 if os.getpid() != caller and "has forked this process" in str(error) else 1)
    finally:
        if os.getpid() != caller:
            os._exit(2)
    assert os.waitpid(children[0], 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("count", [pytest.param(10), pytest.param(300, marks=pytest.mark.nightly)])
def test_processes_forked_beside_running_replicas_train_like_their_parent(count):
    """Where two threads are the first to use torch's engine after a fork, some children end by a signal."""

    def train(replicas, seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        x = torch.linspace(-1, 1, 3 * 256 * 64).view(3, 256, 64)
        for _ in range(3):
            torch.stack(replicas.run(lambda r, part: r(part), x)).square().mean().backward()
        return [p.grad for p in replicas.module.parameters()]

    def make(dropout=0.5):
        torch.manual_seed(0)
        drop = nn.Dropout(dropout) if dropout else nn.Identity()
        return Replicas(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), drop, nn.Linear(64, 8)), ["cpu"] * 3)

    expected = train(make(), seed=1)
    # Without dropout: a child that is forked while another thread draws waits for torch's generator for ever.
    is_over, own = threading.Event(), make(dropout=0)

    def run_on():
        while not is_over.is_set():
            train(own)

    other = threading.Thread(target=run_on)
    other.start()
    ended = []
    for _ in range(count):
        replicas = make()
        pid = os.fork()
        if pid == 0:
            signal.alarm(800)
            own = make() if len(ended) % 2 else replicas
            os._exit(0 if all(map(torch.equal, train(own, seed=1), expected)) else 1)
        ended.append(os.waitpid(pid, 0)[1])
    is_over.set()
    other.join(800)
    assert ended == [0] * count
