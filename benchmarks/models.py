"""The four models that step times are measured with, their data and their losses. Short definitions of our own."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

_TEXT_BYTES = 1 << 20
_CONTEXT = 64  # bytes that the GPT sees


@dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and how.

    label  for tables and plots
    build  the model, from torch's random numbers
    data   inputs and targets; batches of both go to the loss
    batch  samples of one worker in one step: few, so that a step takes less than a second on one thread
    small  still fewer, as where a fixed global batch is divided among many workers
    """

    label: str
    build: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    batch: int
    small: int

    @staticmethod
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cross entropy; of each place in the text for the GPT."""
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


class Items(Dataset[tuple[torch.Tensor, ...]]):
    """The same data without batched access, as most data sets are: torch fetches each sample by itself."""

    def __init__(self, data: TensorDataset) -> None:
        self._tensors = data.tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self._tensors)


def mlp() -> nn.Module:
    """0.7 M parameters in 6 tensors."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def deep() -> nn.Module:
    """25 M parameters in 102 tensors."""
    layers = [module for _ in range(49) for module in (nn.Linear(707, 707), nn.ReLU())]
    return nn.Sequential(nn.Linear(784, 707), nn.ReLU(), *layers, nn.Linear(707, 10))


def resnet() -> nn.Module:
    """ResNet-18 for images of 32 x 32: 11 M parameters in 62 tensors. The first layers are those that are usual
    for small images: a convolution of 3 x 3, and no pooling."""
    stages, channels = [], 64
    for width in (64, 128, 256, 512):
        stages += [_Residual(channels, width, stride=1 if width == 64 else 2), _Residual(width, width, stride=1)]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(_convolution(3, 64, 3, 1), nn.ReLU(), *stages, *head)


def gpt() -> nn.Module:
    """A GPT on bytes: 10 M parameters in 99 tensors."""
    return _GPT(width=320, layers=8, heads=5)


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(channels, width, 3, stride), _convolution(width, width, 3, 1)
        is_same = channels == width and stride == 1
        self.short = nn.Identity() if is_same else _convolution(channels, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.short(x) + self.second(F.relu(self.first(x))))


def _convolution(channels: int, width: int, size: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class _GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(_CONTEXT, width)
        self.blocks = nn.Sequential(*[_Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bytes(x) + self.places.weight[: x.shape[1]]
        return self.head(F.layer_norm(self.blocks(x), x.shape[-1:]))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        qkv = self.to_qkv(x).view(samples, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.from_heads(seen.transpose(1, 2).reshape(samples, length, width))


def _vectors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 784, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (4096, 1), generator=generator))


def _images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 3, 32, 32, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (1024, 1), generator=generator))


def _text() -> TensorDataset:
    """The source of Python's standard library, as much of it as makes a megabyte."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > _TEXT_BYTES:
            break
    codes = torch.frombuffer(text, dtype=torch.uint8).long()
    pieces = codes[: (len(codes) - 1) // _CONTEXT * _CONTEXT + 1]
    return TensorDataset(pieces[:-1].view(-1, _CONTEXT), pieces[1:].view(-1, _CONTEXT))


TASKS = {
    "mlp": Task("MLP 0.7 M", mlp, _vectors, batch=64, small=16),
    "resnet": Task("ResNet-18 11 M", resnet, _images, batch=4, small=1),
    "gpt": Task("GPT 10 M", gpt, _text, batch=4, small=1),
    "deep": Task("50 layers 25 M", deep, _vectors, batch=64, small=16),
}
