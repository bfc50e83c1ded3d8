"""Handwritten digits by a small convolution; the data come with scikit-learn."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


def model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def dataset(split):
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    held_out = [index % 5 == 0 for index in range(len(images))]
    return [
        (image, int(label))
        for image, label, out in zip(images, labels, held_out)
        if out == (split == "validation")
    ]


def collate(samples):
    images, labels = zip(*samples)
    return torch.stack(images), torch.tensor(labels)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def metrics(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).sum()}
