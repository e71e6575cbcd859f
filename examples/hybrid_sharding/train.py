"""Train a small network on scikit-learn's handwritten digits, divided among workers by FSDP2, with replicas that come
and go.

python train.py                                  one worker
farandole run -np 4 python train.py              two replicas of two shards, elastic: kill a worker, and see
farandole run -np 2 python train.py --checkpoint DIR      no replica: what a worker had is read from DIR
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import farandole as fd
from farandole.sharding import ShardedState

TRAIN, BATCH = 1440, 48  # images, and those of one step over all workers


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels, and what they show."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images).reshape(-1, 64) / 16.0, torch.tensor(data.target)


def network() -> torch.nn.Sequential:
    """The same each time: shards of a model that is made anew must fit."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 99), torch.nn.LayerNorm(99), torch.nn.Tanh(), torch.nn.Linear(99, 10)]
    return torch.nn.Sequential(*layers).double()


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """For each world anew: groups of the last one are of no use any more."""
    model = network()
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This worker's part of the mean over the global batch. FSDP takes the mean over the workers, of which each may
    have another number of images."""
    mine = slice(*(len(images) * end // fd.size() for end in (fd.rank(), fd.rank() + 1)))
    losses = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
    return losses * fd.size() / len(images)


def accuracy_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--checkpoint", help="a folder for a checkpoint after each epoch")
    parser.add_argument("--save", help="a file for the trained parameters")
    options = parser.parse_args()

    torch.set_num_threads(1)
    fd.init(default_group=True)
    images, labels = digits()
    state = ShardedState(build, options.shards, options.checkpoint, batch=0)

    @fd.elastic.run
    def train(state: ShardedState) -> None:
        model, optimizer = state.model, state.optimizer
        in_epoch = TRAIN // BATCH
        if fd.rank() == 0:
            print(f"batch {state.batch:4d}   {state.replicas} replicas of {state.shards} shards", flush=True)
        while state.batch < options.epochs * in_epoch:
            epoch, place = divmod(state.batch, in_epoch)
            order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
            chosen = order[place * BATCH : (place + 1) * BATCH]
            optimizer.zero_grad()
            loss_of(model, images[chosen], labels[chosen]).backward()
            optimizer.step()
            state.batch += 1
            if state.batch % in_epoch == 0:
                accuracy = accuracy_of(model, images[TRAIN:], labels[TRAIN:])
                if options.checkpoint:
                    state.save_checkpoint()
                if fd.rank() == 0:
                    print(f"epoch {epoch + 1:3d}   accuracy {accuracy:.2%}   workers {fd.size()}", flush=True)
            state.commit()

    train(state)
    if options.save:
        whole = {name: _whole(value) for name, value in state.model.state_dict().items()}
        if fd.rank() == 0:
            torch.save(whole, options.save)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    main()
