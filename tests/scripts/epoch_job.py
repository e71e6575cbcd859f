"""Three epochs in Horovod's style, over hosts that change: a slot goes in the first, comes back in the second, and in
the third a worker is killed. Records the samples that each commit was for.

Rank 0 writes the file that the job's discovery script prints; so everything happens at a known batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import farandole as fd

SAMPLES, BATCH_SIZE, BATCHES_PER_COMMIT = 1000, 10, 3
HOSTS_CHANGE = {0: (3, "localhost:2"), 1: (2, "localhost:3")}
"""In this epoch, while there are so many workers: the hosts from then on."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=Path, required=True)
    parser.add_argument("--killed", type=Path, required=True, help="made by the worker that kills itself")
    parser.add_argument("--records")
    options = parser.parse_args()
    file = os.open(Path(options.records) / f"worker-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    fd.init()
    dataset = torch.arange(SAMPLES)
    sampler = fd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model.named_parameters())
    state = fd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
    trained: list[int] = []

    def commit() -> None:
        try:
            state.commit()
        finally:  # saving comes first, whatever is raised then
            line = {"epoch": state.epoch, "ids": list(trained), "size": fd.size(), "processed": sampler.processed_num}
            os.write(file, json.dumps(line).encode() + b"\n")
            trained.clear()

    @fd.elastic.run
    def train(state: Any) -> int:
        trained.clear()
        while state.epoch < 3:
            for batch_idx, batch in enumerate(loader):
                if state.epoch == 2 and state.batch == 8 and fd.rank() == 1 and not options.killed.exists():
                    options.killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)  # with two batches that were not committed
                optimizer.zero_grad()
                model(batch.float().unsqueeze(1) / SAMPLES).square().mean().backward()
                sampler.record_batch(batch_idx, BATCH_SIZE)
                optimizer.step()
                trained.extend(batch.tolist())
                state.batch += 1
                if state.batch % BATCHES_PER_COMMIT == 0:
                    commit()
                size, hosts = HOSTS_CHANGE.get(state.epoch, (0, ""))
                while state.batch >= 7 and fd.size() == size:
                    if fd.rank() == 0:
                        options.hosts.write_text(hosts)
                    commit()  # until it raises HostsUpdatedInterrupt
                    time.sleep(0.02)
            commit()
            state.epoch, state.batch = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)
            state.commit()
        return state.epoch

    assert train(state) == 3
    weights = [parameter.tolist() for parameter in model.parameters()]
    assert fd.allgather_object(weights) == [weights] * fd.size()


if __name__ == "__main__":
    main()
