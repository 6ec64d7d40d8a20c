"""Mistakes that people make, as calls: each must end in an error that names what was given and what to do."""

import asyncio
from pathlib import Path

import torch
import tp_accelerate
import tp_context
import tp_data
import tp_dp_gather
import tp_lightning
import tp_pipeline
import tp_runner
import tp_shard as ts
import tp_trainer
import tp_tuple
import tp_verify
import tp_verify.strategies
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tp_accelerate import Accelerator
from tp_context import ContextOptions
from tp_core import recursive_to, resolve_devices
from tp_core.builders import load_function
from tp_core.plugins import Backend, Callback, Verdict, registry
from tp_launch import LaunchRequest, execute, launch
from tp_lightning import Trainer as LightningTrainer
from tp_trainer import (
    Checkpoints,
    DdpOptions,
    EpochRecord,
    FsdpOptions,
    FunctionMetric,
    GradientRules,
    History,
    Limits,
    LogOptions,
    SchedulerOptions,
    Trainer,
    Validation,
    callbacks,
    checkpoint_activations,
    find_checkpoint,
    loggers,
)
from tp_trainer._peer_names import ARGUMENTS, ATTRIBUTES  # private: the tables of theirs

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
    mine |= {"train_loader": loader(), "step": never} | options
    optimizer, batches = mine.pop("optimizer"), mine.pop("train_loader")
    with trainer() as own:
        own.fit(net, optimizer, batches, **mine)


def never(net, batch):
    """Stand for a step where a mistake must be answered before the first one."""
    msg = "a step was made"
    raise AssertionError(msg)


def fit_step(found):
    return lambda: fit(step=found)


class Output:
    """What models of transformers return, in small."""

    def __init__(self, loss):
        self.loss = loss


class OwnSteps(nn.Linear):
    """What a LightningModule has, in small."""

    def __init__(self):
        super().__init__(3, 1)

    def training_step(self, batch, batch_idx):
        raise NotImplementedError

    def configure_optimizers(self):
        raise NotImplementedError


async def slow(net, batch):
    return step(net, batch)


def generator(net, batch):
    yield step(net, batch)


def loop_without_with():
    for _ in trainer().loop(loader(), epochs=1):
        pass


def in_loop(use):
    with trainer() as own, own.loop(loader(), epochs=1) as loop:
        use(own, loop)


def in_own_loop(use, **options):
    """Use a prepared model, its optimizer and a batch in a loop of one's own."""
    with trainer(**options) as own:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer, batches = own.prepare(net, optimizer, loader())
        use(own, net, optimizer, next(iter(batches)))


def loop_over_epochs():
    with trainer() as own, own.loop(loader(), epochs=2) as loop:
        for _ in range(2):
            for _ in loop:
                pass


def moved_scheduler():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moved = schedule(optimizer)

    def moving(net, batch):
        moved.last_epoch += 1  # as its step() does, which warns before the optimizer's
        return step(net, batch)

    fit(model=net, optimizer=optimizer, scheduler=moved, step=moving)


HISTORY = History((EpochRecord(1, 2, 8, 0.5, 0.1, {"loss": 2.0}),))


def left_epoch():
    with trainer().loop(loader(), epochs=1) as loop:
        for batches in loop.by_epoch():
            next(batches)


def assess_without_job():
    registry.register(NoJob())
    try:
        trainer(backend="no-job").prepare(model())
    finally:
        registry.unregister("no-job")


def event_without_run():
    class Mine(Callback):
        def on_step_end(self):
            pass

    fit(callbacks=[Mine()])


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def unknown_event():
    class Mine(callbacks.EarlyStopping):
        def on_batch_end(self, run):
            pass

    fit(callbacks=[Mine()])


def layers():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def fit_on(backend, **options):
    trainer(backend=backend, options={backend: options} if options else None).prepare(model())


def run(function, items, **options):
    return list(tp_runner.map(function, items, **{"engine": "inline"} | options))


def stages(**options):
    return tp_pipeline.PipelineOptions(**options)


def requested(**options):
    execute(LaunchRequest(**{"script": __file__} | options))


class ReturnsFalse(Callback):
    """Ends a run as in Keras."""

    def on_step_end(self, run):
        return False


def use_after_close():
    runner = tp_runner.OrderedRunner(engine="inline")
    runner.close()
    runner([1])


def samples(**options):
    return tp_data.Stream({"a": range(100)}, **options)


def load(batch=4, **options):
    return tp_data.Loader(samples(), batch, **options)


class British(tp_verify.Strategy):
    """A strategy that overrides a method by another spelling."""

    def parallelise(self, model):
        return model


def in_runner(use):
    """Use a runner of the base class, which has no work of its own."""
    with tp_runner.OrderedRunner(1, engine="inline") as runner:
        return use(runner)


def runner_with(**methods):
    return type("Mine", (tp_runner.OrderedRunner,), methods)(1, engine="inline")


async def gathered(stream):
    return [result async for result in stream]


def attend(**changed):
    """Call an attention with one argument that is wrong."""
    rows = torch.ones(1, 2, 5, 4)
    return tp_context.attention(**{"query": rows, "key": rows, "value": rows} | changed)


def accelerator(**options):
    return Accelerator(cpu=True, **options)


def lightning(**options):
    return LightningTrainer(accelerator="cpu", enable_progress_bar=False, max_epochs=1, **options)


def load_state_of_others():
    load().load_state_dict(tp_data.Loader(tp_data.Stream({"a": range(50)}), 4).state_dict())


def verify(build=layers, batches=(DATA[:],), parallel=lambda net: net, **options):
    tp_verify.verify(build, list(batches), parallel=parallel, step=step, **options)


class Unfinished(Backend):
    name = "unfinished"

    def assess(self, job):
        raise NotImplementedError


class NoJob(Unfinished):
    name = "no-job"

    def assess(self):
        return Verdict.fits(1, "it is mine")

    def open(self, job):
        raise NotImplementedError


TWO = ["cpu", "cpu"]
ROWS = torch.ones(4, 3)

# Each: the call, and words of the error: what was given, and what to do.
MISTAKES = {
    "seed is text": (lambda: trainer(seed="1"), "seed must be None or a whole number from 0, got '1'"),
    "seed below 0": (lambda: trainer(seed=-1), "whole number from 0, got -1"),
    "no such backend": (lambda: trainer(backend="dpp"), "'shard', 'single', 'tuple'\ndid you mean 'ddp'?"),
    "an upper-case backend": (
        lambda: trainer(backend="DDP"),
        "'DDP' (asked for) is not installed; installed: 'context', 'ddp'",
    ),
    "a transport for a backend": (
        lambda: trainer(backend="nccl"),
        "'nccl' is a transport of torch.distributed, which is chosen by the devices",
    ),
    "no such device": (
        lambda: Trainer(devices="gpu"),
        "'gpu' in it, which is not a device; this process sees the cpu alone",
    ),
    "more devices than there are": (
        lambda: Trainer(devices="cuda:7"),
        "'cuda:7' needs cuda, which is not here",
    ),
    "devices below 1": (lambda: Trainer(devices=-3), "devices=-3 asks for less than one device"),
    "precision 16": (lambda: trainer(precision=16), "precision=16 is 'fp16-mixed' here"),
    "precision bf16": (lambda: trainer(precision="bf16"), "'bf16' is 'bf16-mixed' or 'bf16-true' here"),
    "precision mixed": (
        lambda: trainer(precision="mixed"),
        "one of 'fp32', 'bf16-mixed', 'fp16-mixed', 'bf16-true', got 'mixed'",
    ),
    "accumulate 0": (lambda: trainer(accumulate=0), "accumulate must be a whole number from 1, got 0"),
    "accumulate half": (lambda: trainer(accumulate=0.5), "accumulate must be a whole number from 1, got 0.5"),
    "loss total": (lambda: trainer(loss="total"), "loss must be one of 'mean', 'sum', got 'total'"),
    "compile yes": (lambda: trainer(compile="yes"), "compile must be True, False, 'blocks'"),
    "recomputation of all": (lambda: trainer(activation_checkpointing="full"), "None or 'auto', got 'full'"),
    "progress loud": (
        lambda: Trainer(devices="cpu", progress="loud"),
        "True, False or 'auto' (on a terminal or in a notebook), got 'loud'",
    ),
    "flat options": (
        lambda: trainer(options={"find_unused_parameters": True}).prepare(model()),
        "not the name of one; write options=ContextOptions(find_unused_parameters=...) or DdpOptions(",
    ),
    "options of no backend": (
        lambda: trainer(options=object()),
        "options must be objects of ContextOptions, DdpOptions",
    ),
    "options twice": (
        lambda: trainer(options=[DdpOptions(), DdpOptions()]),
        "two of DdpOptions, both for backend 'ddp'; give one",
    ),
    "options of a backend that is not installed": (
        lambda: trainer(options={"x": {}}).prepare(model()),
        "options are given for backend 'x', which is not installed",
    ),
    "a misspelled option of a backend that is not chosen": (
        lambda: trainer(options={"ddp": {"static_grph": True}}).prepare(model()),
        "backend 'ddp' has no option 'static_grph'; did you mean 'static_graph'?",
    ),
    "bucket of 0": (
        lambda: DdpOptions(bucket_cap_mb=0),
        "DdpOptions(bucket_cap_mb=...) must be a finite number above 0, got 0",
    ),
    "an unknown option of fsdp": (
        lambda: FsdpOptions(unit="Block"),
        "FsdpOptions() has no argument 'unit'; did you mean 'units'? It has: units, reshard_after_forward",
    ),
    "the same in a mapping": (
        lambda: trainer(backend="fsdp", options={"fsdp": {"unit": "Block"}}).prepare(model()),
        "backend 'fsdp' has no option 'unit'; did you mean 'units'? It has: units, reshard_after_forward",
    ),
    "an option of another backend": (
        lambda: FsdpOptions(static_graph=True),
        "FsdpOptions() has no argument 'static_graph', which belongs to DdpOptions()",
    ),
    "a keyword that is a number": (
        lambda: tp_dp_gather.DataParallel(model(), except_keywords=3),
        "except_keywords must be a list of names, got 3",
    ),
    "a callback's argument by its name elsewhere": (
        lambda: callbacks.EarlyStopping(monitor="val_loss"),
        "EarlyStopping() has no argument 'monitor'; write EarlyStopping(\"val_loss\")",
    ),
    "a backend that is not given the job": (
        assess_without_job,
        "has a method assess() that does not take what a run gives it; write assess(self, job)",
    ),
    "an event that is not given the run": (
        event_without_run,
        "the callback Mine has a method on_step_end() that does not take what a run gives it; write on_step",
    ),
    "model is a class": (
        lambda: fit(model=nn.Linear),
        "takes a model, a torch.nn.Module, got type: <class 'torch.nn.modules.linear.Linear'>",
    ),
    "model is wrapped": (
        lambda: fit(model=nn.DataParallel(model())),
        "the model is already wrapped in DataParallel",
    ),
    "model is text": (lambda: fit(model="resnet"), "takes a model, a torch.nn.Module, got str: 'resnet'"),
    "optimizer is a class": (
        lambda: fit(optimizer=torch.optim.SGD),
        "must be made first: SGD(model.parameters(), lr=...)",
    ),
    "optimizer is text": (lambda: fit(optimizer="adam"), "must be a torch.optim.Optimizer, got str: 'adam'"),
    "optimizer of another model": (
        lambda: fit(optimizer=torch.optim.SGD(model().parameters(), lr=1)),
        "has none of the model's parameters, so training would change nothing; make it from",
    ),
    "loader is a number": (
        lambda: fit(train_loader=3),
        "train_loader must be a DataLoader or another iterable of batches, got int: 3",
    ),
    "empty loader": (
        lambda: fit(train_loader=[]),
        "the loader is empty: it has no batch; look at its dataset, its sampler, and drop_last",
    ),
    "dataset for a loader": (
        lambda: fit(train_loader=None),
        "train_loader must be a DataLoader or another iterable of batches, got NoneType",
    ),
    "sampler of ranks": (
        lambda: fit(train_loader=DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))),
        "DistributedSampler already splits the data over 2 ranks",
    ),
    "step is no function": (
        lambda: fit(step=3),
        "a function step(model, batch) that returns the loss, got int: 3",
    ),
    "step is missing": (
        lambda: trainer().fit(model(), None, loader()),
        "missing a required argument: 'step'; write fit(model, optimizer, loader, step=step)",
    ),
    "step returns nothing": (
        fit_step(lambda net, batch: None),
        "must return its loss, a scalar tensor, or a dict with it as 'loss'; it returned None",
    ),
    "step returns rows": (
        fit_step(lambda net, batch: net(batch[0])),
        "must be a scalar, got shape (4, 1); return its mean over the samples (loss.mean())",
    ),
    "step returns text": (
        fit_step(lambda net, batch: "0.5"),
        "or a dict with it as 'loss'; it returned '0.5'",
    ),
    "step returns a dict without loss": (
        fit_step(lambda net, batch: {"acc": 1.0}),
        "or a dict with it as 'loss'; it returned a dict with ['acc']",
    ),
    "step returns a model's output": (
        fit_step(lambda net, batch: Output(step(net, batch))),
        "it returned an object of Output; return its loss: output.loss",
    ),
    "step returns a detached loss": (
        fit_step(lambda net, batch: step(net, batch).detach()),
        "leads to no parameter (it does not require grad); compute it from the model's output",
    ),
    "step goes back itself": (
        fit_step(lambda net, batch: step(net, batch).backward()),
        "has called backward() itself, and fit() adds the gradients of the loss that it returns to those; re",
    ),
    "step is asynchronous": (lambda: fit(step=slow), "it returned a coroutine; write the step without async"),
    "step is a generator": (
        lambda: fit(step=generator),
        "it returned a generator; return the loss in place of yielding it",
    ),
    "loss is NaN": (
        fit_step(lambda net, batch: step(net, batch) * float("nan")),
        "the loss is nan at training step 1 (rank 0)",
    ),
    "epochs 0": (lambda: fit(epochs=0), "epochs must be a whole number from 1, got 0"),
    "epochs and a half": (lambda: fit(epochs=1.5), "epochs must be a whole number from 1, got 1.5"),
    "epochs as text": (lambda: fit(epochs="3"), "epochs must be a whole number from 1, got '3'"),
    "max_steps 0": (lambda: fit(max_steps=0), "max_steps must be a whole number from 1, got 0"),
    "epochs twice": (
        lambda: fit(epochs=1, limits=Limits(epochs=2)),
        "epochs=1 and limits=Limits(epochs=2) are given; give one",
    ),
    "time without a unit": (
        lambda: fit(limits=Limits(max_time="soon")),
        "or text such as '1h30m' or '01:30:00', got 'soon'",
    ),
    "more batches than there are": (
        lambda: fit(limits=Limits(steps_per_epoch=9)),
        "steps_per_epoch=9 is more than the loader has: it would have ended after 2 of 9",
    ),
    "validation is a number": (
        lambda: fit(validation=3),
        "validation must be a DataLoader or another iterable of batches, got int: 3",
    ),
    "metric without its arguments": (
        lambda: fit(step=step, validation=Validation(loader(), metrics={"f1": FunctionMetric(max)})),
        "nothing for the metrics ['f1']: it must return a dict with the arguments",
    ),
    "metric that is a function": (
        lambda: fit(validation=Validation(loader(), metrics={"f1": max})),
        "the metric 'f1' must be an object with update(), compute() and reset()",
    ),
    "clip of 0": (lambda: fit(clip_norm=0), "clip_norm must be None or a number greater than 0, got 0"),
    "clip below 0": (
        lambda: fit(gradients=GradientRules(clip_value=-1.0)),
        "clip_value must be None or a number greater than 0, got -1.0",
    ),
    "clip twice": (
        lambda: fit(clip_norm=1.0, gradients=GradientRules(clip_norm=2.0)),
        "clip_norm=1.0 and gradients=GradientRules(clip_norm=2.0) are given; give one",
    ),
    "scheduler is a class": (
        lambda: fit(scheduler=torch.optim.lr_scheduler.StepLR),
        "scheduler must be made first: StepLR(optimizer, ...)",
    ),
    "scheduler that cannot step": (
        lambda: fit(scheduler=object()),
        "scheduler must have a method step(), got object",
    ),
    "scheduler every week": (
        lambda: fit(
            scheduler=SchedulerOptions(schedule(torch.optim.SGD(model().parameters())), every="week")
        ),
        "SchedulerOptions(every=...) must be 'epoch' or 'step', got 'week'",
    ),
    "scheduler of another optimizer": (
        lambda: fit(scheduler=schedule(torch.optim.SGD(model().parameters()))),
        "StepLR, moves another optimizer, a SGD, than the one that is given; make it from",
    ),
    "checkpoint is a number": (
        lambda: fit(checkpoint=3),
        "checkpoint must be a folder or Checkpoints(folder, ...), got 3",
    ),
    "checkpoints every 0 steps": (
        lambda: Checkpoints("run", every_steps=0),
        "Checkpoints(every_steps=...) must be a whole number from 1, got 0",
    ),
    "checkpoints kept 0": (
        lambda: Checkpoints("run", keep=0),
        "Checkpoints(keep=...) must be a whole number from 1, got 0",
    ),
    "checkpoints of the middle": (
        lambda: Checkpoints("run", mode="mid"),
        "Checkpoints(mode=...) must be 'min' or 'max', got 'mid'",
    ),
    "weights of some": (
        lambda: Checkpoints("run", weights="some"),
        "Checkpoints(weights=...) must be 'all' or 'trainable', got 'some'",
    ),
    "resume without a folder": (
        lambda: fit(resume="auto"),
        "resume='auto' needs to know where the checkpoints are: checkpoint=folder",
    ),
    "resume is a truth": (
        lambda: fit(checkpoint="run", resume=True),
        "resume must be 'auto' or the path of a checkpoint",
    ),
    "callback is text": (
        lambda: fit(callbacks=["early"]),
        "brings a callback called 'early'; installed: none; or give an object: EarlyStopping()",
    ),
    "callback is a class": (
        lambda: fit(callbacks=[callbacks.EarlyStopping]),
        "_early_stopping.EarlyStopping'>; give an object: EarlyStopping()",
    ),
    "callback with an unknown event": (
        unknown_event,
        "'on_batch_end', and a run has no such event: it would never be called; did you mean 'on_step_end'?",
    ),
    "patience of 0": (
        lambda: callbacks.EarlyStopping(patience=0),
        "patience must be a whole number from 1, got 0",
    ),
    "log to a typo": (
        lambda: fit(log="tensorbord"),
        "there is no logger 'tensorbord'; did you mean 'tensorboard'?",
    ),
    "log is a class": (
        lambda: fit(log=loggers.CsvLogger),
        "takes names of loggers and loggers, as CsvLogger(); got <class",
    ),
    "log every 0 steps": (
        lambda: fit(log=LogOptions("csv", every_steps=0)),
        "LogOptions(every_steps=...) must be a whole number from 1, got 0",
    ),
    "state with a name of fit": (
        lambda: fit(state={"model": model()}),
        "state= cannot have 'model': fit() keeps its own model under that name",
    ),
    "state is a list": (lambda: fit(state=[1]), "a dict of what is to be saved, by name, got list: [1]"),
    "loop without with": (
        loop_without_with,
        "in a with block: with trainer.loop(...) as loop: for batch in loop",
    ),
    "an epoch left early": (
        left_epoch,
        "was left after 0 of 2 batches; call stop() on the loop to end the run",
    ),
    "backward before prepare": (
        lambda: trainer().backward(torch.ones((), requires_grad=True)),
        "comes after the preparation: trainer.prepare(model, optimizer, loader)",
    ),
    "run without a batch": (
        lambda: trainer().run(step, model()),
        "a step, the models that it gets, and last the batch: run(step, model, batch)",
    ),
    "run without a model": (
        lambda: trainer().run(step),
        "a step, the models that it gets, and last the batch: run(step, model, batch)",
    ),
    "prepare a number": (
        lambda: trainer().prepare(3),
        "takes models, optimizers, loaders and schedulers, got int: 3",
    ),
    "evaluate without a step": (
        lambda: trainer().evaluate(model(), loader()),
        "argument: 'step'; write evaluate(model, loader, step=step)",
    ),
    "predict without a step": (
        lambda: trainer().predict(model(), loader()),
        "argument: 'step'; write predict(model, loader, step)",
    ),
    "gather text": (
        lambda: trainer().gather_for_metrics(["a"]),
        "with a first dimension over samples, alone or in dicts, lists and tuples; got str: 'a'",
    ),
    "load what is not there": (
        lambda: trainer().load_model(model(), "nowhere.pt"),
        "No such file or directory: 'nowhere.pt'",
    ),
    "export merged and adapter": (
        lambda: trainer().export(model(), "x", adapter=True, merged=True),
        "adapter=True or merged=True",
    ),
    "export an adapter of none": (
        lambda: trainer().export(model(), "x", adapter=True),
        "needs one model with adapters, a PeftModel of peft, and Linear has none",
    ),
    "find a checkpoint of nowhere": (lambda: find_checkpoint("nowhere"), "there is no checkpoint at nowhere"),
    "estimate for 0 devices": (
        lambda: trainer().estimate(model(), devices=0),
        "devices must be a whole number from 1, got 0",
    ),
    "estimate in pounds": (
        lambda: trainer().estimate(model(), memory="80lb"),
        "is written 80GiB, 512MiB or 24e9, got '80lb'",
    ),
    "accelerate in fp16": (
        lambda: Accelerator(cpu=True, mixed_precision="fp16"),
        "mixed_precision='fp16' is not here: 'bf16' is; scaled losses are in Trainer(precision='fp16-mixed')",
    ),
    "accelerate with DeepSpeed": (
        lambda: Accelerator(cpu=True, deepspeed_plugin=1),
        "no argument 'deepspeed_plugin'; with tp, write Trainer(backend=",
    ),
    "accelerate, misspelled": (
        lambda: Accelerator(cpu=True, log_wth="csv"),
        "no argument 'log_wth'; did you mean 'log_with'",
    ),
    "accelerate's state nowhere": (
        lambda: Accelerator(cpu=True).load_state("nowhere"),
        "there is no state in nowhere: it has no state.pt",
    ),
    "accelerate without a folder": (
        lambda: Accelerator(cpu=True).save_state(),
        "save_state(output_dir) is missing: give a folder",
    ),
    "accelerate a plain loader": (
        lambda: Accelerator(cpu=True).skip_first_batches(loader(), 1),
        "takes a loader that prepare() returned, got DataLoader",
    ),
    "lightning on two devices": (
        lambda: LightningTrainer(accelerator="cpu", devices=2),
        "devices=2, and a launcher started 1 process(es) on this host; start it with: tp launch -n 2",
    ),
    "lightning by DeepSpeed": (
        lambda: LightningTrainer(strategy="deepspeed"),
        "strategy='deepspeed' is not here",
    ),
    "lightning's profiler": (
        lambda: LightningTrainer(profiler="simple"),
        "no argument 'profiler'; with tp, write callbacks=",
    ),
    "lightning, misspelled": (
        lambda: LightningTrainer(max_epoch=1),
        "no argument 'max_epoch'; did you mean 'max_epochs'",
    ),
    "lightning without a module": (
        lambda: LightningTrainer(accelerator="cpu").fit(3),
        "the first argument is a LightningModule, got int",
    ),
    "a typo in Limits": (
        lambda: Limits(max_epoch=3),
        "Limits() has no argument 'max_epoch'; write fit(epochs=5)",
    ),
    "a typo in Checkpoints": (
        lambda: Checkpoints("run", evry_steps=5),
        "no argument 'evry_steps'; did you mean 'every_steps'?",
    ),
    "settings of another object": (
        lambda: trainer(keep=3),
        "no argument 'keep', which belongs to Checkpoints()",
    ),
    "a callback looked for at the top": (
        lambda: tp_trainer.EarlyStopping,
        "no attribute 'EarlyStopping'; it is in tp_trainer.callbacks",
    ),
    "a metric with a typo": (
        lambda: fit(step=step, callbacks=[callbacks.EarlyStopping("val_lss")], validation=loader()),
        "('val_lss') looks at none of the metrics of the run, which are val_loss; did you mean 'val_loss'?",
    ),
    "a metric of no validation": (
        lambda: fit(step=step, callbacks=[callbacks.EarlyStopping("val_loss")]),
        "which are loss; give fit(validation=loader)",
    ),
    "best of no validation": (
        lambda: fit(checkpoint=Checkpoints("run", best="val_acc", mode="max")),
        "best='val_acc' comes from a validation, and there is none: give validation=",
    ),
    "loader in the place of the optimizer": (
        lambda: trainer().fit(model(), loader()),
        "fit() takes an optimizer after the model, got DataLoader; write fit(model, torch.optim.AdamW(",
    ),
    "loader in the place of the optimizer, which has its name": (
        lambda: trainer().fit(model(), loader(), optimizer=None, step=step),
        "fit() takes an optimizer after the model, got DataLoader; write fit(model, torch.optim.AdamW(",
    ),
    "a LightningModule": (
        lambda: trainer().fit(OwnSteps(), loader()),
        "takes no OwnSteps alone, whose steps and optimizers are its own: as a LightningModule it is for tp_",
    ),
    "a scheduler by its name": (
        lambda: fit(scheduler="cosine"),
        "must be made first: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs), got 'cos",
    ),
    "another name of the newest checkpoint": (
        lambda: fit(checkpoint="run", resume="last"),
        "resume='last' is no checkpoint; the newest one in run is resume='auto'",
    ),
    "a strategy that needs none here": (
        lambda: Trainer(strategy="ddp"),
        "no argument 'strategy'; for 'ddp' leave it out: tp launch -n 2 script.py trains on two",
    ),
    "a strategy by its backend": (
        lambda: Trainer(strategy="fsdp"),
        "no argument 'strategy'; for 'fsdp' write Trainer(backend=\"fsdp\")",
    ),
    "an accelerator with devices": (
        lambda: Trainer(accelerator="gpu", devices=2),
        "for 'gpu' leave it out, as the devices that are there are taken, and tp launch -n 2 script.py",
    ),
    "precision of Accelerate": (
        lambda: Trainer(mixed_precision="fp16"),
        "no argument 'mixed_precision'; for 'fp16' write Trainer(precision=\"fp16-mixed\")",
    ),
    "an option of Hugging Face that is off": (
        lambda: Trainer(fp16=False),
        "Trainer() has no argument 'fp16'; for False leave it out",
    ),
    "a loss that is a number": (
        fit_step(lambda net, batch: step(net, batch).item()),
        "which has no gradients; return the tensor, without .item(), float() or .numpy()",
    ),
    "a loss that is an array": (
        fit_step(lambda net, batch: step(net, batch).detach().numpy()),
        "which has no gradients; return the tensor, without .item(), float() or .numpy()",
    ),
    "a number as the loss of a dict": (
        fit_step(lambda net, batch: {"loss": 0.5}),
        "it returned a dict whose 'loss' is 0.5, which has no gradients; return the tensor",
    ),
    "rows as the loss of a dict": (
        fit_step(lambda net, batch: {"loss": net(batch[0])}),
        "must be a scalar, got shape (4, 1); return its mean over the samples (loss.mean())",
    ),
    "a metric for each row": (
        fit_step(lambda net, batch: {"loss": step(net, batch), "acc": torch.ones(4)}),
        "the step's 'acc' must be a number or a scalar tensor, of which means are made, got Tensor",
    ),
    "a list with the loss": (
        fit_step(lambda net, batch: [step(net, batch)]),
        "it returned a list of 1; return one value: {'loss': loss} with the numbers to log",
    ),
    "parameters for the optimizer": (
        lambda: fit(optimizer=model().parameters()),
        "got generator: <generator object Module.parameters at",
    ),
    "a learning rate for the optimizer": (
        lambda: fit(optimizer=0.01),
        "got float: 0.01; write torch.optim.AdamW(model.parameters(), lr=1e-3)",
    ),
    "a scheduler for the optimizer": (
        lambda: fit(optimizer=schedule(torch.optim.SGD(model().parameters(), lr=0.1))),
        "optimizer must be a torch.optim.Optimizer, got StepLR",
    ),
    "several optimizers": (
        lambda: fit(optimizer=[torch.optim.SGD(model().parameters(), lr=0.1)]),
        "takes one optimizer, got a list of 1 (SGD); give one with several parameter groups",
    ),
    "a loss class for the reduction": (
        lambda: trainer(loss=nn.MSELoss()),
        "loss must be one of 'mean', 'sum', got MSELoss()",
    ),
    "a loss class for the step": (
        lambda: fit(step=nn.MSELoss()),
        "step must be a function step(model, batch) that returns the loss, got MSELoss",
    ),
    "a model for the trainer": (
        lambda: Trainer(model()),
        "too many positional arguments; write Trainer(seed=0), and then trainer.fit(model, optimizer",
    ),
    "a model alone": (
        lambda: trainer().fit(model()),
        "missing a required argument: 'optimizer'; write fit(model, optimizer, loader, step=step)",
    ),
    "inputs and targets for the loader": (
        lambda: fit(train_loader=(DATA.tensors[0], DATA.tensors[1])),
        "of which each would be a batch; give DataLoader(TensorDataset(inputs, targets), batch_size=32)",
    ),
    "inputs and targets to validate on": (
        lambda: fit(validation=(DATA.tensors[0], DATA.tensors[1])),
        "of which each would be a batch; give DataLoader(TensorDataset(inputs, targets), batch_size=32)",
    ),
    "a tensor for the loader": (
        lambda: fit(train_loader=ROWS),
        "train_loader must be a DataLoader or another iterable of batches, got Tensor",
    ),
    "an array for the loader": (
        lambda: fit(train_loader=ROWS.numpy()),
        "train_loader must be a DataLoader or another iterable of batches, got ndarray",
    ),
    "a dataset to validate on": (
        lambda: fit(validation=DATA),
        "validation must yield batches, got a dataset, TensorDataset",
    ),
    "metrics as a list of names": (
        lambda: fit(validation=Validation(loader(), metrics=["accuracy"])),
        "metrics must be a dict of metrics by name, got list: ['accuracy']",
    ),
    "a callback without a list": (
        lambda: fit(callbacks=callbacks.EarlyStopping("loss")),
        "callbacks must be a list of callbacks or names, got EarlyStopping",
    ),
    "a mode of Keras": (
        lambda: callbacks.EarlyStopping("val_loss", mode="minimum"),
        "EarlyStopping(mode=...) must be 'min' or 'max', got 'minimum'",
    ),
    "patience as text": (
        lambda: callbacks.EarlyStopping("val_loss", patience="3"),
        "patience must be a whole number from 1, got '3'",
    ),
    "checkpoint is a truth": (
        lambda: fit(checkpoint=True),
        "checkpoint must be a folder or Checkpoints(folder, ...), got True",
    ),
    "checkpoints without a folder": (
        Checkpoints,
        "missing a required argument: 'folder'; write Checkpoints(...)",
    ),
    "checkpoints every so many as text": (
        lambda: Checkpoints("run", every_steps="100"),
        "Checkpoints(every_steps=...) must be a whole number from 1, got '100'",
    ),
    "the best by an option of Lightning": (
        lambda: Checkpoints("run", monitor="val_loss"),
        'Checkpoints() has no argument \'monitor\'; write Checkpoints("run", best="val_loss")',
    ),
    "so many of the best": (
        lambda: Checkpoints("run", save_top_k=3),
        "Checkpoints() has no argument 'save_top_k'; write Checkpoints(\"run\", keep=3)",
    ),
    "best is a truth": (
        lambda: Checkpoints("run", best=True),
        "Checkpoints(best=...) must be the name of a metric, as 'val_loss', got True",
    ),
    "resume is a number": (
        lambda: fit(checkpoint="run", resume=3),
        "resume must be 'auto' or the path of a checkpoint, got 3",
    ),
    "log is a truth": (
        lambda: fit(log=True),
        "log= takes names of loggers and loggers, as 'csv' or CsvLogger('run'); got True",
    ),
    "log is a folder": (
        lambda: fit(log="logs/"),
        "there is no logger 'logs/'; those there are: 'csv', 'jsonl'",
    ),
    "several schedulers": (
        lambda: fit(scheduler=[schedule(torch.optim.SGD(model().parameters(), lr=0.1))] * 2),
        "join several with SequentialLR or ChainedScheduler of torch.optim.lr_scheduler",
    ),
    "an optimizer for the scheduler": (
        lambda: SchedulerOptions(torch.optim.SGD(model().parameters(), lr=0.1)),
        "scheduler must move a learning rate, got an optimizer, SGD",
    ),
    "an interval of Lightning": (
        lambda: SchedulerOptions(None, interval="step"),
        "no argument 'interval'; write SchedulerOptions(scheduler, every=\"step\")",
    ),
    "a scheduler for each batch": (
        lambda: SchedulerOptions(schedule(torch.optim.SGD(model().parameters(), lr=0.1)), every="batch"),
        "SchedulerOptions(every=...) must be 'epoch' or 'step', got 'batch'",
    ),
    "seed is half": (lambda: trainer(seed=1.5), "None or a whole number from 0, got 1.5"),
    "seed is a truth": (lambda: trainer(seed=True), "None or a whole number from 0, got True"),
    "devices by numbers": (
        lambda: Trainer(devices=[100, 101]),
        "asks for the accelerator with index 100, which does not exist",
    ),
    "precision by a dtype": (
        lambda: trainer(precision=torch.bfloat16),
        "one of 'fp32', 'bf16-mixed', 'fp16-mixed', 'bf16-true', got torch.bfloat16",
    ),
    "precision float16": (lambda: trainer(precision="float16"), "precision='float16' is 'fp16-mixed' here"),
    "accumulate as text": (
        lambda: trainer(accumulate="2"),
        "accumulate must be a whole number from 1, got '2'",
    ),
    "progress by tqdm": (
        lambda: Trainer(progress="tqdm"),
        "progress must be True, False or 'auto' (on a terminal or in a notebook), got 'tqdm'",
    ),
    "prepare a dict": (
        lambda: trainer().prepare({"model": model()}),
        "prepare() takes its objects one by one, as in prepare(*objects), got a dict of 1 (Linear)",
    ),
    "prepare a dataset": (
        lambda: trainer().prepare(DATA),
        "prepare() takes models, optimizers, loaders and schedulers, got TensorDataset",
    ),
    "prepare a class": (
        lambda: trainer().prepare(nn.Linear),
        "prepare() takes models, optimizers, loaders and schedulers, got type",
    ),
    "run with the model first": (
        lambda: trainer().run(model(), step, DATA[:]),
        "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)",
    ),
    "run of a result": (
        lambda: trainer().run(step(model(), DATA[:])),
        "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)",
    ),
    "evaluate with the loader first": (
        lambda: trainer().evaluate(loader(), model(), step=step),
        "evaluate() takes a model, a torch.nn.Module, got DataLoader",
    ),
    "predict a tensor": (
        lambda: trainer().predict(model(), ROWS, step),
        "loader must be a DataLoader or another iterable of batches, got Tensor",
    ),
    "export with the path first": (
        lambda: trainer().export("m.safetensors", model()),
        "export() takes a model first, and then the path, got str: 'm.safetensors'; write export(",
    ),
    "export of a state": (
        lambda: trainer().export(model().state_dict(), "m.safetensors"),
        "export() takes a model first, and then the path, got OrderedDict; write export(model, path)",
    ),
    "load with the path first": (
        lambda: trainer().load_model("m.pt", model()),
        "load_model() takes a model first, and then the path, got str: 'm.pt'",
    ),
    "save with the path first": (
        lambda: trainer().save_model("m.pt", model()),
        "save_model() takes a model first, and then the path, got str: 'm.pt'",
    ),
    "a loop without a loader": (
        lambda: trainer().loop(epochs=3),
        "missing a required argument: 'batches'; write loop(loader, epochs=5)",
    ),
    "a loop with a step": (
        lambda: trainer().loop(loader(), step=step, epochs=1),
        "loop() has no argument 'step', which belongs to fit()",
    ),
    "launch of a path": (
        lambda: launch("train.py", 2),
        "launch() takes a function, the number of processes and its arguments, got 'train.py'",
    ),
    "launch by an option of others": (
        lambda: launch(step, nprocs=2),
        "the number of processes is the second argument of launch(): launch(step, 2, ...)",
    ),
    "a time below 0": (
        lambda: Limits(max_time=-1),
        "max_time must be a number of seconds above 0, or text such as '1h30m'",
    ),
    "rows of the log by a short name": (
        lambda: LogOptions("csv", every=10),
        "LogOptions() has no argument 'every'; did you mean 'every_steps'?",
    ),
    "a metric by its name": (
        lambda: FunctionMetric("accuracy"),
        "a FunctionMetric needs a function of all samples, got str: 'accuracy'",
    ),
    "the metric of a validation": (
        lambda: Validation(loader(), metric=1),
        "Validation() has no argument 'metric'; did you mean 'metrics'?",
    ),
    "clip as text": (
        lambda: fit(clip_norm="1"),
        "clip_norm must be None or a number greater than 0, got '1'",
    ),
    "runner: items first": (
        lambda: run([1, 2], abs),
        "map() takes a function, and then the items, got list: [1, 2]",
    ),
    "runner: workers of DataLoader": (
        lambda: run(abs, [1], num_workers=2),
        "unknown option 'num_workers' of engine 'inline'; did you mean 'n_workers'?",
    ),
    "data: no sources": (
        lambda: tp_data.Stream({}),
        "a stream needs sources, by names that are texts, got []",
    ),
    "data: a batch of DataLoader": (
        lambda: tp_data.Loader(samples(), batch_size=4),
        "Loader() has no argument 'batch_size'; did you mean 'batch'?",
    ),
    "step with an index": (
        lambda: fit(step=lambda net, batch, index: net(batch)),
        "<lambda>(net, batch, index) cannot be called with these two: missing a required argument: 'index'",
    ),
    "step without a model": (
        lambda: fit(step=lambda batch: batch),
        "<lambda>(batch) cannot be called with these two: too many positional arguments",
    ),
    "step returns a tuple": (
        fit_step(lambda net, batch: (step(net, batch), 1)),
        "it returned a tuple of 2; return one value: {'loss': loss} with the numbers to log",
    ),
    "step returns a weight below 0": (
        fit_step(lambda net, batch: {"loss": step(net, batch), "weight": -1}),
        "the step's 'weight' is -1.0, and must be a finite number from 0",
    ),
    "step returns text as a number": (
        fit_step(lambda net, batch: {"loss": step(net, batch), "note": "hi"}),
        "the step's 'note' must be a number or a scalar tensor, of which means are made, got str: 'hi'",
    ),
    "a generator of batches": (
        lambda: fit(train_loader=(batch for batch in loader())),
        "the loader (generator) has no length; give the number of batches that make an epoch",
    ),
    "a dataset of samples": (
        lambda: fit(train_loader=DATA),
        "must yield batches, got a dataset, TensorDataset",
    ),
    "numbers of a loop by place": (
        lambda: in_loop(lambda own, loop: loop.log("loss", 1.0)),
        "loop.log() takes its numbers by name, got str: 'loss'; write loop.log(loss=loss)",
    ),
    "numbers of a loop in a dict": (
        lambda: in_loop(lambda own, loop: loop.log({"loss": 1.0})),
        "loop.log() takes its numbers by name, got a dict; write loop.log(**numbers)",
    ),
    "a loop's step by another name": (
        lambda: in_loop(lambda own, loop: loop.global_step),
        "a Loop has no 'global_step'; write loop.step",
    ),
    "a model for the loop": (
        lambda: trainer().loop(loader(), model=model()),
        "loop() has no argument 'model'; write loop(loader, state={\"model\": model})",
    ),
    "clipping in a loop": (
        lambda: trainer().loop(loader(), clip_norm=1.0),
        "no argument 'clip_norm'; write trainer.update(model, optimizer, clip_norm=1.0) in the loop",
    ),
    "a column of the history": (
        lambda: HISTORY["loss"],
        "its epochs by number, got 'loss'; write history.to_dict()['loss'] for the values of all epochs",
    ),
    "the history of Keras": (
        lambda: HISTORY.history["loss"],
        "a History has no 'history'; write history.to_dict() for the values of all epochs",
    ),
    "a mean of the history": (
        lambda: HISTORY.loss,
        "a History has no 'loss'; write history.to_dict()['loss']",
    ),
    "a mean of an epoch": (
        lambda: HISTORY[-1].loss,
        "an EpochRecord has its means by name; write record.metrics['loss']",
    ),
    "an item of an epoch": (
        lambda: HISTORY[-1]["loss"],
        "an EpochRecord has no items, got ['loss']; its means are a dict: write record.metrics['loss']",
    ),
    "the index of one device": (
        lambda: Trainer(devices="0"),
        "a count from 1 on, 'auto' for all devices, or [0] for the accelerator with index 0",
    ),
    "all devices of Lightning": (
        lambda: Trainer(devices=-1),
        "a count from 1 on, 'auto' for all devices, or [0] for the accelerator with index 0",
    ),
    "no backend": (
        lambda: trainer(backend=None),
        "backend must be the name of a backend, or 'auto' for the best one that fits, got None",
    ),
    "options for the backend": (
        lambda: trainer(backend=DdpOptions()),
        "backend must be the name of a backend, or 'auto' for the best one that fits, got DdpOptions(",
    ),
    "prepare nothing": (
        lambda: trainer().prepare(),
        "got nothing; write model, optimizer, loader = trainer.prepare(model, optimizer, loader)",
    ),
    "prepare by names": (
        lambda: trainer().prepare(model=model()),
        "takes its objects by place, got model by name; write model, optimizer, loader = trainer.prepare(",
    ),
    "build a model that is built": (
        lambda: trainer().build(model()),
        "a function that makes the model, got Linear; write trainer.build(lambda: Model(config))",
    ),
    "the parameters for clipping": (
        lambda: trainer().clip_grad_norm(model().parameters(), 1.0),
        "takes a model, a torch.nn.Module, got generator",
    ),
    "export for torch.load": (
        lambda: trainer().export(model(), "m.pt"),
        "the name ends in .safetensors, got 'm.pt'; write 'm.safetensors'",
    ),
    "export into the current folder": (
        lambda: trainer().export(model(), "."),
        "the name ends in .safetensors, got '.'; write 'model.safetensors'",
    ),
    "export of shards for torch.load": (
        lambda: ts.export(model(), "m.pt"),
        "the name ends in .safetensors, got 'm.pt'; write 'm.safetensors'",
    ),
    "an adapter in one file": (
        lambda: trainer().export(model(), "adapter.safetensors", adapter=True),
        "adapters are written into a folder, got 'adapter.safetensors', the name of a file",
    ),
    "safetensors by save_model": (
        lambda: trainer().save_model(model(), "m.safetensors"),
        "would be read as safetensors; write export(model, path), or another name",
    ),
    "the best checkpoint": (
        lambda: fit(checkpoint="run", resume="best"),
        "trainer.load_model(model, find_checkpoint('run', best='val_loss'))",
    ),
    "the run's folder for a checkpoint": (
        lambda: fit(checkpoint="run", resume="run"),
        "resume='run' is the folder of the run, and no checkpoint; the newest one in run is resume='auto'",
    ),
    "a step of Lightning": (
        lambda: fit(step=OwnSteps().training_step),
        "training_step of a LightningModule gets a batch and its number; write step=lambda model, batch:",
    ),
    "the best weights of Keras": (
        lambda: callbacks.EarlyStopping(restore_best_weights=True),
        'after it trainer.load_model(model, find_checkpoint("run", best="val_loss"))',
    ),
    "a file for the checkpoints": (
        lambda: fit(checkpoint="model.pt"),
        "checkpoint='model.pt' is the name of a file, and the checkpoints of a run are a folder; write",
    ),
    "a model in no file": (
        lambda: trainer().save_model(model(), "."),
        ". is a folder; give the name of a file in it",
    ),
    "a model in a folder that is not there": (
        lambda: trainer().save_model(model(), "no/such/m.pt"),
        "there is no folder no/such in which m.pt could be written",
    ),
    "a checkpoint of now into a place": (
        lambda: in_loop(lambda own, loop: loop.save("now")),
        "loop.save(): too many positional arguments; write loop.save()",
    ),
    "an end without a reason": (
        lambda: in_loop(lambda own, loop: loop.stop()),
        "missing a required argument: 'reason'; write loop.stop(\"a reason\")",
    ),
    "a scheduler of Keras by its name": (
        lambda: fit(scheduler="plateau"),
        "must be made first: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), got 'plateau'",
    ),
    "runner: workers of Pool": (
        lambda: run(abs, [1], processes=2),
        "unknown option 'processes' of engine 'inline'; it is 'n_workers' here",
    ),
    "runner: chunks of Pool": (
        lambda: run(abs, [1], chunksize=2),
        "leave it out: how many items travel together follows from how long they take",
    ),
    "runner: workers of an executor": (
        lambda: tp_runner.Executor(n_workers=2),
        "an Executor has no n_workers: write Executor(2), or max_workers=2",
    ),
    "the folder of Lightning": (
        lambda: Checkpoints(dirpath="run"),
        "Checkpoints() has no argument 'dirpath'; write Checkpoints(\"run\")",
    ),
    "a backend of others": (lambda: fit_on("deepspeed"), "backend 'deepspeed' (asked for) is not installed"),
    "shards on one device": (
        lambda: fit_on("fsdp"),
        "does not fit: one process, and this takes one per device; tp launch -n 2 script.py",
    ),
    "stages on one device": (
        lambda: fit_on("pipeline"),
        "does not fit: one process, and this takes one per device; tp launch -n 2 script.py",
    ),
    "slices on one device": (
        lambda: fit_on("context"),
        "does not fit: one process, and this takes one per device; tp launch -n 2 script.py",
    ),
    "an option of a split model that is not there": (
        lambda: fit_on("shard", plan="auto"),
        "backend 'shard' has no option 'plan'; it has: group_size",
    ),
    "recomputation of no block": (
        lambda: checkpoint_activations(model(), every=0),
        "every must be a whole number from 1, got 0",
    ),
    "recomputation of another class": (
        lambda: checkpoint_activations(model(), nn.Conv2d),
        "no module of the class 'Conv2d'; it has: Linear",
    ),
    "a result to launch": (
        lambda: launch(len("ab"), 2),
        "launch() takes a function, the number of processes and its arguments, got 2",
    ),
    "launch on no process": (lambda: launch(abs, 0, 1), "must be 1 or more processes, or 'auto'; got 0"),
    "averages that grow": (
        lambda: callbacks.ExponentialMovingAverage(decay=2.0),
        "(decay=...) must be from 0 up to but not including 1, got 2.0",
    ),
    "estimate of a name": (
        lambda: trainer().estimate("resnet"),
        "estimate() takes a model, a torch.nn.Module, got str: 'resnet'",
    ),
    "no device": (lambda: resolve_devices([]), "devices=[] names no device"),
    "no idle device": (
        lambda: resolve_devices("idle:0"),
        "devices='idle:0' is not a request for idle devices",
    ),
    "a device for tensors": (lambda: recursive_to(ROWS, "gpu"), "device='gpu' names no device"),
    "an unfinished backend": (
        lambda: registry.register(Unfinished),
        "the class Unfinished needs the methods open",
    ),
    "runner: a typo in the engine": (
        lambda: run(abs, [1], engine="proces"),
        "no engine is called 'proces'; installed: 'inline', 'process', 'ray', 'thread'",
    ),
    "runner: a typo in an option": (
        lambda: run(abs, [1], n_workes=2),
        "unknown option 'n_workes' of engine 'inline'; did you mean 'n_workers'?",
    ),
    "runner: no function": (lambda: run(3, [1]), "map() takes a function, and then the items, got int: 3"),
    "runner: no items": (
        lambda: run(abs, 5),
        "map() takes items one by one from an iterable or a dataset, got int: 5",
    ),
    "runner: no workers": (
        lambda: run(abs, [1], n_workers=0),
        "n_workers must be a whole number of at least 1, got 0",
    ),
    "runner: empty batches": (
        lambda: run(abs, [1], batch=0),
        "batch must be a whole number of at least 1, got 0",
    ),
    "runner: errors ignored": (
        lambda: run(abs, [1], on_error="ignore"),
        "on_error must be one of 'raise', 'return', got 'ignore'",
    ),
    "runner: another way to start": (
        lambda: run(abs, [1], engine="process", start_method="forks"),
        "start_method must be one of 'forkserver', 'spawn', 'fork', got 'forks'",
    ),
    "runner: used after its end": (
        use_after_close,
        "this OrderedRunner is closed; activate() starts it again",
    ),
    "runner: an executor without workers": (
        lambda: tp_runner.Executor(0),
        "max_workers must be greater than 0, got 0",
    ),
    "shard: a plan for other names": (
        lambda: ts.parallelize(layers(), {"*.up": ts.Column()}),
        "the plan's ['*.up'] fit no layer; the layers are '0', '1', '2'",
    ),
    "shard: a style as text": (
        lambda: ts.parallelize(layers(), {"0": "column"}),
        "the plan's '0' is a Column(), Row(), Vocab()",
    ),
    "shard: a plan as a list": (
        lambda: ts.parallelize(layers(), [ts.Column()]),
        "a plan is a dict from names to styles, as {'*.up_proj': ts.Column()}, got [Column(",
    ),
    "shard: a plan without a batch": (
        lambda: ts.plans.auto(layers()),
        "cannot be called without a batch of yours: auto(model, batch)",
    ),
    "shard: a third dimension": (
        lambda: ts.nn.ParallelLinear(4, 4, dim=2),
        "0 (input features) or None (not split), got 2",
    ),
    "shard: a column of an activation": (
        lambda: ts.parallelize(layers(), {"1": ts.Column()}),
        "holds='q') is for an nn.Linear",
    ),
    "shard: a plan of nobody": (
        lambda: ts.plans.from_hf(layers()),
        "take ts.plans.auto(model), which needs none",
    ),
    "shard: the folder first": (
        lambda: ts.load_sharded("run", layers()),
        "load_sharded(model, folder) takes the model first, got str: 'run'",
    ),
    "shard: proof on no rank": (
        lambda: ts.verify(layers(), {"0": ts.Column()}, ROWS, ranks=0),
        "ranks is a number of 1 or more, got 0",
    ),
    "data: no such file": (lambda: tp_data.Stream("nowhere.jsonl"), "nowhere.jsonl does not exist"),
    "data: a mixture of others": (
        lambda: samples(mixture={"b": 1.0}),
        "the mixture has weights of ['b'], and the sources are ['a']",
    ),
    "data: a seed as text": (lambda: samples(seed="1"), "seed must be a whole number, got '1'"),
    "data: shuffle as text": (
        lambda: samples(shuffle="yes"),
        "shuffle='yes': give True, False or Shuffle(...)",
    ),
    "data: empty batches": (
        lambda: load(0),
        "a batch needs a number of samples above 0, for all ranks together, got 0",
    ),
    "data: workers below 0": (lambda: load(workers=-1), "workers=-1: give a number from 0 on"),
    "data: a list for a stream": (
        lambda: tp_data.Loader([1, 2], 2),
        "a Loader needs a Stream, got list; write Loader(Stream(...), ...)",
    ),
    "data: the position of other samples": (
        load_state_of_others,
        "give the sources of the run that saved it, or start over",
    ),
    "data: samples without tokens": (
        lambda: next(iter(load(tp_data.TokenBudget(8)))),
        "got int: 0; tokenize the samples first",
    ),
    "context: another attention": (
        lambda: ContextOptions(attention="flash"),
        "must be one of all-gather, ulysses, ring, auto, got 'flash'",
    ),
    "pipeline: a schedule in lower case": (
        lambda: tp_pipeline.PipelineOptions(schedule="1f1b"),
        "PipelineOptions(schedule=...) must be one of 'GPipe', '1F1B'",
    ),
    "pipeline: parts twice": (
        lambda: tp_pipeline.PipelineOptions(microbatches=2, microbatch_size=2),
        "and not both; got 2 and 2",
    ),
    "pipeline: cuts as text": (
        lambda: tp_pipeline.PipelineOptions(cuts="5"),
        "as in ['layers.4', 'layers.8']; got '5'",
    ),
    "verify: a model for its builder": (
        lambda: verify(layers()),
        "build is a function that returns the plain model, got a model, Sequential",
    ),
    "verify: no batch": (
        lambda: verify(batches=()),
        "there is nothing to verify with: give at least one batch, as a list",
    ),
    "verify: a name for a way": (
        lambda: verify(parallel="ddp"),
        "parallel is a function of the model, or a Strategy as strategies.DDP(), got 'ddp'",
    ),
    "verify: a type as text": (
        lambda: verify(dtype="bf16"),
        "dtype is one of torch's, as torch.bfloat16, or None for the model's own, got 'bf16'",
    ),
    "verify: more parts than rows": (
        lambda: verify(micro=8),
        "a batch has 8 rows, and 2 ranks with 8 micro-batches need 16",
    ),
    "tuple: a whole batch": (
        lambda: tp_tuple.TupleParallel(model(), TWO)(ROWS),
        "one part per device, got Tensor of shape (4, 3); tp_tuple.tp_collate makes",
    ),
    "tuple: too many parts": (
        lambda: tp_tuple.TupleParallel(model(), TWO)((ROWS,) * 3),
        "argument 0 must have 1 to 2 parts, one per device, got 3",
    ),
    "tuple: too few weights": (
        lambda: tp_tuple.tp_collate(2, weights=[1]),
        "2 parts need 2 weights, got 1: [1]",
    ),
    "tuple: a function for a module": (
        lambda: tp_tuple.TupleParallel(abs, TWO),
        "TupleParallel wraps a torch.nn.Module, got builtin_function_or_method",
    ),
    "dp-gather: texts for rows": (
        lambda: tp_dp_gather.DataParallel(model(), TWO)(ROWS, ["a"] * 4),
        "is a list as long as the batch, which has 4 rows",
    ),
    "dp-gather: other rows": (
        lambda: tp_dp_gather.DataParallel(nn.Bilinear(3, 3, 1), TWO)(ROWS, ROWS[:3]),
        "the same number of rows along dim 0, got 4 and 3",
    ),
    "dp-gather: an older option": (
        lambda: tp_dp_gather.DataParallel(model(), TWO, minibatch=True),
        "does not have the option minibatch=True (pass inputs_are_scattered=True",
    ),
    "the largest for the best": (
        lambda: Checkpoints("run", best="val_accuracy"),
        "takes the smallest 'val_accuracy' for the best; write mode='max', or mode='min' if it is",
    ),
    "the largest for early stopping": (
        lambda: callbacks.EarlyStopping("val_f1"),
        "takes the smallest 'val_f1' for the best; write mode='max', or mode='min' if it is",
    ),
    "the checkpoint with the largest": (
        lambda: find_checkpoint("run", best="val/acc"),
        "takes the smallest 'val/acc' for the best; write mode='max', or mode='min' if it is",
    ),
    "a home folder": (
        lambda: fit(checkpoint="~/run"),
        "is '~/run': Python leaves ~ as it is; write os.path.expanduser(...)",
    ),
    "a pattern for the checkpoints": (
        lambda: fit(checkpoint="run-{epoch}"),
        "nothing fills in the braces, and each checkpoint has its step in its own name",
    ),
    "an empty folder": (
        lambda: fit(checkpoint=""),
        "is '': it is empty; for the working folder write '.'",
    ),
    "checkpoints in a number": (
        lambda: Checkpoints(3),
        "Checkpoints(folder) must be the path of a folder, got 3",
    ),
    "a log in a number": (
        lambda: loggers.CsvLogger(3),
        "CsvLogger(folder) must be the path of a folder, got 3",
    ),
    "a log in a home folder": (
        lambda: loggers.CsvLogger("~/run"),
        "is '~/run': Python leaves ~ as it is; write os.path.expanduser(...)",
    ),
    "the folder of a SummaryWriter": (
        lambda: loggers.TensorBoardLogger(log_dir="run"),
        "has no argument 'log_dir'; write TensorBoardLogger(\"run\")",
    ),
    "a log twice": (
        lambda: fit(log=["csv", "csv"]),
        "'csv' is in log= twice, and both would write one file; give it once",
    ),
    "a loop over epochs around a loop": (
        loop_over_epochs,
        "for code between epochs write: for batches in loop.by_epoch()",
    ),
    "a setting after the trainer": (
        lambda: setattr(trainer(), "accumulate", 4),
        "a Trainer's accumulate is chosen when it is made; write Trainer(accumulate=4)",
    ),
    "the end of a run by Lightning's flag": (
        lambda: in_loop(lambda own, loop: setattr(loop, "should_stop", True)),
        "a Loop has no 'should_stop' to set; write loop.stop(\"a reason\")",
    ),
    "clipping to a norm below 0": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.clip_grad_norm(net, -1.0)),
        "max_norm must be None or a number greater than 0, got -1.0",
    ),
    "clipping to NaN": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.clip_grad_norm(net, float("nan"))),
        "max_norm must be None or a number greater than 0, got nan",
    ),
    "clipping before the backward pass": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.clip_grad_norm(net, 1.0)),
        "no parameter has a gradient yet; call trainer.backward(loss) before it",
    ),
    "an update before the backward pass": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.update(net, optimizer)),
        "no parameter has a gradient yet; call trainer.backward(loss) before it",
    ),
    "an update of the optimizer first": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.update(optimizer, net)),
        "update() takes the model first, and then the optimizer, got Linear",
    ),
    "backward of a detached loss": (
        lambda: in_own_loop(lambda own, net, _, batch: own.backward(step(net, batch).detach())),
        "leads to no parameter (it does not require grad); compute it from the model's output",
    ),
    "a batch that is taken apart for run": (
        lambda: in_own_loop(lambda own, net, _, batch: own.run(step, net, *batch)),
        "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)",
    ),
    "a loss for run's step": (
        lambda: in_own_loop(lambda own, net, _, batch: own.run(step(net, batch), net, batch)),
        "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)",
    ),
    "no_sync of an optimizer": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.no_sync(optimizer)),
        "takes a model, a torch.nn.Module, got SGD: SGD ( Parameter Group 0 dampening",
    ),
    "a number for reduce": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.session.reduce(3.0)),
        "reduce() takes a tensor, got float: 3.0; write torch.tensor(value)",
    ),
    "epochs of numpy": (
        lambda: fit(epochs=ROWS.sum().long().numpy()[()]),
        "epochs must be a whole number from 1, got np.int64(12); write 12",
    ),
    "steps in scientific notation": (
        lambda: fit(max_steps=1e3),
        "max_steps must be a whole number from 1, got 1000.0; write 1000",
    ),
    "unfreezing without epochs": (
        lambda: callbacks.GradualUnfreezing(["head"]),
        "GradualUnfreezing takes a dict of epochs, such as {1: ['head'], 3: ['']}; got ['head']",
    ),
    "a scheduler that the step moves": (
        moved_scheduler,
        "the step has called step() of the scheduler, StepLR, which fit() does; leave it out of the step",
    ),
    "a number to gather": (
        lambda: in_own_loop(lambda own, net, optimizer, batch: own.gather_for_metrics(3.0)),
        "for its mean over ranks write trainer.session.reduce(torch.tensor(value))",
    ),
    "a callback that returns False": (
        lambda: fit(step=step, callbacks=[ReturnsFalse()]),
        "on_step_end() of the callback ReturnsFalse returned False, which does not end the run, as it ",
    ),
    "an option for a monitor": (
        lambda: callbacks.LearningRateMonitor(x=1),
        "LearningRateMonitor() has no argument 'x'; it has: none",
    ),
    "a monitor's option of Lightning": (
        lambda: callbacks.LearningRateMonitor(logging_interval="step"),
        "write LearningRateMonitor(), and LogOptions(..., every_steps=10) for fewer rows",
    ),
    "launch: the option of mpirun": (
        lambda: requested(nproc_per_node="p"),
        "got 'p'; -np is -n here: tp launch -n 2 script.py",
    ),
    "launch: a number with a fraction": (
        lambda: launch(abs, 2.5, 1),
        "must be 1 or more processes, or 'auto'; got 2.5",
    ),
    "launch: a path to execute": (
        lambda: execute("train.py"),
        "got 'train.py'; write execute(LaunchRequest(script='train.py', nproc_per_node=2))",
    ),
    "launch: processes by a short name": (
        lambda: requested(nproc=2),
        "no argument 'nproc'; write LaunchRequest(script='train.py', nproc_per_node=2)",
    ),
    "launch: arguments in one text": (
        lambda: requested(args="--lr 1"),
        "args must be a tuple of texts, as ('--lr', '0.1'), got one text, '--lr 1'",
    ),
    "launch: arguments behind the script": (
        lambda: requested(script=f"{__file__} --lr 0.1"),
        "give its arguments by themselves, on a command line without quotes, in a LaunchRequest as args",
    ),
    "launch: a script that is not there": (
        lambda: requested(script="nowhere.py"),
        "give the path of a Python file, or -m and the name of a module",
    ),
    "launch: hosts in words": (
        lambda: requested(nnodes="two"),
        "must be a number or MIN:MAX, such as 2 or 1:4",
    ),
    "launch: hosts that do not meet": (
        lambda: requested(nnodes="2"),
        "give every host the same --rdzv-endpoint HOST:PORT, with the address of one of them",
    ),
    "launch: restarts below 0": (
        lambda: requested(max_restarts=-1),
        "--max-restarts must be 0 or more, got -1",
    ),
    "launch: no time to end": (lambda: requested(grace_s=-1), "--grace-s must be 0 seconds or more, got -1"),
    "launch: logs in a number": (
        lambda: requested(log_dir=3),
        "--log-dir must be the path of a directory, got 3",
    ),
    "pipeline: cuts by number": (
        lambda: stages(cuts=[2, 4]),
        "must be a list of the names of modules with which stages begin, each once",
    ),
    "pipeline: a cut twice": (
        lambda: stages(cuts=["2", "2"]),
        "each once, as in ['layers.4', 'layers.8']; got ['2', '2']",
    ),
    "pipeline: the chunks of others": (
        lambda: stages(chunks=4),
        "no argument 'chunks'; write PipelineOptions(microbatches=4)",
    ),
    "pipeline: another spelling of a number": (
        lambda: stages(micro_batches=4),
        "no argument 'micro_batches'; did you mean 'microbatches'?",
    ),
    "pipeline: parts below 0": (
        lambda: stages(microbatches=-1),
        "PipelineOptions(microbatches=...) must not be negative, got -1",
    ),
    "pipeline: parts as text": (
        lambda: stages(microbatches="4"),
        "PipelineOptions(microbatches=...) must be a whole number, got '4'",
    ),
    "pipeline: the schedule first": (
        lambda: tp_pipeline.PipelineOptions("1F1B"),
        "PipelineOptions(ranks=...) must be a whole number, got '1F1B'",
    ),
    "pipeline: no rank": (lambda: stages(ranks=0), "must be -1 for all ranks, or their number, got 0"),
    "pipeline: torch's name of a schedule": (
        lambda: stages(schedule="ScheduleGPipe"),
        "must be one of 'GPipe', '1F1B', 'LoopedBFS', 'Interleaved1F1B'",
    ),
    "pipeline: two stages where there is one": (
        lambda: stages(stages_per_rank=2),
        "has one stage on each rank, got stages_per_rank=2; take 'Interleaved1F1B' for several",
    ),
    "pipeline: a sharing of others": (
        lambda: stages(data="zero"),
        "PipelineOptions(data=...) must be one of 'ddp', 'fsdp', got 'zero'",
    ),
    "pipeline: names as a number": (
        lambda: stages(samples=3),
        "PipelineOptions(samples=...) must be a list of names, got 3",
    ),
    "pipeline: a truth to broadcast": (
        lambda: stages(broadcast=True),
        "PipelineOptions(broadcast=...) must be a list of names, got True",
    ),
    "pipeline: a name that is cut and whole": (
        lambda: stages(samples="x", broadcast="x"),
        "and broadcast=... what each micro-batch needs whole: ['x'] cannot be both",
    ),
    "pipeline: a trace without a file": (
        lambda: stages(trace=True),
        "must be the path of a file, as 'run/stages.trace.json', got True",
    ),
    "context: no rank": (
        lambda: ContextOptions(context=0),
        "must be -1 for all ranks, or their number, got 0",
    ),
    "context: a sequence by number": (
        lambda: ContextOptions(sequence=1),
        "must map names of the batch's tensors to the dimension of the sequence, from 0",
    ),
    "context: fewer tokens than none": (
        lambda: ContextOptions(check_tokens=-1),
        "ContextOptions(check_tokens=...) must not be negative, got -1",
    ),
    "context: positions of a tensor": (
        lambda: tp_context.positions(ROWS),
        "got a tensor of shape (4, 3); write positions(tokens.size(1))",
    ),
    "context: positions that are fractions": (
        lambda: tp_context.positions(8.0),
        "positions() takes a number of tokens, got 8.0; write",
    ),
    "context: a list to gather": (
        lambda: tp_context.gather([1, 2]),
        "gather() takes a tensor, such as (batch, tokens, features), got list",
    ),
    "shard: no plan": (
        lambda: ts.parallelize(layers(), {}),
        "the plan is empty, and splits nothing; plans.auto(model, batch) makes one from a batch",
    ),
    "shard: the plan first": (
        lambda: ts.parallelize({"0": ts.Column()}, layers()),
        "parallelize(model, plan) takes a model first, which is made, and then the plan, got dict",
    ),
    "shard: a class to split": (
        lambda: ts.parallelize(nn.Linear, {"": ts.Column()}),
        "parallelize(model, plan) takes a model first, which is made, and then the plan, got type",
    ),
    "shard: a style that is not made": (
        lambda: ts.parallelize(layers(), {"0": ts.Column}),
        "the plan's '0' is a Column(), Row(), Vocab()",
    ),
    "shard: a layer by number": (
        lambda: ts.parallelize(layers(), {0: ts.Column()}),
        "a plan has names of layers, as in model.named_modules(), got 0; write '0'",
    ),
    "shard: a weight for a layer": (
        lambda: ts.parallelize(layers(), {"0.weight": ts.Column()}),
        "the plan's ['0.weight'] fit no layer; the layers are '0', '1', '2'",
    ),
    "shard: the sequence as text": (
        lambda: ts.parallelize(layers(), {"0": ts.Column(), "2": ts.Row()}, sequence_dim="1"),
        "sequence_dim is counted from the end and is not the features: -2 or less, got '1'",
    ),
    "shard: the dimension of a style": (
        lambda: ts.Column(dim=1),
        "write Column() to split output features, or Row() to split input features",
    ),
    "shard: no head": (lambda: ts.Column(heads=0), "must be a whole number from 1, or None, got 0"),
    "shard: the dimension for the bias": (
        lambda: ts.nn.ParallelLinear(4, 4, 1),
        "bias must be True or False, got 1; the split dimension has a name: dim=1",
    ),
    "shard: the dimension as text": (
        lambda: ts.nn.ParallelLinear(4, 4, dim="out"),
        "0 (input features) or None (not split), got 'out'",
    ),
    "shard: heads that do not divide": (
        lambda: ts.nn.ParallelAttention(10, 3),
        "dim=10 features are divided over the heads, and heads=3 does not divide them",
    ),
    "shard: ranks of none": (
        lambda: ts.ShardOptions(group_size=0),
        "ShardOptions(group_size=...) must be -1 for all ranks, or their number, got 0",
    ),
    "shard: a sharing of others": (
        lambda: ts.ShardOptions(data="zero"),
        "'auto', 'ddp', 'fsdp' or FullyShard",
    ),
    "shard: a file for the folder": (
        lambda: ts.save_sharded(layers(), "m.pt"),
        "'m.pt' is the name of a file; write 'm', or export(model, 'model.safetensors') for one file",
    ),
    "shard: clipping below 0": (
        lambda: ts.clip_grad_norm_(layers(), -1.0),
        "max_norm must be a number from 0, got -1.0",
    ),
    "shard: decay as text": (
        lambda: ts.parameter_groups(layers(), weight_decay="0.1"),
        "weight_decay must be a number from 0, or None for the optimizer's, got '0.1'",
    ),
    "shard: a seed as text": (
        lambda: ts.RandomTracker("0"),
        "seed must be a whole number, the same on all ranks, got '0'",
    ),
    "shard: a summary of a name": (
        lambda: ts.summary("model"),
        "summary() takes a model, a torch.nn.Module, got str: 'model'",
    ),
    "shard: a state for another rank": (
        lambda: ts.collect_state_dict(layers(), layers().state_dict(), to="rank1"),
        "a state is collected to 'all' ranks or to 'rank0', got 'rank1'",
    ),
    "shard: a class beyond the last": (
        lambda: ts.nn.functional.parallel_cross_entropy(ROWS, torch.tensor([0, 1, 2, 3])),
        "target 3 on rank 0 is not one of 3 classes, 0 to 2, nor ignore_index=-100",
    ),
    "shard: targets that are fractions": (
        lambda: ts.nn.functional.parallel_cross_entropy(ROWS, torch.ones(4)),
        "targets are classes, as integers; got torch.float32 of shape (4,)",
    ),
    "shard: a token beyond the table": (
        lambda: ts.nn.ParallelEmbedding(10, 4)(torch.tensor([10])),
        "token 10 is not in the table: it has 10 rows, 0 to 9",
    ),
    "data: a table of commas": (
        lambda: tp_data.Stream("data.csv"),
        "or not, got 'data.csv'; read others with their own library, and give their rows as a list",
    ),
    "data: a folder": (
        lambda: tp_data.Stream("."),
        "'.' is a folder; give a pattern of its files: '*.jsonl'",
    ),
    "data: a loader": (
        lambda: tp_data.Stream(loader()),
        "a source has samples, and a DataLoader makes batches of them; give its dataset: loader.dataset",
    ),
    "data: a generator": (
        lambda: tp_data.Stream(row for row in ROWS),
        "got generator; for iterators give Iterables(factory, shards)",
    ),
    "data: a pattern of no file": (
        lambda: tp_data.Stream("no-*.jsonl"),
        "no file matches 'no-*.jsonl' (from ",
    ),
    "data: workers of DataLoader": (
        lambda: load(num_workers=2),
        "Loader() has no argument 'num_workers'; did you mean 'workers'?",
    ),
    "data: the shuffle of DataLoader": (
        lambda: load(shuffle=True),
        "Loader() has no argument 'shuffle', which belongs to Stream()",
    ),
    "data: the last batch of DataLoader": (
        lambda: load(drop_last=True),
        "no argument 'drop_last'; write Loader(stream, BatchSize(8, last='drop'))",
    ),
    "data: the collate function of DataLoader": (
        lambda: load(collate_fn=list),
        "no argument 'collate_fn'; write Loader(stream, BatchSize(8, collate=collate_fn))",
    ),
    "data: a path for the stream": (
        lambda: tp_data.Loader("lines.jsonl", 4),
        "a Loader needs a Stream, got str; write Loader(Stream(...), ...)",
    ),
    "data: weights as a list": (
        lambda: samples(mixture=[0.5, 0.5]),
        "mixture must be a dict of weights by the names of the sources, as {'a': 0.7, 'b': 0.3}",
    ),
    "data: weights of nothing": (lambda: samples(mixture={"a": 0}), "must add up to 1, and {'a': 0} to 0"),
    "data: a transform by name": (
        lambda: samples(transform="lower"),
        "transform must be a function of a sample, got str: 'lower'",
    ),
    "data: no temperature": (
        lambda: samples(temperature=0),
        "1 keeps the weights, above 1 they are more equal",
    ),
    "data: a seed for the shuffle": (
        lambda: samples(shuffle=42),
        "shuffle=42: give True, False or Shuffle(...)",
    ),
    "data: an epoch as text": (lambda: load().set_epoch("2"), "epoch must be a whole number from 0, got '2'"),
    "data: files by number": (
        lambda: tp_data.TextLines(3),
        "files are a path or a list of paths, got int: 3",
    ),
    "data: a list for a factory": (
        lambda: tp_data.Iterables([1, 2], 1),
        "takes a function that returns the samples of a shard, got list; write Iterables(lambda shard: ...",
    ),
    "data: tokens in thousands": (
        lambda: tp_data.TokenBudget("8k"),
        "tokens='8k': give a whole number above 0",
    ),
    "data: another way to pack": (
        lambda: tp_data.Packed(8, how="greedy"),
        "how='greedy': take one of 'best-fit', 'concat'",
    ),
    "data: another name of tokens": (
        lambda: next(iter(tp_data.Loader(tp_data.Stream([{"ids": [1]}]), tp_data.TokenBudget(8)))),
        "but ['ids']; tokenize the samples first, or name the field: TokenBudget(length=...)",
    ),
    "data: errors ignored": (
        lambda: load(errors="ignore"),
        "a sample that cannot be loaded can 'raise' or be 's",
    ),
    "data: a state of others": (
        lambda: load().load_state_dict({"epoch": 3}),
        "this is no state of tp_data's Loader: it lacks ['batch', 'order', 'position', 'sources']",
    ),
    "verify: a class for the builder": (
        lambda: verify(nn.Linear),
        "build is a function without arguments, and Linear() is missing a required argument: 'in_features'",
    ),
    "verify: a builder that returns nothing": (
        lambda: verify(lambda: None),
        "build has to return the plain model, a torch.nn.Module, and returned NoneType",
    ),
    "verify: an optimizer that is made": (
        lambda: verify(optimizer=torch.optim.SGD(layers().parameters(), lr=0.1)),
        "write optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "verify: an optimizer by name": (
        lambda: verify(optimizer="adam"),
        "got 'adam'; write optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "verify: ranks as text": (
        lambda: verify(ranks="2"),
        "ranks must be a number of processes, or a pool of them, got '2'",
    ),
    "verify: a batch of one row": (
        lambda: verify(batches=(DATA[:1],)),
        "a batch has 1 rows, and 2 ranks with 1 micro-batches need 2: give larger batches, or fewer ranks",
    ),
    "verify: clipping below 0": (
        lambda: verify(max_norm=-1),
        "max_norm is a number above 0, or None for no clipping, got -1",
    ),
    "verify: an option of others": (
        lambda: verify(nprocs=2),
        "verify() has no argument 'nprocs'; it has: build",
    ),
    "tuple: the batch for the function": (
        lambda: tp_tuple.tp_collate(2)([1, 2, 3]),
        "tp_collate(2) makes one of yours: write collate_fn=tp_collate(2)(collate_fn), or default_collate(2)",
    ),
    "tuple: the function for the devices": (
        lambda: tp_tuple.tp_collate(list),
        "ndevices must be a number or a list of devices, got <class 'list'>",
    ),
    "tuple: no device": (lambda: tp_tuple.tp_collate(0), "ndevices must be at least 1, got 0"),
    "tuple: a number for the cost": (
        lambda: tp_tuple.tp_collate(2, cost=3),
        "cost must be a function of an item, which returns its work as a number, got 3",
    ),
    "tuple: weights by a name": (
        lambda: tp_tuple.tp_collate(2, weights="speed"),
        "weights must be numbers, 'memory', 'auto' or a Speeds, got 'speed'",
    ),
    "tuple: devices by another name": (
        lambda: tp_tuple.TupleParallel(model(), devices=TWO),
        "does not have the option devices=['cpu', 'cpu'] (unknown; did you mean 'device_ids'?)",
    ),
    "tuple: a reduction by name": (
        lambda: tp_tuple.TupleParallel(model(), TWO, reduction="mean"),
        "reduction must be a function of the outputs, got 'mean'; give options by name",
    ),
    "tuple: another order": (
        lambda: tp_tuple.restore_order(torch.ones(3), [0, 1]),
        "the order is one of 2 rows, and there are 3",
    ),
    "dp-gather: gathering by another name": (
        lambda: tp_dp_gather.DataParallel(model(), TWO, gather=False),
        "(pass gather_to_one_device=..., which says whether outputs meet on one device)",
    ),
    "dp-gather: a dimension by name": (
        lambda: tp_dp_gather.DataParallel(model(), TWO, dim="batch"),
        "dim must be at least 0, got 'batch'; it is the dimension of the rows",
    ),
    "dp-gather: rows that are not in parts": (
        lambda: tp_dp_gather.DataParallel(model(), TWO, inputs_are_scattered=True)(ROWS),
        "must be a tuple or list with one part per device, got a tensor of shape (4, 3)",
    ),
    "dp-gather: a loss of whole outputs": (
        lambda: tp_dp_gather.DataParallel(model(), TWO).apply_loss(nn.MSELoss(), ROWS, ROWS),
        "make them with gather_to_one_device=False or except_keywords",
    ),
    "runner: a time by a short name": (
        lambda: run(abs, [1], timeout=3),
        "unknown option 'timeout' of engine 'inline'; did you mean 'timeout_s'?",
    ),
    "runner: another number of tries": (
        lambda: run(abs, [1], retries=3),
        "unknown option 'retries' of engine 'inline'; did you mean 'max_retries'?",
    ),
    "runner: a bar of others": (
        lambda: run(abs, [1], progress="tqdm"),
        "progress must be True, False or 'auto' (on a terminal or in a notebook), got 'tqdm'",
    ),
    "runner: a seed as text": (
        lambda: run(abs, [1], seed="1"),
        "seed must be a whole number of at least 0, got '1'",
    ),
    "runner: a stage that is no function": (
        lambda: tp_runner.Pipeline(engine="inline").map(3),
        "a stage takes a function of an item, got int: 3",
    ),
    "runner: a truth as text": (
        lambda: run(abs, [1], ordered="no"),
        "ordered must be True or False, got 'no'",
    ),
    "runner: stages in no order": (
        lambda: tp_runner.Pipeline(engine="inline", ordered="no"),
        "ordered must be True or False, got 'no'",
    ),
    "runner: a timeline as text": (
        lambda: run(abs, [1], timeline="yes"),
        "timeline must be True or False, got 'yes'",
    ),
    "runner: a result by its number": (
        lambda: tp_runner.map(abs, [1], engine="inline")[0],
        "a stream has results one by one, and none at [0]; write list(stream)[0]",
    ),
    "runner: a plain loop over an asynchronous stream": (
        lambda: list(in_runner(lambda runner: runner.astream([1]))),
        "async for result in stream; for a plain loop take runner.stream(items)",
    ),
    "runner: an asynchronous loop over a plain stream": (
        lambda: asyncio.run(gathered(tp_runner.map(abs, [1], engine="inline"))),
        "for result in stream; for async for take runner.astream(items)",
    ),
    "runner: no work": (
        lambda: in_runner(lambda runner: runner([1])),
        "OrderedRunner does nothing with items and their results; write a class of it with producer_work",
    ),
    "runner: work with a typo": (
        lambda: runner_with(producer_wrok=staticmethod(lambda device, cfg, data: data)),
        "a runner never calls 'producer_wrok', a method of Mine; did you mean 'producer_work'?",
    ),
    "runner: work as a method": (
        lambda: runner_with(producer_work=lambda self, device, data: data),
        "does not take what a runner gives it; write @staticmethod, and def producer_work(device, cfg, data)",
    ),
    "runner: work without a configuration": (
        lambda: runner_with(producer_work=staticmethod(lambda device, data: data)),
        "Mine.producer_work(device, data) does not take what a runner gives it; write @staticmethod",
    ),
    "runner: a stream without its runner": (
        lambda: list(tp_runner.OrderedRunner(1, engine="inline").stream([1])),
        "this runner is closed; keep it in a variable as long as its streams are read",
    ),
    "tuple: a text for the parts": (
        lambda: tp_tuple.cat("ab"),
        "cat() takes a tuple or list with the tensor of each part, or one such tuple for each value, got str",
    ),
    "tuple: no parts": (lambda: tp_tuple.cat(()), "or one such tuple for each value, got tuple: ()"),
    "tuple: one tensor for the parts": (
        lambda: tp_tuple.cat(ROWS),
        "with the tensor of each part, or one such tuple for each value, got Tensor",
    ),
    "tuple: a number for the function of parts": (
        lambda: tp_tuple.tuple_fn(3),
        "tuple_fn() takes a function of one part, got int: 3",
    ),
    "tuple: an adapter by number": (
        lambda: tp_tuple.TupleOptions(adapter=3),
        "TupleOptions(adapter=...) must be a name, such as 'auto', got 3",
    ),
    "tuple: a cost by number": (
        lambda: tp_tuple.TupleOptions(cost=3),
        "the option cost must be a function of an item, got 3",
    ),
    "tuple: an unknown argument": (
        lambda: tp_tuple.tp_collate(2, weight=[1, 1]),
        "tp_collate() has no argument 'weight'; did you mean 'weights'?",
    ),
    "dp-gather: a truth as text": (
        lambda: tp_dp_gather.DataParallel(model(), TWO, sort_and_gather="no"),
        "sort_and_gather must be True or False, got 'no'; give options by name",
    ),
    "dp-gather: names as a number": (
        lambda: tp_dp_gather.GatherOptions(samples=3),
        "samples must be a list of names, got 3",
    ),
    "context: an attention of a vector": (
        lambda: attend(query=torch.ones(4)),
        "attention's query must be (..., heads, tokens, features), got shape (4,)",
    ),
    "context: other features": (
        lambda: attend(key=torch.ones(1, 2, 5, 3)),
        "query and key must have as many features, their last dimension, got query (1, 2, 5, 4)",
    ),
    "context: values of other tokens": (
        lambda: attend(value=torch.ones(1, 2, 6, 4)),
        "key and value must have as many tokens, their dimension -2, got query (1, 2, 5, 4)",
    ),
    "context: fewer heads of keys": (
        lambda: attend(query=torch.ones(1, 4, 5, 4)),
        "where several heads of query share one of key, write enable_gqa=True",
    ),
    "context: heads that are no multiple": (
        lambda: attend(query=torch.ones(1, 3, 5, 4), enable_gqa=True),
        "with enable_gqa=True the heads of query must be a multiple of those of key",
    ),
    "context: other types": (
        lambda: attend(key=torch.ones(1, 2, 5, 4).double()),
        "must have one dtype, got query torch.float32, key torch.float64, value torch.float32; write key.to",
    ),
    "context: other devices": (
        lambda: attend(key=torch.ones(1, 2, 5, 4, device="meta")),
        "must have one device, got query cpu, key meta, value cpu; write key.to(query.device)",
    ),
    "context: whole numbers": (
        lambda: tp_context.attention(*torch.ones(3, 1, 2, 5, 4).long()),
        "attention needs floating-point tensors, got torch.int64; write query.float()",
    ),
    "context: no keys": (
        lambda: attend(key=None),
        "attention's key must be a tensor (..., heads, tokens, features), got None",
    ),
    "context: a mask of another shape": (
        lambda: attend(attn_mask=torch.ones(3, 3).bool()),
        "attn_mask must fit the scores, (..., queries, keys) = (1, 2, 5, 5), got shape (3, 3)",
    ),
    "context: a mask of numbers": (
        lambda: attend(attn_mask=torch.ones(5, 5).long()),
        "attn_mask must be boolean, or floating-point and added, got torch.int64; write mask.bool()",
    ),
    "context: a mask as a list": (
        lambda: attend(attn_mask=[[True]]),
        "attention's attn_mask must be a tensor, got list; write torch.tensor(mask)",
    ),
    "context: dropout as text": (
        lambda: attend(dropout_p="0.1"),
        "attention's dropout_p must be a probability from 0 to 1, got '0.1'",
    ),
    "context: a truth as text": (
        lambda: attend(is_causal="no"),
        "attention's is_causal must be True or False, got 'no'",
    ),
    "context: positions of nothing": (
        tp_context.positions,
        "missing a required argument: 'tokens'; write positions(tokens.size(1))",
    ),
    "pipeline: cuts as a number": (
        lambda: tp_pipeline.PipelineOptions(cuts=3),
        "PipelineOptions(cuts=...) must be a list of the names of modules, got 3",
    ),
    "shard: a plan by the name of a family": (
        lambda: ts.plans.llama(model()),
        "has no attribute 'llama'; a plan is made from the model: write plans.auto(model, batch)",
    ),
    "shard: a truth as text": (
        lambda: ts.Column(gather_output="no"),
        "Column(gather_output=...) must be True or False, got 'no'",
    ),
    "shard: a style with a typo": (
        lambda: ts.Vocab(gather=True),
        "Vocab() has no argument 'gather'; did you mean 'gather_output'?",
    ),
    "shard: a size as text": (
        lambda: ts.nn.ParallelLinear("3", 4, dim=-1),
        "ParallelLinear(in_features=...) must be a number, got '3'",
    ),
    "shard: a number for the folder": (
        lambda: ts.save_sharded(layers(), 3),
        "save_sharded(path=...) must be a path, got int: 3",
    ),
    "shard: an option of load_state_dict": (
        lambda: ts.load_sharded(layers(), "nowhere", strict=False),
        "load_sharded() has no argument 'strict'",
    ),
    "verify: parts for whole batches": (
        lambda: verify(batches=[tp_tuple.default_collate(2)([DATA[0], DATA[1]])]),
        "a batch is in parts, one for each device, as tp_tuple's collate functions return them, and whole",
    ),
    "verify: a truth as text": (
        lambda: verify(vary="no"),
        "verify(vary=...) must be True or False, got 'no'",
    ),
    "verify: a type of whole numbers": (
        lambda: verify(dtype=torch.int64),
        "dtype is one of torch's, as torch.bfloat16, or None for the model's own, got torch.int64",
    ),
    "verify: a strategy with a typo": (
        lambda: verify(parallel=British()),
        "override it, or give a function in its place; it has parallelise(), which nobody calls",
    ),
    "verify: a strategy by another name": (
        lambda: tp_verify.strategies.FSDP,
        "has no attribute 'FSDP'; it has: DDP, Accelerate, DeepSpeed, FullyShard",
    ),
    "data: a loader's batch by number": (
        lambda: load()[0],
        "a Loader has batches one after the other, and none at [0]",
    ),
    "data: a loop over a stream": (
        lambda: list(samples()),
        "a Stream is read in batches: write for batch in Loader(stream, 32)",
    ),
    "data: a stream in torch's loader": (
        lambda: list(DataLoader(samples(), batch_size=2)),
        "write for batch in Loader(stream, 32), also in place of torch's DataLoader",
    ),
    "data: a transform that returns nothing": (
        lambda: list(tp_data.Loader(samples(transform=lambda sample: None), 4)),
        "the sample is None; let the transform, or the source, return a value",
    ),
    "data: a stream of a stream": (
        lambda: tp_data.Stream(samples()),
        "a source has samples, and a Stream is made of sources; give them in a dict, by name",
    ),
    "data: a truth as text": (
        lambda: samples(repeat="no"),
        "Stream(repeat=...) must be True or False, got 'no'",
    ),
    "data: pinned memory as text": (
        lambda: load(pin_memory="no"),
        "Loader(pin_memory=...) must be True or False, got 'no'",
    ),
    "data: a shuffle with a typo": (
        lambda: tp_data.Shuffle(buffers=3),
        "Shuffle() has no argument 'buffers'; did you mean 'buffer'?",
    ),
    "data: attempts as text": (
        lambda: tp_data.Access(attempts="3"),
        "Access(attempts=...) must be a number, got '3'",
    ),
    "data: columns by another name": (
        lambda: tp_data.Parquet("x.parquet", column=["a"]),
        "Parquet() has no argument 'column'; did you mean 'columns'?",
    ),
    "accelerate: steps as text": (
        lambda: accelerator(gradient_accumulation_steps="4"),
        "gradient_accumulation_steps must be a whole number from 1, got '4'",
    ),
    "accelerate: a truth as text": (
        lambda: accelerator(split_batches="no"),
        "Accelerator(split_batches=...) must be True or False, got 'no'",
    ),
    "accelerate: a logger with a typo": (
        lambda: accelerator(log_with="wandbb"),
        "log_with has 'wandbb', and tp has no logger of that name; did you mean 'wandb'?",
    ),
    "accelerate: numbers before the trackers": (
        lambda: accelerator(log_with="csv").log({"loss": 1.0}),
        "log() would write nothing; write accelerator.init_trackers(name) first",
    ),
    "accelerate: nothing to prepare": (
        lambda: accelerator().prepare(),
        "prepare() takes models, optimizers, loaders and schedulers, got nothing",
    ),
    "accelerate: a class to prepare": (
        lambda: accelerator().prepare(nn.Linear),
        "got the class Linear; make an object of it: Linear(...)",
    ),
    "accelerate: a text to prepare": (
        lambda: accelerator().prepare("model"),
        "and schedulers, got the text 'model'",
    ),
    "accelerate: backward before prepare": (
        lambda: accelerator().backward(step(model(), DATA[:])),
        "backward() comes before prepare(), and so no gradient would reach other processes; write",
    ),
    "accelerate: a model to clip": (
        lambda: accelerator().clip_grad_norm_(model(), 1.0),
        "got a model; write clip_grad_norm_(model.parameters(), 1.0)",
    ),
    "accelerate: a number for the folder": (
        lambda: accelerator().save_state(3),
        "save_state(output_dir) must be the path of a folder, got 3",
    ),
    "accelerate: a text to gather": (
        lambda: accelerator().gather("x"),
        "gather() takes tensors, alone or in containers, got str: 'x'; for others write gather_for_metrics",
    ),
    "accelerate: its launcher of notebooks": (
        lambda: tp_accelerate.notebook_launcher,
        "has no attribute 'notebook_launcher'; write from tp_launch import launch, and launch(function, 2)",
    ),
    "lightning: its module in tp": (
        lambda: tp_lightning.LightningModule,
        "has no attribute 'LightningModule'; write from lightning import LightningModule",
    ),
    "lightning: a class for the module": (
        lambda: lightning().fit(OwnSteps, loader()),
        "the first argument is a LightningModule, got type: OwnSteps; make an object of it: OwnSteps(...)",
    ),
    "lightning: a class for a callback": (
        lambda: lightning(callbacks=[callbacks.EarlyStopping]),
        "make one: EarlyStopping(...)",
    ),
    "lightning: a truth as text": (
        lambda: lightning().validate(OwnSteps(), loader(), verbose="no"),
        "validate(verbose=...) must be True or False, got 'no'",
    ),
    "a truth as text": (
        lambda: DdpOptions(find_unused_parameters="no"),
        "DdpOptions(find_unused_parameters=...) must be True or False, got 'no'",
    ),
    "a truth as text, where tensors are moved": (
        lambda: recursive_to(ROWS, "cpu", non_blocking="no"),
        "non_blocking must be True or False, got 'no'",
    ),
    "the least improvement as text": (
        lambda: callbacks.EarlyStopping(min_delta="0.1"),
        "EarlyStopping(min_delta=...) must be a number, got '0.1'",
    ),
    "launch: settings for the script": (
        lambda: requested(script=str(Path(__file__).parents[2] / "pyproject.toml")),
        "is no Python program, as its ending '.toml' says",
    ),
    "launch: a file for a module": (
        lambda: requested(script=__file__, module=True),
        "is a file, and -m takes the name of a module; leave -m out to run the file",
    ),
    "a loader for its function": (
        lambda: load_function(f"{__file__}:DATA"),
        "is a TensorDataset, and no function; write a function that returns it: def build(): return DATA",
    ),
    "runner: settings in a list": (
        lambda: tp_runner.OrderedRunner(cfg=[1], engine="inline"),
        "cfg must be a mapping, a namespace, a dataclass or None, got list: [1]; wrap it: cfg={'value': ...}",
    ),
}


class Samples(torch.utils.data.Dataset):
    """A dataset of which each sample is the same value."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.sample


def batches(sample, collate=None):
    return DataLoader(Samples(sample), batch_size=4, collate_fn=collate)


def classify(net, batch):
    return nn.functional.cross_entropy(net(batch[0]).expand(-1, 2), batch[1])


def move(net, batch):
    return step(net, [part.cuda() for part in batch])


class Ragged(Samples):
    """A dataset of which each sample has another length."""

    def __getitem__(self, index):
        return torch.ones(index + 1, 3), torch.ones(1)


class Fewer(Samples):
    """A dataset that says that it has 8 samples, and has 6."""

    def __getitem__(self, index):
        return DATA[:6][0][index], DATA[:6][1][index]


def tokens():
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(4, 1))


def normed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def first(net, batch):
    return net(batch).mean()


def binary(net, batch):
    return nn.functional.binary_cross_entropy(net(batch[0]).abs() + 2, batch[1])


# Each: the call, and words of the note that an error of torch or Python then has.
EXPLAINED = {
    "values of several lengths": (
        lambda: tp_tuple.tuplewise([(1, 2), (1,)])[1],
        "tuplewise() asks each of its 2 items for [1], and number 1, a tuple of 1, has none; give items that",
    ),
    "a batch for the list of them": (
        lambda: verify(batches=[((ROWS, ROWS), ROWS)]),
        "batches is a list of whole ones, as batches=[(inputs, targets)]",
    ),
    "arrays of numpy": (
        lambda: fit(step=step, train_loader=batches((ROWS[0], 1.0), numpy_of)),
        "the batch has numpy arrays, as the loader's collate_fn returned them; return tensors there",
    ),
    "None in a sample": (
        lambda: fit(step=step, train_loader=batches((ROWS[0], None))),
        "a sample of the dataset is None, or holds it; return a value in its place",
    ),
    "None for a batch": (
        lambda: fit(step=step, train_loader=batches(1.0, lambda rows: None)),
        "the loader yielded None for a batch; look at what its collate_fn returns",
    ),
    "numbers of numpy": (
        lambda: fit(step=step, train_loader=batches((ROWS[0].double(), torch.ones(1)))),
        "in float64, as arrays of numpy are, and the other one is not; write inputs.float()",
    ),
    "rows of another size": (
        lambda: fit(step=step, train_loader=batches((torch.ones(4), torch.ones(1)))),
        "a row has another size than the in_features of a Linear",
    ),
    "a class that is not there": (
        lambda: fit(step=classify, train_loader=batches((ROWS[0], 7))),
        "classes count from 0, and the last layer has one output for each",
    ),
    "a class in a row of its own": (
        lambda: fit(step=classify, train_loader=batches((ROWS[0], torch.tensor([1])))),
        "cross_entropy takes one class for each row, of shape (rows,); write targets.squeeze(1)",
    ),
    "a token that is not there": (
        lambda: fit(model=tokens(), step=first, train_loader=batches(torch.tensor([99]))),
        "an index is beyond the rows of an Embedding; compare tokens.max() with its num_embeddings",
    ),
    "tokens that are fractions": (
        lambda: fit(model=tokens(), step=first, train_loader=batches(torch.tensor([0.5]))),
        "an Embedding takes whole numbers, of dtype torch.int64; write tokens.long()",
    ),
    "scores for probabilities": (
        lambda: fit(step=binary, train_loader=batches((ROWS[0] * 1e6, torch.ones(1)))),
        "takes probabilities; write binary_cross_entropy_with_logits(scores, targets)",
    ),
    "samples of several sizes": (
        lambda: fit(step=step, train_loader=DataLoader(Ragged(0), batch_size=4)),
        "the samples of a batch have different shapes; pad them in a collate_fn",
    ),
    "a model in float16": (
        lambda: fit(model=model().half(), step=step),
        "leave .half() out, and write Trainer(precision='fp16-mixed')",
    ),
    "a model without values": (
        lambda: fit(model=nn.Linear(3, 1, device="meta"), step=step),
        "the model is on the meta device, and has no values yet; write trainer.build(lambda: Model(config))",
    ),
    "fewer samples than the dataset says": (
        lambda: fit(step=step, train_loader=DataLoader(Fewer(0), batch_size=4)),
        "the dataset's __getitem__ raised it for an index below its __len__; return the number of",
    ),
    "a batch norm of one row": (
        lambda: fit(model=normed(), step=step, train_loader=DataLoader(DATA, batch_size=1)),
        "a batch norm needs more than one row; give the DataLoader drop_last=True",
    ),
    "a batch that was not taken apart": (
        lambda: fit(step=lambda net, batch: net(batch).mean()),
        "take it apart first: inputs, targets = batch",
    ),
    "targets that are no classes": (
        lambda: fit(step=classify, train_loader=batches((ROWS[0], torch.tensor(1.0)))),
        "are their numbers, of dtype torch.int64; write targets.long(), or take a loss for numbers",
    ),
}
if not torch.cuda.is_available():
    EXPLAINED["a batch that is moved"] = (
        lambda: fit(step=move),
        "here is no GPU, and a batch comes to the step on the model's device; leave .cuda() out",
    )


def numpy_of(rows):
    return [torch.stack([row for row, _ in rows]).numpy(), torch.ones(len(rows), 1)]


for _name, _answer in ARGUMENTS.items():
    MISTAKES[f"Trainer({_name}=)"] = (
        lambda name=_name: Trainer(**{name: 1}),
        f"Trainer() has no argument {_name!r}; write {_answer}",
    )
for _name, _answer in ATTRIBUTES.items():
    MISTAKES[f"trainer.{_name}"] = (
        lambda name=_name: getattr(trainer(), name),
        f"a Trainer has no {_name!r}; write {_answer}",
    )
