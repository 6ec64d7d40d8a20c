"""A small Llama with LoRA, and chats of many lengths: what the programs beside this file share."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

EPOCHS, BATCH, ACCUMULATE, RATE, WARMUP = 2, 4, 2, 3e-3, 4


def chats(count=44):
    """Return ids and labels; prompts, of a third of the tokens, are not learned."""
    draw = torch.Generator().manual_seed(3)
    lengths = [8 + 40 * (i % 5) for i in range(count)]
    ids = [torch.randint(3, 512, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": row, "labels": [-100] * (len(row) // 3) + row[len(row) // 3 :]} for row in ids]


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    filling = {"input_ids": 0, "labels": -100}
    batch = {k: torch.tensor([r[k] + [v] * (longest - len(r[k])) for r in rows]) for k, v in filling.items()}
    used = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return batch | {"attention_mask": torch.tensor(used)}


def loader():
    return DataLoader(chats(), BATCH, collate_fn=collate)


def make():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    base = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@torch.no_grad()
def report(model):
    """Print the mean loss of all tokens that are learned, and the sum of the adapters' sizes."""
    total, count = 0.0, 0
    for batch in loader():
        n_tokens = int((batch["labels"][:, 1:] != -100).sum())
        total, count = total + model(**batch).loss.item() * n_tokens, count + n_tokens
    print(f"loss {total / count:.5f}")
    print(f"weights {sum(p.double().abs().sum() for p in trained(model)):.3f}")
