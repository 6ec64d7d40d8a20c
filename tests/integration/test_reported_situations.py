"""Training programs from public bug reports have the numbers of a loop by hand, on every layout."""

import functools
from pathlib import Path

import pytest
import torch

from tests.integration.reported_situations import SITUATIONS
from tests.integration.situation_runs import LAYOUTS, by_hand, outcome_of

for _module in ("tp_tuple", "tp_dp_gather", "tp_testing"):
    pytest.importorskip(_module)


@functools.cache
def hand_numbers(name):
    return by_hand(SITUATIONS[name].program)


def outcomes_on(layout, folder):
    """Return what becomes of each situation on a layout, in this process: uninterrupted, and resumed."""
    found = {}
    for name, situation in SITUATIONS.items():
        found[name] = outcome_of(situation.program, LAYOUTS[layout])
        if found[name].numbers is not None:
            resumed = Path(folder) / name
            found[f"{name}, resumed"] = outcome_of(situation.program, LAYOUTS[layout], resumed)
    return found


def difference(found, expected, within):
    """Return in words where numbers differ, or an empty text."""
    if found.keys() != expected.keys():
        return f"has {sorted(found.keys() ^ expected.keys())} alone"
    for name, value in expected.items():
        scale = max(1e-3, float(value.abs().max())) if value.numel() else 1.0
        if found[name].shape != value.shape:
            return f"{name} has shape {tuple(found[name].shape)} and not {tuple(value.shape)}"
        apart = (found[name] - value).abs()
        if not torch.equal(found[name].isnan(), value.isnan()) or (apart > within * scale).any():
            return f"{name} is {found[name].flatten()[:4].tolist()} and not {value.flatten()[:4].tolist()}"
    return ""


def problem(outcome, situation, expected, backend, *, is_resumed):
    """Return what is wrong in one outcome: other numbers, a crash, or a refusal that is not declared."""
    if outcome.crash:
        return outcome.crash
    refusal = situation.refused.get(backend) or (situation.refused.get("resumed") if is_resumed else None)
    if outcome.refusal:
        return "" if refusal is not None and refusal in outcome.refusal else outcome.refusal
    if refusal is not None:
        return "is refused no more"
    if backend in situation.named:
        start = situation.named[backend]
        return "" if any(text.startswith(start) for text in outcome.warnings) else "is named no more"
    if is_resumed and situation.differs_resumed:
        return ""
    text = difference(outcome.numbers, expected, situation.within)
    if backend in situation.differs:
        return "" if text else "differs no more"
    return text


def problems(outcomes, backend):
    """Return what is wrong in the outcomes of one rank, by the situations' names."""
    wrong = {}
    for key, outcome in outcomes.items():
        name = key.removesuffix(", resumed")
        text = problem(outcome, SITUATIONS[name], hand_numbers(name), backend, is_resumed=key != name)
        if text:
            wrong[key] = text
    return wrong


IN_THE_NIGHT = {"ddp 2", "ddp 3", "fsdp 3"}
EACH = [
    pytest.param(n, marks=pytest.mark.nightly if n in IN_THE_NIGHT else pytest.mark.slow) for n in LAYOUTS
]


@pytest.mark.parametrize("layout", EACH)
def test_programs_of_public_reports_train_as_by_hand(layout, tmp_path, one_thread_per_operation):
    processes, backend = LAYOUTS[layout].processes, LAYOUTS[layout].backend
    if processes == 1:
        assert problems(outcomes_on(layout, tmp_path), backend) == {}
        return
    from tp_testing import RankPool

    with RankPool(processes) as ranks:
        for outcomes in ranks.run(outcomes_on, layout, tmp_path):
            assert problems(outcomes, backend) == {}
