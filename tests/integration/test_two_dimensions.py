"""Tensors split in groups, and their shards sharded over the groups: the weights are those of one device."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, SelectionError
from tp_core.fully_sharded import FullyShardOptions
from tp_core.jobs import CompileOptions
from tp_testing import RankPool, run_ranks
from tp_trainer import Checkpoints, GradientRules, Trainer

from tests.models import Block

ts = pytest.importorskip("tp_shard")


class Net(nn.Module):
    """Has blocks, a weight in two places, a frozen layer and a parameter of one element."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6, 9, norm=True) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)) * self.scale


class PassingBlock(Block):
    """Hands its features on beside its result, as T5 does with the bias of its first block."""

    def forward(self, x, features):
        mine = torch.tanh(self.up(self.norm(x)))
        return x + self.down(mine + features), mine


class PassingNet(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(PassingBlock(6, 9, norm=True) for _ in range(3)).double()

    def forward(self, tokens):
        x, features = self.table(tokens), 0.0
        for block in self.blocks:
            x, features = block(x, features)
        return self.head(self.frozen(x)) * self.scale


PLAN = {
    "table": ts.Vocab(),
    "blocks.*.up": ts.Column(),
    "blocks.*.down": ts.Row(),
    "head": ts.Vocab(gather_output=True),
}
FSDP = ts.ShardOptions(data="fsdp")


def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].roll(-1, 1).flatten())


def loader(samples=22):
    tokens = torch.randint(11, (samples, 5), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)


def form_groups(groups):
    """Form groups of so many ranks, or those of a mesh."""
    if isinstance(groups, dict):
        groups = init_device_mesh("cpu", tuple(groups.values()), mesh_dim_names=tuple(groups))
    ts.distributed.init_process_group(groups)


def fit(options=None, groups=None, trainer=None, net=Net, **arguments):
    """Return the losses, the whole state, and the types of what the optimizer keeps."""
    if groups is not None:
        form_groups(groups)
    try:
        model = net() if groups is None else ts.parallelize(net(), PLAN)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        kwargs = {"options": options, "seed": 2, "progress": False, "devices": "cpu", **(trainer or {})}
        with Trainer(**kwargs) as it:
            history = it.fit(
                model, optimizer, loader(), step=step, **{"epochs": 2, "validation": loader(5), **arguments}
            )
            kinds = {type(s["exp_avg"]).__name__ for s in optimizer.state.values()}
            state = {n: t.clone() for n, t in it.session.model_state(model).items()}
            return [(r.train["loss"], r.val["loss"]) for r in history], state, kinds
    finally:
        if groups is not None:
            ts.distributed.destroy_process_group()


def assert_close(found, expected):
    for losses, wanted in zip(found[0], expected[0], strict=True):
        assert losses == pytest.approx(wanted, rel=1e-9)
    assert list(found[1]) == list(expected[1])
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-8, atol=1e-10)


def join():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(4, setup=join)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (FSDP, {"dp": 2, "tp": 2}),
        (ts.ShardOptions(data=FullyShardOptions(replicas=2)), 2),
        (ts.ShardOptions(data=FullyShardOptions(units=Block, activation_checkpointing=True)), 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                (FSDP, 2),
                (FSDP, 4),
                (FSDP, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
                (ts.ShardOptions(data=FullyShardOptions(reshard_after_forward=False, prefetch=2)), 2),
            ]
        ),
    ],
)
def test_training_leads_where_one_device_leads(pool, options, groups):
    expected = fit(clip_norm=0.3)
    for found in pool.run(functools.partial(fit, options, groups, clip_norm=0.3)):
        assert found[2] == {"DTensor"}
        assert_close(found, expected)


COMPILER = CompileOptions(backend="aot_eager")  # torch's default one would take many seconds


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [1, 2])
def test_units_are_compiled_each(pool, replicas):
    options = ts.ShardOptions(data=FullyShardOptions(units=Block, replicas=replicas))
    expected = fit(clip_norm=0.3)
    for found in pool.run(functools.partial(fit, options, 2, {"compile": COMPILER}, clip_norm=0.3)):
        assert_close(found, expected)


@pytest.mark.slow
def test_features_that_a_unit_hands_to_the_next_are_told_from_what_goes_beside_them(pool):
    options = ts.ShardOptions(data=FullyShardOptions(units=PassingBlock))
    expected = fit(net=PassingNet, clip_norm=0.3)
    for found in pool.run(functools.partial(fit, options, 2, net=PassingNet, clip_norm=0.3)):
        assert_close(found, expected)


def trained_with_zero(options, of_data):
    """Return the state after a few steps of torch's own optimizer with sharded state, or what it is told."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    form_groups(2)
    try:
        model = ts.parallelize(Net(), PLAN)
        optimizer = ZeroRedundancyOptimizer(
            [p for p in model.parameters() if p.requires_grad],
            optimizer_class=torch.optim.AdamW,
            process_group=ts.distributed.get_data_group() if of_data else None,
            lr=0.02,
        )
        with Trainer(options=options, seed=2, progress=False, devices="cpu") as it:
            try:
                it.fit(model, optimizer, loader(), step=step, epochs=2, clip_norm=0.3)
            except ConfigError as error:
                return str(error)
            return {n: t.clone() for n, t in it.session.model_state(model).items()}
    finally:
        ts.distributed.destroy_process_group()


@pytest.mark.slow
def test_state_that_an_optimizer_shards_itself_stays_with_those_who_hold_the_same_shards(pool):
    _, expected, _ = fit(clip_norm=0.3)
    for state in pool.run(trained_with_zero, ts.ShardOptions(data="ddp"), True):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-8, atol=1e-10)
    for rank, message in enumerate(pool.run(trained_with_zero, ts.ShardOptions(data="ddp"), False)):
        same = [rank % 2, rank % 2 + 2]
        assert "over the ranks [0, 1, 2, 3] would give ranks the shards of others" in message
        assert f"this rank's are held by {same} alone" in message
    for message in pool.run(trained_with_zero, FSDP, True):
        assert "parameters and state are sharded by the backend" in message


@pytest.mark.slow
def test_eight_ranks_in_three_dimensions():
    run = functools.partial(fit, ts.ShardOptions(data=FullyShardOptions(replicas=2)), 2, clip_norm=0.3)
    expected = fit(clip_norm=0.3)
    for found in run_ranks(run, 8):
        assert_close(found, expected)


@pytest.mark.slow
def test_accumulated_batches_and_clipped_values(pool):
    ways = {"trainer": {"accumulate": 3}, "gradients": GradientRules(clip_value=0.01)}
    expected = fit(**ways)
    for found in pool.run(functools.partial(fit, FSDP, 2, **ways)):
        assert_close(found, expected)


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_each_time(pool, tmp_path):
    """Sharded over two, in two dimensions over four, on one device, split over two."""
    expected = fit(epochs=5)
    ways = [
        (2, {"trainer": {"backend": "fsdp"}}),
        (4, {"options": FSDP, "groups": 2}),
        (1, {}),
        (2, {"options": FSDP, "groups": 2}),
        (4, {"options": ts.ShardOptions(data=FullyShardOptions(replicas=2)), "groups": 2}),
    ]
    checkpoint = Checkpoints(tmp_path, every_epochs=1, keep=99)
    for epochs, (processes, way) in enumerate(ways, 1):
        run = functools.partial(fit, epochs=epochs, checkpoint=checkpoint, resume="auto", **way)
        for found in [run()] if processes == 1 else pool.run(run) if processes == 4 else run_ranks(run, 2):
            assert len(found[0]) == epochs
    assert_close(found, expected)


def two_models():
    """Prepare a second model, which is not split, after the first; return what each would do with a batch."""
    form_groups(2)
    try:
        with Trainer(options=FSDP, seed=2, progress=False, devices="cpu") as it:
            first = it.prepare(ts.parallelize(Net(), PLAN))
            second = it.prepare(nn.Sequential(nn.Linear(11, 4)).double())
            tokens = torch.arange(10).reshape(2, 5)
            with torch.no_grad():
                run = lambda a, b, batch: {"loss": b(a(batch)).sum()}  # noqa: E731
                it.session.run_several(run, [first, second], tokens)
            return [{type(p).__name__ for p in m.parameters()} for m in (first, second)]
    finally:
        ts.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_second_model_may_come_later(pool):
    for kinds in pool.run(two_models):
        assert kinds == [{"DTensor"}, {"DTensor"}]


# -- what does not go ---------------------------------------------------------------------------


def test_other_values_of_data_are_refused():
    with pytest.raises(ConfigError, match="must be 'auto', 'ddp', 'fsdp' or FullyShardOptions"):
        ts.ShardOptions(data="zero")


@pytest.mark.parametrize("option", [{"find_unused_parameters": True}, {"bucket_cap_mb": 1.0}])
def test_options_of_ddp_do_not_go_with_fully_sharded_data(option):
    with pytest.raises(ConfigError, match="are for data='ddp'"):
        ts.ShardOptions(data="fsdp", **option)


def refused(options, groups):
    with pytest.raises((ConfigError, SelectionError)) as caught:
        fit(options, groups)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "groups", "words"),
    [
        (FullyShardOptions(replicas=3), 2, "4 ranks in groups of 2 hold 2 copies; give a divisor of 2"),
        (FullyShardOptions(replicas=2), {"dp": 2, "tp": 2}, "replicas=2 does not go with the mesh"),
        (FullyShardOptions(units="Blokc"), 2, "finds no module"),
        (FullyShardOptions(offload=True), 2, "offload=True moves shards from an accelerator"),
    ],
)
def test_what_does_not_go_with_the_ranks_is_refused_on_all_of_them(pool, options, groups, words):
    for message in pool.run(refused, ts.ShardOptions(data=options), groups):
        assert words in message
