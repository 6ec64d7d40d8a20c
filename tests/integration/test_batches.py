"""A batch is what its samples are: on every backend it trains as on one device, or is refused in words."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from tp_core.errors import ConfigError, StepError
from tp_trainer import DdpOptions, Limits, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR tensor")

SAMPLES, BATCH = 14, 6  # batches of 6, 6 and 2: one that is as long as a pair


def sample(i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(3, generator=generator, dtype=torch.float64)
    sequence = torch.randn(i % 4 + 1, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "k": 1 + i / 4, "text": str(i), "sequence": sequence, "i": i}


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return sample(i)


class Stream(IterableDataset):
    def __iter__(self):
        return map(sample, range(SAMPLES))


@dataclass
class Derived:
    x: Tensor
    texts: list[str]
    rows: int = field(init=False)

    def __post_init__(self):
        self.rows = len(self.x)


@dataclass(frozen=True)
class Positions:
    x: Tensor
    first: InitVar[int]
    rows: int = field(init=False)

    def __post_init__(self, first):
        object.__setattr__(self, "rows", len(self.x) + first)


class Pair(NamedTuple):
    x: Tensor
    texts: list[str]


class Opaque:
    """A batch of a class that nobody knows: its tensors are attributes."""

    def __init__(self, x):
        self.x = x


class Model(nn.Module):
    """Computes a number for each sample; what it gets of a sample besides is as many numbers."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1, dtype=torch.float64)
        self.rnn = nn.GRU(3, 2, dtype=torch.float64)

    def forward(self, x, *more, how=None, **named):
        values = self.line(x)[:, 0]
        return values if how is None else HOW[how](self, values, *more, **named)

    def each(self, rows):
        return torch.stack([self.line(row).sum() for row in rows])


class Sequences(Model):
    """Takes sequences alone."""

    def forward(self, rows, *_):
        return self.each(rows)


class Packed(Model):
    def forward(self, packed, *_):
        return self.rnn(packed)[0]


def zipped(_, values, texts):
    return torch.stack([v * float(t) for v, t in zip(values, texts, strict=True)])


def multiplied(_, values, factors):
    return values * torch.as_tensor(factors)


HOW = {
    "texts": zipped,
    "factors": multiplied,
    "sequences": lambda m, v, rows: v + m.each(rows),
    "objects": lambda m, v, objects: torch.stack([a + o["k"] for a, o in zip(v, objects, strict=True)]),
    "pairs": lambda m, v, pairs: v + sum(m.line(p)[:, 0] for p in pairs),
    "two": lambda m, v, two: v * two[0] + two[1],
    "dense": lambda m, v, other: v + m.line(other.to_dense())[:, 0],
    "nested": lambda m, v, other: v + torch.stack([m.line(o).sum() for o in other.unbind()]),
    "derived": lambda m, v, batch: zipped(m, v, batch.texts) * (batch.rows == len(batch.x)),
    "positions": lambda m, v, batch: v + batch.rows,
    "named": lambda m, v, pair: zipped(m, v, pair.texts),
    "deep": lambda m, v, deep: zipped(m, v, deep["a"]["texts"]) + deep["b"][0][:, 0],
    "packed": lambda m, v, packed: v + torch.stack([s.sum() for s in unpack_sequence(packed)]),
    "opaque": lambda m, v, batch: v + m.line(batch.x)[:, 0],
    "time first": lambda m, v, x: v[None].expand(5, -1) + 0,
    "states": lambda m, v: (v, m.rnn(v[None, :, None].expand(4, -1, 3))[1]),
    "texts out": lambda m, v: {"v": v, "texts": [f"{i:.6f}" for i in v.tolist()]},
    "rows out": lambda m, v: [{"v": row} for row in v[:, None]],
    "array out": lambda m, v: (v, v.detach().numpy()),
    "packed out": lambda m, v, packed: m.rnn(packed)[0],
    "set": lambda m, v, names: v + len(names),
}


def of(name, convert: Callable[[list], Any] = list):
    return lambda items: convert([item[name] for item in items])


def collated(**makes):
    def collate(items):
        x = torch.stack([item["x"] for item in items])
        return {"x": x} | {name: make(items) for name, make in makes.items()}

    return collate


def calls(how, *names, out=lambda output: output, model=Model):
    def step(model, batch):
        output = out(model(batch["x"], *(batch[name] for name in names), how=how))
        return output.square().mean()

    step.model = model
    return step


def sequences(convert):
    return of("sequence", convert)


def packed(sort):
    return lambda rows: pack_sequence(
        sorted(rows, key=len, reverse=True) if sort else rows, enforce_sorted=sort
    )


def whole(step, model=Model):
    step.model = model
    return step


def squared(output):
    return output.square().mean()


class Case(NamedTuple):
    """A kind of batch: what collates it, the step, and the errors of ``dp-gather`` and ``tuple``, if any.

    Attributes:
        options: What the options of ``dp-gather`` say of the values that are not tensors.
    """

    collate: Any
    step: Any
    gather: str | None = None
    parts: str | None = None
    options: dict[str, tuple[str | int, ...]] = {}


UNTOLD = "so that it may have an entry for each row|same number of rows"
SECOND = {"samples": (1,)}
ROWS = {"samples": ("rows",)}
TEXTS = {"samples": ("texts",)}
CASES = {
    "texts": Case(collated(t=of("text")), calls("texts", "t"), options=SECOND),
    "texts in a tuple": Case(collated(t=of("text", tuple)), calls("texts", "t"), options=SECOND),
    "texts of torch's collate": Case(
        lambda items: default_collate([{"x": i["x"], "t": i["text"]} for i in items]),
        calls("texts", "t"),
        options=SECOND,
    ),
    "pairs of torch's collate": Case(
        lambda items: default_collate([(i["x"], i["text"]) for i in items]),
        whole(lambda m, b: squared(m(b[0], b[1], how="texts"))),
        options=SECOND,
    ),
    "texts by name": Case(
        collated(texts=of("text")),
        whole(lambda m, b: squared(m(b["x"], how="texts", texts=b["texts"]))),
        options=TEXTS,
    ),
    "arrays": Case(collated(k=of("k", np.array)), calls("factors", "k")),
    "arrays made by the step": Case(
        collated(k=of("k", np.array)), whole(lambda m, b: squared(m(b["x"], b["k"] * 2, how="factors")))
    ),
    "numbers in a list": Case(collated(k=of("k")), calls("factors", "k"), options=SECOND),
    "numbers in a tensor": Case(collated(k=of("k", torch.tensor)), calls("factors", "k")),
    "sequences in a list": Case(collated(s=of("sequence")), calls("sequences", "s"), options=SECOND),
    "equal sequences in a list": Case(
        collated(s=lambda items: [torch.stack([i["x"]] * 10) for i in items]),
        calls("sequences", "s"),
        options=SECOND,
    ),
    "sequences alone": Case(of("sequence"), whole(lambda m, b: squared(m(b)), Sequences), options=ROWS),
    "equal sequences alone": Case(
        lambda items: [torch.stack([i["x"]] * 10) for i in items],
        whole(lambda m, b: squared(m(b)), Sequences),
        options=ROWS,
    ),
    "tuples of images and targets": Case(
        lambda items: tuple(zip(*((i["sequence"], {"k": i["k"]}) for i in items), strict=True)),
        whole(lambda m, b: squared(m(b[0]) * torch.tensor([t["k"] for t in b[1]])), Sequences),
        options=ROWS,
    ),
    "sequences moved by the step": Case(
        of("sequence"),
        whole(lambda m, b: squared(m([s * 2 for s in b])), Sequences),
        options=ROWS,
    ),
    "texts made by the step": Case(
        collated(t=of("text")),
        whole(lambda m, b: squared(m(b["x"], [t + "0" for t in b["t"]], how="texts"))),
        options=SECOND,
    ),
    "objects": Case(
        lambda items: {"x": torch.stack([i["x"] for i in items]), "o": items},
        calls("objects", "o"),
        options=SECOND,
    ),
    "no collation at all": Case(
        list,
        whole(lambda m, b: squared(m(torch.stack([i["x"] for i in b]), b, how="objects"))),
        options=SECOND,
    ),
    "packed sequences": Case(collated(p=sequences(packed(False))), calls("packed", "p")),
    "packed alone": Case(
        sequences(packed(False)),
        whole(lambda m, b: torch.stack([s.square().mean() for s in unpack_sequence(m(b))]).mean(), Packed),
    ),
    "packed in a dict": Case(
        collated(d=lambda items: {"p": sequences(packed(False))(items)}),
        whole(lambda m, b: squared(m(b["x"], b["d"]["p"], how="packed"))),
    ),
    "nested": Case(collated(n=sequences(torch.nested.nested_tensor)), calls("nested", "n")),
    "jagged": Case(
        collated(n=sequences(lambda s: torch.nested.nested_tensor(s, layout=torch.jagged))),
        calls("nested", "n"),
    ),
    "sparse": Case(collated(s=of("x", lambda x: torch.stack(x).to_sparse())), calls("dense", "s")),
    "sparse by rows": Case(
        collated(s=of("x", lambda x: torch.stack(x).to_sparse_csr())),
        calls("dense", "s"),
        gather="sparse_csr cannot be cut into rows",
        parts="",
    ),
    "dataclass that derives": Case(
        collated(d=lambda items: Derived(torch.stack([i["x"] for i in items]), [i["text"] for i in items])),
        calls("derived", "d"),
        options=TEXTS,
    ),
    "dataclass that derives and forgets": Case(
        collated(d=lambda items: Positions(torch.stack([i["x"] for i in items]), 0)),
        calls("positions", "d"),
        gather="cannot derive 'rows' of another Positions",
        parts="different",
    ),
    "named tuple": Case(
        collated(p=lambda items: Pair(torch.stack([i["x"] for i in items]), [i["text"] for i in items])),
        calls("named", "p"),
        options=TEXTS,
    ),
    "dicts of dicts": Case(
        collated(
            d=lambda items: {
                "a": {"texts": [i["text"] for i in items]},
                "b": [torch.stack([i["x"] for i in items])],
            }
        ),
        calls("deep", "d"),
        options={"samples": ("a.texts",)},
    ),
    "pairs of views": Case(
        lambda items: default_collate([{"x": i["x"], "v": (i["x"], 2 * i["x"])} for i in items]),
        calls("pairs", "v"),
    ),
    "a pair of numbers for all": Case(
        collated(two=lambda _: (2.0, 3.0)), calls("two", "two"), options={"broadcast": (1,)}
    ),
    "an opaque batch": Case(
        collated(o=lambda items: Opaque(torch.stack([i["x"] for i in items]))),
        calls("opaque", "o"),
        gather="a Opaque around a tensor as long",
        parts="",
    ),
    "a set": Case(
        collated(s=lambda items: {i["text"] for i in items}),
        calls("set", "s"),
        gather="a set as long",
        parts="different",
    ),
    "time first in": Case(
        collated(t=of("x", lambda x: torch.stack([torch.stack(x)] * 5))),
        whole(lambda m, b: squared(m(b["t"].transpose(0, 1)[:, 0]))),
    ),
    "time first given": Case(
        collated(t=of("x", lambda x: torch.stack([torch.stack(x)] * 5))),
        whole(lambda m, b: squared(m.each(b["t"]))),
        gather="samples are not along its dim 0",
        parts="different",
    ),
    "time first out": Case(
        collated(),
        calls("time first", "x"),
        gather="the rows are along dim 1: return them along dim 0",
        parts="",
    ),
    "states out": Case(
        collated(), calls("states", out=lambda o: o[0]), gather="the rows are along dim 1", parts=""
    ),
    "texts out": Case(
        collated(), calls("texts out", out=lambda o: o["v"] * torch.tensor([float(t) for t in o["texts"]]))
    ),
    "rows out": Case(collated(), calls("rows out", out=lambda o: torch.cat([row["v"] for row in o]))),
    "array out": Case(collated(), calls("array out", out=lambda o: o[0] * torch.as_tensor(o[1]))),
    "packed out": Case(
        sequences(packed(False)),
        whole(lambda m, b: torch.stack([s.square().mean() for s in unpack_sequence(m(b))]).mean(), Packed),
    ),
}


def trained(case, backend, *, data=Samples, devices=("cpu", "cpu"), workers=0, options=None):
    """Return the losses and weights of two epochs, and the backend that was taken."""
    torch.manual_seed(0)
    model = case.step.model()
    loader = DataLoader(data(), batch_size=BATCH, collate_fn=case.collate, num_workers=workers)
    where = {"devices": "cpu"} if backend == "single" else {"devices": list(devices), "backend": backend}
    if backend == "dp-gather":
        where["options"] = {"dp-gather": case.options if options is None else options}
    with Trainer(progress=False, seed=0, **where) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        limits = Limits(steps_per_epoch=3) if data is Stream else None
        history = trainer.fit(model, optimizer, loader, step=case.step, epochs=2, limits=limits)
        return [h.metrics["loss"] for h in history], model.state_dict()


def same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)


ON_BOTH = [name for name, case in CASES.items() if case.gather is None and case.parts != "different"]
"""The cases that train on dp-gather and on tuple. The fast part has each of them on one of the two."""


def with_slow(names, slow):
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.mark.parametrize("name", with_slow(CASES, ON_BOTH[::2]))
def test_gathered_devices_train_as_one_or_say_why_not(name):
    case = CASES[name]
    if case.gather is None:
        same(trained(case, "dp-gather"), trained(case, "single"))
    else:
        with pytest.raises((ConfigError, StepError, TypeError, ValueError), match=case.gather):
            trained(case, "dp-gather")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options])
def test_gathered_devices_refuse_what_is_not_told(name):
    with pytest.raises(ConfigError, match=UNTOLD):
        trained(CASES[name], "dp-gather", options={})


@pytest.mark.parametrize(
    "name", with_slow([n for n, case in CASES.items() if case.parts != "different"], ON_BOTH[1::2])
)
def test_devices_with_parts_train_as_one(name):
    same(trained(CASES[name], "tuple"), trained(CASES[name], "single"))


@pytest.mark.parametrize(
    "name", ["texts", "sequences alone", "arrays", "no collation at all", "packed alone"]
)
def test_the_batches_of_a_stream_are_cut_where_its_samples_are(name):
    case = CASES[name]
    _, found = trained(case, "dp-gather", data=Stream)
    torch.testing.assert_close(found, trained(case, "single", data=Stream)[1], rtol=1e-9, atol=1e-12)


def paired(names):
    """Return each name with a backend, in turn; the other pairs of the product are nightly."""
    return [
        pytest.param(name, backend, marks=pytest.mark.slow if (number + turn) % 2 else pytest.mark.nightly)
        for number, name in enumerate(names)
        for turn, backend in enumerate(["dp-gather", "tuple"])
    ]


@pytest.mark.parametrize(("name", "backend"), paired(["texts", "packed sequences", "sequences alone"]))
def test_the_batches_of_workers_are_cut_alike(name, backend):
    same(trained(CASES[name], backend, workers=2), trained(CASES[name], "single"))


@pytest.mark.parametrize(
    ("name", "backend"), paired(n for n, c in CASES.items() if c.gather is None and c.parts is None)
)
def test_three_devices_cut_into_uneven_parts(name, backend):
    same(trained(CASES[name], backend, devices=("cpu",) * 3), trained(CASES[name], "single"))


def losses_on_a_rank(backend, names):
    found = {}
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        model = case.step.model()
        loader = DataLoader(Samples(), batch_size=BATCH, collate_fn=case.collate)
        options = [DdpOptions(find_unused_parameters=True)] if backend == "ddp" else None
        with Trainer(progress=False, seed=0, devices="cpu", backend=backend, options=options) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            history = trainer.fit(model, optimizer, loader, step=case.step, epochs=2)
        found[name] = [h.metrics["loss"] for h in history]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("kinds", [0, 1])
def test_ranks_train_as_one_device(two_ranks, backend, kinds):
    names = [n for n, case in CASES.items() if case.parts != "different"]
    names = names[:3] if kinds == 0 else names[3:]
    everyones = two_ranks.run(losses_on_a_rank, backend, names)
    for name in names:
        expected = trained(CASES[name], "single")[0]
        for found in everyones:
            torch.testing.assert_close(
                found[name], expected, rtol=1e-9, atol=1e-12, msg=f"{name}: {{}}".format
            )


class Asking(nn.Module):
    """Asks for all rows in its forward, or in one of a part of it."""

    def __init__(self, ask):
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.ask = ask

    def forward(self, x):
        rows = self.line(x)
        self.ask(rows)
        return rows


def in_a_thread(function):
    def call(rows):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, rows).result()

    return call


@pytest.mark.parametrize("way", ["run", "hook", pytest.param("evaluate", marks=pytest.mark.slow), "thread"])
@pytest.mark.parametrize("backend", ["dp-gather", "tuple"])
def test_what_asks_for_all_rows_gets_them_or_is_refused_where_there_is_a_part(backend, way):
    x = torch.arange(12.0).reshape(4, 3)
    with Trainer(progress=False, seed=0, devices=["cpu", "cpu"], backend=backend) as trainer:
        for call in ("all_gather", "gather_for_metrics", "global_loss"):
            found = []

            def ask(rows, call=call, found=found):
                found.append(getattr(trainer, call)(rows.mean() if call == "global_loss" else rows))

            wrapped = in_a_thread(ask) if way == "thread" else ask
            module = Asking(wrapped if way != "hook" else lambda _: None)
            if way == "hook":
                module.line.register_forward_hook(lambda _m, _i, out, wrapped=wrapped: wrapped(out))
            model, loader = trainer.prepare(module, DataLoader(list(x), batch_size=4), training=False)
            expected = nn.functional.linear(x, module.line.weight, module.line.bias)

            def run(model=model, loader=loader):
                if way == "evaluate":
                    trainer.evaluate(model, loader, step=lambda m, b: {"loss": m(b).mean()})
                else:
                    trainer.run(lambda m, b: m(b).mean(), model, next(iter(loader)))

            if backend == "tuple" and call == "all_gather" and way not in ("thread", "hook"):
                run()
                assert len(found) == 2
                assert all(torch.equal(rows, expected) for rows in found)
                continue
            if backend == "tuple" and call == "all_gather" and way == "hook":
                with pytest.raises(
                    StepError, match="forward hooks of your own: they run one after the other"
                ):
                    run()
                continue
            where = "within the model's forward" if backend == "dp-gather" else "within the step|in a thread"
            with pytest.raises(StepError, match=rf"{call}\(\) was called ({where}).*; (call|.*call it in) "):
                run()
            assert not found
        # Between steps, and where one device has all rows, nothing is refused.
        assert trainer.gather_for_metrics(torch.ones(3)).tolist() == [1, 1, 1]


def test_a_step_that_is_called_for_each_device_has_no_rows_of_all():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x):
            rows = self.line(x)
            return rows.square().mean(), rows

    def step(model, batch):
        loss, rows = model(batch)
        trainer.all_gather(rows)
        return loss

    with Trainer(progress=False, seed=0, devices=["cpu", "cpu"], backend="dp-gather") as trainer:
        model = trainer.prepare(WithLoss())
        with pytest.raises(StepError, match="in a step with a loss of each device"):
            trainer.run(step, model, torch.ones(4, 3))
        trainer.run(step, model, torch.ones(1, 3))  # which one device has


def test_a_step_returns_packed_sequences_nested_tensors_and_single_rows_of_each_part():
    rows = [torch.full((n, 2), float(n)) for n in (2, 3, 1, 4)]

    def step(model, part):
        padded = torch.nested.as_nested_tensor(list(part), layout=torch.jagged)
        scores = torch.stack([model(row).mean() for row in part])
        return {
            "loss": scores.mean(),
            "packed": packed(False)(part),
            "jagged": padded,
            "scores": scores[:, None],
        }

    for count in (2, 4):
        with Trainer(progress=False, seed=0, backend="tuple", devices=["cpu"] * 2) as trainer:
            model, loader = trainer.prepare(nn.Linear(2, 1), DataLoader(rows, count, collate_fn=list))
            outputs = [trainer.run(step, model, batch) for batch in loader]
        for output in outputs:
            lengths = [len(row) for row in unpack_sequence(output["packed"])]
            assert lengths == [len(row) for row in output["jagged"].unbind()]
            assert output["scores"].shape == (count, 1)


def test_a_collate_function_is_called_once_for_each_batch():
    sizes = []

    def collate(items):
        sizes.append(len(items))
        return torch.stack([item["x"] for item in items])

    with Trainer(progress=False, seed=0, devices=["cpu", "cpu"], backend="dp-gather") as trainer:
        loader = DataLoader(Samples(), BATCH, collate_fn=collate)
        model, prepared = trainer.prepare(Model(), loader, training=False)
        assert [len(model(batch)) for batch in prepared] == [6, 6, 2]
    assert sizes == [6, 6, 2]
