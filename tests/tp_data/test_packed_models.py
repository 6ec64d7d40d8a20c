"""Models of transformers compute the same for packed rows as for each document by itself."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from tp_core.errors import ModelError
from tp_data import Item, Packed, check_packing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("transformers"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers"),
]
LENGTHS = (7, 12, 5, 40, 3, 9, 1)
SMALL = {"vocab_size": 64, "max_position_embeddings": 64}
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def make(name, attention="sdpa"):
    import transformers as t

    torch.manual_seed(0)
    config, model = {
        "llama": (lambda: t.LlamaConfig(**SMALL, **WIDE, num_key_value_heads=2), "LlamaForCausalLM"),
        "qwen2": (lambda: t.Qwen2Config(**SMALL, **WIDE, num_key_value_heads=2), "Qwen2ForCausalLM"),
        "gpt2": (
            lambda: t.GPT2Config(
                vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
            ),
            "GPT2LMHeadModel",
        ),
        "bert": (lambda: t.BertConfig(**SMALL, **WIDE), "BertForMaskedLM"),
        "mamba": (
            lambda: t.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
            "MambaForCausalLM",
        ),
    }[name]
    made = config()
    made._attn_implementation = attention
    return getattr(t, model)(made).double().eval()  # eval: the configurations have dropout


def documents(*, causal):
    found = {}
    for i, length in enumerate(LENGTHS):
        ids = torch.randint(2, 64, (length,))
        found[i] = {"input_ids": ids}
        if not causal:
            found[i]["labels"] = torch.where(torch.rand(length) < 0.4, ids, -100)
    return found


def packed(samples, **options):
    batcher = Packed(32, 3, **options)
    rows = batcher.next_batch(iter([Item(i, batcher.cost(s)) for i, s in samples.items()]))
    return batcher, rows, batcher.collate(rows, samples)


def own_loss(logits, labels, *, causal):
    """Return the sum of the losses in the model's own precision: transformers' loss is made in float32."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


@pytest.mark.parametrize(
    ("name", "arguments", "attention"),
    [
        ("llama", "mask", "sdpa"),
        ("llama", "positions", "sdpa"),
        ("llama", "positions", "eager"),
        ("qwen2", "mask", "sdpa"),
        ("qwen2", "positions", "sdpa"),
        ("gpt2", "mask", "sdpa"),
        ("gpt2", "positions", "sdpa"),
        ("bert", "mask", "sdpa"),
    ],
)
def test_loss_and_gradients_are_those_of_documents_alone(name, arguments, attention):
    causal = name != "bert"
    model, samples = make(name, attention), documents(causal=causal)
    _, rows, batch = packed(samples, arguments=arguments, causal=causal)
    check_packing(model, batch)
    output = model(**batch)
    loss = own_loss(output.logits, batch["labels"], causal=causal) / batch.weight()
    loss.backward()
    assert abs(output.loss.item() - loss.item()) < 1e-6
    grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    total = 0.0
    for row in rows:
        for p in row.pieces:  # the document of 40 tokens is in two pieces
            piece = {n: v[None, p.start : p.stop] for n, v in samples[p.position].items()}
            labels = piece.get("labels", piece["input_ids"])
            part = (
                own_loss(model(input_ids=piece["input_ids"]).logits, labels, causal=causal) / batch.weight()
            )
            part.backward()
            total += part.item()
    assert abs(total - loss.item()) < 1e-6
    for one, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-6)


def test_an_attention_of_lengths_gets_the_bounds_of_documents():
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(module, query, key, value, mask, cu_seq_lens_q=None, max_length_q=None, **_):
        assert mask is None
        bounds, rows = cu_seq_lens_q.tolist(), query.size(0)
        q, k, v = (
            x.transpose(1, 2).reshape(-1, x.size(1), x.size(3)).transpose(0, 1) for x in (query, key, value)
        )
        k, v = (x.repeat_interleave(module.num_key_value_groups, 0) for x in (k, v))
        assert max_length_q == max(b - a for a, b in pairwise(bounds))
        pieces = [
            F.scaled_dot_product_attention(*(x[None, :, a:b] for x in (q, k, v)), is_causal=True)[0]
            for a, b in pairwise(bounds)
        ]
        out = torch.cat(pieces, 1).transpose(0, 1)
        return out.reshape(rows, -1, *out.shape[1:]), None

    AttentionInterface.register("of_lengths", attention)
    AttentionMaskInterface.register("of_lengths", lambda **_: None)
    samples = documents(causal=True)
    _, _, batch = packed(samples, arguments="flash")
    _, _, other = packed(samples, arguments="mask")
    model = make("llama", "of_lengths")
    check_packing(model, batch, step=lambda m, b: m(**b).loss)
    expected = make("llama")(**other).loss
    assert abs(model(**batch).loss.item() - expected.item()) < 1e-6


@pytest.mark.parametrize(
    ("name", "arguments", "attention", "message"),
    [
        ("mamba", "positions", "eager", "mixer.*computes something else for a document in a row with others"),
        ("mamba", "mask", "eager", "the step fails on a short row with packed documents"),
        ("llama", "mask", "eager", "computes something else"),  # it adds a mask of bool to its scores
        ("llama", "flash", "sdpa", "computes something else"),
    ],
)
def test_what_mixes_documents_up_is_refused(name, arguments, attention, message):
    _, _, batch = packed(documents(causal=True), arguments=arguments)
    with pytest.raises(ModelError, match=message):
        check_packing(make(name, attention), batch)


def test_a_cache_that_hides_the_positions_is_refused():
    _, _, batch = packed(documents(causal=True), arguments="positions")
    with pytest.raises(ModelError, match="computes something else"):
        check_packing(make("llama"), batch, step=lambda m, b: m(**{**b, "use_cache": True}).loss)


def test_an_encoder_packed_as_a_decoder_is_refused():
    _, _, batch = packed(documents(causal=True))
    with pytest.raises(ModelError, match="computes something else"):
        check_packing(make("bert"), batch)
