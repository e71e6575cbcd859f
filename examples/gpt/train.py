"""Train a small GPT, character by character, on the sources of Python's standard library, and let it write some.

python train.py                                       one worker
farandole run -np 2 python train.py                   two workers, elastic: kill one, and see
farandole run -np 2 python train.py --bf16            forward and backward passes in bfloat16, parameters in float32
farandole run -np 2 --checkpoint DIR python train.py  the same command continues a job that was lost as a whole
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd


def library(characters: int) -> str:
    """The beginning of the sources of the standard library: real text, which is there wherever Python is."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = ""
    for file in files:
        text += file.read_text(errors="ignore").encode("ascii", "ignore").decode()
        if len(text) >= characters:
            break
    return text[:characters]


class Text(torch.utils.data.Dataset):
    """Pieces of a text: the characters as numbers, and for each the one that comes next."""

    def __init__(self, numbers: torch.Tensor, length: int) -> None:
        self.numbers, self.length = numbers, length

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.numbers[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = torch.nn.LayerNorm(width)
        self.queries_keys_values = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.before_network = torch.nn.LayerNorm(width)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=2)
        q, k, v = (part.view(count, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(count, length, width))
        return x + self.network(self.before_network(x))


class GPT(torch.nn.Module):
    def __init__(self, characters: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.length = length
        self.characters = torch.nn.Embedding(characters, width)
        self.positions = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, characters, bias=False)
        for embedding in (self.characters, self.positions):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        positions = self.positions(torch.arange(numbers.shape[1], device=numbers.device))
        return self.head(self.norm(self.blocks(self.characters(numbers) + positions)))

    @torch.no_grad()
    def generate(self, numbers: torch.Tensor, count: int) -> torch.Tensor:
        """The numbers of a text, continued by `count` more."""
        for _ in range(count):
            logits = self(numbers[:, -self.length :])[:, -1].float()
            drawn = torch.multinomial(F.softmax(logits, dim=1), 1)
            numbers = torch.cat([numbers, drawn], dim=1)
        return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=4)
    add("--global-batch-size", type=int, default=32, help="pieces of text in a step, over all workers")
    add("--text", type=int, default=400_000, help="characters of the text; a tenth of them is for the evaluation")
    add("--length", type=int, default=64, help="characters of a piece")
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--layers", type=int, default=4)
    add("--lr", type=float, default=2e-3)
    add("--bf16", action="store_true", help="compute in bfloat16 by torch.autocast")
    add("--write", type=int, default=300, help="characters that the trained model writes")
    add("--save", type=Path, help="a file for the trained model, written after each epoch")
    options = parser.parse_args()

    torch.manual_seed(0)
    fd.init()
    device = fd.device()
    text = library(options.text)
    alphabet = sorted(set(text))
    numbers = torch.tensor([alphabet.index(character) for character in text])
    trained = len(numbers) * 9 // 10
    loader = fd.elastic.DataLoader(Text(numbers[:trained], options.length), options.global_batch_size, seed=0)
    evaluation = fd.elastic.EvalLoader(Text(numbers[trained:], options.length), batch_size=64)

    shape = {name: getattr(options, name) for name in ("length", "width", "heads", "layers")}
    model = GPT(len(alphabet), **shape).to(device)
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1))
    steps = options.epochs * len(loader)
    warm_up = max(1, steps // 20)

    def rate(step: int) -> float:
        """The learning rate as a part of --lr: it grows for a while, and then falls along a cosine."""
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)

    def precision() -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.bf16)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision():
            return F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())

    def evaluate() -> float:
        """The mean loss over all pieces; each worker computes some, and the mean weighs them by their number."""
        with torch.no_grad():
            total = sum(loss_of(x, y).item() * len(x) for x, y in evaluation)
        return fd.mean(total / max(1, evaluation.samples), weight=evaluation.samples)

    def write(path: str) -> None:
        torch.save({"model": model.state_dict(), "alphabet": alphabet, "shape": shape}, path)

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
                scheduler.step()
            result = evaluate()
            if fd.rank() == 0:
                print(f"epoch {epoch + 1:3d}   loss on unseen text {result:.3f}   workers {fd.size()}", flush=True)
            if options.save is not None:
                state.save_once(write, options.save)
        return result

    train(state)
    if fd.rank() == 0:
        beginning = torch.tensor([[alphabet.index("\n")]], device=device)
        with precision():
            written = model.generate(beginning, options.write)[0].tolist()
        print("".join(alphabet[number] for number in written), flush=True)


if __name__ == "__main__":
    main()
