"""The kit of backends finds what sessions do to their caller, lose of states, and get wrong between three."""

import os
import random
import signal
import threading
from unittest.mock import patch

import pytest
import torch
from tp_core.errors import RankFailedError
from tp_testing import RankPool

from tests.cases import first_fast
from tests.tp_testing.altered import TrueSession, each_check_once, kit_of

# -- modes ----------------------------------------------------------------------------------------


class IgnoresAutocast(TrueSession):
    def run(self, step, model, batch):
        with torch.autocast(self.device.type, enabled=False):
            return super().run(step, model, batch)


class HasGradientsInEvaluation(TrueSession):
    def run(self, step, model, batch):
        with torch.enable_grad():
            return step(self.unwrap(model), batch)


class RunsOnAThreadOfItsOwn(TrueSession):
    def run(self, step, model, batch):
        outputs = []

        def work():
            outputs.append(super(RunsOnAThreadOfItsOwn, self).run(step, model, batch))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return outputs[0]


# -- what the process has -------------------------------------------------------------------------


class Reseeds(TrueSession):
    def prepare_model(self, model):
        torch.manual_seed(self.job.seed)
        return super().prepare_model(model)


class DrawsAlikeOnAllRanks(TrueSession):
    def prepare_model(self, model):
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        return super().prepare_model(model)


class DrawsOfPython(TrueSession):
    def prepare_loader(self, loader, **options):
        random.random()
        return super().prepare_loader(loader, **options)


class LeavesAType(TrueSession):
    def prepare_model(self, model):
        torch.set_default_dtype(torch.float64)
        return super().prepare_model(model)


class LeavesAVariable(TrueSession):
    def prepare_model(self, model):
        os.environ["OMP_NUM_THREADS"] = str(random.Random().random())
        return super().prepare_model(model)


class LeavesAHandler(TrueSession):
    def prepare_model(self, model):
        signal.signal(signal.SIGTERM, lambda *_: None)
        return super().prepare_model(model)


class LeavesAThread(TrueSession):
    def prepare_model(self, model):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().prepare_model(model)


class LeavesGradientsOff(TrueSession):
    def run(self, step, model, batch):
        output = super().run(step, model, batch)
        torch.set_grad_enabled(False)
        return output

    def backward(self, loss, share=None, **options):
        with torch.enable_grad():
            super().backward(loss, share, **options)


# -- batches, optimizers, states ------------------------------------------------------------------


class TakesPairs(TrueSession):
    def run(self, step, model, batch):
        x, y = batch
        return super().run(step, model, (x, y))


class KeepsTheLossAlone(TrueSession):
    def run(self, step, model, batch):
        output = super().run(step, model, batch)
        return {"loss": output["loss"]} if isinstance(output, dict) else output


class LooksTogether(TrueSession):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # It never answers, so that the kit need not wait long for it.
        self.wait = patch("tp_testing._backend_checks.ALONE_S", 0.5)
        self.wait.start()

    def close(self):
        self.wait.stop()
        super().close()

    def find_nonfinite(self, model):
        self.barrier()
        return super().find_nonfinite(model)


class MakesTheOptimizerAnew(TrueSession):
    def prepare_optimizer(self, optimizer):
        return type(optimizer)([dict(group) for group in optimizer.param_groups])


class KnowsFirstParametersAlone(TrueSession):
    """Gives the optimizer what has taken the place of its parameters, where it has seen these before."""

    def prepare_model(self, model):
        prepared = super().prepare_model(model)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                copies = self.__dict__.setdefault("copies", {})
                copy = copies.setdefault(id(parameter), torch.nn.Parameter(parameter.detach()))
                copy.requires_grad_(parameter.requires_grad)
                setattr(module, name, copy)
        return self.average_gradients(self.unwrap(prepared), find_unused_parameters=True)

    def prepare_optimizer(self, optimizer):
        for group in optimizer.param_groups:
            group["params"] = [self.copies[id(p)] for p in group["params"]]
        return optimizer


class StepsTheLastOptimizer(TrueSession):
    def prepare_optimizer(self, optimizer):
        if hasattr(self, "optimizer"):
            self.optimizer.step = lambda *_: None
        self.optimizer = optimizer
        return optimizer


class WrapsWhatHasNoGradients(TrueSession):
    def average_gradients(self, model, **options):
        return torch.nn.parallel.DistributedDataParallel(model, **options)


class IsMainOnItsHost(TrueSession):
    @property
    def is_main(self):
        return self.local_rank == 0


class CountsLocalRanksItself(TrueSession):
    @property
    def local_rank(self):
        return self.rank


class WeighsStandInsByNought(TrueSession):
    def backward(self, loss, share=None, *, retain_graph=False, create_graph=False):
        factor = 1.0 if share is None else share.samples * self.data_size / share.total
        (loss * factor).backward(retain_graph=retain_graph)


class KeepsNoBuffers(TrueSession):
    def run(self, step, model, batch):
        before = [buffer.clone() for buffer in model.buffers()]
        output = super().run(step, model, batch)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.data.copy_(value)
        return output


class RunsTwice(TrueSession):
    def run(self, step, model, batch):
        with torch.no_grad():
            step(self.unwrap(model), batch)
        return super().run(step, model, batch)


class PartsWithoutWhatIsFrozen(TrueSession):
    def state_parts(self, model):
        frozen = {n for n, p in self.unwrap(model).named_parameters() if not p.requires_grad}
        return {n: t for n, t in super().state_parts(model).items() if n not in frozen}


class PartsOfTheFirstTime(TrueSession):
    parts = None

    def state_parts(self, model):
        if self.parts is None:
            self.parts = {n: t.clone() for n, t in super().state_parts(model).items()}
        return self.parts


# -- right between two ranks ----------------------------------------------------------------------


class HalvesForMeans(TrueSession):
    def reduce(self, value, op="sum"):
        return super().reduce(value, "sum") / 2 if op == "mean" else super().reduce(value, op)


class AddsItsNeighbours(TrueSession):
    def reduce(self, value, op="sum"):
        if op != "sum":
            return super().reduce(value, op)
        everyones = self.gather_objects(value)
        return value + everyones[(self.rank + 1) % self.world_size]


class GathersFromItself(TrueSession):
    def gather(self, value):
        everyones = self.gather_objects(value)
        mine, other = everyones[self.rank], everyones[self.rank ^ 1 if self.rank < 2 else 0]
        return torch.cat([mine, other] if self.rank == 0 else [other, mine])


class TellsTwo(TrueSession):
    def broadcast(self, value, *, src=0, where=None):
        return super().broadcast(value, src=min(src, 1))


class ListsTwo(TrueSession):
    def gather_objects(self, value, *, where=None):
        return super().gather_objects(value)[:2]


MODES = "test_a_step_runs_in_the_modes_of_its_caller"
DRAWS = "test_opening_and_preparing_draw_no_random_numbers"
LEAVES = "test_a_session_leaves_the_process_as_it_found_it"
BUFFERS = "test_buffers_that_steps_write_are_kept"
PARTS = "test_the_parts_of_a_state_put_together_are_the_state"
REDUCED = "test_reductions_are_those_of_all_ranks_where_there_are_more_than_two"
OBJECTS = "test_objects_come_from_every_rank_where_there_are_more_than_two"

CAUGHT = [
    (IgnoresAutocast, MODES, "autocast"),
    (HasGradientsInEvaluation, MODES, "no_grad"),
    (RunsOnAThreadOfItsOwn, MODES, "no_grad"),
    (Reseeds, DRAWS),
    (DrawsAlikeOnAllRanks, DRAWS),
    (DrawsOfPython, DRAWS),
    (LeavesAType, LEAVES),
    (LeavesAVariable, LEAVES),
    (LeavesAHandler, LEAVES),
    (LeavesAThread, LEAVES),
    (LeavesGradientsOff, LEAVES),
    (TakesPairs, "test_a_batch_of_any_structure_reaches_the_step_as_it_is"),
    (MakesTheOptimizerAnew, "test_a_scheduler_made_for_the_plain_optimizer_drives_the_prepared_one"),
    (KeepsTheLossAlone, "test_all_that_a_step_returned_comes_back"),
    (LooksTogether, "test_what_is_not_finite_is_found_by_one_rank_without_the_others"),
    (KnowsFirstParametersAlone, "test_an_optimizer_made_after_the_model_was_prepared_steps_it"),
    (StepsTheLastOptimizer, "test_several_optimizers_step_their_parts_of_a_model"),
    (WrapsWhatHasNoGradients, "test_a_model_without_gradients_is_evaluated_as_it_is"),
    (IsMainOnItsHost, "test_ranks_of_several_hosts_know_who_they_are"),
    (CountsLocalRanksItself, "test_ranks_of_several_hosts_know_who_they_are"),
    (WeighsStandInsByNought, "test_a_stand_in_with_a_loss_that_is_not_finite_counts_as_nothing"),
    (KeepsNoBuffers, BUFFERS),
    (RunsTwice, BUFFERS),
    (PartsWithoutWhatIsFrozen, PARTS),
    (PartsOfTheFirstTime, PARTS),
]
OF_THREE = [
    (HalvesForMeans, REDUCED),
    (AddsItsNeighbours, REDUCED),
    (GathersFromItself, "test_gathers_have_the_rows_of_all_ranks_where_there_are_more_than_two"),
    (TellsTwo, OBJECTS),
    (ListsTwo, OBJECTS),
]


@pytest.mark.parametrize(("altered", "test", "arguments"), first_fast(each_check_once(CAUGHT), 6))
def test_an_altered_backend_is_caught_by(altered, test, arguments, ranks):
    with pytest.raises((AssertionError, RankFailedError)):
        getattr(kit_of(altered), test)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("test", "arguments"), sorted({(t, tuple(r)) for _, t, *r in CAUGHT}))
def test_nothing_is_wrong_with_the_true_one(test, arguments, ranks):
    getattr(kit_of(TrueSession), test)(*arguments)


@pytest.fixture(scope="module")
def in_three():
    """Return a pool of three ranks, in place of new ones for each kit."""
    with RankPool(3) as pool:
        yield pool


@pytest.mark.parametrize(("altered", "test"), [*OF_THREE, *((TrueSession, t) for _, t in OF_THREE[1:4])])
def test_two_ranks_do_not_hide_what_three_show(altered, test, in_three, monkeypatch):
    run = lambda body, processes, *args: in_three.run(body, *args)  # noqa: E731 - as run_ranks is called
    monkeypatch.setattr("tp_testing._backend_conformance.run_ranks", run)
    kit = kit_of(altered)
    if altered is TrueSession:
        getattr(kit, test)()
        return
    with pytest.raises(AssertionError):
        getattr(kit, test)()
