"""Buffers of the other replicas are those of the module, whoever changed them in whatever way."""

import copy

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas

COPIES = pytest.mark.parametrize("force_copies", [False, True, "flat"], ids=["shared", "copied", "flat"])


def call(replica, part):
    return replica(part)


class Codebook(nn.Module):
    """Learns a buffer through ``.data``, in training, as vector quantizers do."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("codes", torch.zeros(size))

    def forward(self, x):
        if self.training:
            self.codes.data.add_(x.mean())
        return x + self.codes[:3]


class NoCount(nn.Module):
    """Normalizes with a native kernel and counts nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


class Outside(nn.BatchNorm1d):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training)


LAYERS = {
    "batch norm": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "batch norm without affine": (lambda: nn.BatchNorm1d(3, affine=False, momentum=None), (4, 3)),
    "large batch norm": (lambda: nn.BatchNorm1d(70_000), (2, 70_000)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (4, 3, 5)),
    "a subclass": (lambda: Outside(3), (4, 3)),
    "a layer that counts nothing": (NoCount, (4, 3)),
    "a codebook": (lambda: Codebook(5), (4, 3)),
    "a large codebook": (lambda: Codebook(70_000), (4, 3)),
}
SMALL = [name for name in LAYERS if not name.startswith("a large")]


@pytest.fixture
def make(request):
    def build(name):
        torch.manual_seed(0)
        layer, shape = LAYERS[name]
        return layer(), torch.randn(shape) * 3 + 1

    return build


def check(replicas, x):
    plain = copy.deepcopy(replicas.module)
    outputs = replicas.run(call, [x, x, x])
    if not replicas.module.training:
        for output in outputs:
            torch.testing.assert_close(output, plain(x))


@COPIES
@pytest.mark.parametrize("name", LAYERS)
def test_training_through_the_replicas_is_seen_in_evaluation(make, name, force_copies):
    model, x = make(name)
    replicas = Replicas(model, ["cpu"] * 3, force_copies=force_copies)
    for _ in range(2):
        model.train()
        for _ in range(2):
            check(replicas, x)
        model.eval()
        for _ in range(2):
            check(replicas, x)


@COPIES
@pytest.mark.parametrize("name", SMALL)
def test_training_the_module_by_itself_is_seen_in_evaluation(make, name, force_copies):
    model, x = make(name)
    replicas = Replicas(model.eval(), ["cpu"] * 3, force_copies=force_copies)
    for _ in range(2):
        check(replicas, x)
        model.train()
        model(x)
        model.eval()
    check(replicas, x)


@COPIES
@pytest.mark.parametrize("name", LAYERS)
def test_one_part_that_was_trained_on_is_seen_in_evaluation(make, name, force_copies):
    model, x = make(name)
    replicas = Replicas(model.eval(), ["cpu"] * 3, force_copies=force_copies)
    check(replicas, x)
    model.train()
    replicas.run(call, [x])
    model.eval()
    check(replicas, x)


@COPIES
def test_one_layer_in_training_mode_is_enough(force_copies):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).eval()
    model[1].train()
    replicas = Replicas(model, ["cpu"] * 2, force_copies=force_copies)
    x = torch.randn(4, 3) + 2
    replicas.run(call, [x, x])
    model.eval()
    torch.testing.assert_close(replicas.run(call, [x, x])[1], model(x))


def test_buffers_in_evaluation_are_copied_once(monkeypatch):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    replicas = Replicas(model, ["cpu"] * 3)
    x = torch.randn(4, 3)
    seen = [replicas.run(lambda r, _: [b.data_ptr() for b in r.buffers()], [x] * 3) for _ in range(3)]
    assert seen[1] == seen[2]
    assert not set(seen[2][0]) & set(seen[2][1])


def test_a_large_table_that_is_saved_is_copied_once_in_evaluation():
    model = nn.Linear(3, 3).eval()
    model.register_buffer("table", torch.zeros(300, 300))
    replicas = Replicas(model, ["cpu"] * 2)
    seen = [replicas.run(lambda r, _: r.table.data_ptr(), [0, 1]) for _ in range(3)]
    assert seen[1] == seen[2]


@COPIES
def test_a_buffer_that_is_replaced_or_registered_later_is_followed(force_copies):
    model = nn.Module()
    model.register_buffer("x", torch.zeros(2))
    replicas = Replicas(model.eval(), ["cpu"] * 2, force_copies=force_copies)
    names = lambda r, _: {n: b.sum().item() for n, b in r.named_buffers()}  # noqa: E731 - short
    assert replicas.run(names, [0, 1])[1] == {"x": 0.0}
    model.x = torch.ones(2)
    model.register_buffer("y", torch.full((3,), 2.0))
    assert replicas.run(names, [0, 1])[1] == {"x": 2.0, "y": 6.0}
    del model.x
    assert replicas.run(names, [0, 1])[1] == {"y": 6.0}


def test_a_buffer_that_a_replica_replaces_is_put_right():
    model = nn.BatchNorm1d(3).eval()
    replicas = Replicas(model, ["cpu"] * 2)

    def replace(replica, part):
        if part:
            replica.running_mean = torch.full((3,), 9.0)

    replicas.run(replace, [0, 1])
    assert replicas.run(lambda r, _: r.running_mean.sum().item(), [0, 1]) == [0.0, 0.0]


def test_buffers_made_in_inference_mode_are_copied_each_time():
    with torch.inference_mode():
        model = nn.Module()
        model.register_buffer("x", torch.zeros(2), persistent=False)
        replicas = Replicas(model.eval(), ["cpu"] * 2)
        replicas.run(lambda r, _: None, [0, 1])
        model.x.add_(1)
        assert replicas.run(lambda r, _: r.x.sum().item(), [0, 1]) == [2.0, 2.0]


@COPIES
@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_are_written_through_data_are_copied_alone(force_copies, training):
    model = nn.Sequential(nn.BatchNorm1d(3).eval(), nn.Linear(3, 3))
    model[1].train(training)
    model[1].register_buffer("table", torch.zeros(300, 300), persistent=False)
    model[1].register_buffer("saved", torch.zeros(300, 300))
    replicas = Replicas(model, ["cpu"] * 2, force_copies=force_copies)

    def look(replica, _):
        return [(b.data_ptr(), b.double().sum().item()) for b in (replica[0].running_mean, replica[1].table)]

    replicas.run(look, [0, 1])
    before = replicas.run(look, [0, 1])[1]
    model[0].running_mean.data.add_(1)
    mean, table = replicas.run(look, [0, 1])[1]
    assert mean[1] == 3.0
    assert table == before[1]
    model[1].table.data[7].add_(1)
    now = replicas.run(look, [0, 1])[1]
    assert (now[0], now[1][1]) == (mean, 300.0)


class Queue(nn.Module):
    """Puts its newest rows into a buffer, in place or as a new tensor."""

    def __init__(self, how, dtype=torch.float32):
        super().__init__()
        self.how = how
        self.register_buffer("rows", torch.zeros(4, dtype=dtype))

    def forward(self, x):
        if self.how == "in place":
            self.rows[:1] = x.sum().to(self.rows.dtype)
        if self.how == "replaced":
            self.rows = torch.cat([self.rows[1:], x.sum()[None].to(self.rows.dtype)])
        return x * self.rows.sum()


def lines(layer, caplog, calls=3):
    caplog.clear()
    replicas = Replicas(layer, ["cpu"] * 2)
    for _ in range(calls):
        replicas.run(call, [torch.ones(1), torch.ones(1) * 2])
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_buffer_that_each_replica_writes_is_named_once(how, caplog):
    (line,) = lines(Queue(how), caplog)
    assert line.startswith("forward writes the buffer 'rows' (Queue) on each device")


def test_counters_and_norms_are_not_named(caplog):
    assert lines(Queue("nothing"), caplog) == []
    assert lines(Queue("in place", torch.long), caplog) == []  # as a counter
    replicas = Replicas(nn.BatchNorm1d(3), ["cpu"] * 2)
    for _ in range(3):
        replicas.run(call, [torch.randn(4, 3)] * 2)
    assert not caplog.records
