"""A small GPT-2 and texts of many lengths: what the programs beside this file share."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

EPOCHS, BATCH = 2, 8


def loaders():
    """Return batches to train and to validate with; half of the texts have 3 tokens of 10 that count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(40, (22, 10), generator=generator)
    lengths = torch.tensor([3 if i % 2 else 10 for i in range(22)])
    labels = torch.where(torch.arange(10) < lengths[:, None], ids, -100)
    return DataLoader(TensorDataset(ids, labels), BATCH), DataLoader(TensorDataset(ids, labels), 5)


def make():
    torch.manual_seed(0)
    sizes = {"n_positions": 10, "n_embd": 8, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, **sizes, **off, **ends)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def token_loss(model, batch):
    """Return the mean loss of the tokens that count, and how many they are."""
    ids, labels = batch
    scores, labels = model(input_ids=ids).logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss, (labels != -100).sum()


def report(model, val_loss):
    """Print the last validation, of all tokens, and the sum of all weights' sizes."""
    print(f"val_loss {val_loss:.6f}")
    print(f"weights {sum(p.detach().abs().sum() for p in model.parameters()):.6f}")
