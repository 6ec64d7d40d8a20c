"""A model that is built without memory and split in groups of ranks is the one of a single device.

What each rank draws is what the whole model would have drawn; of it a rank keeps its shards, or with fully
sharded data its slices of them.
"""

import ctypes
import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.fully_sharded import FullyShardOptions
from tp_core.jobs import CompileOptions
from tp_testing import RankPool, run_ranks
from tp_trainer import FsdpOptions, Trainer

from tests.live_bytes import resident
from tests.models import Block
from tests.reference_training import mean_square

ts = pytest.importorskip("tp_shard")

WIDTH = 192  # its matrices are large enough to be deferred
_M_MMAP_THRESHOLD = -3  # of malloc.h


class Net(nn.Module):
    """Has blocks, a table that is the head's too, a large weight that no plan splits, and a large buffer."""

    def __init__(self, width=WIDTH, blocks=2):
        super().__init__()
        self.table = nn.Embedding(width, width)
        self.blocks = nn.ModuleList(Block(width, 2 * width, norm=True) for _ in range(blocks))
        self.whole = nn.Linear(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.rand(width, width))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.whole(x) @ self.mask)


class Own(nn.Module):
    """Layers of this package from the beginning, as large as those of ``nn.Sequential`` below."""

    def __init__(self):
        super().__init__()
        self.table = ts.nn.ParallelEmbedding(WIDTH, WIDTH, dim=0)
        self.up = ts.nn.ParallelLinear(WIDTH, 2 * WIDTH, dim=-1)
        self.down = ts.nn.ParallelLinear(2 * WIDTH, WIDTH, dim=0)

    def forward(self, tokens):
        return self.down(torch.tanh(self.up(self.table(tokens))))


class Plain(Own):
    def __init__(self):
        nn.Module.__init__(self)
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


PLAN = {
    "table": ts.Vocab(),
    "blocks.*.up": ts.Column(),
    "blocks.*.down": ts.Row(),
    "head": ts.Vocab(gather_output=True),
}
FSDP, HSDP = ts.ShardOptions(data="fsdp"), ts.ShardOptions(data=FullyShardOptions(replicas=2))
DDP = ts.ShardOptions(data="ddp")


def split(width=WIDTH, blocks=2):
    return ts.parallelize(Net(width, blocks), PLAN)


def built(make, options=None, groups=None, **ways):
    """Return the first values and the losses of training on them; ``ways`` are the trainer's."""
    if groups is not None:
        ts.distributed.init_process_group(groups)
    try:
        kwargs = ways if options is None else {"options": options, **ways}
        with Trainer(devices="cpu", seed=4, progress=False, **kwargs) as trainer:
            model = trainer.build(make)
            first = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
            kinds = {type(p.data).__name__ for p in model.parameters()}
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            tokens = torch.randint(WIDTH, (16, 3), generator=torch.Generator().manual_seed(0))
            history = trainer.fit(model, optimizer, DataLoader(TensorDataset(tokens), 4), step=mean_square)
            return first, [record.train["loss"] for record in history], kinds
    finally:
        if groups is not None:
            ts.distributed.destroy_process_group()


def as_usual(kind=Net):
    torch.manual_seed(4)
    return kind().state_dict()


def join():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(4, setup=join)
    yield ranks
    ranks.close()


WAYS = {"4": (DDP, 4), "2x2": (DDP, 2), "2x2 fsdp": (FSDP, 2), "2x2 hsdp": (HSDP, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "groups", "make", "kind"),
    [
        *(pytest.param(*way, split, Net, id=f"a plan-{name}") for name, way in WAYS.items()),
        pytest.param(*WAYS["2x2 fsdp"], Own, Plain, id="parallel layers-2x2 fsdp"),
        *(
            pytest.param(*WAYS[name], Own, Plain, id=f"parallel layers-{name}", marks=pytest.mark.nightly)
            for name in ("4", "2x2", "2x2 hsdp")
        ),
    ],
)
def test_ranks_build_the_model_of_one_device(pool, options, groups, make, kind):
    expected = as_usual(kind)
    _, losses, _ = built(kind)
    for first, found, kinds in pool.run(built, make, options, groups):
        assert kinds == ({"Tensor"} if options is DDP else {"DTensor"})
        assert list(first) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(first[name], tensor), name
        assert found == pytest.approx(losses, rel=1e-4)


@pytest.mark.nightly
def test_eight_ranks_in_three_dimensions_build_and_compile_the_model_of_one_device():
    """Each layer over two ranks, what these hold over two more, and all of it twice, in compiled units."""
    expected, (_, losses, _) = as_usual(), built(Net)
    compiler = CompileOptions(backend="aot_eager")  # torch's default one would take many seconds
    for first, found, kinds in run_ranks(functools.partial(built, split, HSDP, 2, compile=compiler), 8):
        assert kinds == {"DTensor"}
        for name, tensor in expected.items():
            assert torch.equal(first[name], tensor), name
        assert found == pytest.approx(losses, rel=1e-4)


# -- files ----------------------------------------------------------------------------------------


def write_weights(folder, model, nbytes):
    """Write the model's weights as several files of at most so many bytes, with an index."""
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.export(trainer.prepare(model), folder / "model.safetensors", max_file_nbytes=nbytes)


def read_and_written(options, groups, folder):
    """Load weights into a model that was built, and export them again."""
    ts.distributed.init_process_group(groups)
    try:
        with Trainer(devices="cpu", seed=4, progress=False, options=options) as trainer:
            model = trainer.build(split)
            trainer.load_model(model, folder / "in")
            trainer.export(model, folder / "out.safetensors")
            trainer.save_model(model, folder / "out.pt")
    finally:
        ts.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("options", [DDP, FSDP], ids=["2x2", "2x2 fsdp"])
def test_ranks_read_and_write_files_of_the_whole_model(pool, tmp_path, options):
    torch.manual_seed(9)
    model = Net()
    (tmp_path / "in").mkdir()
    write_weights(tmp_path / "in", model, 1)
    pool.run(read_and_written, options, 2, tmp_path)
    written = [load_file(tmp_path / "out.safetensors"), torch.load(tmp_path / "out.pt")]
    for name, tensor in model.state_dict().items():
        for found in written:
            assert torch.equal(found[name], tensor), name


# -- memory ---------------------------------------------------------------------------------------


def most_beyond(call):
    """Return the most memory that a call took beyond what was there, and what it returned."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = call()
    return resident("VmHWM") - before, result


def memory_of(way, folder, width, blocks):
    """Return this rank's slices, and the most that building, loading and exporting took beyond what was."""
    torch.set_num_threads(1)
    # What is freed goes back to the system at once: the peak is that of what is held, not of malloc's habits.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    options, make = FsdpOptions(), Net
    if way != "fsdp":
        options, make = ts.ShardOptions(data="fsdp" if way == "shard x fsdp" else "ddp"), split
        ts.distributed.init_process_group(2)
    with Trainer(devices="cpu", seed=0, progress=False, options=options, backend=way.split()[0]) as trainer:
        small = trainer.build(lambda: make(16, 2))  # what is imported and started once is not the model's
        trainer.export(small, folder / "small.safetensors")
        trainer.load_model(small, folder / "small.safetensors")
        built, model = most_beyond(lambda: trainer.build(lambda: make(width, blocks)))
        plain = trainer.session.unwrap(model)
        held = [getattr(p, "_local_tensor", p) for p in plain.parameters()]
        slices = sum(t.nbytes for t in [*held, *plain.buffers()])
        loaded, _ = most_beyond(lambda: trainer.load_model(model, folder / "in"))
        exported, _ = most_beyond(
            lambda: trainer.export(model, folder / "out.safetensors", max_file_nbytes=10**7)
        )
        return slices, built, loaded, exported


def estimated(group_size):
    """Return what a step takes beside the states, and what a real exchange makes after the estimate."""
    ts.distributed.init_process_group(group_size)
    try:
        plain = nn.Sequential(nn.Linear(8, 2**16), nn.Tanh(), nn.Linear(2**16, 8))
        model = ts.parallelize(plain, {"0": ts.Column(), "2": ts.Row()})
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(devices="cpu", progress=False) as trainer:
            table = trainer.estimate(model, sgd, (torch.zeros(64, 8),), mean_square, devices=4, memory="8GiB")
        return table.verdicts["shard"].memory.activations, ts.distributed.reduce(torch.ones(1)).item()
    finally:
        ts.distributed.destroy_process_group()


@pytest.mark.slow
def test_what_a_step_of_a_split_model_takes_is_known_before_it_runs(pool):
    """What lies between the layers is split, and with larger groups each rank has as much of more samples."""
    inside = 64 // 4 * 2**16 * 4  # of one device's share of the batch, if it were whole
    for group_size in (2, 4):
        for activations, total in pool.run(estimated, group_size):
            assert total == group_size
            assert 1.9 * inside < activations < 4.5 * inside


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak")
@pytest.mark.parametrize(
    ("way", "ranks"), [("fsdp", 2), ("shard", 2), pytest.param("shard x fsdp", 4, marks=pytest.mark.nightly)]
)
def test_no_rank_holds_more_than_its_slices_and_a_unit(tmp_path, way, ranks):
    width, blocks = 1536, 8
    model = Net(width, blocks)
    unit = sum(p.nbytes for p in model.blocks[0].parameters())
    whole = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    (tmp_path / "in").mkdir()
    write_weights(tmp_path / "in", model, unit)
    del model
    for slices, built, loaded, exported in run_ranks(memory_of, ranks, way, tmp_path, width, blocks):
        assert whole / ranks < slices < 1.5 * whole / ranks
        assert built < 1.15 * slices + unit, (built, slices, unit)
        assert loaded < 1.15 * unit, (loaded, unit)
        assert exported < 1.15 * unit, (exported, unit)
