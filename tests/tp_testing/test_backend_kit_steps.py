"""The kit of backends finds what is wrong with steps, models, optimizers and orders."""

import pytest
import torch
import torch.distributed as dist
from tp_core.errors import RankFailedError
from tp_core.sessions import join_process_group

from tests.tp_testing.altered import TrueSession, each_check_once, kit_of


class EvaluatesAlways(TrueSession):
    def prepare_model(self, model):
        return super().prepare_model(model.eval())


class TrainsAlways(TrueSession):
    def run(self, step, model, batch):
        model.train()
        return super().run(step, model, batch)


class RetainsNothing(TrueSession):
    def backward(self, loss, share=None, *, retain_graph=False, create_graph=False):
        super().backward(loss, share)


class AveragesTheFirstModelAlone(TrueSession):
    has_one = False

    def prepare_model(self, model):
        if self.has_one:
            return model
        self.has_one = True
        return super().prepare_model(model)


class SwapsModels(TrueSession):
    def run_several(self, step, models, batch):
        return super().run_several(step, models[::-1], batch)


class OneOrderForAllEpochs(TrueSession):
    def prepare_loader(self, loader, **options):
        prepared = super().prepare_loader(loader, **options)
        sampler = prepared._batches._sampler  # private: the order is nowhere else
        sampler.start = lambda epoch, first=0: type(sampler).start(sampler, 0, first=first)
        return prepared


class AnotherSeed(TrueSession):
    number = 17

    def prepare_loader(self, loader, **options):
        prepared = super().prepare_loader(loader, **options)
        prepared._batches._sampler.seed = self.number
        return prepared


class ASeedForEachRank(AnotherSeed):
    number = property(lambda self: self.rank)


class OptionsOfTheFirstGroup(TrueSession):
    def prepare_optimizer(self, optimizer):
        first, *others = optimizer.param_groups
        for group in others:
            group.update({name: value for name, value in first.items() if name != "params"})
        return optimizer


class OptionsByDefault(TrueSession):
    def prepare_optimizer(self, optimizer):
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        return type(optimizer)(groups, lr=optimizer.defaults["lr"])


class AveragesByHand(TrueSession):
    """Averages what all ranks have a gradient of."""

    def average_gradients(self, model, **options):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        return model

    def backward(self, loss, **options):
        loss.backward()
        for parameter in self.trained:
            has = self.reduce(torch.tensor(float(parameter.grad is not None)))
            if has == self.data_size:
                parameter.grad.copy_(self.reduce(parameter.grad, "mean"))
            elif has:
                self.leave(parameter)


class DropsWhatOneRankHas(AveragesByHand):
    def leave(self, parameter):
        parameter.grad = None


class KeepsWhatOneRankHas(AveragesByHand):
    def leave(self, parameter):
        pass


class GathersMatrices(TrueSession):
    def gather(self, value):
        return super().gather(value.reshape(len(value), -1)) if value.dim() else super().gather(value)


class GathersNoNothing(TrueSession):
    def gather(self, value):
        gathered = super().gather(value)
        gathered[0]
        return gathered


class ReducesByMemory(TrueSession):
    def reduce(self, value, op="sum"):
        flat = value.as_strided((value.numel(),), (1,)) if value.numel() else value
        return super().reduce(flat, op).reshape(value.shape)


class LeavesForTheProgram(TrueSession):
    def close(self):
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


class JoinsAnew(TrueSession):
    """Ends the group that is there and makes its own."""

    def __init__(self, job, **options):
        dist.destroy_process_group()
        super().__init__(job, leave=join_process_group(job.environment, device=job.devices[0]))


ONE_RANK = "test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean"
TWO_MODELS = "test_two_models_in_one_step_have_the_gradients_of_one_device"
ORDER = "test_shuffled_epochs_have_the_order_of_the_seed_and_the_epoch"
MODE = "test_a_step_finds_the_model_in_the_mode_that_it_is_in"
GROUPS = "test_an_optimizer_keeps_its_groups_with_their_options"
SHAPES = "test_gather_and_reduce_take_any_shape_and_layout"
OWN_GROUP = "test_a_process_group_of_the_programs_own_is_used_and_left_as_it_is"
RETAINED = "test_a_graph_that_is_to_be_retained_is_there_after_the_backward_pass"

CAUGHT = [
    (EvaluatesAlways, MODE, True),
    (TrainsAlways, MODE, False),
    (RetainsNothing, RETAINED),
    (AveragesTheFirstModelAlone, TWO_MODELS),
    (SwapsModels, TWO_MODELS),
    (OneOrderForAllEpochs, ORDER),
    (AnotherSeed, ORDER),
    (ASeedForEachRank, ORDER),
    (OptionsOfTheFirstGroup, GROUPS),
    (OptionsByDefault, GROUPS),
    (DropsWhatOneRankHas, ONE_RANK),
    (KeepsWhatOneRankHas, ONE_RANK),
    (GathersMatrices, SHAPES, (2, 3, 2)),
    (GathersNoNothing, SHAPES, (0, 3)),
    (ReducesByMemory, SHAPES, (2, 3, 2)),
    (LeavesForTheProgram, OWN_GROUP),
    (JoinsAnew, OWN_GROUP),
]
SPOILERS = {JoinsAnew, LeavesForTheProgram}


@pytest.mark.parametrize(("altered", "test", "arguments"), each_check_once(CAUGHT))
def test_an_altered_backend_is_caught_by(altered, test, arguments, ranks):
    with pytest.raises((AssertionError, RankFailedError)):
        getattr(kit_of(altered), test)(*arguments)
    if altered in SPOILERS:
        ranks.close()


@pytest.mark.parametrize(("test", "arguments"), sorted({(t, tuple(r)) for _, t, *r in CAUGHT}))
def test_nothing_is_wrong_with_the_true_one(test, arguments, ranks):
    getattr(kit_of(TrueSession), test)(*arguments)
