"""A model of transformers with adapters of Hugging Face's peft: they alone are trained, on every backend."""

import functools
from importlib.util import find_spec

import pytest
import torch
import tp_shard as ts
from torch.utils.data import DataLoader
from tp_core.testing import run_ranks
from tp_trainer import Checkpoints, Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft's own question
]

EPOCHS = 2


def texts():
    ids = torch.randint(5, 40, (14, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[:3].sum() % 2} for row in ids]


def make(*, is_split=False):
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=8, num_labels=2, **sizes, **off)
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    model = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora).double()
    if is_split:
        if not torch.distributed.is_initialized():
            ts.distributed.init_process_group()
        model = ts.parallelize(model, ts.plans.auto(model, verbose=False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.05)


def step(model, batch):
    scores = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(scores, batch["labels"])


def weights(model):
    import peft

    state = ts.collect_state_dict(model, model.state_dict())  # of whole tensors, if it is split
    found = peft.get_peft_model_state_dict(model, state_dict=state)
    return {name: tensor.clone() for name, tensor in found.items()}


def loader():
    return DataLoader(texts(), batch_size=4)


def train(where, folder=None, max_steps=None):
    model, optimizer = make(is_split=where["backend"] == "shard")
    with Trainer(seed=0, progress=False, **where) as trainer:
        trainer.fit(
            model,
            optimizer,
            loader(),
            step=step,
            epochs=EPOCHS,
            max_steps=max_steps,
            checkpoint=folder and Checkpoints(folder, every_steps=2),
            resume=folder and "auto",
        )
        return weights(model)


def whole_and_resumed(where, folder):
    whole = train(where)
    train(where, folder, max_steps=5)
    return whole, train(where, folder)


@functools.cache
def by_hand():
    model, optimizer = make()
    for _ in range(EPOCHS):
        for batch in loader():
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
    return weights(model)


def check(found):
    whole, parts = found
    assert any("lora_B" in name for name in whole)
    for name, expected in by_hand().items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(parts[name], whole[name])


@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_adapters_are_trained_as_by_hand_and_resumed(tmp_path, backend):
    devices = "cpu" if backend == "single" else ["cpu", "cpu"]
    check(whole_and_resumed({"devices": devices, "backend": backend}, tmp_path))


@pytest.mark.parametrize("backend", ["ddp", "shard"])
def test_adapters_are_trained_as_by_hand_and_resumed_on_two_ranks(tmp_path, backend):
    for found in run_ranks(whole_and_resumed, 2, {"devices": "cpu", "backend": backend}, tmp_path):
        check(found)
