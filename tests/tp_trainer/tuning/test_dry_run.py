"""A dry run meets what a run would meet later, and leaves no trace."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from tp_core.errors import StateError
from tp_testing import run_ranks
from tp_trainer import SchedulerOptions, Trainer
from tp_trainer.tuning import dry_run

from tests.reference_training import squared_error
from tests.tp_trainer.tuning.test_tuning import BACKENDS, adam, loader, network


def history_after(backend, *, dry, folder=None):
    """Return the losses of a run, with a dry run before it or without."""
    with Trainer(**BACKENDS[backend], seed=0, progress=False) as trainer:
        assert trainer.session  # several ranks are seeded apart where it opens
        model = network()
        optimizer = adam(model)
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=12)
        counts = {"seen": 0}
        train = loader()
        arguments = {
            "step": squared_error,
            "validation": {"a": loader(), "b": loader(8)},
            "scheduler": SchedulerOptions(scheduler, every="step"),
            "state": counts,
            "clip_norm": 1.0,
        }
        if dry:
            before = copy.deepcopy((model.state_dict(), scheduler.state_dict(), torch.get_rng_state()))
            found = dry_run(trainer, model, optimizer, train, folder=folder, **arguments)
            assert found.checkpoint_nbytes > found.exported_nbytes > 0
            assert list(found.seconds) == ["train, validate and save", "resume and continue", "export"]
            after = model.state_dict(), scheduler.state_dict(), torch.get_rng_state()
            assert all(torch.equal(v, after[0][name]) for name, v in before[0].items())
            assert before[1] == after[1]
            assert torch.equal(before[2], after[2])
            assert counts == {"seen": 0}
        history = trainer.fit(model, optimizer, train, epochs=2, **arguments)
        return [record.metrics for record in history]


@pytest.mark.parametrize("backend", ["single", pytest.param("tuple", marks=pytest.mark.slow)])
def test_a_run_after_a_dry_run_is_the_run_without_it(backend, tmp_path):
    assert history_after(backend, dry=True, folder=tmp_path / "run") == history_after(backend, dry=False)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_ranks_do_it_together(tmp_path):
    plain = run_ranks(history_of, 2, False, tmp_path)
    assert run_ranks(history_of, 2, True, tmp_path) == plain
    assert list(tmp_path.iterdir()) == []


def history_of(dry, folder):
    return history_after("ddp", dry=dry, folder=folder)


def test_what_would_fail_at_the_first_validation_fails_now(tmp_path):
    def bad_step(model, batch):
        if not model.training:
            raise KeyError("missing")
        return squared_error(model, batch)

    with Trainer(devices="cpu", progress=False) as trainer:
        model = network()
        with pytest.raises(KeyError) as caught:
            dry_run(
                trainer, model, adam(model), loader(), step=bad_step, validation=loader(), folder=tmp_path
            )
    assert caught.value.__notes__ == ["in the dry run, in its part: train, validate and save"]
    assert list(tmp_path.iterdir()) == []


def test_state_that_cannot_be_saved_is_met_now():
    class Odd:
        def state_dict(self):
            return {"a": open}

        def load_state_dict(self, state):
            pass

    with Trainer(devices="cpu", progress=False) as trainer:
        model = network()
        with pytest.raises(StateError):
            dry_run(trainer, model, adam(model), loader(), step=squared_error, state={"odd": Odd()})
