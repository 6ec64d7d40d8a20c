"""A model in float32 whose activations are computed again in the backward pass is checked and trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tp_context import positions
from tp_trainer import Trainer, checkpoint_activations

TOKENS, WIDTH, WORDS = 13, 8, 11


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.mixing = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        parts = self.mixing(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.dropout(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, call, dropout):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.call = call

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places(positions(tokens.size(1)))
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def plain(block, x):
    return block(x)


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def recomputed_twice(block, x):
    return checkpoint(recomputed, block, x, use_reentrant=False)


def compiled(block, x):
    return checkpoint(torch.compile(block, backend="eager"), x, use_reentrant=False)


def step(model, batch):
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    return {"loss": loss, "weight": labels.numel()}


def train(backend, call, dropout=0.0, keep=None):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Decoder(call, dropout)
    if keep is not None:
        checkpoint_activations(model, Block, keep=keep)
    rows = torch.randint(WORDS, (6, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    loader = DataLoader([(row[:-1], row[1:]) for row in rows], batch_size=2)
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False) as trainer:
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=step, epochs=1)
        return {name: tensor.clone() for name, tensor in trainer.session.model_state(model).items()}


@pytest.mark.parametrize(
    ("call", "dropout", "keep"),
    [
        (recomputed, 0.0, None),
        (recomputed, 0.3, None),
        pytest.param(recomputed_twice, 0.0, None, marks=pytest.mark.slow),
        pytest.param(compiled, 0.0, None, marks=pytest.mark.slow),  # imports torch's compiler
        pytest.param(plain, 0.3, "inputs", marks=pytest.mark.slow),
        (plain, 0.0, "matmuls"),
    ],
)
def test_recomputed_blocks_train_as_on_one_device(two_ranks, call, dropout, keep):
    expected = train("single", plain, dropout)
    for found in two_ranks.run(train, "context", call, dropout, keep):
        torch.testing.assert_close(found, expected)
