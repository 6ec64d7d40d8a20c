"""How a sequence is cut, what in a batch is one, and what is said where it is not clear."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from tp_context import ContextOptions, _check, attention, gather, positions

# private: cuts and checks of ranks that need not be started, and what is sliced of a model
from tp_context._algorithms import _choose
from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._inputs import _decoder_inputs_of, _has_relative_bias, _numbering_of
from tp_context._score_blocks import ring_blocks, score_blocks
from tp_context._slices import Cut, Cuts, OtherSizes, find_sequences, map_sequences, work_of
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.data import step_identity
from tp_core.errors import ConfigError, StepError
from tp_core.plugins import Job
from tp_trainer import Trainer, estimate

from tests.cases import first_fast
from tests.installed import backend_class
from tests.live_bytes import resident
from tests.tp_context.cuts import activate


@pytest.mark.parametrize(("length", "size"), [(16, 2), (13, 2), (3, 3), (43, 4), (5, 1)])
def test_chunks_of_a_sequence_are_balanced_for_causal_masks_and_cover_it_once(length, size):
    cuts = [Cut(length, rank, size, None) for rank in range(size)]
    index = [cut.index(torch.device("cpu")) for cut in cuts]
    assert torch.cat(index).sort().values.tolist() == list(range(length))
    assert all(len(i) == cut.tokens for i, cut in zip(index, cuts, strict=True))
    pairs = [int((i + 1).sum()) for i in index]
    assert max(pairs) - min(pairs) <= length + 1
    whole = torch.randn(2, length)
    assert torch.equal(cuts[0].take(whole, 1), whole[:, index[0]])


def packed(lengths, rows=1):
    numbers = torch.cat([torch.arange(n) for n in lengths])
    return {"input_ids": numbers.expand(rows, -1), "position_ids": numbers.expand(rows, -1)}


WINDOW = 700
WORK = {
    "documents": (packed([2500, 900, 120, 80, 400, 96]), []),
    "windows": ({"input_ids": torch.zeros(2, 4096, dtype=torch.long)}, [WINDOW]),
    "layers with and without windows": (packed([4096]), [WINDOW, None]),
    "documents in windows": (packed([100, 3000, 996], rows=2), [WINDOW]),
}


def computed(cut, mask, algorithm):
    """Return the pairs of a query and a key of which a rank's attention computes the product."""
    q = torch.zeros(1, 1, cut.tokens, 1)
    if algorithm == "ring":
        blocks = [
            b for s in range(cut.size) for b in ring_blocks(cut.take(mask, 0), QueryKeyCuts(cut, cut), s)
        ]
    else:
        k = torch.zeros(1, 1, cut.length, 1)
        blocks = list(score_blocks(Inputs(q, k, k, cut.take(mask, 0)), Rules(cut, None)))
    return sum((b.last - b.first) * (b.end - b.begin) for b in blocks)


@pytest.mark.parametrize("size", first_fast([2, 4], 3))
@pytest.mark.parametrize("name", WORK)
def test_ranks_have_equal_work_where_documents_and_windows_hide_keys(name, size):
    batch, windows = WORK[name]
    where = find_sequences(batch, None)
    work = work_of(batch, where, windows)[4096]
    cuts = [Cut(4096, rank, size, None, None, work) for rank in range(size)]
    assert torch.cat([cut.index(torch.device("cpu")) for cut in cuts]).sort().values.tolist() == [
        *range(4096)
    ]
    assert max(cut.tokens for cut in cuts) - min(cut.tokens for cut in cuts) <= len(cuts[0].own)
    if None in windows:  # some layers see all, some a window: as much in sum
        shares = torch.stack([cut.take(work, 0).sum() for cut in cuts])
        assert float(shares.max() / shares.double().mean()) < 1.05
        return
    at = torch.arange(4096)
    begins = at - batch.get("position_ids", at[None])[0]
    mask = (at[:, None] >= at) & (at >= begins[:, None]) & (at[:, None] - at < (windows or [4096])[0])
    for algorithm in ("all-gather", "ring"):
        found = torch.tensor([float(computed(cut, mask, algorithm)) for cut in cuts])
        assert float(found.max() / found.mean()) < 1.05, (algorithm, found)


def test_a_sequence_shorter_than_the_ranks_is_refused():
    with pytest.raises(StepError, match=r"2 token\(s\) cannot be split over 3 ranks"):
        Cut(2, 0, 3, None)


def test_sequences_with_slices_of_one_length_cannot_be_told_apart():
    with pytest.raises(StepError, match="pad one of them"):
        Cuts([Cut(9, 1, 2, None), Cut(8, 1, 2, None)])


def found(batch, given=None, **options):
    result = find_sequences(batch, given, **options)
    named = [(n, t) for n, t in batch.items()] if isinstance(batch, dict) else enumerate(batch)
    return {n: result.dims[id(t)] for n, t in named if id(t) in result.dims}


def test_sequences_are_found_by_name_and_shape():
    ids = torch.zeros(2, 7, dtype=torch.long)
    batch = {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones(2, 1, 7, 7),
        "position_ids": torch.zeros(3, 2, 7),
        "embeddings": torch.zeros(2, 7, 5),
        "image": torch.zeros(2, 3, 4, 4),
        "answer": torch.zeros(2),
    }
    assert found(batch) == {
        "input_ids": 1, "labels": 1, "attention_mask": 2, "position_ids": 2, "embeddings": 1
    }  # fmt: skip
    assert found((ids, ids.clone())) == {0: 1, 1: 1}
    other = {"input_ids": ids, "labels": torch.zeros(2, 5, dtype=torch.long)}
    assert found(other) == {"input_ids": 1}
    assert found(other, decodes=True) == {"input_ids": 1, "labels": 1}
    assert found({"x": torch.zeros(4, 9, 2), "y": ids}, {"x": 1}) == {"x": 1}


@pytest.mark.parametrize(
    ("batch", "given", "said"),
    [
        (
            (torch.zeros(4, 6), torch.zeros(4, 3)),
            None,
            r"not clear what in the batch.*0 \(4, 6\), 1 \(4, 3\)",
        ),
        ({"x": torch.zeros(4, 6)}, {"y": 1}, "names 'y' with dimension 1, which is not there"),
        ({"x": torch.zeros(4, 6)}, {"x": 2}, r"names 'x' with dimension 2, which is of shape \(4, 6\)"),
        (
            {"input_ids": torch.zeros(2, 5), "odd": torch.zeros(2, 5, 5)},
            None,
            "'odd'.*more than one dimension",
        ),
        ({"input_ids": torch.zeros(1, 5), "cu_seqlens": torch.zeros(3)}, None, "'cu_seqlens'"),
    ],
)
def test_what_is_not_clear_is_asked_for(batch, given, said):
    with pytest.raises(StepError, match=said):
        find_sequences(batch, given)


def test_only_sequences_of_a_batch_are_changed():
    batch = {"input_ids": torch.arange(6).view(2, 3), "name": ["a", "b"], "answer": torch.zeros(2)}
    cut = map_sequences(batch, find_sequences(batch, None), lambda t, dim: t.narrow(dim, 0, 1))
    assert cut["input_ids"].tolist() == [[0], [3]]
    assert cut["name"] == ["a", "b"]
    assert cut["answer"] is batch["answer"]


def test_outside_of_a_split_step_everything_is_torchs_own():
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attention(q, k, v, is_causal=True), expected)
    assert positions(4).tolist() == [0, 1, 2, 3]
    assert gather(q, 2) is q


def test_positions_are_those_of_the_whole_sequence():
    with activate(Cuts([Cut(8, 1, 2, None)])):
        assert positions(4).tolist() == [2, 3, 4, 5]
        with pytest.raises(StepError, match=r"its dimension 1 is no slice.*\[4\] tokens"):
            gather(torch.zeros(1, 5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 0}, "context=...*must be -1 for all ranks, or their number, got 0"),
        ({"check_tokens": -1}, "check_tokens=...*must not be negative, got -1"),
        ({"sequence": {"x": -1}}, "must map names.*got {'x': -1}"),
        ({"attention": "rings"}, "attention=...*must be one of all-gather, ulysses, ring, auto, got 'rings'"),
        ({"timeout_s": 0}, "timeout_s=...*above 0"),
    ],
)
def test_options_out_of_their_range_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ContextOptions(**options)


def job(ranks=4, **arguments):
    environment = LaunchEnvironment(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks)
    return Job(devices=resolve_devices("cpu"), environment=environment, **arguments)


class LongRows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x).relu()).square().mean()


def test_few_long_samples_need_less_memory_in_slices_and_choose_it_where_whole_ones_do_not_fit():
    batch, model = torch.zeros(1, 4096, 8), LongRows()
    with Trainer(devices="cpu", progress=False) as trainer:

        def table(memory):
            return trainer.estimate(model, None, batch, lambda m, x: m(x), devices=4, memory=memory)

        needs = {name: v.memory for name, v in table("1GiB").verdicts.items() if v.memory is not None}
        whole, split = needs["ddp"], needs["context"]
        assert split.activations == pytest.approx(whole.activations / 4, rel=0.01)
        assert table("1GiB").best != "context"
        found = table((whole.total + split.total) // 2)
    assert found.best == "context"
    assert "for sequences that one device has no memory for" in found.verdicts["context"].reason


class Attending(LongRows):
    def forward(self, x):
        keys = self.layer(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x[:, None], keys, keys.square()).mean()


def activations(algorithm):
    batch, options = torch.zeros(1, 4096, 8), {"context": {"attention": algorithm}}
    with Trainer(backend="context", devices="cpu", progress=False, options=options) as trainer:
        found = trainer.estimate(Attending(), None, batch, lambda m, x: m(x), devices=4).verdicts
    return found["ddp"].memory.activations, found["context"].memory.activations


def test_the_keys_that_ranks_exchange_are_in_the_estimate():
    attended = 2 * 4096 * 8 * 4
    whole, gathered = activations("all-gather")
    _, passed = activations("ring")
    assert gathered == pytest.approx(whole / 4 + 2 * attended, rel=0.02)
    assert passed == pytest.approx(whole / 4 + attended, rel=0.02)


class Heads(torch.nn.Module):
    """Attention by two heads, whose dtype, mask and dropout vary."""

    def __init__(self, **options):
        super().__init__()
        self.layer, self.options = torch.nn.Linear(8, 8), options

    def forward(self, x):
        parts = [self.layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for _ in range(3)]
        return torch.nn.functional.scaled_dot_product_attention(*parts, **self.options).mean()


def on_cards(model, dtype=torch.float32, tokens=4096, **options):
    """Return the memory of two ranks that share sequences on CUDA devices."""
    batch = torch.zeros(2, tokens, 8, dtype=dtype)
    table = estimate(model.to(dtype), None, batch, lambda m, x: m(x), devices=2, **options)
    return next(found.memory for found in table.layouts if found.layout.axes == {"data": 1, "context": 2})


@pytest.mark.parametrize(
    ("model", "options", "kernels"),
    [
        (Heads(), {"precision": "bf16-mixed"}, "attention by torch's flash kernel"),
        (Heads(), {}, "attention by torch's efficient kernel"),
        (
            Heads(attn_mask=torch.ones(4096, 4096, dtype=torch.bool)),
            {"precision": "bf16-mixed"},
            "attention by torch's efficient kernel, masks of 256 rows",
        ),
        (
            Heads(),
            {"dtype": torch.float64},
            (
                "attention by no fused kernel (flash: it does not take torch.float64; efficient: it does not "
                "take torch.float64; cuDNN: it does not take torch.float64), scores of 256 rows"
            ),
        ),
        (
            Heads(dropout_p=0.1),
            {"precision": "bf16-mixed"},
            "attention by no fused kernel, for its dropout: all of its mask, scores of 256 rows",
        ),
        (Attending(), {"tokens": 8}, "attention by torch's efficient kernel"),
    ],
)
def test_the_estimate_says_which_kernel_it_counts_on(model, options, kernels):
    need = on_cards(model, **options)
    assert need.kernels == kernels
    assert str(need).endswith(f"; {kernels}")


def test_the_table_of_layouts_names_the_kernel_below_what_starts_a_layout():
    table = estimate(Heads(), None, torch.zeros(2, 64, 8), lambda m, x: m(x), devices=2)
    rows = str(table).splitlines()
    at = rows.index("    attention by torch's efficient kernel")
    assert "context" in rows[at - 1]


def test_the_scores_that_are_in_memory_are_in_the_estimate():
    fused = on_cards(Heads()).activations
    tile = 256 * 4096 * 2 * 4 * 4  # of two heads, two samples of each rank, in float32
    assert on_cards(Heads(), torch.float64).activations > fused + 4 * tile
    drawn = 2 * 4 * 4096 * 4096
    assert on_cards(Heads(dropout_p=0.1)).activations == fused + drawn // 2 + 6 * tile


@pytest.mark.parametrize(
    ("tokens", "heads", "algorithm"),
    [(512, (4, 4), "all-gather"), (8192, (4, 4), "ulysses"), (8192, (8, 2), "all-gather")],
)
def test_the_cheapest_algorithm_of_attention_is_chosen_and_logged_once(tokens, heads, algorithm, caplog):
    cut = Cut(tokens, 0, 2, None)
    query, key = (torch.empty(1, count, cut.tokens, 32) for count in heads)
    with caplog.at_level("INFO", "tp_context"):
        for _ in range(2):
            assert _choose(Inputs(query, key, key), Rules(cut, cut, is_causal=True), cut) == algorithm
    assert [r.getMessage() for r in caplog.records] == [
        f"attention over {tokens} tokens on 2 ranks by {algorithm}"
    ]


def test_it_fits_several_processes_and_is_chosen_after_all_others():
    backend = backend_class("context")()
    verdict = backend.assess(job(options={"context": {"context": 2}}))
    assert verdict.score == 10
    assert "2 of 4 processes" in verdict.reason
    assert "one process" in backend.assess(job(1)).reason
    assert "not a multiple" in backend.assess(job(options={"context": {"context": 3}})).reason


def test_steps_that_do_the_same_are_checked_once_and_others_again():
    def wrapped(step):
        def run(model, batch):
            return step(model, batch)

        return run

    def one(model, batch):
        return batch

    def other(model, batch):
        return model

    assert step_identity(wrapped(one)) == step_identity(wrapped(one))
    assert step_identity(partial(wrapped, one)) == step_identity(partial(wrapped, one))
    assert step_identity(wrapped(one)) != step_identity(wrapped(other))
    assert step_identity(partial(wrapped, one)) != step_identity(partial(wrapped, other))


def test_a_step_is_another_one_where_a_flag_that_it_holds_has_changed():
    def made(use_auxiliary, rate):
        def run(model, batch):
            return batch * rate if use_auxiliary else model

        return run

    assert step_identity(made(True, 0.1)) == step_identity(made(True, 0.2))
    assert step_identity(made(True, 0.1)) != step_identity(made(False, 0.1))
    assert step_identity(partial(made, True)) != step_identity(partial(made, False))


def test_steps_of_two_objects_are_two_also_where_one_has_the_id_of_another():
    class Task:
        def __call__(self, model, batch):
            return batch

        def step(self, model, batch):
            return model

    task, other = Task(), Task()
    assert step_identity(task) == step_identity(task)
    assert step_identity(task.step) == step_identity(task.step)
    assert step_identity(task) != step_identity(other)
    assert step_identity(task.step) != step_identity(other.step)
    seen = {step_identity(Task()) for _ in range(20)}  # memory of one that ended is used again
    assert len(seen) == 20


def test_a_bias_is_sliced_where_it_is_one_of_queries_and_keys():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative_attention_bias = nn.Embedding(32, 4)

    class OfKeys(Attention):
        def compute_bias(self, query_length, key_length, device=None):
            return torch.zeros(1, 4, query_length, key_length)

    class OfBlocks(Attention):
        def compute_bias(self, block_length):
            return torch.zeros(1, 1, 4, block_length, 3 * block_length)

    replaced = Attention()
    replaced.compute_bias = OfKeys().compute_bias
    assert _has_relative_bias(OfKeys())
    assert _has_relative_bias(replaced)
    assert not _has_relative_bias(OfBlocks())


def test_positions_are_made_by_a_function_of_tokens_and_padding_alone():
    class Embeddings(nn.Module):
        padding_idx = 1

    class OfTokens(Embeddings):
        def create_position_ids_from_input_ids(self, input_ids, padding_idx, past=0):
            return input_ids + padding_idx + past

    class OfShapes(Embeddings):
        def create_position_ids_from_input_ids(self, shape):
            return torch.arange(shape[1])

    class OfMore(Embeddings):
        def create_position_ids_from_input_ids(self, input_ids, padding_idx, segments):
            return input_ids + segments

    assert _numbering_of(OfTokens()) is not None
    assert _numbering_of(OfShapes()) is None
    assert _numbering_of(OfMore()) is None


def test_inputs_of_a_decoder_are_made_from_labels_where_its_forward_takes_them():
    class Decoder(nn.Module):
        def forward(self, decoder_input_ids=None, labels=None):
            return labels

        def prepare_decoder_input_ids_from_labels(self, labels):
            return labels

    class OfOthers(Decoder):
        def prepare_decoder_input_ids_from_labels(self, batch):
            return batch["labels"]

    class WithoutInputs(Decoder):
        def forward(self, labels=None):
            return labels

    assert _decoder_inputs_of(Decoder()) is not None
    assert _decoder_inputs_of(OfOthers()) is None
    assert _decoder_inputs_of(WithoutInputs()) is None


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_no_slice_is_as_long_as_what_else_a_model_attends_to(size):
    length = 16 * size
    for avoid in ({16}, {15, 16, 17}):
        cuts = [Cut(length, rank, size, None, avoid=avoid) for rank in range(size)]
        assert not avoid & set(cuts[0].counts)
        tokens = sorted(n for cut in cuts for a, b in cut.own for n in range(a, b))
        assert tokens == list(range(length))
    assert Cut(length, 0, size, None, avoid={7}) == Cut(length, 0, size, None)
    with pytest.raises(StepError, match=r"cannot be cut .* has 1, 2, 3 entries; give longer sequences"):
        Cut(2 * size, 0, size, None, avoid={1, 2, 3})


def test_sizes_beside_a_sequence_grow_with_it_where_they_are_a_part_of_it():
    latents = OtherSizes(frozenset({8}), (21,))
    assert latents.beside(16) == {8}
    pooled = OtherSizes(frozenset({11}), (21,))  # every second token
    assert pooled.beside(64) == {11, 32}
    assert OtherSizes(frozenset({10}), (21,)).beside(65) == {10, 32, 33}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
def test_a_check_has_few_of_the_gradients_at_once(monkeypatch):
    seen = []
    monkeypatch.setattr(_check, "_sketched", lambda grad, seed: seen.append(grad.shape))
    model = nn.Sequential(*(nn.Linear(3072, 3072, bias=False) for _ in range(6)))  # 216 MiB
    for parameter in model.parameters():
        parameter.data.zero_()  # quicker than drawing them
    loss = model(torch.ones(1, 3072)).sum()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    _check._gradients(loss, list(model.named_parameters()))
    assert resident("VmHWM") - before < 108 << 20
    assert len(seen) == 6
