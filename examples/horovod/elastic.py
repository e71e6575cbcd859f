"""The training of train.py as an elastic script of Horovod, without a word of Farandole: a worker may be lost or join.

horovodrun -np 2 --min-np 1 python elastic.py      Horovod itself, or the package farandole-horovod
farandole run -np 2 --horovod python elastic.py    Farandole
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from train import TRAINED, Net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batches-per-commit", type=int, default=5)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    train_dataset = TensorDataset(images[:TRAINED], labels[:TRAINED])
    train_sampler = hvd.elastic.ElasticSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def on_state_reset() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch <= args.epochs:
            model.train()
            for number, (data, target) in enumerate(train_loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data), target)
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(number, args.batch_size)
                if number % args.batches_per_commit == 0:
                    state.commit()
            model.eval()
            mine = slice(TRAINED + hvd.rank(), None, hvd.size())
            with torch.no_grad():
                right = (model(images[mine]).argmax(1) == labels[mine]).float().mean()
            accuracy = hvd.allreduce(right, name="accuracy")
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: accuracy {accuracy.item():.2%}, {hvd.size()} workers", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, epoch=1, sampler=train_sampler)
    state.register_reset_callbacks([on_state_reset])
    train(state)


if __name__ == "__main__":
    main()
