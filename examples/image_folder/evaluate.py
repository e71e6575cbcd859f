"""Evaluate a model that train.py has saved, with torch alone: Farandole need not be installed.

python evaluate.py resnet.pt --data digits
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from images import ImageFolder
from resnet import ResNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("saved", type=Path, help="the file of train.py --save")
    parser.add_argument("--data", type=Path, default=Path("digits"), help="the folder of images")
    options = parser.parse_args()

    saved = torch.load(options.saved, map_location="cpu")
    model = ResNet(**saved["shape"])
    model.load_state_dict(saved["model"])
    model.eval()
    images = ImageFolder(options.data / "val", saved["size"])
    right = 0
    with torch.no_grad():
        for x, y in torch.utils.data.DataLoader(images, batch_size=100):
            right += (model(x).argmax(1) == y).sum().item()
    print(f"accuracy {right / len(images):.2%} of {len(images)} images", flush=True)


if __name__ == "__main__":
    main()
