"""A network of your own: convolutions and a head.

memest fits examples.vision.own_net:build --dim H=224 --batch 64 --fp16 --loop plain --gpu t4
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        layers, channels = [], 3
        for out in (width, 2 * width, 4 * width, 8 * width):
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.BatchNorm2d(out)]
            layers += [nn.ReLU()]
            channels = out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(self.body(x))


def build(classes=10, width=64):
    """The module, a batch (B is --batch, H is --dim), and the loss."""
    return Net(classes, width), ("x:float32[B,3,H,H]", "y:int64[B]"), "cross_entropy"


def step(model, batch):
    """The same with a step of your own: two views of each image, and their distance."""
    one, other = model(batch["x"]), model(batch["x"].flip(-1))
    return nn.functional.cross_entropy(one, batch["y"]) + torch.dist(one, other)
