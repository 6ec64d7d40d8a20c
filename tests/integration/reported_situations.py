"""Situations from public bug reports about training programs, each as the smallest program that has it.

A program trains with what its run offers, so that it is the same text by hand and with the trainer
(`situation_runs`). Its source is the repository and the number of the report.
"""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim import lr_scheduler as rates
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from tp_core.jobs import CompileOptions
from tp_trainer import Callback
from tp_trainer.callbacks import EarlyStopping, ExponentialMovingAverage, StochasticWeightAveraging

from tests.models import perceptron
from tests.reference_training import squared_error

__all__ = ["SITUATIONS", "Situation"]


@dataclass(frozen=True)
class Situation:
    """One program and the reports that it stands for.

    Attributes:
        program: The program: it gets `start`, and calls it with the options of the trainer.
        source: The repositories and numbers of its reports.
        refused: A part of the sentence that refuses the program, by the backend, or under "resumed".
        named: How the warning begins that says why numbers differ, by the backend.
        differs: Why numbers differ in silence, by the backend: what is known and open.
        differs_resumed: Why a resumed run has other numbers; empty if it has the same.
        within: How far numbers may lie apart, relative to the largest; more than rounding for half precision.
    """

    program: Callable[[Callable[..., Any]], None]
    source: str
    refused: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    differs_resumed: str = ""
    within: float = 1e-9


SITUATIONS: dict[str, Situation] = {}

UNUSED = {"ddp": {"find_unused_parameters": True}}


def reported(source, **options):
    """Register a program under its name."""

    def register(program):
        SITUATIONS[program.__name__] = Situation(program, source, **options)
        return program

    return register


# -- Data and models ------------------------------------------------------------------------------


def drawn(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(count=10, columns=4):
    """Return rows with a target; ten make batches of four, four and two, so that a third rank has none."""
    x = drawn(count, columns)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loader(data=None, size=4, **options):
    return DataLoader(rows() if data is None else data, batch_size=size, **options)


def net():
    return perceptron(4, 6, 1)


def tokens(count=10, length=6, words=7):
    """Return rows of tokens, and labels of which each row has another number that counts."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(words, (count, length), generator=generator)
    labels = torch.randint(words, (count, length), generator=generator)
    counted = torch.arange(count) * 5 % (length + 1)
    return TensorDataset(ids, labels.where(torch.arange(length) < counted[:, None], -100))


class Tagger(nn.Module):
    """Scores words at each token; its embedding is its head, too."""

    def __init__(self, words=7, width=5):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(words, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embed(ids))))


def token_loss(model, batch, **options):
    ids, labels = batch
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, **options)
    return {"loss": loss, "weight": (labels != -100).sum()}


class Each(Callback):
    """Calls a function with the run at one event."""

    def __init__(self, event, call):
        setattr(self, event, call)


def train(run, model, optimizer, batches, step, *, epochs=2, clip_norm=None, **state):
    """Train in a loop of one's own, with one optimizer."""
    state = {"model": model, "optimizer": optimizer, **state}
    for batch in run.loop(batches, epochs=epochs, state=state):
        optimizer.zero_grad()
        loss = run.run(step, model, batch)
        run.backward(loss)
        run.update(model, optimizer, clip_norm=clip_norm)
        run.log(loss=loss)


# -- Means, tokens and accumulation ---------------------------------------------------------------


@reported("huggingface/transformers 46731, 47261")
def label_smoothing_over_accumulated_tokens(start):
    run, model = start(accumulate=3), Tagger()

    def step(model, batch):
        return token_loss(model, batch, label_smoothing=0.1)

    run.fit(model, SGD(model.parameters(), lr=0.5, momentum=0.9), loader(tokens(), 2), step, epochs=3)


@reported("meta-pytorch/torchtune 1875")
def accumulated_tokens_that_are_clipped(start):
    run, model = start(accumulate=2), Tagger()
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.fit(model, optimizer, loader(tokens(), 3), token_loss, epochs=3, clip_norm=0.05)


@reported("huggingface/transformers 34191, 35203, 38448")
def shifted_labels_of_a_tied_language_model(start):
    def step(model, batch):
        ids, labels = batch
        shifted = labels[:, 1:]
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), shifted.flatten(), ignore_index=-100)
        right = (model(ids)[:, :-1].argmax(-1) == shifted).sum()
        counted = (shifted != -100).sum()
        return {"loss": loss, "weight": counted, "accuracy": right / counted.clamp(min=1)}

    run, model = start(accumulate=2), Tagger()
    optimizer = Adam(model.parameters(), lr=0.05)
    run.fit(model, optimizer, loader(tokens(), 3), step, epochs=3, validation=loader(tokens(7), 3))


@reported("OpenNMT/OpenNMT-py 2209")
def two_losses_over_different_units(start):
    """A mean over tokens and a prior that is a mean over samples, each with its own backward pass."""

    def prior(model, batch):
        return model(batch[0]).square().mean((1, 2)).mean() * 0.1

    run, model = start(), Tagger()
    model, batches = run.prepare(model, loader(tokens()))
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.5)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        run.backward(run.run(token_loss, model, batch))
        run.backward(run.run(prior, model, batch))
        run.update(model, optimizer, clip_norm=1.0)


@reported("OpenNMT/OpenNMT-py 526, eric-mitchell/direct-preference-optimization 20")
def sums_that_are_accumulated(start):
    def step(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    run, model = start(accumulate=2, loss="sum"), Tagger()
    run.fit(model, RMSprop(model.parameters(), lr=0.01), loader(tokens()), step, epochs=3, clip_norm=3.0)


@reported("huggingface/trl 2615, huggingface/transformers 35856")
def preferences_against_a_frozen_reference(start):
    """DPO: the policy and its frozen copy in one module, with accumulation."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = Tagger()
            self.reference = copy.deepcopy(self.policy).requires_grad_(requires_grad=False)

    def likelihood(model, ids):
        return F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).sum((1, 2))

    def step(model, batch):
        chosen, rejected = batch
        margin = likelihood(model.policy, chosen) - likelihood(model.policy, rejected)
        with torch.no_grad():
            expected = likelihood(model.reference, chosen) - likelihood(model.reference, rejected)
        return {"loss": -F.logsigmoid(0.1 * (margin - expected)).mean(), "margin": margin.mean()}

    run, model = start(accumulate=3), Pair()
    pairs = TensorDataset(tokens().tensors[0], tokens().tensors[0].flip(1))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)
    run.fit(model, optimizer, loader(pairs, 2), step, epochs=3)


@reported("huggingface/trl 5619, 5828, modelscope/ms-swift 10117")
def means_over_groups_of_completions(start):
    """GRPO: a sample is a prompt with its completions, normed within the group, masked and ragged."""

    def step(model, batch):
        x, reward, mask = batch
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        values = -(model(x)[..., 0] * advantage[..., None])
        each = (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        return each.mean(1).mean()

    mask = (torch.arange(5) < (torch.arange(30) % 6).reshape(10, 3, 1)).double()
    data = TensorDataset(drawn(10, 3, 5, 4), drawn(10, 3, seed=7), mask)
    run, model = start(accumulate=2), net()
    run.fit(model, Adam(model.parameters(), lr=0.02), loader(data), step, epochs=3, clip_norm=1.0)


@reported("huggingface/transformers 29561, 14309, hpcaitech/ColossalAI 1028, Lightning-AI 19987")
def the_last_window_of_an_epoch_is_short(start):
    run, model = start(accumulate=2), net()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    scheduler = rates.StepLR(optimizer, 2, gamma=0.5)
    run.fit(
        model, optimizer, loader(), squared_error, epochs=4, scheduler=scheduler, every="step", clip_norm=0.2
    )


@reported("huggingface/transformers 986, 1563, google/praxis 6")
def clipping_comes_after_the_accumulation(start):
    run, model = start(accumulate=3), net()
    optimizer = SGD(model.parameters(), lr=0.5)
    run.fit(model, optimizer, loader(size=2), squared_error, epochs=3, clip_norm=0.3, clip_value=0.1)


@reported("pytorch/pytorch 72047, 65329")
def classes_with_weights(start):
    """A mean over the weights of the classes, and not over samples."""
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    def step(model, batch):
        x, target = batch
        loss = F.cross_entropy(model(x), target, weight=weights)
        return {"loss": loss, "weight": weights[target].sum()}

    data = TensorDataset(drawn(10, 4), torch.arange(10) * 7 % 3)
    run, model = start(accumulate=2), perceptron(4, 6, 3)
    optimizer = AdamW(model.parameters(), lr=0.02)
    run.fit(model, optimizer, loader(data), step, epochs=3, validation=loader(data, 3))


@reported("pytorch/pytorch 104776")
def smoothed_labels_of_classes_with_weights(start):
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    def step(model, batch):
        x, target = batch
        loss = F.cross_entropy(model(x), target, weight=weights, label_smoothing=0.1)
        return {"loss": loss, "weight": weights[target].sum()}

    data = TensorDataset(drawn(10, 4), torch.arange(10) * 7 % 3)
    run, model = start(accumulate=2), perceptron(4, 6, 3)
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    run.fit(model, optimizer, loader(data), step, epochs=3, clip_norm=0.4)


@reported("dnouri/nolearn 247, pytorch/pytorch 25162, microsoft/hi-ml 743, mosaicml/composer 2218")
def a_validation_whose_last_batch_is_small(start):
    run, model = start(), net()

    def step(model, batch):
        error = model(batch[0]) - batch[1]
        return {"loss": error.square().mean(), "worst": (error.abs().mean(), error.numel())}

    optimizer = SGD(model.parameters(), lr=0.1)
    run.fit(model, optimizer, loader(), step, epochs=2, validation=loader(rows(7), 3))
    run.report(**run.evaluate(model, loader(rows(1), 3), step))


# -- Schedules ------------------------------------------------------------------------------------


def fit_with(start, make_scheduler, *, every="step", accumulate=1, epochs=4, **options):
    """Train with momentum and a scheduler."""
    run, model = start(accumulate=accumulate), net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make_scheduler(optimizer)
    run.fit(
        model, optimizer, loader(), squared_error, epochs=epochs, scheduler=scheduler, every=every, **options
    )
    run.report(momentum=optimizer.param_groups[0]["momentum"])


@reported("starVLA/starVLA 210, huggingface/diffusers 4387, EvolvingLMMs-Lab/OneVision-Encoder 82")
def a_warm_up_counts_optimizer_steps(start):
    fit_with(start, lambda o: rates.LambdaLR(o, lambda n: min(1.0, (n + 1) / 5)), accumulate=2)


@reported("huggingface/accelerate 2926, 2318, 1382, huggingface/transformers 24088")
def a_schedule_counts_steps_and_not_ranks(start):
    fit_with(start, lambda o: rates.LinearLR(o, start_factor=0.1, total_iters=7))


@reported("hpcaitech/ColossalAI 1112, huggingface/accelerate 484")
def one_cycle_of_rates_and_betas(start):
    run, model = start(accumulate=2), net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = rates.OneCycleLR(optimizer, 0.05, total_steps=6)
    run.fit(model, optimizer, loader(), squared_error, epochs=3, scheduler=scheduler, every="step")
    run.report(betas=optimizer.param_groups[0]["betas"])


@reported("pytorch/pytorch 23480, 110493, 88791")
def cosine_with_warm_restarts(start):
    fit_with(start, lambda o: rates.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2, eta_min=0.001))


@reported("pytorch/pytorch 65342, Lightning-AI/pytorch-lightning 5455, huggingface/transformers 27749")
def a_cosine_over_epochs(start):
    fit_with(start, lambda o: rates.CosineAnnealingLR(o, 5, eta_min=0.01), every="epoch")


@reported("pytorch/pytorch 67586, 162591, 171515")
def a_sequence_of_schedules(start):
    def make(optimizer):
        first = rates.ConstantLR(optimizer, factor=0.1, total_iters=2)
        return rates.SequentialLR(optimizer, [first, rates.ExponentialLR(optimizer, 0.8)], milestones=[3])

    fit_with(start, make)


@reported("pytorch/pytorch 63457")
def chained_schedules(start):
    def make(optimizer):
        return rates.ChainedScheduler(
            [rates.ConstantLR(optimizer, 0.5, 3), rates.MultiplicativeLR(optimizer, lambda _: 0.95)],
            optimizer,
        )

    fit_with(start, make)


@reported("pytorch/pytorch 162359, 163103, axolotl-ai-cloud/axolotl 3012")
def a_rate_that_is_a_tensor(start):
    run, model = start(), net()
    optimizer = SGD(
        model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.5, foreach=False
    )
    warm = rates.LinearLR(optimizer, 0.2, total_iters=3)
    scheduler = rates.SequentialLR(optimizer, [warm, rates.CosineAnnealingLR(optimizer, 6)], milestones=[3])
    run.fit(model, optimizer, loader(), squared_error, epochs=3, scheduler=scheduler, every="step")


@reported("pytorch/pytorch 21965, 22107")
def a_cycle_of_rates_and_momentum(start):
    fit_with(start, lambda o: rates.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum=True))


@reported("Lightning-AI/pytorch-lightning 673, 2976")
def a_plateau_of_the_validation(start):
    def make(optimizer):
        return rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)

    fit_with(start, make, every="epoch", epochs=5, validation=loader(rows(7), 3))


@reported(
    "pytorch/pytorch 20997, 62475, 79888", refused={"resumed": "make the optimizer from the parameters"}
)
def a_group_that_joins_before_a_plateau(start):
    """A head is trained first; the body joins the optimizer in the second epoch."""

    def join(run):
        if run.epoch == 2 and len(run.optimizer.param_groups) == 1:
            run.optimizer.add_param_group({"params": [*run.model[0].parameters()], "lr": 0.05})

    run, model = start(), net()
    optimizer = SGD(model[2].parameters(), lr=0.2)
    scheduler = rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    joining = [Each("on_epoch_start", join)]
    run.fit(model, optimizer, loader(), squared_error, epochs=4, scheduler=scheduler, callbacks=joining)


@reported("microsoft/hi-ml 611, HorizonRobotics/alf 1578")
def groups_with_schedules_of_their_own(start):
    run, model = start(), net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.2},
        {"params": model[2].parameters(), "momentum": 0.9},
    ]
    optimizer = SGD(groups, lr=0.05)
    scheduler = rates.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (n + 1)])
    run.fit(model, optimizer, loader(), squared_error, epochs=3, scheduler=scheduler, every="step")


@reported("aqlaboratory/openfold 181, microsoft/Swin-Transformer 185")
def rates_that_a_program_sets_itself(start):
    """The rate, the decay and the momentum of each step follow from its number, as in many scripts."""

    def schedule(run):
        for group in run.optimizer.param_groups:
            group["lr"] = 0.2 / (1 + run.step)
            group["weight_decay"] = 0.01 * run.step
            group["momentum"] = min(0.9, 0.1 * run.step)

    run, model = start(), net()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.fit(model, optimizer, loader(), squared_error, epochs=3, callbacks=[Each("on_step_end", schedule)])


@reported(
    "ildoonet/pytorch-gradual-warmup-lr 27", refused={"resumed": "the state 'scheduler:scheduler' holds"}
)
def a_schedule_that_holds_another(start):
    class Gradual(rates.LRScheduler):
        def __init__(self, optimizer, after):
            self.after, self.steps = after, 0
            super().__init__(optimizer)

        def get_lr(self):
            return [base * min(1.0, self.last_epoch / 3) for base in self.base_lrs]

        def step(self, epoch=None):
            if self.last_epoch >= 3:
                self.after.step()
                self._last_lr = self.after.get_last_lr()
            else:
                super().step()

    fit_with(start, lambda o: Gradual(o, rates.CosineAnnealingLR(o, 8)))


# -- Optimizers and groups ------------------------------------------------------------------------


@reported("open-mmlab/mmdetection 6599, facebookresearch/fairscale 539")
def a_group_at_rest(start):
    """A group whose rate is zero, beside others with a decay of their own."""
    run, model = start(), perceptron(4, 6, 6, 1)
    groups = [
        {"params": model[0].parameters(), "lr": 0.0, "weight_decay": 0.5},
        {"params": model[2].parameters(), "lr": 0.02, "betas": (0.5, 0.9)},
        {"params": model[4].parameters(), "weight_decay": 0.3},
    ]
    run.fit(model, AdamW(groups, lr=0.05, amsgrad=True), loader(), squared_error, epochs=3)


@reported("pytorch/pytorch 101343, huggingface/accelerate 1843, 3213")
def groups_by_names_after_the_preparation(start):
    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    optimizer = AdamW(
        [{"params": decayed, "weight_decay": 0.4}, {"params": others, "weight_decay": 0.0}], lr=0.05
    )
    train(run, model, optimizer, batches, squared_error, clip_norm=0.5)


@reported("pytorch/pytorch 1489, 6031, facebookresearch/fairscale 380")
def parameters_in_another_order_at_the_resume(start):
    run, model = start(), net()
    parameters = [*model.parameters()]
    optimizer = Adam(parameters[::-1] if run.is_resumed else parameters, lr=0.05)
    run.fit(model, optimizer, loader(), squared_error, epochs=3)


@reported("pytorch/pytorch 140514, 108860")
def a_fused_optimizer(start):
    run, model = start(accumulate=2), net()
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
    run.fit(model, optimizer, loader(), squared_error, epochs=4, clip_norm=0.5)


@reported("pytorch/pytorch 183207, 134191")
def an_optimizer_over_lists_of_tensors(start):
    """Parameters of no dimension beside matrices, and `foreach`."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = net(), nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return self.body(x) * self.scale

    run, model = start(), Scaled()
    optimizer = NAdam(model.parameters(), lr=0.05, foreach=True, weight_decay=0.1)
    run.fit(model, optimizer, loader(), squared_error, epochs=3, clip_norm=0.5)


@reported("Lightning-AI/pytorch-lightning 7975, pytorch/pytorch 116471")
def an_optimizer_that_is_left_out_of_some_steps(start):
    """Two optimizers over one model; the second one steps with every other batch."""
    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    first, second = [*model.parameters()][:2], [*model.parameters()][2:]
    often, seldom = RAdam(first, lr=0.1), Adagrad(second, lr=0.2, lr_decay=0.1)
    for batch in run.loop(batches, epochs=3, state={"model": model, "often": often, "seldom": seldom}):
        often.zero_grad()
        run.backward(run.run(squared_error, model, batch))
        run.update(model, often)
        if run.step % 2:
            run.update(model, seldom)
            seldom.zero_grad()


class Sharpness(Optimizer):
    """Sharpness-aware minimization over another optimizer: climbs, calls a closure, and returns."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        with torch.no_grad():
            climbs = {p: p.grad * self.param_groups[0]["rho"] for p in self._all() if p.grad is not None}
            for p, climb in climbs.items():
                p.add_(climb)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, climb in climbs.items():
                p.sub_(climb)
        self.base.step()

    def _all(self):
        return [p for group in self.param_groups for p in group["params"]]


@reported("davda54/sam 8, 31, 61, Lightning-AI/pytorch-lightning 17650")
def an_optimizer_that_calls_its_closure(start):
    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    optimizer = Sharpness(model.parameters(), SGD, lr=0.1, momentum=0.9)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer.base}):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = run.run(squared_error, model, batch)
            run.backward(loss)
            return loss

        closure()
        optimizer.step(closure)


@reported("pytorch/pytorch 38581")
def hooks_of_zeros_beside_weight_decay(start):
    run, model = start(), net()
    for parameter in model[0].parameters():
        parameter.register_hook(torch.zeros_like)
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    run.fit(model, optimizer, loader(), squared_error, epochs=2)


@reported("huggingface/diffusers 1009")
def rows_of_an_embedding_that_are_put_back(start):
    """Textual inversion: after each step all embeddings but the new one are what they were."""
    before = []

    def keep(run):
        before[:] = [run.model.embed.weight.detach().clone()]

    def put_back(run):
        with torch.no_grad():
            weight = run.model.embed.weight
            weight[:6] = before[0][:6]

    run, model = start(), Tagger()
    callbacks = [Each("on_fit_start", keep), Each("on_step_end", put_back)]
    optimizer = AdamW([model.embed.weight], lr=0.1, weight_decay=0.2)
    run.fit(model, optimizer, loader(tokens()), token_loss, epochs=2, callbacks=callbacks)


@reported("pytorch/pytorch 88621, pytorch/torchtitan 2318, verl-project/verl 436")
def clipping_by_functions_of_torch(start):
    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    optimizer = SGD(model.parameters(), lr=0.3)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        run.backward(run.run(squared_error, model, batch))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    run.report(norm=run.whole(norm))


@reported("Haian-Jin/LVSM 19")
def steps_that_are_skipped_for_a_large_norm(start):
    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    optimizer = Adam(model.parameters(), lr=0.1)
    norms = []
    for batch in run.loop(batches, epochs=3, state={"model": model, "optimizer": optimizer, "norms": norms}):
        optimizer.zero_grad()
        run.backward(run.run(squared_error, model, batch))
        norms.append(float(run.clip_grad_norm(model, math.inf)))
        if norms[-1] < 0.7:
            optimizer.step()
    run.report(norms=norms)


# -- Parameters that are frozen, or not used ------------------------------------------------------


@reported("facebookresearch/audiocraft 260, pytorch/pytorch 91167, 104427")
def a_layer_that_is_frozen_in_part(start):
    run, model = start(), perceptron(4, 6, 6, 1)
    model[0].weight.requires_grad_(requires_grad=False)
    model[2].bias.requires_grad_(requires_grad=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    run.fit(model, optimizer, loader(), squared_error, epochs=2, clip_norm=0.5)


class TwoHeads(nn.Module):
    """A trunk with two heads, of which a batch may use one alone."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = perceptron(4, 6), perceptron(6, 1), perceptron(6, 1, seed=2)

    def forward(self, x, head):
        h = torch.tanh(self.trunk(x))
        return {0: self.one, 1: self.two}[head](h)


def tasks():
    """Return rows of two tasks, each batch of one."""
    x, y = rows(12).tensors
    return TensorDataset(x, y, torch.arange(12) // 4 % 2)


def task_step(model, batch):
    x, y, task = batch
    return (model(x, int(task[0])) - y).square().mean()


@reported("pytorch/pytorch 28294, KellerJordan/Muon 54, megvii-model/DetNAS 3")
def a_head_that_some_batches_do_not_use(start):
    """Adam and its decay leave a head alone that has no gradient."""
    run, model = start(options=UNUSED), TwoHeads()
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    run.fit(model, optimizer, loader(tasks()), task_step, epochs=3)


@reported(
    "pytorch/pytorch 41101", differs_resumed="a checkpoint has no gradients, and those of before are None"
)
def gradients_that_are_zeroed_and_not_dropped(start):
    """An unused head goes on by its momentum, as its gradient is zero and not None."""
    run, model = start(options=UNUSED), TwoHeads()
    model, batches = run.prepare(model, loader(tasks()))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        optimizer.zero_grad(set_to_none=False)
        run.backward(run.run(task_step, model, batch))
        optimizer.step()


@reported("pytorch/pytorch 57081, 60733")
def an_output_that_the_loss_does_not_use(start):
    class Pair(TwoHeads):
        def forward(self, x):
            first = next(self.parameters())
            return super().forward(x, 0), super().forward(x, 1), torch.ones(1, dtype=first.dtype)

    def step(model, batch):
        used, _, one = model(batch[0])
        return (used - batch[1] * one).square().mean()

    run, model = start(options=UNUSED), Pair()
    run.fit(model, Adam(model.parameters(), lr=0.05), loader(), step, epochs=2)


@reported("facebookresearch/moco 14, pytorch/pytorch 83204")
def a_momentum_encoder_in_the_optimizer(start):
    """The frozen key encoder is among the parameters of an optimizer with decay, and is moved in place."""

    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = perceptron(4, 6, 3)
            self.key = copy.deepcopy(self.query).requires_grad_(requires_grad=False)

    def step(model, batch):
        with torch.no_grad():
            key = F.normalize(model.key(batch[0].flip(1)), dim=1)
        return 1 - (F.normalize(model.query(batch[0]), dim=1) * key).sum(1).mean()

    @torch.no_grad()
    def move(run):
        for key, query in zip(run.model.key.parameters(), run.model.query.parameters(), strict=True):
            key.mul_(0.8).add_(query, alpha=0.2)

    run, model = start(), Moco()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    run.fit(model, optimizer, loader(), step, epochs=3, callbacks=[Each("on_step_end", move)])


class Adapted(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base, rank=2, dtype=torch.float64):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(drawn(rank, base.in_features, seed=8).to(dtype) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + x @ self.down.T @ self.up.T


@reported("huggingface/peft 1070, 2250, huggingface/trl 3926, nvidia-cosmos/cosmos-rl 213")
def adapters_beside_a_trained_head(start):
    run, body = start(accumulate=2), perceptron(4, 6, 6, 1)
    model = nn.Sequential(Adapted(body[0]), body[1], Adapted(body[2]), body[3], body[4])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.fit(model, optimizer, loader(), squared_error, epochs=4, clip_norm=0.5)


@reported("hiyouga/LlamaFactory 10157, huggingface/accelerate 3213", within=1e-6)
def adapters_of_another_type_than_their_base(start):
    run, body = start(), perceptron(4, 6, 6, 1)
    model = nn.Sequential(Adapted(body[0].float()), body[1], Adapted(body[2].float()), body[3], body[4])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.fit(model, optimizer, loader(), squared_error, epochs=3)


# -- Modes, buffers, averages ---------------------------------------------------------------------


@reported("Lightning-AI/pytorch-lightning 2551, 18930, 20177, pgniewko/gt-pyg 112")
def a_frozen_norm_through_validations(start):
    """A batch norm that a callback puts into evaluation mode stays there after each validation."""

    def freeze(run):
        run.model[1].eval()

    run = start()
    model = nn.Sequential(perceptron(4, 6), nn.BatchNorm1d(6).double(), perceptron(6, 1, seed=2))
    model[1].running_mean.fill_(0.3)
    optimizer = SGD(model.parameters(), lr=0.1)
    callbacks = [Each("on_fit_start", freeze)]
    run.fit(
        model,
        optimizer,
        loader(),
        squared_error,
        epochs=3,
        validation=loader(rows(7), 3),
        callbacks=callbacks,
    )


class Halves(nn.Module):
    """Halves what it gets in training, as a dropout without chance."""

    def forward(self, x):
        return x * 0.5 if self.training else x


@reported("wkentaro/pytorch-fcn 56, princeton-vl/pytorch_stacked_hourglass 44")
def an_evaluation_between_steps(start):
    run, model = start(), nn.Sequential(perceptron(4, 6), Halves(), perceptron(6, 1, seed=2))
    test = loader(rows(7), 3)
    model, batches = run.prepare(model, loader())
    optimizer = SGD(model.parameters(), lr=0.2)
    model.train()
    found = []
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer, "found": found}):
        optimizer.zero_grad()
        run.backward(run.run(squared_error, model, batch))
        optimizer.step()
        if run.step % 2:
            found.append(run.evaluate(model, test, squared_error)["loss"])
    run.report(found=found)


@reported("vrvlive/knowlege-distillation 2, lightly-ai/lightly-train 434, clovaai/overhaul-distillation 37")
def a_teacher_in_evaluation_mode(start):
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = net()
            self.teacher = nn.Sequential(perceptron(4, 8), Halves(), perceptron(8, 1, seed=2))
            self.teacher.requires_grad_(requires_grad=False)

    def step(model, batch):
        model.teacher.eval()
        with torch.no_grad():
            target = model.teacher(batch[0])
        y = model.student(batch[0])
        return {"loss": (y - batch[1]).square().mean() + (y - target).abs().mean()}

    run, model = start(), Distilled()
    optimizer = Adam(model.student.parameters(), lr=0.05)
    run.fit(model, optimizer, loader(), step, epochs=2, validation=loader(rows(7), 3))


class Counted(nn.Module):
    """Scales by a buffer that no batch changes, and counts its calls in another."""

    def __init__(self):
        super().__init__()
        self.body = net()
        self.register_buffer("scale", torch.full((1,), 1.5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.body(x) * self.scale


@reported("pytorch/pytorch 22095")
def a_buffer_in_two_forwards(start):
    def step(model, batch):
        return (model(batch[0]) - batch[1]).square().mean() + model(batch[0].flip(1)).square().mean()

    run, model = start(), Counted()
    run.fit(model, Adam(model.parameters(), lr=0.05), loader(), step, epochs=2)


@reported("huggingface/pytorch-image-models 1119, 245, lucidrains/ema-pytorch 29, pytorch/ignite 2590")
def an_average_with_buffers_of_ones_own(start):
    """A copy that is made before the preparation, and moved with its buffers after each step."""
    run, model = start(), Counted()
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    model, average, batches = run.prepare(model, average, loader())
    optimizer = SGD(model.parameters(), lr=0.2)
    state = {"model": model, "average": average, "optimizer": optimizer}
    for batch in run.loop(batches, epochs=2, state=state):
        optimizer.zero_grad()
        run.backward(run.run(squared_error, model, batch))
        optimizer.step()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
            for mean, value in zip(average.buffers(), model.buffers(), strict=True):
                mean.copy_(value)
    run.report(**run.evaluate(average, loader(rows(7), 3), squared_error))


class HandAverage(Callback):
    """An exponential average of the parameters by hand, which begins as a copy; validations see it."""

    def __init__(self, decay):
        self.decay, self.averages = decay, None

    def on_step_end(self, run):
        values = [p.detach().clone() for p in run.model.parameters()]
        if self.averages is None:
            self.averages = values
        else:
            pairs = zip(self.averages, values, strict=True)
            self.averages = [self.decay * mean + (1 - self.decay) * value for mean, value in pairs]


@reported("wandb/senpai 1114, 540")
def an_average_that_moves_with_optimizer_steps(start):
    """The average moves once a step where batches are accumulated."""
    run, model = start(accumulate=2), net()
    average = HandAverage(0.8) if run.is_by_hand else ExponentialMovingAverage(0.8, validate=False)
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    run.fit(model, optimizer, loader(), squared_error, epochs=4, callbacks=[average])
    report_average(run, model, average)


def report_average(run, model, average):
    if run.is_by_hand:
        named = zip(model.state_dict(), average.averages, strict=True)
        run.report(**{f"average of {name}": value for name, value in named})
        return
    with average.in_place_of(model):
        run.report(**{f"average of {name}": value for name, value in run.state_of(model).items()})


class HandSwa(Callback):
    """The mean of the weights at the ends of epochs from the second on, by torch's own class."""

    def __init__(self, model):
        self.model = torch.optim.swa_utils.AveragedModel(model)

    def on_epoch_end(self, run):
        if run.epoch >= 2:
            self.model.update_parameters(run.model)

    @property
    def averages(self):
        return [p.detach() for p in self.model.parameters()]


@reported("Lightning-AI/pytorch-lightning 9938, pytorch/pytorch 46583, timgaripov/swa 22")
def weights_averaged_over_epochs(start):
    run, model = start(), net()
    average = HandSwa(model) if run.is_by_hand else StochasticWeightAveraging(2)
    optimizer = SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    run.fit(model, optimizer, loader(), squared_error, epochs=4, scheduler=scheduler, callbacks=[average])
    report_average(run, model, average)


@reported("otuva/handwriting-synthesis 16")
def weights_that_are_put_back_to_a_snapshot(start):
    """After a bad step the model and the optimizer go back to their states of before."""
    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    optimizer = Adam(model.parameters(), lr=0.1)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        run.backward(run.run(squared_error, model, batch))
        optimizer.step()
        if run.step % 3 == 1:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])


@reported("mosaicml/composer 1384")
def a_second_run_with_another_optimizer(start):
    run, model = start(), net()
    run.fit(model, SGD(model.parameters(), lr=0.2), loader(), squared_error, epochs=2)
    optimizer = AdamW(model.parameters(), lr=0.02)
    scheduler = rates.CosineAnnealingLR(optimizer, 4)
    run.fit(model, optimizer, loader(), squared_error, epochs=2, scheduler=scheduler)


@reported(
    "Lightning-AI/pytorch-lightning 1463, huggingface/transformers 28544, facebookresearch/fairseq 3531"
)
def patience_that_is_kept_through_a_resume(start):
    class Patience(Callback):
        best, waited = math.inf, 0

        def on_validation_end(self, run, metrics):
            self.waited = 0 if metrics["loss"] < self.best - 0.2 else self.waited + 1
            self.best = metrics["loss"] if self.waited == 0 else self.best
            if self.waited >= 3:
                run.stop("enough")

    run, model = start(), net()
    patience = Patience() if run.is_by_hand else EarlyStopping(patience=3, min_delta=0.2)
    optimizer = SGD(model.parameters(), lr=0.02)
    run.fit(
        model,
        optimizer,
        loader(),
        squared_error,
        epochs=9,
        validation=loader(rows(7), 3),
        callbacks=[patience],
    )


# -- Graphs: checkpoints, hooks, functions, several passes ----------------------------------------


class Shared(nn.Module):
    """Applies one block several times, each within an activation checkpoint."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.into, self.block, self.out = perceptron(4, 6), perceptron(6, 6, 6), perceptron(6, 1, seed=2)
        self.reentrant = reentrant

    def forward(self, x):
        h = self.into(x)
        for _ in range(3):
            h = h + checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.out(h)


@reported("microsoft/FocalNet 4, tatp22/linformer-pytorch 23, allenai/longformer 63")
def a_block_that_is_checkpointed_several_times(start):
    run, model = start(accumulate=2), Shared(reentrant=False)
    run.fit(model, Adam(model.parameters(), lr=0.02), loader(), squared_error, epochs=3)


@reported("pytorch/pytorch 24005, 65537, kakaobrain/torchgpipe 16")
def a_sequence_in_reentrant_checkpoints(start):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.layers = perceptron(4, 6), perceptron(6, 6, 6, 6, 1)

        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, self.into(x), use_reentrant=True)

    run, model = start(), Deep()
    run.fit(model, SGD(model.parameters(), lr=0.1), loader(), squared_error, epochs=2)


@reported("pytorch/pytorch 81296")
def a_hook_on_a_parameter_of_checkpoints(start):
    """The hook of a shared parameter sees its whole gradient, once."""
    run, model = start(), Shared(reentrant=False)
    model.block[0].weight.register_hook(lambda gradient: gradient * 0.5)
    run.fit(model, SGD(model.parameters(), lr=0.1), loader(), squared_error, epochs=2)


@reported("facebookresearch/ClassyVision 706, huggingface/accelerate 1726, KellerJordan/modded-nanogpt 31")
def an_accumulation_without_synchronization(start):
    run, model = start(), net()
    model, batches = run.prepare(model, loader(rows(12)))
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer.zero_grad()
    for batch in run.loop(batches, epochs=4, state={"model": model, "optimizer": optimizer}):
        is_last = run.step % 2 == 1
        with nullcontext() if is_last else run.no_sync(model):
            run.backward(run.run(squared_error, model, batch) / 2)
        if is_last:
            run.update(model, optimizer, clip_norm=0.5)
            optimizer.zero_grad()


@reported("Lightning-AI/pytorch-lightning 8284, 4663")
def two_models_with_optimizers_that_take_turns(start):
    """A generator and a critic; the critic steps twice for each step of the generator."""

    def critic_step(critic, generator, batch):
        fake = generator(batch[0]).detach()
        return F.softplus(critic(fake)).mean() + F.softplus(-critic(batch[0])).mean()

    def generator_step(generator, critic, batch):
        return F.softplus(-critic(generator(batch[0]))).mean()

    run = start()
    generator, critic, batches = run.prepare(perceptron(4, 6, 4), perceptron(4, 6, 1, seed=2), loader())
    first, second = (
        Adam(critic.parameters(), lr=0.05, betas=(0.5, 0.9)),
        Adam(generator.parameters(), lr=0.02),
    )
    state = {"generator": generator, "critic": critic, "first": first, "second": second}
    for batch in run.loop(batches, epochs=2, state=state):
        for _ in range(2):
            first.zero_grad()
            loss = run.run(critic_step, critic, generator, batch)
            run.backward(loss)
            run.update(critic, first, clip_norm=1.0)
        second.zero_grad()
        run.backward(run.run(generator_step, generator, critic, batch))
        run.update(generator, second)
        run.log(critic=loss)


@reported("Lightning-AI/pytorch-lightning 557, 591")
def gradients_that_a_generator_leaves_to_its_critic(start):
    """The critic steps with what the generator's pass has left on it, and is zeroed after that."""

    def generator_step(generator, critic, batch):
        return F.softplus(-critic(generator(batch[0]))).mean()

    def critic_step(critic, generator, batch):
        fake = generator(batch[0]).detach()
        return F.softplus(-critic(batch[0])).mean() + F.softplus(critic(fake)).mean()

    run = start()
    generator, critic, batches = run.prepare(perceptron(4, 6, 4), perceptron(4, 6, 1, seed=2), loader())
    first, second = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1, momentum=0.5)
    state = {"generator": generator, "critic": critic, "first": first, "second": second}
    for batch in run.loop(batches, epochs=2, state=state):
        first.zero_grad()
        run.backward(run.run(generator_step, generator, critic, batch))
        first.step()
        run.backward(run.run(critic_step, critic, generator, batch))
        second.step()
        second.zero_grad()


@reported("pytorch/pytorch 47260")
def several_forwards_before_their_backwards(start):
    def step_of(number):
        return lambda model, batch: (model(batch[0] * number) - batch[1]).square().mean()

    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        losses = [run.run(step_of(number), model, batch) for number in (1, 2, 3)]
        for loss in losses:
            run.backward(loss, retain_graph=True)
        optimizer.step()


@reported("WeiChengTseng/Pytorch-PCGrad 2, 5, median-research-group/LibMTL 16")
def gradients_of_tasks_that_are_projected(start):
    """Each task goes back through the graph of one forward pass; conflicts are projected away."""

    def step(model, batch):
        first, second = model(batch[0]).unbind(1)
        target = batch[1][:, 0]
        return {"loss": (first - target).square().mean(), "second": (second + target).square().mean()}

    run, model = start(), perceptron(4, 6, 2)
    model, batches = run.prepare(model, loader())
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        losses, gradients = run.run(step, model, batch), []
        for name in ("loss", "second"):
            optimizer.zero_grad()
            run.backward(losses[name], retain_graph=name == "loss")
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            dot = (one * other).sum()
            conflict = torch.where(dot < 0, dot / other.square().sum(), torch.zeros_like(dot))
            parameter.grad = one + other - conflict * other
        optimizer.step()


class Reversal(torch.autograd.Function):
    """Passes values on, and gradients reversed and scaled."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


@reported("pytorch/pytorch 1110, easezyc/deep-transfer-learning 17, facebookresearch/DomainBed 143")
def a_reversed_gradient_whose_scale_grows(start):
    """Domain adversarial training: a callback sets the scale of the reversal before each step."""

    class Adversarial(nn.Module):
        scale = 0.0

        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = perceptron(4, 6), perceptron(6, 1), perceptron(6, 1, seed=2)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.label(h), self.domain(Reversal.apply(h, self.scale))

    def step(model, batch):
        label, domain = model(batch[0])
        return (label - batch[1]).square().mean() + (domain - 1).square().mean()

    def grow(run):
        run.model.scale = run.step * 0.2

    run, model = start(), Adversarial()
    optimizer = SGD(model.parameters(), lr=0.1)
    callbacks = [Each("on_fit_start", grow), Each("on_step_end", grow)]
    run.fit(model, optimizer, loader(), step, epochs=2, callbacks=callbacks)


@reported(
    "mit-han-lab/gan-compression 33, pytorch/pytorch 42478",
    refused={"dp-gather": "what a hook or a list of the program has kept"},
    named={"tuple": "the step changes 'features'"},
)
def features_that_hooks_collect(start):
    """Distillation by features that forward hooks of two models leave in a dict of the script."""
    features = {}

    def collect(name):
        return lambda module, args, output: features.update({name: output})

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = perceptron(4, 6, 1)
            self.teacher = perceptron(4, 6, 1, seed=2).requires_grad_(requires_grad=False)

        def forward(self, x):
            self.teacher(x)
            return self.student(x)

    def step(model, batch):
        y = model(batch[0])
        distance = (features["student"] - features["teacher"]).square().mean()
        return (y - batch[1]).square().mean() + distance

    run, model = start(), Distilled()
    model.student[0].register_forward_hook(collect("student"))
    model.teacher[0].register_forward_hook(collect("teacher"))
    run.fit(model, SGD(model.student.parameters(), lr=0.1), loader(), step, epochs=2)


@reported("ifzhang/FairMOT 19, Mikoto10032/AutomaticWeightedLoss 2")
def weights_of_losses_that_are_learned(start):
    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, *losses):
            pairs = zip(losses, self.scales, strict=True)
            return sum(loss * scale.neg().exp() + scale / 2 for loss, scale in pairs)

    def step(model, batch):
        y = model["net"](batch[0])
        first, second = (y - batch[1]).square().mean(), (y - batch[1]).abs().mean()
        return {"loss": model["criterion"](first, second), "first": first, "second": second}

    run, model = start(), nn.ModuleDict({"net": net(), "criterion": Criterion()})
    groups = [{"params": model["net"].parameters()}, {"params": model["criterion"].parameters(), "lr": 0.3}]
    run.fit(model, Adam(groups, lr=0.05), loader(), step, epochs=2)


@reported("jingyaogong/minimind 140, pytorch/torchtitan 3000, 2061, allenai/OLMoE 45")
def experts_with_a_balance_of_each_sequence(start):
    """A mixture of experts whose auxiliary loss is of each sequence; an expert may have no token."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = perceptron(4, 3)
            self.experts = nn.ModuleList(perceptron(4, 5, 1, seed=seed) for seed in range(3))

        def forward(self, x):  # (batch, seq, 4)
            chances = self.router(x).softmax(-1)
            chosen = F.one_hot(chances.argmax(-1), 3).to(x.dtype)
            out = sum(e(x)[..., 0] * (chances * chosen)[..., i] for i, e in enumerate(self.experts))
            balance = (chosen.mean(1) * chances.mean(1)).sum(1) * 3  # (batch,)
            return out, balance

    def step(model, batch):
        out, balance = model(batch[0])
        return {"loss": out.square().mean() + 0.1 * balance.mean(), "balance": balance.mean()}

    run, model = start(accumulate=2), Experts()
    data = TensorDataset(drawn(10, 5, 4))
    run.fit(model, Adam(model.parameters(), lr=0.03), loader(data), step, epochs=4, clip_norm=1.0)


@reported(
    "jingyaogong/minimind 140, lucidrains/mixture-of-experts 10",
    refused={"dp-gather": "does not return: 'balance', which forward has set"},
)
def a_loss_that_forward_leaves_on_a_module(start):
    """An auxiliary loss is an attribute of the module that computes it, and the step adds it."""

    class Balanced(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = perceptron(4, 6), perceptron(6, 1, seed=2)

        def forward(self, x):
            h = torch.tanh(self.into(x))
            self.balance = h.square().mean()
            return self.out(h)

    def step(model, batch):
        return (model(batch[0]) - batch[1]).square().mean() + 0.5 * model.balance

    run, model = start(), Balanced()
    run.fit(model, SGD(model.parameters(), lr=0.1), loader(), step, epochs=2)


@reported("pytorch/pytorch 6299, 2312, 13214")
def packed_sequences_of_several_lengths(start):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.rnn = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
            self.out = nn.Linear(8, 1)
            self.double()

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))
            return self.out(h)[..., 0]

    def step(model, batch):
        x, lengths = batch
        mask = torch.arange(x.size(1)) < lengths[:, None]
        y = model(x, lengths)
        return {"loss": (y - x[..., 0])[mask].square().mean(), "weight": lengths.sum()}

    data = TensorDataset(drawn(10, 6, 3), 1 + torch.arange(10) * 5 % 6)
    run, model = start(accumulate=2), Recurrent()
    run.fit(model, Adam(model.parameters(), lr=0.03), loader(data), step, epochs=4)


@reported(
    "OpenNMT/OpenNMT-py 891, 1164, Lightning-AI/pytorch-lightning 4303, 5372",
    refused={"dp-gather": "cannot be joined along dim 0"},
)
def sequences_that_are_cut_in_a_step(start):
    """Truncated backpropagation: a step goes over the pieces of its sequences with a detached state."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.rnn, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)
            self.double()

        def forward(self, x, h):
            y, h = self.rnn(x, h)
            return self.out(y)[..., 0], h

    def step(model, batch):
        h, losses = None, []
        for piece in batch[0].split(2, dim=1):
            y, h = model(piece, h)
            losses.append((y - piece[..., 1]).square().mean())
            h = h.detach()
        return sum(losses)

    run, model = start(), Recurrent()
    run.fit(
        model,
        RMSprop(model.parameters(), lr=0.02, momentum=0.5),
        loader(TensorDataset(drawn(10, 6, 3))),
        step,
    )


# -- Data, and what goes wrong in a batch ---------------------------------------------------------


@reported("huggingface/accelerate 2865, fastai/fastai 2637, Lightning-AI/pytorch-lightning 12866, 10946")
def a_sampler_of_ones_own(start):
    """The sampler's order is kept on any number of ranks; it changes with the epoch."""

    class Rare(torch.utils.data.Sampler):
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            generator = torch.Generator().manual_seed(self.epoch)
            weights = torch.arange(1.0, 11.0)
            return iter(WeightedRandomSampler(weights, 10, generator=generator))

        def __len__(self):
            return 10

        def set_epoch(self, epoch):
            self.epoch = epoch

    run, model = start(), net()
    optimizer = SGD(model.parameters(), lr=0.2)
    run.fit(model, optimizer, loader(sampler=Rare()), squared_error, epochs=3)


class Pieces(IterableDataset):
    """Rows of a stream, which says how it is split and where it is."""

    done = first = 0

    def __init__(self, index=0, count=1):
        self.index, self.count = index, count

    def __iter__(self):
        first, self.first = self.first, 0
        for number, row in enumerate(list(rows(24))[self.index :: self.count]):
            self.done = number + 1
            if number >= first:
                yield row

    def shard(self, index, count):
        return Pieces(index, count)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = self.first = state["done"]


@reported("facebookresearch/mmf 521, Lightning-AI/pytorch-lightning 21552")
def a_stream_with_accumulation(start):
    run, model = start(accumulate=2), net()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    run.fit(model, optimizer, loader(Pieces(), 6), squared_error, epochs=3, steps_per_epoch=4)


@reported("lyuwenyu/RT-DETR 684, 672, Haochen-Wang409/U2PL 16")
def images_without_boxes(start):
    """Detection: a list of targets, of which some have no box, and a loss over boxes."""

    class Images(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            count = index * 7 % 4 if index not in (4, 5, 6) else 0
            return drawn(4, seed=index), drawn(count, 2, seed=index + 20)

    def collate(samples):
        return torch.stack([x for x, _ in samples]), [boxes for _, boxes in samples]

    def step(model, batch):
        x, targets = batch
        errors = [(boxes - y).abs().sum() for y, boxes in zip(model(x), targets, strict=True)]
        count = sum(len(boxes) for boxes in targets)
        return {"loss": torch.stack(errors).sum() / max(count, 1), "weight": count}

    run, model = start(accumulate=2), perceptron(4, 6, 2)
    optimizer = AdamW(model.parameters(), lr=0.05)
    run.fit(model, optimizer, loader(Images(), collate_fn=collate), step, epochs=4, clip_norm=2.0)


@reported("ecmwf/WeatherGenerator 2724, Lightning-AI/pytorch-lightning 5359")
def a_sample_that_makes_the_loss_nan(start):
    """The step of a batch with a bad sample is left out on all ranks."""
    x, y = rows().tensors
    y[5] = math.nan
    run, model = start(), net()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    run.fit(model, optimizer, loader(TensorDataset(x, y)), squared_error, epochs=4, nonfinite="skip")


@reported("HannesStark/FlowSite 1, NVIDIA-NeMo/Automodel 2468")
def a_batch_that_raises_and_is_skipped(start):
    """A batch that is too large raises in its step on all ranks, and the loop goes on with the next."""

    class TooLargeError(RuntimeError):
        pass

    def step(model, batch):
        loss = squared_error(model, batch)
        if run.step in (1, 3):
            msg = "out of memory"
            raise TooLargeError(msg)
        return loss

    run, model = start(), net()
    model, batches = run.prepare(model, loader())
    optimizer = Adam(model.parameters(), lr=0.05)
    for batch in run.loop(batches, epochs=2, state={"model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        try:
            run.backward(run.run(step, model, batch))
        except TooLargeError:
            continue
        run.update(model, optimizer)


@reported("NVIDIA-NeMo/Automodel 2468")
def a_batch_of_which_nothing_counts(start):
    x, y = rows(12).tensors
    counts = torch.ones(12)
    counts[4:8] = 0

    def step(model, batch):
        x, y, counted = batch
        each = (model(x) - y).square()[:, 0] * counted
        return {"loss": each.sum() / counted.sum(), "weight": counted.sum()}

    run, model = start(), net()
    optimizer = Adam(model.parameters(), lr=0.05)
    run.fit(model, optimizer, loader(TensorDataset(x, y, counts)), step, epochs=3)


@reported("lightly-ai/lightly 1977, texttron/tevatron 143, ShiqiYu/OpenGait 36, HobbitLong/SupContrast 26")
def correlations_over_the_whole_batch(start):
    """Barlow Twins: a correlation over all rows, which ranks gather with gradients."""

    def step(model, batch):
        first, second = run.all_gather(model(batch[0])), run.all_gather(model(batch[0].flip(1)))
        first, second = first - first.mean(0), second - second.mean(0)
        correlation = first.T @ second / len(first)
        return (correlation - torch.eye(3, dtype=torch.float64)).square().sum()

    run, model = start(), perceptron(4, 6, 3)
    run.fit(model, SGD(model.parameters(), lr=0.1), loader(), step, epochs=2)


# -- Compiled, and in other precisions ------------------------------------------------------------


@reported("pytorch/pytorch 96693, JIA-Lab-research/LongLoRA 127")
def a_compiled_model_that_is_evaluated_between(start):
    run = start(accumulate=2, compile=CompileOptions(backend="aot_eager"))
    model = nn.Sequential(perceptron(4, 6), Halves(), perceptron(6, 1, seed=2))
    optimizer = SGD(model.parameters(), lr=0.2)
    run.fit(model, optimizer, loader(), squared_error, epochs=2, validation=loader(rows(7), 3))


@reported("pytorch/pytorch 102731", within=2e-2)
def a_model_in_bfloat16(start):
    def step(model, batch):
        return F.mse_loss(model(batch[0].float()).float(), batch[1].float())

    run, model = start(precision="bf16-mixed", accumulate=2), net().float()
    run.fit(model, SGD(model.parameters(), lr=0.1, momentum=0.9), loader(), step, epochs=4)
