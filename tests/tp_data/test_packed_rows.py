"""Rows of documents, padded batches, and the check that a model keeps documents apart."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tp_core import recursive_to
from tp_core.errors import ConfigError, LoaderError, ModelError
from tp_data import (
    Item,
    Packed,
    Piece,
    RowForm,
    SampleRow,
    TokenBudget,
    check_packing,
    document_block_mask,
    document_mask,
)

SAMPLES = {0: {"input_ids": [5, 8, 2]}, 1: {"input_ids": [7, 4]}, 2: {"input_ids": list(range(1, 7))}}


class Decoder(nn.Module):
    """One layer of causal attention; it sees documents by what it is given."""

    def __init__(self, *, uses_mask=True, uses_positions=True, mixes=False):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(16, 8), nn.Embedding(64, 8), nn.Linear(8, 16)
        self.around = nn.Conv1d(8, 8, 3, padding=2) if mixes else None
        self.uses_mask, self.uses_positions = uses_mask, uses_positions

    def forward(self, input_ids, position_ids=None, attention_mask=None, labels=None):
        if position_ids is None or not self.uses_positions:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)[None]
        hidden = self.tokens(input_ids) + self.places(position_ids)
        if self.around is not None:
            hidden = hidden + self.around(hidden.transpose(1, 2))[..., :-2].transpose(1, 2)
        mask = attention_mask[:, 0] if self.uses_mask and attention_mask is not None else None
        seen = F.scaled_dot_product_attention(hidden, hidden, hidden, mask, is_causal=mask is None)
        logits = self.head(hidden + seen)
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return {"loss": loss, "logits": logits}


def packed(samples=SAMPLES, length=8, **options):
    batcher = Packed(length, 2, **options)
    rows = batcher.next_batch(iter([Item(i, batcher.cost(s)) for i, s in samples.items()]))
    return batcher.collate(rows, samples)


def test_positions_and_labels_begin_anew_in_each_document():
    batch = RowForm(arguments="documents").make([[(SAMPLES[0], 0, 3), (SAMPLES[1], 0, None)]], 6)
    assert batch["input_ids"].tolist() == [[5, 8, 2, 7, 4, 0]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, -1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 8, 2, -100, 4, -100]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6]
    assert int(batch.weight()) == 3
    assert batch.measure() == {"tokens": 5.0, "padded_tokens": 6.0, "labels": 3.0}


def test_each_form_has_its_arguments():
    mask = packed(arguments="mask")["attention_mask"]
    assert mask.shape == (2, 1, 8, 8)
    assert mask.dtype is torch.bool
    assert packed(arguments="positions")["use_cache"] is False
    flash = packed(arguments="flash")
    assert flash["cu_seq_lens_q"].dtype is torch.int32
    assert int(flash["cu_seq_lens_k"][-1]) == 16
    assert flash["max_length_q"] == flash["max_length_k"] == 6


def test_labels_of_an_encoder_stay_at_their_tokens():
    samples = {0: {"input_ids": [5, 8, 2], "labels": [5, -100, 2]}}
    batch = packed(samples, 4, causal=False)
    assert batch["labels"].tolist() == [[5, -100, 2, -100]]
    assert bool(batch["attention_mask"][0, 0, 0, 2])
    assert int(batch.weight()) == 2


def test_a_piece_of_a_document_is_cut_out_of_all_fields():
    samples = {0: {"input_ids": list(range(10)), "labels": list(range(20, 30)), "kind": [1] * 10}}
    batch = packed(samples, 6)
    rows = sorted(batch["input_ids"].tolist())
    assert rows == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 0]]
    assert sorted(batch["labels"].tolist())[1] == [-100, 27, 28, 29, -100, -100]
    assert batch["kind"].sum() == 10


def test_a_row_that_only_fills_up_counts_nothing():
    batcher = Packed(8, 3, last="pad")
    rows = batcher.next_batch(iter([Item(i, batcher.cost(s)) for i, s in SAMPLES.items()]))
    assert [row.weight for row in rows] == [1.0, 1.0, 0.0]
    batch = batcher.collate(rows, SAMPLES)
    assert bool((batch["labels"][2] == -100).all())
    again = batcher.collate([SampleRow(rows[0].pieces, weight=0.0)], SAMPLES)  # a stand-in
    assert int(again.weight()) == 0
    assert int(batcher.collate(rows[2:], SAMPLES).weight()) == 0
    assert batcher.count(rows) == 3


def test_padded_batches_have_masks_and_ignored_labels():
    batcher = TokenBudget(64, buckets=(4, 8), padding=9)
    samples = {
        0: {"input_ids": [5, 8, 2], "labels": [5, 8, 2], "id": 3},
        1: {"input_ids": [7], "labels": [7], "id": 4},
    }
    batch = batcher.collate([SampleRow((Piece(0, 0, 3),)), SampleRow((Piece(1, 0, 1),))], samples)
    assert batch["input_ids"].tolist() == [[5, 8, 2, 9], [7, 9, 9, 9]]
    assert batch["labels"].tolist() == [[5, 8, 2, -100], [7, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["id"].tolist() == [3, 4]
    assert int(batch.weight()) == 2
    assert batch.measure() == {"tokens": 4.0, "padded_tokens": 8.0, "labels": 2.0}


def test_a_collate_function_of_your_own_makes_the_batch():
    batcher = TokenBudget(64, collate=lambda samples: {"labels": torch.tensor(samples)}, causal=False)
    batch = batcher.collate(
        [SampleRow((Piece(0, 0, 1),)), SampleRow((Piece(1, 0, 1),))], {0: [1, -100], 1: [2, 3]}
    )
    assert int(batch.weight()) == 3
    assert TokenBudget(64, collate=len).collate([SampleRow((Piece(0, 0, 1),))], {0: "a"}) == 1


@pytest.mark.slow
def test_the_block_mask_is_the_mask():
    documents = torch.tensor([[0] * 100 + [1] * 156, [0] * 250 + [-1] * 6])
    for causal in (True, False):
        mask = document_block_mask(documents, causal=causal)
        q = torch.arange(256)
        for row in range(2):
            dense = mask.mask_mod(torch.tensor(row), torch.tensor(0), q[:, None], q[None])
            assert torch.equal(dense, document_mask(documents, causal=causal)[row, 0])
    blocks = document_block_mask(torch.arange(512)[None] // 128)
    assert blocks.sparsity() > 70


def test_packed_documents_have_the_loss_and_gradients_of_padded_ones():
    torch.manual_seed(0)
    model = Decoder().double()
    model(**packed())["loss"].backward()
    packed_grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    losses = []
    for sample in SAMPLES.values():
        ids = torch.tensor([sample["input_ids"]])
        losses.append(model(ids, labels=ids)["loss"] * (ids.numel() - 1))
    (sum(losses) / sum(len(s["input_ids"]) - 1 for s in SAMPLES.values())).backward()
    for one, other in zip(packed_grads, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=0, atol=1e-12)


def test_the_check_accepts_a_model_that_keeps_documents_apart():
    model = Decoder().train()
    before = torch.get_rng_state()
    check_packing(model, packed())
    check_packing(model, packed(), step=lambda m, b: m(**b)["loss"])
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


def test_checks_at_the_same_time_leave_the_generator_and_the_compiler_as_they_were():
    graphs, (began, both, ended) = [], (threading.Event() for _ in range(3))
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(1) or graph.forward)
    compiled(torch.zeros(1))
    model = Decoder()
    before = torch.get_rng_state()

    def first(model, batch):
        began.set()
        assert both.wait(60)
        torch.rand(1)
        return model(**batch)["loss"]

    def second(model, batch):
        both.set()
        assert ended.wait(60)
        return model(**batch)["loss"]

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(check_packing, model, packed(), step=first)
        assert began.wait(60)
        other = threads.submit(check_packing, model, packed(), step=second)
        one.result(60)
        ended.set()
        other.result(60)
    torch.compiler.reset()
    compiled(torch.zeros(1))
    assert len(graphs) == 2
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Decoder(uses_mask=False), r"'head' \(Linear\) computes something else"),
        (Decoder(uses_positions=False), r"'places' \(Embedding\) computes something else"),
        (Decoder(mixes=True), r"'head' \(Linear\) computes something else"),
    ],
)
def test_the_check_refuses_a_model_that_mixes_documents_up(model, message):
    with pytest.raises(ModelError, match=message):
        check_packing(model, packed())


def test_the_check_notices_a_step_that_drops_the_mask():
    def step(model, batch):
        return model(batch["input_ids"], batch["position_ids"], labels=batch["labels"])["loss"]

    with pytest.raises(ModelError, match="mixes up the documents of packed rows"):
        check_packing(Decoder(), packed(), step=step)


def test_the_check_notices_a_loss_over_other_labels():
    def step(model, batch):
        logits = model(**batch)["logits"]
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:])  # across documents

    with pytest.raises(ModelError, match=r"its loss is .* for three documents in a row, and"):
        check_packing(Decoder(), packed(), step=step)


def test_the_check_accepts_a_loss_that_is_a_sum():
    check_packing(Decoder(), packed(), step=lambda m, b: m(**b)["loss"] * b.weight())


def test_a_batch_is_checked_unless_it_is_a_slice_or_says_that_it_is_not():
    def fail(model, batch):
        raise RuntimeError

    batch = packed()
    with pytest.raises(ModelError, match="fails on a short row"):
        batch.check(fail, Decoder())
    packed(check=False).check(fail, Decoder())
    batch["input_ids"] = batch["input_ids"][:, :4]
    batch.check(fail, Decoder())


def test_a_step_that_fails_on_a_packed_row_is_named():
    with pytest.raises(ModelError, match="with packed documents, by which packing is checked: TypeError"):
        check_packing(nn.Linear(2, 2), packed())
    with pytest.raises(ModelError, match="got one of padded samples"):
        check_packing(nn.Linear(2, 2), TokenBudget(64).collate([SampleRow((Piece(0, 0, 3),))], SAMPLES))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({0: {"input_ids": [1, 2], "name": "a"}}, "'name' of a sample cannot become a tensor: 'a'"),
        (
            {0: {"input_ids": [1, 2], "id": 3}},
            r"'id' of a sample, of shape \(\), has not one entry for each of its 2",
        ),
        ({0: {"input_ids": [1, 2], "attention_mask": [1, 0]}}, "without padding to pack them"),
        ({0: {"input_ids": [1]}, 1: {"input_ids": [1], "kind": [2]}}, "samples have different fields"),
    ],
)
def test_a_sample_that_cannot_be_packed_is_refused(samples, message):
    with pytest.raises(LoaderError, match=message):
        packed(samples)


def test_samples_that_cannot_be_padded_are_refused():
    def padded(*samples):
        rows = [SampleRow((Piece(i, 0, 2),)) for i in range(len(samples))]
        return TokenBudget(64).collate(rows, dict(enumerate(samples)))

    with pytest.raises(LoaderError, match="has no field 'kind', which the first of its batch has"):
        padded({"input_ids": [1, 2], "kind": 1}, {"input_ids": [1, 2]})
    with pytest.raises(LoaderError, match=r"'boxes' of samples has shapes \[\(3,\), \(1,\)\]"):
        padded({"input_ids": [1, 2], "boxes": [1, 2, 3]}, {"input_ids": [1, 2], "boxes": [1]})


def test_a_form_must_be_known():
    with pytest.raises(ConfigError, match="arguments='blocks': take one of"):
        RowForm(arguments="blocks")


def test_a_batch_keeps_what_it_knows_when_it_is_moved_or_copied():
    batch = packed()
    for other in (recursive_to(batch, "meta"), copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        assert type(other) is type(batch)
        assert (other.form, other.tokens, other.causal) == (batch.form, batch.tokens, batch.causal)
        assert other.keys() == batch.keys()
