"""A loop body of the gallery as the job of a chaos run: more steps, as fast as it is told, and records of what the
tensors really hold. The body's script knows nothing of this."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from farandole.testing.faults.bringing import Orders

SAMPLES, BATCH, SEED, EPOCHS = 1812, 12, 5, 3
ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--body", required=True, help="a name in the gallery's catalogue")
    parser.add_argument("--pace", type=Path, help="a file: milliseconds that a step waits; read in each step")
    parser.add_argument("--records", required=True)
    options = parser.parse_args()
    train(options, Orders(options.records))  # before the first import that takes its time


def train(options: argparse.Namespace, orders: Orders) -> None:
    import time
    import types
    from typing import Any

    import torch

    sys.path.insert(0, str(ROOT))
    import farandole as fd
    from farandole.base.liveness.status_reporting import report_progress
    from farandole.testing.quick_start import without_compiler
    from farandole.testing.step_records import Records
    from tests.gallery.catalogue import BODIES, FOLDER
    from tests.gallery.record import record

    torch.set_num_threads(1)
    without_compiler()
    records = Records(options.records)
    body = BODIES[options.body]
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=body.path, __builtins__=__builtins__)
    hand_out = fd.elastic.DataLoader.__next__

    def next_batch(loader: fd.elastic.DataLoader) -> Any:
        state = script.__dict__["state"]
        if applied not in state.after_step:
            state.after_step.insert(0, applied)
        batch = hand_out(loader)
        wait()
        records.before_step(state, [] if loader.batch.is_dummy else batch[-1].tolist())
        orders.check()
        return batch

    def applied() -> None:
        records.after_step(script.__dict__["state"], is_counted=False)

    def wait() -> None:
        began = time.monotonic()
        while options.pace is not None:
            left_s = float(options.pace.read_text()) / 1e3 - (time.monotonic() - began)
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.01))
            report_progress()  # the step timeout is not for what the pace asks

    fd.elastic.DataLoader.__next__ = next_batch  # type: ignore[method-assign]
    os.environ.update(GALLERY_SAMPLES=str(SAMPLES), GALLERY_EPOCHS=str(EPOCHS))
    sys.argv = [body.path, *body.arguments]
    sys.path.insert(0, str(FOLDER))
    sys.modules["__main__"] = script
    exec(compile(Path(body.path).read_text(), body.path, "exec", dont_inherit=True), script.__dict__)
    records.at_end(script.__dict__["state"], record=record(script.__dict__, body.path))


if __name__ == "__main__":
    main()
