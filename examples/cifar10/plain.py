"""A small ResNet on CIFAR-10, with random crops and flips, and a cosine schedule."""

import argparse
from itertools import islice

import torch
from torch import nn
from torchvision import transforms

from evenstep import weights_sha256
from evenstep.data.sources import open_source


class Block(nn.Module):
    def __init__(self, num_in, num_out):
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.around = nn.Conv2d(num_in, num_out, 1, stride=2, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(num_out), nn.BatchNorm2d(num_out)])

    def forward(self, x):
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.around(x))


class Transformed(torch.utils.data.Dataset):
    def __init__(self, images, *steps):
        self.images = images
        self.transform = transforms.Compose([*steps, transforms.Normalize(images.mean, images.std)])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        return self.transform(image), label


def endless(loader):
    while True:
        yield from loader


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def is_right(model, batch):
    images, labels = batch
    return (model(images).argmax(1) == labels).float()


def main(args):
    torch.manual_seed(0)
    data = open_source(args.data, data_dir="data", cache_dir=None)
    augmentation = transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()
    train_set, test_set = Transformed(data.train, *augmentation), Transformed(data.test)
    blocks = Block(16, 32), Block(32, 64), Block(64, 128)
    head = nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *blocks, *head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    train = torch.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
    for batch in islice(endless(train), args.steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        test = torch.utils.data.DataLoader(test_set, batch_size=250)
        accuracy = torch.cat([is_right(model, batch) for batch in test]).mean().item()
    return accuracy, weights_sha256(model.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", default="auto", help="auto: CIFAR-10 if it can be had, else small digits")
    args = parser.parse_args()
    accuracy, digest = main(args)
    print(f"accuracy {accuracy:.3f}, weights {digest[:16]}")
