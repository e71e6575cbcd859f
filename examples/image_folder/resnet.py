"""A ResNet for small images, in plain torch, after https://arxiv.org/abs/1512.03385, section 4.2."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F


class Block(torch.nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.first_norm = torch.nn.BatchNorm2d(outer)
        self.second = torch.nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.second_norm = torch.nn.BatchNorm2d(outer)
        self.shortcut = torch.nn.Sequential()
        if stride != 1 or inner != outer:
            self.shortcut = torch.nn.Sequential(
                torch.nn.Conv2d(inner, outer, 1, stride, bias=False), torch.nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inside)) + self.shortcut(x))


class ResNet(torch.nn.Module):
    def __init__(self, classes: int, width: int = 16, blocks: int = 1) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, width, 3, padding=1, bias=False), torch.nn.BatchNorm2d(width), torch.nn.ReLU()
        )
        widths = [width, width, 2 * width, 4 * width]
        self.stages = torch.nn.Sequential(
            *(
                Block(inner if number == 0 else outer, outer, 2 if number == 0 and outer > width else 1)
                for inner, outer in pairwise(widths)
                for number in range(blocks)
            )
        )
        self.head = torch.nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))
