"""Programs of other projects, unchanged but for the lines of their loops: the numbers of their own loops."""

import importlib.util
import logging

import pytest
import torch
from tp_core.errors import TpError
from tp_trainer import Trainer

from tests.integration.programs_of_others import PROGRAMS

for _module in ("tp_tuple", "tp_dp_gather", "tp_testing"):
    pytest.importorskip(_module)

HERE = {name: p for name, p in PROGRAMS.items() if all(map(importlib.util.find_spec, p.needs))}
"""The programs whose libraries are installed: `hatch run programs` installs them."""
DEVICES = {"single": 1, "tuple": 2, "dp-gather": 2, "ddp": 1, "fsdp": 1}


def outcomes_on(backend):
    """Return for each program its numbers, or the error that refused it, and the lines that tp printed."""
    torch.set_num_threads(1)
    found = {}
    for name, program in HERE.items():
        lines = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        loggers = [logging.getLogger(each) for each in ("tp_trainer", "tp_core")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            with Trainer(
                backend=backend,
                devices=["cpu"] * DEVICES[backend],
                seed=0,
                progress=False,
                precision=program.precision,
            ) as trainer:
                found[name] = program.ported(trainer), "", lines
        except TpError as error:
            found[name] = {}, str(error), lines
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
    return found


def check(backend, outcomes):
    for name, (values, refusal, lines) in outcomes.items():
        program = PROGRAMS[name]
        if backend in program.refused:
            assert program.refused[backend] in refusal, (name, refusal, values)
            continue
        assert not refusal, name
        if backend in program.named:
            assert any(line.startswith(program.named[backend]) for line in lines), (name, lines)
            continue
        expected = program.own()
        assert values.keys() == expected.keys(), name
        for key, value in expected.items():
            within = program.within * max(1e-3, float(value.abs().max()))
            torch.testing.assert_close(values[key], value, rtol=0, atol=within, msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_in_one_process_they_have_the_numbers_of_their_own_loops(backend, one_thread_per_operation):
    check(backend, outcomes_on(backend))


@pytest.mark.nightly
def test_on_two_ranks_they_have_the_numbers_of_their_own_loops(pair, one_thread_per_operation):
    for backend in ("ddp", "fsdp"):
        for outcomes in pair.run(outcomes_on, backend):
            check(backend, outcomes)
