"""Learn to read handwritten digits."""

import torch
import tp_shard as ts
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64)
y = torch.tensor(digits.target)
train = DataLoader(TensorDataset(x[:1440], y[:1440]), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(x[1440:], y[1440:]), batch_size=256)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
ts.distributed.init_process_group()
model = ts.parallelize(model, {"0": ts.Column(), "2": ts.Row()})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(model, batch):
    images, labels = batch
    scores = model(images)  # (batch, 10)
    return {
        "loss": nn.functional.cross_entropy(scores, labels),
        "accuracy": (scores.argmax(1) == labels).float().mean(),
    }


with Trainer(seed=0) as trainer:
    history = trainer.fit(
        model,
        optimizer,
        train,
        step=step,
        epochs=100,
        validation=test,
        checkpoint="good",
        resume="auto",
        callbacks=["enough"],
    )
    if trainer.is_main:
        last = history[-1].val
        print(f"{len(history)} epochs, loss {last['loss']:.6f}, accuracy {last['accuracy']:.3f}")
