"""Runners that do what each item says, for the tests of what goes wrong."""

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

from tp_runner import OrderedRunner, UnorderedRunner

ENGINES = [{"start_method": "fork"}, {}, {"engine": "thread"}, {"engine": "inline"}]
IDS = ["fork", "forkserver", "thread", "inline"]


class Obedient:
    """Does what each item says."""

    @staticmethod
    def producer_work(device, cfg, item):
        match item:
            case int():
                return item * 10
            case ("raise", error):
                raise error
            case ("raise-made", name):
                error = MADE[name]()
                raise error
            case ("return", make):
                return MADE[make]()
            case ("kill", number):
                faulthandler.disable()  # it is meant to die, and not to talk about it
                os.kill(os.getpid(), number)
                time.sleep(600)
            case ("kill-once", path):
                if not Path(path).exists():
                    Path(path).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(600)
                return "survived"
            case ("raise-times", path, times):
                with Path(path).open("a+") as file:
                    file.write("x")
                    file.seek(0)
                    if len(file.read()) <= times:
                        raise ValueError(times)
                return "at last"
            case ("sleep", seconds):
                time.sleep(seconds)
                return "slept"
            case ("pid",):
                return os.getpid()
        raise AssertionError(item)


class Ordered(Obedient, OrderedRunner):
    pass


class Unordered(Obedient, UnorderedRunner):
    pass


class NoPickleError(Exception):
    def __reduce__(self):
        raise RuntimeError("cannot pickle this")


class NoUnpickleError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("cannot print this")


class Holder:
    def __init__(self):
        self.parts = {"inner": [1, threading.Lock()]}


MADE = {
    "no-pickle": NoPickleError,
    "no-unpickle": lambda: NoUnpickleError("one", "two"),
    "no-text": NoTextError,
    "exit": lambda: SystemExit(3),
    "holder": Holder,
    "lambda": lambda: lambda: 7,
}
