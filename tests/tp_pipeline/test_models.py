"""Models as people write them, in stages: equal to one device, or refused in a sentence with a remedy."""

import copy
import logging
import warnings
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import ModelError, StepError, TpError
from tp_pipeline import PipelineOptions
from tp_trainer import Callback, Trainer

SCHEDULES = [name for name in get_args(get_type_hints(PipelineOptions)["schedule"]) if name != "auto"]
ROWS = 16


class Layers(nn.Module):
    """Equal layers one after the other, each called with what ``arguments`` returns for its number."""

    def __init__(self, layer, count=4, arguments=lambda number: {}):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.arguments = arguments

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x, **self.arguments(number))
        return x


class Named(nn.Linear):
    """Has arguments with the names of a wrapper's own."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, name="", forward=None, self_=None):
        return x + super().forward(x) * (2.0 if name == "b1" else 1.0)


class Converting(nn.Module):
    """Converts its router in forward, as mixtures of experts do."""

    def __init__(self, to=torch.float64):
        super().__init__()
        self.router, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)
        self.to_dtype = to

    def forward(self, x):
        self.router = self.router.to(self.to_dtype)
        weights = self.router(x.to(self.to_dtype)).softmax(-1)
        return x + self.linear(x) * weights.to(x.dtype)


class Mixer(nn.Linear):
    """A part of a block."""

    def __init__(self):
        super().__init__(4, 4)


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Mixer()

    def forward(self, x):
        return x + self.mixer(x)


class Mixing(Layers):
    """Names its blocks and parts of them, as FalconMamba does."""

    _no_split_modules = ("MixerBlock", "Mixer")


TABLES = ["table", "table of shapes", "table as it was"]
UNSAVED = ["unsaved", "unsaved, of the batch alone", "unsaved, counted"]


class Statistics(nn.Linear):
    """Keeps numbers of its inputs in a buffer, which is written in one of several manners."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how
        self.register_buffer("mean", torch.zeros(4), persistent=how not in {*TABLES, *UNSAVED})

    def forward(self, x):
        if self.training and self.how == "in place":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        if self.training and self.how == "a view":
            self.mean[:2].copy_(x.detach().mean(0)[:2])
        if self.training and self.how == "data":
            self.mean.data.add_(x.detach().mean(0), alpha=0.1)
        if self.training and self.how in {"replaced", "unsaved"}:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        if self.training and self.how == "unsaved, of the batch alone":
            self.mean = x.detach().mean(0)
        if self.training and self.how == "unsaved, counted":
            self.mean = self.mean.clone() + 1
        if self.training and self.how == "counted":
            self.mean += 1
        if self.how == "table":  # follows from no input
            self.mean = torch.arange(4, dtype=x.dtype) / 4
        if self.how == "table of shapes":
            self.mean = torch.ones_like(x[0]).cumsum(0) / 4
        if self.how == "table as it was":
            self.mean = self.mean[:].to(x.dtype, copy=True)
        return x + super().forward(x - self.mean)


def train(build, backend="pipeline", options=None, *, dtype=torch.float64, step=None, data=None):
    """Return the losses of two epochs and the state of the model, or what it was refused with."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = build().to(dtype)
    rows = torch.randn(ROWS, 4).to(dtype) + 1 if data is None else data(dtype)
    settings = {"options": {backend: options or {}}, "devices": "cpu", "seed": 0, "progress": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Trainer(backend=backend, **settings) as trainer:
            history = trainer.fit(
                model,
                optimizer,
                DataLoader(rows, batch_size=8),
                step=step or mean_square,
                epochs=2,
                validation=DataLoader(rows, batch_size=8),
            )
            return [(r.train["loss"], r.val["loss"]) for r in history], trainer.session.model_state(model)
    except TpError as error:
        return str(error)


def mean_square(model, batch):
    return model(batch).square().mean()


def assert_like_one_device(pair, build, **arguments):
    expected, states = train(build, "single", **arguments)
    for losses, found in pair.run(partial(train, build, **arguments)):
        assert losses == [pytest.approx(pair_of, rel=1e-12) for pair_of in expected]
        for name, value in states.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def named():
    return Layers(Named, arguments=lambda number: {"name": f"b{number}", "forward": None, "self_": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        named,
        partial(Layers, Converting),  # to what it is already
        partial(Mixing, MixerBlock),
        *(partial(Layers, partial(Statistics, how)) for how in TABLES),
    ],
    ids=["arguments with our names", "conversions to the same dtype", "blocks within blocks", *TABLES],
)
def test_models_are_trained_as_on_one_device(pair, build):
    assert_like_one_device(pair, build)


def takes_out(model, batch):
    labels = batch.pop("labels")[:, None]
    return (model(batch["inputs"]) - labels).square().mean()


def relabels(model, batch):
    batch["labels"][batch["labels"] > 1] = 0.5
    batch["labels"] += 1
    return (model(batch["inputs"]) - batch["labels"][:, None]).square().mean()


class Scaling(nn.Linear):
    """Changes its input in place."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        x = x.mul_(0.5)
        return x + super().forward(x)


def labelled(dtype):
    inputs = torch.randn(ROWS, 4).to(dtype)
    return [{"inputs": row, "labels": row.sum()} for row in inputs]


def compares(model, batch):
    return (model(batch["inputs"]) - batch["labels"][:, None]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    ("layer", "step"),
    [(partial(nn.Linear, 4, 4), takes_out), (partial(nn.Linear, 4, 4), relabels), (Scaling, compares)],
    ids=["takes values out", "writes labels", "a block writes inputs"],
)
def test_a_step_that_changes_its_batch_is_as_on_one_device(pair, layer, step, schedule):
    build, options = partial(Layers, layer), {"schedule": schedule}
    expected, states = train(build, "single", step=step, data=labelled)
    for losses, found in pair.run(partial(train, build, options=options, step=step, data=labelled)):
        assert losses == [pytest.approx(of_epoch, rel=1e-12) for of_epoch in expected]
        for name, value in states.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "a view", "data", "replaced", "counted", *UNSAVED])
def test_statistics_in_buffers_are_refused(pair, how):
    for message in pair.run(partial(train, partial(Layers, partial(Statistics, how)))):
        assert "forward writes the buffer 'layers.0.mean' (Statistics)" in message
        assert "PipelineOptions(statistics='microbatch')" in message


class Normalized(nn.Linear):
    """Writes its weight in forward, in one of several manners."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how
        self.average = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            normal = F.normalize(self.weight, dim=1)
            if self.how == "in place":
                self.weight.copy_(normal)
            if self.how == "data":
                self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))
            if self.how == "a view":
                self.weight[0].clamp_(-1, 1)
            if self.how == "assigned":
                self.weight.data = normal
            if self.how == "replaced":
                self.weight = nn.Parameter(normal)
            if self.how == "average":
                self.average.lerp_(self.weight, 0.1)
            if self.how == "by numbers" and x.sum() > -1e9:
                self.weight.mul_(0.5)
            if self.how == "assigned by numbers" and x.sum() > -1e9:
                self.weight.data = normal
        return x + super().forward(x)


class MovesAnAverage(Layers):
    """Moves parameters between its blocks."""

    def forward(self, x):
        with torch.no_grad():
            first, second = self.layers[0], self.layers[1]
            first.average.mul_(0.9).add_(second.weight, alpha=0.1)
        return super().forward(x)


class AssignsAnAverage(Layers):
    def forward(self, x):
        first = self.layers[0]
        first.average.data = first.average.data * 0.9
        return super().forward(x)


def refused_writes():
    hows = ["in place", "data", "a view", "assigned", "replaced", "average", "by numbers"]
    builds = [partial(Layers, partial(Normalized, how)) for how in [*hows, "assigned by numbers"]]
    builds += [partial(kind, partial(Normalized, "")) for kind in (MovesAnAverage, AssignsAnAverage)]
    return [str(train(build)) for build in builds], train(partial(Layers, partial(Normalized, "")))[0]


@pytest.mark.slow
def test_parameters_that_forward_writes_are_refused(pair):
    for messages, losses in pair.run(refused_writes):
        names = ["weight"] * 5 + ["average", "weight", "weight", "average", "average"]
        for message, name in zip(messages, names, strict=True):
            assert message.startswith(
                f"forward, or the step, writes the parameter 'layers.0.{name}' (Normalized), and"
            )
            assert "in a callback's on_step_end" in message
        assert len(losses) == 2  # a model that writes none is trained


def other_losses():
    """Return what is said of a backward pass from another value than the step's loss."""

    def step(model, batch):
        output = model(batch)
        return {"loss": output.square().mean(), "other": output.abs().mean()}

    with Trainer(backend="pipeline", devices="cpu", seed=0, progress=False) as trainer:
        model, batches = trainer.prepare(
            Layers(partial(nn.Linear, 4, 4)), DataLoader(torch.ones(8, 4), batch_size=8)
        )
        for batch in batches:
            found = trainer.run(step, model, batch)
            with pytest.raises(StepError) as caught:
                trainer.backward(found["other"])
    return str(caught.value)


@pytest.mark.slow
def test_a_backward_pass_from_another_value_than_the_loss_is_refused(pair):
    for message in pair.run(other_losses):
        assert message.startswith("backward() was called with a value that has no gradient: on backend 'pip")
        assert "add the losses in the step" in message


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, track_running_stats=True)], ids=["batch", "instance"]
)
def test_so_are_norms_over_the_batch(pair, norm):
    def layer():
        return nn.Sequential(nn.Unflatten(1, (2, 2)), norm(2), nn.Flatten(), nn.Linear(4, 4))

    for message in pair.run(partial(train, partial(Layers, layer))):
        assert "PipelineOptions(statistics='microbatch')" in message


@pytest.mark.slow
@pytest.mark.parametrize("layer", [partial(Statistics, "in place"), partial(nn.BatchNorm1d, 4)])
def test_statistics_of_micro_batches_are_taken_if_asked_for(pair, layer):
    options = {"statistics": "microbatch", "microbatches": 1}  # one is the batch
    expected, states = train(partial(Layers, layer), "single")
    for losses, found in pair.run(partial(train, partial(Layers, layer), options=options)):
        assert losses == [pytest.approx(of_epoch, rel=1e-12) for of_epoch in expected]
        for name, value in states.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    of_four = pair.run(partial(train, partial(Layers, layer), options=options | {"microbatches": 4}))
    assert of_four[0][0] != expected


class Keeps(nn.Linear):
    """Keeps something as an attribute, in one of several manners."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how
        begins = {"tensor": torch.zeros(4, dtype=torch.float64), "count": 0, "list": [], "dict": {"calls": 0}}
        self.kept = begins.get(how)

    def forward(self, x):
        output = x + super().forward(x)
        if self.how == "hidden":
            output = output if self.kept is None else output + self.kept.mean(0)
            self.kept = output.detach()
        if self.how == "tensor":
            self.kept.add_(x.detach().mean(0))
        if self.how == "count":
            self.kept += 1
        if self.how == "list":
            self.kept.append(output.detach())
        if self.how == "dict":
            self.kept["calls"] += 1
        if self.how == "later":
            self.later = output.detach()
        if self.how == "table":  # follows from no weight
            self.kept = torch.arange(4, dtype=x.dtype) / 4
            self.length = x.shape[-1]
        return output


def lines_of_kept(how, options=None):
    """Return the lines on attributes of a run, and what the first layer has kept after its dry run."""
    lines, found = [], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())

    class Remembers(Layers):
        def forward(self, x):
            found.append(copy.deepcopy(getattr(self.layers[0], "kept", None)))
            return super().forward(x)

    logging.getLogger("tp_pipeline").addHandler(handler)
    try:
        train(partial(Remembers, partial(Keeps, how)), options=options)
    finally:
        logging.getLogger("tp_pipeline").removeHandler(handler)
    return [line for line in lines if line.startswith("forward sets the module attributes")], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hidden", "tensor", "count", "list", "dict", "later"])
def test_what_forward_keeps_on_modules_is_named_once_and_the_dry_run_leaves_no_trace(pair, how):
    name = "later" if how == "later" else "kept"
    begins = Keeps(how).kept
    for lines, kept in pair.run(lines_of_kept, how):
        assert len(lines) == 1
        assert f"attributes 'layers.0.{name}', 'layers.1.{name}'" in lines[0]
        assert str(kept) == str(begins)  # as the first micro-batch finds it


@pytest.mark.slow
def test_tables_and_what_is_accepted_are_not_named(pair):
    for arguments in (("table",), ("hidden", {"statistics": "microbatch"})):
        for lines, _ in pair.run(lines_of_kept, *arguments):
            assert lines == []


@pytest.mark.slow
def test_a_conversion_of_weights_in_forward_is_refused(pair):
    build = partial(Layers, partial(Converting, torch.float32))
    for message in pair.run(partial(train, build, dtype=torch.bfloat16)):
        assert "forward converts 'layers.0.router' (Linear)" in message


class Looped(nn.Module):
    """Runs its two blocks three times: with schedules in a V both ranks have all of their weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 30)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(3):
            for layer in self.layers:
                x = x + F.gelu(layer(x))
        return self.head(x)


def clipped(schedule, dtype):
    """Return the gradients after clipping of 20 steps, by name."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = Looped().to(dtype)
    tokens = torch.randint(0, 30, (80, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    steps = []

    def note(*_):
        steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.numel()})

    optimizer.register_step_pre_hook(note)

    def step(model, batch):
        return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    options = {"pipeline": {"schedule": schedule, "microbatches": 4}}
    with Trainer(backend="pipeline", devices="cpu", progress=False, seed=0, options=options) as trainer:
        trainer.fit(
            model, optimizer, DataLoader(list(tokens), batch_size=8), step=step, epochs=2, clip_norm=0.37
        )
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_of_a_weight_have_the_same_clipped_gradient_to_the_bit(pair, schedule):
    for dtype in (torch.float64, torch.bfloat16):
        first, second = pair.run(partial(clipped, schedule, dtype))
        assert len(first) == len(second) == 20
        for one, other in zip(first, second, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one.keys() & other.keys())


def planned(values):
    """Return how often the model ran without numbers over 12 batches with values beside tensors."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dry = []

    class Counted(nn.Linear):
        def forward(self, x):
            dry.extend([1] if torch._C._len_torch_dispatch_stack() else [])  # private: a run without numbers
            return super().forward(x)

    rows = [{"x": torch.randn(4), "value": values(i)} for i in range(24)]
    model = nn.Sequential(*(Counted(4, 4) for _ in range(4)))
    options = {"pipeline": {"microbatches": 2, "samples": "value"}}
    with Trainer(backend="pipeline", devices="cpu", progress=False, seed=0, options=options) as trainer:
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(rows, batch_size=2),
            step=lambda model, batch: model(batch["x"]).square().mean(),
            epochs=1,
        )
    return len(dry)


@pytest.mark.slow
def test_values_beside_tensors_make_no_plan_of_their_own_for_ever(pair):
    def names(number):
        return f"sample {number}"

    (with_names, _), (alone, _) = pair.run(partial(planned, names)), pair.run(partial(planned, bool))
    assert 0 < alone <= with_names <= 4 * alone


def turned_around(at):
    """Return the error of a run whose step calls the layers backwards from a value of its batches on."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "value": f"sample {i}"} for i in range(24)]
    model = Layers(partial(nn.Linear, 4, 4))

    def step(model, batch):
        x = batch["x"]
        turned = int(batch["value"][0].split()[1]) >= at
        for layer in reversed(model.layers) if turned else model.layers:
            x = layer(x)
        return x.square().mean()

    try:
        options = {"pipeline": {"samples": "value"}}
        with Trainer(backend="pipeline", devices="cpu", progress=False, seed=0, options=options) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer.fit(model, optimizer, DataLoader(rows, batch_size=2), step=step, epochs=1)
    except TpError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_later_value_that_leads_to_other_blocks_ends_the_run(pair):
    for message in pair.run(partial(turned_around, 12)):
        assert "the step calls 'layers.3' where it called 'layers.0'" in message


class ClampsLater(Callback):
    """Puts on a hook after the first step."""

    def on_step_end(self, run):
        if run.step == 1:
            next(run.model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def lines_on_hooks(microbatches):
    """Return the lines of a run on a hook that clamps a gradient."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_pipeline").addHandler(handler)
    options = PipelineOptions(microbatches=microbatches)
    try:
        with Trainer(backend="pipeline", devices="cpu", seed=0, progress=False, options=options) as trainer:
            model = Layers(partial(nn.Linear, 4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = DataLoader(torch.ones(16, 4), batch_size=8)
            trainer.fit(
                model,
                optimizer,
                batches,
                step=lambda m, b: m(b).square().mean(),
                epochs=1,
                callbacks=[ClampsLater()],
            )
    finally:
        logging.getLogger("tp_pipeline").removeHandler(handler)
    return [line.partition(":")[0] for line in lines if line.startswith("the hooks on")]


@pytest.mark.slow
def test_hooks_that_see_the_gradients_of_micro_batches_are_named_once(pair):
    (first,), others = pair.run(lines_on_hooks, 4)
    assert first.endswith("see those of each micro-batch, on backend 'pipeline'")
    assert others == []
    assert pair.run(lines_on_hooks, 1) == [[], []]


class CountsBetween(Layers):
    """Has a buffer of its own, which it writes after its blocks."""

    def __init__(self):
        super().__init__(partial(nn.Linear, 4, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        output = super().forward(x)
        self.calls += 1
        return output


def counted_between():
    """Return what is said of a model whose buffer the last stage alone would write."""
    options = PipelineOptions(statistics="microbatch")
    with Trainer(backend="pipeline", devices="cpu", seed=0, progress=False, options=options) as trainer:
        model = CountsBetween()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = DataLoader(torch.ones(16, 4), batch_size=8)
        with pytest.raises(ModelError) as caught:
            trainer.fit(model, optimizer, batches, step=lambda m, b: m(b).square().mean(), epochs=1)
    return str(caught.value)


@pytest.mark.slow
def test_a_buffer_that_is_written_between_blocks_is_refused(pair):
    for message in pair.run(counted_between):
        assert message.startswith("the model's forward writes the buffer 'calls' (CountsBetween) between its")
        assert "Put the buffer, and what writes it, into a module that forward calls" in message
