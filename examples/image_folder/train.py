"""Train a ResNet on a folder of images, as ImageNet has them: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg. Without
--data it makes such a folder of scikit-learn's handwritten digits, and trains on that.

python train.py                                        one worker
farandole run -np 2 python train.py                    two workers, elastic: kill one, and see
farandole run -np 2 python train.py --resume           continue after the last whole epoch of --save
python evaluate.py resnet.pt                           evaluate the result, with torch alone
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from images import ImageFolder, make_digits
from resnet import ResNet

import farandole as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="a folder of images; without it one is made of digits, in ./digits")
    add("--size", type=int, default=16, help="pixels of an image on each side")
    add("--flip", action="store_true", help="also train on mirrored images, which digits do not stand")
    add("--epochs", type=int, default=10)
    add("--global-batch-size", type=int, default=48, help="images of a step, over all workers")
    add("--lr", type=float, default=0.1)
    add("--width", type=int, default=16)
    add("--num-workers", type=int, default=0, help="loader processes of each worker")
    add("--save", type=Path, default=Path("resnet.pt"), help="a file that is written after each epoch")
    add("--resume", action="store_true", help="continue from the file of --save, if there is one")
    options = parser.parse_args()

    torch.manual_seed(0)
    fd.init()
    device = fd.device()
    if options.data is None:
        options.data = Path("digits")
        make_digits(options.data)
    images = ImageFolder(options.data / "train", options.size, augment=True, flip=options.flip)
    loader = fd.elastic.DataLoader(
        images, options.global_batch_size, seed=0, num_workers=options.num_workers, min_local_batch=2
    )
    unseen = fd.elastic.EvalLoader(ImageFolder(options.data / "val", options.size), batch_size=100)

    shape = {"classes": len(images.classes), "width": options.width}
    model = ResNet(**shape).to(device)
    optimizer = fd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    )
    steps = options.epochs * len(loader)

    def rate(step: int) -> float:
        """The learning rate as a part of --lr: it grows for a fifth of the training, and then falls along a cosine."""
        done = step / steps
        return done / 0.2 if done < 0.2 else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - 0.2) / 0.8))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler}
    best = 0.0
    if options.resume and options.save.exists():
        saved = torch.load(options.save, map_location=device)
        best = saved["best"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    state = fd.elastic.TorchState(**parts, best=best)

    def accuracy() -> float:
        """The part of the images that are recognised; each worker looks at some of them."""
        model.eval()
        with torch.no_grad():
            right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in unseen)
        model.train()
        return fd.mean(right / max(1, unseen.samples), weight=unseen.samples)

    def write(path: str) -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "best": state.best, "shape": shape, "size": options.size}, path)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for epoch in loader.epochs(options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x.to(device)), y.to(device), label_smoothing=0.1)
                loss.backward()
                if optimizer.step():
                    state.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
                scheduler.step()
            reached = accuracy()
            state.best = max(state.best, reached)
            if fd.rank() == 0:
                print(
                    f"epoch {epoch + 1:3d}   accuracy {reached:.2%}   best {state.best:.2%}   workers {fd.size()}",
                    flush=True,
                )
            state.save_once(write, options.save)

    train(state)
    if fd.rank() == 0:
        print(f"written: {os.path.abspath(options.save)}", flush=True)


if __name__ == "__main__":
    main()
