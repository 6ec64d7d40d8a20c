"""Learn to read handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64)
y = torch.tensor(digits.target)
train = DataLoader(TensorDataset(x[:1440], y[:1440]), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(x[1440:], y[1440:]), batch_size=256)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(1, 6):
    for images, labels in train:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in test)
    print(f"epoch {epoch}: accuracy {correct / len(test.dataset):.3f}")
