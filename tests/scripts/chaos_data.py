"""The data set of chaos_job.py: a function of the index. Each sample carries its index, which the records show."""

from __future__ import annotations

import torch


class Numbers(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.linspace(-1, 1, 4, dtype=torch.float64) * (index / self._samples)
        return x, x.sum(dim=0, keepdim=True).sin() + 0.5, index
