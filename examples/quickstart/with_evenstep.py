"""Tell three spiral arms apart, and save what was learned."""

import torch
from torch import nn

import evenstep


def spirals(n, seed):
    generator = torch.Generator().manual_seed(seed)
    arms = torch.arange(n) % 3
    radius = torch.rand(n, generator=generator)
    angle = 5 * radius + 2.1 * arms + 0.2 * torch.randn(n, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return torch.utils.data.TensorDataset(points, arms)


def loss(model, batch):
    points, arms = batch
    return nn.functional.cross_entropy(model(points), arms)


def main(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = evenstep.TrainState(model, optimizer)
    for batch in evenstep.Loader(spirals(3000, seed=1), batch_size=60).batches(state, epochs=6):
        evenstep.train_step(state, batch, loss)
    points, arms = spirals(900, seed=2).tensors
    accuracy = (model(points).argmax(1) == arms).float().mean().item()
    return accuracy, model.state_dict()


if __name__ == "__main__":
    accuracy, weights = evenstep.launch(main, lanes=4)
    torch.save(weights, "spirals.pt")
    print(f"accuracy {accuracy:.3f}")
