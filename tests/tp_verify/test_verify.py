"""A parallel way is proven, or the first place where it parts is named; what cannot be tried is refused."""

import json

import pytest
import torch
from tp_core.errors import ConfigError, ModelError, RankFailedError
from tp_core.internal import RankPool
from tp_verify import Way, verify, ways
from tp_verify._verify import join

from tests.tp_verify import faults
from tests.tp_verify import models as m


@pytest.fixture(scope="module")
def ranks():
    """Two ranks, which all tests of this file share."""
    with RankPool(2, setup=join, timeout_s=800) as pool:
        yield pool


def case(name, cases):
    return next(c for c in cases if c.name == name)


def check(found, ranks, dtype=torch.float64):
    report = found.run(ranks, dtype)
    assert found.is_right(report), str(report)
    return report


FAST = ["column backward", "one parameter ignored", "norm of shards", "gradient of keys", "momentum lost"]


@pytest.mark.parametrize("name", FAST)
def test_a_planted_fault_is_named_at_its_module(name, ranks):
    check(case(name, faults.FAULTS), ranks)


@pytest.mark.parametrize("name", ["fully_shard, both, SGD", "by hand, clipped", "context by hand"])
def test_a_way_that_is_right_is_proven_in_lower_precision(name, ranks):
    check(case(name, faults.right_ways()), ranks, torch.bfloat16)


def test_uneven_tokens_in_torchs_pipelining_part_at_the_loss(ranks):
    check(faults.FAULTS[-1], ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("planted", faults.FAULTS, ids=lambda c: f"{c.kind}, {c.name}")
def test_every_planted_fault_is_named(planted, ranks):
    check(planted, ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("right", faults.right_ways(), ids=lambda c: c.name)
def test_no_way_that_is_right_is_accused(right, dtype, ranks):
    check(right, ranks, dtype)


def test_a_report_is_text_values_and_a_page(ranks):
    report = check(case("row forward", faults.FAULTS), ranks)
    assert not report
    assert report.finding.module == "blocks.1.mlp.down"
    assert "were not summed" in str(report) or "differs by" in str(report)
    assert json.loads(report.to_json())["finding"]["step"] == 1
    assert "blocks.1.mlp.down" in report.to_html()


class Branches(torch.nn.Module):
    """A model with a layer that no batch reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x) if x.size(0) < 100 else self.unused(x)


def square(model, batch):
    return model(batch).square().mean()


def test_what_no_batch_reached_is_listed(ranks):
    way = ways.DataParallel(find_unused_parameters=True)
    report = verify(Branches, [torch.ones(4, 3)], parallel=way, step=square, ranks=ranks)
    assert report.ok
    assert "modules that no batch reached: unused" in report.not_covered
    assert "parameters that got no gradient: unused.weight, unused.bias" in report.not_covered


def unchanged(model):
    return model


def larger(model):
    with torch.no_grad():
        model.used.weight *= 2
    return model


def test_a_way_that_changes_the_plain_model_is_named_before_the_first_step(ranks):
    report = verify(Branches, [torch.ones(4, 3)], parallel=larger, step=square, ranks=ranks)
    assert str(report.finding).startswith("the weights before the first step of used.weight")


def test_batches_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="has 3 rows, and 2 ranks with 2 micro-batches need 4"):
        verify(Branches, [torch.ones(3, 3)], parallel=unchanged, step=square, micro=2)
    with pytest.raises(ConfigError, match="give at least one batch"):
        verify(Branches, [], parallel=unchanged, step=square)


def test_a_builder_that_is_not_repeatable_is_refused():
    generator = torch.Generator()

    def build():
        model = Branches()
        torch.nn.init.normal_(model.used.weight, generator=generator)
        return model

    with pytest.raises(ModelError, match=r"not repeatable: 'used\.weight' differs between two calls"):
        verify(build, [torch.ones(4, 3)], parallel=unchanged, step=square)


def noisy(model, batch):
    return model(batch + torch.rand(())).square().mean()


def test_a_loss_that_is_random_by_nature_is_refused():
    with pytest.raises(ModelError, match="random without dropout"):
        verify(Branches, [torch.ones(4, 3)], parallel=unchanged, step=noisy)


class Dies(Way):
    def parallelize(self, model):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("rank 1 has no memory left")
        torch.distributed.barrier()
        return model


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_cause():
    with pytest.raises(RankFailedError, match="rank 1 has no memory left"):
        verify(Branches, [torch.ones(4, 3)], parallel=Dies(), step=square, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "shard", "pipeline"])
def test_the_backends_of_tp_are_proven(name, ranks):
    report = verify(
        m.build,
        m.EVEN,
        parallel=ways.TpBackend(name),
        step=m.step,
        optimizer=m.adamw,
        ranks=ranks,
        max_norm=0.1,
    )
    assert report.ok, str(report)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=2, **sizes))


def own_loss(model, batch):
    return model(input_ids=batch["tokens"], labels=batch["labels"], use_cache=False).loss


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["pipeline", "context"])  # which has parts of sequences: no positions from 0
def test_backends_that_split_samples_are_proven(name, ranks):
    report = verify(
        llama,
        m.EVEN,
        parallel=ways.TpBackend(name),
        step=own_loss,
        optimizer=m.adamw,
        ranks=ranks,
        max_norm=0.1,
    )
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("config", [{"tp_size": 2}, {"fsdp_size": 2}], ids=str)
def test_a_model_of_transformers_is_proven_by_its_own_plan(config, ranks):
    report = verify(llama, m.EVEN, parallel=ways.Transformers(**config), step=own_loss, ranks=ranks)
    assert report.ok, str(report)


def fsdp_plugin():
    from accelerate.utils import FullyShardedDataParallelPlugin

    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")}


@pytest.mark.slow
@pytest.mark.needs("accelerate")
def test_accelerate_is_proven_with_fsdp2():
    report = verify(m.build, m.EVEN, parallel=ways.Accelerate(fsdp_plugin), step=m.step, max_norm=0.1)
    assert report.ok, str(report)
