"""A small BERT that says which of two classes a text is of: what the programs beside this file share."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

EPOCHS, BATCH = 3, 8


def texts(n, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 40, (n, 12), generator=generator)
    labels = (tokens[:, :4].sum(1) > 88).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def loaders():
    """Return batches to train and to validate with; the last of each is not full."""
    return DataLoader(texts(35, seed=0), BATCH), DataLoader(texts(33, seed=1), BATCH)


def make():
    """Return the model, its optimizer with two groups of parameters, and a warm-up by steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=2, **sizes, **off)
    model = BertForSequenceClassification(config).double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return model, optimizer, warmup


def report(model, metrics):
    """Print what training came to: metrics of the last epoch, and the sum of all weights' sizes."""
    for name in ("val_loss", "val_f1", "val_auroc"):
        print(f"{name} {float(metrics[name]):.6f}")
    print(f"weights {sum(p.detach().abs().sum() for p in model.parameters()):.6f}")
