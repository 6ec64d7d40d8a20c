"""Mistakes that people make, as calls: each must end in an error that names what was given and what to do."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tp_trainer import (
    Checkpoints,
    DdpOptions,
    FunctionMetric,
    GradientRules,
    Limits,
    LogOptions,
    SchedulerOptions,
    Trainer,
    Validation,
    callbacks,
    find_checkpoint,
    loggers,
)
from tp_trainer._peer_names import ARGUMENTS, ATTRIBUTES  # private: the tables of theirs
from tp_trainer.compat.accelerate import Accelerator
from tp_trainer.compat.lightning import Trainer as LightningTrainer

DATA = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))


def model():
    return nn.Linear(3, 1)


def loader():
    return DataLoader(DATA, batch_size=4)


def step(net, batch):
    return (net(batch[0]) - batch[1]).square().mean()


def trainer(**options):
    return Trainer(devices="cpu", progress=False, **options)


def fit(**options):
    """Train for an epoch, with one argument that is wrong."""
    net = options.pop("model", None) or model()
    trained = net if isinstance(net, nn.Module) else model()
    mine = {"optimizer": torch.optim.SGD(trained.parameters(), lr=0.1)}
    mine |= {"train_loader": loader(), "step": step} | options
    optimizer, batches = mine.pop("optimizer"), mine.pop("train_loader")
    with trainer() as own:
        own.fit(net, optimizer, batches, **mine)


def fit_step(found):
    return lambda: fit(step=found)


class Output:
    """What models of transformers return, in small."""

    def __init__(self, loss):
        self.loss = loss


async def slow(net, batch):
    return step(net, batch)


def generator(net, batch):
    yield step(net, batch)


def loop_without_with():
    for _ in trainer().loop(loader(), epochs=1):
        pass


def left_epoch():
    with trainer().loop(loader(), epochs=1) as loop:
        for batches in loop.by_epoch():
            next(batches)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def unknown_event():
    class Mine(callbacks.EarlyStopping):
        def on_batch_end(self, run):
            pass

    fit(callbacks=[Mine()])


# Each: the call, and words of the error: what was given, and what to do.
MISTAKES = {
    "seed is text": (lambda: trainer(seed="1"), "seed must be None or a whole number from 0, got '1'"),
    "seed below 0": (lambda: trainer(seed=-1), "whole number from 0, got -1"),
    "no such backend": (lambda: trainer(backend="dpp"), "did you mean 'ddp'"),
    "an upper-case backend": (lambda: trainer(backend="DDP"), "ddp"),
    "a transport for a backend": (lambda: trainer(backend="nccl"), "nccl"),
    "no such device": (lambda: Trainer(devices="gpu"), "gpu"),
    "more devices than there are": (lambda: Trainer(devices="cuda:7"), "cuda:7"),
    "devices below 1": (lambda: Trainer(devices=-3), "-3"),
    "precision 16": (lambda: trainer(precision=16), "16"),
    "precision bf16": (lambda: trainer(precision="bf16"), "bf16-mixed"),
    "precision mixed": (lambda: trainer(precision="mixed"), "mixed"),
    "accumulate 0": (lambda: trainer(accumulate=0), "0"),
    "accumulate half": (lambda: trainer(accumulate=0.5), "0.5"),
    "loss total": (lambda: trainer(loss="total"), "total"),
    "compile yes": (lambda: trainer(compile="yes"), "compile must be True, False, 'blocks'"),
    "recomputation of all": (lambda: trainer(activation_checkpointing="full"), "None or 'auto', got 'full'"),
    "progress loud": (lambda: Trainer(devices="cpu", progress="loud"), "loud"),
    "flat options": (
        lambda: trainer(options={"find_unused_parameters": True}).prepare(model()),
        "find_unused_parameters",
    ),
    "options of no backend": (lambda: trainer(options=object()), "DdpOptions"),
    "options twice": (lambda: trainer(options=[DdpOptions(), DdpOptions()]), "give one"),
    "bucket of 0": (lambda: DdpOptions(bucket_cap_mb=0), "bucket_cap_mb"),
    "model is a class": (lambda: fit(model=nn.Linear), "Linear"),
    "model is text": (lambda: fit(model="resnet"), "resnet"),
    "optimizer is a class": (lambda: fit(optimizer=torch.optim.SGD), "SGD"),
    "optimizer is text": (lambda: fit(optimizer="adam"), "adam"),
    "optimizer of another model": (
        lambda: fit(optimizer=torch.optim.SGD(model().parameters(), lr=1)),
        "optimizer",
    ),
    "loader is a number": (lambda: fit(train_loader=3), "train_loader"),
    "empty loader": (lambda: fit(train_loader=[]), "the loader is empty"),
    "dataset for a loader": (lambda: fit(train_loader=None), "train_loader"),
    "sampler of ranks": (
        lambda: fit(train_loader=DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))),
        "give a plain loader",
    ),
    "step is no function": (lambda: fit(step=3), "step"),
    "step is missing": (lambda: trainer().fit(model(), None, loader()), "step"),
    "step returns nothing": (fit_step(lambda net, batch: None), "None"),
    "step returns rows": (fit_step(lambda net, batch: net(batch[0])), "scalar"),
    "step returns text": (fit_step(lambda net, batch: "0.5"), "0.5"),
    "step returns a dict without loss": (fit_step(lambda net, batch: {"acc": 1.0}), "loss"),
    "step returns a model's output": (fit_step(lambda net, batch: Output(step(net, batch))), "loss"),
    "step returns a detached loss": (fit_step(lambda net, batch: step(net, batch).detach()), "detach"),
    "step goes back itself": (fit_step(lambda net, batch: step(net, batch).backward()), "it returned None"),
    "step is asynchronous": (lambda: fit(step=slow), "coroutine"),
    "step is a generator": (lambda: fit(step=generator), "generator"),
    "loss is NaN": (fit_step(lambda net, batch: step(net, batch) * float("nan")), "nan"),
    "epochs 0": (lambda: fit(epochs=0), "0"),
    "epochs as text": (lambda: fit(epochs="3"), "'3'"),
    "max_steps 0": (lambda: fit(max_steps=0), "max_steps"),
    "epochs twice": (lambda: fit(epochs=1, limits=Limits(epochs=2)), "epochs"),
    "time without a unit": (lambda: fit(limits=Limits(max_time="soon")), "soon"),
    "more batches than there are": (lambda: fit(limits=Limits(steps_per_epoch=9)), "steps_per_epoch=9"),
    "validation is a number": (lambda: fit(validation=3), "validation"),
    "metric without its arguments": (
        lambda: fit(validation=Validation(loader(), metrics={"f1": FunctionMetric(max)})),
        "f1",
    ),
    "metric that is a function": (lambda: fit(validation=Validation(loader(), metrics={"f1": max})), "f1"),
    "clip of 0": (lambda: fit(clip_norm=0), "clip_norm"),
    "clip below 0": (lambda: fit(gradients=GradientRules(clip_value=-1.0)), "clip_value"),
    "clip twice": (lambda: fit(clip_norm=1.0, gradients=GradientRules(clip_norm=2.0)), "clip_norm"),
    "scheduler is a class": (lambda: fit(scheduler=torch.optim.lr_scheduler.StepLR), "StepLR"),
    "scheduler every week": (
        lambda: fit(
            scheduler=SchedulerOptions(schedule(torch.optim.SGD(model().parameters())), every="week")
        ),
        "week",
    ),
    "scheduler of another optimizer": (
        lambda: fit(scheduler=schedule(torch.optim.SGD(model().parameters()))),
        "optimizer",
    ),
    "checkpoint is a number": (lambda: fit(checkpoint=3), "3"),
    "checkpoints every 0 steps": (lambda: Checkpoints("run", every_steps=0), "every_steps"),
    "checkpoints kept 0": (lambda: Checkpoints("run", keep=0), "keep"),
    "checkpoints of the middle": (lambda: Checkpoints("run", mode="mid"), "mid"),
    "weights of some": (lambda: Checkpoints("run", weights="some"), "some"),
    "resume without a folder": (lambda: fit(resume="auto"), "checkpoint"),
    "callback is text": (lambda: fit(callbacks=["early"]), "early"),
    "callback is a class": (lambda: fit(callbacks=[callbacks.EarlyStopping]), "EarlyStopping"),
    "callback with an unknown event": (unknown_event, "on_batch_end"),
    "patience of 0": (lambda: callbacks.EarlyStopping(patience=0), "patience"),
    "log to a typo": (lambda: fit(log="tensorbord"), "tensorboard"),
    "log is a class": (lambda: fit(log=loggers.CsvLogger), "CsvLogger()"),
    "log every 0 steps": (lambda: fit(log=LogOptions("csv", every_steps=0)), "every_steps"),
    "state with a name of fit": (lambda: fit(state={"model": model()}), "fit() keeps its own model"),
    "state is a list": (lambda: fit(state=[1]), "state"),
    "loop without with": (loop_without_with, "with trainer.loop"),
    "an epoch left early": (left_epoch, "stop()"),
    "backward before prepare": (lambda: trainer().backward(torch.ones((), requires_grad=True)), "prepare"),
    "run without a batch": (lambda: trainer().run(step, model()), "run(step, model, batch)"),
    "run without a model": (lambda: trainer().run(step), "run(step, model, batch)"),
    "prepare a number": (lambda: trainer().prepare(3), "3"),
    "evaluate without a step": (lambda: trainer().evaluate(model(), loader()), "step"),
    "predict without a step": (lambda: trainer().predict(model(), loader()), "step"),
    "gather text": (lambda: trainer().gather_for_metrics(["a"]), "'a'"),
    "load what is not there": (lambda: trainer().load_model(model(), "nowhere.pt"), "nowhere.pt"),
    "export merged and adapter": (
        lambda: trainer().export(model(), "x", adapter=True, merged=True),
        "adapter=True or merged=True",
    ),
    "export an adapter of none": (lambda: trainer().export(model(), "x", adapter=True), "adapter"),
    "find a checkpoint of nowhere": (lambda: find_checkpoint("nowhere"), "nowhere"),
    "estimate for 0 devices": (lambda: trainer().estimate(model(), devices=0), "devices"),
    "estimate in pounds": (lambda: trainer().estimate(model(), memory="80lb"), "80lb"),
    "accelerate in fp16": (
        lambda: Accelerator(cpu=True, mixed_precision="fp16"),
        "Trainer(precision='fp16-mixed')",
    ),
    "accelerate with DeepSpeed": (lambda: Accelerator(cpu=True, deepspeed_plugin=1), "with tp, write"),
    "accelerate, misspelled": (lambda: Accelerator(cpu=True, log_wth="csv"), "did you mean 'log_with'"),
    "accelerate's state nowhere": (
        lambda: Accelerator(cpu=True).load_state("nowhere"),
        "there is no state in",
    ),
    "accelerate without a folder": (lambda: Accelerator(cpu=True).save_state(), "give a folder"),
    "accelerate a plain loader": (
        lambda: Accelerator(cpu=True).skip_first_batches(loader(), 1),
        "that prepare() returned",
    ),
    "lightning on two devices": (lambda: LightningTrainer(accelerator="cpu", devices=2), "tp launch -n 2"),
    "lightning by DeepSpeed": (lambda: LightningTrainer(strategy="deepspeed"), "backend='shard'"),
    "lightning's profiler": (lambda: LightningTrainer(profiler="simple"), "with tp, write"),
    "lightning, misspelled": (lambda: LightningTrainer(max_epoch=1), "did you mean 'max_epochs'"),
    "lightning without a module": (lambda: LightningTrainer(accelerator="cpu").fit(3), "got int"),
}
for _name, _answer in ARGUMENTS.items():
    MISTAKES[f"Trainer({_name}=)"] = (lambda name=_name: Trainer(**{name: 1}), _answer)
for _name, _answer in ATTRIBUTES.items():
    MISTAKES[f"trainer.{_name}"] = (lambda name=_name: getattr(trainer(), name), _answer)
