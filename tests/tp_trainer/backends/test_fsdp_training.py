"""Training on shards is training on one device, whatever a script does besides."""

import copy
import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError, ModelError, StepError
from tp_testing import RankPool, run_ranks
from tp_trainer import Callback, FsdpOptions, GradientRules, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage

from tests.cases import first_fast
from tests.models import Block, BlockNet
from tests.reference_training import rows_and_sums, squared_error, train


def with_methods(model, batch):
    """Compute with methods, parts and parameters of the module, and with its forward pass twice."""
    hidden = model.encode(batch[0])
    both = model.out(hidden) * model.scale + model(batch[0]) + model(batch[0] / 2)
    return {
        "loss": (both - batch[1]).square().mean() + model.scale.square().sum(),
        "size": hidden.abs().mean(),
    }


def is_inside(module):
    """Whether a module is a block, or the first layer in one."""
    return isinstance(module, Block) or getattr(module, "out_features", 0) == 10


def loader(samples=22):
    return DataLoader(rows_and_sums(samples, seed=3, curved=True), batch_size=4, shuffle=True)


def adam(model, **kwargs):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, **kwargs)


def sgd(model, **kwargs):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01, **kwargs)


def trainer_of(backend="fsdp", *, options=None, **kwargs):
    return Trainer(backend=backend, devices="cpu", seed=2, progress=False, options=options, **kwargs)


def fit(backend="fsdp", *, options=None, run=squared_error, make=adam, trainer=None, **arguments):
    """Return the losses and the whole state after training."""
    model = BlockNet()
    with trainer_of(backend, options=options, **(trainer or {})) as it:
        history = it.fit(model, make(model), loader(), step=run, epochs=2, validation=loader(5), **arguments)
        state = {n: t.clone() for n, t in it.session.model_state(model).items()}
        return [(r.train, r.val) for r in history], state


def assert_as_on_one_device(two_ranks, **kwargs):
    losses, state = fit("single", **{k: v for k, v in kwargs.items() if k != "options"})
    for found, weights in two_ranks.run(functools.partial(fit, **kwargs)):
        for record, expected in zip(found, losses, strict=True):
            for part, wanted in zip(record, expected, strict=True):
                assert part == pytest.approx(wanted, rel=1e-9)
        assert list(weights) == list(state)
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_a_step_may_use_methods_parts_and_parameters_of_the_module(two_ranks):
    assert_as_on_one_device(two_ranks, run=with_methods)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        FsdpOptions(reshard_after_forward=False),
        FsdpOptions(activation_checkpointing=True),
        FsdpOptions(units=Block, prefetch=2),
        FsdpOptions(units=is_inside),
        FsdpOptions(replicas=2),
    ],
    ids=["kept", "checkpointed", "prefetch", "nested", "copies"],
)
def test_every_option_leads_to_the_same_weights(two_ranks, options):
    assert_as_on_one_device(two_ranks, options=options, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (adam, {"foreach": False}),
        (adam, {"fused": True}),
        (sgd, {"foreach": False}),
        (sgd, {"foreach": True}),
    ],
)
def test_optimizers_that_treat_each_element_by_itself_do_what_they_do_on_one_device(two_ranks, make, kwargs):
    assert_as_on_one_device(two_ranks, make=functools.partial(make, **kwargs))


@pytest.mark.slow
def test_accumulation_and_clipping_together(two_ranks):
    assert_as_on_one_device(
        two_ranks, trainer={"accumulate": 3}, clip_norm=0.3, gradients=GradientRules(clip_value=0.1)
    )


@pytest.mark.slow
def test_four_ranks_in_two_copies_lead_to_the_same_weights():
    ranks = RankPool(4)
    try:
        assert_as_on_one_device(ranks, options=FsdpOptions(replicas=2), clip_norm=0.5)
        assert_as_on_one_device(ranks, run=with_methods)
    finally:
        ranks.close()


# -- communication --------------------------------------------------------------------------------


def count_exchanges(accumulate):
    model = BlockNet()
    # torch since 2.13 has another name for it
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    watched = mock.patch.object(dist, name, wraps=getattr(dist, name))
    with trainer_of(accumulate=accumulate) as trainer, watched as exchanges:
        trainer.fit(model, adam(model), loader(16), step=squared_error)
    return exchanges.call_count


@pytest.mark.slow
def test_accumulated_batches_reduce_their_gradients_once(two_ranks):
    assert two_ranks.run(count_exchanges, 1) == [4 * 4, 4 * 4]  # batches, units with the model itself
    assert two_ranks.run(count_exchanges, 4) == [4, 4]


# -- optimizers -----------------------------------------------------------------------------------


def refused_optimizers():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    with trainer_of() as trainer:
        model = BlockNet()
        trainer.prepare(model)
        for make in (
            torch.optim.LBFGS,
            lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
            lambda p: ZeroRedundancyOptimizer(p, optimizer_class=torch.optim.SGD, lr=0.1),
        ):
            for use in (lambda o: trainer.prepare(model, o), lambda o: o.step(lambda: torch.zeros(()))):
                with pytest.raises(ConfigError) as caught:
                    use(make(list(model.parameters())))
                found.append(str(caught.value))
    return found


def stale_optimizer():
    """Return the refusals of an optimizer that has parameters which shards have taken the place of."""
    model = BlockNet()
    optimizer = adam(model)
    found = []
    with trainer_of() as trainer:
        model, batches = trainer.prepare(model, loader())
        trainer.backward(trainer.run(squared_error, model, next(iter(batches))))
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        found.append(str(caught.value))
        with pytest.raises(ConfigError) as caught:
            trainer.loop(batches, state={"model": model, "optimizer": optimizer})
        found.append(str(caught.value))
    return found


def looked_between(backend="fsdp", *, reshards=True, runs=True):
    """Return losses before each update, between it and the backward pass, and after it; and norms."""
    model, found = BlockNet(), []
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3)).double()  # the same on all ranks
    batch = x, x.sum(1, keepdim=True).sin()
    with trainer_of(backend, options={"fsdp": {"reshard_after_forward": reshards}}) as trainer:
        loss_of = functools.partial(trainer.run, squared_error) if runs else squared_error

        @torch.no_grad()
        def looked():
            return float(loss_of(model, batch))

        model = trainer.prepare(model)
        found.append(looked())
        optimizer = trainer.prepare(adam(model))
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            trainer.backward(loss)
            found += [float(loss.detach()), looked(), float(trainer.session.grad_norm(model))]
            optimizer.step()
            found.append(looked())
    return found


def even_lbfgs(backend="fsdp"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Block(4, 8), nn.Linear(4, 2)).double()
    with trainer_of(backend) as trainer:
        model, batches = trainer.prepare(model, loader())
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
        for batch in batches:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = trainer.run(squared_error, model, batch)
                trainer.backward(loss)
                return trainer.global_loss(loss)

            optimizer.step(closure)
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


def optimizer_with_a_state(backend="fsdp"):
    """Return the weights of a run whose optimizer has taken steps before the model was sharded."""
    model = BlockNet()
    optimizer = adam(model)
    squared_error(model, loader().dataset.tensors).backward()
    optimizer.step()
    with trainer_of(backend) as trainer:
        trainer.fit(model, optimizer, loader(8), step=squared_error)
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


def optimizer_made_after():
    with trainer_of() as trainer:
        model, batches = trainer.prepare(BlockNet(), loader())
        optimizer = trainer.prepare(adam(model))
        for batch in batches:
            optimizer.zero_grad()
            trainer.backward(trainer.run(squared_error, model, batch))
            trainer.update(model, optimizer)
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


@pytest.mark.slow
def test_an_optimizer_that_has_a_state_keeps_it(two_ranks):
    expected = optimizer_with_a_state("single")
    for state in two_ranks.run(optimizer_with_a_state):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def living_weights():
    """Return how many whole weights are alive after each unit that ``prepare`` shards."""
    from torch.distributed import fsdp

    model = nn.Sequential(*(Block(2, 4) for _ in range(3)), nn.Linear(2, 1))
    whole, found, shard = [weakref.ref(p) for p in model.parameters()], [], fsdp.fully_shard

    def watched(module, **options):
        shard(module, **options)
        found.append(sum(one() is not None for one in whole))

    gc.collect()
    gc.disable()  # so that nothing but references decides
    with pytest.MonkeyPatch.context() as patch, Trainer(backend="fsdp", devices="cpu") as trainer:
        patch.setattr(fsdp, "fully_shard", watched)
        trainer.prepare(model)
    gc.enable()
    return found


@pytest.mark.slow
def test_whole_weights_of_a_unit_are_freed_before_the_next_one_is_sharded(two_ranks):
    for found in two_ranks.run(living_weights):
        assert found == [10, 6, 2, 0]


def test_an_optimizer_may_be_made_after_the_model_was_prepared(two_ranks):
    model = BlockNet()
    with trainer_of("single") as trainer:
        train(model, adam(model), trainer.prepare(loader()), squared_error)
    for state in two_ranks.run(optimizer_made_after):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10)


def out_of_memory(options):
    found = []
    with trainer_of(options=options) as trainer:
        model, batches = trainer.prepare(BlockNet(), loader(8))
        # Before passes that end halfway: these leave the model with parameters that it has gathered.
        optimizer = trainer.prepare(sgd(model))

        def full(*_):
            raise torch.OutOfMemoryError("the device is full")

        first, second = batches
        with pytest.raises(torch.OutOfMemoryError, match="the device is full") as caught:
            trainer.run(full, model, first)
        found.append(caught.value.__notes__)
        loss = trainer.run(squared_error, model, second)
        loss.register_hook(full)
        with pytest.raises(torch.OutOfMemoryError, match="the device is full") as caught:
            trainer.backward(loss)
        found.append(caught.value.__notes__)
        trainer.backward(trainer.run(squared_error, model, second))
        optimizer.register_step_pre_hook(full)
        with pytest.raises(torch.OutOfMemoryError, match="the device is full") as caught:
            trainer.update(model, optimizer)
        found.append(caught.value.__notes__)
    return found


@pytest.mark.slow
def test_where_memory_is_not_enough_the_error_says_what_helps(two_ranks):
    for forward, backward, update in two_ranks.run(out_of_memory, FsdpOptions(reshard_after_forward=False)):
        assert forward == backward
        first, table = forward
        assert "more ranks, reshard_after_forward=True, activation_checkpointing=True, offload=True" in first
        assert table == update[0]
        assert table.startswith("Memory has run out: less is needed with a smaller batch")
        assert "parameters sharded over 2 processes" in table


# -- what torch has besides -----------------------------------------------------------------------


def averages_and_hooks():
    """Return an average of the weights, made of this rank's parts, and what hooks saw of gradients."""
    model, seen = BlockNet(), []
    with trainer_of() as trainer:
        model = trainer.prepare(model)
        model.out.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.full_tensor().clone())
        )
        optimizer = sgd(model)
        average = {n: p.detach().clone() for n, p in model.named_parameters()}

        def update(*_):
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter.detach(), 0.1)

        optimizer.register_step_post_hook(update)
        trainer.fit(model, optimizer, loader(8), step=squared_error)
        return {n: t.full_tensor() for n, t in average.items()}, seen


@pytest.mark.slow
def test_averages_of_weights_and_hooks_on_gradients(two_ranks):
    model, seen = BlockNet(), []
    model.out.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = sgd(model)
    optimizer.register_step_post_hook(
        lambda *_: [average[n].lerp_(p.detach(), 0.1) for n, p in model.named_parameters()]
    )
    with trainer_of("single") as trainer:
        trainer.fit(model, optimizer, loader(8), step=squared_error)
    for found, gradients in two_ranks.run(averages_and_hooks):
        for name, tensor in average.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(gradients, seen, rtol=1e-8, atol=1e-10)


class AddL1(Callback):
    """Adds the gradient of an L1 penalty, as the documents say."""

    @torch.no_grad()
    def on_optimizer_step(self, run, grad_norm):
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.sign(), alpha=0.01)


def with_l1(model, batch):
    return squared_error(model, batch) + 0.01 * sum(
        p.abs().sum() for p in model.parameters() if p.requires_grad
    )


def of_whole_tensors(model, batch):
    return squared_error(model, batch) + sum(p.full_tensor().abs().sum() for p in model.blocks.parameters())


def gradient_penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return squared_error(model, batch) + slope.square().mean()


def gradients_of_parameters(model, batch):
    loss = squared_error(model, batch)
    return loss + sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.blocks.parameters())))


def perturbed(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    return squared_error(model, (batch[0] + 0.1 * slope, batch[1]))


def refused_steps():
    found = []
    for run in (with_l1, of_whole_tensors, gradient_penalty, gradients_of_parameters, perturbed):
        with pytest.raises(StepError) as caught:
            fit(run=run)
        found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_penalties_over_shards_and_steps_that_go_back_are_refused_with_what_to_write(two_ranks):
    for found in two_ranks.run(refused_steps):
        for message in found[:2]:
            assert "parameter.grad.add_(parameter.sign(), alpha=...)" in message
        for message in found[2:]:
            assert "take the backend 'ddp'" in message


@pytest.mark.slow
def test_a_penalty_that_is_written_so_is_that_of_one_device(two_ranks):
    _, expected = fit("single", run=with_l1)
    for _, weights in two_ranks.run(functools.partial(fit, callbacks=[AddL1()])):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)


def convolutions(backend="fsdp"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(4)).double()
    with trainer_of(backend) as trainer:
        batches = DataLoader(images.contiguous(memory_format=torch.channels_last), batch_size=4)
        trainer.fit(model, sgd(model), batches, step=lambda model, x: model(x).square().mean())
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


def copied_models():
    """Return what is said of copies of a prepared model, and whether one from before was prepared apart."""
    plain = BlockNet()
    teacher, found = copy.deepcopy(plain), []
    with trainer_of() as trainer:
        model, teacher = trainer.prepare(plain), trainer.prepare(teacher)
        for make in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
            with pytest.raises(ModelError) as caught:
                make(model)
            found.append(str(caught.value))
        pairs = zip(model.parameters(), teacher.parameters(), strict=True)
        return found, all(p is not q and p.full_tensor().equal(q.full_tensor()) for p, q in pairs)


def test_copies_of_a_sharded_model_are_refused_with_what_to_do(two_ranks):
    for messages, is_apart in two_ranks.run(copied_models):
        assert all("callbacks, ExponentialMovingAverage and Stochastic" in text for text in messages)
        assert is_apart


def test_a_model_in_channels_last_is_that_of_one_device(two_ranks):
    expected = convolutions("single")
    for state in two_ranks.run(convolutions):
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)


def outside_of_a_unit():
    with trainer_of() as trainer:
        model, batches = trainer.prepare(BlockNet(), loader(4))

        def wrong(model, batch):
            return nn.functional.linear(model.into(batch[0]), model.blocks[0].up.weight).sum()

        for batch in batches:
            with pytest.raises(StepError) as caught:
                trainer.run(wrong, model, batch)
            # The next step finds nothing of the one that failed.
            trainer.backward(trainer.run(squared_error, model, batch))
        return str(caught.value)


@pytest.mark.slow
def test_a_step_that_uses_a_units_parameter_outside_of_it_is_told_so(two_ranks):
    for message in two_ranks.run(outside_of_a_unit):
        assert "outside of the unit's forward pass" in message


# -- models that are sharded already --------------------------------------------------------------


def shard_blocks(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)


def shard_all(model):
    from torch.distributed.fsdp import fully_shard

    shard_blocks(model)
    fully_shard(model)


def fit_given(shard):
    with trainer_of() as starts:
        starts.session.barrier()
        model = BlockNet()
        shard(model)
        with trainer_of("auto") as trainer:
            trainer.fit(model, adam(model), loader(), step=squared_error, epochs=2)
            state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
            return trainer.selection.chosen.name, state


@pytest.mark.slow
@pytest.mark.parametrize("shard", [shard_all, shard_blocks])
def test_a_model_that_fully_shard_has_sharded_is_taken_over(two_ranks, shard):
    _, state = fit("single")
    for name, found in two_ranks.run(fit_given, shard):
        assert name == "fsdp"
        for key, tensor in state.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-8, atol=1e-10)


def distribute(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module

    mesh = init_device_mesh("cpu", (2,))

    def cut(_name, module, mesh):
        for name, parameter in list(module.named_parameters(recurse=False)):
            from torch.distributed.tensor import distribute_tensor

            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    distribute_module(model.into, mesh, cut)


def over_one_rank(model):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("other", "alone"))
    fully_shard(model, mesh=mesh["alone"])


def flat(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model.into = FullyShardedDataParallel(model.into, device_id=torch.device("cpu"))


def refused(shard):
    with trainer_of() as trainer:
        trainer.session.barrier()
        model = BlockNet()
        shard(model)
        with pytest.raises((ModelError, LookupError)) as caught:
            trainer.prepare(model)
        return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (distribute, "the model's parameters are split otherwise already"),
        (over_one_rank, "over 1 ranks, and the job has 2"),
        (flat, "is a FullyShardedDataParallel"),
    ],
)
def test_a_model_that_is_split_otherwise_is_refused(two_ranks, shard, words):
    for message in two_ranks.run(refused, shard):
        assert words in message


@pytest.mark.slow
def test_optimizers_that_need_whole_matrices_are_refused_by_name(two_ranks):
    words = (
        "LBFGS computes with whole matrices",
        "no fused SGD for DTensors",
        "ZeroRedundancyOptimizer",
    )
    for found in two_ranks.run(refused_optimizers):
        for word, prepared, made_after in zip(words, found[::2], found[1::2], strict=True):
            assert word in prepared
            assert word in made_after


def test_an_optimizer_from_before_the_preparation_that_was_not_given_to_it_is_refused(two_ranks):
    for found in two_ranks.run(stale_optimizer):
        assert all("AdamW was made before the model was prepared" in message for message in found)


@pytest.mark.parametrize("reshards", first_fast([True, False]))
def test_forward_passes_without_a_backward_pass_change_nothing(two_ranks, reshards):
    expected = looked_between("single")
    for runs in (True, False):
        for found in two_ranks.run(functools.partial(looked_between, reshards=reshards, runs=runs)):
            assert found == pytest.approx(expected, rel=1e-9)


def averaged(backend, options=None):
    average = ExponentialMovingAverage(0.5)
    return fit(backend, options=options, trainer={"accumulate": 2}, callbacks=[average])[0]


@pytest.mark.slow
def test_an_average_is_evaluated_and_put_away_though_units_stay_gathered(two_ranks):
    expected = [[pytest.approx(losses) for losses in record] for record in averaged("single")]
    for found in two_ranks.run(averaged, "fsdp", {"fsdp": {"reshard_after_forward": False}}):
        assert [list(record) for record in found] == expected


@pytest.mark.slow
def test_lbfgs_is_that_of_one_device_where_all_shards_are_of_one_size(two_ranks):
    expected = even_lbfgs("single")
    for state in two_ranks.run(even_lbfgs):
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)


def resumed_elsewhere(folder, backend, epochs):
    model = BlockNet()
    with trainer_of(backend) as trainer:
        trainer.fit(
            model, adam(model), loader(), step=squared_error, epochs=epochs, checkpoint=folder, resume="auto"
        )
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


@pytest.mark.slow
def test_a_run_goes_on_on_other_backends_and_numbers_of_ranks(two_ranks, tmp_path):
    resumed_elsewhere(tmp_path, "single", 1)
    two_ranks.run(resumed_elsewhere, tmp_path, "fsdp", 2)
    two_ranks.run(resumed_elsewhere, tmp_path, "ddp", 3)
    run_ranks(resumed_elsewhere, 4, tmp_path, "fsdp", 4)
    resumed_elsewhere(tmp_path, "single", 5)
    found = two_ranks.run(resumed_elsewhere, tmp_path, "fsdp", 6)
    expected = resumed_elsewhere(tmp_path / "other", "single", 6)
    for state in found:
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-7, atol=1e-9)
