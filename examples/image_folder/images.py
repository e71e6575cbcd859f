"""Images in folders, one folder for each class, as ImageNet has them: reading, augmenting, and making some of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SUFFIXES = {".ppm", ".png", ".jpg", ".jpeg"}
TESTED = 5  # of the images that are made, each fifth one is for the evaluation


def make_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits as image files: folder/train/3/0012.ppm. All workers may call this
    at once: each writes to a folder of its own, and the first that has finished gives it the name."""
    if folder.exists():
        return
    from sklearn.datasets import load_digits

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    data = load_digits()
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        path = temporary / ("val" if number % TESTED == 0 else "train") / str(label) / f"{number:04d}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        gray = np.kron(image * 255 / 16, np.ones((2, 2))).round().astype(np.uint8)
        write_ppm(path, np.stack([gray] * 3, axis=2))
    try:
        temporary.rename(folder)
    except OSError:  # another worker was faster
        shutil.rmtree(temporary)


def write_ppm(path: Path, pixels: np.ndarray) -> None:
    """Write an image, height x width x 3 bytes, in the format that needs no library."""
    path.write_bytes(b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0]) + pixels.tobytes())


def read_image(path: str) -> torch.Tensor:
    """Return an image as 3 x height x width numbers from 0 to 1."""
    if path.endswith(".ppm"):
        header, _, pixels = Path(path).read_bytes().partition(b"\n")
        _, width, height, _ = header.split()
        array = np.frombuffer(pixels, dtype=np.uint8).reshape(int(height), int(width), 3)
    else:
        from PIL import Image  # pip install pillow

        array = np.asarray(Image.open(path).convert("RGB"))
    return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255


class ImageFolder(torch.utils.data.Dataset):
    """Images and the numbers of their classes, which are the sorted names of the folders."""

    def __init__(self, folder: Path, size: int, augment: bool = False, flip: bool = False) -> None:
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.files = [
            (str(path), number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        self.size, self.augment, self.flip = size, augment, flip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = resized(read_image(path), self.size)
        if self.augment:
            image = augmented(image, self.flip)
        return (image - 0.45) / 0.25, label


def resized(image: torch.Tensor, size: int) -> torch.Tensor:
    """Return the square in the middle of the image, with `size` pixels on each side."""
    _, height, width = image.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[:, top : top + side, left : left + side]
    if side == size:
        return square
    return F.interpolate(square[None], size=(size, size), mode="bilinear", antialias=True)[0]


def augmented(image: torch.Tensor, flip: bool) -> torch.Tensor:
    """Return the image, moved by a few pixels, brighter or darker, and mirrored if it may be."""
    border = max(1, image.shape[1] // 8)
    padded = F.pad(image[None], [border] * 4, mode="replicate")[0]
    top, left = torch.randint(0, 2 * border + 1, (2,)).tolist()
    image = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    if flip and torch.rand(()) < 0.5:
        image = image.flip(2)
    return (image * (0.8 + 0.4 * torch.rand(()))).clamp(0, 1)
