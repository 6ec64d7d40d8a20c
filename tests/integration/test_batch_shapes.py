"""Batches that could be taken for others: as many rows as features, constants as long as the batch, graphs.

Every batch has as many samples, so that no other one gives away what its values are.
"""

import collections
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate
from tp_core.errors import TpError
from tp_testing import RankPool
from tp_trainer import DdpOptions, Trainer

N = 6
"""Samples in a batch, features of a sample, and classes."""


class Item(NamedTuple):
    i: int
    x: Tensor  # (N,)
    y: int
    nodes: Tensor  # (1 to 4, N)


def item(i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(N, generator=generator, dtype=torch.float64)
    nodes = torch.randn(1 + (i * 5) % 4, N, generator=generator, dtype=torch.float64)
    return Item(i, x, (i * 3 + i // 4) % 3, nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: Tensor
    names: list[str]
    total: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "total", len(self.names))


@dataclass
class Ready:
    x: Tensor
    extra: Any = field(init=False, default=None)


class Frame(Mapping):
    def __init__(self, data):
        self._data = dict(data)

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.line = nn.Linear(N, 1, dtype=torch.float64)
        self.wide = nn.Linear(N, N, dtype=torch.float64)
        self.function = forward

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)

    def row(self, x):
        return self.line(self.wide(x))[..., 0]


class Case(NamedTuple):
    """A batch: what collates it, the model's forward, and the step.

    Attributes:
        collate: Makes the batch of a list of items.
        forward: What the model does; its output is the step's, whose mean square is the loss.
        step: Calls the model.
        options: What the options of ``dp-gather`` say of values that are not rows.
        refused: The error of ``dp-gather``, which cuts what was collated whole.
        failed: The error of the model on ``dp-gather``, where samples are along two dimensions.
        fsdp: The error of ``fsdp``, whose parameters are there in its forward alone.
        differs: Whether the collate function computes over its samples, and so makes another batch of fewer.
        size: How many samples a batch has.
        devices: How many devices one process has.
        dim: The dimension of the rows on ``dp-gather``.
    """

    collate: Callable[[list], Any]
    forward: Callable[..., Any]
    step: Callable[..., Any] = lambda m, b: m(*b)
    options: Mapping[str, tuple[str | int, ...]] = MappingProxyType({})
    refused: str | None = None
    failed: str | None = None
    fsdp: str | None = None
    differs: bool = False
    size: int = N
    devices: int = 2
    dim: int = 0


def xs(items):
    return torch.stack([i.x for i in items])


def with_x(make):
    return lambda items: (xs(items), make(items))


def numbers(m, x, factors):
    assert len(x) == len(factors)
    return m.row(x) * torch.tensor([float(f) for f in factors], dtype=torch.float64)


def per_sample(make, options=MappingProxyType({}), refused=None):
    values = with_x(lambda items: make([1 + i.i / 4 for i in items]))
    return Case(values, numbers, options=options, refused=refused)


def pooled(m, x, index):
    sums = x.new_zeros(int(index.max()) + 1, N).index_add(0, index, x)
    return m.row(sums)


def graphs(equal):
    def collate(items):
        nodes = [i.nodes.mean(0).expand(2, -1) if equal else i.nodes for i in items]
        index = torch.cat([torch.full((len(n),), k) for k, n in enumerate(nodes)])
        return torch.cat(nodes), index

    return collate


def edges(items):
    x, index = graphs(False)(items)
    same = index[:, None] == index[None]
    return x, index, same.nonzero().T.contiguous()


def messages(m, x, index, edge):
    return pooled(m, torch.zeros_like(x).index_add(0, edge[1], x[edge[0]]), index)


def attend(m, x, mask):
    return m.row((mask.double() / mask.double().sum(1, keepdim=True)) @ x)


def tokens(items):
    return torch.stack([i.x * torch.arange(1.0, N + 1, dtype=torch.float64)[:, None] for i in items])


SECOND = {"samples": (1,)}
NOT_ROWS = "samples are not along its dim 0|same number of rows"
TRIL = torch.ones(N, N).tril()
WEIGHTS = torch.arange(1.0, N + 1, dtype=torch.float64)
NAMES = [str(k + 1) for k in range(N)]


def weighed(m, x, y, weights):
    return m.row(x) * weights[y]


def named(m, x, y, names):
    return m.row(x) * torch.tensor([float(names[k]) for k in y.tolist()])


def ready(items):
    batch = Ready(xs(items))
    batch.extra = [str(i.i) for i in items]
    return batch


def labels(items):
    return torch.tensor([i.y for i in items])


def penalized(m, b):
    out = m(*b)
    (grad,) = torch.autograd.grad(out.sum(), b[0], create_graph=True)
    return out + grad.square().sum(1)


def texts_out(m, b):
    out = m(*b)
    return out["v"] * torch.tensor([float(k) for k in out["n"]]) * (out["none"] is None)


CASES = {
    "as many features as rows": Case(lambda items: (xs(items),), Model.row),
    "padding masks": Case(
        lambda items: (
            pad_sequence([i.nodes for i in items] + [torch.zeros(N, N)], batch_first=True)[:-1],
            torch.stack([torch.arange(N) < len(i.nodes) for i in items]),
        ),
        lambda m, x, mask: m.row(x) * mask,
    ),
    "causal mask": Case(lambda items: (tokens(items), TRIL), attend, options={"broadcast": (1,)}),
    "causal mask made anew": Case(
        lambda items: (tokens(items), TRIL),
        attend,
        lambda m, b: m(b[0], b[1].bool()),
        options={"broadcast": (1,)},
    ),
    "class weights": Case(
        lambda items: (xs(items), labels(items), WEIGHTS), weighed, options={"broadcast": (2,)}
    ),
    "class weights in an array": Case(
        lambda items: (xs(items), labels(items), WEIGHTS.numpy()),
        lambda m, x, y, w: weighed(m, x, y, torch.as_tensor(w)),
        options={"broadcast": (2,)},
    ),
    "class names": Case(lambda items: (xs(items), labels(items), NAMES), named, options={"broadcast": (2,)}),
    "class names in a tuple": Case(
        lambda items: (xs(items), labels(items), tuple(NAMES)), named, options={"broadcast": (2,)}
    ),
    "constants in a dict": Case(
        lambda items: {"x": xs(items), "y": labels(items), "c": {"w": WEIGHTS, "names": NAMES}},
        lambda m, x, y, c: weighed(m, x, y, c["w"]) + named(m, x, y, c["names"]),
        lambda m, b: m(b["x"], b["y"], b["c"]),
        options={"broadcast": ("w", "names")},
    ),
    "constants for the loss": Case(
        lambda items: (xs(items), labels(items), WEIGHTS, NAMES),
        Model.row,
        lambda m, b: m(b[0]) * b[2][b[1]] * float(b[3][1]),
    ),
    "weights by class counts": Case(
        lambda items: (xs(items), 1 / one_hot(labels(items), N).sum(0)[labels(items)].double()),
        lambda m, x, w: m.row(x) * w,
        differs=True,
    ),
    "distances between samples": Case(
        lambda items: (xs(items), torch.cdist(xs(items), xs(items))),
        lambda m, x, distances: m.row(distances @ x),
        failed="mat1 and mat2 shapes cannot be multiplied",
        differs=True,
    ),
    "time first": Case(
        lambda items: (tokens(items)[:, 1:].transpose(0, 1),),
        lambda m, x: m.row(x).mean(0) / 9,
        refused=NOT_ROWS,
    ),
    "words of all samples": Case(
        lambda items: (xs(items), [w for i in items for w in "ab"[: i.y]], [i.y for i in items]),
        lambda m, x, words, counts: numbers(m, x, counts) + len(words),
        options={"samples": (2,), "broadcast": (1,)},
        differs=True,
    ),
    "samples of torch's collate": Case(
        lambda items: default_collate([{"x": i.x, "l": [i.x, i.x], "s": (str(i.i), i.i)} for i in items]),
        lambda m, x, pair, s: numbers(m, x, s[0]) + m.row(pair[1]) + s[1],
        lambda m, b: m(b["x"], b["l"], b["s"]),
        options={"samples": ("2.0",)},
    ),
    "as many levels as rows": Case(
        lambda items: ([{"f": xs(items) * k} for k in range(N)],),
        lambda m, levels: sum(m.row(level["f"]) for level in levels),
        options={"samples": ("f",)},
    ),
    "levels": Case(
        lambda items: ([{"f": xs(items) * k} for k in range(3)],),
        lambda m, levels: sum(m.row(level["f"]) for level in levels),
        options={"samples": ("f",)},
    ),
    "two samples of two rows": Case(
        lambda items: tuple(i.x.expand(2, N) for i in items),
        lambda m, rows: torch.stack([m.row(row).sum() for row in rows]),
        lambda m, b: m(b),
        options={"samples": (0,)},
        size=2,
    ),
    "two lists of two": Case(
        lambda items: [[i.x, i.x * 2] for i in items],
        lambda m, rows: torch.stack([m.row(a - 3 * b) for a, b in rows]),
        lambda m, b: m(b),
        options={"samples": (0,)},
        size=2,
    ),
    "two pairs of torch's collate": Case(
        lambda items: default_collate([(i.x, i.x * 2) for i in items]),
        lambda m, a, b: m.row(a - 3 * b),
        size=2,
    ),
    "graphs": Case(graphs(False), pooled, refused=NOT_ROWS),
    "graphs of one size": Case(graphs(True), pooled, refused=NOT_ROWS),
    "graphs with edges": Case(edges, messages, refused=NOT_ROWS),
    "two graphs with edges": Case(edges, messages, size=2, refused=NOT_ROWS),
    "one graph": Case(graphs(False), pooled, size=1, refused=NOT_ROWS),
    "one sample": Case(lambda items: (xs(items), [str(i.i) for i in items]), numbers, size=1),
    "fewer rows than devices": Case(
        lambda items: (xs(items), [str(i.i) for i in items]), numbers, options=SECOND, size=2, devices=3
    ),
    "uneven": Case(
        lambda items: (xs(items), [str(i.i) for i in items]), numbers, options=SECOND, size=5, devices=3
    ),
    "one storage": Case(
        lambda items: [xs(items)] * 2 + [base[:, 3:] for base in [xs(items)]],
        lambda m, a, b, right: m.row(a) + m.row(torch.cat([right, a[:, :3]], 1)) * (a is b or 2),
    ),
    "not contiguous": Case(
        lambda items: (torch.stack([i.x for i in items], 1).T, xs(items)[:, ::2]),
        lambda m, x, s: m.row(x) + s.sum(1),
    ),
    "expanded": Case(
        lambda items: (xs(items), torch.ones(1, N, dtype=torch.float64).expand(len(items), N)),
        lambda m, x, e: m.row(x + e),
    ),
    "inputs with gradients": Case(
        lambda items: (xs(items).requires_grad_(), labels(items)),
        lambda m, x, y: m.row(x * x) + y,
        penalized,
        fsdp="backward pass of its own",
    ),
    "integers": Case(
        lambda items: (labels(items), xs(items)),
        lambda m, y, x: (m.row(x), y + 1),
        lambda m, b: torch.mul(*m(*b)),
    ),
    "python numbers": per_sample(list, SECOND),
    "numbers in a tuple": per_sample(tuple, SECOND),
    "numbers of numpy": per_sample(lambda v: [np.float64(k) for k in v], SECOND),
    "numbers without dimensions": per_sample(lambda v: [torch.tensor(k) for k in v], SECOND),
    "texts of numpy": per_sample(lambda v: np.array([str(k) for k in v])),
    "objects of numpy": per_sample(lambda v: np.array([str(k) for k in v], dtype=object)),
    "records of numpy": Case(
        with_x(lambda items: np.array([(i.i, i.y) for i in items], dtype=[("i", "f8"), ("y", "i8")])),
        lambda m, x, r: m.row(x) * torch.as_tensor(r["i"].copy()) + torch.as_tensor(r["y"].copy()),
    ),
    "masked arrays": Case(
        with_x(lambda items: np.ma.masked_equal([i.y for i in items], 0)),
        lambda m, x, r: m.row(x) * torch.as_tensor(r.filled(7)),
    ),
    "array without dimensions": Case(with_x(lambda _: np.array(3.0)), lambda m, x, a: m.row(x) * float(a)),
    "bytes": per_sample(lambda v: [str(k).encode() for k in v], SECOND),
    "paths": Case(
        with_x(lambda items: [pathlib.Path(f"{i.i}.5") for i in items]),
        lambda m, x, p: numbers(m, x, [q.name for q in p]),
        options=SECOND,
    ),
    "a range": Case(
        with_x(lambda items: range(items[0].i, items[-1].i + 1)), numbers, refused="a range as long"
    ),
    "a deque": per_sample(collections.deque, refused="a deque as long"),
    "a bytearray": per_sample(lambda v: bytearray(int(k) for k in v), refused="a bytearray as long"),
    "a dict with a key for each": Case(
        with_x(lambda items: {f"s{i.i}": float(i.i) for i in items}),
        lambda m, x, d: numbers(m, x, list(d.values())),
        refused="a dict as long",
    ),
    "flags and nothing": Case(
        lambda items: (xs(items), None, True, [], {}, (), 2.5, "text", torch.tensor(2.0)),
        lambda m, x, none, flag, *rest: m.row(x) * (none is None) * flag * len(rest) / rest[-1] / rest[-3],
    ),
    "nothing of each": Case(
        with_x(lambda items: [None if i.y else i.i for i in items]),
        lambda m, x, v: numbers(m, x, [k or 1 for k in v]),
        options=SECOND,
    ),
    "flags of each": Case(with_x(lambda items: [bool(i.y) for i in items]), numbers, options=SECOND),
    "ragged lists of lists": Case(
        with_x(lambda items: [[[i.i / 50] * (i.y + 1)] * (i.i % 3) for i in items]),
        lambda m, x, v: numbers(m, x, [sum(map(sum, lists)) for lists in v]),
        options=SECOND,
    ),
    "lists of dicts in dicts": Case(
        lambda items: {"x": xs(items), "o": {"boxes": [{"a": {"b": [i.nodes]}, "n": i.i} for i in items]}},
        lambda m, x, boxes: m.row(x) + torch.stack([m.row(o["a"]["b"][0]).sum() * o["n"] for o in boxes]),
        lambda m, b: m(b["x"], b["o"]["boxes"]),
        options=SECOND,
    ),
    "ordered, default and user dicts": Case(
        lambda items: (
            collections.OrderedDict(x=xs(items)),
            collections.defaultdict(list, n=[str(i.i) for i in items]),
            collections.UserDict(y=labels(items)),
            Frame({"x": xs(items)}),
        ),
        lambda m, a, b, c, d: numbers(m, a["x"], b["n"]) + c["y"] + m.row(d["x"]),
        options={"samples": ("n",)},
    ),
    "frozen dataclass": Case(
        lambda items: Frozen(x=xs(items), names=[str(i.i) for i in items]),
        lambda m, b: numbers(m, b.x, b.names) + (b.total == len(b.x)),
        lambda m, b: m(b),
        options={"samples": ("names",)},
    ),
    "dataclass with a field set later": Case(
        ready,
        lambda m, b: numbers(m, b.x, b.extra),
        lambda m, b: m(b),
        options={"samples": ("extra",)},
    ),
    "dataclasses of each": Case(
        with_x(lambda items: [Ready(i.nodes) for i in items]),
        lambda m, x, each: m.row(x) + torch.stack([m.row(e.x).sum() for e in each]),
        options=SECOND,
    ),
    "named tuples of each": Case(
        with_x(list),
        lambda m, x, items: m.row(x) + torch.stack([m.row(i.nodes).sum() for i in items]),
        options=SECOND,
    ),
    "complex and bytes": Case(
        lambda items: (xs(items).to(torch.complex128) * 1j, xs(items).abs().mul(20).to(torch.uint8)),
        lambda m, c, u: m.row(c.imag) + m.row(u.double() / 255),
    ),
    "a parameter": Case(
        lambda items: (nn.Parameter(xs(items)),), lambda m, x: m.row(x) * (1 + isinstance(x, Tensor))
    ),
    "rows on dim 1": Case(
        lambda items: (torch.stack([tokens([i])[0][:5] for i in items], 1),),
        lambda m, x: m.row(x),
        lambda m, b: m(*b),
        dim=1,
    ),
    "square with rows on dim 1": Case(
        lambda items: (torch.stack([i.x for i in items], 1),),
        lambda m, x: m.row(x.T)[None],
        dim=1,
    ),
    "crops of each sample": Case(
        lambda items: (torch.cat([torch.stack([i.x, i.x * 2]) for i in items]),),
        Model.row,
        refused=NOT_ROWS,
    ),
    "crops of each sample by the step": Case(
        lambda items: (torch.stack([torch.stack([i.x, i.x * 2]) for i in items]),),
        Model.row,
        lambda m, b: m(b[0].flatten(0, 1)),
    ),
    "noise of the step": Case(
        lambda items: (xs(items),),
        lambda m, x, z: m.row(x + z),
        lambda m, b: m(b[0], torch.ones(len(b[0]), N)),
    ),
    "texts and nothing out": Case(
        lambda items: (xs(items),),
        lambda m, x: {"v": m.row(x), "n": [str(k) for k in x[:, 0].tolist()], "none": None},
        texts_out,
    ),
    "no rows out": Case(
        lambda items: (xs(items),),
        lambda m, x: (m.row(x), x[:0, :1]),
        lambda m, b: sum(m(*b)[1], start=m(*b)[0]),
    ),
}


def trained(name, backend, *, drop_last=True, workers=0):
    """Return the losses of two epochs, of three batches each."""
    case = CASES[name]
    torch.manual_seed(0)
    model = Model(case.forward)
    where = {"devices": "cpu"}
    if backend in {"tuple", "dp-gather"}:
        where = {"devices": ["cpu"] * case.devices}
    if backend == "dp-gather":
        where["options"] = {"dp-gather": {"dim": case.dim} | case.options}
    if backend == "ddp":
        where["options"] = [DdpOptions(find_unused_parameters=True)]
    if backend == "shard":
        import tp_shard as ts

        model.wide = ts.nn.ParallelLinear.convert_parallel_linear(model.wide, 0)
    items = [item(i) for i in range(3 * case.size + case.size // 2)]
    loader = DataLoader(items, case.size, collate_fn=case.collate, drop_last=drop_last, num_workers=workers)
    with Trainer(progress=False, seed=0, backend=backend, **where) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        history = trainer.fit(
            model, optimizer, loader, step=lambda m, b: case.step(m, b).square().mean(), epochs=2
        )
        return [h.metrics["loss"] for h in history]


def outcomes(names, backend, **options):
    """Return for each batch its losses, or the error: of tp's own, or in other words."""
    found = {}
    for name in names:
        try:
            found[name] = trained(name, backend, **options)
        except TpError as error:
            found[name] = f"refused: {error}"
        except Exception as error:  # noqa: BLE001 - it is what the test is about
            found[name] = f"failed: {error!r}"
    return found


def outcomes_of_ranks(backend):
    if backend == "shard":
        import tp_shard as ts

        ts.distributed.init_process_group(-1)
    return outcomes(CASES, backend)


def judged(name, result, backend, **options):
    if isinstance(result, str):
        return result
    is_right = np.allclose(result, trained(name, "single", **options), rtol=1e-9, atol=1e-12)
    return "right" if is_right else "differs"


def check(found, backend, **options):
    wrong = {}
    for name, result in found.items():
        case, expected = CASES[name], "right"
        refused = {"dp-gather": case.refused, "fsdp": case.fsdp}.get(backend)
        if case.failed and backend == "dp-gather":
            expected = f"failed: .*{case.failed}"
        elif refused:
            expected = f"refused: .*({refused})"
        elif case.differs and backend not in {"dp-gather", "shard"}:
            expected = "differs"
        is_as = judged(name, result, backend, **options)
        if not re.match(expected, is_as, re.DOTALL):
            wrong[name] = is_as
    assert not wrong


FEW = (
    "as many features as rows",
    "causal mask",
    "causal mask made anew",
    "class weights in an array",
    "constants in a dict",
    "as many levels as rows",
    "two samples of two rows",
    "graphs of one size",
    "a range",
    "a dict with a key for each",
    "flags and nothing",
    "rows on dim 1",
)


def test_shapes_that_coincide_are_not_taken_for_rows():
    check(outcomes(FEW, "dp-gather"), "dp-gather")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("dp-gather", {}),
        ("tuple", {}),
        ("dp-gather", {"drop_last": False}),
        ("tuple", {"workers": 2}),
        pytest.param("tuple", {"drop_last": False}, marks=pytest.mark.nightly),
        pytest.param("dp-gather", {"workers": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_batch_trains_as_on_one_device_or_is_refused(backend, options):
    names = [n for n in CASES if n not in FEW] if not options else list(CASES)
    if options.get("workers"):
        names = names[::4]  # each fit starts workers anew
    check(outcomes(names, backend, **options), backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "shard"])
def test_every_batch_trains_on_ranks_as_on_one_device(backend):
    with RankPool(2, timeout_s=60) as pool:
        for found in pool.run(outcomes_of_ranks, backend):
            check(found, backend)
