"""The predicted idle time is that of the published formulas, and "auto" takes the least."""

import json
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_pipeline import PipelineOptions

# private: no public name simulates
from tp_pipeline._schedule import COSTS, Orders, choose_schedule, idle_share, most_kept, timeline
from tp_trainer import Trainer

SCHEDULES = [name for name in get_args(get_type_hints(PipelineOptions)["schedule"]) if name != "auto"]


def predicted(parts):
    """Return the idle share of each schedule on two ranks, and the activations that it keeps."""
    found = {}
    for name in SCHEDULES:
        orders = Orders(name, 2)
        order = orders.learning(parts)
        spans = timeline(order, orders.stages - 1)
        found[name] = idle_share(spans), max(map(most_kept, order.values()))
    return found


def test_idle_shares_are_those_of_the_formulas():
    found = predicted(8)
    of_few_blocks, of_many = (choose_schedule(SCHEDULES, 2, 8, blocks)[0] for blocks in (2, 8))
    for name in ("GPipe", "1F1B"):
        assert found[name][0] == pytest.approx(1 / 9)  # (p - 1) / (m + p - 1)
    for name in ("LoopedBFS", "Interleaved1F1B"):
        assert found[name][0] == pytest.approx(1 / 17)  # (p - 1) / (2 m + p - 1)
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert found[name][0] < 1 / 17
    assert [found[name][1] for name in ("GPipe", "1F1B", "ZBVZeroBubble")] == [8, 2, 4]
    assert of_few_blocks == "1F1B"
    assert found[of_many][0] == min(idle for idle, kept in found.values() if kept <= 4)


def test_what_a_stage_has_made_is_sent_before_the_next_work():
    # DualPipeV pairs a forward with a backward, after which torch sends what both have made.
    for name in SCHEDULES:
        orders = Orders(name, 4)
        for order in orders.learning(8).values():
            last = None
            for work in order:
                if work.kind in {"SEND_F", "SEND_B"}:
                    assert (work.stage, work.part) == (last.stage, last.part)
                    assert last.kind in {"F": "F", "B": "BI"}[work.kind[-1]]
                elif not work.kind.startswith("RECV"):
                    last = work


def test_what_a_rank_needs_travels_while_it_computes():
    for name in SCHEDULES:
        orders = Orders(name, 4, is_early=True)
        for order in orders.learning(8).values():
            computed = [w for w in order if w.kind in COSTS]
            for place, work in enumerate(order):
                if work.kind.startswith("RECV"):
                    ahead = next(w for w in order[place:] if w.kind in COSTS)
                    needs_it = ahead[1:] == work[1:] and ahead.kind in {"F": "F", "B": "BI"}[work.kind[-1]]
                    assert not needs_it or ahead == computed[0]


def traced(path, schedule):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 4)), batch_size=8)
    options = {"pipeline": {"schedule": schedule, "trace": path}}
    with Trainer(backend="pipeline", devices="cpu", progress=False, options=options) as trainer:
        trainer.fit(model, optimizer, loader, step=lambda m, b: F.mse_loss(m(b[0]), b[1]))
        return trainer.session.options.schedule


def test_a_trace_has_the_work_of_all_stages(pair, tmp_path):
    path = tmp_path / "trace.json"
    first, second = pair.run(traced, str(path), "auto")
    assert first == second != "auto"
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    forwards = {(e["args"]["stage"], e["args"]["micro-batch"]) for e in events if "forward" in e["name"]}
    assert forwards == {(stage, part) for stage in range(Orders(first, 2).stages) for part in range(8)}
    for rank in range(2):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == rank)
        assert all(end <= begin + 1 for (_, end), (begin, _) in pairwise(own))


def outputs():
    """Return a long output of a step, and what one device has."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 3000))
    batch = torch.ones(8, 4)
    with Trainer(backend="pipeline", devices="cpu", progress=False) as trainer, torch.no_grad():
        expected = model(batch)
        model = trainer.prepare(model)
        output = trainer.run(lambda m, b: {"loss": m(b).mean(), "rows": m(b)}, model, batch)
        return output["rows"], expected


def test_each_rank_has_the_whole_outputs_of_a_step(pair):
    for output, expected in pair.run(outputs):
        torch.testing.assert_close(output, expected)


def test_auto_takes_neither_stages_nor_cuts():
    with pytest.raises(ConfigError, match="'auto' decides how many stages"):
        PipelineOptions(schedule="auto", stages_per_rank=2)


@pytest.mark.parametrize(
    ("schedule", "stages", "message"),
    [
        ("ZBVZeroBubble", 3, "has two stages on each rank; leave stages_per_rank out, got 3"),
        ("DualPipeV", 1, "has two stages on each rank; leave stages_per_rank out, got 1"),
        ("1F1B", 2, "has one stage on each rank, got stages_per_rank=2; take 'Interleaved1F1B'"),
    ],
)
def test_a_schedule_of_another_number_of_stages_is_refused(schedule, stages, message):
    with pytest.raises(ConfigError, match=message):
        PipelineOptions(schedule=schedule, stages_per_rank=stages)
