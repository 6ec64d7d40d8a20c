"""The kit of backends finds what is wrong with each of these, and nothing wrong with the true one."""

import os
import random
import tempfile
import threading
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import RankFailedError
from tp_core.jobs import MemoryNeed
from tp_core.plugins import Backend, Session, Verdict
from tp_core.sessions import ProcessGroupSession, join_process_group
from tp_testing import BackendConformance

from tests.cases import first_fast
from tests.tp_testing.altered import each_check_once


class TrueSession(ProcessGroupSession):
    """One rank of a data-parallel job."""

    def prepare_model(self, model):
        self.check_plain(model)
        self.check_same_parameters(model)
        return self.average_gradients(model, find_unused_parameters=True)


class TrueBackend(Backend):
    name = "altered"
    session = TrueSession

    def assess(self, job):
        return Verdict.fits(1, "it is for tests")

    def open(self, job):
        self.parse_options(job)
        leave = join_process_group(job.environment, device=job.devices[0])
        return self.session(job, leave=leave)


@pytest.mark.nightly
class TestTrue(BackendConformance):
    backend = TrueBackend
    processes = 2


# -- wrong sessions, each in one thing ------------------------------------------------------------


class SumsGradients(TrueSession):
    def backward(self, loss, share=None):
        super().backward(loss * self.data_size, share)


class IgnoresNoSync(TrueSession):
    @contextmanager
    def no_sync(self, model):
        yield


class IgnoresShares(TrueSession):
    def backward(self, loss, share=None):
        super().backward(loss)


class KeepsTheLastShare(TrueSession):
    last = None

    def backward(self, loss, share=None):
        self.last = share or self.last
        super().backward(loss, self.last)


class NamesOfTheWrapper(TrueSession):
    def model_state(self, model):
        return dict(model.state_dict())


class NeverLeaves(TrueSession):
    def close(self):
        self.closed = True


class SumsForMean(TrueSession):
    def reduce(self, value, op="sum"):
        return super().reduce(value, "sum" if op == "mean" else op)


class SwapsMinAndMax(TrueSession):
    def reduce(self, value, op="sum"):
        return super().reduce(value, {"min": "max", "max": "min"}.get(op, op))


class ReducesInPlace(TrueSession):
    def reduce(self, value, op="sum"):
        return value.copy_(super().reduce(value, op))


class ReducesInSinglePrecision(TrueSession):
    def reduce(self, value, op="sum"):
        return super().reduce(value.float(), op).to(value.dtype)


class ReducesOnRank0(TrueSession):
    def reduce(self, value, op="sum"):
        reduced = super().reduce(value, op)
        return reduced if self.rank == 0 else value


class IgnoresTheNormsType(TrueSession):
    def grad_norm(self, model, *, norm_type=2.0):
        return super().grad_norm(model)


class ClipsByAnotherNorm(TrueSession):
    def clip_grad_norm(self, model, max_norm, *, norm_type=2.0):
        return super().clip_grad_norm(model, max_norm)


class ClipsEachParameter(TrueSession):
    def clip_grad_norm(self, model, max_norm, *, norm_type=2.0):
        norm = self.grad_norm(model, norm_type=norm_type)
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, max_norm, norm_type)
        return norm


class ScalesWhenAskedForTheNorm(TrueSession):
    def grad_norm(self, model, *, norm_type=2.0):
        return nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type)


class NeverScales(TrueSession):
    def scale_gradients(self, model, factor):
        pass


class NeverLimits(TrueSession):
    def clip_grad_value(self, model, limit):
        pass


class FindsEverythingFinite(TrueSession):
    def find_nonfinite(self, model):
        return None


class KnowsOnlyItsOwnNorm(TrueSession):
    def grad_norm(self, model, *, norm_type=2.0):
        norm = super().grad_norm(model, norm_type=norm_type)
        return norm if self.rank == 0 else norm.nan_to_num()


class StaysUnsynced(TrueSession):
    @contextmanager
    def no_sync(self, model):
        model.require_backward_grad_sync = False
        yield
        model.require_backward_grad_sync = True


class SyncsNoBuffers(TrueSession):
    def sync_buffers(self, model):
        pass


class StateWithoutBuffers(TrueSession):
    def model_state(self, model):
        return {n: t for n, t in super().model_state(model).items() if "norm" not in n}


class LoadsWhatFits(TrueSession):
    def load_model_state(self, model, state):
        self.unwrap(model).load_state_dict(state, strict=False)


class LoadsOnRank0(TrueSession):
    def load_model_state(self, model, state):
        if self.rank == 0:
            super().load_model_state(model, state)


class LoadsNoBuffers(TrueSession):
    def load_model_state(self, model, state):
        own = super().model_state(model)
        super().load_model_state(model, {n: own[n] if "norm" in n else t for n, t in state.items()})


class BroadcastsFromRank0(TrueSession):
    def broadcast(self, value, *, src=0, where=None):
        return super().broadcast(value)


class GathersEqualLengths(TrueSession):
    def gather(self, value):
        lengths = self.gather_objects(len(value))
        if len(set(lengths)) > 1:
            raise RuntimeError("lengths differ")
        return super().gather(value)


class GathersBackwards(TrueSession):
    def gather(self, value):
        return super().gather(value).flip(0)


class ObjectsInAnyOrder(TrueSession):
    def gather_objects(self, value, *, where=None):
        return super().gather_objects(value)[::-1]


class AveragesNothing(TrueSession):
    def prepare_model(self, model):
        return model


class SumsAsMeans(TrueSession):
    def backward(self, loss, share=None):
        factor = 1.0 if share is None else share.samples * self.data_size / share.total
        super().backward(loss * (factor / self.data_size))


class DropsLastBatches(TrueSession):
    def prepare_loader(self, loader, *, training=True, shard=True):
        full = DataLoader(loader.dataset, batch_size=loader.batch_size, drop_last=True)
        return super().prepare_loader(full, training=training, shard=shard)


class StandInsInEvaluation(TrueSession):
    def prepare_loader(self, loader, *, training=True, shard=True):
        return super().prepare_loader(loader, training=True, shard=shard)


class SkipsInTraining(TrueSession):
    def prepare_loader(self, loader, *, training=True, shard=True):
        return super().prepare_loader(loader, training=False, shard=shard)


class SplitsWhatIsSplit(TrueSession):
    def prepare_loader(self, loader, *, training=True, shard=True):
        return super().prepare_loader(loader, training=training)


class ReadsEverythingTwice(TrueSession):
    @property
    def data_rank(self):
        return 0


class WaitsForNobody(TrueSession):
    def barrier(self):
        pass


class OnlyTheFirstWaits(TrueSession):
    def barrier(self):
        if self.rank == 0:
            dist.recv(torch.empty(1), src=1)
        else:
            self.sent = dist.isend(torch.ones(1), dst=0)


class LossInSinglePrecision(TrueSession):
    def run(self, step, model, batch):
        output = super().run(step, model, batch)
        return output.float() if torch.is_tensor(output) else output


class ForgetsWhatWasAdded(TrueSession):
    def backward(self, loss, share=None):
        for parameter in self._model.parameters():
            parameter.grad = None
        super().backward(loss, share)

    def prepare_model(self, model):
        self._model = super().prepare_model(model)
        return self._model


class EveryoneIsMain(TrueSession):
    is_main = True


class SwallowsWords(TrueSession):
    def run(self, step, model, batch):
        try:
            return super().run(step, model, batch)
        except Exception as error:
            raise RuntimeError("a step failed") from error


class LosesDicts(TrueSession):
    def run(self, step, model, batch):
        output = super().run(step, model, batch)
        return next(iter(reversed(output.values()))) if isinstance(output, dict) else output


class KeepsItsOwnWeights(TrueSession):
    def average_gradients(self, model, **options):
        return super().average_gradients(model, init_sync=False, **options)


class TrainsACopy(TrueSession):
    def prepare_model(self, model):
        return super().prepare_model(deepcopy(model))


class CutsTies(TrueSession):
    def load_model_state(self, model, state):
        super().load_model_state(model, state)
        tail = self.unwrap(model)[3]
        tail.back.weight = nn.Parameter(tail.back.weight.detach().clone())


class TrainsWhatIsFrozen(TrueSession):
    def prepare_model(self, model):
        return super().prepare_model(model.requires_grad_())


class TrainsInSinglePrecision(TrueSession):
    def prepare_model(self, model):
        return super().prepare_model(model.float())


class StepsOverUnused(TrueSession):
    def prepare_model(self, model):
        return self.average_gradients(model, find_unused_parameters=False)


class WrapsTwice(TrueSession):
    def check_plain(self, model):
        pass


class AgreesWithEverybody(TrueSession):
    def check_agreement(self, what, value, **_):
        pass


# -- wrong backends -------------------------------------------------------------------------------


class WritesAFile(TrueBackend):
    def assess(self, job):
        with tempfile.TemporaryFile() as file:
            file.write(b"asked")
        return super().assess(job)


class SetsAVariable(TrueBackend):
    def assess(self, job):
        os.environ["OMP_NUM_THREADS"] = str(random.Random().random())
        return super().assess(job)


class Reseeds(TrueBackend):
    def assess(self, job):
        torch.manual_seed(0)
        return super().assess(job)


class Draws(TrueBackend):
    def assess(self, job):
        random.random()
        return super().assess(job)


class StartsAThread(TrueBackend):
    def assess(self, job):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().assess(job)


class StartsAProcess(TrueBackend):
    def assess(self, job):
        os.system("true")
        return super().assess(job)


class JoinsAtOnce(TrueBackend):
    def assess(self, job):
        join_process_group(job.environment, device=job.devices[0])
        return super().assess(job)


class CountsQuestions(TrueBackend):
    asked = 0

    def assess(self, job):
        self.asked += 1
        return Verdict.fits(self.asked, "it fits better each time")


class NeedsNothing(TrueBackend):
    def estimate_memory(self, job):
        return None if job.footprint is None else MemoryNeed(weights=0, gradients=0, optimizer=0)


class TouchesTheModel(TrueBackend):
    def assess(self, job):
        if job.model is not None:
            job.model.eval()
        return super().assess(job)


class NeedsAModel(TrueBackend):
    def assess(self, job):
        return Verdict.fits(job.traits.parameter_count, "it counts parameters")


class TakesAnyOption(TrueBackend):
    def parse_options(self, job):
        return None


class JoinsBeforeItLooks(TrueBackend):
    def open(self, job):
        join_process_group(job.environment, device=job.devices[0])
        return super().open(job)


class MeetsInOnePlace(TrueBackend):
    def open(self, job):
        self.parse_options(job)
        if getattr(dist, "was_joined_before", False):
            raise RuntimeError("a second session of one process")
        dist.was_joined_before = True
        return super().open(job)


CAUGHT = [
    (SumsGradients, "test_loss_and_gradients_are_those_of_one_device"),
    (IgnoresNoSync, "test_inside_no_sync_nothing_is_reduced_over_ranks"),
    (IgnoresShares, "test_uneven_batches_weigh_by_their_samples", 11, 4),
    (KeepsTheLastShare, "test_without_a_share_the_losses_of_all_data_ranks_count_alike"),
    (NamesOfTheWrapper, "test_model_state_has_the_plain_names_and_buffers_and_comes_back"),
    (NeverLeaves, "test_closing_leaves_the_process_group_as_it_was_found"),
    (SumsForMean, "test_reduce_knows_every_operation", "mean", torch.float64),
    (SwapsMinAndMax, "test_reduce_knows_every_operation", "min", torch.float64),
    (SwapsMinAndMax, "test_reduce_knows_every_operation", "max", torch.int64),
    (ReducesInPlace, "test_reduce_keeps_its_argument"),
    (ReducesInSinglePrecision, "test_reduce_knows_every_operation", "mean", torch.float64),
    (ReducesOnRank0, "test_reduce_knows_every_operation", "sum", torch.float64),
    (IgnoresTheNormsType, "test_the_global_norm_is_returned_and_nothing_is_scaled", 1.0),
    (ClipsByAnotherNorm, "test_clipping_uses_the_global_norm", float("inf")),
    (ClipsEachParameter, "test_clipping_uses_the_global_norm", 2.0),
    (ScalesWhenAskedForTheNorm, "test_the_global_norm_is_returned_and_nothing_is_scaled", 2.0),
    (NeverScales, "test_gradients_are_scaled"),
    (NeverLimits, "test_gradients_are_limited_element_by_element"),
    (FindsEverythingFinite, "test_a_parameter_that_is_not_finite_is_named"),
    (KnowsOnlyItsOwnNorm, "test_ranks_with_gradients_that_are_not_finite_agree_on_the_norm"),
    (StaysUnsynced, "test_no_sync_ends_when_its_body_raises"),
    (SyncsNoBuffers, "test_buffers_are_those_of_the_first_data_rank_after_they_are_synced"),
    (StateWithoutBuffers, "test_model_state_has_the_plain_names_and_buffers_and_comes_back"),
    (LoadsWhatFits, "test_a_state_that_does_not_fit_is_refused", "missing"),
    (LoadsWhatFits, "test_a_state_that_does_not_fit_is_refused", "surplus"),
    (LoadsOnRank0, "test_a_state_of_one_device_is_loaded"),
    (LoadsNoBuffers, "test_a_state_of_one_device_is_loaded"),
    (BroadcastsFromRank0, "test_broadcast_gives_every_rank_the_object_of_its_source"),
    (GathersEqualLengths, "test_gather_takes_uneven_lengths", 1, torch.float64),
    (GathersBackwards, "test_gather_takes_uneven_lengths", 1, torch.float64),
    (ObjectsInAnyOrder, "test_gather_objects_keeps_the_order_of_the_ranks"),
    (AveragesNothing, "test_loss_and_gradients_are_those_of_one_device"),
    (SumsAsMeans, "test_a_loss_that_is_a_sum_gives_the_gradient_of_the_sum"),
    (DropsLastBatches, "test_every_sample_counts_once", False),
    (DropsLastBatches, "test_a_last_batch_of_one_sample_neither_hangs_nor_biases"),
    (StandInsInEvaluation, "test_in_evaluation_every_rank_has_samples_of_every_batch"),
    (SkipsInTraining, "test_in_training_every_rank_takes_every_step"),
    (SplitsWhatIsSplit, "test_a_loader_that_is_split_already_is_taken_as_it_is"),
    (ReadsEverythingTwice, "test_ranks_know_who_they_are"),
    (ReadsEverythingTwice, "test_every_sample_counts_once", True),
    (WaitsForNobody, "test_a_barrier_waits_for_every_rank"),
    (OnlyTheFirstWaits, "test_a_barrier_waits_for_every_rank"),
    (LossInSinglePrecision, "test_evaluation_sees_each_sample_once"),
    (ForgetsWhatWasAdded, "test_accumulation_inside_no_sync_gives_the_gradient_of_the_whole"),
    (EveryoneIsMain, "test_ranks_know_who_they_are"),
    (SwallowsWords, "test_a_step_that_raises_is_raised_in_the_caller"),
    (LosesDicts, "test_a_step_that_returns_a_dict_has_the_gradient_of_its_loss"),
    (KeepsItsOwnWeights, "test_ranks_that_start_with_different_weights_end_with_those_of_rank_0"),
    (TrainsACopy, "test_the_users_own_module_and_its_optimizer_are_what_is_trained"),
    (CutsTies, "test_weights_that_are_tied_stay_tied"),
    (TrainsWhatIsFrozen, "test_loss_and_gradients_are_those_of_one_device"),
    (TrainsInSinglePrecision, "test_parameters_of_several_types_have_the_gradients_of_one_device"),
    (StepsOverUnused, "test_parameters_that_no_step_uses_stay_as_they_are"),
    (WrapsTwice, "test_a_wrapped_model_is_refused"),
    (AgreesWithEverybody, "test_a_disagreement_raises_on_every_rank"),
    (WritesAFile, "test_assess_changes_nothing_in_the_process"),
    (SetsAVariable, "test_assess_changes_nothing_in_the_process"),
    (Reseeds, "test_assess_changes_nothing_in_the_process"),
    (Draws, "test_assess_changes_nothing_in_the_process"),
    (StartsAThread, "test_assess_changes_nothing_in_the_process"),
    (StartsAProcess, "test_assess_changes_nothing_in_the_process"),
    (JoinsAtOnce, "test_assess_changes_nothing_in_the_process"),
    (CountsQuestions, "test_it_has_a_name_and_fits_the_job"),
    (NeedsNothing, "test_what_it_needs_of_memory_is_estimated_from_what_training_takes"),
    (TouchesTheModel, "test_assess_leaves_the_model_alone"),
    (NeedsAModel, "test_assess_answers_where_no_model_is_known_yet"),
    (TakesAnyOption, "test_an_unknown_option_is_refused"),
    (JoinsBeforeItLooks, "test_an_unknown_option_is_refused"),
    (MeetsInOnePlace, "test_a_second_session_in_one_process_works_as_the_first"),
]


class OfRows(TrueBackend):
    self_test_options = {"rows": True}

    def open(self, job):
        assert job.options[self.name] == {"rows": True, "more": 1}
        return Session(job)


def test_a_kit_gives_the_options_that_the_backend_has_for_its_batches():
    class Kit(BackendConformance):
        __test__ = False
        backend = OfRows
        options = {"more": 1}

    Kit().test_closing_twice_does_nothing()


# What these leave behind in a process would be what the next one is caught by.
SPOILERS = {
    JoinsAtOnce,
    JoinsBeforeItLooks,
    MeetsInOnePlace,
    NeverLeaves,
    Reseeds,
    SetsAVariable,
    StartsAThread,
    TakesAnyOption,
}


def kit_of(altered):
    made = altered
    if issubclass(altered, TrueSession):

        class made(TrueBackend):  # noqa: N801 - as the others
            session = altered

    class Kit(BackendConformance):
        __test__ = False
        backend = made
        processes = 2

    return Kit()


@pytest.mark.parametrize(("altered", "test", "arguments"), first_fast(each_check_once(CAUGHT), 16))
def test_an_altered_backend_is_caught_by(altered, test, arguments, ranks, tmp_path):
    kit = kit_of(altered)
    if test == "test_a_barrier_waits_for_every_rank":
        arguments = [tmp_path]
    try:
        # By an assertion here, or by an exception on a rank.
        with pytest.raises((AssertionError, RankFailedError, pytest.fail.Exception)):
            getattr(kit, test)(*arguments)
    finally:
        if altered in SPOILERS:
            ranks.close()  # the next one starts new ranks
