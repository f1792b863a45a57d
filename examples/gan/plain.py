"""A GAN: a generator learns to put points on a ring, and a critic to tell them from the real ones."""

import argparse
import math
from itertools import islice

import torch
from torch import nn
from torch.nn.functional import softplus

from evenstep import weights_sha256


def ring(n, seed):
    """Points in eight heaps on a circle."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randint(8, (n,), generator=generator) * (math.tau / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2, generator=generator)


def distance(a, b):
    """The energy distance of two clouds of points (Szekely and Rizzo, 2013): 0 if they are alike."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def network(num_in, num_out):
    return nn.Sequential(
        nn.Linear(num_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_out)
    )


def endless(loader):
    while True:
        yield from loader


def main(args):
    torch.manual_seed(0)
    generator, critic = network(8, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.001, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.002, betas=(0.5, 0.9))

    def critic_loss(model, batch):
        (real,) = batch
        fake = generator(torch.randn(len(real), 8)).detach()
        return softplus(-model(real)).mean() + softplus(model(fake)).mean()

    def generator_loss(model, batch):
        return softplus(-critic(model(torch.randn(len(batch[0]), 8)))).mean()

    train_set = torch.utils.data.TensorDataset(ring(8000, seed=1))
    train = torch.utils.data.DataLoader(train_set, batch_size=128, shuffle=True)
    for batch in islice(endless(train), args.steps):
        critic_optimizer.zero_grad()
        critic_loss(critic, batch).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss(generator, batch).backward()
        generator_optimizer.step()
    with torch.no_grad():
        made = generator(torch.randn(1000, 8, generator=torch.Generator().manual_seed(2)))
    both = nn.ModuleList([generator, critic])
    return distance(made, ring(1000, seed=3)), weights_sha256(both.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    found, digest = main(args)
    print(f"distance {found:.3f}, weights {digest[:16]}")
