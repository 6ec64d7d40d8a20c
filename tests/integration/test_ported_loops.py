"""Further jobs that were written for other trainers: as by hand on every backend, interrupted and resumed.

A GAN, pairs of two towers, a language model in a loop of one's own, a stream.
"""

import functools
import itertools
import multiprocessing

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Limits, Trainer

from tests.models import perceptron
from tests.reference_training import train

EPOCHS, N, BATCH = 2, 22, 8  # the last batch of an epoch has 6
IN_ONE_PROCESS = {
    "single": {"devices": "cpu"},
    "tuple": {"devices": ["cpu", "cpu"], "backend": "tuple"},
    "dp-gather": {"devices": ["cpu", "cpu"], "backend": "dp-gather"},
}
ON_RANKS = {name: {"devices": "cpu", "backend": name} for name in ("ddp", "fsdp", "shard")}


def trainer_of(where):
    return Trainer(seed=0, progress=False, **where)


def loader_of(dataset, workers=0):
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)


def on_shards(where, model, plan=None):
    """Split a model over the ranks where the backend is for that; by a plan that is found, without one."""
    if where.get("backend") != "shard":
        return model
    import tp_shard as ts

    if not torch.distributed.is_initialized():
        ts.distributed.init_process_group(-1)
    return ts.parallelize(model, plan or ts.plans.auto(model, verbose=False))


def split_pair(first, second):
    from tp_shard import Column, Row

    return {first: Column(), second: Row()}


def joining(*names):
    from tp_shard import Column

    return dict.fromkeys(names, Column(gather_output=True))


def joined(state):
    return torch.cat([state[name].detach().flatten() for name in sorted(state)])


def weights_of(trainer, *models):
    """Return the whole weights of models, wherever their parts are."""
    return torch.cat([joined(trainer.session.model_state(model)) for model in models])


def weights_by_hand(*models):
    return torch.cat([joined(model.state_dict()) for model in models])


def in_order(dataset):
    """Yield the batches of all epochs in the order that a trainer would take them in."""
    with trainer_of(IN_ONE_PROCESS["single"]) as trainer:
        loader = trainer.prepare(loader_of(dataset))
        for _ in range(EPOCHS):
            yield from loader


# -- a GAN: two models, two optimizers, transposed convolutions, in a loop of one's own -----------------


def pictures_and_noise():
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return TensorDataset(draw(N, 1, 8, 8), draw(N, 4, 1, 1))


def gan_models():
    torch.manual_seed(1)
    gen = [nn.ConvTranspose2d(4, 4, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1)]
    disc = [nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten()]
    disc += [nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*gen).double(), nn.Sequential(*disc).double()


def disc_step(disc, gen, batch):
    real, noise = batch
    return F.softplus(-disc(real)).mean() + F.softplus(disc(gen(noise).detach())).mean()


def gen_step(gen, disc, batch):
    return F.softplus(-disc(gen(batch[1]))).mean()


def adams(*models):
    return [torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999)) for model in models]


def gan_job(where, *, folder=None, max_steps=None, workers=0):
    with trainer_of(where) as trainer:
        gen, disc = gan_models()
        disc = on_shards(where, disc, split_pair("3", "5"))
        gen, disc, batches = trainer.prepare(gen, disc, loader_of(pictures_and_noise(), workers))
        opt_g, opt_d = adams(gen, disc)
        with trainer.loop(
            batches,
            epochs=EPOCHS,
            max_steps=max_steps,
            state={"gen": gen, "disc": disc, "opt_g": opt_g, "opt_d": opt_d},
            checkpoint=folder and Checkpoints(folder, every_steps=2),
            resume=folder and "auto",
        ) as loop:
            for batch in loop:
                for optimizer, step, models in (
                    (opt_d, disc_step, (disc, gen)),
                    (opt_g, gen_step, (gen, disc)),
                ):
                    optimizer.zero_grad()
                    loss = trainer.run(step, *models, batch)
                    trainer.backward(loss)
                    optimizer.step()
                loop.log(loss_g=loss)
        return weights_of(trainer, gen, disc), [record.train["loss_g"] for record in loop.history]


def gan_by_hand():
    gen, disc = gan_models()
    opt_g, opt_d = adams(gen, disc)
    for batch in in_order(pictures_and_noise()):
        opt_d.zero_grad()
        disc_step(disc, gen, batch).backward()
        opt_d.step()
        opt_g.zero_grad()
        gen_step(gen, disc, batch).backward()
        opt_g.step()
    return weights_by_hand(gen, disc)


# -- pairs: two towers and a loss over the rows of the global batch -------------------------------------


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, a, b):
        return F.normalize(self.a(a), dim=1), F.normalize(self.b(b), dim=1)


def pairs():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    ways = [torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (6, 5)]
    return TensorDataset(*(hidden @ way for way in ways))


def info_nce(model, a, b):
    scores = a @ b.T * model.scale.exp()
    targets = torch.arange(len(scores))
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


def towers_and_optimizer(where):
    torch.manual_seed(1)
    model = on_shards(where, Towers().double(), joining("a", "b"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def pair_job(where, *, folder=None, max_steps=None, workers=0):
    model, optimizer = towers_and_optimizer(where)
    with trainer_of(where) as trainer:

        def step(model, batch):
            return info_nce(model, *(trainer.all_gather(rows) for rows in model(*batch)))

        history = trainer.fit(
            model,
            optimizer,
            loader_of(pairs(), workers),
            step=step,
            epochs=EPOCHS,
            max_steps=max_steps,
            checkpoint=folder and Checkpoints(folder, every_steps=2),
            resume=folder and "auto",
        )
        return weights_of(trainer, model), [record.train["loss"] for record in history]


def pair_job_by_hand():
    model, optimizer = towers_and_optimizer({})
    train(model, optimizer, in_order(pairs()), lambda model, batch: info_nce(model, *model(*batch)))
    return weights_by_hand(model)


# -- a language model: means over tokens, validated in a loop of one's own ------------------------------


def texts():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(40, (N, 10), generator=generator)
    lengths = torch.tensor([3 if i % 2 else 10 for i in range(N)])
    return TensorDataset(ids, torch.where(torch.arange(10) < lengths[:, None], ids, -100))


def make_gpt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_positions": 10, "n_embd": 8, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, **sizes, **off, **ends)
    ).double()


def predict_next(model, batch):
    ids, labels = batch
    scores, labels = model(input_ids=ids).logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (labels != -100).sum()}


def text_job(where, *, folder=None, max_steps=None, workers=0):
    with trainer_of(where) as trainer:
        model, batches = trainer.prepare(on_shards(where, make_gpt()), loader_of(texts(), workers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        few = DataLoader(texts(), batch_size=5)
        with trainer.loop(
            batches,
            epochs=EPOCHS,
            max_steps=max_steps,
            state={"model": model, "optimizer": optimizer},
            validation=lambda: trainer.evaluate(model, few, step=predict_next),
            checkpoint=folder and Checkpoints(folder, every_steps=2, best="val_loss"),
            resume=folder and "auto",
        ) as loop:
            for batch in loop:
                optimizer.zero_grad()
                trainer.backward(trainer.run(predict_next, model, batch))
                trainer.update(model, optimizer, clip_norm=0.5)
        return weights_of(trainer, model), [record.val["loss"] for record in loop.history]


def text_job_by_hand():
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    for batch in in_order(texts()):
        optimizer.zero_grad()
        predict_next(model, batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return weights_by_hand(model)


# -- each of them, on every backend ---------------------------------------------------------------------

JOBS = {
    "gan": (gan_job, functools.cache(gan_by_hand)),
    "pairs": (pair_job, functools.cache(pair_job_by_hand)),
    "texts": (text_job, functools.cache(text_job_by_hand)),
}


def _whole_and_resumed(job, where, folder):
    whole = job(where)
    multiprocessing.current_process()._config["daemon"] = False  # ranks of tests may not have workers else
    job(where, folder=folder, max_steps=4, workers=1)  # within the second epoch
    parts = job(where, folder=folder, workers=1)
    return whole, parts


def assert_resumed(whole, parts):
    assert torch.equal(parts[0], whole[0])
    assert parts[1] == whole[1]


def each_once(places):
    """Each job and each place once in the slow part; the others of the cross product are nightly."""
    cases = itertools.product(enumerate(JOBS), enumerate(places))
    mark = {True: pytest.mark.slow, False: pytest.mark.nightly}
    return [pytest.param(name, place, marks=mark[i == j]) for (i, name), (j, place) in cases]


@pytest.mark.parametrize(("name", "place"), each_once(IN_ONE_PROCESS))
def test_a_job_is_as_by_hand_and_resumed(tmp_path, name, place):
    job, by_hand = JOBS[name]
    whole, parts = _whole_and_resumed(job, IN_ONE_PROCESS[place], tmp_path)
    torch.testing.assert_close(whole[0], by_hand(), rtol=1e-6, atol=1e-9)
    assert_resumed(whole, parts)


@pytest.mark.parametrize(("name", "place"), each_once(ON_RANKS))
def test_a_job_is_as_by_hand_and_resumed_on_two_ranks(tmp_path, name, place):
    job, by_hand = JOBS[name]
    call = functools.partial(_whole_and_resumed, job, ON_RANKS[place], tmp_path)
    for whole, parts in run_ranks(call, 2):
        torch.testing.assert_close(whole[0], by_hand(), rtol=1e-6, atol=1e-9)
        assert_resumed(whole, parts)


# -- a stream: epochs of some steps, split over ranks and workers ---------------------------------------


class Rows(IterableDataset):
    """Rows without an end that knows where it stands; those of one share."""

    def __init__(self, index=0, count=1):
        self.index, self.count, self.done = index, count, 0

    def __iter__(self):
        while True:
            number = self.index + self.done * self.count
            self.done += 1
            yield torch.tensor([number % 7 - 3.0, number % 5 - 2.0], dtype=torch.float64), number

    def shard(self, index, count):
        return Rows(index, count)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def line_and_optimizer(where):
    model = perceptron(2, 4, 1)
    model = on_shards(where, model, split_pair("0", "2"))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def line_loss(model, rows):
    return (model(rows) - rows.sum(1, keepdim=True).tanh()).square().mean()


def stream_job(where, *, folder=None, max_steps=None):
    """Return the weights, and which rows each step of this process has seen."""
    model, optimizer = line_and_optimizer(where)
    seen = []

    def step(model, batch):
        seen.append(batch[1].tolist())
        return line_loss(model, batch[0])

    with trainer_of(where) as trainer:
        trainer.fit(
            model,
            optimizer,
            DataLoader(Rows(), batch_size=BATCH),
            step=step,
            epochs=3,
            limits=Limits(steps_per_epoch=3),
            max_steps=max_steps,
            checkpoint=folder and Checkpoints(folder, every_steps=2),
            resume=folder and "auto",
        )
        return weights_of(trainer, model), seen


def _stream_whole_and_resumed(where, folder):
    whole = stream_job(where)
    stream_job(where, folder=folder, max_steps=5)
    parts = stream_job(where, folder=folder)
    return *whole, torch.equal(whole[0], parts[0])


def check_stream(found):
    """Train by hand on what all processes have seen, step by step."""
    seen = [row for _, rows, _ in found for part in rows for row in part]
    assert sorted(seen) == list(range(9 * BATCH)), "each row is seen once"
    per_step = [len(rows) // 9 for _, rows, _ in found]
    model, optimizer = line_and_optimizer({})
    for number in range(9):
        batch = sorted(
            row
            for (_, rows, _), n in zip(found, per_step, strict=True)
            for part in rows[number * n : (number + 1) * n]
            for row in part
        )
        optimizer.zero_grad()
        rows = [[row % 7 - 3.0, row % 5 - 2.0] for row in batch]
        line_loss(model, torch.tensor(rows, dtype=torch.float64)).backward()
        optimizer.step()
    for weights, _, is_resumed in found:
        torch.testing.assert_close(weights, weights_by_hand(model), rtol=1e-9, atol=1e-12)
        assert is_resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [pytest.param(p, marks=pytest.mark.nightly if p == "dp-gather" else ()) for p in IN_ONE_PROCESS],
)
def test_a_stream_is_as_by_hand_and_resumed(tmp_path, place):
    check_stream([_stream_whole_and_resumed(IN_ONE_PROCESS[place], tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=pytest.mark.nightly if p == "ddp" else ()) for p in ON_RANKS]
)
def test_a_stream_is_as_by_hand_and_resumed_on_two_ranks(tmp_path, place):
    call = functools.partial(_stream_whole_and_resumed, ON_RANKS[place], tmp_path)
    found = run_ranks(call, 2)
    if place == "shard":  # which hold one model together, and see the same rows
        assert found[0][1] == found[1][1]
        found = found[:1]
    check_stream(found)
