"""A GAN of small pictures, with transposed convolutions: what the programs beside this file share."""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 2, 8


def loader():
    """Return batches of pictures, each with the noise that its fake is made of; the last is not full."""
    generator = torch.Generator().manual_seed(3)
    real = torch.randn(22, 1, 8, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(22, 4, 1, 1, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(real, noise), BATCH)


def make():
    """Return the generator, the discriminator, and an optimizer for each."""
    torch.manual_seed(1)
    gen = [nn.ConvTranspose2d(4, 4, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1)]
    disc = [nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)]
    models = nn.Sequential(*gen).double(), nn.Sequential(*disc).double()
    return *models, *(torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in models)


def disc_loss(disc, gen, batch):
    real, noise = batch
    return softplus(-disc(real)).mean() + softplus(disc(gen(noise).detach())).mean()


def gen_loss(gen, disc, batch):
    return softplus(-disc(gen(batch[1]))).mean()


def report(gen, disc):
    """Print what both losses came to over all pictures, and the sum of all weights' sizes."""
    with torch.no_grad():
        batch = loader().dataset.tensors
        print(f"loss_d {disc_loss(disc, gen, batch):.6f}")
        print(f"loss_g {gen_loss(gen, disc, batch):.6f}")
        print(f"weights {sum(p.abs().sum() for m in (gen, disc) for p in m.parameters()):.6f}")
