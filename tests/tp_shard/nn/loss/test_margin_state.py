"""The loss with margins as a layer: its state, its optimizers, and the copies of a model."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_shard._groups._group import ALONE  # private: the group of a rank alone, beside the ranks' own

d = ts.distributed
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
}


def made(**options):
    torch.manual_seed(1)
    return nn.ModuleDict(
        {"body": nn.Linear(4, 6), "head": ts.nn.MarginCrossEntropy(6, 11, scale=8.0, **options)}
    )


def trained(model, optimizer, steps=3, seed=5):
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        x, target = torch.randn(5, 4), torch.randint(0, 11, (5,))
        optimizer.zero_grad()
        loss = model["head"](model["body"](x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def a_collected_state_is_that_of_the_whole_layer_and_goes_back():
    model = made(sample_rate=0.5)
    trained(model, OPTIMIZERS["AdamW"](model.parameters()))
    whole = ts.collect_state_dict(model, model.state_dict())
    assert {name: tuple(t.shape) for name, t in whole.items()} == {
        "body.weight": (6, 4),
        "body.bias": (6,),
        "head.weight": (11, 6),
    }
    alone = made(sample_rate=0.5, group=ALONE)
    trained(alone, OPTIMIZERS["AdamW"](alone.parameters()))
    torch.testing.assert_close(dict(whole), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)
    other = made()
    other.load_state_dict(ts.relocate_state_dict(other, whole))
    assert torch.equal(other["head"].weight, model["head"].weight)


def copies_keep_their_shard():
    model = made(sample_rate=0.5)
    again = copy.deepcopy(model).double()
    assert ts.collect_state_dict(again, again.state_dict())["head.weight"].shape == (11, 6)
    assert ts.get_parallel_dim(again["head"].weight) == -1


def sampled_rows_are_updated_as_if_they_were_alone_and_others_stay():
    for name, make in OPTIMIZERS.items():
        model = made(sample_rate=0.3, sparse=True)
        head = model["head"]
        optimizer = make(model.parameters())
        ts.update_sampled_rows(optimizer)
        # The reference: each row is a parameter of its own, which gets no gradient in steps without it.
        rows = [nn.Parameter(row.clone()) for row in head.weight.detach()]
        reference = make(rows) if rows else None
        torch.manual_seed(3)
        for _ in range(4):
            x, target = torch.randn(3, 4), torch.randint(0, 11, (3,))
            optimizer.zero_grad()
            head(model["body"](x), target).backward()
            grad = head.weight.grad.coalesce()
            assert head.weight.grad.is_sparse
            for row in rows:
                row.grad = None
            for index, value in zip(grad.indices()[0].tolist(), grad.values(), strict=True):
                rows[index].grad = value.clone()
            optimizer.step()
            if reference is not None:
                reference.step()
        if name != "AdamW" and rows:  # whose correction of the bias counts all steps
            torch.testing.assert_close(head.weight.detach(), torch.stack(rows).detach())
        sizes = {tuple(v.shape) for v in optimizer.state[head.weight].values() if v.dim()}
        assert sizes == {tuple(head.weight.shape)}
        whole = ts.collect_optimizer_state_dict(model, optimizer)
        assert next(v.shape for v in whole["state"][2].values() if v.dim()) == (11, 6)


def lazy_adam_equals_torchs_sparse_adam():
    results = []
    for make, is_lazy in [(torch.optim.SparseAdam, False), (torch.optim.Adam, True)]:
        model = made(sample_rate=0.3, sparse=True)
        optimizer = make([model["head"].weight], lr=0.1)
        if is_lazy:
            ts.update_sampled_rows(optimizer)
        results.append([*trained(model, optimizer), model["head"].weight.detach().clone()])
    assert results[0][:-1] == pytest.approx(results[1][:-1])
    torch.testing.assert_close(results[0][-1], results[1][-1])


def sparse_and_dense_gradients_are_the_same_and_are_clipped_alike():
    results = []
    for sparse in (False, True):
        model = made(sample_rate=0.3, sparse=sparse)
        torch.manual_seed(2)
        for _ in range(2):  # accumulated, of two samples
            model["head"](model["body"](torch.randn(5, 4)), torch.arange(5)).backward()
        norm = ts.clip_grad_norm_(model, 0.1)
        grad = model["head"].weight.grad
        assert grad.is_sparse == sparse
        results.append((norm, grad.to_dense()))
    torch.testing.assert_close(results[0], results[1])


def a_closure_and_sparse_adam_are_refused():
    model = made(sample_rate=0.3, sparse=True)
    with pytest.raises(ValueError, match="SparseAdam touches the rows of a sparse gradient alone"):
        ts.update_sampled_rows(torch.optim.SparseAdam([model["head"].weight]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ts.update_sampled_rows(optimizer)
    model["head"](model["body"](torch.randn(5, 4)), torch.arange(5)).backward()
    with pytest.raises(ValueError, match="call it without a closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()


def the_table_tells_classes():
    assert "classes" in str(ts.summary(made()))
    if d.get_world_size() > 1:
        assert "all-gather forward, all-reduce forward" in str(ts.summary(made()))


CHECKS = [
    a_collected_state_is_that_of_the_whole_layer_and_goes_back,
    copies_keep_their_shard,
    sampled_rows_are_updated_as_if_they_were_alone_and_others_stay,
    lazy_adam_equals_torchs_sparse_adam,
    sparse_and_dense_gradients_are_the_same_and_are_clipped_alike,
    a_closure_and_sparse_adam_are_refused,
    the_table_tells_classes,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    torch.manual_seed(0)
    check()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


def resumed(folder):
    """Train, save on any number of ranks, and go on; return the next losses."""
    model = made(sample_rate=0.5)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    if not (folder / "checkpoint").exists():
        trained(model, optimizer)
        ts.save_sharded(model, folder / "checkpoint", optimizer=optimizer)
    else:
        ts.load_sharded(model, folder / "checkpoint", optimizer=optimizer)
    return trained(model, optimizer, seed=7)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_three(on_ranks, tmp_path):
    check = functools.partial(resumed, tmp_path)
    first = on_ranks(2, check)[0]
    assert check() == pytest.approx(first, rel=1e-5)
    assert on_ranks(3, check)[0] == pytest.approx(first, rel=1e-5)


def copies_of_a_split_head_train_like_one(sparse):
    classes = 11
    whole = made(sample_rate=0.4, sparse=sparse, group=ALONE)
    model = made(sample_rate=0.4, sparse=sparse)
    copies = DistributedDataParallel(Loss(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, whole)]
    torch.manual_seed(9)
    for _ in range(2):
        x, target = torch.randn(8, 4), torch.randint(0, classes, (8,))
        state = torch.get_rng_state()
        half = slice(0, 4) if dist.get_rank() < 2 else slice(4, 8)
        copies(x[half], target[half]).backward()
        losses = []
        for part in (slice(0, 4), slice(4, 8)):
            torch.set_rng_state(state)
            losses.append(whole["head"](whole["body"](x[part]), target[part]))
        (sum(losses) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = ts.collect_state_dict(model, model.state_dict())
    torch.testing.assert_close(dict(found), dict(whole.state_dict()), rtol=1e-4, atol=1e-5)


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target):
        return self.model["head"](self.model["body"](x), target)


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_copies_of_a_split_head_train_like_one(on_ranks, sparse):
    on_ranks(4, functools.partial(copies_of_a_split_head_train_like_one, sparse), group_size=2)
