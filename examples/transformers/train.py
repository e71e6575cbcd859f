"""Train a tiny GPT-2, made from its configuration, on text of Python's standard library, with as many workers as there
are.

python train.py                                  one worker
farandole run -np 3 python train.py              three workers, elastic: kill one, and see

What differs from any other script for transformers is marked with (*).
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import torch
import transformers

import farandole as fd
from farandole.frameworks.transformers import Trainer


class Text(torch.utils.data.Dataset):
    """Pieces of the text, a byte a token; some are cut short, and padded, so that batches differ in their tokens."""

    def __init__(self, text: bytes, piece: int = 64) -> None:
        self.pieces = [torch.tensor(list(text[i : i + piece])) for i in range(0, len(text) - piece, piece)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.pieces[index].clone()
        labels[len(labels) - index % 16 :] = -100
        return {"input_ids": self.pieces[index], "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("out"), help="the folder of transformers' own files")
    parser.add_argument("--save", type=Path, help="write the parameters to this file")
    options = parser.parse_args()

    torch.set_num_threads(1)
    transformers.set_seed(0)
    fd.init()  # (*)
    text = inspect.getsource(argparse).encode("ascii", "replace")
    train, evaluate = Text(text[:60_000]), Text(text[60_000:80_000])
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    loader = fd.elastic.DataLoader(  # (*)
        train, global_batch_size=32, seed=0, collate_fn=transformers.default_data_collator
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(options.output),
        num_train_epochs=options.epochs,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_loader=loader, eval_dataset=evaluate)  # (*) farandole's
    trainer.train()
    print(f"worker {fd.rank()}: {trainer.state.global_step} steps", flush=True)
    if options.save is not None and fd.rank() == 0:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
