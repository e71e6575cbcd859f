"""Trains one epoch from a DataLoader of torch's that the state has, under the commit rule, and prints its samples."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import farandole as fd

SAMPLES, BATCH_SIZE = 16, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--divided", action="store_true")
    parser.add_argument("--has-sampler", action="store_true", help="the state has the sampler by itself, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    data = torch.arange(float(SAMPLES)).unsqueeze(1)
    sampler = fd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, BATCH_SIZE, sampler=sampler if options.divided else None)
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model.named_parameters())
    values = {"sampler": sampler} if options.has_sampler else {}
    state = fd.elastic.TorchState(model, optimizer, loader=loader, **values)

    @fd.elastic.run
    def train(state: Any) -> None:
        for number, x in enumerate(state.loader):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            sampler.record_batch(number, BATCH_SIZE)
            print("trained", *map(int, x.flatten()), flush=True)
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
