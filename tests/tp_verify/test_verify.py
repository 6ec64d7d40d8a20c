"""A strategy is proven, or the first place where it differs is named; what cannot be tried is refused."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tp_core.compare import Bound
from tp_core.errors import ConfigError, ModelError, RankFailedError
from tp_core.ranks import RankPool
from tp_verify import Strategy, strategies, verify
from tp_verify._rounding import bound_of_sums, farthest  # no public way meets an overflow in one run alone
from tp_verify._training_task import RunRecord, StepRecord

from tests.tp_verify import faults
from tests.tp_verify import models as m

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks():
    """Two ranks, which all tests of this file share."""
    with RankPool(2, timeout_s=800) as pool:
        yield pool


def case(name, cases):
    return next(c for c in cases if c.name == name)


def check(found, ranks, dtype=torch.float64):
    report = found.run(ranks, dtype)
    assert found.is_right(report), str(report)
    return report


FAST = ["column backward", "one parameter ignored", "momentum lost"]


@pytest.mark.parametrize(
    "name",
    [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in ("norm of shards", "gradient of keys"))],
)
def test_a_planted_fault_is_named_at_its_module(name, ranks):
    check(case(name, faults.FAULTS), ranks)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fully_shard, both, SGD", marks=pytest.mark.slow),
        pytest.param("by hand, clipped", marks=pytest.mark.slow),
        "context by hand",
    ],
)
def test_a_way_that_is_right_is_proven_in_lower_precision(name, ranks):
    report = check(case(name, faults.correct_cases()), ranks, torch.bfloat16)
    assert ("2 micro-batches for each step" in report.proven) == ("both" in name)


@pytest.mark.slow
def test_uneven_tokens_in_torchs_pipelining_part_at_the_loss(ranks):
    check(faults.FAULTS[-1], ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("planted", faults.FAULTS, ids=lambda c: f"{c.kind}, {c.name}")
def test_every_planted_fault_is_named(planted, ranks):
    check(planted, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("right", faults.correct_cases(), ids=lambda c: c.name)
def test_no_way_that_is_right_is_accused(right, dtype, ranks):
    check(right, ranks, dtype)


def test_a_report_is_text_values_and_a_page(ranks):
    report = check(case("row forward", faults.FAULTS), ranks)
    assert not report
    assert report.finding.module == "blocks.1.mlp.down"
    assert "were not summed" in str(report) or "differs by" in str(report)
    assert json.loads(report.to_json())["finding"]["step"] == 1
    assert "blocks.1.mlp.down" in report.to_html()


class Branches(torch.nn.Module):
    """A model with a layer that no batch reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x) if x.size(0) < 100 else self.unused(x)


def square(model, batch):
    return model(batch).square().mean()


def test_what_no_batch_reached_is_listed(ranks):
    strategy = strategies.DDP(find_unused_parameters=True)
    report = verify(Branches, [torch.ones(4, 3)], parallel=strategy, step=square, ranks=ranks)
    assert report.ok
    assert "modules that no batch reached: unused" in report.not_covered
    assert "parameters that got no gradient: unused.weight, unused.bias" in report.not_covered


class Validated(strategies.DDP):
    """DDP that evaluates on other rows before the step ends."""

    def backward(self, model, step, parts):
        loss = super().backward(model, step, parts)
        model.eval()
        with torch.no_grad():
            step(model, torch.ones(4, 3, dtype=torch.float64))
        model.train()
        return loss


def test_an_evaluation_amid_a_step_is_no_part_of_it(ranks):
    batch = torch.ones(3, 3).cumsum(0)  # rows that do not divide, so that weights count
    options = {"parallel": Validated(find_unused_parameters=True), "step": square, "vary": False}
    report = verify(Branches, [batch], ranks=ranks, **options)
    assert report.ok, str(report)
    assert report.compared["outputs of modules"]


class OfOneLength(strategies.DDP):
    """DDP of a model that is right for batches of the user's length alone."""

    def __init__(self, otherwise):
        super().__init__()
        self.otherwise = otherwise

    def parallelize(self, model):
        def hook(module, args, output):
            return output if output.size(1) == m.LENGTH else self.otherwise(output)

        model.blocks[0].mlp.up.register_forward_hook(hook)
        return super().parallelize(model)


def refuses(output):
    raise ValueError(f"compiled for {m.LENGTH} places, got {output.size(1)}")


@pytest.mark.slow
def test_a_fault_at_another_length_is_found_unless_it_is_left_out(ranks):
    options = {"parallel": OfOneLength(torch.neg), "step": m.step, "ranks": ranks}
    assert verify(m.build, m.EVEN[:1], vary=False, **options).ok
    report = verify(m.build, m.EVEN[:1], **options)
    assert str(report.finding).startswith("step 2: the output of blocks.0.mlp.up")


@pytest.mark.slow
def test_a_batch_that_ranks_refuse_is_not_claimed(ranks):
    report = verify(m.build, m.EVEN[:1], parallel=OfOneLength(refuses), step=m.step, ranks=ranks)
    assert report.proven[0] == "1 optimizer step on batches of tokens (8, 8) and labels (8, 8)"
    assert report.proven[1].startswith("2 optimizer steps on batches of its own, tokens (8, 8) and")
    assert report.not_covered[-1] == (
        "a batch of its own, tokens (8, 4) and labels (8, 4): "
        "ranks raise ValueError: compiled for 8 places, got 4"
    )


def masked(model, batch):
    hidden = model(batch["values"]) * batch["mask"][..., None]
    return hidden.square().sum() / batch["mask"].sum()


def counted(model, batch):
    return model(batch["classes"].double()).mean()


def test_numbers_and_masks_are_varied_and_what_is_of_no_known_kind_is_not(ranks):
    options = {"parallel": strategies.DDP(find_unused_parameters=True), "ranks": ranks}
    batch = {"values": torch.ones(4, 6, 3).cumsum(0), "mask": torch.ones(4, 6)}
    report = verify(Branches, [batch], step=masked, **options)
    assert report.proven[1] == (
        "2 optimizer steps on batches of its own, values (4, 9, 3) and mask (4, 9), values (4, 6, 3) and "
        "mask (4, 6), with other values of values and padding in mask"
    )
    batch = {"classes": torch.ones(4, 3, dtype=torch.long)}
    report = verify(Branches, [batch], step=counted, **options)
    assert report.not_covered[-1].startswith("batches of its own: the plain model takes none")


def unchanged(model):
    return model


def larger(model):
    with torch.no_grad():
        model.used.weight *= 2
    return model


def test_a_way_that_changes_the_plain_model_is_named_before_the_first_step(ranks):
    report = verify(Branches, [torch.ones(4, 3)], parallel=larger, step=square, ranks=ranks)
    assert str(report.finding).startswith("the weights before the first step of used.weight")
    assert " on rank" not in str(report.finding)  # all are wrong


class InPlace(strategies.DDP):
    def parallelize(self, model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(averaged)


def averaged(parameter):
    torch.distributed.all_reduce(parameter.grad)
    parameter.grad /= torch.distributed.get_world_size()


def test_the_method_may_change_the_model_in_place(ranks):
    assert verify(UsedAlone, [torch.ones(4, 3).cumsum(0)], parallel=InPlace(), step=square, ranks=ranks).ok


class UsedAlone(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)


class Rounded(strategies.DDP):
    def backward(self, model, step, parts):
        loss = super().backward(model, step, parts)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)
        return loss


def test_rounded_gradients_are_not_called_scaled(ranks):
    report = verify(m.build, m.EVEN[:1], parallel=Rounded(), step=m.step, ranks=ranks, vary=False)
    assert report.finding.what == "the gradient"
    assert "scaled" not in str(report.finding)


class Shifted(torch.nn.Module):
    """A model whose shift of all scores has the gradient 0, but for rounding."""

    def __init__(self):
        super().__init__()
        self.scores, self.shift = torch.nn.Linear(8, 32), torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.scores(x) + self.shift


def classified(model, batch):
    return torch.nn.functional.cross_entropy(model(batch), batch[:, 0].abs().mul(8).long())


class Faster(strategies.DDP):
    def prepare(self, model, make):
        parallel, optimizer = super().prepare(model, make)
        optimizer.param_groups[0]["lr"] *= 1.001
        return parallel, optimizer


def test_a_step_that_rounding_alone_makes_is_not_called_different(ranks):
    batches = [torch.randn(24, 8, generator=torch.Generator().manual_seed(0))]
    options = {"step": classified, "ranks": ranks, "vary": False}
    report = verify(Shifted, batches * 3, parallel=strategies.DDP(), **options)
    assert report.ok, str(report)
    report = verify(Shifted, batches * 3, parallel=Faster(), **options)
    assert report.finding.what == "the change of the weight"


def larger_on_the_second(model):
    return larger(model) if torch.distributed.get_rank() == 1 else model


def test_the_rank_with_the_wrong_copy_is_named(ranks):
    report = verify(Branches, [torch.ones(4, 3)], parallel=larger_on_the_second, step=square, ranks=ranks)
    assert str(report.finding).endswith("of used.weight: it differs by 1 of its norm on rank 1")


def test_a_way_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ConfigError, match="Megatron needs the package megatron: pip install 'megatron-core'"):
        strategies.Megatron({}).parallelize(m.build())
    with pytest.raises(ConfigError, match=r"no backend 'none' is installed; there are .*ddp"):
        strategies.InstalledBackend("none").parallelize(m.build())


def test_batches_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="has 3 rows, and 2 ranks with 2 micro-batches need 4"):
        verify(Branches, [torch.ones(3, 3)], parallel=unchanged, step=square, micro=2)
    with pytest.raises(ConfigError, match="give at least one batch"):
        verify(Branches, [], parallel=unchanged, step=square)
    with pytest.raises(ConfigError, match="a list of whole batches, one for each step, got Tensor"):
        verify(Branches, torch.ones(4, 3), parallel=unchanged, step=square)
    with pytest.raises(ConfigError, match="a batch has tensors, nested as you like, got list without one"):
        verify(Branches, [[1, 2]], parallel=unchanged, step=square)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"ranks": 0}, "ranks is a number of 1 or more, got 0"),
        ({"dropout": -1}, "dropout is a number of 0 or more, got -1"),
        ({"max_norm": 0.0}, "max_norm is a number above 0, or None for no clipping, got 0.0"),
        ({"optimizer": "adam"}, "optimizer is a function, got 'adam'"),
        ({"optimizer": str}, "a function that returns an optimizer of torch, and returned 'Branches"),
        ({"max_nrom": 1.0}, r"verify\(\) has no argument 'max_nrom'; did you mean 'max_norm'"),
    ],
    ids=str,
)
def test_options_of_another_kind_are_refused(option, said):
    with pytest.raises(ConfigError, match=said):
        verify(Branches, [torch.ones(4, 3)], parallel=unchanged, step=square, **option)


@pytest.mark.parametrize(
    ("step", "error", "said"),
    [
        (lambda model, batch: model(batch), ConfigError, r"a loss of one number, .* got \(4, 1\)"),
        (lambda model, batch: (model(batch).mean(), 1), ConfigError, "and a 'weight'; got tuple"),
        (lambda model, batch: model(batch).detach().mean(), ModelError, "the loss has no gradient"),
        (lambda model, batch: model(batch).mean() * torch.nan, ModelError, "the loss on one device is nan"),
    ],
    ids=["vector", "tuple", "detached", "nan"],
)
def test_a_step_without_a_loss_to_compare_is_refused(step, error, said):
    with pytest.raises(error, match=said):
        verify(Branches, [torch.ones(4, 3)], parallel=unchanged, step=step)


def test_a_builder_of_no_model_is_refused():
    with pytest.raises(ModelError, match=r"has to return the plain model, .* and returned list"):
        verify(list, [torch.ones(4, 3)], parallel=unchanged, step=square)


def test_a_builder_that_is_not_repeatable_is_refused():
    generator = torch.Generator()

    def build():
        model = Branches()
        torch.nn.init.normal_(model.used.weight, generator=generator)
        return model

    with pytest.raises(ModelError, match=r"not repeatable: 'used\.weight' differs between two calls"):
        verify(build, [torch.ones(4, 3)], parallel=unchanged, step=square)


def noisy(model, batch):
    return model(batch + torch.rand(())).square().mean()


def test_a_loss_that_is_random_by_nature_is_refused():
    with pytest.raises(ModelError, match="random without dropout"):
        verify(Branches, [torch.ones(4, 3)], parallel=unchanged, step=noisy)


def most_likely(model, batch):
    return model(batch["tokens"]).argmax(-1)


def with_ranks(model, batch):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return most_likely(model, batch) + rank


@pytest.mark.slow
def test_tokens_a_checkpoint_and_dropout_are_proven_too(ranks):
    more = {"generate": most_likely, "reload_on": ranks, "dropout": 20}
    report = verify(m.build, m.EVEN[:1], parallel=strategies.FullyShard(), step=m.step, ranks=ranks, **more)
    assert report.ok, str(report)
    assert report.proven[-3:] == [
        "what is generated from the first batch",
        "a checkpoint that 2 ranks loaded",
        "dropout, in distribution over 20 seeds",
    ]


class LosesStates(strategies.DDP):
    def load(self, model, optimizer, folder):
        super().load(model, optimizer, folder)
        optimizer.state.clear()


def halving(model):
    """Make an optimizer whose rate halves at each step of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.5**steps)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class LosesSchedule(strategies.DDP):
    """Halves the rate itself, by a number of steps that no checkpoint has."""

    def prepare(self, model, make):
        self.steps, model = 0, self.parallelize(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self, model, optimizer):
        super().update(model, optimizer)
        self.steps += 1
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**self.steps


class SavesSchedule(LosesSchedule):
    def save(self, model, optimizer, folder):
        super().save(model, optimizer, folder)
        (Path(folder) / "steps").write_text(str(self.steps))

    def load(self, model, optimizer, folder):
        super().load(model, optimizer, folder)
        self.steps = int((Path(folder) / "steps").read_text())


@pytest.mark.parametrize(
    ("strategy", "said", "not_covered"),
    [
        (LosesSchedule(), r"the learning rates after loading: rank 0 continues with 0\.05 for .* with 0", ""),
        (SavesSchedule(), "None", ""),
        (strategies.DDP(), "None", "the learning rates after loading: the scheduler is hooked into"),
    ],
    ids=["lost", "saved", "hooked into the optimizer"],
)
def test_a_schedule_continues_where_the_checkpoint_was_saved(strategy, said, not_covered, ranks):
    options = {"step": m.step, "ranks": ranks, "reload_on": ranks, "optimizer": halving, "vary": False}
    report = verify(m.build, m.EVEN, parallel=strategy, **options)
    assert re.match(said, str(report.finding)), str(report)
    assert not_covered in str(report)


class CannotTrainOn(strategies.DDP):
    is_loaded = False

    def load(self, model, optimizer, folder):
        super().load(model, optimizer, folder)
        self.is_loaded = True

    def backward(self, model, step, parts):
        if self.is_loaded:
            raise RuntimeError("no training here")
        return super().backward(model, step, parts)


class LosesStatesToo(CannotTrainOn):
    def load(self, model, optimizer, folder):
        super().load(model, optimizer, folder)
        optimizer.state.clear()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [(CannotTrainOn(), "None"), (LosesStatesToo(), "step 1: the loaded optimizer's state")],
    ids=["right", "wrong"],
)
def test_what_is_loaded_is_compared_where_ranks_cannot_train_on(strategy, said, ranks):
    options = {"step": m.step, "ranks": ranks, "reload_on": ranks, "vary": False}
    report = verify(m.build, m.EVEN[:1], parallel=strategy, **options)
    assert re.match(said, str(report.finding)), str(report)
    said = "the learning rates after loading: ranks cannot train on with what they have loaded"
    assert report.finding or said in report.not_covered


class CannotEvaluate(strategies.DDP):
    def evaluate(self, model, step, share):
        raise RuntimeError("no evaluation here")


class HalvedWithoutEvaluation(CannotEvaluate):
    def backward(self, model, step, parts):
        return super().backward(model, lambda *args: {"loss": step(*args)["loss"] / 2, "weight": 1}, parts)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [(CannotEvaluate(), "None"), (HalvedWithoutEvaluation(), "step 1: the loss")],
    ids=["right", "wrong"],
)
def test_a_training_is_compared_where_ranks_cannot_evaluate(strategy, said, ranks):
    report = verify(m.build, m.EVEN[:1], parallel=strategy, step=m.step, ranks=ranks, vary=False)
    assert re.match(said, str(report.finding)), str(report)
    assert (
        "evaluation: ranks raise RuntimeError: no evaluation here; override evaluate()" in report.not_covered
    )


class SameMasks(strategies.DDP):
    def seed(self, number):
        torch.manual_seed(number)


class MasksOfTwoSeeds(strategies.DDP):
    """As where ranks are seeded by their number on a host with two devices."""

    def seed(self, number):
        torch.manual_seed(2 * number + torch.distributed.get_rank() % 2)


class MoreDropout(strategies.DDP):
    def parallelize(self, model):
        for block in model.blocks:
            block.drop.p = 0.6
        return super().parallelize(model)


class MoreDropoutInAnOwnLoop(MoreDropout):
    def backward(self, model, step, parts):
        loss = m.step(model, parts[0])["loss"]
        loss.backward()
        return loss.detach()


class RandomStateOfFirstRank(strategies.DDP):
    def save(self, model, optimizer, folder):
        super().save(model, optimizer, folder)
        if torch.distributed.get_rank() == 0:
            torch.save(torch.get_rng_state(), Path(folder) / "random.pt")
        torch.distributed.barrier()

    def load(self, model, optimizer, folder):
        super().load(model, optimizer, folder)
        torch.set_rng_state(torch.load(Path(folder) / "random.pt"))


class MasksDrawnAgain(strategies.DDP):
    def parallelize(self, model):
        from torch.utils.checkpoint import checkpoint

        forward, options = model.blocks[1].forward, {"use_reentrant": False, "preserve_rng_state": False}
        model.blocks[1].forward = lambda x: checkpoint(forward, x, **options)
        return super().parallelize(model)


class OneLossOfSeveral(strategies.DDP):
    data = "whole"

    def backward(self, model, step, parts):
        return super().backward(model, step, parts) + torch.distributed.get_rank() - 0.5


SAME_NUMBERS = "the loaded random numbers: rank 1 continues with those of rank 0"
SAME_MASKS = r"dropout of blocks\.0\.drop: ranks 0 and 1 have their own places, and the same masks"
OTHER_MASKS = r"the gradient with dropout of blocks\.1\.drop: where rank 0 computes the forward pass again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "more", "said"),
    [
        (strategies.DDP(), {"generate": with_ranks}, r"what is generated: rank 1 has \d+ at \(0, 0\)"),
        (LosesStates(), {"reload_on": 2}, r"the loaded optimizer's state of .*: no rank has it"),
        (SameMasks(), {"dropout": 4}, "ranks 0 and 1 have their own rows, and the same masks"),
        (MoreDropout(), {"dropout": 40}, "the loss with dropout: its (mean|variance) over 40 seeds is"),
        (MoreDropoutInAnOwnLoop(), {"dropout": 40}, "the loss with dropout: its (mean|variance) over 40"),
        (RandomStateOfFirstRank(), {"reload_on": 2}, SAME_NUMBERS),
        (m.Context(), {"dropout": 2, "vary": False}, SAME_MASKS),
        (MasksDrawnAgain(), {"dropout": 2}, OTHER_MASKS),
        (OneLossOfSeveral(), {}, r"step 1: the loss: ranks have .*, 3\.\d+ in the mean"),
    ],
    ids=[
        *("tokens", "checkpoint", "masks", "dropout", "dropout in an own loop"),
        *("random numbers", "masks of places", "masks drawn again", "losses of the same rows"),
    ],
)
def test_a_fault_after_the_training_is_named(strategy, more, said, ranks):
    more = {key: ranks if key == "reload_on" else value for key, value in more.items()}
    report = verify(m.build, m.EVEN[:1], parallel=strategy, step=m.step, ranks=ranks, **more)
    assert re.search(said, str(report.finding)), str(report)


class Halved(strategies.DDP):
    def backward(self, model, step, parts):
        loss = super().backward(model, step, parts)
        for parameter in model.parameters():
            parameter.grad /= 2
        return loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_factor_of_all_gradients_is_named_in_types_of_few_digits(dtype, ranks):
    options = {"parallel": Halved(), "step": m.step, "ranks": ranks, "dtype": dtype, "vary": False}
    report = verify(m.build, m.EVEN[:1], **options)
    assert "every one is 0.5 times one device's" in str(report.finding), str(report)


class LaterRate(strategies.DDP):
    """Steps its scheduler twice, as a loop does that steps it on each rank."""

    def update(self, model, optimizer):
        super().update(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_learning_rate_is_named_in_any_type(dtype, ranks):
    options = {"parallel": LaterRate(), "step": m.step, "ranks": ranks, "dtype": dtype, "vary": False}
    report = verify(m.build, m.EVEN, optimizer=m.adamw, **options)
    assert report.finding.step == 2
    assert re.search(r"change of the weight of .*: the learning rate of rank 0 is", str(report.finding))


def test_the_farthest_of_several_runs_bounds_each_number():
    right, steps = torch.zeros(2), []
    for loss, weight in ((1.0, 0.0), (1.1, -0.2), (0.8, 0.1), (math.inf, math.inf)):
        weights = {"weight": torch.tensor([weight, 0.0])}
        steps.append(StepRecord(loss=loss, weights=weights, buffers={"none": right}))
    exact, *runs = (RunRecord(steps=[step]) for step in steps)
    (far,) = farthest(exact, runs).steps
    assert (far.loss, far.weights["weight"].tolist()) == (0.8, [pytest.approx(-0.2), 0.0])
    assert far.norm is None


def test_what_ranks_sum_is_bounded_by_the_number_of_terms():
    two, eight = (bound_of_sums([torch.float64, torch.bfloat16], terms).rtol for terms in (2, 8))
    assert eight / two == pytest.approx(math.sqrt(3))
    assert two < torch.finfo(torch.bfloat16).eps
    assert bound_of_sums([torch.float32], 8) == Bound.of([torch.float32])


def by_adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.slow
def test_steps_of_adam_are_numbers_in_float16_and_what_follows_is_compared(ranks):
    options = {"step": m.step, "ranks": ranks, "optimizer": by_adam, "dtype": torch.float16, "dropout": 20}
    options |= {"reload_on": ranks, "vary": False}
    report = verify(m.build, m.EVEN, parallel=strategies.DDP(), **options)
    assert report.ok, str(report)
    assert "the optimizer's own epsilon: here it is 0.00024, the least" in report.not_covered
    assert not any("the loss is" in line for line in report.not_covered), report.not_covered
    assert verify(m.build, m.EVEN, parallel=SameMasks(), **options).finding.what.startswith("dropout")


@pytest.mark.slow
def test_ranks_that_are_no_neighbors_may_not_share_masks():
    batch = {name: rows[:3] for name, rows in m.EVEN[0].items()}
    report = verify(m.build, [batch], parallel=MasksOfTwoSeeds(), step=m.step, ranks=3, dropout=4)
    assert "ranks 0 and 2 have their own rows, and the same masks" in str(report.finding), str(report)


def doubled(model):
    model.blocks[0].mlp.down.register_forward_hook(lambda module, args, output: 2 * output)
    return torch.nn.parallel.DistributedDataParallel(model)


def statistics():
    """Build blocks with batch norms: a rank has the statistics of its own rows."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    return torch.nn.Sequential(*blocks)


def tokens(batch):
    return batch["tokens"]


def labels(batch):
    return batch["labels"]


PIPELINING = strategies.Pipelining(inputs=tokens, target=labels, loss=m.loss_of)
ROWS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(0))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "batches", "step", "strategy", "said"),
    [
        (m.build, m.EVEN, m.step, doubled, r"rank 1: the output of blocks\.0\.mlp\.down differs by 1 of"),
        pytest.param(
            statistics,
            ROWS,
            square,
            strategies.FullyShard(),
            r"rank 1: the output of 0\.1 differs by 0",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            m.build_stages,
            [m.make_batch(8, 0)],
            m.step,
            PIPELINING,
            r"rank 1: the loss differs by 0",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["ddp", "fully_shard", "pipelining"],
)
def test_the_smallest_reproduction_is_a_script_of_torch(
    build, batches, step, strategy, said, ranks, tmp_path
):
    file = tmp_path / "smallest.py"
    report = verify(build, batches, parallel=strategy, step=step, ranks=ranks, reproduce=file)
    assert report.reproduction == f"torchrun --nproc-per-node 2 {file}"
    assert report.reproduction in report.to_html()
    text = file.read_text()
    assert ("del model.get_submodule('blocks')[1:]" in text) == (build is m.build)
    assert "tp_verify" not in text.replace("tests/tp_verify", "")
    lines = [line for line in text.partition("import runpy")[2].splitlines() if line]
    assert len(lines) <= 32, text
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(file)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(start, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert re.search(said, done.stdout), text + done.stdout + done.stderr


def test_a_script_that_cannot_name_what_it_needs_is_refused_before_anything_runs():
    for strategy, said in (
        (Dies(), "Dies has no lines for a script"),
        (MoreDropout(), r"MoreDropout has a parallelize\(\) that its lines\(\) lack: override lines\(\)"),
        (lambda model: model, "at the top of a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            verify(m.build, m.EVEN, parallel=strategy, step=m.step, reproduce="smallest.py")


class Dies(Strategy):
    def parallelize(self, model):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("rank 1 has no memory left")
        torch.distributed.barrier()
        return model


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_cause():
    with pytest.raises(RankFailedError, match="rank 1 has no memory left"):
        verify(Branches, [torch.ones(4, 3)], parallel=Dies(), step=square, timeout_s=300)


class Waits(strategies.DDP):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def backward(self, model, step, parts):
        if torch.distributed.get_rank():
            with self.file.open("a") as file:
                file.write("once\n")
            time.sleep(60)
        return super().backward(model, step, parts)


@pytest.mark.slow
@pytest.mark.takes(40)
def test_ranks_that_wait_on_the_first_batch_are_not_asked_for_each_choice_of_others(tmp_path, capfd):
    with pytest.raises(RankFailedError, match="had not ended at the deadline"):
        verify(m.build, m.EVEN[:1], parallel=Waits(tmp_path / "runs"), step=m.step, timeout_s=10.0)
    assert (tmp_path / "runs").read_text().count("once") == 2
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "shard", "pipeline"])
def test_the_backends_of_tp_are_proven(name, ranks):
    report = verify(
        m.build,
        m.EVEN,
        parallel=strategies.InstalledBackend(name),
        step=m.step,
        optimizer=m.adamw,
        ranks=ranks,
        max_norm=0.1,
    )
    assert report.ok, str(report)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=2, **sizes))


def own_loss(model, batch):
    return model(input_ids=batch["tokens"], labels=batch["labels"], use_cache=False).loss


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["pipeline", "context"])  # which has parts of sequences: no positions from 0
def test_backends_that_split_samples_are_proven(name, ranks):
    report = verify(
        llama,
        m.EVEN,
        parallel=strategies.InstalledBackend(name),
        step=own_loss,
        optimizer=m.adamw,
        ranks=ranks,
        max_norm=0.1,
    )
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("config", [{"tp_size": 2}, {"fsdp_size": 2}], ids=str)
def test_a_model_of_transformers_is_proven_by_its_own_plan(config, ranks):
    report = verify(llama, m.EVEN, parallel=strategies.Transformers(**config), step=own_loss, ranks=ranks)
    assert report.ok, str(report)


def fsdp_plugin():
    from accelerate.utils import FullyShardedDataParallelPlugin

    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")}


@pytest.mark.slow
@pytest.mark.needs("accelerate")
def test_accelerate_is_proven_with_fsdp2():
    report = verify(m.build, m.EVEN, parallel=strategies.Accelerate(fsdp_plugin), step=m.step, max_norm=0.1)
    assert report.ok, str(report)
