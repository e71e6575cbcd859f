"""Train a small GPT, character by character, on the sources of Python's standard library, divided among workers by
FSDP2: each has a part of every parameter, of its gradient, and of its optimizer state.

python train.py                       one worker
farandole run -np 4 python train.py   four workers, elastic: kill one, and see
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import farandole as fd

UNSEEN = 64  # pieces of text for the evaluation


class GPT(torch.nn.Module):
    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = torch.nn.Embedding(characters, width)
        self.positions = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, characters))
        for embedding in (self.characters, self.positions):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        length = numbers.shape[1]
        future = torch.nn.Transformer.generate_square_subsequent_mask(length)
        x = self.characters(numbers) + self.positions(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=future, is_causal=True)
        return self.head(x.flatten(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=2)
    add("--global-batch-size", type=int, default=32, help="pieces of text in a step, over all workers")
    add("--text", type=int, default=40_000, help="characters of the text")
    add("--length", type=int, default=32, help="characters of a piece")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--lr", type=float, default=5e-3)
    add("--save", type=Path, help="a file for the trained parameters, whole")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same parameters on all workers, before they are divided
    fd.init(default_group=True)  # fully_shard() divides among the workers of the default group
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(errors="ignore") for file in files).encode("ascii", "ignore")[: options.text]
    alphabet = sorted(set(text))
    numbers = torch.tensor([alphabet.index(character) for character in text])
    pieces = (len(numbers) - 1) // options.length
    x, y = (numbers[start : start + pieces * options.length].view(pieces, -1) for start in (0, 1))
    loader = fd.elastic.DataLoader(TensorDataset(x[UNSEEN:], y[UNSEEN:]), options.global_batch_size, seed=0)

    model = GPT(len(alphabet), options.length, options.width, options.layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)  # torch's own, for the divided parameters
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y.flatten())

    def evaluate() -> float:
        """The mean loss over unseen text. Workers gather parameters in each forward pass, so all have as many: one."""
        mine = slice(fd.rank(), UNSEEN, fd.size())
        with torch.no_grad():
            loss = loss_of(x[:UNSEEN][mine], y[:UNSEEN][mine]).item()
        return fd.mean(loss, weight=len(range(*mine.indices(UNSEEN))))

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> float:
        result = math.nan
        for epoch in loader.epochs(options.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if optimizer.step() and state.step % 10 == 0:
                    state.log(loss=loss.item())
            result = evaluate()
            if fd.rank() == 0:
                mine = sum(each.to_local().numel() for each in model.parameters() if isinstance(each, DTensor))
                whole = sum(each.numel() for each in model.parameters())
                print(
                    f"epoch {epoch + 1:3d}   loss on unseen text {result:.3f}   workers {fd.size()}, of which this one "
                    f"has {mine:,} of {whole:,} parameters",
                    flush=True,
                )
        return result

    train(state)
    if options.save is not None:
        whole = {name: each.full_tensor() for name, each in model.state_dict().items()}  # all workers take part
        if fd.rank() == 0:
            torch.save(whole, options.save)


if __name__ == "__main__":
    main()
