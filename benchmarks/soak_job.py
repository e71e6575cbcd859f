"""What trains in a soak run: a small model. Each sample takes a moment, as on a device beside the processor."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from farandole.testing.quick_start import without_compiler

SAMPLES, BATCH, SEED = 6000, 60, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample-ms", type=float, default=0.5, help="what each takes beside the processor's work")
    parser.add_argument("--stop", type=Path, required=True, help="end after the epoch in which this file is there")
    parser.add_argument("--records", required=True)
    options = parser.parse_args()

    import torch
    import torch.nn.functional as F

    import farandole as fd
    from farandole.testing.step_records import Records

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    numbers = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(numbers, numbers.sum(dim=1, keepdim=True), torch.arange(SAMPLES))
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    loader = fd.elastic.DataLoader(dataset, BATCH, seed=SEED)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(10**9):
            for x, y, indices in loader:
                ids = [] if loader.batch.is_dummy else indices.tolist()
                records.before_step(state, ids)
                time.sleep(len(ids) * options.sample_ms / 1e3)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if optimizer.step():
                    records.after_step(state)
            if fd.any(options.stop.exists()):
                return

    train(state)
    records.at_end(state)


if __name__ == "__main__":
    main()
