"""Backends with one fault each, for the tests of the kit that has to catch it."""

import pytest
from tp_core.plugins import Backend, Verdict
from tp_core.sessions import ProcessGroupSession, join_process_group
from tp_testing import BackendConformance


class TrueSession(ProcessGroupSession):
    """A session without a fault, which the faulty ones are made of."""

    def prepare_model(self, model):
        return self.average_gradients(model, find_unused_parameters=True)


def kit_of(altered):
    """Return the kit for a backend that opens sessions of the class ``altered``."""

    class Altered(Backend):
        name = "altered"

        def assess(self, job):
            return Verdict.fits(1, "it is for tests")

        def open(self, job):
            self.parse_options(job)
            leave = join_process_group(job.environment, device=job.devices[0])
            return altered(job, leave=leave)

    class Kit(BackendConformance):
        __test__ = False
        backend = Altered
        processes = 2

    return Kit()


def each_check_once(caught):
    """Return the cases as parameters: the first fault that a check catches is fast, its others are slow."""
    first = {test: altered for altered, test, *_ in reversed(caught)}
    return [
        pytest.param(altered, test, rest, marks=() if first[test] is altered else pytest.mark.slow)
        for altered, test, *rest in caught
    ]
